// Says how a long start-up gets on.
#pragma once

#include <cstdint>
#include <utility>

#include "ferry/executor.h"
#include "ferry/train.h"

namespace ferry::train {

class StartUp {
public:
    explicit StartUp(const Executor& executor, Progress progress = {})
        : executor_(executor), progress_(std::move(progress)) {}
    // To be called often within a stage. Logs a line every ten seconds, with the rate and the time
    // left.
    void at(const char* stage, int64_t bytes, int64_t of);
    // Ends a stage, with a line if it took a second, and begins the next.
    void done(const char* stage, int64_t bytes);
    double seconds() const { return seconds_since(began_); }  // since this stage began
    void next() { began_ = said_ = executor_.now(); }

private:
    static constexpr Nanos kBetween = 100'000'000;
    double seconds_since(Nanos then) const {
        return static_cast<double>(executor_.now() - then) * 1e-9;
    }
    const Executor& executor_;
    const Progress progress_;
    Nanos began_ = executor_.now(), said_ = began_, told_ = began_;
};

}  // namespace ferry::train
