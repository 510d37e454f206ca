#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cost/kernel_times.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/units.h"
#include "model/model.h"
#include "ops/patterns.h"
#include "ops/product_table.h"
#include "planner/planner.h"
#include "planner/request.h"
#include "planner/work.h"
#include "simulated_stages.h"
#include "train/measuring/measure.h"
#include "train/measuring/measured_rank.h"
#include "train/measuring/model_on_device.h"
#include "train/measuring/planning_measurements.h"
#include "train/measuring/together.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/numerics_record.h"
#include "train/setup/rank_share.h"
#include "train/stack/device_needs.h"
#include "train/stack/memory_left.h"
#include "train/stack/threads.h"
#include "train/step/step.h"
#include "zero/zero.h"

namespace ferry::train {

using planner::Plan;

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
    throw planner::DoesNotFit(of_stage(refusal.problem(), stage), refusal.tier(),
                              refusal.smallest(), refusal.larger());
}

}  // namespace

std::vector<Plan> Predictor::plans(const planner::PlanRequest& of_run) const {
    return plans_in(chosen().stages, of_run);
}

// As RankPlanner does among ranks: by the chunks of the tightest.
std::vector<Plan> Predictor::plans_in(std::span<const zero::Stage> stages,
                                      const planner::PlanRequest& of_run) const {
    planner::PlanRequest request = model_->possible(of_run);
    const cost::Measurements machine =
        planning_measurements(request, known_ ? &*known_ : nullptr, model_->world.local_ranks);
    return plans_of_stages(stages, [&](const zero::Stage& stage, std::optional<int64_t> chunk) {
        if (chunk) request.swap.chunk_elements = chunk;
        try {
            return model_->plan_of(request, stage, machine);
        } catch (const planner::DoesNotFit& refusal) {
            if (stage.all()) throw;
            refuse_stage(refusal, stage);
        }
    });
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

namespace {

// With as many groups as a step has that needs all kernels of the whole one.
Plan of_all_kinds(const Plan& plan) {
    return std::move(shortened({plan}, std::min(passing(plan), kGroupsOfAllKinds)).front());
}

}  // namespace

void Predictor::plan_by(const cost::Measurements& known) {
    known_ = known;
    chosen_by_.reset();
    chosen_.reset();
}

namespace {

// As many ranks as compute here at once, as far as buffers of such a plan leave half of the
// machine's memory, and no more of them than take a few turns on its cores.
struct AtOnce {
    int ranks = 1;
    Predictor::Short what = Predictor::Short::of_nothing;
};
AtOnce how_many_at_once(const ModelOnDevice& model, int threads, const Plan& buffers) {
    constexpr int kTurns = 4;
    const Topology machine = machine_for(model.config);
    const int64_t each = buffers.io_bytes + buffers.device_bytes + buffers.device_overhead_bytes;
    const int64_t fit = machine.memory_left_bytes / 2 / std::max<int64_t>(each, 1);
    const int64_t turns = ceil_div(int64_t{kTurns} * machine.cores(), int64_t{threads});
    const int64_t most = std::max<int64_t>(std::min(fit, turns), 1);
    if (model.at_once() <= most) return {model.at_once(), Predictor::Short::of_nothing};
    return {static_cast<int>(most),
            fit < turns ? Predictor::Short::of_memory : Predictor::Short::of_cores};
}

}  // namespace

Plan Predictor::buffers_of(const Plan& plan) const {
    return plan.partition.stage.all()
               ? this->plan(request_of_buffers(request_of(model_->config), plan))
               : with_all_layers(plan);
}

void Predictor::require_memory_to_measure() const {
    for (const Plan& plan : plans_of_all()) {
        Plan buffers = buffers_of(plan);
        buffers.host_bytes = buffers.io_bytes;
        require_memory(buffers, model_->config.budgets, model_->own_machine(), *model_->device,
                       memory_to_save(model_->config));
    }
}

cost::Measurements Predictor::measure(const Plan& plan, Memory memory) {
    if (model_->absent) {
        throw Error(Trouble::usage, {.what = "there is no such device here to measure",
                                     .where = model_->absent->architecture,
                                     .remedy = "measure on the machine that has it: ferry "
                                               "bench --all --config CONFIG --save FILE"});
    }
    const Plan buffers = buffers_of(plan);
    const int64_t working = memory == Memory::of_plan ? footprint_of_updates(plan) : kUnlimited;
    const AtOnce at_once = how_many_at_once(*model_, threads(), buffers);
    measured_at_once_ = at_once.ranks;
    short_at_once_ = at_once.what;
    cost::Measurements found;
    ThreadsTogether(measured_at_once_).each([&](int rank, Together& together) {
        MeasuredRank one(*model_, rank, buffers);
        cost::Measurements mine = one.measure(working, together);
        if (rank == 0) found = std::move(mine);
    });
    // And the kernels of the schedules that were not chosen, but for those that are timed by now:
    // whoever has these measurements can choose by them.
    for (const Plan& other : plans_not_chosen()) {
        const Plan of_other = with_all_layers(other);
        const cost::KernelTimes known = found.kernels;
        const int of_these =
            std::min(measured_at_once_, how_many_at_once(*model_, threads(), of_other).ranks);
        ThreadsTogether(of_these).each([&](int rank, Together& together) {
            cost::KernelTimes missing =
                MeasuredRank(*model_, rank, of_other).measure_missing(known, together);
            if (rank == 0) found.kernels.seconds.merge(missing.seconds);
        });
    }
    if (model_->here == 1) found.memory_of = cost::Of::host;
    return found;
}

int Predictor::at_once() const { return model_->at_once(); }
int Predictor::cores() const { return machine_for(model_->config).cores(); }

bool Predictor::covers(const Plan& plan, const cost::KernelTimes& times) const {
    if (!plan.partition.stage.all()) return covers(of_all_kinds(with_all_layers(plan)), times);
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
    return {model_->world.ranks, model_->world.local_ranks, model_->gpu, model_->here};
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
        return with_assumed_kernels(std::move(found), of_all_kinds(with_all_layers(plan)));
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
        other.chosen_by_ = chosen_by_;
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

}  // namespace ferry::train
