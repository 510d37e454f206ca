#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>
#include <string>
#include <utility>

#include "ferry/error.h"
#include "ferry/learning_rate.h"

namespace ferry::optim {
namespace {

constexpr std::pair<Decay, std::string_view> kKinds[] = {
    {Decay::constant, "constant"},   {Decay::linear, "linear"},
    {Decay::cosine, "cosine"},       {Decay::wsd, "wsd"},
    {Decay::one_cycle, "one_cycle"}, {Decay::warmup_decay, "warmup_decay"}};

[[noreturn]] void refuse(std::string_view key, double measured, std::string limit,
                         std::string remedy) {
    std::ostringstream number;
    number << measured;
    throw Error(Trouble::usage, {.what = "the learning-rate schedule contradicts itself",
                                 .where = std::string(key),
                                 .measured = number.str(),
                                 .limit = std::move(limit),
                                 .remedy = std::move(remedy)});
}

double mix(double from, double to, double share) { return from + (to - from) * share; }

double ratio(int64_t part, int64_t whole) {
    return static_cast<double>(part) / static_cast<double>(whole);
}

// The warm-up's share at its `step`-th step: 1 at the last.
double warmup(const LrSchedule& s, int64_t step) {
    if (!s.log_warmup) return ratio(step, s.warmup_steps);
    const double whole = std::log(static_cast<double>(std::max<int64_t>(2, s.warmup_steps)));
    return std::log(static_cast<double>(std::max<int64_t>(1, step))) / whole;
}

// How far a fall of `length` steps that ends at total_steps has come when `done` steps lie behind:
// 0 to 1.
double fallen(const LrSchedule& s, int64_t done, int64_t length) {
    if (done >= s.total_steps || length <= 0) return 1;
    return std::max(0.0, 1 - ratio(s.total_steps - done, length));
}

// DeepSpeed's two, which count from 0 and rise from the minimum they fall back to.
double up_and_down(const LrSchedule& s, int64_t done) {
    const double height = done < s.warmup_steps
                              ? warmup(s, s.log_warmup ? done + 1 : done)
                              : 1 - fallen(s, done, s.total_steps - s.warmup_steps);
    return mix(s.final_fraction, 1, height);
}

double factor(const LrSchedule& s, int64_t step) {
    const int64_t done = step - 1;
    if (s.kind == Decay::one_cycle) return up_and_down(s, done);
    if (s.kind == Decay::warmup_decay) return up_and_down(s, std::max<int64_t>(0, done - 1));
    if (step <= s.warmup_steps) return warmup(s, step);
    const double share = fallen(s, done, s.total_steps - s.warmup_steps);
    switch (s.kind) {
        case Decay::constant:
            return 1;
        case Decay::cosine:
            return mix(1, s.final_fraction, (1 - std::cos(std::numbers::pi * share)) / 2);
        case Decay::wsd:
            return mix(1, s.final_fraction, fallen(s, done, s.decay_steps));
        default:
            return mix(1, s.final_fraction, share);
    }
}

}  // namespace

void check(const LrSchedule& s) {
    if (!(s.peak >= 0 && std::isfinite(s.peak))) {
        refuse("optimizer.lr", s.peak, "a finite number, 0 or more", "set it to such a number");
    }
    if (!(s.final_fraction >= 0 && s.final_fraction <= 1)) {
        refuse("schedule.final_fraction", s.final_fraction, "0 to 1",
               "give it as a part of the peak");
    }
    if (s.warmup_steps < 0) {
        refuse("schedule.warmup_steps", double(s.warmup_steps), "0 or more", "set it to 0");
    }
    if (s.kind == Decay::constant) return;
    if (s.total_steps < std::max<int64_t>(1, s.warmup_steps)) {
        refuse("schedule.total_steps", double(s.total_steps),
               "at least warmup_steps, " + std::to_string(s.warmup_steps),
               "set it to the length of the whole run, or use the constant schedule");
    }
    const int64_t left = std::max<int64_t>(1, s.total_steps - s.warmup_steps);
    if (s.kind == Decay::wsd && (s.decay_steps < 1 || s.decay_steps > left)) {
        refuse("schedule.decay_steps", double(s.decay_steps),
               "1 to total_steps - warmup_steps, " + std::to_string(left),
               "a tenth of total_steps is common");
    }
    if (s.kind == Decay::one_cycle && s.log_warmup) {
        refuse("schedule.log_warmup", 1, "a linear rise, as one_cycle has",
               "set it to false, or use warmup_decay");
    }
}

double learning_rate(const LrSchedule& schedule, int64_t step) {
    FERRY_CHECK(step >= 1, std::to_string(step));
    return schedule.peak * factor(schedule, step);
}

std::string_view name_of(Decay kind) { return kKinds[static_cast<size_t>(kind)].second; }

}  // namespace ferry::optim
