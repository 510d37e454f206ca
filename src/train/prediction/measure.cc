#include "measure.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/median.h"
#include "planner/recorder.h"
#include "planner/work.h"
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

}  // namespace

planner::PlanRequest request_of_buffers(planner::PlanRequest request, const planner::Plan& plan) {
    request.budgets = {.device_bytes = plan.device_overhead_bytes + device_buffer_bytes(plan)};
    request.durable = false;
    request.swap = {.chunk_elements = plan.chunk_elements,
                    .groups = plan.groups,
                    .state_on_device = 0,
                    .save_attention = plan.blocks_saving(model::Saved::attention),
                    .save_mlp = plan.blocks_saving(model::Saved::mlp),
                    .save_projections = plan.blocks_saving(model::Saved::projections),
                    .save_inputs = plan.blocks_saving_inputs()};
    return request;
}

Patterns make_patterns(std::span<std::byte> memory, int64_t vocab) {
    const size_t half = memory.size() / 8 * 4;
    const std::span<std::byte> numbers = memory.first(half), tokens = memory.subspan(half, half);
    for (size_t i = 0; i < half / 4; ++i) {
        const auto noise = static_cast<uint32_t>((i + 1) * 2654435761U >> 16);
        const uint32_t small = 0x3c80U | (noise & 0x807fU);  // +-0.016 to 0.031, as bf16
        reinterpret_cast<uint32_t*>(numbers.data())[i] = small << 16 | small;
        reinterpret_cast<uint32_t*>(tokens.data())[i] = noise % static_cast<uint32_t>(vocab);
    }
    return {numbers, tokens};
}

void fill_buffers(const Bench& on, const Patterns& patterns) {
    for (size_t c = 0; c < planner::kClasses; ++c) {
        const planner::Buffers& b = on.plan.buffers[c];
        if (b.tier != swap::Tier::device || static_cast<planner::Class>(c) == planner::Class::lists)
            continue;
        const auto from = static_cast<planner::Class>(c) == planner::Class::tokens
                              ? patterns.tokens
                              : patterns.numbers;
        fill_device(on, on.device.memory().data() + b.offset, b.bytes * b.count, from);
    }
    fill_documents(on);
}

namespace {

// Of three. Alone the shortest, else the middle one: what the others do beside it is no
// disturbance.
template <class Time>
double of_three(const Time& time, const Together& together) {
    const std::vector<double> found{time(), time(), time()};
    return together.size() > 1 ? median(found) : std::ranges::min(found);
}

// Seconds of one run. `time`: seconds of one among so many.
template <class Time>
double seconds_of_one(const Time& time, Together& together) {
    constexpr double kShort = 2e-3;  // seconds: shorter work is repeated, its launch is not counted
    constexpr int64_t kRepeats = 20;
    double seconds = 0;
    together.run(
        [&] {
            time(1);
            const double once = time(1);
            const auto times =
                std::clamp<int64_t>(static_cast<int64_t>(kShort / once), 1, kRepeats);
            seconds = of_three([&] { return time(times); }, together);
        },
        [&] { time(1); });
    return seconds;
}

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

double time_checks(std::span<std::byte> bytes, Together& together) {
    std::vector<uint64_t> sums(static_cast<size_t>(aio::pieces_of(std::ssize(bytes))));
    const auto time = [&] { return seconds_of([&] { aio::seal(bytes, 1, sums); }); };
    double seconds = 0;
    together.run(
        [&] {
            time();
            seconds = of_three(time, together);
        },
        [&] { time(); });
    return static_cast<double>(bytes.size()) / seconds;
}

double time_copies(const Bench& on, std::span<std::byte> host, Together& together) {
    const std::span<std::byte> device = on.device.memory();
    const auto bytes = static_cast<int64_t>(std::min(device.size(), host.size()));
    constexpr int64_t kMost = 64;  // copies on their way
    Stream& stream = on.device.stream(StreamKind::d2h);
    const int64_t times = std::clamp<int64_t>(256 * kMiB / bytes, 1, kMost);
    // From one place after the other, as a step copies: the last one's may still be in the caches.
    const int64_t places = std::ssize(device) / bytes;
    int64_t next = 0;
    const auto time = [&] {
        return seconds_on(stream, on.executor, times, [&](int64_t) {
            stream.copy(host.data(), device.data() + next++ % places * bytes, bytes);
        });
    };
    double seconds = 0;
    together.run([&] { seconds = of_three(time, together); }, [&] { time(); });
    return static_cast<double>(bytes) / seconds;
}

double time_device_copies(const Bench& on, Together& together) {
    constexpr int64_t kMost = 2 * kGiB, kWidth = 4096;
    if (on.ops == nullptr) return 0;
    const int64_t half = std::min(kMost, overwritable_bytes(on.plan) / 2);
    const int64_t rows = half / (4 * kWidth);
    if (rows == 0) {
        together.run({}, {});
        return 0;
    }
    std::byte* memory = on.device.memory().data();
    struct Copy {
        ops::Ops& ops;
        ops::View from, to;
    } copy{*on.ops, ops::View::of(memory, DType::f32, rows, kWidth),
           ops::View::of(memory + rows * 4 * kWidth, DType::f32, rows, kWidth)};
    const Job job{[](void* context, uint64_t) {
                      const Copy& c = *static_cast<const Copy*>(context);
                      c.ops.copy_out(c.from, c.to);
                  },
                  &copy};
    Stream& compute = on.device.stream(StreamKind::compute);
    const double seconds = seconds_of_one(
        [&](int64_t times) {
            return seconds_on(compute, on.executor, times, [&](int64_t) { compute.launch(job); });
        },
        together);
    return 2 * static_cast<double>(rows * 4 * kWidth) / seconds;
}

void time_gathers(const Bench& on, comm::Communicator& ranks, cost::Measurements& measured) {
    zero::Partition all = on.plan.partition;
    all.rank = ranks.rank();
    all.ranks = ranks.size();
    all.sharding.weights = true;
    all.codecs = {};  // the bytes themselves are timed
    const auto first = static_cast<size_t>(std::max<int64_t>(all.stage.first, 1));
    const model::Layer& block = on.plan.layers[first];
    const planner::Buffers& b = on.plan.buffers[static_cast<size_t>(planner::Class::block_weights)];
    std::byte* whole = on.device.memory().data() + b.offset;
    constexpr comm::Topic kTopic{.of = "weights, to measure"};
    const auto best = [&](int64_t times, const auto& gather) {
        const auto time = [&](int64_t count) {
            std::atomic<uint64_t> done = 0;
            const double seconds = seconds_of([&] {
                for (int64_t i = 0; i < count; ++i) gather();
                ranks.signal(done);
                while (done.load(std::memory_order_acquire) == 0) on.executor.wait(kForever);
                ranks.check();
            });
            return seconds / static_cast<double>(count);
        };
        time(1);  // connections are made at the first exchange of a size
        return std::min({time(times), time(times), time(times)});
    };
    const double block_s = best(4, [&] {
        zero::gather_weights(ranks, all, block, on.plan.compute, nullptr, whole, kTopic);
    });
    constexpr int64_t kFew = 256;  // bytes of a rank, and of a kernel's smallest unit
    const comm::Gather few{whole + ranks.rank() * kFew, whole, kFew};
    const double few_s = best(16, [&] { ranks.all_gather({&few, 1}, kTopic); });
    const double overhead_s = std::min(few_s, block_s / 2);
    const auto bytes = static_cast<double>(zero::gathered_bytes(all, block, on.plan.compute));
    measured.comm_bytes_per_s = bytes / (block_s - overhead_s);
    measured.comm_overhead_s = overhead_s;
}

std::span<std::byte> staging_buffers(const planner::Plan& plan, std::span<std::byte> host) {
    const auto begin_of = [&](planner::Class c) {
        return static_cast<size_t>(plan.buffers[static_cast<size_t>(c)].offset);
    };
    const size_t first = begin_of(planner::Class::state_staging);
    return host.subspan(first, begin_of(planner::Class::host_tokens) - first);
}

cost::Measurements take_measurements(const swap::Schedule& step, const Bench& on, NodeTeams& teams,
                                     const optim::Scalars& scalars, std::span<std::byte> host,
                                     int64_t vocab, const std::function<UpdateRates()>& updates,
                                     Together& together) {
    const auto staging = [&](planner::Class c) {
        const planner::Buffers& b = on.plan.buffers[static_cast<size_t>(c)];
        return host.subspan(static_cast<size_t>(b.offset), static_cast<size_t>(b.bytes));
    };
    const std::span<std::byte> state = staging(planner::Class::state_staging),
                               weight = staging(planner::Class::weight_staging);
    const Patterns patterns = make_patterns(state, vocab);
    // The best that a product reaches: before the kernels' load. It overwrites device buffers.
    const double product = time_product(on, patterns.numbers, together);
    fill_buffers(on, patterns);
    cost::Measurements found{.memory_of = cost::Of::rank,
                             .computes_on_host = on.device.kind() == DeviceKind::cpu,
                             .product_flops_per_s = product,
                             .kernels = time_kernels(step, on, together)};
    found.kernels.saved_s = time_saved(on, together);
    found.copy_bytes_per_s = time_copies(on, weight, together);
    set_updates(updates(), found);
    found.check_bytes_per_s = time_checks(state, together);
    found.threads = teams.all().threads();
    found.device_bytes_per_s =
        found.computes_on_host ? found.dram_bytes_per_s : time_device_updates(on, scalars);
    found.device_copy_bytes_per_s = time_device_copies(on, together);
    agree_on_slowest(together, found);
    return found;
}

}  // namespace ferry::train
