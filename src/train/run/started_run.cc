#include "started_run.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "base/log.h"
#include "checkpoint/tensors_ahead.h"
#include "ferry/units.h"
#include "ops/blas_kernels.h"
#include "train/inside.h"
#include "train/prediction/planning_measurements.h"
#include "train/prediction/prediction.h"
#include "train/prediction/schedule_choice.h"
#include "train/prediction/simulated_stages.h"
#include "train/rank_agreement.h"
#include "train/resuming/resumed_formats.h"
#include "train/resuming/resumed_kernels.h"
#include "train/saving/save.h"
#include "train/setup/attention_of.h"
#include "train/setup/from_config.h"
#include "train/setup/numerics_record.h"
#include "train/setup/volume_options.h"
#include "train/stack/memory_left.h"
#include "train/stack/storage_room.h"
#include "train/stack/threads.h"

namespace ferry::train {
namespace {

std::unique_ptr<ImportedState> import(const Imported& imported, const model::Shape& shape,
                                      const std::vector<model::Layer>& layers, int ranks) {
    if (imported.directory.empty()) return nullptr;
    FERRY_CHECK(ranks == 1, "state is imported by one rank");
    return std::make_unique<ImportedState>(imported.directory, shape, layers);
}

std::unique_ptr<KernelExchange> exchange_of(comm::StreamExchange* ranks, const char* of) {
    return ranks ? std::make_unique<KernelExchange>(*ranks, of) : nullptr;
}

// What heads and MLP become where ranks share tensors unevenly, and a micro-batch's rows.
void log_slices(const model::Shape& whole, int64_t tokens, const World& world) {
    const model::Slicing slicing = world.slicing();
    if (slicing.ranks == 1) return;
    const model::Shape slice = model::slice_of(whole, slicing);
    std::string text = fmt::format(
        "{} ranks share the tensors: {} heads over {} of keys, an MLP {} wide and {} rows of the "
        "vocabulary's tables on each",
        slicing.ranks, slice.heads, slice.kv_heads, slice.intermediate,
        ceil_div(whole.vocab, int64_t{slicing.ranks}));
    const int holders = model::key_holders_of(whole, slicing.ranks);
    if (holders > 1) text += fmt::format("; each head of keys is on {} ranks", holders);
    const auto zeros = [&](int64_t all, int64_t own) {
        const int64_t room = own * slicing.ranks;
        return 100.0 * static_cast<double>(room - all) / static_cast<double>(room);
    };
    if (holders == 1 && whole.kv_heads % slicing.ranks != 0)
        text += fmt::format("; {:.0f} % of the heads are zeros, as {} do not divide {}",
                            zeros(whole.kv_heads, slice.kv_heads), slicing.ranks, whole.kv_heads);
    if (whole.intermediate % slicing.ranks != 0)
        text += fmt::format("; {:.2g} % of the MLP are zeros",
                            zeros(whole.intermediate, slice.intermediate));
    if (whole.vocab % slicing.ranks != 0)
        text += fmt::format("; some have a row less, as {} do not divide {} tokens", slicing.ranks,
                            whole.vocab);
    if (tokens % slicing.ranks != 0)
        text += fmt::format(
            "; the last have fewer rows of a micro-batch, as {} do not divide {} tokens",
            slicing.ranks, tokens);
    log_info(text);
}

// What a rank has of each sequence that several share, and of its attention.
void log_parts(const model::Shape& whole, const model::Numerics& numerics, const World& world) {
    const int parts = numerics.parts;
    if (parts == 1) return;
    std::string text = fmt::format("{} ranks share each sequence: {} of its {} tokens on each",
                                   parts, numerics.sequence, numerics.whole_sequence());
    const int64_t heads = model::slice_of(whole, world.slicing()).kv_heads;
    if (numerics.ring)
        text += "; for attention their keys and queries go round";
    else
        text += fmt::format("; for attention all tokens of {} of {} heads of keys{}",
                            ceil_div(heads, int64_t{parts}), heads,
                            heads < parts        ? ", and some have none"
                            : heads % parts != 0 ? ", and some have one less"
                                                 : "");
    log_info(text);
}

void log_stages(const std::vector<zero::Stage>& stages, const planner::Plan& plan) {
    const auto count = static_cast<int>(stages.size());
    log_info(fmt::format(
        "{} stages: {}; {} pass through them, and by theory each waits {:.0f} % of a step where "
        "all are as fast",
        count, text_of(stages, std::ssize(plan.layers)), groups_text(plan), 100 * bubble_of(plan)));
    warn_of_bubble(plan);
}

// Plans that go by the key share out the host's budgets otherwise.
void warn_of_host(const Config& config, const World& world) {
    const std::optional<int>& each = config.budgets.ranks_per_host;
    if (world.ranks == 1 || !each || *each == world.local_ranks) return;
    log_warn(
        fmt::format("budgets.ranks_per_host is {}, and the first host has {} rank{} of this run: "
                    "they share its "
                    "budgets, and ferry plan goes by the key",
                    *each, world.local_ranks, world.local_ranks == 1 ? "" : "s"));
}

void refuse_restored(const Runtime& runtime, const Config& config) {
    const bool slices = config.parallel.tensor > 1;
    if (!slices || runtime.checkpoint.empty() || config.optimizer.moments != MomentType::int8)
        return;
    throw Error(
        Trouble::usage,
        {.what = "blocks of coded moments are of a slice, and a checkpoint has the whole tensor's",
         .where = runtime.checkpoint,
         .measured = fmt::format("moments int8, parallel.tensor {}", config.parallel.tensor),
         .remedy = "set parallel.tensor to 1"});
}

std::unique_ptr<SavedRun> open_saved(const Runtime& runtime, const Config& config,
                                     const std::string& identity) {
    refuse_restored(runtime, config);
    if (runtime.checkpoint.empty()) return nullptr;
    auto saved = std::make_unique<SavedRun>(runtime.checkpoint);
    saved->require(identity, config.steps);
    return saved;
}

// Whoever asks for codes hears which tensors have them: by default norms and the embedding do not.
void log_coded(const std::vector<model::Layer>& layers) {
    const CodedParts parts = coded_parts(layers);
    if (parts.coded.tensors == 0)
        return log_warn(
            "optimizer.moments int8 does nothing: no tensor that trains has whole blocks of codes "
            "and is left out of optimizer.fp32_moments");
    log_info(fmt::format(
        "int8 moments: {} tensors with {} parameters; fp32 moments: {} with {}, which "
        "are norms, biases, small ones and those of optimizer.fp32_moments",
        parts.coded.tensors, parts.coded.elements, parts.fp32.tensors, parts.fp32.elements));
}

void warn_of_codecs(const Config& config) {
    const zero::Codecs asked = codecs_of(config);
    if (asked.gradients.on() || asked.weights.on())
        log_warn("zero.compress does nothing: no two ranks have the same state");
}

}  // namespace

StartedRun::StartedRun(const Config& config, const Runtime& runtime,
                       std::shared_ptr<ComputeContext> context)
    : context_(std::move(context)),
      ranks_(context_->ranks.get()),
      world_(context_->world(config)),
      sharers_(context_->sharers(config)),
      of_sequences_(exchange_of(context_->sequence.get(), "heads")),
      of_tensors_(exchange_of(context_->tensors.get(), "sums")),
      config_(config),
      share_(find_alike(ranks_, *runtime.executor, [&] { return share_of(config, world_); })),
      executor_(*runtime.executor),
      device_(*context_->device),
      recording_(runtime.given ? runtime.given->recording : nullptr),
      progress_(runtime.progress),
      measurements_(runtime.given ? runtime.given->measurements : nullptr),
      hyper_(hyper_of(config)),
      schedule_(schedule_of(config)),
      described_(model_of(config)),
      numerics_(numerics_of(config, shape_, world_)),
      loader_(batches_of(config, shape_, runtime, world_)),
      layers_(layers_of(config, shape_, world_.ranks, world_.slicing().rank)),
      stages_(stages_of(config, shape_, layers_)),
      partition_(zero::partition_of(
          config.zero.stage, world_.sharer(), world_.sharers(), codecs_of(config), world_.slicing(),
          stages_[static_cast<size_t>(world_.stage())], hosts_of(config))),
      checkpoint_identity_(checkpoint_identity_of(config, shape_, loader_->info())),
      description_(config.checkpoint.dir.empty() ? "" : description_of(config, numerics_.compute)),
      saved_(open_saved(runtime, config, checkpoint_identity_)),
      loaded_(first_weights_of(config, runtime)),
      imported_(import(runtime.imported, shape_, layers_, world_.ranks)),
      stack_(ground(runtime), TierStack::Model{model::slice_of(shape_, world_.slicing()),
                                               numerics_,
                                               layers_,
                                               {},
                                               kernel_exchanges()}),
      machine_text_(machine_text(device_, config_, ops::table_of(stack_.ops()))),
      record_(identity_of(config, numerics_record(), loader_->info()), config.steps) {
    if (!runtime.only_evaluates) require_ranks(config, world_.ranks);
    if (world_.rank == 0) warn_of_host(config_, world_);
    if (world_.rank == 0) log_slices(shape_, stack_.decoder().numerics().tokens(), world_);
    if (world_.rank == 0) log_parts(shape_, stack_.decoder().numerics(), world_);
    if (world_.pipeline > 1) refuse_of_pipeline(runtime);
    make_plan(runtime);
    if (world_.rank == 0 && world_.pipeline > 1) log_stages(stages_, plan_);
    if (world_.rank == 0) warn_of_gathers(plan_);
    prove_first_state();
    stack_.reserve({.host_budget_bytes = share_.budgets.host_bytes});
    time_before_fill(runtime);
    reserve_checkpoint_room();
    open(runtime);
    if (world_.rank == 0) warn_of_text(config_, described_);
    if (world_.rank == 0) warn_of_layout(config_);
    if (world_.rank == 0) warn_of_speculation(config_, world_);
    if (world_.rank == 0) warn_of_one_host(config_, world_);
    if (world_.rank == 0 && world_.sharers() == 1) warn_of_codecs(config_);
    log_machine(share_.budgets.nvme, stack_.machine(), device_, executor_);
    if (const std::string rule = muon_rule(config_, layers_, world_.ranks);
        world_.rank == 0 && !rule.empty())
        log_info(rule);
    if (world_.rank == 0 && config_.optimizer.moments == MomentType::int8) log_coded(layers_);
    if (!executor_.simulated()) log_planned_by(measurements_, config_);
    schedules_.record(plan_, share_.evaluation_micro_batches);
    if (ranks_) require_matching_exchanges();
    stack_.warm(schedules_.of_all_kernels(), judge_->scalars({}, 1.0));  // of zeros
    stack_.fill([&] { first_contents(runtime); });
}

std::string StartedRun::numerics_record() const {
    return fmt::format("{:016x} ({})", numerics_id(),
                       numerics_text(config_, shape_, machine_text_, world_.ranks));
}

uint64_t StartedRun::numerics_id() const {
    return numerics_hash(config_, shape_, machine_text_, world_.ranks);
}

std::unique_ptr<LoadedWeights> StartedRun::first_weights_of(const Config& config,
                                                            const Runtime& runtime) const {
    check_vocabulary(config, described_, loader_->info());
    if (saved_ || !runtime.imported.directory.empty()) return nullptr;
    return LoadedWeights::of(config.model, shape_, layers_);
}

TierStack::Ground StartedRun::ground(const Runtime& runtime) {
    Topology machine =
        machine_of_rank(machine_for(config_), device_.pci_address(), ranks_, executor_);
    if (runtime.resume)
        take_recorded_kernels(config_, share_.budgets.nvme, shape_, device_, world_.ranks);
    if (saved_)
        take_kernels_of(saved_->manifest().numerics_hash, config_, shape_, device_, world_.ranks);
    return {.config = config_,
            .share = share_,
            .executor = executor_,
            .device = device_,
            .machine = std::move(machine),
            .ranks = world_.ranks,
            .progress = progress_,
            .memory = runtime.memory};
}

void StartedRun::make_plan(const Runtime& runtime) {
    if (!executor_.simulated())
        directories_ = std::make_unique<RankDirectories>(config_, share_, world_);
    if (ranks_) require_same_start();
    planner::PlanRequest request = of_rank(request_of(config_), world_);
    request.trains = !runtime.only_evaluates;
    planner_.emplace(request, device_, stack_.decoder(), partition_,
                     planning_measurements(request, measurements_, world_.local_ranks), ranks_,
                     executor_);
    if (ranks_ && world_.pipeline > 1)
        sharers_of_hosts_ = gather(*ranks_, executor_, world_.local_ranks, "ranks of hosts");
    if (chooses_schedule(config_) && request.trains) choose_schedule(request);
    stack_.plan(planner_->plan(ranks_, executor_));
    if (ranks_ && config_.checkpoint.durable_steps) require_durable_alone(plan_);
    // Before memory is reserved and touched, which takes a minute where there is much.
    if (!executor_.simulated() && !runtime.resume) require_room(plan_, share_.budgets.nvme);
}

void StartedRun::take_stages(const StageOrder& order) {
    stages_ = stages_of(with_order(config_, order), shape_, layers_);
    partition_.stage = stages_[static_cast<size_t>(world_.stage())];
    planner_->take(partition_.stage);
}

std::vector<planner::Plan> StartedRun::plans_of_stages(std::span<const zero::Stage> stages) const {
    return train::plans_of_stages(stages, [&](const zero::Stage& stage,
                                              std::optional<int64_t> chunk_elements) {
        // The rank of it that has least of its host.
        const auto ranks = static_cast<size_t>(world_.of_a_stage());
        const std::span<const int> of_stage =
            std::span(sharers_of_hosts_).subspan(static_cast<size_t>(stage.index) * ranks, ranks);
        World other = world_;
        other.local_ranks = std::ranges::max(of_stage);
        return planner_->plan_of(of_rank(request_of(config_), other), stage, chunk_elements);
    });
}

// Why this rank cannot have its part of the stages as they are; none: it can.
std::optional<Error> StartedRun::refusal_of(const planner::PlanRequest& request) const {
    std::optional<Error> refusal =
        plan_schedule({}, [&] {
            return std::vector{planner_->plan_of(request, partition_.stage, std::nullopt)};
        }).refusal;
    if (!refusal) return std::nullopt;
    return Error(refusal->trouble(), of_stage(refusal->problem(), partition_.stage));
}

// Each rank says what it has no room for. The first one simulates what all have room for, and all
// take what it chooses: measurements of another host could say otherwise.
void StartedRun::choose_schedule(const planner::PlanRequest& request) {
    std::vector<PlannedSchedule> planned;
    const std::vector<StageOrder> orders = orders_to_choose(config_, shape_.layers);
    for (const StageOrder& order : orders) {
        planned.push_back(plan_schedule(order, [&] {
            take_stages(order);
            return std::vector<planner::Plan>{};
        }));
        std::optional<Error>& refusal = planned.back().refusal;
        if (!refusal) refusal = refusal_of(request);
        refusal = error_of_any(*ranks_, executor_, refusal);
    }
    if (std::ranges::all_of(planned, [](const auto& one) { return one.refusal.has_value(); }))
        throw Error(*planned.front().refusal);
    // Where the first rank can plan none for the others, the first that all have room for.
    const auto possible =
        std::ranges::find_if(planned, [](const auto& one) { return !one.refusal.has_value(); });
    auto chosen = static_cast<size_t>(possible - planned.begin());
    // After each plan and each simulation the others hear of the first rank, so that they wait no
    // longer than one takes: once a schedule in each of the two rounds.
    const auto tell = [&] { gather(*ranks_, executor_, world_.rank, "schedule"); };
    if (world_.rank != 0) {
        for (size_t told = 0; told < 2 * orders.size(); ++told) tell();
    } else {
        for (PlannedSchedule& one : planned) {
            if (!one.refusal)
                one = plan_schedule(one.order, [&] {
                    take_stages(one.order);
                    return plans_of_stages(stages_);
                });
            tell();
        }
        ScheduleChoice choice =
            train::choose_schedule(std::move(planned), stack_.decoder(), planner_->machine(), tell);
        if (!fastest_of(choice.offers)) choice.chosen = chosen;
        const bool schedules = config_.parallel.schedule == PipelineSchedule::automatic;
        log_info(fmt::format("parallel.{} auto takes {}", schedules ? "schedule" : "virtual_stages",
                             text_of(choice)));
        chosen = choice.chosen;
    }
    chosen = gather(*ranks_, executor_, chosen, "schedule").front();
    take_stages(orders[chosen]);
    config_.parallel.virtual_stages = orders[chosen].virtual_stages;
}

bool StartedRun::has_errors(int64_t moment_updates) const {
    return plan_.has_feedback() && moment_updates >= momentum_schedule_.first();
}

// As far as it can, before memory is taken; the rest as it is read. The ranks read a part each.
void StartedRun::prove_first_state() {
    Team& team = stack_.teams().all();
    if (saved_) {
        saved_->require(plan_);
        if (has_errors(saved_->manifest().moment_updates))
            find_alike(ranks_, executor_,
                       [this] { saved_->require_errors(plan_, momentum_schedule_.first()); });
        saved_->prove(team, world_.rank, world_.ranks, stack_.start_up());
        if (has_errors(saved_->manifest().moment_updates))
            saved_->prove_errors(plan_, team, world_.rank, world_.ranks, stack_.start_up());
        if (world_.rank == 0 && saved_->manifest().numerics != numerics_record())
            log_info("the checkpoint was written under other numerics (" +
                     saved_->manifest().numerics +
                     "): from here on numbers may differ from those of that run");
    }
    if (imported_) {
        imported_->require(plan_);
        imported_->prove(team, stack_.start_up());
    }
    if (loaded_) loaded_->prove(team, world_.rank, world_.ranks, stack_.start_up());
}

void StartedRun::require_same_start() const {
    require_same_run(*ranks_, executor_, device_.kind() == DeviceKind::cpu ? ops::blas_core() : "",
                     numerics_text(config_, shape_, machine_text_, world_.ranks), loader_->info(),
                     saved_ ? saved_->text() : first_weights(loaded_.get(), shape_));
}

// Of a pipeline the ranks of a stage; and its stages must not wait for each other for ever.
void StartedRun::require_matching_exchanges() const {
    const auto all = schedules_.all();
    require_same_exchanges(*ranks_, executor_, all, kernel_exchanges().any(), world_.of_a_stage());
    if (world_.pipeline == 1) return;
    require_stages_end(*ranks_, executor_, all, world_.stage(), world_.pipeline);
}

void StartedRun::refuse_of_pipeline(const Runtime& runtime) const {
    const auto refuse = [&](bool asked, const char* what, const char* where, const char* remedy) {
        if (!asked) return;
        throw Error(Trouble::usage,
                    {.what = what,
                     .where = where,
                     .measured = fmt::format("parallel.pipeline {}", world_.pipeline),
                     .remedy = remedy});
    };
    refuse(runtime.resume, "a pipeline does not go on from the files of a killed run", "--resume",
           "start it anew, or set parallel.pipeline to 1");
    refuse(imported_ != nullptr, "a pipeline imports no state", runtime.imported.directory.c_str(),
           "set parallel.pipeline to 1");
}

void StartedRun::open(const Runtime& runtime) {
    if (!executor_.simulated()) check_paths(share_.budgets.nvme);
    if (runtime.resume)
        require_recorded_formats(config_, share_.budgets.nvme, shape_, machine_text_, world_.ranks);
    rows_.emplace(recording_, executor_, config_, share_, world_.ranks, stack_.teams());
    judge_.emplace(config_, hyper_, schedule_, plan_, stack_.arena());
    if (world_.rank == 0 && momentum_schedule_.of(config_.steps) == Exchanged::nothing)
        log_warn(
            fmt::format("step {}, the last, is a local step unless some are skipped: exports will "
                        "have the weights of the exchange before it; end the run at one "
                        "(docs/communication.md)",
                        config_.steps));
    if (ranks_)
        lane_ = std::make_unique<RankLane>(
            *ranks_, sharers_, HostGroups{context_->in_host.get(), context_->across_hosts.get()},
            context_->links(config_), plan_, *judge_, step_);
    stack_.open({.open_volume = runtime.open_volume,
                 .run_id = numerics_id(),
                 .resume = runtime.resume,
                 .has_ended =
                     [&](const aio::Volume& volume) {
                         return has_ended(volume, record_, swap::map_bytes(plan_.objects),
                                          config_.steps);
                     },
                 .lays_out_later = true,  // the first contents go to nearly every slot
                 .tracer = rows_->paths.tracer(),
                 .loader = loader_.get(),
                 .evaluation_micro_batches = config_.evaluate.micro_batches,
                 .workers = &rows_->workers,
                 .recording = recording_,
                 .rows = rows_->lanes.measured(),
                 .collectives = lane_.get()});
    state_.emplace(plan_, store(), stack_.teams().all(),
                   StateIo::staging_of(plan_, stack_.arena()));
    if (plan_.has_feedback()) momentum_.emplace(plan_, store(), *ranks_, executor_, stack_.arena());
}

// As initialised, as read from the model's files, or as the resumed run left it.
void StartedRun::first_contents(const Runtime& runtime) {
    const bool resumes = runtime.resume;
    const auto fill = [&](const model::Layer& layer, int64_t first, std::span<float> out) {
        if (loaded_) return loaded_->fill(layer, first, out);
        model::initialise(shape_, layer, config_.seed, first, out);
    };
    const auto touch = [this](std::span<std::byte> part) {
        stack_.pool().touch(part, stack_.teams());
    };
    const auto lock = [this] { stack_.lock_homes(); };
    StartUp& start_up = stack_.start_up();
    if (resumes) lock();
    const StateIo::FirstMoment moment = StateIo::first_moment_of(hyper_);
    if (resumes)
        resume_run(fill);
    else if (saved_)
        resume_saved(saved_->contents(plan_, moment, stack_.teams().all(), memory_for_reading()),
                     {touch, lock});
    else if (imported_)
        import_state(runtime.imported, moment, {touch, lock});
    else
        found_.frozen = state_->initialise(new_contents(fill, moment), {touch, lock}, start_up);
    if (loaded_) loaded_->log_rate(start_up.seconds());
    loaded_.reset();
    const bool restored = resumes || saved_ || imported_;
    saved_.reset();
    imported_.reset();
    start_up.done(restored ? "restored state" : "first contents", state_->bytes());
}

int64_t StartedRun::memory_for_reading() const {
    return std::min(checkpoint::TensorsAhead::kMemory,
                    train::memory_for_reading(plan_, share_.budgets, stack_.machine(), device_));
}

std::unique_ptr<Together> StartedRun::together() const {
    if (ranks_ && device_.kind() == DeviceKind::cpu)
        return std::make_unique<RanksTogether>(*ranks_, executor_);
    return std::make_unique<Alone>();
}

// While host memory is reserved and holds nothing.
void StartedRun::time_before_fill(const Runtime& runtime) {
    const bool measures = runtime.given && runtime.given->measures_bound && !measurements_;
    if (!measures || executor_.simulated()) return;
    rates_before_fill_ = time_updates_before_fill(
        stack_, share_.budgets, optim::scalars_of(elements_hyper_of(config_), 1, 1.0), *together());
    stack_.start_up().done("updates, timed in host memory", rates_before_fill_->memory_bytes);
}

// For what waits to be written; touched by the first checkpoint.
void StartedRun::reserve_checkpoint_room() {
    const CheckpointConfig& saved = config_.checkpoint;
    const bool own = ranks_ && context_->saving && reads_own_part(plan_);
    if (!saves_on_the_way(config_) || (!own && world_.rank != 0)) return;
    const int64_t bytes = own ? own_checkpoint_bytes(plan_)
                              : checkpoint_bytes(plan_, layers_, {.errors = plan_.has_feedback()});
    const int64_t left = memory_beside(plan_, share_.budgets, stack_.machine(), device_);
    const int64_t asked =
        saved.memory_bytes.value_or(left) / (own && saved.memory_bytes ? world_.local_ranks : 1);
    const int64_t room = std::min(asked, bytes);
    if (room > left)
        throw Error(Trouble::does_not_fit,
                    {.what = "host memory for checkpoints on their way does not fit",
                     .where = "checkpoint.memory",
                     .measured = format_bytes(room),
                     .limit = format_bytes(left) + " beside the plan",
                     .remedy = "lower it, raise budgets.host, or set it to auto"});
    try {
        checkpoint_room_ = stack_.pool().reserve("checkpoint", room, 0, stack_.teams());
    } catch (const Error&) {
        if (saved.memory_bytes) throw;
    }
    if (world_.rank == 0 && std::ssize(checkpoint_room_) < bytes)
        log_info(fmt::format(
            "checkpoints of {}{}: host memory holds {} while it is written; "
            "training waits until the rest is (checkpoint.memory)",
            format_bytes(bytes), own ? " a rank" : "", format_bytes(std::ssize(checkpoint_room_))));
}

StateIo::Contents StartedRun::new_contents(const StateIo::Fill& fill,
                                           const StateIo::FirstMoment& moment) {
    StateIo::Contents contents{.master = fill, .first_moment = moment};
    if (!loaded_) return contents;
    contents.begin = [this](std::span<const StateIo::ChunkRun> parts) {
        loaded_->begin(plan_, parts, stack_.teams().all(), memory_for_reading());
    };
    contents.next = [this] { loaded_->next(); };
    return contents;
}

void StartedRun::resume_run(const StateIo::Fill& fill) {
    if (!volume()) throw nothing_to_resume();
    const Prove prove = [&](const auto& may_write) { return state_->restore(fill, may_write); };
    found_ = ranks_ ? resume(store(), record_, prove, *ranks_, executor_)
                    : resume(store(), record_, prove);
    if (partition_.shares_updates())
        state_->restore_replicas(
            [this](int64_t layer, const zero::Run& run, const Source& mine, const Sink& sink) {
                share_values(*ranks_, executor_, partition_,
                             plan_.layers[static_cast<size_t>(layer)], run, mine, sink);
            });
    log_info(resumed_text(found_.step, volume()->noted_step()));
}

void StartedRun::resume_saved(const StateIo::Contents& contents, const StateIo::Watch& watch) {
    found_ = run_of(saved_->manifest());
    found_.frozen = state_->initialise(contents, watch, stack_.start_up());
    if (has_errors(found_.moment_updates))
        momentum_->restore(
            [this](const model::Layer& layer, const StateArray& array, int64_t first,
                   std::span<std::byte> out) { saved_->read_proved(layer, array, first, out); });
    if (momentum_schedule_.of(found_.moment_updates) == Exchanged::nothing)
        momentum_->restore_weights(*state_,
                                   judge_->scalars({found_.updates, found_.moment_updates}, 1));
    if (world_.rank == 0)
        log_info(fmt::format("resumed after step {} from {}", found_.step, saved_->path()));
}

void StartedRun::import_state(const Imported& imported, const StateIo::FirstMoment& moment,
                              const StateIo::Watch& watch) {
    found_.step = imported.step;
    found_.updates = imported.updates;
    if (imported_->has_moments()) found_.moment_updates = imported.moment_updates;
    if (first_loss_scale().scales() && imported.loss_scale > 0)
        found_.loss_scale = {.value = imported.loss_scale, .good = imported.good_steps};
    found_.frozen = state_->initialise(imported_->contents(moment), watch, stack_.start_up());
}

}  // namespace ferry::train
