// Exceptions below the C ABI, statuses and a text above it.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/bugs.h"
#include "ferry/error.h"
#include "ferry/ferry.h"

namespace ferry::capi {

// A failure with a status of its own, and no Trouble.
class Refused : public std::runtime_error {
public:
    Refused(ferry_status status, const std::string& why)
        : std::runtime_error(why), status_(status) {}
    ferry_status status() const noexcept { return status_; }

private:
    ferry_status status_;
};
// Lines of the log go to whoever the program asked for, at first to nobody (log.cc).
bool listen_to_log() noexcept;
// Throws Refused, FERRY_BUSY, within the program's callback for the log.
void check_not_logging();

[[noreturn]] void refuse_argument(std::string what, std::string measured, std::string limit);
// Throws Refused, FERRY_BUSY: a callback's call that would wait for the callback.
[[noreturn]] void refuse_busy(const std::string& what, const std::string& remedy);
// Values of an enumeration: 0 to `last`.
void check_choice(const char* name, int64_t value, int64_t last);
void check_range(const char* name, int64_t value, int64_t low, int64_t high);
void check_given(const char* name, const void* pointer);

// The status of the exception that is being handled; its text is ferry_last_error() from then on.
ferry_status status_of_exception(const char* function) noexcept;
// The same of an error that no call throws.
ferry_status keep_error(const char* function, const Error& error) noexcept;

// `body()` throws, or returns nothing, or FERRY_OK or FERRY_AGAIN: that is no failure, and may come
// often.
template <class Body>
ferry_status guarded(const char* function, const Body& body) noexcept {
    try {
        const BugsThrow here;
        check_not_logging();
        if constexpr (std::is_void_v<decltype(body())>) {
            body();
            return FERRY_OK;
        } else {
            return body();
        }
    } catch (...) {
        return status_of_exception(function);
    }
}

}  // namespace ferry::capi
