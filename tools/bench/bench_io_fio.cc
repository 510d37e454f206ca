#include "bench_io_fio.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "fio.h"
#include "progress.h"
#include "tools/machine/io_site.h"
#include "tools/process/interrupt.h"

namespace ferry::tools {
namespace {

enum class Side : uint8_t { ferry, fio, ferry_sealed };

// One side's samples, slice by slice, pair by pair in step with the other sides.
using Samples = std::vector<Sample>;

template <class Value>
std::vector<double> values_of(const Samples& samples, const Value& value) {
    std::vector<double> values;
    for (const Sample& sample : samples) values.push_back(value(sample));
    return values;
}

double bandwidth(const Sample& sample) { return sample.gb_per_s(); }
double cpu_a_gb(const Sample& sample) { return sample.cpu_s_per_gb(); }
double cpu_an_operation(const Sample& sample) { return sample.cpu_us_per_operation(); }

std::vector<double> quotients(const std::vector<double>& above, const std::vector<double>& below) {
    std::vector<double> out;
    for (size_t i = 0; i < above.size(); ++i) out.push_back(above[i] / below[i]);
    return out;
}

class Comparison {
public:
    explicit Comparison(const IoBench& bench)
        : bench_(bench),
          ground_(bench, {bench.paths.size()}),
          progress_(static_cast<int>(ground_.choice.pairs.size() * bench.accesses.size()) *
                    bench.pairs) {}

    FioRows run() {
        FioRows result{.left_out = ground_.choice.left_out};
        try {
            compare_all();
        } catch (const Error& error) {
            if (rows_.empty()) throw;
            result.ended_by = error;
        }
        result.rows = std::move(rows_);
        return result;
    }

private:
    void compare_all() {
        for (const int depth : bench_.depths) {
            if (interrupted()) break;
            progress_.clear();
            Rig rig(rig_options(bench_, ground_.sites.directories(), ground_.bytes, depth),
                    ground_.memory.bytes());
            for (const AccessPattern access : bench_.accesses) {
                for (const int64_t block : bench_.blocks)
                    if (ground_.choice.has(block, depth)) compare(rig, access, block, depth);
            }
        }
    }

    void compare(Rig& rig, AccessPattern access, int64_t block, int depth) {
        const std::string name = name_of(access, block, depth, rig.direct());
        std::array<Samples, 3> samples;
        std::vector<Side> sides{Side::ferry, Side::fio};
        if (bench_.integrity) sides.push_back(Side::ferry_sealed);
        for (int pair = 0; pair < bench_.pairs; ++pair) {
            // A B B A: a drift of the drive's speed hits all sides alike.
            for (const Side side : sides) {
                if (interrupted()) return;
                const Sample sample = slice(rig, side, access, block, depth);
                if (interrupted()) return;
                samples[static_cast<size_t>(side)].push_back(sample);
            }
            std::reverse(sides.begin(), sides.end());
            progress_.show(++done_,
                           fmt::format("{}: ferry {:.2f}, fio {:.2f} GB/s", name,
                                       samples[0].back().gb_per_s(), samples[1].back().gb_per_s()));
        }
        add_rows(name, block, samples[0], samples[1]);
        if (bench_.integrity) add_rows(name + ", integrity", block, samples[2], samples[1]);
    }

    Sample slice(Rig& rig, Side side, AccessPattern access, int64_t block, int depth) {
        if (side != Side::fio) {
            // While fio starts the drive rests, and one that meters its clients is faster after it.
            constexpr auto kStartOfFio = std::chrono::milliseconds(250);
            std::this_thread::sleep_for(kStartOfFio);
            return rig.run({.access = access,
                            .block_bytes = block,
                            .seconds = bench_.seconds,
                            .integrity = side == Side::ferry_sealed});
        }
        if (access.direction != Direction::read) rig.forget();
        const Sample sample = run_fio({.files = rig.files(),
                                       .access = access,
                                       .block_bytes = block,
                                       .depth = depth,
                                       .jobs = bench_.rings * static_cast<int>(bench_.paths.size()),
                                       .direct = rig.direct(),
                                       .seconds = bench_.seconds});
        if (sample.operations > 0 && sample.cpu_seconds <= 0)
            throw Error(Trouble::io,
                        {.what = "the CPU time that fio took could not be sampled",
                         .where = "--compare-fio",
                         .measured = fmt::format("a slice of {:.3f} s", sample.seconds),
                         .remedy = "give longer slices (--seconds), or stop what else runs here"});
        return sample;
    }

    void add_rows(const std::string& name, int64_t block, const Samples& ours, const Samples& fio) {
        const auto rate = values_of(ours, bandwidth), fio_rate = values_of(fio, bandwidth);
        rows_.push_back(compared(name, "GB/s", rate, fio_rate, quotients(rate, fio_rate)));
        // Below this size the operations cost, above it the bytes.
        const bool small = block < 64 * kKiB;
        const auto figure = small ? cpu_an_operation : cpu_a_gb;
        const auto cpu = values_of(ours, figure), fio_cpu = values_of(fio, figure);
        BenchRow row =
            compared(name, small ? "cpu us/op" : "cpu s/GB", cpu, fio_cpu, quotients(fio_cpu, cpu));
        std::vector<double> over;
        for (size_t i = 0; i < cpu.size(); ++i) over.push_back(cpu[i] - fio_cpu[i]);
        const auto [least, most] = std::minmax_element(over.begin(), over.end());
        row.more = {{"over fio", median(over)}, {"over, least", *least}, {"over, most", *most}};
        rows_.push_back(std::move(row));
    }

    const IoBench& bench_;
    IoGround ground_;
    Progress progress_;
    int done_ = 0;
    std::vector<BenchRow> rows_{};
};

}  // namespace

FioRows compare_with_fio(const IoBench& bench) { return Comparison(bench).run(); }

}  // namespace ferry::tools
