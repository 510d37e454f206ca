// Predicts a step: a machine's links and kernels are measured alone, and a plan's schedules are
// simulated with these measurements. Engine compares its own steps with the same; `ferry plan`
// needs neither tokens nor the memory of a run.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cost/kernel_times.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "model/model.h"
#include "planner/planner.h"
#include "planner/request.h"
#include "prediction.h"
#include "schedule_choice.h"
#include "train/measuring/planned_device.h"
#include "train/setup/rank_share.h"
#include "train/step/step.h"
#include "zero/zero.h"

namespace ferry::train {

struct ModelOnDevice;
class TierStack;

// The step and the end of a search for the longest sequence, in tokens.
constexpr int64_t kSequenceUnit = 1024, kSequenceMost = int64_t{1} << 20;

// Plans one model on one device again and again, with other budgets, and predicts the step of each
// plan. With several ranks it does so for each of them. It touches neither tokens nor disks.
class Predictor {
public:
    // Opens the device, and reserves nothing on it. Throws Error. Where ferry is to choose the
    // schedule, plan() or schedules() does so when it is first called. With many stages that takes
    // seconds.
    static std::unique_ptr<Predictor> make(const Config& config, const RankCount& count = {});
    // For a device that is not here. Nothing is opened, and measure() throws usage. Where the
    // kernels' scratch is not known, it is taken to be as large as the CPU's.
    static std::unique_ptr<Predictor> make(const Config& config, const RankCount& count,
                                           const AbsentDevice& device);
    ~Predictor();
    Predictor(const Predictor&) = delete;
    Predictor& operator=(const Predictor&) = delete;

    // `known`: measurements of the machine, as far as there are any. Later plans are weighed with
    // them; earlier ones were weighed with the defaults. Where ferry chooses the schedule, it
    // chooses anew.
    void plan_by(const cost::Measurements& known);
    // The same by measurements of one rank, for the schedule alone; longest_sequence() goes by
    // them, too, until plan_by() is called again.
    void choose_schedule(const cost::Measurements& of_a_rank);
    // One rank's, by which plans are weighed.
    cost::Measurements planned_by() const;
    // How the schedule of a pipeline was chosen, for the budgets of the configuration. It has no
    // offers where there was no choice. Valid until it is chosen anew.
    const ScheduleChoice& schedules() const { return chosen().choice; }
    // Whether there is a choice.
    bool chooses() const;
    // `request`: of all ranks, as request_of() of the run's configuration or with other budgets,
    // knobs, state and micro-batches. Throws does_not_fit.
    planner::Plan plan(const planner::PlanRequest& request) const;
    // The plan of a rank of each stage, in their order, all in the same chunks. plan() gives the
    // first one.
    std::vector<planner::Plan> plans(const planner::PlanRequest& request) const;
    const std::vector<model::Layer>& layers() const;  // of the whole model
    // Measures everything but storage, on device memory and staging memory as large as the plan's
    // buffers. Memory is measured as a run of this plan meets it, in the caches where all of its
    // state fits into them, or as a large model meets it. On processors all ranks of this machine
    // run at once, by threads with buffers of their own, and the slowest one counts. Fewer run
    // (measured_at_once()) where half of this machine's memory does not hold so many, or they would
    // take more than a few turns on its cores. To be called once. Blocks for seconds. Throws Error.
    enum class Memory : uint8_t { of_plan, of_machine };
    cost::Measurements measure(const planner::Plan& plan, Memory memory);
    // Steps of that kind one after another. Local steps have no bound, and no shares of state.
    Prediction predict(const planner::PlanRequest& request, const planner::Plan& plan,
                       const cost::Measurements& measured,
                       Exchanged what = Exchanged::gradients) const;
    // Whether a step of this plan can be predicted by these times.
    bool covers(const planner::Plan& plan, const cost::KernelTimes& times) const;
    // And of the schedules that were chosen from.
    bool covers_choice(const planner::Plan& plan, const cost::KernelTimes& times) const;
    // What is known before a schedule is chosen. The first: whether times cover every plan that the
    // configuration can get. The second throws does_not_fit, as measure() would, where this machine
    // lacks the memory that measure() takes. Neither complains where no plan fits the budgets.
    bool covers_all(const cost::KernelTimes& times) const;
    void require_memory_to_measure() const;
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
    // Ranks that compute on this machine's processors at the same time; beside a GPU 1.
    int at_once() const;
    int measured_at_once() const { return measured_at_once_; }  // as many as measure() ran
    // What kept measure() from running all: half of this machine's memory, or turns on its cores.
    enum class Short : uint8_t { of_nothing, of_memory, of_cores };
    Short short_at_once() const { return short_at_once_; }
    // Measurements by arithmetic, where nobody has measured. Products take their operations at the
    // default rate, everything else its bytes. Links have the defaults, too.
    cost::Measurements assumed(const planner::Plan& plan) const;
    // The same of the kernels alone, at the rate of what is known: its assumed_flops_per_s.
    cost::Measurements with_assumed_kernels(cost::Measurements known,
                                            const planner::Plan& plan) const;
    int threads() const;
    int cores() const;  // of this machine, which those ranks share
    // The longest batch.sequence, in multiples of kSequenceUnit, whose plan fits the budgets with
    // all else as it is, and that the model and its attention take. They must take the
    // configuration's own. 0: none fits. kSequenceMost: that one fits, and longer ones were not
    // tried. Throws what plan() throws, except does_not_fit.
    int64_t longest_sequence() const;

private:
    explicit Predictor(std::unique_ptr<ModelOnDevice> model);
    enum class Length : uint8_t { too_short, fits, too_long };
    Length length_of(int64_t sequence) const;
    // The choice, and the stages in its order; those of the configuration where there is none.
    struct Chosen {
        ScheduleChoice choice{};
        std::vector<zero::Stage> stages{};
    };
    const Chosen& chosen() const;
    std::vector<PlannedSchedule> planned_schedules() const;
    // The first stage's, of all that fit.
    std::vector<planner::Plan> plans_of_all() const;
    // What measure() reserves for a plan: its buffers alone.
    planner::Plan buffers_of(const planner::Plan& plan) const;
    std::vector<planner::Plan> plans_in(std::span<const zero::Stage> stages,
                                        const planner::PlanRequest& request) const;
    std::vector<zero::Stage> stages_in(const StageOrder& order) const;
    // The first stage's plans, of what fits and was not chosen.
    std::vector<planner::Plan> plans_not_chosen() const;
    // With the kernels of all stages, of a plan of one of them.
    planner::Plan with_all_layers(const planner::Plan& plan) const;
    Prediction predict_one(const planner::PlanRequest& request, const planner::Plan& plan,
                           const cost::Measurements& measured, Exchanged what) const;
    Prediction predict_pipeline(const planner::PlanRequest& request,
                                const cost::Measurements& measured) const;
    // `shown`: the stage whose links are shown; none: the one that computes longest.
    Prediction predict_together(const planner::PlanRequest& request,
                                const std::vector<planner::Plan>& plans,
                                const cost::Measurements& measured,
                                std::optional<size_t> shown = std::nullopt) const;

    const std::unique_ptr<ModelOnDevice> model_;
    std::optional<cost::Measurements> known_{};
    std::optional<cost::Measurements> chosen_by_{};  // where not by planned_by()
    mutable std::optional<Chosen> chosen_{};
    int measured_at_once_ = 1;
    Short short_at_once_ = Short::of_nothing;
};

}  // namespace ferry::train
