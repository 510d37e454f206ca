#include "cost/simulator.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ferry/error.h"

namespace ferry::cost {
namespace {

using swap::Cost;
using swap::Task;

// The part of the memory's bandwidth that moving this many of its bytes a second takes.
double part_of_dram(double bytes_per_s, const Measurements& measured) {
    const double most = measured.dram_bytes_per_s;
    return most > 0 ? std::min(1.0, bytes_per_s / most) : 0;
}

// Nothing moves faster through memory than memory does. `passes`: of each byte.
double link_seconds(double bytes, double bytes_per_s, double passes, const Measurements& measured) {
    const double alone = bytes / bytes_per_s, memory = measured.dram_bytes_per_s;
    return memory > 0 ? std::max(alone, passes * bytes / memory) : alone;
}

// Piece by piece on the team's threads, at most at the rate of all memory.
Cost check_cost(double bytes, const Measurements& measured) {
    if (bytes <= 0) return {};
    const double pieces = std::ceil(bytes / static_cast<double>(kPieceBytes));
    const double threads = std::min<double>(measured.threads, pieces);
    double rate = threads * measured.check_bytes_per_s;
    if (measured.dram_bytes_per_s > 0) rate = std::min(rate, measured.dram_bytes_per_s);
    return {bytes / rate, {threads / measured.threads, 0, part_of_dram(rate, measured)}};
}

// Of the team. Coding takes longer than moving the bytes.
double update_rate(const Task& task, const Measurements& measured) {
    const double memory = measured.dram_bytes_per_s, coding = measured.momentum_bytes_per_s;
    const bool codes = row_of(task).timed_by == TimedBy::momentum && coding > 0;
    return codes ? std::min(coding, memory) : memory;
}

// An update on all cores and at the rate of all memory, then the checks.
Cost update_cost(double update_s, const Cost& checks) {
    const double seconds = update_s + checks.seconds;
    if (seconds <= 0) return {};
    const auto share = [&](double of_checks) {
        return (update_s + of_checks * checks.seconds) / seconds;
    };
    return {seconds, {share(checks.part[0]), 0, share(checks.part[2])}};
}

// Of what a layer's kernels exchange within. Backward computes a block's forward again, and the
// head goes both ways in one visit.
double exchange_seconds(const Task& task, const WorkOf& work_of, const Measurements& measured) {
    if (!exchanges_within(task)) return 0;
    const model::BlockExchanges its = work_of(task).exchanges;
    const Pass pass = row_of(task).pass;
    const bool back = pass == Pass::backward || pass == Pass::both;
    const auto seconds = [&](const model::BlockExchanges::Group& of, const GroupRate& rate) {
        return of.calls(back) == 0 ? 0
                                   : group_seconds(static_cast<double>(of.bytes(back)),
                                                   of.calls(back), rate, measured);
    };
    return seconds(its.sequence, measured.with_sequence) +
           seconds(its.slices, measured.with_slices);
}

}  // namespace

swap::CostModel cost_model(WorkOf work_of, const Measurements& measured) {
    const double one = 1.0 / measured.threads, on_host = measured.computes_on_host ? 1 : 0;
    const double copy_passes = dram_per_copied_byte(measured);
    const double of_copies = part_of_dram(copy_passes * measured.copy_bytes_per_s, measured);
    const double of_storage =
        part_of_dram(measured.dram_per_nvme_byte * measured.nvme_bytes_per_s, measured);
    const double storage_cores =
        std::min(1.0, one * measured.cores_per_nvme_byte * measured.nvme_bytes_per_s);
    // The library copies what comes from another rank; a slow network leaves the core alone.
    const auto core_at = [=, &measured](double bytes_per_s) {
        return on_host * one * std::min(1.0, bytes_per_s / measured.copy_bytes_per_s);
    };
    const double comm_core = core_at(comm_rate(measured));
    return [=, work_of = std::move(work_of), &measured](const Task& task) -> Cost {
        const auto bytes = static_cast<double>(task.bytes);
        switch (task.lane) {
            case swap::Lane::compute:
                if (is_update(task))
                    return {bytes_of_update(task, work_of) / measured.device_bytes_per_s +
                                products_s(work_of(task).products, measured),
                            {on_host, 0, on_host}};
                return {
                    measured.kernels.of(task, work_of) + exchange_seconds(task, work_of, measured),
                    {on_host, 0, 0}};
            case swap::Lane::h2d:
            case swap::Lane::d2h:
                return {link_seconds(bytes, measured.copy_bytes_per_s, copy_passes, measured),
                        {on_host * one, 0, of_copies}};
            case swap::Lane::team:
                if (row_of(task).timed_by == TimedBy::memory && !measured.computes_on_host)
                    return {bytes / measured.device_bytes_per_s, {}};
                if (row_of(task).timed_by == TimedBy::memory)
                    return {bytes / measured.dram_bytes_per_s, {one, 0, one}};
                if (!is_update(task)) return {};  // tokens are copied: nothing beside the rest
                return update_cost(
                    measured.update_overhead_s +
                        bytes_of_update(task, work_of) / update_rate(task, measured) +
                        products_s(work_of(task).products, measured),
                    check_cost(static_cast<double>(work_of(task).checked_bytes), measured));
            case swap::Lane::check:
                return check_cost(bytes, measured);
            case swap::Lane::read:
            case swap::Lane::write:
                if (task.verb != swap::Verb::read && task.verb != swap::Verb::write) return {};
                return {link_seconds(bytes, measured.nvme_bytes_per_s, measured.dram_per_nvme_byte,
                                     measured),
                        {storage_cores, 1, of_storage}};
            case swap::Lane::comm: {
                const GroupRate& rate =
                    passes(task) ? measured.between_stages : rate_among(among(task), measured);
                const double seconds = group_seconds(bytes, 1, rate, measured);
                const double moving =
                    bytes > 0 ? group_seconds(bytes, 0, rate, measured) / seconds : 0;
                const double core = rate.bytes_per_s > 0 ? core_at(rate.bytes_per_s) : comm_core;
                return {seconds, {core * moving, 0, 0}};
            }
        }
        bug("unknown lane");
    };
}

}  // namespace ferry::cost
