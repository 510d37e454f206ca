// Predicts a step: a machine's links and kernels are measured alone, and a plan's schedules are
// simulated with these measurements. Engine compares its own steps with the same; `ferry plan`
// needs neither tokens nor the memory of a run.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cost/bound.h"
#include "cost/layouts.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ops/block_lists.h"
#include "planner/recorder.h"
#include "swap/schedule.h"
#include "train/step.h"

namespace ferry::train {

// ---------------------------------------------------------------- prediction

// A link of a plan: what a step moves over it, and the seconds that takes with nothing beside it.
struct LinkPrediction {
    cost::Link link = cost::Link::compute;
    int64_t bytes = 0;
    double seconds = 0;
};

// Shares of state, and of the gradients that wait with it, on each tier.
struct StateShares {
    double device = 0, host = 0, nvme = 0;
};

// What a rank of one stage of a pipeline has and does in a step.
struct StagePrediction {
    zero::Stage stage{};
    int64_t blocks = 0;
    int64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0;
    // Sent to the next stage and the one before, of a tied table, and to ranks of its own stage.
    int64_t to_next = 0, to_previous = 0, of_table = 0, to_sharers = 0;
    double compute_seconds = 0;  // that its kernels run
    double waits = 0;            // the rest of the step, a part of it
    swap::Schedule schedule{};
    swap::Timeline timeline{};
};

struct Prediction {
    swap::Schedule schedule{};  // a step's, with steps before and after it; of stages the longest's
    swap::Timeline timeline{};  // its `step_seconds` is the prediction
    bool speculative = false;   // speculative updates that are committed; else none
    std::vector<LinkPrediction> links{};
    // The lower bound over all placements that the budgets allow, and the link that sets it.
    double bound_seconds = 0;
    cost::Link bound_link = cost::Link::compute;
    double peak_bound_seconds = 0;   // the same of kernels at the machine's peaks; 0: not known
    StateShares planned{}, bound{};  // where the plan has them, and where the bound would
    // How many of the blocks that backward visits save each activation for it.
    model::OfSaved<double> planned_saved{}, bound_saved{};
    std::vector<StagePrediction> stages{};  // of a pipeline, in their order
    const LinkPrediction& binding() const;  // the link that takes longest: the plan's own bound
};

// The part of a step that a stage of its pipeline waits, where all take as long. 0: of no pipeline.
double bubble_of(const planner::Plan& plan);

// Bytes that a schedule moves on each lane, exactly.
struct ScheduleBytes {
    std::string name{};
    std::array<int64_t, swap::kLanes> bytes{};
};
// Every schedule that a run of this plan may replay: its steps, and what ends it.
std::vector<ScheduleBytes> schedule_bytes(const planner::Plan& plan);
ScheduleBytes steady_bytes(
    const planner::Plan& plan);  // of a step without speculative updates among its like

// The step and the end of a search for the longest sequence, in tokens.
constexpr int64_t kSequenceUnit = 1024, kSequenceMost = int64_t{1} << 20;
// Refuses tokens that a run would refuse by the header of their file, so that planning reads no
// tokens. False: there is no such file yet.
bool check_token_header(const Config& config);
// The part of the causal mask that a pattern of attention leaves.
struct PatternShare {
    std::string name{};
    int64_t block = 0;                // tokens
    int64_t layers = 0, layouts = 0;  // that have it; of a layer, by which its heads differ
    double pairs = 1;                 // the part of the causal mask's pairs that those layers see
    double blocks = 1;                // the same of blocks
    std::shared_ptr<const ops::BlockLists> lists{};  // the first of these layers'
};
std::optional<PatternShare> pattern_share(const Config& config);
// What cost::best_layouts() asks of the model and a step's batch.
cost::ModelSizes model_sizes(const Config& config);
// Refuses reserved cores that a run on this machine would refuse.
void check_reserved_cores(const Config& config);

// The ranks of a run: how many there are, and how many of them share a host.
struct RankCount {
    int ranks = 1, on_a_host = 1;
    int gpu = 0;  // the GPU of its host that this rank opens
};

// A device of another machine, as that one's measurements describe it. 0: not known.
struct AbsentDevice {
    std::string architecture{};  // "cuda sm_90"
    int64_t memory_bytes = 0;    // that a process can have of it, all told
    planner::DeviceNeeds needs{};
    int threads = 1;            // threads of the team beside it
    cost::KernelsOf kernels{};  // times of the model there; none: not known
};

// Plans one model on one device again and again, with other budgets, and says what a step would
// take: with several ranks each of them. Touches neither tokens nor disks.
class Predictor {
public:
    // Opens the device, and reserves nothing on it. Throws Error.
    static std::unique_ptr<Predictor> make(const Config& config, const RankCount& count = {});
    // For a device that is not here: nothing is opened, and measure() throws usage. What the
    // kernels' scratch is not known to be is taken to be as much as the CPU's need.
    static std::unique_ptr<Predictor> make(const Config& config, const RankCount& count,
                                           const AbsentDevice& device);
    ~Predictor();
    Predictor(const Predictor&) = delete;
    Predictor& operator=(const Predictor&) = delete;

    // `known`: measurements of the machine, as far as there are any. Later plans are weighed with
    // them, earlier ones were with the defaults.
    void plan_by(const cost::Measurements& known);
    // `request`: of all ranks, as request_of() of the run's configuration or with other budgets,
    // knobs, state and micro-batches. Throws does_not_fit.
    planner::Plan plan(const planner::PlanRequest& request) const;
    // The same of a rank of each stage, in their order, all in the same chunks; plan() gives the
    // first.
    std::vector<planner::Plan> plans(const planner::PlanRequest& request) const;
    const std::vector<model::Layer>& layers() const;  // of the whole model
    // Everything but storage, on device memory and staging memory as large as the plan's buffers.
    // Memory: as a run of this plan meets it, in the caches where all of its state fits into them,
    // or as a large model does. Once; blocks for seconds. Throws Error.
    enum class Memory : uint8_t { of_plan, of_machine };
    cost::Measurements measure(const planner::Plan& plan, Memory memory);
    Prediction predict(const planner::PlanRequest& request, const planner::Plan& plan,
                       const cost::Measurements& measured,
                       Exchanged what = Exchanged::gradients) const;
    // Whether a step of this plan can be predicted by these times.
    bool covers(const planner::Plan& plan, const cost::KernelTimes& times) const;
    // The things that the kernels' times depend on.
    cost::KernelsOf kernels_of() const;
    std::string device_text() const;
    // Device memory that this process can have, and what it needs beside its buffers.
    int64_t device_bytes() const;
    planner::DeviceNeeds needs() const;
    bool is_here() const;
    RankCount count() const;
    ParallelConfig groups() const;
    int ranks_per_host() const;  // that exchange among themselves first; 1: none do
    // By arithmetic, where nobody has measured: the operations of the products at the default
    // rate, everything else by its bytes. Links as the defaults, too.
    cost::Measurements assumed(const planner::Plan& plan) const;
    // The same of the kernels alone, at the rate of what is known: its assumed_flops_per_s.
    cost::Measurements with_assumed_kernels(cost::Measurements known,
                                            const planner::Plan& plan) const;
    int threads() const;
    // The longest batch.sequence, in multiples of kSequenceUnit, whose plan fits the budgets with
    // all else as it is, and that the model and its attention take. They must take the
    // configuration's own. 0: none does; kSequenceMost: or longer. Throws what plan() throws, but
    // for does_not_fit.
    int64_t longest_sequence() const;

private:
    struct ModelOnDevice;
    explicit Predictor(std::unique_ptr<ModelOnDevice> model);
    enum class Length : uint8_t { too_short, fits, too_long };
    Length length_of(int64_t sequence) const;
    // With the kernels of all stages, of a plan of one of them.
    planner::Plan with_all_layers(const planner::Plan& plan) const;
    Prediction predict_one(const planner::PlanRequest& request, const planner::Plan& plan,
                           const cost::Measurements& measured, Exchanged what) const;
    Prediction predict_pipeline(const planner::PlanRequest& request,
                                const cost::Measurements& measured) const;

    const std::unique_ptr<ModelOnDevice> model_;
    std::optional<cost::Measurements> known_{};
};

}  // namespace ferry::train
