// Files of the caller's, and the executor that they stand on.
#include <memory>
#include <vector>

#include "ferry/user_files.h"
#include "handles.h"
#include "options.h"
#include "pollable.h"
#include "transfers.h"

namespace ferry::capi {
namespace {

struct Files {
    static constexpr HandleKind kKind = HandleKind::files;
    // Destroyed from below: the files wait for what they were given.
    std::unique_ptr<PollableExecutor> executor = std::make_unique<PollableExecutor>();
    std::vector<aio::Operation> transfers{};
    std::vector<aio::Operation*> free{};
    std::unique_ptr<aio::UserFiles> files{};
};

std::unique_ptr<Files> create(const ferry_files_options& given) {
    check_choice("buffered", given.buffered, 1);
    aio::UserFilesOptions options{.backend = backend_of(given.backend)};
    if (given.block_bytes) options.block_bytes = given.block_bytes;
    if (given.queue_depth) options.queue_depth = given.queue_depth;
    if (given.operations_max) options.operations_max = given.operations_max;
    if (given.files_max) options.files_max = given.files_max;
    options.direct = given.buffered == 0;
    auto made = std::make_unique<Files>();
    made->files = aio::UserFiles::open(options, *made->executor);
    made->transfers.resize(static_cast<size_t>(options.operations_max));
    for (aio::Operation& transfer : made->transfers) made->free.push_back(&transfer);
    return made;
}

void check_open(const Files& files, uint32_t file) {
    if (files.files->is_open(file)) return;
    refuse_argument("the file is not open", std::to_string(file),
                    "numbers of ferry_files_open that were not closed");
}

ferry_status transfer(const char* function, ferry_files* handle, aio::Kind kind, uint32_t file,
                      int64_t offset, void* buffer, int64_t bytes, int32_t priority, uint64_t tag) {
    return with<Files>(function, handle, [&](Files& files) {
        const aio::Operation operation =
            operation_of(kind, file, offset, buffer, bytes, priority, tag);
        check_range("offset", offset, 0, kMostBytes);
        check_open(files, file);
        return submit_one(*files.files, files.free, operation);
    });
}

void complete(const char* function, Files& files, aio::Operation& operation,
              ferry_completion* completion) {
    give_outcome(function, *files.files, operation, completion);
    files.free.push_back(&operation);
}

}  // namespace
}  // namespace ferry::capi

using namespace ferry::capi;
using ferry::aio::Operation;

ferry_status ferry_files_create(const ferry_files_options* options, ferry_files** files) {
    return guarded(__func__, [&] {
        const ferry_files_options given = taken("options", options);
        check_given("files", files);
        hand_out(files, create(given));
    });
}

ferry_status ferry_files_destroy(ferry_files* files) {
    return close_handle<Files>(__func__, files);
}

ferry_status ferry_files_open(ferry_files* files, const char* path, int32_t use, uint32_t* file) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_given("path", path);
        check_given("file", file);
        check_choice("use", use, FERRY_FILE_WRITE);
        *file = mine.files->add(
            path, use == FERRY_FILE_WRITE ? ferry::aio::FileUse::write : ferry::aio::FileUse::read);
        return FERRY_OK;
    });
}

ferry_status ferry_files_open_descriptor(ferry_files* files, int32_t descriptor, uint32_t* file) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_given("file", file);
        *file = mine.files->add(descriptor);
        return FERRY_OK;
    });
}

ferry_status ferry_files_close(ferry_files* files, uint32_t file) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_open(mine, file);
        if (const int transfers = mine.files->in_flight(file); transfers > 0)
            refuse_argument("transfers of the file have not been polled", std::to_string(transfers),
                            "0");
        mine.files->remove(file);
        return FERRY_OK;
    });
}

ferry_status ferry_files_size(ferry_files* files, uint32_t file, int64_t* bytes) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_given("bytes", bytes);
        check_open(mine, file);
        *bytes = mine.files->size_bytes(file);
        return FERRY_OK;
    });
}

ferry_status ferry_files_flush(ferry_files* files, uint32_t file) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_open(mine, file);
        mine.files->flush(file);
        return FERRY_OK;
    });
}

ferry_status ferry_files_read(ferry_files* files, uint32_t file, int64_t offset, void* buffer,
                              int64_t bytes, int32_t priority, uint64_t tag) {
    return transfer(__func__, files, ferry::aio::Kind::read, file, offset, buffer, bytes, priority,
                    tag);
}

ferry_status ferry_files_write(ferry_files* files, uint32_t file, int64_t offset,
                               const void* buffer, int64_t bytes, int32_t priority, uint64_t tag) {
    return transfer(__func__, files, ferry::aio::Kind::write, file, offset,
                    const_cast<void*>(buffer),  // NOLINT: it is only read
                    bytes, priority, tag);
}

ferry_status ferry_files_wait(ferry_files* files, int64_t timeout_ms,
                              ferry_completion* completion) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_size("completion", completion);
        Operation* const operation = wait_for_one(*mine.files, *mine.executor, timeout_ms);
        if (operation == nullptr) return FERRY_AGAIN;
        complete("ferry_files_wait", mine, *operation, completion);
        return FERRY_OK;
    });
}

ferry_status ferry_files_descriptor(ferry_files* files, int32_t* descriptor) {
    return with<Files>(__func__, files, [&](Files& mine) {
        check_given("descriptor", descriptor);
        *descriptor = mine.executor->descriptor();
    });
}

ferry_status ferry_files_cancel(ferry_files* files) {
    return with<Files>(__func__, files, [](Files& mine) { mine.files->cancel_queued(); });
}
