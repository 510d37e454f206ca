// Reads a file of the caller's, so many blocks at a time: prints the seconds. bench/python_reads.py
// does the same from Python.
//   bench_file_reads FILE BLOCK_BYTES AT_ONCE READS
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "ferry/streams.h"
#include "ferry/user_files.h"

namespace {

using namespace ferry;

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

double read_all(const char* path, int64_t block_bytes, int64_t at_once, int64_t reads) {
    const auto executor = make_thread_executor();
    const auto files = aio::UserFiles::open({}, *executor);
    const aio::FileNumber file = files->add(path, aio::FileUse::read);
    const int64_t blocks = files->size_bytes(file) / block_bytes;
    // As Python's side has it: on huge pages, and touched.
    constexpr size_t kHugePage = size_t{2} << 20;
    const auto bytes =
        (static_cast<size_t>(block_bytes * at_once) + kHugePage - 1) / kHugePage * kHugePage;
    const std::unique_ptr<void, Free> memory(std::aligned_alloc(kHugePage, bytes));
    madvise(memory.get(), bytes, MADV_HUGEPAGE);
    std::memset(memory.get(), 0, bytes);
    auto* const first = static_cast<std::byte*>(memory.get());
    std::vector<aio::Operation> operations(static_cast<size_t>(at_once));
    int64_t begun = 0, ended = 0;
    const auto submit = [&](aio::Operation& operation) {
        const auto index = &operation - operations.data();
        operation = {.slot = file,
                     .offset = begun++ % blocks * block_bytes,
                     .buffer = {first + index * block_bytes, static_cast<size_t>(block_bytes)}};
        FERRY_CHECK(files->try_submit(operation), "operations_max holds all of them");
    };
    const auto start = std::chrono::steady_clock::now();
    for (aio::Operation& operation : operations)
        if (begun < reads) submit(operation);
    while (ended < reads) {
        aio::Operation* const one = files->poll();
        if (!one) {
            executor->wait(kForever);
            continue;
        }
        if (one->state != aio::State::done) throw aio::to_error(*files, *one);
        ++ended;
        if (begun < reads) submit(*one);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) try {
    hold_standard_streams();
    if (argc != 5) {
        fprintf(stderr, "bench_file_reads FILE BLOCK_BYTES AT_ONCE READS\n");
        return 2;
    }
    printf("%.9f\n", read_all(argv[1], atoll(argv[2]), atoll(argv[3]), atoll(argv[4])));
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
}
