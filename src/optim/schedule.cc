#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "ferry/optim.h"

namespace ferry::optim {
namespace {

constexpr std::pair<Decay, std::string_view> kKinds[] = {
    {Decay::constant, "constant"},   {Decay::linear, "linear"},
    {Decay::cosine, "cosine"},       {Decay::wsd, "wsd"},
    {Decay::one_cycle, "one_cycle"}, {Decay::warmup_decay, "warmup_decay"}};

[[noreturn]] void refuse(std::string_view field, double measured, std::string limit,
                         std::string remedy) {
    throw Error(Trouble::usage, {.what = "the learning-rate schedule contradicts itself",
                                 .where = "scheduler." + std::string(field),
                                 .measured = std::to_string(measured),
                                 .limit = std::move(limit),
                                 .remedy = std::move(remedy)});
}

double mix(double from, double to, double share) { return from + (to - from) * share; }

double ratio(int64_t part, int64_t whole) {
    return static_cast<double>(part) / static_cast<double>(whole);
}

// Of peak, for a step inside the warm-up; `step` from 0.
double warmup(const LrSchedule& s, int64_t step) {
    if (!s.log_warmup) return ratio(step, s.warmup_steps);
    const double whole = std::log(static_cast<double>(std::max<int64_t>(2, s.warmup_steps)));
    return std::log(static_cast<double>(std::max<int64_t>(1, step))) / whole;
}

// How far the falling part, which ends at total_steps, has come: 0 to 1.
double fallen(const LrSchedule& s, int64_t step, int64_t length) {
    if (step >= s.total_steps || length <= 0) return 1;
    return std::max(0.0, 1 - ratio(s.total_steps - step, length));
}

double warmup_decay(const LrSchedule& s, int64_t step) {
    const int64_t done = step - 1;
    const double gamma = done < s.warmup_steps
                             ? warmup(s, s.log_warmup ? done + 1 : done)
                             : 1 - fallen(s, done, s.total_steps - s.warmup_steps);
    return mix(s.final_fraction, 1, gamma);
}

double factor(const LrSchedule& s, int64_t step) {
    if (s.kind == Decay::warmup_decay) return warmup_decay(s, step);
    if (step < s.warmup_steps) {
        if (s.kind != Decay::one_cycle) return warmup(s, step);
        return mix(s.final_fraction, 1, ratio(step, s.warmup_steps));
    }
    const double share = fallen(s, step, s.total_steps - s.warmup_steps);
    switch (s.kind) {
        case Decay::constant:
            return 1;
        case Decay::cosine:
            return mix(1, s.final_fraction, (1 - std::cos(std::numbers::pi * share)) / 2);
        case Decay::wsd:
            return mix(1, s.final_fraction, fallen(s, step, s.decay_steps));
        default:
            return mix(1, s.final_fraction, share);
    }
}

}  // namespace

void check(const LrSchedule& s) {
    if (!(s.peak >= 0 && std::isfinite(s.peak))) {
        refuse("lr", s.peak, "a finite number, 0 or more", "set lr to such a number");
    }
    if (!(s.final_fraction >= 0 && s.final_fraction <= 1)) {
        refuse("final_fraction", s.final_fraction, "0 to 1", "give it as a part of the peak");
    }
    if (s.warmup_steps < 0) {
        refuse("warmup_steps", static_cast<double>(s.warmup_steps), "0 or more", "set it to 0");
    }
    if (s.kind != Decay::constant && s.total_steps <= s.warmup_steps) {
        refuse("total_steps", static_cast<double>(s.total_steps),
               "more than warmup_steps, " + std::to_string(s.warmup_steps),
               "set total_steps to the length of the whole run, or use the constant schedule");
    }
    if (s.kind == Decay::wsd &&
        (s.decay_steps < 1 || s.decay_steps > s.total_steps - s.warmup_steps)) {
        refuse("decay_steps", static_cast<double>(s.decay_steps),
               "1 to total_steps - warmup_steps, " + std::to_string(s.total_steps - s.warmup_steps),
               "10 % of total_steps is common");
    }
}

double learning_rate(const LrSchedule& schedule, int64_t step) {
    FERRY_CHECK(step >= 1, std::to_string(step));
    return schedule.peak * factor(schedule, step);
}

std::string_view name_of(Decay kind) { return kKinds[static_cast<size_t>(kind)].second; }

Decay decay_from(std::string_view name) {
    std::vector<std::string> known;
    for (const auto& [kind, word] : kKinds) {
        if (word == name) return kind;
        known.emplace_back(word);
    }
    const std::string near = nearest_word(name, known);
    std::string list;
    for (const std::string& word : known) list += (list.empty() ? "" : ", ") + word;
    throw Error(Trouble::usage,
                {.what = "unknown learning-rate schedule \"" + std::string(name) + "\"",
                 .where = "scheduler.type",
                 .limit = "one of " + list,
                 .remedy = near.empty() ? "choose one of them" : "did you mean \"" + near + "\"?"});
}

}  // namespace ferry::optim
