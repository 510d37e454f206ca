// Which thread runs the team lane's next task.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace ferry::swap {

// The team works on one task after another, and its cores wait from the end of one to the first
// bodies of the next: a tenth of a millisecond, which is much beside an update of one. So two
// threads take turns at tasks that may run beside each other. Every other task has the lane to
// itself, in the lane's order, on the first thread.
class TeamThreads {
public:
    static constexpr size_t kThreads = 2;

    // None: what is in flight has to end first.
    std::optional<size_t> of_next(bool beside) const {
        if (!beside) return in_flight_[1] == 0 ? std::optional<size_t>(0) : std::nullopt;
        if (alone_ > 0) return 0;  // behind them
        return in_flight_[1] < in_flight_[0] ? 1 : 0;
    }
    void begin(size_t thread, bool beside) {
        ++in_flight_[thread];
        alone_ += beside ? 0 : 1;
    }
    void end(size_t thread, bool beside) {
        --in_flight_[thread];
        alone_ -= beside ? 0 : 1;
    }

private:
    std::array<int64_t, kThreads> in_flight_{};
    int64_t alone_ = 0;
};

}  // namespace ferry::swap
