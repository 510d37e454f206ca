#include "ferry/rehearsal.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "ferry/pinned_mem.h"
#include "measure.h"
#include "predict.h"
#include "settle.h"
#include "setup.h"
#include "state_io.h"
#include "step.h"
#include "step_kernels.h"

namespace ferry::train {

using planner::Class;
using planner::Op;
using planner::Plan;

namespace {

constexpr double kForwardPart = 0.25;  // of a block's time: backward recomputes

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

Config without_model(const Config& config) {
    Config bare = config;
    bare.model = {};
    bare.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 1};
    return bare;
}

// On the device there is room for buffers: weights are in host memory, or further away.
Plan plan_of(Config config, const RehearsalOptions& options) {
    constexpr int64_t kSmall = 4096;  // bytes of what only a model would have
    const auto plan = [&] {
        return planner::make_plan(config, layers_for(options), numerics_of(config),
                                  {.activation = kSmall, .scratch = kSmall}, format_of(config),
                                  planner::default_figures(config));
    };
    const auto keeps_weights = [](const Plan& made) {
        return std::any_of(made.layer_plans.begin(), made.layer_plans.end(),
                           [](const planner::LayerPlan& layer) { return layer.resident; });
    };
    Plan made = plan();
    while (keeps_weights(made)) {
        config.budgets.device_bytes = device_buffer_bytes(made);
        made = plan();
    }
    return made;
}

// Pauses where the device would compute; updates are real.
class PausedKernels final : public swap::Kernels {
public:
    PausedKernels(const Plan& plan, NodeTeams& teams, double block_seconds)
        : updates_(plan, teams, {}), block_seconds_(block_seconds) {}

    void run(const swap::Call& call) noexcept override {
        if (call.task->lane == swap::Lane::compute) return pause(static_cast<Op>(call.task->op));
        if (static_cast<Op>(call.task->op) != Op::load_tokens) updates_.run(call);
    }
    std::string describe(const swap::Call& call) const override { return updates_.describe(call); }
    StepStates& states() { return updates_.states(); }

private:
    void pause(Op op) const {
        const double part = op == Op::forward    ? kForwardPart
                            : op == Op::backward ? 1 - kForwardPart
                                                 : 0;
        if (part > 0 && block_seconds_ > 0)
            std::this_thread::sleep_for(std::chrono::duration<double>(part * block_seconds_));
    }

    StepKernels updates_;
    double block_seconds_;
};

class RealTiers final : public Rehearsal {
public:
    RealTiers(const Config& config, const RehearsalOptions& options, const Runtime& runtime)
        : config_(without_model(config)),
          executor_(*runtime.executor),
          machine_(machine_for(config_)),
          teams_(make_teams(config_, machine_, executor_, 1)),
          hyper_(hyper_of(config_)),
          device_(Device::open(DeviceKind::cpu, executor_)),
          plan_(within_memory(plan_of(config_, options), config_, machine_, *device_)),
          pool_(machine_, plan_.host_bytes),
          arena_(reserve()),
          volume_(plan_.slot_classes.empty()
                      ? nullptr
                      : runtime.open_volume(volume_options(config_, plan_, machine_, arena_, 0),
                                            executor_)),
          kernels_(plan_, *teams_,
                   options.compute_seconds / static_cast<double>(plan_.layers.size() - 2)),
          store_(swap::Store::make(store_options(runtime.recording), executor_, *device_,
                                   volume_.get(), kernels_)) {
        for (int p = 0; p < kPasses; ++p)
            schedules_[static_cast<size_t>(p)] = record(static_cast<Pass>(p));
        fill();
        store_->reset_report();
    }

    PassReport run(Pass pass) override {
        if (pass == Pass::swap_out) fill_stages();
        kernels_.states()[sequence_].settled.fill(
            optim::scalars_of(hyper_, ++updates_, 1.0));  // an update ends the step before
        store_->reset_report();
        const Nanos start = executor_.now();
        ++sequence_;
        store_->append(schedule(pass), sequence_, sequence_);
        store_->drain();
        return {.seconds = static_cast<double>(executor_.now() - start) * 1e-9,
                .lanes = store_->report()};
    }

    Machine measure() override {
        const Bench on{plan_, *device_, executor_, kernels_, *store_};
        Machine machine{.threads = teams_->all().threads()};
        machine.links.copy_bytes_per_s = time_copies(on, buffer(Class::weight_piece));
        machine.links.dram_bytes_per_s =
            time_updates(*teams_, machine_, optim::scalars_of(hyper_, 1, 1.0), plan_,
                         updated_bytes(plan_))
                .bytes_per_s;
        machine.check_bytes_per_s = time_checks(buffer(Class::stage));
        return machine;
    }

    const Plan& plan() const override { return plan_; }

    double dram_bytes(Pass pass) const override {
        double bytes = 0;
        for (const swap::Task& task : schedule(pass).tasks) bytes += bytes_of_update(plan_, task);
        return bytes;
    }

    uint64_t state_hash() override {
        return StateIo(plan_, *store_, teams_->all(), StateIo::staging_of(plan_, arena_)).hash();
    }

private:
    std::span<std::byte> reserve() {
        device_->reserve(plan_.device_bytes);
        const auto arena = pool_.reserve("state and staging", plan_.host_bytes, *teams_);
        pool_.seal();
        return arena;
    }

    swap::StoreOptions store_options(trace::Recording* recording) const {
        swap::StoreOptions options{
            .objects = plan_.objects,
            .host_slots = plan_.host_slots,
            .resources = plan_.resources,
            .verify = plan_.verify,
            .host_arena = arena_,
            .recording = recording,
            .kernel_name = [](uint8_t op) { return planner::name_of(static_cast<Op>(op)); },
            .parallel = parallel_on(*teams_)};
        for (size_t lane = 0; recording && lane < swap::lanes_of(1); ++lane)
            options.rows[lane] = recording->add_row(
                "measured", std::string(swap::name_of(static_cast<swap::Lane>(lane))));
        return options;
    }

    const swap::Schedule& schedule(Pass pass) const {
        return schedules_[static_cast<size_t>(pass)];
    }

    swap::Schedule record(Pass pass) const {
        if (pass == Pass::step) return record_step(plan_, Previous::rest, false);
        planner::Recorder recorder(plan_, "pass");
        using Move = planner::Recorder::Move;
        const Move how = pass == Pass::swap_in ? Move::in : Move::out;
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            const planner::Chunk& chunk = plan_.chunks[c];
            if (pass == Pass::optimizer) {
                recorder.update_chunk(static_cast<int64_t>(c), Op::update);
                continue;
            }
            if (stored(chunk.state)) recorder.move(chunk.state, Class::stage, how);
            if (stored(chunk.weight)) recorder.move(chunk.weight, Class::weight_piece, how);
        }
        return recorder.finish();
    }

    bool stored(swap::ObjectId object) const {
        return plan_.objects[object].home == swap::Tier::nvme;
    }
    std::span<std::byte> buffer(Class c) const {  // the first one
        const planner::Buffers& b = plan_.buffers[static_cast<size_t>(c)];
        return arena_.subspan(static_cast<size_t>(b.offset), static_cast<size_t>(b.bytes));
    }

    // Every buffer of a class alike, with positive numbers of one size in any type: state wherever
    // p, m and v are cut out of them.
    void fill_class(Class c) {
        const planner::Buffers& b = plan_.buffers[static_cast<size_t>(c)];
        const std::span<std::byte> memory =
            b.tier == swap::Tier::device ? device_->memory() : arena_;
        teams_->all().parallel(b.count, [&](int64_t i) {
            auto* words = reinterpret_cast<uint32_t*>(memory.data() + b.offset + i * b.bytes);
            for (uint64_t w = 0; w < static_cast<uint64_t>(b.bytes) / 4; ++w) {
                const auto noise = static_cast<uint32_t>((w + 1) * 0x9e3779b97f4a7c15U >> 32);
                words[w] = 0x3c803c80U | (noise & 0x007f007fU);
            }
        });
    }
    void fill_stages() {
        fill_class(Class::stage);
        fill_class(Class::weight_piece);
    }

    void fill() {
        fill_stages();
        // What the pauses leave of a gradient, on its way to the host.
        fill_class(Class::wire);
        for (const planner::Chunk& chunk : plan_.chunks) {
            for (const swap::ObjectId object : {chunk.weight, chunk.state, chunk.gradient}) {
                const auto bytes = static_cast<size_t>(plan_.objects[object].bytes);
                store_->put(object, buffer(Class::stage).first(bytes));
            }
        }
    }

    const Config config_;
    Executor& executor_;
    Topology machine_;
    std::unique_ptr<NodeTeams> teams_;
    const optim::Hyper hyper_;
    std::unique_ptr<Device> device_;
    Plan plan_;
    pinned_mem::Pool pool_;
    std::span<std::byte> arena_;
    std::unique_ptr<aio::Volume> volume_;
    PausedKernels kernels_;
    // Before the store, which after an error still finishes tasks of the schedules it was given.
    std::array<swap::Schedule, kPasses> schedules_{};
    std::unique_ptr<swap::Store> store_;
    int64_t sequence_ = 0, updates_ = 0;
};

}  // namespace

std::unique_ptr<Rehearsal> Rehearsal::make(const Config& config, const RehearsalOptions& options,
                                           const Runtime& runtime) {
    return std::make_unique<RealTiers>(config, options, runtime);
}

}  // namespace ferry::train
