// The seam to the kernel: the only thing in ferry that reads and writes storage while a run is
// going. Three implementations: uring, posix, and in tests a simulated disk.
//
// A backend belongs to one thread, the one that calls submit() and reap(); wake() alone may be
// called from any thread. The constructor may run on another thread, before the first call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/aio.h"

namespace ferry::aio {

// One request to the kernel. The buffer stays untouched until its completion was reaped.
struct Transfer {
    Verb verb = Verb::read;
    uint16_t file = 0;  // index into BackendSetup::files, or by_descriptor
    uint32_t id = 0;    // comes back in the completion; below BackendSetup::depth
    int64_t offset = 0;
    std::byte* data = nullptr;  // read and write only
    int64_t size_bytes = 0;
};

struct Completion {
    uint32_t id = 0;
    int32_t result = 0;  // bytes moved, or -errno
};

class Backend {
public:
    virtual ~Backend() = default;
    virtual std::string_view name() const noexcept = 0;
    // Takes transfers from the front and says how many; the caller offers the rest again.
    virtual int submit(std::span<const Transfer> batch) = 0;
    // Returns once something completed, at `until`, or after a wake(). A time that has passed
    // means "do not wait".
    virtual int reap(std::span<Completion> out, Nanos until) = 0;
    virtual void wake() noexcept = 0;
    virtual Nanos now() const noexcept = 0;
    virtual Nanos next_event() const noexcept { return kForever; }  // simulation only
};

struct BackendSetup {
    int path = 0, ring = 0;
    std::vector<int> files{};    // descriptors, open as long as the backend lives
    bool by_descriptor = false;  // files are none: transfers name descriptors themselves
    int depth = 32;              // transfers taken and not yet reaped
    std::vector<std::span<std::byte>> registered{};
    bool sqpoll = false, iopoll = false;  // as probed
    bool block_device = false;
    // Kernel threads among which large transfers are shared out; 1: as the kernel does it.
    int workers = 1;
};

using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendSetup&)>;

// Throws Error(io) where the kernel offers no io_uring, or no more of it.
std::unique_ptr<Backend> make_uring_backend(const BackendSetup& setup);
std::unique_ptr<Backend> make_posix_backend(const BackendSetup& setup);
// Makes backends of this kind; automatic: the best the kernel offers, named in the log. Throws io.
BackendFactory factory_of(BackendKind kind);
// Why io_uring cannot be used here; empty when it can.
std::string why_no_uring();
// Flush or discard by a plain, blocking system call: 0 or -errno.
int32_t flush_or_discard(int file, bool block_device, const Transfer& transfer) noexcept;

}  // namespace ferry::aio
