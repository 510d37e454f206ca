#include "pollable.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "ferry/error.h"

namespace ferry::capi {

PollableExecutor::~PollableExecutor() {
    if (const int descriptor = descriptor_.load(); descriptor >= 0) ::close(descriptor);
}

int PollableExecutor::descriptor() {
    if (const int descriptor = descriptor_.load(); descriptor >= 0) return descriptor;
    const int made = ::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made < 0)
        throw Error(Trouble::io, {.what = "no descriptor to wait for transfers with",
                                  .measured = std::strerror(errno),
                                  .remedy = "close some files, or raise ulimit -n"});
    descriptor_.store(made);
    return made;
}

// The flag falls last: a wake() before that writes nothing, but what it tells of is there for the
// caller's look by then. One that has raised the flag may not have written yet: then there is
// nothing to read, and what it writes is read the next time, whatever the flag is.
void PollableExecutor::clear() noexcept {
    const int descriptor = descriptor_.load();
    if (descriptor < 0 || (!readable_.load() && !late_)) return;
    uint64_t count = 0;
    late_ = ::read(descriptor, &count, sizeof count) < 0;
    readable_.exchange(false);
}

void PollableExecutor::wake() noexcept {
    inner_->wake();
    const int descriptor = descriptor_.load();
    if (descriptor < 0 || readable_.exchange(true)) return;
    constexpr uint64_t kOne = 1;
    [[maybe_unused]] const ssize_t written = ::write(descriptor, &kOne, sizeof kOne);
}

}  // namespace ferry::capi
