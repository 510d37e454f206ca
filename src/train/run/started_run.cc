#include "started_run.h"

#include <spdlog/fmt/fmt.h>

#include <utility>

#include "base/log.h"
#include "ops/blas_kernels.h"
#include "start_messages.h"
#include "train/inside.h"
#include "train/rank_agreement.h"
#include "train/resuming/resumed_formats.h"
#include "train/resuming/resumed_kernels.h"
#include "train/saving/checkpoint_room.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"
#include "train/setup/volume_options.h"
#include "train/stack/storage_room.h"
#include "train/stack/threads.h"
#include "train/state/saving.h"

namespace ferry::train {
namespace {

FirstState first_state_of(const RunSetup& setup, const Runtime& runtime) {
    const TokenFileInfo& tokens = setup.loader->info();
    return {{.config = setup.config,
             .described = setup.described,
             .layers = setup.layers,
             .tokens = tokens,
             .identity = setup.checkpoint_identity,
             .ranks = setup.world.ranks},
            runtime};
}

// The cores and the memory of this rank, and the kernels that the run was begun with.
TierStack::Ground ground_of(const RunSetup& setup, const FirstState& first,
                            const Runtime& runtime) {
    Topology machine = machine_of_rank(machine_for(setup.config), setup.device.pci_address(),
                                       setup.ranks, setup.executor);
    if (runtime.resume)
        take_recorded_kernels(setup.config, setup.share.budgets.nvme, setup.shape(), setup.device,
                              setup.world.ranks);
    if (first.saved())
        take_kernels_of(first.saved()->manifest().numerics_hash, setup.config, setup.shape(),
                        setup.device, setup.world.ranks);
    return {.config = setup.config,
            .share = setup.share,
            .executor = setup.executor,
            .device = setup.device,
            .machine = std::move(machine),
            .ranks = setup.world.ranks,
            .progress = setup.progress,
            .memory = runtime.memory};
}

TierStack::Model model_of_rank(const RunSetup& setup) {
    return {model::slice_of(setup.shape(), setup.world.slicing()),
            setup.numerics,
            setup.layers,
            {},
            setup.kernel_exchanges()};
}

void refuse_of_pipeline(const RunSetup& setup, const Runtime& runtime) {
    if (setup.world.pipeline == 1) return;
    const auto refuse = [&](bool asked, const char* what, const char* where, const char* remedy) {
        if (!asked) return;
        throw Error(Trouble::usage,
                    {.what = what,
                     .where = where,
                     .measured = fmt::format("parallel.pipeline {}", setup.world.pipeline),
                     .remedy = remedy});
    };
    refuse(runtime.resume, "a pipeline does not go on from the files of a killed run", "--resume",
           "start it anew, or set parallel.pipeline to 1");
    refuse(!runtime.imported.directory.empty(), "a pipeline imports no state",
           runtime.imported.directory.c_str(), "set parallel.pipeline to 1");
}

// Of a pipeline the ranks of a stage; and its stages must not wait for each other for ever.
void require_matching_exchanges(const RunSetup& setup, const Schedules& schedules) {
    if (!setup.ranks) return;
    const World& world = setup.world;
    const auto all = schedules.all();
    require_same_exchanges(*setup.ranks, setup.executor, all, setup.kernel_exchanges().any(),
                           world.of_a_stage());
    if (world.pipeline == 1) return;
    require_stages_end(*setup.ranks, setup.executor, all, world.stage(), world.pipeline);
}

// While host memory is reserved and holds nothing.
std::optional<UpdateRates> rates_before_fill(const RunSetup& setup, TierStack& stack) {
    if (!setup.measures_bound || setup.measurements || setup.executor.simulated()) return {};
    const UpdateRates rates = time_updates_before_fill(
        stack, setup.share.budgets, optim::scalars_of(elements_hyper_of(setup.config), 1, 1.0),
        *together_of(setup));
    stack.start_up().done("updates, timed in host memory", rates.memory_bytes);
    return rates;
}

}  // namespace

std::unique_ptr<Together> together_of(const RunSetup& setup) {
    if (setup.ranks && setup.device.kind() == DeviceKind::cpu)
        return std::make_unique<RanksTogether>(*setup.ranks, setup.executor);
    return std::make_unique<Alone>();
}

Steps::Steps(const RunSetup& setup, const Config& config, TierStack& stack, const int64_t& step)
    : lane_rows(setup.recording, swap::lanes_of(setup.world.ranks)),
      worker_rows(setup.recording, stack.teams()),
      path_rows(setup.recording, setup.share.budgets.nvme, config.io.rings),
      checkpoint_rows(config.checkpoint.dir.empty() ? nullptr : setup.recording, setup.executor),
      judge(config, setup.hyper, setup.schedule, stack.plan(), stack.arena()) {
    const ComputeContext& context = *setup.context;
    if (setup.ranks)
        lane.emplace(*setup.ranks, setup.sharers,
                     HostGroups{context.in_host.get(), context.across_hosts.get()},
                     context.links(config), stack.plan(), judge, step);
}

StartedRun::StartedRun(const Config& config, const Runtime& runtime,
                       std::shared_ptr<ComputeContext> context)
    : setup_(set_up(config, runtime, std::move(context))) {
    Cut cut = cut_of(setup_);
    FirstState first = first_state_of(setup_, runtime);
    TierStack& stack = stack_.emplace(ground_of(setup_, first, runtime), model_of_rank(setup_));
    // Made once: the table of products that it names may change while the run goes on.
    const std::string machine =
        machine_text(setup_.device, setup_.config, ops::table_of(stack.ops()));

    make_plan(std::move(cut), first, runtime, machine);
    tell_of_plan(setup_, plans_->cut(), plan());
    first.prove({.plan = plan(),
                 .momentum = setup_.momentum,
                 .world = setup_.world,
                 .ranks = setup_.ranks,
                 .executor = setup_.executor,
                 .team = stack.teams().all(),
                 .start_up = stack.start_up(),
                 .numerics = numerics_.text});

    stack.reserve({.host_budget_bytes = setup_.share.budgets.host_bytes});
    rates_before_fill_ = rates_before_fill(setup_, stack);
    checkpoint_room_ = reserve_checkpoint_room(
        setup_.config, setup_.world, setup_.share.budgets, setup_.layers,
        setup_.ranks && setup_.context->saving && reads_own_part(plan()), stack);

    if (!setup_.executor.simulated()) check_paths(setup_.share.budgets.nvme);
    if (runtime.resume)
        require_recorded_formats(setup_.config, setup_.share.budgets.nvme, setup_.shape(), machine,
                                 setup_.world.ranks);
    open(runtime);
    tell_of_settings(setup_, stack.machine());
    steps_->schedules.record(plan(), setup_.share.evaluation_micro_batches);
    require_matching_exchanges(setup_, steps_->schedules);
    stack.warm(steps_->schedules.of_all_kernels(), steps_->judge.scalars({}, 1.0));  // of zeros
    stack.fill([&] { now_ = first_contents(std::move(first), runtime); });
}

// All ranks agree on what the run is, and each on the plan that is its own.
void StartedRun::make_plan(Cut cut, const FirstState& first, const Runtime& runtime,
                           const std::string& machine) {
    const Config& config = setup_.config;
    const int ranks = setup_.world.ranks;
    const bool simulated = setup_.executor.simulated();
    const NumericsRecord before = numerics_record_of(config, setup_.shape(), machine, ranks);
    record_.emplace(identity_of(config, before.text, setup_.loader->info()), config.steps);
    if (setup_.trains) require_ranks(config, ranks);
    tell_of_ranks(setup_, stack_->decoder().numerics());
    refuse_of_pipeline(setup_, runtime);
    if (!simulated)
        directories_ = std::make_unique<RankDirectories>(config, setup_.share, setup_.world);
    if (setup_.ranks)
        require_same_run(*setup_.ranks, setup_.executor,
                         setup_.device.kind() == DeviceKind::cpu ? ops::blas_core() : "",
                         numerics_text(config, setup_.shape(), machine, ranks),
                         setup_.loader->info(), first.text());
    plans_.emplace(setup_, stack_->decoder(), std::move(cut));
    numerics_ = numerics_record_of(plans_->cut().config, setup_.shape(), machine, ranks);
    stack_->plan(plans_->plan());
    if (setup_.ranks && config.checkpoint.durable_steps) require_durable_alone(plan());
    // Before memory is reserved and touched, which takes a minute where there is much.
    if (!simulated && !runtime.resume) require_room(plan(), setup_.share.budgets.nvme);
}

void StartedRun::open(const Runtime& runtime) {
    warn_of_last_step(setup_);
    steps_.emplace(setup_, plans_->cut().config, *stack_, now_.step);
    stack_->open({.open_volume = runtime.open_volume,
                  .run_id = numerics_.hash,
                  .resume = runtime.resume,
                  .has_ended =
                      [&](const aio::Volume& volume) {
                          return has_ended(volume, *record_, swap::map_bytes(plan().objects),
                                           setup_.config.steps);
                      },
                  .lays_out_later = true,  // the first contents go to nearly every slot
                  .tracer = steps_->path_rows.tracer(),
                  .loader = setup_.loader.get(),
                  .evaluation_micro_batches = setup_.config.evaluate.micro_batches,
                  .workers = &steps_->worker_rows,
                  .recording = setup_.recording,
                  .rows = steps_->lane_rows.measured(),
                  .collectives = steps_->lane ? &*steps_->lane : nullptr});
    state_.emplace(plan(), store(), stack_->teams().all(),
                   StateIo::staging_of(plan(), stack_->arena()));
    if (plan().has_feedback())
        momentum_.emplace(plan(), store(), *setup_.ranks, setup_.executor, stack_->arena());
}

RunState StartedRun::first_contents(FirstState first, const Runtime& runtime) {
    const OpenState open{.setup = setup_,
                         .partition = plans_->cut().partition,
                         .stack = *stack_,
                         .judge = steps_->judge,
                         .state = *state_,
                         .momentum = momentum_ ? &*momentum_ : nullptr};
    const RunState begun = runtime.resume ? resume_state(open, first, *record_)
                                          : fill_state(open, first, runtime.imported);
    first.log_rate(stack_->start_up().seconds());
    const bool restored = runtime.resume || first.saved() || first.imported();
    stack_->start_up().done(restored ? "restored state" : "first contents", state_->bytes());
    return begun;
}

}  // namespace ferry::train
