// What ferry's own programs and tests give an engine and ask of it, and an embedder does not.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/comm.h"
#include "cost/measurements.h"
#include "ferry/train.h"
#include "model/model.h"
#include "planner/planner.h"
#include "trace/trace.h"

namespace ferry::train {

struct Saving;  // train/state/saving.h
// Takes values in order, at most a chunk of them at a time.
using ValueSink = std::function<void(std::span<const float>)>;

struct InsideOptions {
    // Gets every task from the first step on, and beside it, once the bound is known, the plan's.
    trace::Recording* recording = nullptr;
    // This machine's. With them measure_bound() measures nothing.
    const cost::Measurements* measurements = nullptr;
    // Says that measure_bound() will be called. Then what needs gigabytes to be timed is timed at
    // the start, in the memory that the state gets afterwards. Otherwise it is timed in what
    // budgets.host has left when measure_bound() is called.
    bool measures_bound = false;
    // The other ranks, met over host memory: none, or what `ferry launch`, mpirun or srun started.
    // The engine takes what a GPU needs from there. None, or of one rank: the run is this process.
    std::unique_ptr<comm::Communicator> ranks{};
};
// The same runtime with these.
inline Runtime with(Runtime runtime, InsideOptions given) {
    runtime.given = std::make_shared<InsideOptions>(std::move(given));
    return runtime;
}

// Which of the GPUs that this rank sees is its own. Ranks of one host that see the same GPUs share
// them out. Every rank asks, before it opens a device. 0 on the CPU, and for a single rank (`ranks`
// is null).
int gpu_of_rank(const Config& config, comm::Communicator* ranks, Executor& executor);

// Of an engine, which outlives it.
class Inside {
public:
    explicit Inside(Engine& engine) : run_(*engine.run_) {}

    const planner::Plan& plan() const;
    const std::vector<model::Layer>& layers() const;
    // The current fp32 master weights (or frozen weights widened) of one tensor.
    void read_tensor(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) const;
    // The last step's gradient of one tensor, as rounded to the wire type, before unscaling and
    // clipping; zeros where it is frozen. Only between step() and the next call of anything else.
    void read_gradient(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) const;
    // Runs body() on the first rank. Every rank calls it and gets the Error that body() throws, or
    // none. So a failure there does not keep the others waiting, and the run goes on.
    [[nodiscard]] std::optional<Error> on_first_rank(const std::function<void()>& body) const;
    // The error of the first rank that has one, on all of them.
    [[nodiscard]] std::optional<Error> error_of_any(const std::optional<Error>& mine) const;
    // Writes the whole state as a checkpoint of the last step. Training goes on after it with the
    // same bits as without it. What keeps it from being written comes back on the first rank.
    [[nodiscard]] std::optional<Error> save(const Saving& saving) const;
    // The same in two parts. When begin_save() returns, the state was read: it is written, or lies
    // in the memory that checkpoint.memory gives. There are two exceptions. State that lies in host
    // memory whole is read while the next step is taken (reads_meanwhile). Where some lies on NVMe,
    // the updates that finish the last step hand it over (passes_by). A thread writes the rest
    // while training goes on. `saving` must stay usable until end_save(); that thread calls its
    // `progress`.
    void begin_save(const Saving& saving) const;
    bool save_ended() const;  // true: end_save() would not wait; also where none began
    [[nodiscard]] std::optional<Error> end_save() const;

private:
    Engine::Run& run_;
};

}  // namespace ferry::train
