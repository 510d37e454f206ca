#include "backend.h"

#include "base/log.h"

namespace ferry::aio {

BackendFactory factory_of(BackendKind kind) {
    if (kind == BackendKind::posix) return make_posix_backend;
    const std::string trouble = why_no_uring();
    if (kind == BackendKind::uring) {
        if (!trouble.empty())
            throw Error(Trouble::io, {.what = "io_uring cannot be used: " + trouble,
                                      .where = "backend \"uring\"",
                                      .remedy = "allow it (containers' seccomp filters forbid it), "
                                                "or set the backend to \"auto\" or \"posix\""});
        return make_uring_backend;
    }
    // A ring may be refused later than the first: descriptors, locked memory.
    const auto fall_back = [](const std::string& why) {
        log_warn("aio: backend \"auto\": io_uring cannot be used (" + why + "): POSIX threads are");
    };
    if (!trouble.empty()) {
        fall_back(trouble);
        return make_posix_backend;
    }
    return [fall_back](const BackendSetup& setup) {
        try {
            return make_uring_backend(setup);
        } catch (const Error& error) {
            fall_back(error.problem().what);
            return make_posix_backend(setup);
        }
    };
}

}  // namespace ferry::aio
