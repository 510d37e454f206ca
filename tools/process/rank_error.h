// How a process that is one of several ranks ends with an error.
#pragma once

#include "comm/comm.h"
#include "ferry/error.h"

namespace ferry::tools {

// One of several ranks ends with this; its message names the rank.
class RankError : public Error {
public:
    RankError(int rank, const Error& error);
    // As any rank would throw it.
    const Error& unnamed() const noexcept { return unnamed_; }

private:
    Error unnamed_;
};

// Runs body(); what it throws is a RankError where there are others. `rank`: as known by then.
template <class Body>
void naming_rank(const int& rank, const Body& body) {
    try {
        body();
    } catch (const Error& error) {
        if (!comm::launched_as_rank()) throw;
        throw RankError(rank, error);
    }
}

}  // namespace ferry::tools
