// The checkpoints that a run of `ferry train` writes: beside its steps where there is memory for
// what is not written yet, and without those that are no longer wanted.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/steps.h"
#include "ferry/config.h"
#include "ferry/executor.h"
#include "ferry/train.h"
#include "resume.h"
#include "tools/output/copy_progress.h"

namespace ferry::tools {

// Every rank has one, made before its engine is and ended after it.
class RunSaves {
public:
    RunSaves(const Config& config, const Executor& executor, bool json)
        : config_(config), executor_(executor), json_(json) {}

    // The first rank's directory of them, which the others have not. Throws usage.
    void claim(const ResumeFrom& from) { checkpoints_ = claim_checkpoints(config_, from); }
    // From now on the run has this engine, and a checkpoint of that step. The first rank speaks.
    void begin_run(train::Engine& engine, int64_t saved, bool speaks);
    void make_way(const ResumeFrom& from);

    // On all ranks alike, by the first one's clock.
    bool is_due(int64_t step) const;
    // Training goes on with what comes after, where there is memory for what is not written yet.
    // `held_back_loss`: of that step, where it is known.
    void begin(int64_t step, std::optional<double> held_back_loss);
    void end();             // waits for the one that is on its way
    void end_if_written();  // does not wait
    // Until those that are no longer wanted are gone.
    void end_removal();

    int64_t saved() const { return saved_; }  // the last step that a checkpoint was tried of
    // Why the last one was not written.
    const std::optional<Error>& unsaved() const { return unsaved_; }

private:
    // A checkpoint on its way.
    struct Save {
        Save(int64_t of_step, const Executor& executor)
            : step(of_step), progress("checkpoint of step " + std::to_string(of_step), executor) {}
        const int64_t step;
        CopyProgress progress;
        std::atomic<int64_t> bytes = 0;
        std::atomic<double> written_seconds = 0;  // when the last of them was
        std::atomic<bool> alone = true;           // the run waits for it
        double started_seconds = 0, begun_seconds = 0, waited_seconds = 0;
    };

    void say_saved(const Save& save);
    void retain() const;

    const Config& config_;
    const Executor& executor_;
    const bool json_;
    bool speaks_ = false;
    train::Engine* engine_ = nullptr;
    std::unique_ptr<checkpoint::Steps> checkpoints_{};
    std::optional<Save> save_{};  // the engine's thread writes it
    std::future<void> removal_{};
    int64_t saved_ = 0;
    Nanos saved_at_ = 0;
    std::optional<Error> unsaved_{};
};

}  // namespace ferry::tools
