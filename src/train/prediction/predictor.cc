#include "train/prediction/predictor.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>

#include "cost/simulator.h"
#include "ferry/device.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "measure.h"
#include "ops/ops.h"
#include "ops/patterns.h"
#include "planner/work.h"
#include "planning_measurements.h"
#include "step_timeline.h"
#include "topology/topology.h"
#include "train/from_config.h"
#include "train/loader_of.h"
#include "train/model_of.h"
#include "train/numerics_record.h"
#include "train/rank_share.h"
#include "train/stack/device_needs.h"
#include "train/stack/memory_left.h"
#include "train/stack/threads.h"
#include "train/stack/tier_stack.h"
#include "train/stages.h"
#include "train/step.h"

namespace ferry::train {

using cost::Link;
using planner::Plan;
using swap::Lane;

namespace {

// A GPU's library asks for it on every GPU of Hopper's kind, and for less elsewhere.
constexpr int64_t kAbsentMatrixScratch = 33 * kMiB;

planner::DeviceNeeds needs_of_absent(const AbsentDevice& absent, const model::Decoder& decoder) {
    const int64_t scratch = absent.needs.scratch;
    return {.activation = decoder.activation_bytes(),
            .scratch = scratch > 0 ? scratch : decoder.scratch_bytes(),
            .overhead = absent.needs.overhead,
            .lists = decoder.pattern_bytes(),
            .matrix_scratch = kAbsentMatrixScratch,
            .exchanges = decoder.exchanges(),
            .saved = saved_bytes(decoder),
            .saved_flops = saved_flops(decoder),
            .maps_host = true,
            .deferred = decoder.numerics().parts == 1 ? decoder.deferred_bytes() : 0};
}

StateShares shares_of(const Plan& plan) {
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

std::vector<LinkPrediction> links_of(const swap::Schedule& step, const Plan& plan,
                                     const cost::Measurements& speeds) {
    const cost::WorkOf work_of = planner::work_of(plan);
    const swap::CostModel cost = cost::cost_model(work_of, speeds);
    std::array<int64_t, swap::kLanes> bytes{};
    double compute_s = 0, cores_s = 0, update_bytes = 0, begins_s = 0, passing_s = 0;
    cost::CommTraffic comm;
    for (const swap::Task& task : step.tasks) {
        bytes[static_cast<size_t>(task.lane)] += task.lane == Lane::compute ? 0 : task.bytes;
        const swap::Cost taken = cost(task);
        cores_s += taken.seconds * taken.part[static_cast<size_t>(swap::Shared::cores)];
        if (task.lane == Lane::compute) compute_s += taken.seconds;
        if (cost::passes(task)) {
            passing_s += taken.seconds;
        } else if (task.lane == Lane::comm) {
            comm.of(cost::among(task)) += static_cast<double>(task.bytes);
            begins_s +=
                cost::group_seconds(0, 1, cost::rate_among(cost::among(task), speeds), speeds);
        }
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
        {Link::compute, 0, compute_s},
        {Link::host_to_device, up, seconds(double(up), speeds.copy_bytes_per_s)},
        {Link::device_to_host, down, seconds(double(down), speeds.copy_bytes_per_s)},
        {Link::nvme, stored, seconds(double(stored), speeds.nvme_bytes_per_s)},
        {Link::dram, static_cast<int64_t>(dram), seconds(dram, speeds.dram_bytes_per_s)},
        {Link::cores, 0, cores_s}};
    if (!plan.partition.decides_alone())
        links.push_back(
            {Link::comm, on(Lane::comm), passing_s + begins_s + cost::comm_seconds(comm, speeds)});
    return links;
}

}  // namespace

// The device is opened once, for all plans.
struct Predictor::ModelOnDevice {
    ModelOnDevice(const Config& of_run, const RankCount& count,
                  const std::optional<AbsentDevice>& not_here)
        : world(world_of(of_run, 0, count.ranks, count.on_a_host)),
          gpu(count.gpu),
          config(of_run),
          absent(not_here),
          executor(make_thread_executor()),
          device(Device::open(absent ? DeviceKind::cpu : config.device, *executor, gpu)),
          ops(ops_on(*device, config, team)),
          decoder(decoder_of(config, world.ranks, *ops)),
          stages(stages_of(config, model_of(config).shape, decoder.layers())),
          needs(absent ? needs_of_absent(*absent, decoder) : needs_of(*device, decoder)),
          device_most(!absent                    ? device_bytes_within(kUnlimited, *device)
                      : absent->memory_bytes > 0 ? absent->memory_bytes
                                                 : kUnlimited) {
        require_ranks(config, world.ranks);
        schedule_of(config);  // refuses one that makes no sense
        device_bytes_within(config.budgets.device_bytes, *device);  // warns of what it has not got
    }

    RankShare share() const { return share_of(config, world); }
    cost::KernelTimes assumed_times_of(const swap::Schedule& step, const Plan& plan,
                                       double flops_per_s) const {
        return cost::assumed_times(step, planner::work_of(plan), decoder.numerics().tokens(),
                                   most_saved_flops(decoder),
                                   {flops_per_s, cost::kAssumedDeviceBytesPerS});
    }
    // Of a step where momentum is exchanged: kernels that only it has were not measured.
    swap::Schedule momentum_step(const Plan& plan, Previous previous,
                                 cost::Measurements& measurements) const {
        swap::Schedule step = record_step(plan, previous, false, Exchanged::momentum);
        for (const auto& [kind, seconds] :
             assumed_times_of(step, plan, measurements.assumed_flops_per_s).seconds)
            measurements.kernels.seconds.try_emplace(kind, seconds);
        return step;
    }
    Topology own_machine() const {
        return with_part_of_limits(with_part_of_cores(machine_for(config), 0, world.local_ranks),
                                   world.local_ranks);
    }
    planner::PlanRequest possible(const planner::PlanRequest& of_run) const {
        planner::PlanRequest request = of_rank(of_run, world);
        request.budgets.device_bytes = std::min(request.budgets.device_bytes, device_most);
        return request;
    }

    // As they lie where the moments are kept so.
    std::vector<model::Layer> layers_with(MomentType moments) const {
        if (moments == config.optimizer.moments) return decoder.layers();
        Config others = config;
        others.optimizer.moments = moments;
        return layers_of(others, model_of(config).shape, world.ranks);
    }

    // Of the first rank of a stage.
    zero::Partition partition_of(const zero::Stage& stage) const {
        return zero::partition_of(config.zero.stage, 0, world.sharers(), codecs_of(config),
                                  world.slicing(), stage, hosts_of(config));
    }
    // `request`: of a rank.
    Plan plan_of(const planner::PlanRequest& request, const zero::Stage& stage,
                 const cost::Measurements& machine) const {
        return planner::make_plan(
            request, zero::layers_of_stage(layers_with(request.state.moment_type), stage),
            decoder.numerics(), needs, machine, partition_of(stage));
    }

    const World world;
    const decltype(RankCount::gpu) gpu;
    const Config config;  // the whole run's
    const std::optional<AbsentDevice> absent;
    Team team{1};  // for operations that only say how much scratch they need
    std::unique_ptr<Executor> executor;
    std::unique_ptr<Device> device;
    std::unique_ptr<ops::Ops> ops;
    model::Decoder decoder;
    const std::vector<zero::Stage> stages;
    // As it was before anything was measured there.
    const planner::DeviceNeeds needs;
    const int64_t device_most;
};

const LinkPrediction& Prediction::binding() const {
    return *std::max_element(links.begin(), links.end(),
                             [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
}

double bubble_of(const Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    return bubble_of(plan.groups, stage.count, plan.group_size(), plan.blocks(),
                     stage.splits_backward);
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

Plan Predictor::plan(const planner::PlanRequest& of_run) const {
    return std::move(plans(of_run).front());
}

namespace {

// Says which stage it is that does not fit.
[[noreturn]] void refuse_stage(const planner::DoesNotFit& refusal, const zero::Stage& stage) {
    Problem problem = refusal.problem();
    problem.what += fmt::format(" (stage {} of {})", stage.index, stage.count);
    throw planner::DoesNotFit(std::move(problem), refusal.tier(), refusal.smallest(),
                              refusal.larger());
}

}  // namespace

// As RankPlanner does among ranks: by the chunks of the tightest.
std::vector<Plan> Predictor::plans(const planner::PlanRequest& of_run) const {
    planner::PlanRequest request = model_->possible(of_run);
    const cost::Measurements machine =
        planning_measurements(request, known_ ? &*known_ : nullptr, model_->world.local_ranks);
    const auto plan_of = [&](const zero::Stage& stage) {
        try {
            return model_->plan_of(request, stage, machine);
        } catch (const planner::DoesNotFit& refusal) {
            if (stage.all()) throw;
            refuse_stage(refusal, stage);
        }
    };
    std::vector<Plan> found;
    for (const zero::Stage& stage : model_->stages) found.push_back(plan_of(stage));
    request.swap.chunk_elements =
        std::ranges::min_element(found, {}, &Plan::chunk_elements)->chunk_elements;
    for (size_t s = 0; s < found.size(); ++s) {
        if (found[s].chunk_elements != request.swap.chunk_elements)
            found[s] = plan_of(model_->stages[s]);
    }
    return found;
}

const std::vector<model::Layer>& Predictor::layers() const { return model_->decoder.layers(); }

Plan Predictor::with_all_layers(const Plan& plan) const {
    planner::PlanRequest request =
        model_->possible(request_of_buffers(request_of(model_->config), plan));
    const zero::Stage all{.end = std::ssize(plan.layers),
                          .splits_backward = plan.partition.stage.splits_backward};
    const cost::Measurements machine =
        planning_measurements(request, known_ ? &*known_ : nullptr, model_->world.local_ranks);
    request.budgets.device_bytes = kUnlimited;
    const Plan roomy = model_->plan_of(request, all, machine);
    request.budgets.device_bytes = roomy.device_overhead_bytes + device_buffer_bytes(roomy);
    return model_->plan_of(request, all, machine);  // no weights live there
}

void Predictor::plan_by(const cost::Measurements& known) { known_ = known; }

cost::Measurements Predictor::measure(const Plan& plan, Memory memory) {
    if (model_->absent) {
        throw Error(Trouble::usage, {.what = "there is no such device here to measure",
                                     .where = model_->absent->architecture,
                                     .remedy = "measure on the machine that has it: ferry "
                                               "bench --all --config CONFIG --save FILE"});
    }
    const Config& config = model_->config;
    // Nothing is stored: the paths are the run's.
    const RankShare share{.budgets = config.budgets, .threads = model_->share().threads};
    TierStack stack({.config = config,
                     .share = share,
                     .executor = *model_->executor,
                     .device = *model_->device,
                     .machine = model_->own_machine(),
                     .ranks = model_->world.ranks},
                    TierStack::Model{model_->decoder.shape(), model_->decoder.numerics(),
                                     model_->decoder.layers()});
    Plan buffers = plan.partition.stage.all()
                       ? this->plan(request_of_buffers(request_of(config), plan))
                       : with_all_layers(plan);
    buffers.host_bytes = buffers.io_bytes;
    stack.plan(std::move(buffers));
    const Plan& sample = stack.plan();
    stack.reserve({.host_budget_bytes = sample.host_bytes, .name = "staging"});
    stack.open({.buffers_alone = true});
    stack.kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    const optim::Scalars scalars = optim::scalars_of(elements_hyper_of(config), 1, 1.0);
    const int64_t working = memory == Memory::of_plan ? footprint_of_updates(plan) : kUnlimited;
    const auto left_now = [&] {
        return as_left_now(stack.machine(),
                           left_of_budget(config.budgets, stack.pool().reserved_bytes()));
    };
    cost::Measurements found = take_measurements(
        record_step(sample, Previous::not_speculative, false), stack.bench(), stack.teams(),
        scalars, stack.arena(), model_->decoder.shape().vocab, [&] {
            return time_updates(stack.teams(), left_now(), scalars, sample, working,
                                staging_buffers(sample, stack.arena()));
        });
    if (sample.has_feedback()) {
        const Bench bench = stack.bench();
        found.kernels.seconds.merge(time_kernels(kernels_of_momentum(sample), bench).seconds);
        found.momentum_bytes_per_s = time_momentum(bench, left_now());
    }
    stack.store().drain();  // throws what went wrong
    if (model_->world.local_ranks == 1) found.memory_of = cost::Of::host;
    return found;
}

Prediction Predictor::predict(const planner::PlanRequest& request, const Plan& plan,
                              const cost::Measurements& measured, Exchanged what) const {
    return plan.partition.stage.all() ? predict_one(request, plan, measured, what)
                                      : predict_pipeline(request, measured);
}

Prediction Predictor::predict_one(const planner::PlanRequest& request, const Plan& plan,
                                  const cost::Measurements& measured, Exchanged what) const {
    cost::Measurements measurements = cost::of_rank(measured, model_->world.local_ranks);
    Prediction found;
    found.speculative = plan.speculative && what == Exchanged::gradients;
    const Previous steady = found.speculative ? Previous::committed : Previous::not_speculative;
    const auto step = [&](Previous previous) {
        return what == Exchanged::momentum ? model_->momentum_step(plan, previous, measurements)
                                           : record_step(plan, previous, found.speculative);
    };
    const swap::Schedule first = step(Previous::none);
    found.schedule = step(steady);
    found.timeline = predict_steps(plan, first, found.schedule, measurements);
    found.links = links_of(found.schedule, plan, measurements);
    const cost::Bound bound = bound_of(model_->possible(request).budgets, plan,
                                       model_->decoder.shape(), found.schedule, measurements, what);
    found.bound_seconds = bound.seconds;
    found.bound_link = bound.binding;
    found.peak_bound_seconds = bound_by_peaks(model_->possible(request).budgets, plan,
                                              model_->decoder, found.schedule, measurements, what)
                                   .seconds;
    found.planned = shares_of(plan);
    found.bound = {bound.state_on_device, bound.state_in_host,
                   1 - bound.state_on_device - bound.state_in_host};
    for (const model::Saved saved : model::kAllSaved) {
        if (plan.blocks_at_most() > 0)
            found.planned_saved[at(saved)] = static_cast<double>(plan.blocks_saving(saved)) /
                                             static_cast<double>(plan.blocks_at_most());
    }
    found.bound_saved = bound.saved;
    return found;
}

namespace {

StagePrediction stage_of(const Plan& plan, swap::Schedule schedule, swap::Timeline timeline) {
    using cost::StageLink;
    constexpr auto kCompute = static_cast<size_t>(Lane::compute);
    StagePrediction found{.stage = plan.partition.stage,
                          .blocks = plan.blocks(),
                          .device_bytes = plan.device_bytes + plan.device_overhead_bytes,
                          .host_bytes = plan.host_bytes,
                          .nvme_bytes = plan.nvme_bytes,
                          .compute_seconds = timeline.busy_seconds[kCompute]};
    found.waits = 1 - found.compute_seconds / timeline.step_seconds;
    for (const swap::Task& task : schedule.tasks) {
        if (task.lane != Lane::comm) continue;
        if (!cost::passes(task)) found.to_sharers += task.bytes;
        if (static_cast<cost::Op>(task.op) != cost::Op::pass_on) continue;
        const auto link = static_cast<StageLink>(task.flags);
        (link == StageLink::next       ? found.to_next
         : link == StageLink::previous ? found.to_previous
                                       : found.of_table) += task.bytes;
    }
    found.schedule = std::move(schedule);
    found.timeline = std::move(timeline);
    return found;
}

}  // namespace

// Each stage's schedule, simulated together. What a stage shows alone is that of the longest.
Prediction Predictor::predict_pipeline(const planner::PlanRequest& request,
                                       const cost::Measurements& measured) const {
    cost::Measurements measurements = cost::of_rank(measured, model_->world.local_ranks);
    const std::vector<Plan> plans = this->plans(request);
    const bool speculative = std::ranges::all_of(plans, &Plan::speculative);
    std::vector<swap::Schedule> first, steady;
    for (const Plan& plan : plans) {
        first.push_back(record_step(plan, Previous::none, speculative));
        steady.push_back(record_step(
            plan, speculative ? Previous::committed : Previous::not_speculative, speculative));
        if (measurements.kernels.covers(steady.back(), planner::work_of(plan))) continue;
        for (const auto& [kind, seconds] :
             model_->assumed_times_of(steady.back(), plan, measurements.assumed_flops_per_s)
                 .seconds)
            measurements.kernels.seconds.try_emplace(kind, seconds);
    }
    std::vector<swap::Timeline> timelines = predict_stages(plans, first, steady, measurements);
    Prediction found{.speculative = speculative};
    double most_s = -1;
    for (size_t s = 0; s < plans.size(); ++s) {
        const Plan& plan = plans[s];
        const BudgetConfig budgets = model_->possible(request).budgets;
        const cost::Bound bound =
            bound_of(budgets, plan, model_->decoder.shape(), steady[s], measurements);
        found.peak_bound_seconds = std::max(
            found.peak_bound_seconds,
            bound_by_peaks(budgets, plan, model_->decoder, steady[s], measurements).seconds);
        if (bound.seconds > found.bound_seconds) {
            found.bound_seconds = bound.seconds;
            found.bound_link = bound.binding;
            found.bound = {bound.state_on_device, bound.state_in_host,
                           1 - bound.state_on_device - bound.state_in_host};
            found.bound_saved = bound.saved;
        }
        const std::vector<LinkPrediction> links = links_of(steady[s], plan, measurements);
        found.stages.push_back(stage_of(plan, std::move(steady[s]), std::move(timelines[s])));
        const StagePrediction& stage = found.stages.back();
        if (stage.compute_seconds <= most_s) continue;
        most_s = stage.compute_seconds;
        found.schedule = stage.schedule;
        found.timeline = stage.timeline;
        found.links = links;
        found.planned = shares_of(plan);
        for (const model::Saved saved : model::kAllSaved) {
            if (plan.blocks_at_most() > 0)
                found.planned_saved[at(saved)] = static_cast<double>(plan.blocks_saving(saved)) /
                                                 static_cast<double>(plan.blocks_at_most());
        }
    }
    return found;
}

bool Predictor::covers(const Plan& plan, const cost::KernelTimes& times) const {
    if (!plan.partition.stage.all()) return covers(with_all_layers(plan), times);
    return times.covers(record_step(plan, Previous::not_speculative, false),
                        planner::work_of(plan));
}

cost::KernelsOf Predictor::kernels_of() const {
    if (model_->absent && !model_->absent->kernels.model.empty()) return model_->absent->kernels;
    return {.model = model_text(model_->config, model_->decoder.shape(), model_->world.ranks),
            .compute = std::string(name_of(model_->decoder.numerics().compute)),
            .device = device_text(),
            .libraries = model_->absent ? ""
                                        : library_text(*model_->device, model_->config,
                                                       ops::table_of(*model_->ops)),
            .threads = threads(),
            .under_load = device_text() != cost::KernelsOf::kHost};
}

std::string Predictor::device_text() const {
    return is_here() ? model_->device->architecture() : model_->absent->architecture;
}
int Predictor::threads() const {
    if (!is_here()) return model_->absent->threads;
    return threads_for(model_->share().threads, model_->config.device, model_->own_machine(),
                       model_->world.ranks);
}
int64_t Predictor::device_bytes() const { return model_->device_most; }
planner::DeviceNeeds Predictor::needs() const { return model_->needs; }
bool Predictor::is_here() const { return !model_->absent; }
ParallelConfig Predictor::groups() const { return model_->config.parallel; }
int Predictor::ranks_per_host() const { return model_->config.zero.ranks_per_host; }

RankCount Predictor::count() const {
    return {model_->world.ranks, model_->world.local_ranks, model_->gpu};
}

cost::Measurements Predictor::assumed(const Plan& plan) const {
    cost::Measurements found =
        assumed_measurements(model_->config.device, model_->config.budgets.nvme);
    found.threads = threads();
    return with_assumed_kernels(found, plan);
}

cost::Measurements Predictor::with_assumed_kernels(cost::Measurements found,
                                                   const Plan& plan) const {
    if (!plan.partition.stage.all())
        return with_assumed_kernels(std::move(found), with_all_layers(plan));
    found.kernels = model_->assumed_times_of(record_step(plan, Previous::not_speculative, false),
                                             plan, found.assumed_flops_per_s);
    return found;
}

// On the same device, by the same measurements.
Predictor::Length Predictor::length_of(int64_t sequence) const {
    const int64_t own = model_->config.batch.sequence;
    Config config = model_->config;
    config.batch.sequence = sequence;
    std::optional<AbsentDevice> absent = model_->absent;
    // Scratch was measured for the configuration's own sequences.
    if (absent && sequence != own) absent->needs.scratch = 0;
    try {
        Predictor other(std::make_unique<ModelOnDevice>(config, count(), absent));
        other.known_ = known_;
        other.plan(request_of(config));
        return Length::fits;
    } catch (const ops::LengthRefused&) {
        return sequence < own ? Length::too_short : Length::too_long;
    } catch (const Error& error) {
        if (error.trouble() != Trouble::does_not_fit) throw;
        return Length::too_long;
    }
}

int64_t Predictor::longest_sequence() const {
    const int64_t unit = std::lcm(kSequenceUnit, int64_t{model_->world.sequence});
    int64_t longest = 0, below = 0, units = 1;  // `below`: the most that are not too many
    const auto is_too_long = [&](int64_t tried) {
        const Length length = length_of(tried * unit);
        if (length == Length::too_long) return true;
        below = tried;
        if (length == Length::fits) longest = tried;
        return false;
    };
    for (; units * unit <= kSequenceMost; units *= 2) {
        if (is_too_long(units)) break;
    }
    if (units * unit > kSequenceMost) return round_down(kSequenceMost, unit);
    while (units - below > 1) {
        const int64_t middle = below + (units - below) / 2;
        if (is_too_long(middle)) units = middle;
    }
    return longest * unit;
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
        share.layouts = lists->layouts;
        share.layers += 1;
        share.pairs += lists->visible_pairs(sequence) / (causal * lists->layouts);
        share.blocks += static_cast<double>(lists->visible_blocks()) /
                        static_cast<double>(lists->causal_blocks());
    }
    share.pairs /= static_cast<double>(std::max<int64_t>(1, share.layers));
    share.blocks /= static_cast<double>(std::max<int64_t>(1, share.layers));
    return share;
}

cost::ModelSizes model_sizes(const Config& config) {
    const model::Shape shape = model_of(config).shape;
    const auto layers = model::layers_of(shape, {}, false);
    cost::ModelSizes found{
        .hidden = shape.hidden,
        .blocks = shape.layers,
        .heads = shape.heads,
        .kv_heads = shape.kv_heads,
        .table_elements = static_cast<double>(shape.vocab * shape.hidden),
        .tied = shape.tie_embeddings,
        .sequence = config.batch.sequence,
        .sequences = config.batch.micro_batches * config.batch.micro_batch,
        .element = cost::element_bytes(format_of(config), config.precision,
                                       config.numerics.wire.value_or(config.precision))};
    const auto blocks = static_cast<double>(shape.layers);
    for (const model::Layer& layer : layers) {
        if (layer.kind != model::LayerKind::block) continue;
        const double keys = cost::keys_seen(shape, config.batch.sequence, layer.index);
        found.block_elements += static_cast<double>(layer.elements) / blocks;
        // Two products, each of two operations a key and element.
        found.attention_flops +=
            4 * keys * static_cast<double>(shape.heads * shape.head_dim) / blocks;
    }
    return found;
}

void check_reserved_cores(const Config& config) { require_a_core(machine_for(config)); }

}  // namespace ferry::train
