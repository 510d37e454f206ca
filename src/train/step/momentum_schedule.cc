#include "momentum_schedule.h"

#include <algorithm>
#include <limits>

#include "ferry/units.h"

namespace ferry::train {
namespace {

// A stretch of updates that follow each other at one distance.
struct Stretch {
    int64_t first = 1, apart = 1;
};

// The stretch that the update lies in: of `count` updates at each distance, which doubles from 1.
Stretch of_changes(int64_t update, int64_t count) {
    Stretch found;
    while (update - found.first >= count * found.apart) {
        found.first += count * found.apart;
        found.apart *= 2;
    }
    return found;
}

// The same of `length` updates each, until the distance is the largest.
Stretch of_exchanges(int64_t update, int64_t first, int64_t length, int64_t most_apart) {
    Stretch found{first, 1};
    while (found.apart < most_apart && update - found.first >= length) {
        found.first += length;
        found.apart = std::min(2 * found.apart, most_apart);
    }
    return found;
}

int64_t last_change_of(const OptimizerConfig& o) {
    if (o.method == optim::Method::onebit_adam) return o.freeze_step;
    return o.method == optim::Method::zeroone_adam ? o.var_freeze_step : 0;
}

}  // namespace

MomentumSchedule::MomentumSchedule(const OptimizerConfig& optimizer)
    : method_(optimizer.method),
      last_change_(last_change_of(optimizer)),
      changes_(optimizer.var_update_scaler),
      local_steps_(optimizer.local_step_scaler),
      most_apart_(method_ == optim::Method::zeroone_adam ? optimizer.local_step_clipper : 1) {}

bool MomentumSchedule::changes_variance(int64_t update) const {
    if (update > last_change_) return false;
    if (method_ == optim::Method::onebit_adam) return true;
    const Stretch stretch = of_changes(update, changes_);
    return (update - stretch.first) % stretch.apart == 0;
}

Exchanged MomentumSchedule::of(int64_t update) const {
    if (!optim::sends_momentum(method_) || changes_variance(update)) return Exchanged::gradients;
    if (update <= last_change_) return Exchanged::momentum;
    const Stretch stretch = of_exchanges(update, last_change_ + 1, local_steps_, most_apart_);
    const int64_t number = update - stretch.first + 1;
    const bool ends =
        number % stretch.apart == 0 || (stretch.apart < most_apart_ && number == local_steps_);
    return ends ? Exchanged::momentum : Exchanged::nothing;
}

std::array<int64_t, kExchanged> MomentumSchedule::of_each(int64_t update) const {
    const int64_t gradients = changes_of_variance(update);
    if (!optim::sends_momentum(method_)) return {gradients, 0, 0};
    const int64_t before = std::min(update, last_change_);
    int64_t momentum = before - gradients, left = update - before, apart = 1;
    for (; apart < most_apart_ && left >= local_steps_; apart = std::min(2 * apart, most_apart_)) {
        momentum += ceil_div(local_steps_, apart);
        left -= local_steps_;
    }
    momentum += left / apart;
    return {gradients, momentum, update - gradients - momentum};
}

int64_t MomentumSchedule::first() const {
    if (!optim::sends_momentum(method_)) return std::numeric_limits<int64_t>::max();
    if (method_ == optim::Method::onebit_adam) return last_change_ + 1;
    return std::min(last_change_, changes_ + 1) + 1;
}

int64_t MomentumSchedule::changes_of_variance(int64_t update) const {
    if (!optim::sends_momentum(method_)) return update;
    const int64_t last = std::min(update, last_change_);
    if (method_ == optim::Method::onebit_adam) return last;
    const Stretch stretch = of_changes(last, changes_);
    int64_t before = 0;
    for (int64_t apart = 1; apart < stretch.apart; apart *= 2) before += changes_;
    return before + (last - stretch.first) / stretch.apart + 1;
}

int64_t MomentumSchedule::interval_begin(int64_t update) const {
    if (update <= last_change_) return update;
    const Stretch stretch = of_exchanges(update, last_change_ + 1, local_steps_, most_apart_);
    return stretch.first + (update - stretch.first) / stretch.apart * stretch.apart;
}

}  // namespace ferry::train
