#include "tier_stack.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "aio/published_run.h"
#include "arenas.h"
#include "device_needs.h"
#include "memory_left.h"
#include "threads.h"
#include "train/setup/volume_options.h"

namespace ferry::train {

TierStack::TierStack(Ground ground, std::optional<Model> model)
    : ground_(std::move(ground)),
      teams_(make_teams(ground_.share.threads, ground_.config.device, ground_.machine,
                        ground_.executor, ground_.ranks)) {
    if (!model) return;
    ops_ = ops_on(ground_.device, ground_.config, teams_->all());
    called_ = model->around ? &model->around(*ops_) : ops_.get();
    exchanges_ = model->exchanges;
    decoder_.emplace(std::move(model->shape), model->numerics, std::move(model->layers), *called_,
                     exchanges_.ranks());
}

TierStack::~TierStack() { close(); }

template <class Work>
void TierStack::stage(std::initializer_list<Stage> after, Stage next, const Work& work) {
    FERRY_CHECK(std::ranges::count(after, stage_) == 1,
                "a stage of the tier stack out of its turn");
    try {
        work();
    } catch (...) {
        close();
        throw;
    }
    stage_ = next;
}

void TierStack::plan(planner::Plan plan) {
    stage({Stage::none}, Stage::planned, [&] {
        plan_ = within_memory(std::move(plan), ground_.share.budgets, ground_.machine,
                              ground_.device, memory_to_save(ground_.config));
    });
}

void TierStack::reserve(const Reserving& reserving) {
    stage({Stage::planned}, Stage::reserved, [&] {
        pool_.emplace(ground_.machine, reserving.host_budget_bytes, ground_.memory);
        arena_ = reserve_arenas(plan_, ground_.device, *teams_, *pool_, start_up_, reserving.name);
        place_patterns();
    });
}

// Attention's lists of blocks lie on the device from here on.
void TierStack::place_patterns() {
    const planner::Buffers& lists = plan_.buffers[static_cast<size_t>(planner::Class::lists)];
    if (!decoder_ || lists.count == 0) return;
    Stream& up = ground_.device.stream(StreamKind::h2d);
    std::atomic<uint64_t> done = 0;
    decoder_->place_patterns(ground_.device.memory().data() + lists.offset,
                             [&](std::byte* to, std::span<const std::byte> from) {
                                 up.copy(to, from.data(), static_cast<int64_t>(from.size()));
                             });
    up.signal(done);
    while (done.load(std::memory_order_acquire) == 0) ground_.executor.wait(kForever);
}

void TierStack::open(const Opening& opening) {
    stage({Stage::reserved}, Stage::open, [&] {
        if (!plan_.slot_classes.empty() && !opening.buffers_alone) volume_ = volume_of(opening);
        make_muon();
        kernels_.emplace(plan_, *teams_,
                         StepModel{.decoder = decoder_ ? &*decoder_ : nullptr,
                                   .ops = called_,
                                   .loader = opening.loader,
                                   .evaluation_micro_batches = opening.evaluation_micro_batches,
                                   .device = &ground_.device,
                                   .workers = opening.workers,
                                   .muon = muon_ ? &*muon_ : nullptr,
                                   .exchanges = exchanges_});
        if (opening.instead) instead_ = opening.instead(*kernels_);
        swap::Kernels& called = instead_ ? *instead_ : *kernels_;
        store_ = swap::Store::make(store_options(opening), ground_.executor, ground_.device,
                                   volume_.get(), called);
        pool_->seal();
    });
}

void TierStack::make_muon() {
    if (plan_.workspace_bytes == 0) return;
    const OptimizerConfig& optimizer = ground_.config.optimizer;
    const auto workspace = arena_.subspan(static_cast<size_t>(plan_.workspace_offset),
                                          static_cast<size_t>(plan_.workspace_bytes));
    if (plan_.room_bytes == 0) {
        muon_.emplace(optimizer, *teams_, workspace);
        return;
    }
    const auto room = [&](int64_t offset) {
        if (offset < 0) return std::span<std::byte>();
        return ground_.device.memory().subspan(static_cast<size_t>(offset),
                                               static_cast<size_t>(plan_.room_bytes));
    };
    muon_.emplace(optimizer, *teams_, ground_.device,
                  Muon::OnDevice{.host = workspace,
                                 .sent = room(plan_.sent_room_offset),
                                 .own = room(plan_.own_room_offset),
                                 .scratch_bytes = plan_.room_scratch_bytes});
}

std::unique_ptr<aio::Volume> TierStack::volume_of(const Opening& opening) const {
    aio::VolumeOptions options = volume_options(ground_.config.io, ground_.share.budgets.nvme,
                                                plan_, ground_.machine, arena_, opening.run_id);
    options.tracer = opening.tracer;
    options.lays_out_later = opening.lays_out_later;
    if (opening.resume)
        options.leftover = aio::Leftover::resume;
    else if (finds_ended(opening, options))
        options.leftover = aio::Leftover::remove_any;
    return opening.open_volume(std::move(options), ground_.executor);
}

bool TierStack::finds_ended(const Opening& opening, const aio::VolumeOptions& options) const {
    const bool may_remove = options.leftover != aio::Leftover::refuse && opening.has_ended;
    if (!may_remove || options.record_bytes == 0 ||
        aio::published_run({.path = options.paths.front().path}) != opening.run_id)
        return false;
    aio::VolumeOptions looking = options;
    looking.leftover = aio::Leftover::resume;
    try {
        return opening.has_ended(*opening.open_volume(std::move(looking), ground_.executor));
    } catch (const Error& error) {
        if (error.trouble() == Trouble::does_not_fit) throw;  // it was not looked at
        return false;  // whoever takes the volume over says what is wrong
    }
}

swap::StoreOptions TierStack::store_options(const Opening& opening) const {
    if (opening.buffers_alone) return {.host_arena = arena_};
    return {.objects = plan_.objects,
            .host_slots = plan_.host_slots,
            .resources = plan_.resources,
            .verify = plan_.verify,
            .host_arena = arena_,
            .recording = opening.recording,
            .rows = opening.rows,
            .kernel_name = [](uint8_t op) { return cost::name_of(static_cast<cost::Op>(op)); },
            .collectives = opening.collectives,
            .parallel = parallel_on(*teams_)};
}

void TierStack::warm(const swap::Schedule& step, const ScalarsByKind& scalars) {
    stage({Stage::open}, Stage::warm, [&] {
        start_up_.next();
        if (ground_.device.kind() == DeviceKind::cuda) {
            StepStates& states = kernels_->states();
            states[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
            states.before(StepStates::kMeasured).after_outcome = scalars;
            warm_up(step, bench());
            store_->drain();  // throws what went wrong
            check_device_memory(ground_.device, plan_, ground_.share.budgets.device_bytes);
        }
        start_up_.done("kernels loaded, GPU memory", plan_.device_bytes);
    });
}

void TierStack::fill(const std::function<void()>& contents) {
    stage({Stage::open, Stage::warm}, Stage::filled, [&] {
        contents();
        if (volume_) volume_->finish_layout();
        start_up_.done("layout of what is left on NVMe", plan_.nvme_bytes);
        lock_homes();
        homes_locked();
        start_up_.done("host memory, touched and page-locked behind it", plan_.host_bytes);
        // With the GPU's tables of those pages.
        if (ground_.device.kind() == DeviceKind::cuda)
            check_device_memory(ground_.device, plan_, ground_.share.budgets.device_bytes);
    });
}

void TierStack::lock_homes() {
    if (std::exchange(homes_begun_, true)) return;
    homes_ = train::lock_homes(plan_, ground_.device, *pool_, arena_);
}

void TierStack::homes_locked() {
    if (homes_.valid()) homes_.get();
}

void TierStack::close() noexcept {
    stage_ = Stage::closed;
    if (homes_.valid()) homes_.wait();
    homes_ = {};
    store_.reset();
    instead_.reset();
    kernels_.reset();
    muon_.reset();
    volume_.reset();
    arena_ = {};
    pool_.reset();
}

Bench TierStack::bench() {
    return {plan_,
            ground_.device,
            ground_.executor,
            instead_ ? *instead_ : static_cast<swap::Kernels&>(*kernels_),
            *store_,
            ops_.get(),
            decoder_ ? &*decoder_ : nullptr};
}

Reserved TierStack::reserved() const { return reserved_by(ground_.device, *pool_, volume_.get()); }

}  // namespace ferry::train
