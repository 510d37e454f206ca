// An executor whose wake() a program can wait for together with sockets and timers of its own.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "ferry/executor.h"

namespace ferry::capi {

class PollableExecutor final : public Executor {
public:
    ~PollableExecutor() override;

    // An eventfd. It is readable at first, and from each wake() on until clear(). Throws io where
    // there is none to be had.
    int descriptor();
    // What woke before this is known to the caller, who looks once more: what comes later wakes it.
    // One thread at a time.
    void clear() noexcept;

    LaneId add_lane(std::string name, int lane_depth) override {
        return inner_->add_lane(std::move(name), lane_depth);
    }
    void host(Service& service) override { inner_->host(service); }
    void retire(Service& service) override { inner_->retire(service); }
    void post(LaneId lane, Job job) override { inner_->post(lane, job); }
    void wait(Nanos until) override { inner_->wait(until); }
    void wake() noexcept override;
    Nanos now() const noexcept override { return inner_->now(); }

private:
    const std::unique_ptr<Executor> inner_ = make_thread_executor();
    std::atomic<int> descriptor_ = -1;   // until somebody asks
    std::atomic<bool> readable_ = true;  // or is about to be
    bool late_ = false;                  // it may become so although the flag fell; clear()'s own
};

}  // namespace ferry::capi
