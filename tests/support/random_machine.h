// Random machines for tests of predictions: links of any speeds, and kernels that take a fixed time
// beside their work and reach their own part of the rates.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "cost/kernel_times.h"
#include "cost/measurements.h"
#include "cost/simulator.h"
#include "ferry/device_kind.h"
#include "planner/planner.h"
#include "planner/work.h"
#include "swap/schedule.h"

namespace ferry::train {

class Random {
public:
    explicit Random(uint64_t seed) : draws_(seed) {}
    int64_t from(int64_t least, int64_t most) {
        return std::uniform_int_distribution<int64_t>(least, most)(draws_);
    }
    bool once_in(int64_t times) { return from(1, times) == 1; }
    double part() { return std::uniform_real_distribution<double>(0, 1)(draws_); }
    // As likely in each power of ten.
    double between(double least, double most) { return least * std::pow(most / least, part()); }
    template <class T>
    T one_of(std::initializer_list<T> choices) {
        return *(choices.begin() + from(0, std::ssize(choices) - 1));
    }

private:
    std::mt19937_64 draws_;
};

inline cost::Measurements draw_links(Random& random, DeviceKind device) {
    cost::Measurements m;
    m.computes_on_host = device == DeviceKind::cpu;
    m.copy_bytes_per_s = random.between(1e8, 1e11);
    m.dram_bytes_per_s = random.between(1e9, 3e11);
    m.update_overhead_s = random.between(1e-7, 1e-4);
    m.out_of_place = 1 + random.part();
    m.check_bytes_per_s = random.between(1e9, 2e10);
    m.threads = static_cast<int>(random.from(1, 16));
    m.device_bytes_per_s = m.computes_on_host ? m.dram_bytes_per_s : random.between(1e11, 4e12);
    m.comm_bytes_per_s = random.between(1e8, 1e11);
    m.comm_overhead_s = random.between(1e-7, 1e-4);
    m.across_hosts = {m.comm_bytes_per_s * random.between(0.3, 1), m.comm_overhead_s};
    for (cost::GroupRate* group : {&m.with_sequence, &m.with_slices, &m.in_host})
        *group = {m.comm_bytes_per_s * random.between(1, 10), m.comm_overhead_s};
    m.assumed_flops_per_s = random.between(1e9, 1e14);
    m.memory_of = m.storage_of = random.once_in(2) ? cost::Of::host : cost::Of::rank;
    return m;
}

// Of times by arithmetic: each operation's own fixed part, and its own part of the rates, which
// differs by shape.
inline void vary(Random& random, cost::KernelTimes& times) {
    struct Operation {
        double fixed_s = 0, part = 1;
    };
    std::map<std::pair<int64_t, int64_t>, Operation> operations;
    double of_backward = 1;
    for (auto& [kind, seconds] : times.seconds) {
        const auto [found, is_new] = operations.try_emplace({kind[0], kind[1]});
        Operation& its = found->second;
        if (is_new) its = {random.between(1e-7, 1e-4), random.between(0.1, 1)};
        const double part = its.part * random.between(0.8, 1);
        if (static_cast<cost::Op>(kind[0]) == cost::Op::backward) of_backward = its.part;
        seconds = its.fixed_s + seconds / part;
    }
    for (double& seconds : times.saved_s) seconds *= random.between(0.8, 1.25) / of_backward;
}

// The links that `bind` can choose.
enum class Slow : uint8_t { copies, drives, memory, network };

// Makes one link the one that binds, with what it moves alone: the kernels and the other links have
// little to do beside it. `step`: of a plan, on a rank of this machine.
inline void bind(Random& random, Slow slow, cost::Measurements& machine, const swap::Schedule& step,
                 const planner::Plan& plan, int ranks_on_host) {
    const cost::Measurements mine = cost::of_rank(machine, ranks_on_host);
    const cost::WorkOf work_of = planner::work_of(plan);
    std::array<double, swap::kLanes> bytes{};
    double updated = 0;
    for (const swap::Task& task : step.tasks) {
        bytes[static_cast<size_t>(task.lane)] += static_cast<double>(task.bytes);
        if (task.lane == swap::Lane::team || mine.computes_on_host)
            updated += cost::bytes_of_update(task, work_of);
    }
    const auto on = [&](swap::Lane lane) { return bytes[static_cast<size_t>(lane)]; };
    const double up = on(swap::Lane::h2d), down = on(swap::Lane::d2h),
                 stored = on(swap::Lane::read) + on(swap::Lane::write),
                 kernels_s = mine.kernels.sum(step, work_of);
    // So many times as fast as it is.
    const auto times = [&](Slow link, double moved, double bytes_per_s) {
        const double busy = link == slow ? random.between(3, 30) : random.between(0.01, 0.2);
        return moved > 0 ? moved / bytes_per_s / (kernels_s * busy) : 1;
    };
    const double network = times(Slow::network, on(swap::Lane::comm), cost::comm_rate(mine));
    for (cost::GroupRate* rate : {&machine.with_sequence, &machine.with_slices, &machine.in_host,
                                  &machine.across_hosts, &machine.between_stages}) {
        rate->bytes_per_s *= network;
        rate->overhead_s = 0;
    }
    machine.comm_bytes_per_s *= network;
    machine.copy_bytes_per_s *= times(Slow::copies, std::max(up, down), mine.copy_bytes_per_s);
    machine.nvme_bytes_per_s *= times(Slow::drives, stored, mine.nvme_bytes_per_s);
    const double memory = times(Slow::memory, cost::dram_bytes(updated, up + down, stored, mine),
                                mine.dram_bytes_per_s);
    machine.dram_bytes_per_s *= memory;
    if (machine.computes_on_host) machine.device_bytes_per_s *= memory;
    machine.comm_overhead_s = machine.update_overhead_s = 0;
    machine.check_bytes_per_s = 1e12;
}

// What takes longest of one step: a lane, one task after the other, or a resource that lanes share.
struct Busiest {
    std::string what{};
    double seconds = 0;
};
// `in_turn`: whether exchanges follow one another, too; those of stages with several others do not.
inline Busiest busiest_of(const swap::Schedule& step, const planner::Plan& plan,
                          const cost::Measurements& measured, bool in_turn) {
    static constexpr std::array<const char*, swap::kShared> kShared{"cores", "disk", "dram"};
    const swap::CostModel cost = cost::cost_model(planner::work_of(plan), measured);
    std::array<double, swap::kLanes> lanes{};
    std::array<double, swap::kShared> shared{};
    for (const swap::Task& task : step.tasks) {
        const swap::Cost taken = cost(task);
        if (in_turn || task.lane != swap::Lane::comm)
            lanes[static_cast<size_t>(task.lane)] += taken.seconds;
        for (size_t r = 0; r < swap::kShared; ++r) shared[r] += taken.seconds * taken.part[r];
    }
    Busiest found;
    const auto take = [&found](std::string_view what, double seconds) {
        if (seconds > found.seconds) found = {std::string(what), seconds};
    };
    for (size_t l = 0; l < swap::kLanes; ++l)
        take(swap::name_of(static_cast<swap::Lane>(l)), lanes[l]);
    for (size_t r = 0; r < swap::kShared; ++r) take(kShared[r], shared[r]);
    return found;
}

}  // namespace ferry::train
