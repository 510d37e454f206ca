// The engine: a configuration becomes a plan, the plan becomes memory, files and schedules, and
// each step replays one of them.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/aio.h"
#include "ferry/config.h"
#include "ferry/dtype.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "ferry/pinned_mem.h"

namespace ferry::train {

struct StepReport {
    int64_t step = 0;  // from 1
    double loss = 0;   // mean over the step's real targets, natural logarithm
    double gradient_norm = 0, clip_factor = 1, lr = 0, loss_scale = 1;
    int64_t targets = 0, tokens = 0;
    // The step had no real target, its gradient was not finite with on_nonfinite: skip, or fp16
    // overflowed.
    bool skipped = false;
    bool speculative = false, committed = false;
    double seconds = 0;
};

struct Evaluation {
    double loss = 0;  // mean over the real targets, natural logarithm; NaN where there is none
    int64_t targets = 0;
    double perplexity() const { return std::exp(loss); }
};

struct LinkReport {
    std::string_view lane{};  // a row of --trace: "compute", "h2d", ...
    int64_t bytes = 0;
    double busy_seconds = 0;
    double exposed_seconds = 0;  // seconds of these in which nothing computed
};

// What a rank sent to the others by one kind of collective. `raw_bytes` is what it would have sent
// without codes.
struct CollectiveReport {
    std::string collective{};
    int64_t calls = 0, raw_bytes = 0, sent_bytes = 0;
};

// The memory and storage that a run really took; its plan says what it should take.
struct Reserved {
    int64_t device_bytes = 0;           // the arena
    int64_t device_overhead_bytes = 0;  // what the process holds on the GPU beside it, as measured
    int64_t host_bytes = 0;             // the pool's slabs
    int64_t nvme_bytes = 0;             // the volume's slots and records
    int64_t nvme_peak_bytes = 0;        // the most of them that was ever in use
};

struct RunReport {
    int64_t steps = 0, tokens = 0;
    double seconds = 0;  // in steps, evaluation left out
    // The model's operations in a step, without recomputation, and the best rate of a product. 0:
    // not known. A step's MFU is model_flops / seconds of the step / gemm_flops_per_s.
    double model_flops = 0, gemm_flops_per_s = 0;
    int64_t steps_committed = 0, steps_rolled_back = 0, clipped_steps = 0, skipped_steps = 0;
    // Compute, h2d, d2h, team, check, read, write and, of several ranks, comm.
    std::vector<LinkReport> links{};
    std::vector<CollectiveReport> collectives{};  // of several ranks
    std::vector<aio::PathCounters> paths{};
    Reserved reserved{};
    // Lower bound of a step. 0: it was not measured, or some steps exchange momentum in place of
    // gradients.
    double bound_seconds = 0;
    std::string binding{};  // the link that sets it
    // The same of kernels that multiply and move at the machine's peaks; 0: not measured.
    double peak_bound_seconds = 0;
    // A step's predicted seconds, by its schedule and by what is measured with the bound. The first
    // makes no speculative updates. The second makes them and they are committed (0: there are
    // none).
    double predicted_seconds = 0, predicted_speculative_seconds = 0;
    // The two before are of steps that exchange gradients. 1-bit and 0/1 Adam also have steps that
    // exchange momentum, and local ones: how many there were, and the predicted seconds of each
    // kind. 0: there are none.
    int64_t momentum_steps = 0, local_steps = 0;
    double predicted_momentum_seconds = 0, predicted_local_seconds = 0;
    // A file of the durable state that was removed while the run used it. Nothing of that state
    // outlives the process then.
    std::string removed{};
};

// A call of NCCL or MPI may never return. The process then ends, with exit code 6 and a text on
// standard error. With `instead` the process goes on: it is called once for each such call, on a
// thread of ferry's, and the library's call stays where it is. Empty: the process ends again. This
// is set for the whole process.
void on_stuck(std::function<void(const Error&)> instead);

// The ranks of a runtime that has no MPI. It gives all ranks the same unique id (ncclGetUniqueId)
// by means of its own.
struct NcclRanks {
    std::array<std::byte, 128> unique_id{};
    int rank = 0, size = 1;
};

// A Hugging Face directory to begin from (docs/checkpoints.md). It may hold files of the
// optimizer's state beside its weights. What is not there begins as in a new run.
struct Imported {
    std::string directory{};  // empty: nothing is imported
    int64_t step = 0;         // the last one done
    int64_t updates = 0;      // how often its weights were updated: not in skipped steps
    // How many of them its moments have seen (docs/numerics.md); 0 where it has no moments.
    int64_t moment_updates = 0;
    // fp16's loss scale, and the good steps in a row since it changed. 0: as in a new run.
    double loss_scale = 0;
    int64_t good_steps = 0;
};

// The program writes its own batch here, of all ranks: [sequences, batch.sequence] each. A step has
// batch.micro_batches x batch.micro_batch sequences. An evaluation has evaluate.micro_batches x
// batch.micro_batch. Targets are the tokens to be predicted, as a rule the next ones. A target of
// -1 does not count.
struct FedBatch {
    int64_t step = 0;  // from 1; 0: of an evaluation
    std::span<int32_t> tokens{}, targets{};
};
// step() and evaluate() call this first, on the thread that calls them. What it throws comes out of
// that call; a token that the model does not know throws usage there. The engine is then as it was,
// and asks again in the next call. Each of several ranks is asked and must give the same. All of
// them end where one fails.
using LoadBatch = std::function<void(const FedBatch&)>;

// Hears how a start-up or a checkpoint gets on: so many bytes of so many. It is called at most ten
// times a second and at the end of each stage, on any thread, one call at a time. It must not call
// the engine and must not throw.
using Progress = std::function<void(const char* stage, int64_t bytes, int64_t of)>;

// For ferry's own programs: what else they give an engine and ask of it. src/train/inside.h, which
// is not installed, defines both.
struct InsideOptions;
class Inside;

// What the engine stands on, and where its state comes from. Tests pass a simulated executor and
// volume. Unless `nccl` or `given` names ranks, the run is this process alone.
struct Runtime {
    Executor* executor = nullptr;
    std::function<std::unique_ptr<aio::Volume>(aio::VolumeOptions, Executor&)> open_volume =
        &aio::Volume::open;
    // The ranks of a runtime that has no MPI, on CUDA devices. It must set `gpu` as well, and
    // nothing in its process may have used CUDA before. A lost rank is noticed after
    // zero.timeout_seconds, and errors cannot name it.
    std::optional<NcclRanks> nccl{};
    // Which of the GPUs that this process sees it uses. None: ranks of one host share them out.
    std::optional<int> gpu{};
    // Goes on after the last step that a run of this configuration made durable, with its bits.
    // Throws usage or io where that cannot be proved.
    bool resume = false;
    // Goes on after the step of this checkpoint (DIR/step-00000100), with its bits. The run that
    // wrote it may have had another placement, other ranks and another device. All of it is read
    // and checked first. Throws usage where it is another run's, and io where it is damaged.
    std::string checkpoint{};
    // Begins after a step of another program, or of a run with other settings. For one rank.
    Imported imported{};
    // Where it is given, batches come from here and data.tokens is not looked at. Then
    // data.isolate_documents and only_evaluates are refused. When a run goes on from a checkpoint,
    // the program decides what it is fed with.
    LoadBatch load_batch{};
    Progress progress{};
    // Gives host memory for state, staging and checkpoints on their way. None: the system does.
    pinned_mem::Allocator memory{};
    // Trains nothing: evaluates on the whole token file, with no state but the weights.
    bool only_evaluates = false;
    std::shared_ptr<InsideOptions> given{};
};

class Engine {
public:
    // Plans, reserves everything, and initialises the state over the tiers. Throws Error. Each of
    // several ranks must make the same calls of everything below, and gets the same answers. Where
    // one fails, the others throw rank_lost.
    static std::unique_ptr<Engine> make(const Config& config, Runtime runtime);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    // Whether any rank says so.
    bool any(bool mine);
    // Tells the other ranks that this one ends by an error of the caller's, between two calls of
    // the engine. The engine tells them of its own errors. Never throws, never waits long.
    void abandon(const char* why) noexcept;

    // Throws diverged when loss or gradient is not finite and the configuration does not skip, or
    // when fp16 overflows in the forward pass or too often.
    StepReport step();
    // The number of the last step; at first 0, or of the last one that the resumed run has durable.
    int64_t last_step() const;
    // The report of that step by the run that was resumed: it may have been killed before its line
    // was read. Null: nothing was resumed, or no step of it.
    const StepReport* resumed_step() const;
    // Mean loss over the held-back micro-batches the configuration asks for. Training goes on after
    // it with the same bits as without it. Throws diverged, naming the layer, when it is not
    // finite.
    Evaluation evaluate() { return evaluate({}); }
    // The same. `logits` gets those of the first tokens that this rank's evaluation looks at, in
    // the order of the text: [tokens, vocab], as many as there is room for.
    Evaluation evaluate(std::span<float> logits);
    // XXH3 over all master weights, moments and compute weights after the last update, in the
    // model's order, shard by shard. No placement and no ZeRO stage changes it.
    uint64_t state_hash();
    // Measures the kernels and links of this plan alone, between steps, unless measurements were
    // given; the run's report then has the bound. The lower one where it is measured again: a busy
    // machine makes it look high.
    void measure_bound();

    // The numerics record (docs/numerics.md) as text, with its hash. Runs with the same record,
    // seed, tokens and constants of optimizer and schedule print the same losses.
    std::string numerics_record() const;
    RunReport report();  // finishes the last step, then reports on all so far

private:
    friend class Inside;
    class Run;
    explicit Engine(std::unique_ptr<Run> run);
    const std::unique_ptr<Run> run_;
};

// Writes DIRECTORY/step-N; `program` is the version that writes it. The directory is made where
// there is none, and is this call's alone while it lasts. Every rank calls it, and the first one
// writes, into its directory. What keeps the checkpoint from being written comes back, on all of
// them: usage where the directory is another run's or takes nothing. The engine goes on.
[[nodiscard]] std::optional<Error> save_checkpoint(Engine& engine, const std::string& directory,
                                                   const std::string& program);

}  // namespace ferry::train
