// The inside of an engine, for its sources: engine.cc (what others call), engine_steps.cc,
// engine_saves.cc, engine_measures.cc.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cost/measurements.h"
#include "ferry/train.h"
#include "outcome.h"
#include "readable_run.h"
#include "run_report.h"
#include "train/inside.h"
#include "train/kernels/step_kernels.h"
#include "train/loss_scale.h"
#include "train/measuring/measure.h"
#include "train/saving/background_save.h"
#include "train/saving/durable.h"
#include "train/saving/save.h"

namespace ferry::train {

// Takes the steps of a run that has been started.
class Engine::Run : private ReadableRun {
public:
    Run(const Config& config, const Runtime& runtime, std::shared_ptr<ComputeContext> context);
    ~Run();
    StepReport step();

    int64_t last_step() const { return now_.step; }
    const StepReport* resumed_step() const { return resumed_.step > 0 ? &resumed_ : nullptr; }
    Evaluation evaluate(std::span<float> logits);
    void begin_save(const Saving& saving);

    bool save_ended() const { return !checkpoint_.save || checkpoint_.save->ended(); }
    std::optional<Error> end_save();
    uint64_t state_hash();
    void read_tensor(int64_t layer, const model::Tensor& tensor, const ValueSink& sink);
    void read_gradient(int64_t layer, const model::Tensor& tensor, const ValueSink& sink);
    bool any(bool mine);
    std::optional<Error> error_of_any(const std::optional<Error>& mine);
    std::optional<Error> on_first_rank(const std::function<void()>& body);
    void measure_bound();
    void abandon(const char* why) noexcept { setup_.context->abandon(why); }

    using ReadableRun::plan;
    const std::vector<model::Layer>& layers() const { return setup_.layers; }
    const std::string& numerics_record() const { return numerics_.text; }
    RunReport report();

private:
    // The others hear at once what ends this rank. Its files tell who finds them what storage lost.
    template <class Work>
    std::invoke_result_t<Work> guarded(const Work& work) {
        try {
            return work();
        } catch (const std::exception& error) {
            setup_.context->abandon(error.what());
            if (volume() && is_of_storage(error)) volume()->note_lost();
            throw_again_at({now_.step, last_good_, volume() != nullptr, plan().durable,
                            store().what_was_wrong()});
        }
    }
    void load(int64_t step);
    void measure_anew();
    RunReport so_far();
    StepReport next_step();
    bool some_rank_asks(bool mine);
    Evaluation held_back(std::span<float> logits);
    void drop_save(const char* why) noexcept;
    void finish_save_of_ranks();
    bool updates_all() const;
    bool can_pass() const;
    bool begin_passing(const Saving& saving);
    std::function<void(int64_t, int64_t)> told_progress();
    Unwritten unwritten(const Saving& saving) const;

    void measure();
    UpdateRates update_rates(const optim::Scalars& scalars, Together& together);
    void predict(const cost::Measurements& alone);
    cost::Measurements with_rate(cost::Measurements measured) const;
    cost::Measurements with_kernels_of_all(cost::Measurements measured);
    PredictedSeconds seconds_of_pipeline(const cost::Measurements& measured);
    void change_over(Exchanged what);
    const swap::Schedule& next_schedule(bool speculative) const;
    void replay(StepReport& report);
    void await_durable();
    void await_reading();
    bool hands_over() const;
    Team* copiers_or_none();
    void skip_or_stop(StepReport& report, const Outcome& outcome);
    void go_on();
    RunState run_state() const;
    void note_committed();
    void look_for_files();
    void drain();
    void finish_last_step();
    void note(const StepReport& report);

    StepKernels& kernels() { return stack_->kernels(); }

    const int exceptions_ = std::uncaught_exceptions();
    // The last schedule, of a step or behind one.
    struct Replayed {
        int64_t sequence = 0;
        Previous previous = Previous::none;          // what it has left to the next
        Exchanged exchanged = Exchanged::gradients;  // between ranks, in the last step
    };
    // What outlives the process.
    struct Published {
        int64_t step = -1;
        std::span<const std::byte> record{};  // of the last step, which may be still to come
        std::string removed{};                // a file of it that was removed under the run
    };
    struct OnItsWay {
        std::optional<Team> copiers{};           // of its state, while a step is taken
        std::function<void(double)> waited{};    // what Saving gave
        std::unique_ptr<BackgroundSave> save{};  // reads the plan, the room, the teams' threads
    };

    StepReport resumed_{};   // that of the step after which the run was resumed
    int64_t last_good_ = 0;  // the last step that was committed
    LossScale loss_scale_;
    Replayed replayed_{};
    Published published_{};
    Timelines planned_{};  // once the bound is known
    RunReport totals_{};
    OnItsWay checkpoint_{};
};

}  // namespace ferry::train
