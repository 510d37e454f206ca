#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <optional>

#include "cost/operands.h"
#include "ferry/units.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "step_timeline.h"
#include "train/inside.h"
#include "train/kernels/step_kernels.h"
#include "train/measuring/measure.h"
#include "train/measuring/planning_measurements.h"
#include "train/prediction/rehearsal.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"
#include "train/stack/device_needs.h"
#include "train/stack/memory_left.h"
#include "train/stack/threads.h"
#include "train/stack/tier_stack.h"
#include "train/state/state_io.h"
#include "train/step/step.h"

namespace ferry::train {

using cost::Op;
using planner::Class;
using planner::Plan;

namespace {

constexpr double kForwardPart = 0.25;

// One segment each, as a block's matrices are; embedding and head as small as a layer can be.
std::vector<model::Layer> layers_for(const RehearsalOptions& options) {
    const int64_t count = std::max<int64_t>(options.layers, 1);
    const int64_t elements = round_up(ceil_div(options.parameters, count), optim::kLeaf);
    std::vector<model::Layer> layers;
    const auto add = [&](model::LayerKind kind, int64_t index, int64_t size) {
        layers.push_back({.kind = kind,
                          .index = index,
                          .segments = {{.offset = 0, .count = size}},
                          .elements = size,
                          .trainable_elements = size});
    };
    add(model::LayerKind::embedding, 0, optim::kLeaf);
    for (int64_t l = 0; l < count; ++l) add(model::LayerKind::block, l, elements);
    add(model::LayerKind::head, 0, optim::kLeaf);
    return layers;
}

// There is no model, and so no batch.
planner::PlanRequest request_without_model(const Config& config, const Device& device) {
    planner::PlanRequest request = request_of(config);
    request.micro_batches = 1;
    request.budgets.device_bytes = device_bytes_within(config.budgets.device_bytes, device);
    return request;
}

model::Numerics numerics_without_model(const Config& config) {
    model::Numerics numerics = numerics_of(config, {});
    numerics.sequence = numerics.micro_batch = 1;
    return numerics;
}

double state_share(const Plan& plan, swap::Tier tier) {
    int64_t there = 0, all = 0;
    for (const planner::Chunk& chunk : plan.chunks) {
        all += chunk.count;
        if (plan.objects[chunk.state].home == tier) there += chunk.count;
    }
    return static_cast<double>(there) / static_cast<double>(all);
}

// Where the plans of a rehearsal come from.
class Planning {
public:
    Planning(const Config& config, const RehearsalOptions& options, const Device& device)
        : request_(request_without_model(config, device)),
          numerics_(numerics_without_model(config)),
          options_(options),
          device_(device) {}

    Plan make() const {
        Plan plan = plan_with(request_.budgets.device_bytes);
        const bool limited = request_.budgets.device_bytes != kUnlimited;
        if (limited) require_state_on_device(plan);
        const bool buffers_alone = !limited && request_.swap.state_on_device.value_or(0) == 0;
        while (buffers_alone && keeps_weights(plan)) plan = plan_with(device_buffer_bytes(plan));
        return plan;
    }

private:
    Plan plan_with(int64_t device_bytes) const {
        constexpr int64_t kSmall = 4096;  // bytes of what only a model would have
        planner::PlanRequest request = request_;
        request.budgets.device_bytes = device_bytes;
        try {
            return planner::make_plan(request, layers_for(options_), numerics_,
                                      {.activation = kSmall,
                                       .scratch = kSmall,
                                       .overhead = overhead_of(device_),
                                       .maps_host = device_.kind() == DeviceKind::cuda},
                                      assumed_measurements(request.device, request.budgets.nvme));
        } catch (const planner::DoesNotFit& refusal) {
            if (refusal.tier() != swap::Tier::device) throw;
            Problem problem = refusal.problem();  // its other ways are a model's
            problem.remedy = refusal.larger() + ", or spread the parameters over more layers";
            throw Error(refusal.trouble(), std::move(problem));
        }
    }

    static bool keeps_weights(const Plan& plan) {
        return std::ranges::any_of(plan.layer_plans, &planner::LayerPlan::resident);
    }

    // State is kept there by whole chunks, so a part of one may be missing.
    void require_state_on_device(const Plan& plan) const {
        if (!request_.swap.state_on_device) return;
        const double on_device = *request_.swap.state_on_device;
        const double asked = std::min(on_device, 1 - request_.swap.state_on_nvme.value_or(0));
        const double kept = state_share(plan, swap::Tier::device);
        double elements = 0;
        for (const planner::Chunk& chunk : plan.chunks)
            elements += static_cast<double>(chunk.count);
        if (kept * elements + static_cast<double>(plan.chunk_elements) >= asked * elements) return;
        const Plan enough = plan_with(kUnlimited);
        const int64_t bytes = enough.device_bytes + enough.device_overhead_bytes;
        throw Error(Trouble::does_not_fit,
                    {.what = "the device has no room for so much of the optimizer state",
                     .where = "budgets.device, swap.state_on_device",
                     .measured = fmt::format("{:.4f} of it fits beside buffers and weights", kept),
                     .limit = fmt::format("{} for {:g} of it",
                                          format_bytes(request_.budgets.device_bytes), on_device),
                     .remedy = fmt::format("set budgets.device to {} ({}) or more, or lower "
                                           "swap.state_on_device",
                                           bytes, format_bytes(bytes))});
    }

    const planner::PlanRequest request_;
    const model::Numerics numerics_;
    const RehearsalOptions& options_;
    const Device& device_;
};

// Pauses where the device would compute; updates are the step's own.
class PausedKernels final : public swap::Kernels {
public:
    PausedKernels(StepKernels& updates, Device& device, double block_seconds)
        : updates_(updates),
          compute_(device.stream(StreamKind::compute)),
          block_seconds_(block_seconds) {}

    void run(const swap::Call& call) noexcept override {
        if (cost::is_update(*call.task)) return updates_.run(call);
        if (call.task->lane != swap::Lane::compute) return;
        cost::op::run(cost::op::Kernels{}, *call.task, call.at,
                      [&](const auto& operands) { pause(call, part_of(operands)); });
    }
    bool runs_beside(const swap::Task& task) const override { return updates_.runs_beside(task); }
    std::string describe(const swap::Call& call) const override { return updates_.describe(call); }

private:
    // Of a block's time: backward recomputes.
    template <class Operands>
    static double part_of(const Operands&) {
        return 0;
    }
    static double part_of(const cost::op::Forward<cost::Addressed>&) { return kForwardPart; }
    static double part_of(const cost::op::Backward<cost::Addressed>&) { return 1 - kForwardPart; }

    void pause(const swap::Call& call, double part) noexcept {
        const auto duration = static_cast<Nanos>(part * block_seconds_ * 1e9);
        if (duration == 0) return;
        try {
            compute_.pause(duration);
        } catch (const Error& error) {
            call.store->fail(error);
        }
    }

    StepKernels& updates_;
    Stream& compute_;
    double block_seconds_;
};

}  // namespace

class Rehearsal::OnRealTiers {
public:
    OnRealTiers(const Config& config, const RehearsalOptions& options, const Runtime& runtime)
        : config_(config),
          executor_(*runtime.executor),
          machine_(machine_for(config_)),
          hyper_(elements_hyper_of(config_)),
          device_(Device::open(config_.device, executor_)),
          stack_({.config = config_,
                  .share = share_,
                  .executor = executor_,
                  .device = *device_,
                  .machine = machine_},
                 std::nullopt) {
        stack_.plan(Planning(config_, options, *device_).make());
        stack_.reserve({.host_budget_bytes = plan_.host_bytes});
        if (options.measures)
            rates_ =
                time_updates_before_fill(stack_, share_.budgets, optim::scalars_of(hyper_, 1, 1.0));
        open(options, runtime);
        for (int p = 0; p < kPasses; ++p)
            schedules_[static_cast<size_t>(p)] = record(static_cast<Pass>(p));
        ScalarsByKind scalars;
        scalars.fill(optim::scalars_of(hyper_, 1, 1.0));
        stack_.warm(schedule(Pass::optimizer), scalars);
        stack_.fill([this] { fill(); });
        store().reset_report();
    }

    PassReport run(Pass pass) {
        if (pass == Pass::swap_out) fill_stages();
        stack_.kernels().states()[sequence_].after_outcome.fill(
            optim::scalars_of(hyper_, ++updates_, 1.0));  // an update ends the step before
        store().reset_report();
        const Nanos start = executor_.now();
        ++sequence_;
        store().append(schedule(pass), sequence_, sequence_);
        store().drain();
        return {.seconds = static_cast<double>(executor_.now() - start) * 1e-9,
                .lanes = store().report()};
    }

    cost::Measurements measure() {
        const optim::Scalars scalars = optim::scalars_of(hyper_, 1, 1.0);
        cost::Measurements found{.threads = stack_.teams().all().threads(),
                                 .memory_of = cost::Of::rank,
                                 .computes_on_host = device_->kind() == DeviceKind::cpu};
        found.copy_bytes_per_s = time_copies(stack_.bench(), buffer(Class::weight_staging));
        if (!rates_)
            rates_ = time_updates(
                stack_.teams(),
                as_left_now(machine_, left_of_budget(share_.budgets, plan_.host_bytes)), scalars,
                plan_, footprint_of_updates(plan_), staging_buffers(plan_, arena()));
        found.dram_bytes_per_s = rates_->bytes_per_s;  // the passes themselves show the rest
        found.device_bytes_per_s = found.computes_on_host
                                       ? found.dram_bytes_per_s
                                       : time_device_updates(stack_.bench(), scalars);
        found.check_bytes_per_s = time_checks(buffer(Class::state_staging));
        fill_buffers();  // some were measured on
        return found;
    }

    const Plan& plan() const { return plan_; }

    double bytes_of_pass(Pass pass, swap::Lane lane) const {
        double bytes = 0;
        for (const swap::Task& task : schedule(pass).tasks)
            bytes += task.lane == lane ? cost::bytes_of_update(task, planner::work_of(plan_)) : 0;
        return bytes;
    }

    double state_on(swap::Tier tier) const { return state_share(plan_, tier); }

    uint64_t state_hash() {
        return StateIo(plan_, store(), stack_.teams().all(), StateIo::staging_of(plan_, arena()))
            .hash();
    }

private:
    void open(const RehearsalOptions& options, const Runtime& runtime) {
        trace::Recording* const recording = runtime.given ? runtime.given->recording : nullptr;
        const double block_seconds =
            options.compute_seconds / static_cast<double>(plan_.layers.size() - 2);
        TierStack::Opening opening{.open_volume = runtime.open_volume,
                                   .instead =
                                       [&](StepKernels& updates) {
                                           return std::make_unique<PausedKernels>(updates, *device_,
                                                                                  block_seconds);
                                       },
                                   .recording = recording};
        for (size_t lane = 0; recording && lane < swap::lanes_of(1); ++lane)
            opening.rows[lane] = recording->add_row(
                "measured", std::string(swap::name_of(static_cast<swap::Lane>(lane))));
        stack_.open(opening);
    }

    const swap::Schedule& schedule(Pass pass) const {
        return schedules_[static_cast<size_t>(pass)];
    }

    swap::Schedule record(Pass pass) const {
        if (pass == Pass::step) return record_step(plan_, Previous::not_speculative, false);
        planner::Recorder recorder(plan_, "pass");
        using Move = planner::Recorder::Move;
        const Move how = pass == Pass::swap_in ? Move::in : Move::out;
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            const planner::Chunk& chunk = plan_.chunks[c];
            if (pass == Pass::optimizer) {
                recorder.update_chunk(static_cast<int64_t>(c), Op::update);
                continue;
            }
            if (stored(chunk.state)) recorder.move(chunk.state, Class::state_staging, how);
            if (stored(chunk.weight)) recorder.move(chunk.weight, Class::weight_staging, how);
        }
        return recorder.finish();
    }

    bool stored(swap::ObjectId object) const {
        return plan_.objects[object].home == swap::Tier::nvme;
    }
    std::span<std::byte> buffer(Class c) const {  // the first one
        const planner::Buffers& b = plan_.buffers[static_cast<size_t>(c)];
        return arena().subspan(static_cast<size_t>(b.offset), static_cast<size_t>(b.bytes));
    }

    // Positive numbers of one size in any type: state wherever p, m and v are cut out of them.
    void fill_words(std::span<std::byte> host) {
        constexpr int64_t kPart = 64 * kKiB;  // bytes that a thread fills at a time
        auto* words = reinterpret_cast<uint32_t*>(host.data());
        const int64_t count = std::ssize(host) / 4;
        stack_.teams().all().parallel(ceil_div(count, kPart), [&](int64_t part) {
            const int64_t end = std::min(count, (part + 1) * kPart);
            for (int64_t w = part * kPart; w < end; ++w) {
                const auto noise =
                    static_cast<uint32_t>(static_cast<uint64_t>(w + 1) * 0x9e3779b97f4a7c15U >> 32);
                words[w] = 0x3c803c80U | (noise & 0x007f007fU);
            }
        });
    }
    void fill_class(Class c) {
        const planner::Buffers& b = plan_.buffers[static_cast<size_t>(c)];
        for (int64_t i = 0; i < b.count; ++i)
            fill_words(arena().subspan(static_cast<size_t>(b.offset + i * b.bytes),
                                       static_cast<size_t>(b.bytes)));
    }
    void fill_stages() {
        fill_class(Class::state_staging);
        fill_class(Class::weight_staging);
    }

    void fill_buffers() {
        fill_stages();
        // A gradient after the pauses, on its way to the host: as all are at first.
        const planner::Buffers& wire = plan_.buffers[static_cast<size_t>(Class::wire)];
        for (int64_t i = 0; i < wire.count; ++i)
            fill_device(stack_.bench(), device_->memory().data() + wire.offset + i * wire.bytes,
                        wire.bytes, buffer(Class::state_staging));
    }

    void fill() {
        stack_.lock_homes();
        stack_.homes_locked();  // touched: filled in place below
        fill_buffers();
        for (const planner::Chunk& chunk : plan_.chunks) {
            for (const swap::ObjectId object : {chunk.weight, chunk.state, chunk.gradient}) {
                const auto bytes = static_cast<size_t>(plan_.objects[object].bytes);
                if (const auto home = store().in_host(object); !home.empty())
                    fill_words(home);
                else
                    store().put(object, buffer(Class::state_staging).first(bytes));
            }
        }
    }

    swap::Store& store() const { return stack_.store(); }
    std::span<std::byte> arena() const { return stack_.arena(); }

    const Config config_;
    const RankShare share_ = share_of(config_, {});
    Executor& executor_;
    const Topology machine_;
    const optim::Hyper hyper_;
    std::unique_ptr<Device> device_;
    // Before the stack: after an error its store still finishes tasks of these.
    std::array<swap::Schedule, kPasses> schedules_{};
    TierStack stack_;
    const Plan& plan_ = stack_.plan();
    std::optional<UpdateRates> rates_{};
    int64_t sequence_ = 0, updates_ = 0;
};

Rehearsal::Rehearsal(std::unique_ptr<OnRealTiers> tiers) : tiers_(std::move(tiers)) {}

Rehearsal::~Rehearsal() = default;

std::unique_ptr<Rehearsal> Rehearsal::make(const Config& config, const RehearsalOptions& options,
                                           const Runtime& runtime) {
    return std::unique_ptr<Rehearsal>(
        new Rehearsal(std::make_unique<OnRealTiers>(config, options, runtime)));
}

PassReport Rehearsal::run(Pass pass) { return tiers_->run(pass); }
cost::Measurements Rehearsal::measure() { return tiers_->measure(); }
const Plan& Rehearsal::plan() const { return tiers_->plan(); }
double Rehearsal::bytes_of_pass(Pass pass, swap::Lane lane) const {
    return tiers_->bytes_of_pass(pass, lane);
}
double Rehearsal::state_on(swap::Tier tier) const { return tiers_->state_on(tier); }
uint64_t Rehearsal::state_hash() { return tiers_->state_hash(); }

}  // namespace ferry::train
