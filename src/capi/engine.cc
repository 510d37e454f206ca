// The engine of `ferry train`, step by step.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/of_rank.h"
#include "callbacks.h"
#include "feed.h"
#include "ferry/config.h"
#include "ferry/executor.h"
#include "ferry/export.h"
#include "ferry/train.h"
#include "handles.h"
#include "options.h"
#include "train/inside.h"

namespace ferry::capi {
namespace {

// It may be told on a thread of ferry's, while the program's own waits in a call of `engine`.
train::Progress progress_of(const ferry_engine_options& given, const void* engine) {
    if (!given.progress) return {};
    return [call = given.progress, context = given.progress_context, engine](
               const char* stage, int64_t bytes, int64_t of) {
        const InCallback within(engine);
        call(context, stage, bytes, of);
    };
}

std::optional<train::NcclRanks> ranks_of(const ferry_engine_options& given) {
    if (!given.nccl_unique_id) {
        if (given.rank != 0 || given.ranks != 0)
            refuse_argument("rank and ranks without an NCCL unique id",
                            std::to_string(given.rank) + " of " + std::to_string(given.ranks),
                            "nccl_unique_id, the same on all ranks");
        return std::nullopt;
    }
    check_range("ranks", given.ranks, 1, 1 << 20);
    check_range("rank", given.rank, 0, given.ranks - 1);
    train::NcclRanks ranks{.rank = given.rank, .size = given.ranks};
    std::memcpy(ranks.unique_id.data(), given.nccl_unique_id, ranks.unique_id.size());
    return ranks;
}

struct TrainingEngine {
    static constexpr HandleKind kKind = HandleKind::engine;
    TrainingEngine(Config read, const ferry_engine_options& given)
        : config(std::move(read)),
          feeds(given.fed == 1 || given.load),
          progress(progress_of(given, this)),
          feed(config.batch, config.evaluate.micro_batches, given.load, given.load_context),
          engine(train::Engine::make(config, runtime_of(given))) {}

    train::Runtime runtime_of(const ferry_engine_options& given) const {
        train::Runtime runtime{.executor = executor.get(),
                               .nccl = ranks_of(given),
                               .gpu = given.gpu,
                               .resume = given.resume == 1,
                               .checkpoint = given.checkpoint ? given.checkpoint : "",
                               .progress = progress,
                               .memory = allocator_of(given.allocator)};
        if (feeds) runtime.load_batch = [this](const train::FedBatch& batch) { feed.load(batch); };
        return runtime;
    }

    const Config config;
    const bool feeds;
    const train::Progress progress;
    Feed feed;
    const std::unique_ptr<Executor> executor = make_thread_executor();
    const std::unique_ptr<train::Engine> engine;
};

Config config_of(const ferry_engine_options& given) {
    check_range("override_count",
                static_cast<int64_t>(std::min<size_t>(given.override_count, 1 << 20)), 0, 1 << 16);
    if (given.override_count > 0) check_given("overrides", given.overrides);
    std::vector<std::string> overrides;
    // Not looked at, and so not required: no file has this name.
    if (given.fed == 1 || given.load) overrides.emplace_back("data.tokens=\"(fed)\"");
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

// An export's progress, as often as the program was promised.
train::ExportProgress seldom(const TrainingEngine& mine) {
    return [&mine, told = Nanos{}](int64_t bytes, int64_t of) mutable {
        constexpr Nanos kBetween = 100'000'000;
        const Nanos now = mine.executor->now();
        if (bytes < of && now - told < kBetween) return;
        told = now;
        mine.progress("export", bytes, of);
    };
}

void require(const std::optional<Error>& error) {
    if (error) throw Error(*error);
}

// Of several ranks the first one writes, and its arguments count: what keeps it from that is the
// error of all.
void export_to(TrainingEngine& mine, const char* directory, int32_t type) {
    train::ExportOptions options;
    require(train::Inside(*mine.engine).on_first_rank([&] {
        check_given("directory", directory);
        options.directory = directory;
        if (type != FERRY_TYPE_OF_RUN) options.type = type_of("type", type);
    }));
    require(train::export_to(*mine.engine, mine.config, options,
                             mine.progress ? seldom(mine) : train::ExportProgress{}));
}

void save_to(TrainingEngine& mine, const char* directory) {
    require(
        train::Inside(*mine.engine).on_first_rank([&] { check_given("directory", directory); }));
    require(train::save_checkpoint(*mine.engine, directory ? directory : "",
                                   std::string("libferry ") + ferry_version()));
}

}  // namespace
}  // namespace ferry::capi

using namespace ferry::capi;

ferry_status ferry_engine_create(const ferry_engine_options* options, ferry_engine** engine) {
    return guarded(__func__, [&] {
        const ferry_engine_options given = taken("options", options);
        check_given("engine", engine);
        check_choice("resume", given.resume, 1);
        check_choice("fed", given.fed, 1);
        check_range("gpu", given.gpu, 0, 1023);
        if (given.resume == 1 && given.checkpoint)
            refuse_argument("resume and checkpoint", "both", "at most one of both");
        const ferry::OfRank warns_as(given.nccl_unique_id ? given.rank : 0);
        hand_out(engine, std::make_unique<TrainingEngine>(config_of(given), given));
    });
}

ferry_status ferry_engine_destroy(ferry_engine* engine) {
    return close_handle<TrainingEngine>(__func__, engine);
}

ferry_status ferry_engine_step(ferry_engine* engine, ferry_step_report* report) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        if (report) check_size("report", report);
        const ferry_step_report done = report_of(mine.engine->step());
        mine.feed.taken();
        if (report) give(report, done);
    });
}

ferry_status ferry_engine_batch_shape(ferry_engine* engine, int32_t evaluation, int64_t* sequences,
                                      int64_t* sequence) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_choice("evaluation", evaluation, 1);
        check_given("sequences", sequences);
        check_given("sequence", sequence);
        *sequences = mine.feed.sequences(evaluation == 1);
        *sequence = mine.feed.sequence();
    });
}

ferry_status ferry_engine_feed(ferry_engine* engine, const ferry_batch* batch) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        const ferry_batch given = taken("batch", batch);
        if (!mine.feeds)
            refuse_argument("the engine reads its batches from data.tokens", "a fed batch",
                            "options.fed 1 at ferry_engine_create");
        mine.feed.feed(given);
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
    return with<TrainingEngine>(__func__, engine,
                                [&](TrainingEngine& mine) { save_to(mine, directory); });
}

ferry_status ferry_engine_export(ferry_engine* engine, const char* directory, int32_t type) {
    return with<TrainingEngine>(__func__, engine,
                                [&](TrainingEngine& mine) { export_to(mine, directory, type); });
}

ferry_status ferry_engine_report(ferry_engine* engine, ferry_run_report* report) {
    return with<TrainingEngine>(__func__, engine, [&](TrainingEngine& mine) {
        check_size("report", report);
        give(report, report_of(mine.engine->report()));
    });
}

ferry_status ferry_on_stuck(ferry_stuck_callback callback, void* context) {
    return guarded(__func__, [&] {
        if (!callback) return ferry::train::on_stuck({});
        ferry::train::on_stuck([=](const ferry::Error& error) {
            const InCallback within(any_engine());
            callback(context, error.what());
        });
    });
}
