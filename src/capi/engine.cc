// The engine of `ferry train`, step by step.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ferry/executor.h"
#include "ferry/export.h"
#include "ferry/train.h"
#include "handles.h"
#include "options.h"

namespace ferry::capi {
namespace {

struct TrainingEngine {
    static constexpr HandleKind kKind = HandleKind::engine;
    TrainingEngine(Config read, bool resume, std::string checkpoint)
        : config(std::move(read)),
          engine(train::Engine::make(config, {.executor = executor.get(),
                                              .resume = resume,
                                              .checkpoint = std::move(checkpoint)})) {}
    const Config config;
    const std::unique_ptr<Executor> executor = make_thread_executor();
    const std::unique_ptr<train::Engine> engine;
};

Config config_of(const ferry_engine_options& given) {
    check_range("override_count",
                static_cast<int64_t>(std::min<size_t>(given.override_count, 1 << 20)), 0, 1 << 16);
    if (given.override_count > 0) check_given("overrides", given.overrides);
    std::vector<std::string> overrides;
    for (size_t i = 0; i < given.override_count; ++i) {
        check_given("overrides", given.overrides[i]);
        overrides.emplace_back(given.overrides[i]);
    }
    if ((given.config_json != nullptr) == (given.config_file != nullptr))
        refuse_argument("config_json and config_file", given.config_json ? "both" : "neither",
                        "exactly one of both");
    if (given.config_file) return load_config(given.config_file, overrides);
    return parse_config(given.config_json, "config_json", overrides);
}

ferry_step_report report_of(const train::StepReport& report) {
    return {.size = 0,
            .step = report.step,
            .loss = report.loss,
            .gradient_norm = report.gradient_norm,
            .clip_factor = report.clip_factor,
            .lr = report.lr,
            .loss_scale = report.loss_scale,
            .seconds = report.seconds,
            .targets = report.targets,
            .tokens = report.tokens,
            .skipped = report.skipped,
            .speculative = report.speculative,
            .committed = report.committed,
            .reserved = 0};
}

ferry_run_report report_of(const train::RunReport& report) {
    ferry_run_report out{};
    out.steps = report.steps;
    out.tokens = report.tokens;
    out.seconds = report.seconds;
    out.steps_committed = report.steps_committed;
    out.steps_rolled_back = report.steps_rolled_back;
    out.clipped_steps = report.clipped_steps;
    out.skipped_steps = report.skipped_steps;
    out.device_bytes = report.reserved.device_bytes;
    out.host_bytes = report.reserved.host_bytes;
    out.nvme_bytes = report.reserved.nvme_bytes;
    for (const aio::PathCounters& path : report.paths) {
        out.nvme_bytes_read += path.bytes_read;
        out.nvme_bytes_written += path.bytes_written;
    }
    return out;
}

void export_to(TrainingEngine& mine, const std::string& directory, int32_t type) {
    train::ExportOptions options{.directory = directory};
    if (type != FERRY_TYPE_OF_RUN) options.type = type_of("type", type);
    const train::ExportDirectory claimed(directory, mine.config);
    const auto failed = train::export_model(*mine.engine, mine.config, options, &claimed);
    if (failed) throw Error(failed->why);
}

}  // namespace
}  // namespace ferry::capi

using namespace ferry::capi;

ferry_status ferry_engine_create(const ferry_engine_options* options, ferry_engine** engine) {
    return guarded(__func__, [&] {
        const ferry_engine_options given = taken("options", options);
        check_given("engine", engine);
        check_choice("resume", given.resume, 1);
        if (given.resume == 1 && given.checkpoint)
            refuse_argument("resume and checkpoint", "both", "at most one of both");
        hand_out(engine,
                 std::make_unique<TrainingEngine>(config_of(given), given.resume == 1,
                                                  given.checkpoint ? given.checkpoint : ""));
    });
}

ferry_status ferry_engine_destroy(ferry_engine* engine) {
    return close_handle<TrainingEngine>(__func__, engine);
}

ferry_status ferry_engine_step(ferry_engine* engine, ferry_step_report* report) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        if (report) check_size("report", report);
        const ferry_step_report done = report_of(mine.engine->step());
        if (report) give(report, done);
    });
}

ferry_status ferry_engine_last_step(ferry_engine* engine, int64_t* step) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_given("step", step);
        *step = mine.engine->last_step();
    });
}

ferry_status ferry_engine_evaluate(ferry_engine* engine, ferry_evaluation* evaluation) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_size("evaluation", evaluation);
        if (mine.config.evaluate.micro_batches == 0)
            refuse_argument("the configuration asks for no evaluation", "evaluate.micro_batches: 0",
                            "1 or more");
        const ferry::train::Evaluation found = mine.engine->evaluate();
        give<ferry_evaluation>(evaluation,
                               {.size = 0, .loss = found.loss, .targets = found.targets});
    });
}

ferry_status ferry_engine_state_hash(ferry_engine* engine, uint64_t* hash) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_given("hash", hash);
        *hash = mine.engine->state_hash();
    });
}

ferry_status ferry_engine_save(ferry_engine* engine, const char* directory) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_given("directory", directory);
        const auto failed = ferry::train::save_checkpoint(
            *mine.engine, directory, std::string("libferry ") + ferry_version());
        if (failed) throw ferry::Error(*failed);
    });
}

ferry_status ferry_engine_export(ferry_engine* engine, const char* directory, int32_t type) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_given("directory", directory);
        export_to(mine, directory, type);
    });
}

ferry_status ferry_engine_report(ferry_engine* engine, ferry_run_report* report) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_size("report", report);
        give(report, report_of(mine.engine->report()));
    });
}
