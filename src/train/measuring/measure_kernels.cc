// How long kernels take: those of a step, those of saved activations, and a product.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/median.h"
#include "measure.h"
#include "planner/work.h"
#include "seconds_of_one.h"
#include "train/stack/device_needs.h"
#include "train/stack/seconds_of.h"

namespace ferry::train {
namespace {

// Keeps a GPU as busy as a run does: the step's kernels in their order, again and again. For about
// a second it draws more power than it is held to from then on, so the first kernels run at clocks
// that no step of a run of hours sees (decision 27). The CPU's are left as they come.
class Load {
public:
    Load(const swap::Schedule& step, const Bench& on) : on_(on) {
        if (on.device.kind() != DeviceKind::cuda) return;
        for (const swap::Task& task : step.tasks)
            if (cost::is_timed(task)) kernels_.push_back({&on.kernels, call_of(task, on)});
    }

    void run(double seconds) {
        if (kernels_.empty()) return;
        Stream& compute = on_.device.stream(StreamKind::compute);
        for (double spent = 0; spent < seconds; next_ = (next_ + 1) % kernels_.size())
            spent += seconds_on(compute, on_.executor, 1,
                                [&](int64_t) { kernels_[next_].start(compute); });
    }

private:
    const Bench& on_;
    std::vector<KernelCall> kernels_{};
    size_t next_ = 0;
};

// The kernels of a step in its order, again and again, each timed on the thread that runs it. Of a
// kind that a step has many of, a few in each round.
class Played {
public:
    Played(const swap::Schedule& step, const Bench& on) : on_(on) {
        constexpr int64_t kOfAKind = 4;
        const cost::WorkOf work_of = planner::work_of(on.plan);
        std::map<cost::KernelTimes::Kind, int64_t> counts;
        for (const swap::Task& task : step.tasks) {
            if (!cost::is_timed(task)) continue;
            const cost::KernelTimes::Kind kind = cost::KernelTimes::kind_of(task, work_of);
            if (counts[kind]++ < kOfAKind)
                kernels_.push_back({.kind = kind, .call = {&on.kernels, call_of(task, on)}});
        }
    }

    // The middle of the rounds' means.
    std::map<cost::KernelTimes::Kind, double> seconds(Together& together) {
        std::map<cost::KernelTimes::Kind, std::vector<double>> found;
        together.run(
            [&] {
                constexpr double kEnoughS = 0.5;
                constexpr int kLeast = 3, kMost = 9;
                round();  // warms the caches
                double spent = 0;
                for (int i = 0; i < kLeast || (i < kMost && spent < kEnoughS); ++i)
                    spent += note(round(), found);
            },
            [&] {
                if (!kernels_.empty()) run(next_++ % kernels_.size(), 1);
            });
        std::map<cost::KernelTimes::Kind, double> middle;
        for (const auto& [kind, means] : found) middle[kind] = median(means);
        return middle;
    }

private:
    struct Kernel {
        cost::KernelTimes::Kind kind{};
        KernelCall call{};
        double seconds = 0;  // when it ran last
        void start(Stream& stream) {
            stream.launch({[](void* context, uint64_t) {
                               auto& one = *static_cast<Kernel*>(context);
                               one.seconds =
                                   seconds_of([&] { one.call.kernels->run(one.call.call); });
                           },
                           this});
        }
    };
    using Sum = std::pair<double, int64_t>;  // seconds, and of how many

    void run(size_t first, size_t count) {
        seconds_on(on_.device.stream(StreamKind::compute), on_.executor,
                   static_cast<int64_t>(count), [&](int64_t i) {
                       kernels_[first + static_cast<size_t>(i)].start(
                           on_.device.stream(StreamKind::compute));
                   });
    }

    std::map<cost::KernelTimes::Kind, Sum> round() {
        constexpr size_t kTogether = 64;  // a stream holds so many with ease
        for (size_t first = 0; first < kernels_.size(); first += kTogether)
            run(first, std::min(kTogether, kernels_.size() - first));
        std::map<cost::KernelTimes::Kind, Sum> sums;
        for (const Kernel& kernel : kernels_) {
            auto& [seconds, count] = sums[kernel.kind];
            seconds += kernel.seconds;
            ++count;
        }
        return sums;
    }

    // Seconds of the round.
    static double note(const std::map<cost::KernelTimes::Kind, Sum>& round,
                       std::map<cost::KernelTimes::Kind, std::vector<double>>& means) {
        double all = 0;
        for (const auto& [kind, sum] : round) {
            means[kind].push_back(sum.first / static_cast<double>(sum.second));
            all += sum.first;
        }
        return all;
    }

    const Bench& on_;
    std::vector<Kernel> kernels_{};
    size_t next_ = 0;
};

cost::KernelTimes time_on_gpu(const swap::Schedule& step, const Bench& on) {
    constexpr double kSettle = 1.5, kBetween = 0.05;  // seconds of a GPU's load
    Stream& compute = on.device.stream(StreamKind::compute);
    Load load(step, on);
    load.run(kSettle);
    cost::KernelTimes found;
    for (auto& [kind, work] : distinct_kernels(step, on)) {
        load.run(kBetween);
        const auto time = [&, &kernel = work](int64_t times) {
            return seconds_on(compute, on.executor, times, [&](int64_t) { kernel.start(compute); });
        };
        found.seconds[kind] = seconds_of_one(time, alone());
    }
    return found;
}

}  // namespace

cost::KernelTimes time_kernels(const swap::Schedule& step, const Bench& on, Together& together) {
    if (on.device.kind() == DeviceKind::cuda) return time_on_gpu(step, on);
    cost::KernelTimes found;
    found.seconds = Played(step, on).seconds(together);
    return found;
}

model::OfSaved<double> time_saved(const Bench& on, Together& together) {
    model::OfSaved<double> seconds{};
    if (on.decoder == nullptr) return seconds;
    const auto buffer = [&on](planner::Class c) {
        return on.device.memory().data() + on.plan.buffers[static_cast<size_t>(c)].offset;
    };
    struct Work {
        const model::Decoder& decoder;
        model::Saved what;
        int64_t block;
        const std::byte* weights;
        std::byte* scratch;
        model::Documents documents{};
    };
    model::Documents documents;
    if (on.plan.documents) {
        const auto* start =
            reinterpret_cast<const int32_t*>(buffer(planner::Class::tokens)) + 2 * on.plan.tokens;
        documents = {.start = start, .end = start + on.decoder->numerics().whole_tokens()};
    }
    Stream& compute = on.device.stream(StreamKind::compute);
    for (const model::Saved what : model::kAllSaved) {
        const std::vector<double> flops = saved_flops(*on.decoder)[at(what)];
        Work work{*on.decoder,
                  what,
                  std::ranges::max_element(flops) - flops.begin(),
                  buffer(planner::Class::block_weights),
                  buffer(planner::Class::scratch),
                  documents};
        const Job job{[](void* context, uint64_t) {
                          const Work& w = *static_cast<const Work*>(context);
                          w.decoder.compute_saved(w.what, w.block, w.weights, w.scratch,
                                                  w.documents);
                      },
                      &work};
        seconds[at(what)] = seconds_of_one(
            [&](int64_t times) {
                return seconds_on(compute, on.executor, times,
                                  [&](int64_t) { compute.launch(job); });
            },
            together);
    }
    return seconds;
}

namespace {

// A square product of its own operands, in the device's memory.
struct Product {
    ops::Ops* ops;
    ops::Gemm gemm{};
    int64_t operand_bytes = 0, bytes = 0;
    std::byte* scratch = nullptr;

    Product(ops::Ops& with, DType type, int64_t side, std::byte* memory) : ops(&with) {
        constexpr int64_t kUnit = 256;
        operand_bytes = round_up(side * side * size_of(type), kUnit);
        const auto operand = [&](int64_t i) {
            return ops::View::of(memory + i * operand_bytes, type, side, side);
        };
        gemm = {.form = ops::Form::nt, .a = operand(0), .b = operand(1), .c = operand(2)};
        scratch = memory + 3 * operand_bytes;
        bytes = 3 * operand_bytes + ops->gemm_scratch_bytes(gemm);
    }
};

}  // namespace

double time_product(const Bench& on, std::span<const std::byte> numbers, Together& together) {
    constexpr int64_t kUnit = 256;  // sides are multiples of it
    // Buffers come first; behind them are weights that live here.
    const std::span<std::byte> memory =
        on.device.memory().first(static_cast<size_t>(overwritable_bytes(on.plan)));
    int64_t side = on.device.kind() == DeviceKind::cpu ? 1024 : 8192;
    const auto of = [&](int64_t n) { return Product(*on.ops, on.plan.compute, n, memory.data()); };
    while (side >= kUnit && of(side).bytes > std::ssize(memory)) side -= kUnit;
    if (side < kUnit) {
        together.run({}, {});
        return 0;
    }
    Product product = of(side);
    fill_device(on, memory.data(), 2 * product.operand_bytes, numbers);
    Stream& compute = on.device.stream(StreamKind::compute);
    constexpr int64_t kTimes = 3;
    const auto time = [&] {
        return seconds_on(compute, on.executor, kTimes, [&](int64_t) {
            compute.launch({[](void* context, uint64_t) {
                                const Product& p = *static_cast<const Product*>(context);
                                p.ops->gemm(p.gemm, p.scratch);
                            },
                            &product});
        });
    };
    double seconds = 0;
    together.run(
        [&] {
            time();
            seconds = of_three(time, together);
        },
        [&] { time(); });
    const auto n = static_cast<double>(side);
    return 2 * n * n * n / seconds;
}

}  // namespace ferry::train
