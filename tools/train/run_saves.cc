#include "run_saves.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/log.h"
#include "base/text.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "train/inside.h"
#include "train/setup/from_config.h"
#include "train/state/saving.h"

namespace ferry::tools {

void RunSaves::begin_run(train::Engine& engine, int64_t saved, bool speaks) {
    engine_ = &engine;
    saved_ = saved;
    speaks_ = speaks;
    saved_at_ = executor_.now();
}

void RunSaves::make_way(const ResumeFrom& from) {
    if (checkpoints_) tools::make_way(*checkpoints_, from);
}

bool RunSaves::is_due(int64_t step) const {
    const Period& every = config_.checkpoint.every;
    if (every.steps > 0) return train::saves_behind(config_, step);
    if (every.seconds == 0) return false;
    const double since = static_cast<double>(executor_.now() - saved_at_) * 1e-9;
    return engine_->any(speaks_ && since >= every.seconds);
}

void RunSaves::begin(int64_t step, std::optional<double> held_back_loss) {
    if (config_.checkpoint.dir.empty()) return;
    end();  // the one before ends first
    save_.emplace(step, executor_);
    Save& save = *save_;
    end_removal();
    save.waited_seconds = save.progress.seconds();
    train::Inside(*engine_).begin_save(
        {.directory = checkpoints_.get(),
         .held_back_loss = held_back_loss,
         .progress =
             [&save](int64_t written, int64_t of) {
                 save.bytes = written;
                 save.written_seconds = save.progress.seconds();
                 if (save.alone) save.progress.at(written, of);
             },
         .started = [&save] { save.started_seconds = save.progress.seconds(); },
         .begun = [&save] { save.begun_seconds = save.progress.seconds(); },
         .waited = [&save](double seconds) { save.waited_seconds += seconds; },
         .program = FERRY_VERSION});
    save.waited_seconds += save.progress.seconds() - save.begun_seconds;
    save.alone = false;
    saved_ = step;
    saved_at_ = executor_.now();
    if (config_.checkpoint.memory_bytes == 0) end();
}

void RunSaves::end() {
    if (!save_) return;
    Save& save = *save_;
    const double before = save.progress.seconds();
    save.alone = true;
    const double waited = save.waited_seconds;
    unsaved_ = train::Inside(*engine_).end_save();
    save.waited_seconds = waited + save.progress.seconds() - before;
    if (speaks_ && !unsaved_) say_saved(save);
    save_.reset();
    if (!speaks_ || !unsaved_) return;
    if (config_.checkpoint.on_failure == UnsavedRun::stop) throw Error(*unsaved_);
    log_warn(std::string(unsaved_->what()) + "; the run goes on (checkpoint.on_failure)");
}

void RunSaves::end_if_written() {
    if (save_ && train::Inside(*engine_).save_ended()) end();
}

void RunSaves::say_saved(const Save& save) {
    const std::string path =
        std::filesystem::path(config_.checkpoint.dir) / checkpoint::name_of_step(save.step);
    // The thread that trains looks for its end between steps alone.
    const double seconds =
        std::max(save.written_seconds - save.started_seconds, save.waited_seconds);
    if (json_) {
        const nlohmann::json line{{"step", save.step},
                                  {"checkpoint", path},
                                  {"bytes", save.bytes.load()},
                                  {"seconds", seconds},
                                  {"waited_seconds", save.waited_seconds}};
        print("{}", json_line(line));
    } else {
        print("step {:>5}/{}  checkpoint {}: {} in {:.2f} s, of which training waited {:.2f}\n",
              save.step, config_.steps, one_line(path), format_bytes(save.bytes), seconds,
              save.waited_seconds);
    }
    flush_output();
    // A file system takes seconds to remove many gigabytes.
    try {
        removal_ = std::async(std::launch::async, [this] { retain(); });
    } catch (const std::system_error&) {
        retain();  // there is no thread to be had
    }
}

void RunSaves::retain() const {
    const KeptCheckpoints& keep = config_.checkpoint.keep;
    try {
        checkpoints_->retain({.last = keep.last, .every = keep.every, .best = keep.best});
    } catch (const Error& error) {
        log_warn(error.what());  // there are more than are wanted
    }
}
void RunSaves::end_removal() {
    if (removal_.valid()) removal_.get();
}

}  // namespace ferry::tools
