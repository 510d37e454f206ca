#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

#include "base/median.h"
#include "ops/timed_stream.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "slow_shapes.h"
#include "train/kernels/state_span.h"
#include "train/kernels/step_kernels.h"
#include "train/measuring/measure.h"
#include "train/prediction/kernel_profile.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"
#include "train/stack/device_needs.h"
#include "train/stack/threads.h"
#include "train/stack/tier_stack.h"
#include "train/step/step.h"

namespace ferry::train {

using ops::OpCall;
using ops::TimedOps;
using planner::Plan;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kPattern = 16 * kMiB;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Plans {
    Plan run{}, buffers{};  // a step's plan, and one of the same buffers alone
};

Plans plans_of(const Config& config) {
    const auto predictor = Predictor::make(config);
    Plans found{.run = predictor->plan(request_of(config))};
    found.buffers = predictor->plan(request_of_buffers(request_of(config), found.run));
    found.buffers.host_bytes = found.buffers.io_bytes;
    return found;
}

// A kind of kernel, how often a step runs it, and what its operations took, round by round.
struct Kernel {
    cost::KernelTimes::Kind kind{};
    swap::Call call{};
    int64_t count = 0;
    std::vector<OpCall> calls{};
    std::vector<std::vector<double>> seconds{};  // by call: one a round
};

class Profiler {
public:
    Profiler(const Config& config, const Plans& plans, bool tunes)
        : config_(config),
          plan_(plans.run),
          tunes_(tunes),
          executor_(make_thread_executor()),
          device_(Device::open(config.device, *executor_)),
          stack_({.config = config,
                  .share = share_,
                  .executor = *executor_,
                  .device = *device_,
                  .machine = machine_for(config)},
                 timed_model()) {
        Plan with_patterns = plans.buffers;
        with_patterns.device_bytes += 2 * kPattern;  // behind the buffers
        stack_.plan(std::move(with_patterns));
        stack_.reserve({.host_budget_bytes = sample_.host_bytes, .name = "staging"});
        stack_.open({.buffers_alone = true});
        kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
        bench_.emplace(stack_.bench());
        step_ = record_step(sample_, Previous::not_speculative, false);
        for (const swap::Task& task : step_.tasks) keep(task);
        count_rounds();
    }

    const ops::ProductTable& tuned() const { return tuner_->tuned_products(); }

    KernelProfile run(int rounds) {
        KernelProfile found{.device = device_->architecture(),
                            .tokens = stack_.decoder().numerics().tokens() * plan_.micro_batches,
                            .attention_saved = plan_.blocks_saving(model::Saved::attention),
                            .mlp_saved = plan_.blocks_saving(model::Saved::mlp),
                            .projections_saved = plan_.blocks_saving(model::Saved::projections)};
        const Patterns patterns = make_patterns(staging_patterns(), stack_.decoder().shape().vocab);
        found.product_flops_per_s = time_product(*bench_, patterns.numbers);
        fill_device(*bench_, pattern(0), kPattern, patterns.numbers);
        fill_device(*bench_, pattern(1), kPattern, patterns.tokens);
        found.copy_bytes_per_s = time_copy();
        fill();
        for (Kernel& kernel : kernels_of_step_) warm(kernel);
        for (int round = 0; round < rounds; ++round) {
            load();
            fill();
            for (Kernel& kernel : kernels_of_step_) time(kernel);
            for (Kernel& kernel : rounds_of_runs_) time_round(kernel);
            time_update();
            fill();  // updates wrote over the tokens, too, which the next round's load reads
        }
        stack_.store().drain();  // throws what went wrong
        for (const auto* kernels : {&kernels_of_step_, &rounds_of_runs_})
            for (const Kernel& kernel : *kernels) add(kernel, found);
        add(update_, found);
        return found;
    }

private:
    // Its operations are those of a run, and each call of them is noted.
    TierStack::Model timed_model() {
        const model::Shape shape = model_of(config_).shape;
        return {.shape = model::slice_of(shape, {config_.parallel.tensor}),
                .numerics = numerics_of(config_, shape),
                .layers = layers_of(config_, shape, 1),
                .around = [this](ops::Ops& own) -> ops::Ops& {
                    if (tunes_) tune(own);
                    return timed_.emplace(own, *device_).ops();
                }};
    }
    void tune(ops::Ops& own) {
        tuner_ = ops::tuner_of(own);
        if (tuner_ == nullptr) {
            throw Error(Trouble::usage, {.what = "there are no products to tune",
                                         .where = "device",
                                         .measured = device_->architecture(),
                                         .limit = "cuda",
                                         .remedy = "set device to cuda, on a machine with a GPU"});
        }
        tuner_->tune_products();
    }
    StepKernels& kernels() { return stack_.kernels(); }
    Team& team() { return stack_.teams().all(); }
    int64_t buffer_bytes() const { return sample_.device_bytes - 2 * kPattern; }

    void keep(const swap::Task& task) {
        if (!cost::is_timed(task)) return;
        const cost::KernelTimes::Kind kind =
            cost::KernelTimes::kind_of(task, planner::work_of(sample_));
        const auto known = std::ranges::find(kernels_of_step_, kind, &Kernel::kind);
        if (known != kernels_of_step_.end()) {
            ++known->count;
            return;
        }
        kernels_of_step_.push_back({.kind = kind, .call = call_of(task, *bench_), .count = 1});
    }

    // Where the device updates neighbouring chunks at once it rounds their gradient at once, too.
    // The buffers alone have no such runs, and the step has fewer roundings of a chunk.
    void count_rounds() {
        const auto rounds = [](const Kernel& kernel) {
            return cost::row_of(static_cast<cost::Op>(kernel.kind[0])).spans_run;
        };
        for (Kernel& kernel : kernels_of_step_) kernel.count *= rounds(kernel) ? 0 : 1;
        const swap::Schedule step = record_step(plan_, Previous::not_speculative, false);
        for (const swap::Task& task : step.tasks) {
            if (!cost::is_timed(task)) continue;
            const Kernel found{.kind = cost::KernelTimes::kind_of(task, planner::work_of(plan_))};
            if (!rounds(found)) continue;
            Kernel* known = nullptr;
            for (auto* kernels : {&kernels_of_step_, &rounds_of_runs_}) {
                const auto at = std::ranges::find(*kernels, found.kind, &Kernel::kind);
                if (at != kernels->end()) known = &*at;
            }
            if (known == nullptr) known = &rounds_of_runs_.emplace_back(found);
            ++known->count;
        }
        std::erase_if(kernels_of_step_, [](const Kernel& kernel) { return kernel.count == 0; });
    }

    // ------------------------------------------------------------ memory

    std::span<std::byte> staging_patterns() {
        host_pattern_.resize(static_cast<size_t>(kPattern) / 8);
        return std::as_writable_bytes(std::span(host_pattern_));
    }
    std::byte* pattern(int64_t which) {
        return device_->memory().data() + buffer_bytes() + which * kPattern;
    }
    // Kernels work in place: what a round begins with is the same in all of them, and ordinary
    // numbers.
    void fill() {
        Stream& stream = device_->stream(StreamKind::compute);
        for (size_t c = 0; c < planner::kClasses; ++c) {
            const planner::Buffers& b = sample_.buffers[c];
            if (b.tier != swap::Tier::device ||
                static_cast<planner::Class>(c) == planner::Class::lists)
                continue;
            const bool tokens = static_cast<planner::Class>(c) == planner::Class::tokens;
            std::byte* to = device_->memory().data() + b.offset;
            const int64_t bytes = b.bytes * b.count;
            for (int64_t at = 0; at < bytes; at += kPattern)
                stream.copy(to + at, pattern(tokens ? 1 : 0), std::min(kPattern, bytes - at));
        }
        compute_.wait();
        fill_documents(*bench_);
    }

    // ------------------------------------------------------------ kernels

    void warm(Kernel& kernel) {
        compute_.launch([&] { kernels().run(kernel.call); });
        if (device_->kind() == DeviceKind::cpu) return;
        compute_.launch([&] {
            timed_->begin(TimedOps::Mode::count);
            kernels().run(kernel.call);
        });
        kernel.calls = timed_->take();
    }

    void time(Kernel& kernel) {
        const double enqueued_s = compute_.launch([&] { kernels().run(kernel.call); });
        compute_.time_calls(
            *timed_, [&] { kernels().run(kernel.call); }, enqueued_s);
        note(kernel, timed_->take());
    }

    // A run's, or as many of its elements as there is room for.
    void time_round(Kernel& kernel) {
        const int64_t wire = size_of(plan_.wire), leaf = 1;  // of an element, more than enough
        const int64_t elements = kernel.kind[2], room = overwritable_bytes(sample_);
        const int64_t count =
            std::min(elements, round_down(room / (4 + wire + leaf), optim::kLeaf));
        if (count == 0) return;
        std::byte* at = device_->memory().data();
        const auto round = [&] {
            timed_->ops().round_gradient(reinterpret_cast<const float*>(at), count, plan_.wire,
                                         at + 4 * count,
                                         reinterpret_cast<float*>(at + (4 + wire) * count));
        };
        if (kernel.seconds.empty()) kernel.count *= ceil_div(elements, count);
        if (kernel.calls.empty() && device_->kind() == DeviceKind::cuda) {
            compute_.launch([&] {
                round();
                timed_->begin(TimedOps::Mode::count);
                round();
            });
            kernel.calls = timed_->take();
        }
        compute_.time_calls(*timed_, round, 1e-3);
        note(kernel, timed_->take());
    }

    static void note(Kernel& kernel, std::vector<OpCall> calls) {
        if (kernel.calls.empty()) kernel.calls = calls;
        FERRY_CHECK(kernel.calls.size() == calls.size(), "a kernel calls other operations");
        kernel.seconds.resize(calls.size());
        for (size_t i = 0; i < calls.size(); ++i) kernel.seconds[i].push_back(calls[i].seconds);
    }

    // A GPU's clock falls within a second of load to what its power limit leaves (decision 27).
    void load() {
        if (device_->kind() == DeviceKind::cpu) return;
        const double wanted = loaded_ ? 0.3 : 1.5;
        loaded_ = true;
        for (const auto start = Clock::now(); seconds_since(start) < wanted;) {
            for (Kernel& kernel : kernels_of_step_)
                compute_.launch([&] { kernels().run(kernel.call); });
        }
    }

    double time_copy() {
        const int64_t most = 2 * kGiB, width = 4096;
        const int64_t room = std::min(buffer_bytes(), overwritable_bytes(sample_));
        const int64_t half = std::min(most, round_down(room / 2, 4 * width));
        const int64_t rows = half / width / 4;
        if (rows == 0) return 0;
        std::byte* memory = device_->memory().data();
        const auto from = ops::View::of(memory, DType::f32, rows, width);
        const auto to = ops::View::of(memory + half, DType::f32, rows, width);
        double best = 0;
        for (int i = 0; i < 4; ++i) {
            compute_.time_calls(
                *timed_,
                [&] {
                    timed_->ops().copy_out(from, to);
                    timed_->ops().cast(from, to);
                },
                1e-4);
            for (const OpCall& call : timed_->take())
                best = std::max(best, call.bytes / call.seconds);
        }
        return best;
    }

    // ------------------------------------------------------------ updates

    // The chunks whose state this device updates.
    std::vector<const planner::Chunk*> updated() const {
        std::vector<const planner::Chunk*> chunks;
        for (const planner::Chunk& chunk : plan_.chunks) {
            const bool here = device_->kind() == DeviceKind::cpu ||
                              (chunk.state != swap::kNoObject &&
                               plan_.objects[chunk.state].home == swap::Tier::device);
            if (chunk.trainable && !chunk.replica && here) chunks.push_back(&chunk);
        }
        return chunks;
    }

    // As many elements as the device updates together, or as there is room for, through all of the
    // buffers.
    void time_update() {
        const auto chunks = updated();
        if (chunks.empty()) return;
        const StateFormat& kept = plan_.state;
        const int64_t each = ceil_div(kept.bytes(optim::kLeaf), optim::kLeaf) +
                             size_of(plan_.compute) + size_of(plan_.wire);
        const int64_t room = overwritable_bytes(sample_);
        int64_t together = 0;
        for (const planner::Chunk* chunk : chunks)
            together = std::max(together, plan_.elements_of_run(*chunk));
        const int64_t count = std::min(together, round_down(room / each, optim::kLeaf));
        if (count == 0) return;
        const optim::Scalars scalars = optim::scalars_of(elements_hyper_of(config_), 1, 1.0);
        const int64_t places = std::clamp<int64_t>(room / (count * each), 1, 8);
        const OpCall what{.name = "update " + std::string(name_of(scalars.method)),
                          .shape = std::to_string(count) + " elements",
                          .bytes = static_cast<double>(update_bytes_as_asked(plan_, count))};
        const auto pass = [&] {
            for (int64_t i = 0; i < places; ++i)
                timed_->note(what, [&] { update(count, i * count * each, scalars); });
        };
        if (update_.calls.empty() && device_->kind() == DeviceKind::cuda) {
            compute_.launch([&] {
                pass();
                timed_->begin(TimedOps::Mode::count);
                pass();
            });
            update_.calls = timed_->take();
        }
        compute_.time_calls(*timed_, pass, 1e-3);
        note(update_, timed_->take());
        int64_t elements = 0;
        for (const planner::Chunk* chunk : chunks) elements += chunk->count;
        updates_ = ceil_div(elements, count);
    }

    void update(int64_t count, int64_t offset, const optim::Scalars& scalars) {
        std::byte* at = device_->memory().data() + offset;
        optim::Span span = state_span(plan_.state, count, at, at);
        const int64_t state = plan_.state.bytes(count);
        span.weight = at + state;
        span.weight_type = plan_.compute;
        if (plan_.state.split) span.weight_in = static_cast<const uint16_t*>(span.weight);
        span.gradient = at + state + count * size_of(plan_.compute);
        span.gradient_type = plan_.wire;
        if (device_->kind() == DeviceKind::cpu) return optim::update(team(), span, scalars);
        optim::cuda::update(span, scalars, device_->stream(StreamKind::compute).native());
    }

    // ------------------------------------------------------------ results

    // Calls alike become one line of the kernel.
    void add(const Kernel& kernel, KernelProfile& found) const {
        const bool update = &kernel == &update_;
        const std::string name = update ? "update" : cost::KernelTimes::name_of(kernel.kind);
        const size_t first = found.ops.size();
        for (size_t i = 0; i < kernel.seconds.size(); ++i) {
            const OpCall& call = kernel.calls[i];
            const double seconds = median(kernel.seconds[i]);
            const auto alike = std::find_if(found.ops.begin() + static_cast<ptrdiff_t>(first),
                                            found.ops.end(), [&](const ProfiledOp& known) {
                                                return known.call.name == call.name &&
                                                       known.call.shape == call.shape;
                                            });
            if (alike == found.ops.end()) {
                found.ops.push_back({.kernel = name, .call = call, .calls = 1});
                found.ops.back().call.seconds = seconds;
                continue;
            }
            alike->call.seconds += seconds;
            ++alike->calls;
        }
        for (size_t i = first; i < found.ops.size(); ++i) {
            found.ops[i].call.seconds /= static_cast<double>(found.ops[i].calls);
            found.ops[i].calls = update ? updates_ : found.ops[i].calls * kernel.count;
        }
    }

    const Config& config_;
    const RankShare share_ = share_of(config_, {});
    const Plan& plan_;
    const bool tunes_;
    ops::TunesProducts* tuner_ = nullptr;  // of the stack's operations
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Device> device_;
    ops::TimedStream compute_{*device_, *executor_};
    std::optional<TimedOps> timed_{};  // around the stack's operations, which end first
    TierStack stack_;
    const Plan& sample_ = stack_.plan();
    std::vector<double> host_pattern_{};
    std::optional<Bench> bench_{};
    swap::Schedule step_{};  // whose tasks the kernels' calls point to
    std::vector<Kernel> kernels_of_step_{}, rounds_of_runs_{};
    Kernel update_{};
    int64_t updates_ = 0;
    bool loaded_ = false;
};

}  // namespace

KernelProfile profile_kernels(const Config& config, int rounds, ops::ProductTable* tuned) {
    Config profiled = config;
    // Tuning replaces a table, also one that this machine refuses.
    if (tuned != nullptr) profiled.numerics.products.clear();
    const Plans plans = plans_of(profiled);
    Profiler profiler(profiled, plans, tuned != nullptr);
    KernelProfile found = profiler.run(rounds);
    if (tuned != nullptr) *tuned = profiler.tuned();
    return found;
}

std::optional<std::vector<ops::SlowPath>> slow_operations(const Config& config, bool here) {
    if (config.device == DeviceKind::cpu) return std::vector<ops::SlowPath>{};
    const model::Shape shape = model_of(config).shape;
    std::vector<ops::SlowPath> by_shape =
        slow_shapes(model::slice_of(shape, {config.parallel.tensor}), numerics_of(config, shape),
                    config.batch.micro_batches);
    if (!here && by_shape.empty()) return std::nullopt;
    if (!here) return by_shape;
    const auto executor = make_thread_executor();
    const auto device = Device::open(DeviceKind::cuda, *executor);
    Team team(1);
    const auto ops = ops_on(*device, config, team);
    const model::Decoder decoder = decoder_of(config, 1, *ops);
    decoder.scratch_bytes();  // asks for every operation's, block by block
    std::vector<ops::SlowPath> found = ops::slow_paths(*ops);
    for (ops::SlowPath& path : found) path.times *= config.batch.micro_batches;
    found.insert(found.end(), by_shape.begin(), by_shape.end());
    return found;
}

}  // namespace ferry::train
