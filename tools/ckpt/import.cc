#include "import.h"

#include <spdlog/fmt/fmt.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/files.h"
#include "base/json_reader.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/text.h"
#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "config/words.h"
#include "ferry/config.h"
#include "ferry/optim.h"
#include "ferry/train.h"
#include "tools/options/refuse.h"
#include "tools/output/copy_progress.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/train/resume.h"
#include "train/inside.h"
#include "train/state/saving.h"

namespace ferry::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kTrainerState = "trainer_state.json";
constexpr const char* kConvert = "python3 -m ferry_offload.convert ";

// Pickles, which only Python reads.
void refuse_pickles(const fs::path& source) {
    if (kind_of(source) == FileKind::none)
        refuse("there is nothing to import: no such directory", source, "",
               "name a Hugging Face directory, or a checkpoint");
    if (kind_of(source) != FileKind::directory)
        refuse("what is imported is a directory", source, "a file",
               "name a Hugging Face directory, or a checkpoint");
    std::string found;
    for (const auto& entry : fs::directory_iterator(source)) {
        const std::string name = entry.path().filename();
        const bool deepspeed = name.ends_with("_states.pt") || name.starts_with("global_step");
        if (deepspeed || name == "optimizer.pt") found = name;
    }
    if (found.empty()) return;
    refuse("the optimizer's state is in pickles, which ferry does not read", source, found,
           std::string("convert it first: ") + kConvert + source.string() +
               " CONVERTED; then import CONVERTED");
}

// How a checkpoint was trained. Read back from the text that its manifest has of it, which an
// earlier run, or another ferry, has written.
struct Trained {
    std::string optimizer{};  // its word; empty: the text has none
    std::optional<optim::Method> method{};
    std::optional<DType> precision{};
};
Trained trained_by(const checkpoint::Manifest& manifest) {
    Trained found;
    std::istringstream lines(manifest.training);
    for (std::string line; std::getline(lines, line);) {
        const size_t equals = line.find(" = ");
        if (equals == std::string::npos) continue;
        const std::string key = line.substr(0, equals), word = line.substr(equals + 3);
        if (key == "optimizer.method") {
            found.optimizer = word;
            found.method = config::find_value(config::kMethods, word);
        }
        if (key == "precision") found.precision = config::find_value(config::kPrecisions, word);
    }
    return found;
}

// Moments of Adam and AdamW mean the same; those of others do not.
void require_same_moments(const Trained& trained, const Config& config, const fs::path& source) {
    using optim::Method;
    const Method method = config.optimizer.method;
    const bool keeps_none = method == Method::sgd && config.optimizer.momentum == 0;
    if (trained.optimizer.empty() || keeps_none) return;
    const auto is_adam = [](Method one) { return one == Method::adamw || one == Method::adam; };
    if (trained.method &&
        (trained.method == method || (is_adam(*trained.method) && is_adam(method))))
        return;
    throw Error(Trouble::usage,
                {.what = "the moments are another optimizer's",
                 .where = source,
                 .measured = trained.optimizer,
                 .limit = std::string(optim::name_of(method)),
                 .remedy = "begin with its weights: ferry ckpt export " + source.string() +
                           " WEIGHTS --export-type fp32; then import WEIGHTS "
                           "with --step 0"});
}

std::optional<int64_t> count_at(const json& state, const char* key, const fs::path& file) {
    const auto found = state.find(key);
    if (found == state.end()) return std::nullopt;
    constexpr uint64_t kMost = uint64_t{1} << 62;
    if (!found->is_number_unsigned() || found->get<uint64_t>() > kMost)
        refuse("a step is a whole number", file.string() + ": " + key, shown_json(*found),
               "correct it, or say --step");
    return found->get<int64_t>();
}

// A loss scale as DeepSpeed has it too: a power of two of at least 1.
double scale_at(const json& state, const fs::path& file) {
    const auto found = state.find("loss_scale");
    if (found == state.end() || found->is_null()) return 0;
    int exponent = 0;
    const double value = found->is_number() ? found->get<double>() : 0;
    if (!(value >= 1) || !std::isfinite(value) || std::frexp(value, &exponent) != 0.5)
        refuse("a loss scale is a power of two", file.string() + ": loss_scale", shown_json(*found),
               "correct it, or take it away: it begins as in a new run");
    return value;
}

// Of a checkpoint, what can be told without reading its arrays.
void require_as_written(const fs::path& source) {
    try {
        const checkpoint::Saved opened(source);
    } catch (const Error& error) {
        throw checkpoint::of_model(error);
    }
}

// Where the source stands: as its files say, but for a step that was given. Its moments stay what
// they are.
train::Imported position_of(const ImportOptions& options, const Config& config) {
    const fs::path source = checkpoint::without_end(options.source);
    refuse_pickles(source);
    train::Imported found{.directory = source};
    std::optional<int64_t> step;
    const fs::path file = source / kTrainerState;
    if (const auto manifest = checkpoint::manifest_of_model(source)) {
        require_as_written(source);
        const Trained trained = trained_by(*manifest);
        require_same_moments(trained, config, source);
        step = manifest->step;
        found.updates = manifest->updates;
        found.moment_updates = manifest->moment_updates;
        if (trained.precision == DType::f16) {
            found.loss_scale = manifest->loss_scale;
            found.good_steps = manifest->scale_good;
        }
    } else if (kind_of(file) != FileKind::none) {
        const TextFile kind{.name = "the trainer's state",
                            .remedy = "correct it, or move it away and say --step",
                            .most_bytes = 256 * kMiB};
        const json state = parse_json(read_text_file(file, kind), {.where = file});
        if (!state.is_object())
            refuse("the trainer's state is no object", file, shown_json(state), "say --step");
        step = count_at(state, "global_step", file);
        found.moment_updates = found.updates =
            count_at(state, "optimizer_step", file).value_or(step.value_or(0));
        found.loss_scale = scale_at(state, file);
    }
    if (options.step) {
        if (!step) found.moment_updates = *options.step;
        step = found.updates = *options.step;
    }
    if (!step)
        refuse("it is not known which step the state is of", source,
               std::string("no manifest and no ") + kTrainerState, "say it: --step 1000");
    found.step = *step;
    return found;
}

// What the checkpoint is made of: durable steps of this configuration, or what is imported.
struct Source {
    bool durable = false;
    train::Imported imported{};
};

Source source_of(const ImportOptions& options, const Config& config) {
    if (!holds_durable_steps(options.source)) return {.imported = position_of(options, config)};
    if (options.step)
        refuse("durable steps know which step they are of", "--step", std::to_string(*options.step),
               "leave it out");
    return {.durable = resume_from(options.source, config).durable};
}

// Durable steps are read as they lie; else the checkpoint is all that is left behind.
std::unique_ptr<train::Engine> engine_of(Config config, const Source& source, Executor& executor) {
    if (source.durable) return train::Engine::make(config, {.executor = &executor, .resume = true});
    config.checkpoint.durable_steps = false;
    return train::Engine::make(config, {.executor = &executor, .imported = source.imported});
}

}  // namespace

void import_checkpoint(const ImportOptions& options) {
    const Config config =
        options.overrides.checked(load_config(options.config, options.overrides.keys));
    if (config.checkpoint.dir.empty())
        refuse("there is no place for the checkpoint", "checkpoint.dir", "not set",
               "set it: --set checkpoint.dir=DIR");
    if (config.parallel.tensor > 1)
        refuse("ranks that share tensors import no state", "parallel.tensor",
               std::to_string(config.parallel.tensor),
               "import with --set parallel.tensor=1: ranks that share tensors go on from the "
               "checkpoint");
    const Source source = source_of(options, config);
    if (source.imported.step > config.steps)
        refuse("the state is of a step beyond the run's last", options.source,
               fmt::format("step {}, steps {}", source.imported.step, config.steps),
               fmt::format("set steps to {} or more", source.imported.step));
    const auto executor = make_thread_executor();
    const ResumeFrom from{.durable = source.durable};
    const auto steps = claim_checkpoints(config, from);
    const auto engine = engine_of(config, source, *executor);
    make_way(*steps, from);
    const int64_t step = engine->last_step();
    CopyProgress progress("import " + options.source, *executor);
    int64_t bytes = 0;
    const auto failed = train::Inside(*engine).save({.directory = steps.get(),
                                                     .progress =
                                                         [&](int64_t written, int64_t of) {
                                                             bytes = written;
                                                             progress.at(written, of);
                                                         },
                                                     .program = FERRY_VERSION});
    if (failed) throw Error(*failed);
    const fs::path path = fs::path(config.checkpoint.dir) / checkpoint::name_of_step(step);
    if (options.json)
        print("{}", json_line(json{{"checkpoint", path.string()},
                                   {"step", step},
                                   {"updates", checkpoint::manifest_of(path).updates},
                                   {"bytes", bytes},
                                   {"seconds", progress.seconds()}}));
    else
        print("{}: {}\ngo on: ferry train {} --resume latest\n", one_line(path.string()),
              progress_text(bytes, bytes, progress.seconds()), one_line(options.config));
}

}  // namespace ferry::tools
