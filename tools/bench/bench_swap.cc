#include "bench_swap.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "fio.h"
#include "progress.h"
#include "tools/machine/io_site.h"
#include "tools/plan/timeline_picture.h"
#include "tools/process/interrupt.h"
#include "train/inside.h"

namespace ferry::tools {
namespace {

using train::Pass;
using train::PassReport;

constexpr size_t kSlices = 400'000;

double gb_per_s(int64_t bytes, double seconds) {
    return static_cast<double>(bytes) / seconds * 1e-9;
}

const swap::LaneReport& on(const PassReport& report, swap::Lane lane) {
    return report.lanes[static_cast<size_t>(lane)];
}
int64_t stored_bytes(const PassReport& report) {
    return on(report, swap::Lane::read).bytes + on(report, swap::Lane::write).bytes;
}

Direction direction_of(Pass pass) {
    switch (pass) {
        case Pass::swap_out:
            return Direction::write;
        case Pass::swap_in:
            return Direction::read;
        case Pass::optimizer:
        case Pass::step:
            break;
    }
    return Direction::mixed;
}

// Plain transfers on files of their own: what the drives give by themselves. The files are as large
// as the state, for a small one larger, and where there is little room smaller.
class Plain {
public:
    Plain(const SwapBench& bench, const IoSites& sites, int64_t stored_bytes_per_path)
        : bench_(bench),
          options_{
              .directories = sites.directories(),
              .bytes_per_path = sites.bytes_per_path(wanted(stored_bytes_per_path), kSlotBytes),
              .depth = bench.config.io.queue_depth,
              .backend = bench.config.io.backend,
              .direct = bench.config.io.direct},
          block_bytes_(fit_into_files(options_, bench.config.io.block_bytes)),
          memory_(operations_of(options_) * block_bytes_),
          rig_(options_, memory_.bytes()) {}

    double gb_per_s(Pass pass) {
        const AccessPattern access{direction_of(pass), false};
        if (!bench_.fio)
            return rig_
                .run({.access = access, .block_bytes = block_bytes_, .seconds = bench_.seconds})
                .gb_per_s();
        return run_fio({.files = rig_.files(),
                        .access = access,
                        .block_bytes = block_bytes_,
                        .depth = options_.depth,
                        .jobs = static_cast<int>(bench_.paths.size()),
                        .direct = options_.direct,
                        .seconds = bench_.seconds})
            .gb_per_s();
    }

private:
    // Less than this, and a drive shows what its caches give.
    static constexpr int64_t kEnough = 256 * kMiB;

    static FileBytes wanted(int64_t stored_bytes_per_path) {
        return {.least = kSlotBytes,
                .most = round_up(std::max(stored_bytes_per_path, kEnough), kSlotBytes),
                .remedy = "free some space, or lower --millions"};
    }

    const SwapBench& bench_;
    RigOptions options_;
    const int64_t block_bytes_;
    IoMemory memory_;
    Rig rig_;
};

class Swap {
public:
    explicit Swap(const SwapBench& bench)
        : bench_(bench),
          sites_(bench.paths),
          plain_sites_(bench.paths, "ferry-bench-plain"),
          executor_(make_thread_executor()),
          recording_(bench.draws ? kSlices : 0),
          rehearsal_(train::Rehearsal::make(config(), bench.rehearsal, runtime())),
          machine_(rehearsal_->measure()),
          progress_(static_cast<int>(bench.passes.size()) * bench.pairs) {
        check_passes();
        const auto paths = static_cast<int64_t>(bench.paths.size());
        const planner::Plan& plan = rehearsal_->plan();
        if (plan.nvme_bytes > 0)
            plain_.emplace(bench, plain_sites_, ceil_div(plan.nvme_bytes, paths));
    }

    SwapResult run() {
        for (const Pass pass : bench_.passes) measure(pass);
        return {.rows = std::move(rows_),
                .picture = last_begin_ < recording_.size() ? picture() : std::string()};
    }

private:
    train::Runtime runtime() {
        train::Runtime runtime;
        runtime.executor = executor_.get();
        runtime =
            train::with(std::move(runtime), {.recording = bench_.draws ? &recording_ : nullptr});
        return runtime;
    }

    Config config() const {
        Config config = bench_.config;
        config.budgets.nvme.clear();
        for (const std::string& directory : sites_.directories())
            config.budgets.nvme.push_back({.path = directory});
        return config;
    }

    // A row that was asked for by name and is not there would look like success.
    void check_passes() const {
        if (!bench_.all_passes || rehearsal_->plan().nvme_bytes > 0) return;
        for (const Pass pass : bench_.passes) {
            if (direction_of(pass) == Direction::mixed) continue;
            throw Error(Trouble::usage, {.what = "the pass has nothing to move",
                                         .where = "--passes",
                                         .measured = fmt::format("{}: none of the state is on a "
                                                                 "drive",
                                                                 name_of(pass)),
                                         .remedy = "name a directory on a drive, and leave some "
                                                   "of the state to it (--on-nvme, --on-device)"});
        }
    }

    // A B B A: a drift of the drive's speed hits both sides alike.
    void measure(Pass pass) {
        const bool moves = pass == Pass::optimizer || pass == Pass::step || plain_;
        if (!moves) return;  // nothing lives on NVMe
        std::vector<PassReport> reports;
        std::vector<double> plain;
        rehearsal_->run(pass);  // after the pass before, and the layout, nothing lies about
        for (int pair = 0; pair < bench_.pairs && !interrupted(); ++pair) {
            for (int side = 0; side < 2 && !interrupted(); ++side) {
                if ((pair + side) % 2 == 0)
                    reports.push_back(once(pass));
                else
                    plain.push_back(plain_ ? plain_->gb_per_s(pass) : 0);
            }
            if (reports.size() != plain.size()) return;  // interrupted
            progress_.show(++done_, progress_of(pass, reports.back(), plain.back()));
        }
        if (!reports.empty()) add_row(pass, reports, plain);
    }

    // A pass in memory has no other side.
    std::string progress_of(Pass pass, const PassReport& report, double plain) const {
        std::string text = fmt::format("{}: {:.3f} s", name_of(pass), report.seconds);
        if (plain_)
            text += fmt::format(", {:.2f} GB/s beside {:.2f}",
                                gb_per_s(stored_bytes(report), report.seconds), plain);
        return text;
    }

    PassReport once(Pass pass) {
        if (bench_.fio) {
            // While fio starts the drive rests, and one that meters its clients is faster after it.
            constexpr auto kStartOfFio = std::chrono::milliseconds(250);
            std::this_thread::sleep_for(kStartOfFio);
        }
        last_begin_ = recording_.size();
        last_ = pass;
        last_report_ = rehearsal_->run(pass);
        return last_report_;
    }

    void add_row(Pass pass, const std::vector<PassReport>& reports,
                 const std::vector<double>& plain) {
        std::vector<double> values, ratios, seconds, bounds;
        for (size_t i = 0; i < reports.size(); ++i) {
            const PassReport& report = reports[i];
            const auto bytes = static_cast<double>(stored_bytes(report));
            const double updated = rehearsal_->bytes_of_pass(pass, swap::Lane::team) +
                                   rehearsal_->bytes_of_pass(pass, swap::Lane::compute);
            values.push_back((plain_ ? bytes : updated) / report.seconds * 1e-9);
            ratios.push_back(plain_ ? values.back() / plain[i] : 0);
            seconds.push_back(report.seconds);
            bounds.push_back(
                std::max(memory_and_copies_s(pass, report), plain_ ? bytes * 1e-9 / plain[i] : 0) /
                report.seconds);
        }
        BenchRow row = plain_ ? compared(name_of(pass), "GB/s", values, plain, ratios)
                              : BenchRow{.name = std::string(name_of(pass)) + ", in memory",
                                         .value = median(values),
                                         .unit = "GB/s"};
        row.more = lanes_of(pass, reports.back());
        row.more.emplace_back("GB moved", 1e-9 * static_cast<double>(stored_bytes(reports.back())));
        row.more.emplace_back("% on device", 100 * rehearsal_->state_on(swap::Tier::device));
        row.more.emplace_back("seconds", median(seconds));
        row.more.emplace_back("x of bound", median(bounds));
        rows_.push_back(std::move(row));
    }

    // Bytes that updates read and write in host memory, which a CPU device's is too.
    double updated_on_host(Pass pass) const {
        return rehearsal_->bytes_of_pass(pass, swap::Lane::team) +
               (machine_.computes_on_host ? rehearsal_->bytes_of_pass(pass, swap::Lane::compute)
                                          : 0);
    }

    // The longest of what a pass needs beside the drives, each alone: what the device computes, the
    // updates in host memory, and the copies of either direction.
    double memory_and_copies_s(Pass pass, const PassReport& report) const {
        const cost::Measurements& links = machine_;
        const double on_device = rehearsal_->bytes_of_pass(pass, swap::Lane::compute),
                     on_host = updated_on_host(pass),
                     pauses_s = pass == Pass::step ? bench_.rehearsal.compute_seconds : 0;
        const auto copies_s = [&](swap::Lane lane) {
            return static_cast<double>(on(report, lane).bytes) / links.copy_bytes_per_s;
        };
        return std::max({pauses_s + on_device / links.device_bytes_per_s,
                         on_host / links.dram_bytes_per_s, copies_s(swap::Lane::h2d),
                         copies_s(swap::Lane::d2h)});
    }

    // The last pass's links, and how much ran at the same time.
    std::vector<std::pair<std::string, double>> lanes_of(Pass pass,
                                                         const PassReport& report) const {
        std::vector<std::pair<std::string, double>> values;
        double busy_s = 0;
        for (const swap::LaneReport& lane : report.lanes)
            busy_s += static_cast<double>(lane.busy_ns) * 1e-9;
        for (const swap::Lane lane :
             {swap::Lane::read, swap::Lane::write, swap::Lane::h2d, swap::Lane::d2h})
            values.emplace_back(std::string(swap::name_of(lane)),
                                gb_per_s(on(report, lane).bytes, report.seconds));
        values.emplace_back("dram", updated_on_host(pass) / report.seconds * 1e-9);
        const auto busy = [&](const char* who, swap::Lane lane) {
            const auto busy_ns = static_cast<double>(on(report, lane).busy_ns);
            values.emplace_back(who, 1e-7 * busy_ns / report.seconds);
        };
        busy("team busy %", swap::Lane::team);
        busy("device busy %", swap::Lane::compute);
        values.emplace_back("overlap", busy_s / report.seconds);
        return values;
    }

    std::string picture() const {
        std::vector<Bar> bars;
        Nanos begin = kForever;
        for (size_t i = last_begin_; i < recording_.size(); ++i)
            begin = std::min(begin, recording_[i].begin_ns);
        for (size_t i = last_begin_; i < recording_.size(); ++i) {
            const trace::Slice& slice = recording_[i];
            const auto at = [&](Nanos when) { return static_cast<double>(when - begin) * 1e-9; };
            bars.push_back({.lane = static_cast<swap::Lane>(slice.row),
                            .name = std::string(slice.name),
                            .begin_s = at(slice.begin_ns),
                            .end_s = at(slice.end_ns),
                            .busy_s = at(slice.end_ns) - at(slice.begin_ns),
                            .tasks = 1,
                            .bytes = slice.bytes});
        }
        const std::string title =
            fmt::format("{}, as it went: {:.4g} s", name_of(last_), last_report_.seconds);
        return bars_svg(bars, last_report_.seconds, title, machine_text());
    }

    const SwapBench& bench_;
    // Before there are threads, and open files that their caretakers would inherit.
    IoSites sites_, plain_sites_;
    std::unique_ptr<Executor> executor_;
    trace::Recording recording_;
    std::unique_ptr<train::Rehearsal> rehearsal_;
    cost::Measurements machine_;
    std::optional<Plain> plain_{};
    Progress progress_;
    int done_ = 0;
    size_t last_begin_ = 0;
    Pass last_ = Pass::optimizer;
    PassReport last_report_{};
    std::vector<BenchRow> rows_{};
};

}  // namespace

const char* name_of(Pass pass) {
    constexpr std::array<const char*, train::kPasses> kNames{"swap-out", "swap-in",
                                                             "optimizer pass", "step"};
    return kNames[static_cast<size_t>(pass)];
}

SwapResult measure_swap(const SwapBench& bench) { return Swap(bench).run(); }

}  // namespace ferry::tools
