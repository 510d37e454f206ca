// Asynchronous I/O in the caller's files: any regular file or block device, at any offset, from any
// memory. Aligned transfers go around the page cache (O_DIRECT), the rest through it.
//
// Threads: one owner thread calls everything below. The ring has its own, run by the Executor.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ferry/aio.h"

namespace ferry::aio {

struct UserFilesOptions {
    BackendKind backend = BackendKind::automatic;
    int64_t block_bytes = 1 * kMiB;  // a transfer at most
    int queue_depth = 32;            // transfers in flight
    int operations_max = 256;        // submitted and not yet polled
    int files_max = 1024;            // open at a time
    bool direct = true;              // O_DIRECT, where file system and alignment allow it
};

using FileNumber = uint32_t;  // from 0, and used again
// `write` may read too: it creates the file where there is none (mode 0600) and cuts nothing off.
enum class FileUse : uint8_t { read, write };

// The rules are those of a Volume's operations: one is done when its bytes are, and a short count
// goes on. Operations on the same bytes of a file keep their order if one of them writes.
class UserFiles {
public:
    // Throws Error. `executor` must outlive it.
    static std::unique_ptr<UserFiles> open(const UserFilesOptions& options, Executor& executor);
    // Cancels what has not begun, waits for the rest, closes the files.
    ~UserFiles();
    UserFiles(const UserFiles&) = delete;
    UserFiles& operator=(const UserFiles&) = delete;

    // Throws Error: io, or usage where it is neither file nor device, or files_max are open.
    FileNumber add(const std::string& path, FileUse use);
    // A file that is open already. It is duplicated: the caller's stays the caller's.
    FileNumber add(int descriptor);
    bool is_open(FileNumber file) const noexcept;
    // Only when nothing of the file is under way and all was polled.
    void remove(FileNumber file) noexcept;
    int in_flight(FileNumber file) const noexcept;
    int64_t size_bytes(FileNumber file) const;  // now; throws io
    // Blocks until all that was polled of it is on stable storage. Throws io.
    void flush(FileNumber file);

    // Operation::slot is the file; offset, address and size are any. Throws where a read ends
    // behind the end of the file: io. False: operations_max are under way.
    [[nodiscard]] bool try_submit(Operation& operation);
    Operation* poll() noexcept;
    void cancel_queued() noexcept;
    int in_flight() const noexcept;

    std::string describe(FileNumber file) const;  // its path
    std::string_view backend_name() const noexcept;

private:
    class OnQueue;
    explicit UserFiles(std::unique_ptr<OnQueue> files);
    const std::unique_ptr<OnQueue> files_;
};

// The error of a failed operation: path, offset, size, errno and what to do.
Error to_error(const UserFiles& files, const Operation& operation);

}  // namespace ferry::aio
