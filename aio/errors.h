// The meaning of each errno: the one place that decides.
#pragma once

#include <cstdint>
#include <string>

#include "backend.h"

namespace ferry::aio {

enum class ErrorClass : uint8_t {
    retry,  // nothing is wrong: ask again, a bounded number of times
    bug,    // the request was built wrong, after our own checks
    fail,   // the world's failure: the operation ends with this errno
};

ErrorClass classify(Verb verb, int error) noexcept;
// `error`, or EFBIG for a write up to `end` where the process may not write so far. A limit lowered
// since open() may lie inside a block. It cuts a direct write to a size that O_DIRECT refuses as
// EINVAL, and any other write to one that never makes a block's progress.
int cause_of(Verb verb, int error, int64_t end) noexcept;
// RLIMIT_FSIZE. Writing beyond it would not only fail, it would send SIGXFSZ.
int64_t file_size_limit() noexcept;
const char* name_of(Verb verb) noexcept;
// The remedy that a user has.
const char* remedy_for(int error) noexcept;
// The limit of the process that gave it, with its value; empty: none.
std::string limit_of(int error);
Trouble trouble_of(int error);  // does_not_fit where there is such a limit, else io
// "<what>: <the errno's words>", with that limit and the remedy.
Problem problem_of(std::string what, std::string where, int error);

// The error of a transfer that ended with that errno.
Error transfer_error(std::string what, std::string where, int error, int64_t done_bytes,
                     int64_t size_bytes);

}  // namespace ferry::aio
