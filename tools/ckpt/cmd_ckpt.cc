// `ferry ckpt`: what is in a directory of checkpoints, and whether it is right.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/text.h"
#include "checkpoint/manifest.h"
#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "ferry/config.h"
#include "import.h"
#include "tools/commands.h"
#include "tools/options/export_options.h"
#include "tools/output/copy_progress.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/train/resume.h"
#include "train/saving/export.h"

namespace ferry::tools {
namespace {

using checkpoint::is_checkpoint;
using checkpoint::Manifest;
using checkpoint::Saved;
using checkpoint::without_end;
using nlohmann::json;

// A checkpoint, or those of a directory. Throws usage where there is none.
std::vector<std::string> checkpoints_at(const std::string& given) {
    const std::filesystem::path path = without_end(given);
    if (kind_of(path) == FileKind::directory) {
        if (is_checkpoint(path)) return {path};
        std::vector<std::string> all;
        for (const checkpoint::Step& step : checkpoint::steps_in(path)) all.push_back(step.path);
        if (!all.empty()) return all;
    }
    const bool is_directory = kind_of(path) == FileKind::directory;
    const auto aside = is_directory ? checkpoint::moved_aside_in(path) : std::vector<std::string>();
    if (is_directory && holds_durable_steps(path))
        throw Error(Trouble::usage,
                    {.what = "durable steps are there, and no checkpoint",
                     .where = given,
                     .remedy = "make a checkpoint of the last one, with the run's configuration: "
                               "ferry ckpt import CONFIG " +
                               given});
    throw Error(Trouble::usage,
                {.what = "no checkpoint is there",
                 .where = given,
                 .measured = kind_of(path) == FileKind::none ? "nothing of that name"
                             : aside.empty()                 ? ""
                                             : "those of a run that ended are in " + aside.back(),
                 .remedy = "name a checkpoint, such as DIR/step-00000100, or a directory of them"});
}

constexpr int64_t kMostStep = 1'000'000'000'000'000;

json optional_number(const std::optional<checkpoint::HeldBackLoss>& held_back) {
    return held_back && std::isfinite(held_back->loss) ? json(held_back->loss) : json();
}

// Null: the step was imported.
json loss_of(const Manifest& m) {
    return m.last.tokens > 0 && std::isfinite(m.last.loss) ? json(m.last.loss) : json();
}

std::string loss_text(const json& loss) {
    return loss.is_null() ? "" : fmt::format("{:.6f}", loss.get<double>());
}

// ---------------------------------------------------------------- ls

void list(const std::string& directory, bool as_json) {
    const std::vector<std::string> all = checkpoints_at(directory);
    if (!as_json)
        print("{:>9} {:>9} {:>11} {:>10} {:>10}  {}\n", "step", "of", "bytes", "loss", "held back",
              "path");
    for (const std::string& path : all) {
        try {
            const Manifest m = checkpoint::manifest_of(path);
            const json held_back = optional_number(m.held_back);
            const auto wrong = checkpoint::misnamed(path, m);
            if (as_json) {
                json line{{"path", path},
                          {"step", m.step},
                          {"steps", m.steps},
                          {"tokens", m.tokens},
                          {"bytes", m.bytes()},
                          {"loss", loss_of(m)},
                          {"held_back_loss", held_back},
                          {"finished", m.finished()}};
                if (wrong) line["error"] = Error(Trouble::usage, *wrong).what();
                print("{}", json_line(line));
                continue;
            }
            print("{:>9} {:>9} {:>11} {:>10} {:>10}  {}{}\n", m.step, m.steps,
                  format_bytes(m.bytes()), loss_text(loss_of(m)), loss_text(held_back),
                  one_line(path), wrong ? ": the name of another step" : "");
        } catch (const Error& error) {
            if (as_json)
                print("{}", json_line(json{{"path", path}, {"error", error.what()}}));
            else
                print("{:>53}  {}: {}\n", "unreadable", one_line(path), error.problem().what);
        }
    }
}

// ---------------------------------------------------------------- inspect

void inspect(const std::string& path, bool as_json) {
    const Saved saved(without_end(path));
    const Manifest& m = saved.manifest();
    if (as_json) {
        json arrays = json::array();
        for (const auto& [name, array] : saved.arrays())
            arrays.push_back(
                {{"name", name},
                 {"dtype", array.stored->dtype},
                 {"shape", array.stored->shape},
                 {"file",
                  std::filesystem::path(array.shard->file_of(*array.stored)).filename().string()}});
        json line = json::parse(checkpoint::write_manifest(m));
        line.erase("shards");
        line["path"] = saved.path();
        line["bytes"] = m.bytes();
        line["arrays"] = std::move(arrays);
        print("{}", json_line(line));
        return;
    }
    const std::string of_moments =
        m.moment_updates == m.updates ? "" : fmt::format(" ({} of moments)", m.moment_updates);
    print("step {} of {}, {} updates{}, {} tokens, {} in {} files, ferry {}\n", m.step, m.steps,
          m.updates, of_moments, m.tokens, format_bytes(m.bytes()), m.shards.size(), m.ferry);
    if (const json loss = loss_of(m); !loss.is_null())
        print("loss {}, learning rate {:.3e}, loss scale {}\n", loss_text(loss), m.last.lr,
              m.loss_scale);
    if (m.held_back) print("held-back loss {:.6f}\n", m.held_back->loss);
    print("numerics {}\n\n{}\n", m.numerics, m.training);
    for (const auto& [name, array] : saved.arrays())
        print("{:<5} {:>10}  {}\n", array.stored->dtype, format_bytes(array.bytes), one_line(name));
}

// ---------------------------------------------------------------- verify

struct Verification {
    std::vector<std::string> faults{};
    bool only_misnamed = false;
    bool whole() const { return faults.empty(); }
};

// Every fault; reads all of it. Throws usage where that cannot be told: there is no manifest, or
// one of a newer version.
Verification verification_of(const std::string& path, const Executor& executor) {
    std::vector<std::string> faults;
    const auto attempt = [&](const auto& work) {
        try {
            work();
        } catch (const Error& error) {
            if (error.trouble() != Trouble::io) throw;
            faults.emplace_back(error.what());
        }
    };
    std::optional<Manifest> manifest;
    attempt([&] { manifest = checkpoint::manifest_of(path); });
    if (!manifest) return {faults};
    CopyProgress progress("verify " + path, executor);
    int64_t bytes = 0;
    for (const checkpoint::Shard& shard : manifest->shards)
        attempt([&] {
            checkpoint::check_shard(
                path, shard, [&](int64_t read) { progress.at(bytes += read, manifest->bytes()); });
        });
    if (const auto wrong = checkpoint::misnamed(path, *manifest)) {
        const bool only = faults.empty();
        faults.emplace_back(Error(Trouble::io, *wrong).what());
        return {faults, only};
    }
    if (faults.empty()) attempt([&] { const Saved saved(path); });
    return {faults};
}

// What to do with a damaged one. "": `ferry ckpt rm` removes it.
std::string remedy_for(const std::string& path, const Verification& found) {
    if (found.only_misnamed) return "give those that were renamed their own names again";
    const std::string foreign = checkpoint::foreign_at(path);
    if (foreign.empty()) return {};
    return fmt::format("remove {} by hand, for ferry ckpt rm does not ({})", path, foreign);
}

void verify(const std::string& given, bool as_json) {
    const auto executor = make_thread_executor();
    const std::vector<std::string> all = checkpoints_at(given);
    int64_t damaged = 0;
    std::optional<Error> unknown;
    std::string remedy;  // of the first that has one of its own
    for (const std::string& path : all) {
        Verification found;
        try {
            found = verification_of(path, *executor);
        } catch (const Error& error) {
            unknown = error;
            if (as_json)
                print("{}", json_line(json{{"path", path}, {"error", error.what()}}));
            else
                print("{}: cannot be told\n  {}\n", one_line(path), error.what());
            continue;
        }
        damaged += found.whole() ? 0 : 1;
        if (!found.whole() && remedy.empty()) remedy = remedy_for(path, found);
        if (as_json) {
            print("{}", json_line(json{
                            {"path", path}, {"whole", found.whole()}, {"faults", found.faults}}));
            continue;
        }
        print("{}: {}\n", one_line(path),
              found.whole()         ? "whole"
              : found.only_misnamed ? "of another step than its name says"
                                    : "damaged");
        for (const std::string& fault : found.faults) print("  {}\n", fault);
    }
    if (damaged == 0 && unknown) throw Error(*unknown);
    if (damaged == 0) return;
    throw Error(Trouble::io, {.what = "damaged checkpoints",
                              .where = given,
                              .measured = fmt::format("{} of {}", damaged, all.size()),
                              .remedy = "resume from another one; " +
                                        (remedy.empty() ? "ferry ckpt rm removes them" : remedy)});
}

// ---------------------------------------------------------------- diff

struct Difference {
    std::string name{}, what{};
    int64_t elements = 0;  // that differ
    double largest = 0;    // absolute difference; of numbers that ferry reads
};

// Of an array whose type ferry does not know, a byte is an element.
int64_t width_of(const checkpoint::StoredTensor& tensor) {
    constexpr int64_t kWidest = 8;
    int64_t left = tensor.bytes;
    for (const int64_t side : tensor.shape) {  // by division: such a shape may overflow
        if (side == 0 || left % side != 0) return 1;
        left /= side;
    }
    return left >= 1 && left <= kWidest ? left : 1;
}

// Compares arrays of one type and shape, and holds the memory for it.
class Comparison {
public:
    Comparison(const Saved& a, const Saved& b, std::function<void(int64_t)> read)
        : a_(a), b_(b), read_(std::move(read)) {}

    Difference of(const std::string& name) {
        const Saved::Array &one = *a_.find(name), &other = *b_.find(name);
        Difference found{.name = name};
        const int64_t width = width_of(*one.stored), part = round_down(kPart, width);
        for (int64_t first = 0; first < one.bytes; first += part) {
            const auto bytes = static_cast<size_t>(std::min(part, one.bytes - first));
            const auto x = std::span(x_).first(bytes), y = std::span(y_).first(bytes);
            a_.read(one, first, x);
            b_.read(other, first, y);
            read_(2 * static_cast<int64_t>(bytes));
            if (std::memcmp(x.data(), y.data(), bytes) == 0) continue;
            for (size_t at = 0; at < bytes; at += static_cast<size_t>(width))
                found.elements +=
                    std::memcmp(&x[at], &y[at], static_cast<size_t>(width)) == 0 ? 0 : 1;
            if (one.stored->type) find_largest(one, other, first / width, bytes, found);
        }
        if (found.elements > 0)
            found.what = fmt::format(
                "{} of {} {} differ{}", found.elements, one.bytes / width,
                width == 1 && !one.stored->type ? "bytes" : "elements",
                one.stored->type ? fmt::format(", by {:.6g} at most", found.largest) : "");
        return found;
    }

private:
    static constexpr int64_t kPart = 2 * kMiB;

    void find_largest(const Saved::Array& one, const Saved::Array& other, int64_t first,
                      size_t bytes, Difference& found) {
        const size_t count = bytes / static_cast<size_t>(size_of(*one.stored->type));
        u_.resize(std::max(u_.size(), count));
        v_.resize(u_.size());
        one.shard->read(*one.stored, first, std::span(u_).first(count));
        other.shard->read(*other.stored, first, std::span(v_).first(count));
        for (size_t i = 0; i < count; ++i)
            found.largest = std::max(found.largest, std::abs(double{u_[i]} - double{v_[i]}));
    }

    const Saved &a_, &b_;
    std::function<void(int64_t)> read_;
    std::vector<std::byte> x_ = std::vector<std::byte>(kPart), y_ = x_;
    std::vector<float> u_{}, v_{};
};

std::vector<Difference> differences_of(const Saved& a, const Saved& b, const Executor& executor) {
    std::vector<Difference> all;
    CopyProgress progress("diff", executor);
    int64_t bytes = 0;
    const auto read = [&](int64_t more) {
        progress.at(bytes += more, a.manifest().bytes() + b.manifest().bytes());
    };
    Comparison compare(a, b, read);
    for (const auto& [name, array] : a.arrays()) {
        const Saved::Array* other = b.find(name);
        if (other == nullptr)
            all.push_back({.name = name, .what = "only in the first"});
        else if (other->stored->dtype != array.stored->dtype ||
                 other->stored->shape != array.stored->shape || other->bytes != array.bytes)
            all.push_back({.name = name, .what = "of another type or shape"});
        else if (Difference found = compare.of(name); found.elements > 0)
            all.push_back(std::move(found));
    }
    for (const auto& [name, array] : b.arrays())
        if (a.find(name) == nullptr) all.push_back({.name = name, .what = "only in the second"});
    return all;
}

void diff(const std::string& first, const std::string& second, bool as_json) {
    const auto executor = make_thread_executor();
    const Saved a(without_end(first)), b(without_end(second));
    const std::vector<Difference> all = differences_of(a, b, *executor);
    if (as_json) {
        json arrays = json::array();
        for (const Difference& one : all)
            arrays.push_back({{"name", one.name},
                              {"what", one.what},
                              {"elements", one.elements},
                              {"largest", one.largest}});
        print("{}", json_line(json{{"equal", all.empty()},
                                   {"arrays", a.arrays().size()},
                                   {"steps", {a.manifest().step, b.manifest().step}},
                                   {"differences", std::move(arrays)}}));
    } else {
        for (const Difference& one : all) print("{}: {}\n", one_line(one.name), one.what);
        if (all.empty()) print("equal: {} arrays, bit for bit\n", a.arrays().size());
    }
    if (!all.empty())
        throw Error(Trouble::io, {.what = "the checkpoints differ",
                                  .where = first + " and " + second,
                                  .measured = fmt::format("{} arrays", all.size())});
}

// ---------------------------------------------------------------- rm

// A user's own files do not go with a checkpoint, whatever their directory is called.
void require_nothing_else_in(const std::string& path) {
    const std::string foreign = checkpoint::foreign_at(path);
    if (foreign.empty()) return;
    throw Error(Trouble::usage, {.what = "this is no checkpoint, or not only one",
                                 .where = path,
                                 .measured = foreign,
                                 .limit = "a directory of what ferry writes into a checkpoint",
                                 .remedy = "look at it, and remove it by other means"});
}

void remove(const std::vector<std::string>& given, bool all, bool as_json) {
    std::vector<std::string> gone;
    for (const std::string& path : given) {
        const std::filesystem::path plain = without_end(path);
        const std::vector<std::string> found = checkpoints_at(path);
        if (!all && !is_checkpoint(plain))
            throw Error(Trouble::usage,
                        {.what = "this is a directory of checkpoints, and no checkpoint",
                         .where = path,
                         .measured = fmt::format("{} checkpoints", found.size()),
                         .remedy = "name those that are to go, or insist with --all"});
        for (const std::string& one : found)
            if (std::ranges::find(gone, one) == gone.end()) gone.push_back(one);
    }
    for (const std::string& path : gone) require_nothing_else_in(path);
    for (const std::string& path : gone) {
        remove_directory(path);
        if (as_json)
            print("{}", json_line(json{{"removed", path}}));
        else
            print("removed {}\n", one_line(path));
    }
}

// ---------------------------------------------------------------- export

void export_one(const std::string& path, const train::ExportOptions& options,
                const std::string& model, bool as_json) {
    const auto executor = make_thread_executor();
    const std::vector<std::string> found = checkpoints_at(path);
    const Saved saved(found.back());  // the newest, where a directory is named
    Config config;
    config.model.path = model.empty() ? saved.manifest().model : model;
    if (!config.model.path.empty() && kind_of(config.model.path) != FileKind::directory) {
        log_warn(config.model.path + " is gone: the export has no tokenizer (--model DIR)");
        config.model.path.clear();
    }
    const train::ExportDirectory directory(options.directory, config);
    int64_t bytes = 0;
    double seconds = 0;
    {
        CopyProgress progress("export " + saved.path(), *executor);
        train::export_checkpoint(saved, options, directory, [&](int64_t done, int64_t of) {
            bytes = done;
            progress.at(done, of);
        });
        seconds = progress.seconds();
    }
    if (as_json)
        print("{}", json_line(json{{"checkpoint", saved.path()},
                                   {"directory", options.directory},
                                   {"bytes", bytes},
                                   {"seconds", seconds}}));
    else
        print("{} to {}: {}\n", one_line(saved.path()), one_line(options.directory),
              progress_text(bytes, bytes, seconds));
}

struct CkptOptions {
    std::vector<std::string> paths{};
    std::string first{}, second{}, model{};
    train::ExportOptions exported{};
    ImportOptions imported{};
    bool json = false, all = false;
};

using Shared = std::shared_ptr<CkptOptions>;

CLI::App* add(CLI::App& ckpt, const Shared& options, const char* name, const char* what,
              const char* example) {
    CLI::App* command = ckpt.add_subcommand(name, what);
    command->add_flag("--json", options->json, "JSON objects, a line each");
    command->footer(std::string("Example: ") + example);
    return command;
}

void add_readers(CLI::App& ckpt, const Shared& options) {
    CLI::App* ls =
        add(ckpt, options, "ls", "list the checkpoints of a directory", "ferry ckpt ls CKPT");
    ls->add_option("directory", options->first, "directory of checkpoints")->required();
    ls->callback([options] { list(options->first, options->json); });

    CLI::App* look = add(ckpt, options, "inspect", "what a checkpoint is of, and its arrays",
                         "ferry ckpt inspect CKPT/step-00000100");
    look->add_option("checkpoint", options->first, "a checkpoint")->required();
    look->callback([options] { inspect(options->first, options->json); });

    CLI::App* prove = add(ckpt, options, "verify",
                          "read everything and compare checksums; names each file and tensor that "
                          "is wrong, and ends with code 4",
                          "ferry ckpt verify CKPT");
    prove->add_option("path", options->first, "a checkpoint, or a directory of them")->required();
    prove->callback([options] { verify(options->first, options->json); });

    CLI::App* two =
        add(ckpt, options, "diff", "compare two checkpoints bit for bit; code 4 where they differ",
            "ferry ckpt diff A/step-00000100 B/step-00000100");
    two->add_option("first", options->first, "a checkpoint")->required();
    two->add_option("second", options->second, "another one")->required();
    two->callback([options] { diff(options->first, options->second, options->json); });
}

void add_writers(CLI::App& ckpt, const Shared& options) {
    CLI::App* rm = add(ckpt, options, "rm", "remove checkpoints: each of them whole, or not at all",
                       "ferry ckpt rm CKPT/step-00000100");
    rm->add_option("path", options->paths, "checkpoints")->required();
    rm->add_flag("--all", options->all, "of a directory: all that are in it");
    rm->callback([options] { remove(options->paths, options->all, options->json); });

    CLI::App* out = add(ckpt, options, "export",
                        "weights as a directory that transformers loads, in bounded memory",
                        "ferry ckpt export CKPT/step-00000100 TUNED --export-type bf16");
    out->add_option("checkpoint", options->first, "a checkpoint; of a directory the newest")
        ->required();
    add_export_options(*out, "directory", options->exported);
    out->add_option(
        "--model", options->model,
        "where the tokenizer's files are (default: the model that the run started from)");
    out->callback([options] {
        export_one(options->first, options->exported, options->model, options->json);
    });

    CLI::App* in = add(ckpt, options, "import",
                       "a checkpoint for this configuration from a Hugging Face directory, with "
                       "the optimizer's state where it has one, from a checkpoint of a run "
                       "with other settings, or from durable steps; it goes into checkpoint.dir",
                       "ferry ckpt import my.json CONVERTED --step 1000");
    in->add_option("config", options->imported.config, "configuration that goes on from it")
        ->required();
    in->add_option("source", options->imported.source, "directory to import")->required();
    in->add_option("--step", options->imported.step,
                   "step that it is of (default: what its manifest.json or trainer_state.json "
                   "says)")
        ->check(CLI::Range(int64_t{0}, kMostStep));
    add_overrides(*in, options->imported.overrides, "override a key, as for the run");
    in->callback([options] {
        options->imported.json = options->json;
        import_checkpoint(options->imported);
    });
}

}  // namespace
}  // namespace ferry::tools

void add_ckpt_command(CLI::App& app) {
    const auto options = std::make_shared<ferry::tools::CkptOptions>();
    CLI::App* command =
        app.add_subcommand("ckpt", "list, check, compare, remove, export and import checkpoints");
    command->require_subcommand(1);
    command->footer(
        "docs/checkpoints.md says what a checkpoint is.\n"
        "Example: ferry ckpt ls CKPT");
    ferry::tools::add_readers(*command, options);
    ferry::tools::add_writers(*command, options);
}
