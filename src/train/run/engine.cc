#include "ferry/train.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "comm/comm.h"
#include "engine_impl.h"
#include "train/inside.h"
#include "train/rank_agreement.h"
#include "train/state/state_io.h"

namespace ferry::train {

using planner::Plan;

Engine::Run::Run(const Config& config, const Runtime& runtime,
                 std::shared_ptr<ComputeContext> context)
    : ReadableRun(config, runtime, std::move(context)), loss_scale_(setup_.scales_loss()) {
    go_on();
    note_committed();
    drain();
    totals_ = {};
    measure_anew();
}

Engine::Run::~Run() {
    // An error of the caller's, who has not said which: the others would wait for this rank.
    if (std::uncaught_exceptions() > exceptions_)
        setup_.context->abandon("raised between its steps");
}

StepReport Engine::Run::step() {
    load(now_.step + 1);
    return guarded([this] { return next_step(); });
}

Evaluation Engine::Run::evaluate(std::span<float> logits) {
    load(0);
    return guarded([&] { return held_back(logits); });
}

uint64_t Engine::Run::state_hash() {
    return guarded([this] {
        drain();
        uint64_t mine = state_->hash();
        if (has_errors(now_.moment_updates)) mine = momentum_->hash(mine);
        if (!setup_.ranks) return mine;
        const std::vector<uint64_t> all =
            gather(*setup_.ranks, setup_.executor, mine, "state hash");
        return checksum(std::as_bytes(std::span(all)));
    });
}

void Engine::Run::read_tensor(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) {
    guarded([&] {
        drain();
        read(layer, tensor, sink, [&](const zero::Run& run, const ValueSink& to) {
            state_->read(layer, run.first, run.count, to);
        });
    });
}

void Engine::Run::read_gradient(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) {
    guarded([&] {
        await_reading();
        store().drain();
        read(layer, tensor, sink, [&](const zero::Run& run, const ValueSink& to) {
            state_->read_gradient(layer, run.first, run.count, to);
        });
    });
}

bool Engine::Run::any(bool mine) {
    if (!setup_.ranks) return mine;
    return guarded([&] {
        const auto all =
            gather(*setup_.ranks, setup_.executor, static_cast<uint8_t>(mine), "wishes");
        return std::ranges::any_of(all, [](uint8_t wish) { return wish != 0; });
    });
}

std::optional<Error> Engine::Run::error_of_any(const std::optional<Error>& mine) {
    if (!setup_.ranks) return mine;
    return guarded([&] { return train::error_of_any(*setup_.ranks, setup_.executor, mine); });
}

std::optional<Error> Engine::Run::on_first_rank(const std::function<void()>& body) {
    std::optional<Error> mine;
    try {
        if (setup_.world.rank == 0) body();
    } catch (const Error& error) {
        mine = error;
    } catch (const std::exception& error) {
        setup_.context->abandon(error.what());
        throw;
    }
    return error_of_any(mine);
}

void Engine::Run::measure_bound() {
    guarded([this] { measure(); });
}

RunReport Engine::Run::report() {
    return guarded([this] { return so_far(); });
}

// Before a step or, with 0, an evaluation begins: what a program's batches run into leaves one
// rank as it was. Of several the others could not go on.
void Engine::Run::load(int64_t step) {
    try {
        setup_.loader->load(step);
    } catch (const std::exception& error) {
        setup_.context->abandon(error.what());
        throw;
    } catch (...) {
        setup_.context->abandon("its program's batch failed");
        throw;
    }
    if (!setup_.ranks || setup_.loader->info().count > 0) return;
    guarded([&] {
        require_same_batch(*setup_.ranks, setup_.executor, step, setup_.loader->loaded_sum());
    });
}

Engine::Engine(std::unique_ptr<Run> run) : run_(std::move(run)) {}

Engine::~Engine() = default;

std::unique_ptr<Engine> Engine::make(const Config& config, Runtime runtime) {
    const auto context = std::make_shared<ComputeContext>();
    try {
        context->open(config, runtime);
        return std::unique_ptr<Engine>(new Engine(std::make_unique<Run>(config, runtime, context)));
    } catch (const std::exception& error) {
        context->abandon(error.what());
        throw;
    }
}

void on_stuck(std::function<void(const Error&)> instead) { comm::on_stuck(std::move(instead)); }

bool Engine::any(bool mine) { return run_->any(mine); }
void Engine::abandon(const char* why) noexcept { run_->abandon(why); }
StepReport Engine::step() { return run_->step(); }
int64_t Engine::last_step() const { return run_->last_step(); }
const StepReport* Engine::resumed_step() const { return run_->resumed_step(); }
Evaluation Engine::evaluate(std::span<float> logits) { return run_->evaluate(logits); }
uint64_t Engine::state_hash() { return run_->state_hash(); }
void Engine::measure_bound() { run_->measure_bound(); }
std::string Engine::numerics_record() const { return run_->numerics_record(); }
RunReport Engine::report() { return run_->report(); }

const Plan& Inside::plan() const { return run_.plan(); }
const std::vector<model::Layer>& Inside::layers() const { return run_.layers(); }
void Inside::read_tensor(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) const {
    run_.read_tensor(layer, tensor, sink);
}
void Inside::read_gradient(int64_t layer, const model::Tensor& tensor,
                           const ValueSink& sink) const {
    run_.read_gradient(layer, tensor, sink);
}
std::optional<Error> Inside::save(const Saving& saving) const {
    run_.begin_save(saving);
    return run_.end_save();
}
std::optional<Error> Inside::on_first_rank(const std::function<void()>& body) const {
    return run_.on_first_rank(body);
}
std::optional<Error> Inside::error_of_any(const std::optional<Error>& mine) const {
    return run_.error_of_any(mine);
}
void Inside::begin_save(const Saving& saving) const { run_.begin_save(saving); }
bool Inside::save_ended() const { return run_.save_ended(); }
std::optional<Error> Inside::end_save() const { return run_.end_save(); }

}  // namespace ferry::train
