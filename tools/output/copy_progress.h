// How far a long copy is: bytes, GB/s and the time left.
#pragma once

#include <cstdint>
#include <string>

#include "ferry/executor.h"

namespace ferry::tools {

// On a terminal a line of standard error that is written over; else a line of the log every ten
// seconds. What takes less than a second says nothing.
class CopyProgress {
public:
    CopyProgress(std::string what, const Executor& executor);
    ~CopyProgress();  // the line is wiped
    CopyProgress(const CopyProgress&) = delete;
    CopyProgress& operator=(const CopyProgress&) = delete;

    void at(int64_t bytes, int64_t of);
    double seconds() const;

private:
    std::string what_;
    const Executor& executor_;
    const bool terminal_;
    Nanos began_, said_;
    bool shown_ = false;
};

}  // namespace ferry::tools
