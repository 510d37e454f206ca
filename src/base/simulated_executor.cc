// The executor of simulated runs: one thread, virtual time. A lane runs one job at a time, each for
// its given or a seeded duration, so that another seed is another interleaving of the lanes.
#include <algorithm>
#include <deque>
#include <vector>

#include "base/random.h"
#include "ferry/error.h"
#include "ferry/executor.h"

namespace ferry {
namespace {

class SimulatedExecutor final : public Executor {
public:
    explicit SimulatedExecutor(uint64_t seed) : seed_(static_cast<uint32_t>(seed ^ (seed >> 32))) {}

    LaneId add_lane(std::string name, int lane_depth) override {
        lanes_.push_back({std::move(name), static_cast<size_t>(lane_depth), {}, 0});
        return static_cast<LaneId>(lanes_.size() - 1);
    }
    void host(Service& service) override { services_.push_back(&service); }
    void retire(Service& service) override { std::erase(services_, &service); }

    void post(LaneId lane, Job job) override {
        SimLane& target = lanes_[lane];
        FERRY_CHECK(target.jobs.size() < target.depth, target.name);
        if (target.jobs.empty()) target.due = now_ + duration(job);
        target.jobs.push_back(job);
    }

    void wait(Nanos until) override {
        while (!woken_) {
            if (!run_next_event(until)) {
                FERRY_CHECK(until != kForever, "deadlock: no event can wake the step thread");
                now_ = std::max(now_, until);
                return;
            }
        }
        woken_ = false;
    }

    void wake() noexcept override { woken_ = true; }
    Nanos now() const noexcept override { return now_; }
    bool simulated() const noexcept override { return true; }

private:
    struct SimLane {
        std::string name;
        size_t depth;
        std::deque<Job> jobs;
        Nanos due;
    };

    Nanos duration(const Job& job) {
        if (job.simulated_ns > 0) return job.simulated_ns;
        const auto bits = philox({seed_, Purpose::test}, {++draws_, 0, 0, 0});
        return 1 + static_cast<Nanos>(bits[0] >> (12 + bits[1] % 12));  // up to about 1 ms, skewed
    }

    // Runs the earliest event not after `until`; false when there is none.
    bool run_next_event(Nanos until) {
        SimLane* lane = nullptr;
        for (SimLane& candidate : lanes_) {
            if (candidate.jobs.empty()) continue;
            if (!lane || candidate.due < lane->due) lane = &candidate;
        }
        Service* service = nullptr;
        Nanos service_due = kForever;
        for (Service* candidate : services_) {
            const Nanos due = candidate->next_event();
            if (due < service_due) service = candidate, service_due = due;
        }
        const Nanos lane_due = lane ? lane->due : kForever;
        const Nanos due = std::min(lane_due, service_due);
        if (due == kForever || due > until) return false;
        now_ = std::max(now_, due);
        if (service && service_due <= lane_due) {
            service->run_once(now_);
            return true;
        }
        const Job job = lane->jobs.front();
        job.run(job.context, job.argument);
        lane->jobs.pop_front();
        if (!lane->jobs.empty()) lane->due = now_ + duration(lane->jobs.front());
        return true;
    }

    uint32_t seed_;
    uint32_t draws_ = 0;
    Nanos now_ = 0;
    bool woken_ = false;
    std::vector<SimLane> lanes_;
    std::vector<Service*> services_;
};

}  // namespace

std::unique_ptr<Executor> make_simulated_executor(uint64_t seed) {
    return std::make_unique<SimulatedExecutor>(seed);
}

}  // namespace ferry
