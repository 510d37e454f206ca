// Members that measure at the same time, because they will run at the same time. They are the ranks
// of a run, or threads of this process that stand for the ranks of a host. They share its caches,
// its memory and its clock, so each is slower than alone.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "cost/measurements.h"
#include "ferry/executor.h"

namespace ferry::train {

// One member's end; all of them make the same calls in the same order.
class Together {
public:
    virtual ~Together() = default;
    virtual int size() const noexcept = 0;
    using Work = std::function<void()>;
    // All members begin `work` at once. Whoever is done repeats `load`, which is short, until all
    // are done. `load` may be empty. Throws where another member failed, and never waits for that
    // one.
    virtual void run(const Work& work, const Work& load) = 0;
    // Everybody's numbers, as many as each has.
    virtual std::vector<std::vector<double>> all(std::span<const double> mine) = 0;

    // The least and the most of all.
    double least(double mine);
    double most(double mine);
};

// Nobody else measures.
class Alone final : public Together {
public:
    int size() const noexcept override { return 1; }
    void run(const Work& work, const Work&) override {
        if (work) work();
    }
    std::vector<std::vector<double>> all(std::span<const double> mine) override {
        return {{mine.begin(), mine.end()}};
    }
};
Together& alone();

// The ranks of a run. A rank that fails ends the others' waits as in any exchange
// (docs/ranks.md).
class RanksTogether final : public Together {
public:
    // Both outlive it.
    RanksTogether(comm::Communicator& ranks, Executor& executor)
        : ranks_(ranks), executor_(executor) {}
    int size() const noexcept override { return ranks_.size(); }
    void run(const Work& work, const Work& load) override;
    std::vector<std::vector<double>> all(std::span<const double> mine) override;

private:
    comm::Communicator& ranks_;
    Executor& executor_;
};

// Threads of this process: each has a member's end.
class ThreadsTogether {
public:
    explicit ThreadsTogether(int size) : numbers_(static_cast<size_t>(size)), size_(size) {}
    // Calls body(index, its end) on as many threads, the first of them the caller's, each as a rank
    // of its index (base/of_rank.h); returns when all have ended. Throws the first failure. Where a
    // thread cannot be started: does_not_fit.
    using Body = std::function<void(int index, Together& end)>;
    void each(const Body& body);

private:
    class End;
    void meet();  // all are here; throws where one has failed
    void fail(std::exception_ptr failure) noexcept;
    void run_one(int index, const Body& body) noexcept;

    std::mutex mutex_{};
    std::condition_variable changed_{};
    std::exception_ptr failure_{};
    std::vector<std::vector<double>> numbers_;
    const int size_;
    int here_ = 0, working_ = 0;
    int64_t meetings_ = 0;
};

// What a plan of all of them goes by: the longest time of each kernel that this one has, the lowest
// rates and the longest overheads.
void agree_on_slowest(Together& together, cost::Measurements& measured);

}  // namespace ferry::train
