// What a thread says as one of several ranks.
#pragma once

namespace ferry {

// While this lives, this thread says what every rank would say alike (log_warn_of_run) for rank 0
// only.
class OfRank {
public:
    explicit OfRank(int rank) noexcept;
    ~OfRank();
    OfRank(const OfRank&) = delete;
    OfRank& operator=(const OfRank&) = delete;

private:
    const bool was_later_;
};

}  // namespace ferry
