#include "train/prediction/predictor.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ferry/device.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "measure.h"
#include "ops/ops.h"
#include "planning_measurements.h"
#include "step_timeline.h"
#include "topology/topology.h"
#include "train/from_config.h"
#include "train/loader_of.h"
#include "train/model_of.h"
#include "train/rank_share.h"
#include "train/stack/device_needs.h"
#include "train/stack/threads.h"
#include "train/stack/tier_stack.h"
#include "train/state/numerics_record.h"
#include "train/step.h"

namespace ferry::train {

using planner::Plan;
using swap::Lane;

class Predictor::ModelOnDevice {
public:
    ModelOnDevice(const Config& config, const RankCount& count,
                  const std::optional<AbsentDevice>& absent)
        : world_{.ranks = count.ranks, .local_ranks = count.on_a_host},
          gpu_(count.gpu),
          partition_(zero::partition_of(config.zero.stage, 0, count.ranks, codecs_of(config))),
          config_(config),
          absent_(absent),
          executor_(make_thread_executor()),
          device_(Device::open(absent ? DeviceKind::cpu : config.device, *executor_, count.gpu)),
          ops_(ops_on(*device_, config, team_)),
          decoder_(decoder_of(config, count.ranks, *ops_)),
          needs_(absent ? needs_of(*absent, decoder_) : needs_of(*device_, decoder_)),
          device_most_(!absent                    ? device_bytes_of(*device_)
                       : absent->memory_bytes > 0 ? absent->memory_bytes
                                                  : kUnlimited) {
        require_ranks(config, count.ranks);
        schedule_of(config);  // refuses one that makes no sense
        device_bytes_within(config.budgets.device_bytes, *device_);  // warns of what it has not got
    }

    Plan plan(const planner::PlanRequest& of_run) const {
        const planner::PlanRequest request = possible(of_run);
        return planner::make_plan(
            request, layers_with(request.state.moment_type), decoder_.numerics(), needs_,
            planning_measurements(request, known_ ? &*known_ : nullptr, world_.local_ranks),
            partition_);
    }

    void plan_by(const cost::Measurements& known) { known_ = known; }

    cost::Measurements measure(const Plan& plan, Memory memory) {
        if (absent_) {
            throw Error(Trouble::usage, {.what = "there is no such device here to measure",
                                         .where = absent_->architecture,
                                         .remedy = "measure on the machine that has it: ferry "
                                                   "bench --all --config CONFIG --save FILE"});
        }
        Config config = config_;
        config.threads = of_rank(config_).threads;
        TierStack stack({.config = config,
                         .executor = *executor_,
                         .device = *device_,
                         .machine = own_machine(),
                         .ranks = world_.ranks},
                        TierStack::Model{decoder_.shape(), decoder_.numerics(), decoder_.layers()});
        stack.plan(buffers_of(plan));
        const Plan& sample = stack.plan();
        stack.reserve({.host_budget_bytes = sample.host_bytes, .name = "staging"});
        stack.open({.buffers_alone = true});
        stack.kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
        cost::Measurements found = take_measurements(
            record_step(sample, Previous::not_speculative, false), stack.bench(), stack.teams(),
            stack.machine(), optim::scalars_of(elements_hyper_of(config_), 1, 1.0), stack.arena(),
            decoder_.shape().vocab, memory == Memory::of_plan ? updated_bytes(plan) : kUnlimited);
        stack.store().drain();  // throws what went wrong
        if (world_.local_ranks == 1) found.memory_of = cost::Of::host;
        return found;
    }

    // Of a step where momentum travels: kernels that only it has were not measured.
    swap::Schedule momentum_step(const Plan& plan, Previous previous,
                                 cost::Measurements& measurements) const {
        swap::Schedule step = record_step(plan, previous, false, Travels::momentum);
        for (const auto& [kind, seconds] :
             assumed_times_of(step, plan, measurements.assumed_flops_per_s).seconds)
            measurements.kernels.seconds.try_emplace(kind, seconds);
        return step;
    }

    Prediction predict(const planner::PlanRequest& request, const Plan& plan,
                       const cost::Measurements& measured, Travels travels) const {
        cost::Measurements measurements = cost::of_rank(measured, world_.local_ranks);
        Prediction found;
        found.speculative = plan.speculative && travels == Travels::gradients;
        const Previous steady = found.speculative ? Previous::committed : Previous::not_speculative;
        const auto step = [&](Previous previous) {
            return travels == Travels::momentum ? momentum_step(plan, previous, measurements)
                                                : record_step(plan, previous, found.speculative);
        };
        const swap::Schedule first = step(Previous::none);
        found.schedule = step(steady);
        found.timeline = predict_steps(plan, first, found.schedule, measurements);
        found.links = links_of(found.schedule, plan, measurements);
        const cost::Bound bound = bound_of(possible(request).budgets, plan, decoder_.shape(),
                                           found.schedule, measurements);
        found.bound_seconds = bound.seconds;
        found.bound_link = bound.binding;
        found.peak_bound_seconds =
            bound_by_peaks(possible(request).budgets, plan, decoder_, found.schedule, measurements)
                .seconds;
        found.planned = shares_of(plan);
        found.bound = {bound.state_on_device, bound.state_in_host,
                       1 - bound.state_on_device - bound.state_in_host};
        for (const model::Saved what : model::kAllSaved) {
            if (plan.blocks_at_most() > 0)
                found.planned_saved[at(what)] = static_cast<double>(plan.blocks_saving(what)) /
                                                static_cast<double>(plan.blocks_at_most());
        }
        found.bound_saved = bound.saved;
        return found;
    }

    bool covers(const Plan& plan, const cost::KernelTimes& times) const {
        return times.covers(record_step(plan, Previous::not_speculative, false),
                            planner::work_of(plan));
    }
    cost::KernelsOf kernels_of() const {
        if (absent_ && !absent_->kernels.model.empty()) return absent_->kernels;
        return {.model = model_text(config_, decoder_.shape(), world_.ranks),
                .compute = std::string(name_of(decoder_.numerics().compute)),
                .device = device_text(),
                .libraries = absent_ ? "" : library_text(*device_, config_),
                .threads = threads(),
                .under_load = device_text() != cost::KernelsOf::kHost};
    }
    std::string device_text() const {
        return absent_ ? absent_->architecture : device_->architecture();
    }
    int threads() const {
        return absent_ ? absent_->threads
                       : threads_for(of_rank(config_), own_machine(), world_.ranks);
    }
    int64_t device_bytes() const { return device_most_; }
    planner::DeviceNeeds needs() const { return needs_; }
    bool is_here() const { return !absent_; }
    RankCount count() const { return {world_.ranks, world_.local_ranks, gpu_}; }

    // Whether sequences so long fit, on the same device by the same measurements.
    bool sequence_fits(int64_t sequence) const {
        Config config = config_;
        config.batch.sequence = sequence;
        std::optional<AbsentDevice> absent = absent_;
        // Scratch was measured for the configuration's own sequences.
        if (absent && sequence != config_.batch.sequence) absent->needs.scratch = 0;
        try {
            ModelOnDevice longer(config, count(), absent);
            if (known_) longer.plan_by(*known_);
            longer.plan(request_of(config));
            return true;
        } catch (const Error& error) {
            // The model or a layout refuses this length; it refuses longer ones too.
            if (error.trouble() == Trouble::does_not_fit || error.trouble() == Trouble::usage)
                return false;
            throw;
        }
    }

    cost::Measurements assumed(const Plan& plan) const {
        cost::Measurements found = assumed_measurements(config_.device, config_.budgets.nvme);
        found.threads = threads();
        return with_assumed_kernels(found, plan);
    }
    cost::Measurements with_assumed_kernels(cost::Measurements found, const Plan& plan) const {
        found.kernels = assumed_times_of(record_step(plan, Previous::not_speculative, false), plan,
                                         found.assumed_flops_per_s);
        return found;
    }
    cost::KernelTimes assumed_times_of(const swap::Schedule& step, const Plan& plan,
                                       double flops_per_s) const {
        return cost::assumed_times(step, planner::work_of(plan), decoder_.numerics().tokens(),
                                   most_saved_flops(decoder_),
                                   {flops_per_s, cost::kAssumedDeviceBytesPerS});
    }

private:
    static planner::DeviceNeeds needs_of(const AbsentDevice& absent,
                                         const model::Decoder& decoder) {
        const int64_t scratch = absent.needs.scratch;
        return {.activation = decoder.activation_bytes(),
                .scratch = scratch > 0 ? scratch : decoder.scratch_bytes(),
                .overhead = absent.needs.overhead,
                .lists = decoder.pattern_bytes(),
                .saved = saved_bytes(decoder),
                .saved_flops = saved_flops(decoder),
                .maps_host = true};
    }
    static planner::DeviceNeeds needs_of(const Device& device, const model::Decoder& decoder) {
        return train::needs_of(device, decoder);
    }
    static int64_t device_bytes_of(const Device& device) {
        return device_bytes_within(kUnlimited, device);
    }
    Config of_rank(const Config& config) const { return config_of_rank(config, world_); }
    Topology own_machine() const {
        return with_part_of_limits(with_part_of_cores(machine_for(config_), 0, world_.local_ranks),
                                   world_.local_ranks);
    }
    planner::PlanRequest possible(const planner::PlanRequest& of_run) const {
        planner::PlanRequest request = train::of_rank(of_run, world_);
        request.budgets.device_bytes = std::min(request.budgets.device_bytes, device_most_);
        return request;
    }

    // As they lie where the moments are kept so.
    std::vector<model::Layer> layers_with(MomentType moments) const {
        if (moments == config_.optimizer.moments) return decoder_.layers();
        Config config = config_;
        config.optimizer.moments = moments;
        return layers_of(config, decoder_.shape(), world_.ranks);
    }

    Plan buffers_of(const Plan& plan) const {
        Plan sample = this->plan(request_of_buffers(request_of(config_), plan));
        sample.host_bytes = sample.io_bytes;
        return sample;
    }

    static StateShares shares_of(const Plan& plan) {
        std::array<double, 3> bytes{};
        for (const planner::Chunk& chunk : plan.chunks) {
            if (!chunk.trainable) continue;
            for (const swap::ObjectId id : {chunk.state, chunk.gradient})
                bytes[static_cast<size_t>(plan.objects[id].home)] +=
                    static_cast<double>(plan.objects[id].bytes);
        }
        const double all = bytes[0] + bytes[1] + bytes[2];
        return {bytes[0] / all, bytes[1] / all, bytes[2] / all};
    }

    static std::vector<LinkPrediction> links_of(const swap::Schedule& step, const Plan& plan,
                                                const cost::Measurements& speeds) {
        const cost::WorkOf work_of = planner::work_of(plan);
        const swap::CostModel cost = cost::cost_model(work_of, speeds);
        std::array<int64_t, swap::kLanes> bytes{}, tasks{};
        double compute_s = 0, cores_s = 0, update_bytes = 0;
        for (const swap::Task& task : step.tasks) {
            bytes[static_cast<size_t>(task.lane)] += task.lane == Lane::compute ? 0 : task.bytes;
            ++tasks[static_cast<size_t>(task.lane)];
            const swap::Cost taken = cost(task);
            cores_s += taken.seconds * taken.part[static_cast<size_t>(swap::Shared::cores)];
            if (task.lane == Lane::compute) compute_s += taken.seconds;
            if (task.lane == Lane::team || speeds.computes_on_host)
                update_bytes += cost::bytes_of_update(task, work_of);
        }
        const auto on = [&](Lane lane) { return bytes[static_cast<size_t>(lane)]; };
        const int64_t up = on(Lane::h2d), down = on(Lane::d2h),
                      stored = on(Lane::read) + on(Lane::write);
        const double dram = cost::dram_bytes(update_bytes, static_cast<double>(up + down),
                                             static_cast<double>(stored), speeds);
        const auto seconds = [](double moved, double rate) { return moved > 0 ? moved / rate : 0; };
        std::vector<LinkPrediction> links{
            {"compute", 0, compute_s},
            {"host to device", up, seconds(double(up), speeds.copy_bytes_per_s)},
            {"device to host", down, seconds(double(down), speeds.copy_bytes_per_s)},
            {"nvme", stored, seconds(double(stored), speeds.nvme_bytes_per_s)},
            {"dram", static_cast<int64_t>(dram), seconds(dram, speeds.dram_bytes_per_s)},
            {"cores", 0, cores_s}};
        if (!plan.partition.alone())
            links.push_back({"comm", on(Lane::comm),
                             cost::comm_seconds(static_cast<double>(on(Lane::comm)),
                                                tasks[static_cast<size_t>(Lane::comm)], speeds)});
        return links;
    }

    const World world_;
    const decltype(RankCount::gpu) gpu_;
    const zero::Partition partition_;
    const Config config_;  // the whole run's
    const std::optional<AbsentDevice> absent_;
    Team team_{1};  // for operations that only say how much scratch they need
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<ops::Ops> ops_;
    model::Decoder decoder_;
    // As it was before anything was measured there.
    const planner::DeviceNeeds needs_;
    const int64_t device_most_;
    std::optional<cost::Measurements> known_{};
};

const LinkPrediction& Prediction::binding() const {
    return *std::max_element(links.begin(), links.end(),
                             [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
}

std::vector<ScheduleBytes> schedule_bytes(const Plan& plan) {
    std::vector<ScheduleBytes> all;
    for (int p = 0; p < kPrevious; ++p) {
        const auto previous = static_cast<Previous>(p);
        for (const bool speculative : {false, true}) {
            if (speculative && !plan.speculative) continue;
            const std::string name = name_of_step(previous, speculative);
            all.push_back({name, step_bytes(plan, previous, speculative)});
            if (!speculative) all.push_back({"end " + name, drain_bytes(plan, previous)});
        }
    }
    return all;
}

ScheduleBytes steady_bytes(const Plan& plan) {
    return {name_of_step(Previous::not_speculative, false),
            step_bytes(plan, Previous::not_speculative, false)};
}

Predictor::Predictor(std::unique_ptr<ModelOnDevice> model) : model_(std::move(model)) {}

Predictor::~Predictor() = default;

std::unique_ptr<Predictor> Predictor::make(const Config& config, const RankCount& count) {
    return std::unique_ptr<Predictor>(
        new Predictor(std::make_unique<ModelOnDevice>(config, count, std::nullopt)));
}

std::unique_ptr<Predictor> Predictor::make(const Config& config, const RankCount& count,
                                           const AbsentDevice& device) {
    return std::unique_ptr<Predictor>(
        new Predictor(std::make_unique<ModelOnDevice>(config, count, device)));
}

void Predictor::plan_by(const cost::Measurements& known) { model_->plan_by(known); }
Plan Predictor::plan(const planner::PlanRequest& request) const { return model_->plan(request); }
cost::Measurements Predictor::measure(const Plan& plan, Memory memory) {
    return model_->measure(plan, memory);
}
Prediction Predictor::predict(const planner::PlanRequest& request, const Plan& plan,
                              const cost::Measurements& measured, Travels what) const {
    return model_->predict(request, plan, measured, what);
}
bool Predictor::covers(const Plan& plan, const cost::KernelTimes& times) const {
    return model_->covers(plan, times);
}
cost::KernelsOf Predictor::kernels_of() const { return model_->kernels_of(); }
std::string Predictor::device_text() const { return model_->device_text(); }
int64_t Predictor::device_bytes() const { return model_->device_bytes(); }
planner::DeviceNeeds Predictor::needs() const { return model_->needs(); }
bool Predictor::is_here() const { return model_->is_here(); }
RankCount Predictor::count() const { return model_->count(); }
cost::Measurements Predictor::assumed(const Plan& plan) const { return model_->assumed(plan); }
cost::Measurements Predictor::with_assumed_kernels(cost::Measurements known,
                                                   const Plan& plan) const {
    return model_->with_assumed_kernels(std::move(known), plan);
}
int Predictor::threads() const { return model_->threads(); }

int64_t Predictor::longest_sequence() const {
    int64_t fits = 0, units = 1;
    while (units * kSequenceUnit <= kSequenceMost && model_->sequence_fits(units * kSequenceUnit)) {
        fits = units;
        units *= 2;
    }
    if (units * kSequenceUnit > kSequenceMost) return kSequenceMost;
    while (units - fits > 1) {
        const int64_t middle = fits + (units - fits) / 2;
        (model_->sequence_fits(middle * kSequenceUnit) ? fits : units) = middle;
    }
    return fits * kSequenceUnit;
}

bool check_token_header(const Config& config) {
    if (::access(config.data.tokens.c_str(), F_OK) != 0 && errno == ENOENT) return false;
    const TokenFileInfo tokens = read_token_info(config.data.tokens);
    const model::Description made = model_of(config);
    split_tokens(loader_options(config, made.shape, true), tokens);
    check_vocabulary(config, made, tokens);
    return true;
}

std::optional<PatternShare> pattern_share(const Config& config) {
    const model::Shape shape = model_of(config).shape;
    if (shape.patterns.empty()) return std::nullopt;
    const int64_t sequence = config.batch.sequence;
    const double causal = static_cast<double>(sequence) * static_cast<double>(sequence + 1) / 2;
    PatternShare share{.name = shape.pattern_text.substr(0, shape.pattern_text.find(' ')),
                       .pairs = 0,
                       .blocks = 0};
    for (const auto& lists : shape.patterns) {
        if (!lists) continue;
        if (!share.lists) share.lists = lists;
        share.block = lists->block;
        share.layouts = lists->heads;
        share.layers += 1;
        share.pairs += lists->visible_pairs(sequence) / (causal * lists->heads);
        share.blocks += static_cast<double>(lists->visible_blocks()) /
                        static_cast<double>(lists->causal_blocks());
    }
    share.pairs /= static_cast<double>(std::max<int64_t>(1, share.layers));
    share.blocks /= static_cast<double>(std::max<int64_t>(1, share.layers));
    return share;
}

void check_reserved_cores(const Config& config) { require_a_core(machine_for(config)); }

planner::Plan plan_for(const Config& config) {
    return Predictor::make(config)->plan(request_of(config));
}

}  // namespace ferry::train
