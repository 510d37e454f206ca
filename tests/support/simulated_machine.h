// A machine in virtual time for whole runs: what one run leaves on its disk is there for the next.
#pragma once

#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ferry/train.h"
#include "tests/support/simulated_disk.h"

namespace ferry::train {

// As Runtime::open_volume. Slots are not written beforehand, as that would be most of what a tiny
// run transfers.
inline auto volumes_on(aio::SimulatedDisk& disk) {
    return [&disk](aio::VolumeOptions volume, Executor& executor) {
        volume.write_once = false;
        return aio::open_simulated_volume(std::move(volume), executor, disk);
    };
}

// A number as its bits, so that the norm of a step that overflowed is like itself.
inline std::string bits_of(double value) {
    return std::isnan(value) ? "nan" : std::to_string(std::bit_cast<uint64_t>(value));
}

// The end of a run.
struct Ended {
    std::vector<std::string> losses{}, norms{};  // bits, of steps first..
    int64_t first = 1;
    uint64_t hash = 0;
    RunReport report{};
    std::string error{};  // empty: it came to its end
    Trouble trouble = Trouble::internal;

    bool says(const std::string& words) const { return error.find(words) != std::string::npos; }
};

using BeforeStep = std::function<void(int64_t)>;

inline Ended run_to_end(const Config& config, Runtime runtime, const BeforeStep& before = {}) {
    Ended ended;
    try {
        const auto engine = Engine::make(config, std::move(runtime));
        ended.first = engine->last_step() + 1;
        while (engine->last_step() < config.steps) {
            if (before) before(engine->last_step() + 1);
            const StepReport report = engine->step();
            ended.losses.push_back(bits_of(report.loss));
            ended.norms.push_back(bits_of(report.gradient_norm));
        }
        ended.hash = engine->state_hash();
        ended.report = engine->report();
    } catch (const Error& error) {
        ended.error = error.what();
        ended.trouble = error.trouble();
    }
    return ended;
}

inline Ended run_in_memory(const Config& config) {
    const auto executor = make_simulated_executor(1);
    return run_to_end(config, {.executor = executor.get()});
}

class SimulatedMachine {
public:
    explicit SimulatedMachine(aio::SimulatedDiskOptions options)
        : executor_(make_simulated_executor(options.seed)), disk_(std::move(options), *executor_) {}

    Runtime runtime(bool resumes = false) {
        return {.executor = executor_.get(), .open_volume = volumes_on(disk_), .resume = resumes};
    }
    Ended run(const Config& config, bool resumes = false, const BeforeStep& before = {}) {
        return run_to_end(config, runtime(resumes), before);
    }
    aio::SimulatedDisk& disk() { return disk_; }
    Nanos now() const { return executor_->now(); }

private:
    std::unique_ptr<Executor> executor_;
    aio::SimulatedDisk disk_;
};

}  // namespace ferry::train
