// Failures as one clear error each, and the check that stops at a bug.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ferry {

// The kind of an Error. Its value is the exit code of the `ferry` program.
enum class Trouble : int {
    internal = 1,      // a bug in ferry
    usage = 2,         // configuration, command line, environment
    does_not_fit = 3,  // a budget is too small for what was asked
    io = 4,            // storage failed, or bytes came back wrong
    diverged = 5,      // NaN or Inf in loss or gradient
    rank_lost = 6,     // another rank ended, or did not take part in time
};

// One clear error: what went wrong, where, the measured value, the limit it met, and what to do.
// Empty fields are left out of the message.
struct Problem {
    std::string what;
    std::string where{};
    std::string measured{};
    std::string limit{};
    std::string remedy{};
};

class Error : public std::runtime_error {
public:
    Error(Trouble trouble, Problem problem);
    Trouble trouble() const noexcept { return trouble_; }
    const Problem& problem() const noexcept { return problem_; }
    int exit_code() const noexcept { return static_cast<int>(trouble_); }

private:
    Trouble trouble_;
    Problem problem_;
};

// A bug aborts: prints the condition, the values and the place, then calls std::abort. Stays on in
// release builds.
#define FERRY_CHECK(condition, ...) \
    (static_cast<bool>(condition) ? void(0) : ::ferry::bug(#condition __VA_OPT__(, ) __VA_ARGS__))
[[noreturn]] void bug(const char* condition, std::string_view detail = {},
                      std::source_location where = std::source_location::current());

}  // namespace ferry
