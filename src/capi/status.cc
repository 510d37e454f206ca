#include "status.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace ferry::capi {
namespace {

// Fixed, so that keeping a text cannot fail.
struct LastError {
    char text[4096];
};
thread_local LastError t_last{};

// Before any call: a library that is loaded and not used is silent as well.
[[maybe_unused]] const bool kListens = listen_to_log();

ferry_status keep(const char* function, ferry_status status, std::string_view text) noexcept {
    char* end = t_last.text;
    const auto add = [&end](std::string_view part) {
        const size_t room = sizeof t_last.text - 1 - static_cast<size_t>(end - t_last.text);
        const size_t count = std::min(room, part.size());
        memcpy(end, part.data(), count);
        end += count;
    };
    add(function);
    add(": ");
    add(text);
    *end = '\0';
    return status;
}

}  // namespace

void refuse_argument(std::string what, std::string measured, std::string limit) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .measured = std::move(measured),
                                 .limit = std::move(limit),
                                 .remedy = "include/ferry/ferry.h says what the call takes"});
}

void refuse_busy(const std::string& what, const std::string& remedy) {
    throw Refused(FERRY_BUSY, what + "\n  do:       " + remedy);
}

void check_choice(const char* name, int64_t value, int64_t last) {
    check_range(name, value, 0, last);
}

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    refuse_argument(std::string(name) + " is out of range", std::to_string(value),
                    std::to_string(low) + " to " + std::to_string(high));
}

void check_given(const char* name, const void* pointer) {
    if (!pointer) refuse_argument(std::string(name) + " is NULL", "NULL", "an address");
}

ferry_status keep_error(const char* function, const Error& error) noexcept {
    return keep(function, error.exit_code(), error.what());
}

ferry_status status_of_exception(const char* function) noexcept {
    try {
        throw;
    } catch (const Refused& refused) {
        return keep(function, refused.status(), refused.what());
    } catch (const Error& error) {
        return keep_error(function, error);
    } catch (const std::bad_alloc&) {
        return keep(function, FERRY_NO_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return keep(function, FERRY_INTERNAL, error.what());
    } catch (...) {
        return keep(function, FERRY_INTERNAL, "an exception of an unknown type");
    }
}

}  // namespace ferry::capi

const char* ferry_last_error(void) { return ferry::capi::t_last.text; }

const char* ferry_status_name(ferry_status status) {
    static constexpr const char* kNames[] = {
        "ok",         "internal", "usage",     "does not fit", "io",        "diverged", "rank lost",
        "bad handle", "poisoned", "no memory", "again",        "cancelled", "busy"};
    const auto index = static_cast<size_t>(status);
    return index < std::size(kNames) ? kNames[index] : "unknown";
}

const char* ferry_version(void) { return FERRY_VERSION; }
int32_t ferry_abi_version(void) { return 6; }
