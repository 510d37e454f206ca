// `ferry launch --hostfile F CONFIG`: one rank on every slot of the hosts, by mpirun.
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <sstream>

#include "base/files.h"
#include "ferry/error.h"
#include "hostfile.h"
#include "rank_output.h"
#include "tools/commands.h"
#include "tools/output/output.h"
#include "tools/process/child_process.h"
#include "tools/process/interrupt.h"

namespace ferry::tools {
namespace {

// How long ranks may take to end after one has failed: to say why, and to leave their files in
// order. mpirun always waits that long, more than once.
constexpr const char* kLastWordsSeconds = "3";

struct LaunchOptions {
    std::string hostfile{}, include{}, exclude{}, config{};
    std::vector<std::string> arguments{};
    bool dry_run = false;
};

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

int ranks_on(const std::vector<Host>& hosts) {
    int ranks = 0;
    for (const Host& host : hosts) ranks += static_cast<int>(host.chosen.size());
    return ranks;
}

// Variables that libraries read in every rank's environment; mpirun takes only its own along.
std::vector<std::string> passed_on() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string text = *entry;
        for (const char* prefix : {"NCCL_", "FERRY_", "OPENBLAS_"})
            if (text.starts_with(prefix) && !text.starts_with("FERRY_LOG_LABEL="))
                names.push_back(text.substr(0, text.find('=')));
    }
    std::ranges::sort(names);
    return names;
}

// A part for each host, so that each can have GPUs of its own.
std::vector<std::string> mpirun_words(const LaunchOptions& options,
                                      const std::vector<Host>& hosts) {
    std::vector<std::string> words{"mpirun",         "--tag-output", "--bind-to",
                                   "none",           "--mca",        "odls_base_sigkill_timeout",
                                   kLastWordsSeconds};
    if (geteuid() == 0) words.emplace_back("--allow-run-as-root");
    const std::vector<std::string> names = passed_on();
    for (const Host& host : hosts) {
        const std::string ranks = std::to_string(host.chosen.size());
        if (&host != &hosts.front()) words.emplace_back(":");
        words.insert(words.end(), {"-n", ranks, "--host", host.name + ":" + ranks});
        if (!host.whole())
            words.insert(words.end(), {"-x", fmt::format("CUDA_VISIBLE_DEVICES={}",
                                                         fmt::join(host.chosen, ","))});
        words.insert(words.end(), {"-x", "FERRY_LOG_LABEL="});  // every line gets its rank here
        for (const std::string& name : names) words.insert(words.end(), {"-x", name});
        words.insert(words.end(), {own_program(), "train", options.config});
        words.insert(words.end(), options.arguments.begin(), options.arguments.end());
    }
    return words;
}

struct Answer {
    int code = 0;
    std::string out{}, err{};
};
Answer ask(const std::vector<std::string>& words) {
    Answer answer;
    answer.code = ChildProcess(words).run([&](int stream, std::string_view bytes) {
        (stream == 1 ? answer.out : answer.err) += bytes;
    });
    return answer;
}

// The hashes of the files, as sha256sum prints them, one a line.
std::vector<std::string> hashes_in(const std::string& text) {
    std::vector<std::string> hashes;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
        hashes.push_back(line.substr(line.starts_with('\\') ? 1 : 0, 64));
    return hashes;
}

std::string last_line(const std::string& text) {
    const size_t end = text.find_last_not_of(" \r\n");
    if (end == std::string::npos) return "";
    const size_t begin = text.find_last_of('\n', end);
    return text.substr(begin == std::string::npos ? 0 : begin + 1, end - begin);
}

// The same program and configuration on every host, found in the same place.
class SameFiles {
public:
    explicit SameFiles(const LaunchOptions& options)
        : files_{own_program(), std::filesystem::absolute(options.config).string()} {
        // Which would be read for ever.
        if (kind_of(files_[1]) == FileKind::other) refuse("no regular file");
        const Answer answer = ask({"sha256sum", "--", files_[0], files_[1]});
        here_ = hashes_in(answer.out);
        if (here_.size() != files_.size()) refuse(last_line(answer.err));
    }

    void check(const std::string& host) const {
        if (is_this_machine(host)) return;
        const std::string directory = std::filesystem::current_path().string();
        const Answer answer = ask({"ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host,
                                   "cd " + shell_line({directory}) + " && " +
                                       shell_line({"sha256sum", "--", files_[0], files_[1]})});
        if (answer.code == 255) {
            throw Error(Trouble::usage,
                        {.what = "a host cannot be reached",
                         .where = "host " + host,
                         .measured = "ssh: " + last_line(answer.err),
                         .remedy = "see that `ssh " + host + "` works without a password"});
        }
        const std::vector<std::string> there = hashes_in(answer.out);
        if (answer.code != 0 || there.size() != files_.size()) {
            throw Error(
                Trouble::usage,
                {.what = "a host has not got the program, the configuration or the "
                         "directory to run in",
                 .where = "host " + host,
                 .measured = last_line(answer.err),
                 .remedy = "put them where they lie here: " + files_[0] + ", " + files_[1]});
        }
        for (size_t i = 0; i < files_.size(); ++i) {
            if (there[i] == here_[i]) continue;
            throw Error(Trouble::usage, {.what = i == 0 ? "a host has another program"
                                                        : "a host has another configuration",
                                         .where = "host " + host + ": " + files_[i],
                                         .measured = "SHA-256 " + there[i].substr(0, 16) +
                                                     "..., here " + here_[i].substr(0, 16) + "...",
                                         .remedy = "copy this machine's there"});
        }
    }

private:
    [[noreturn]] void refuse(const std::string& reason) const {
        throw Error(Trouble::usage, {.what = "the configuration cannot be read",
                                     .where = files_[1],
                                     .measured = reason,
                                     .remedy = "name a file that you may read"});
    }

    std::vector<std::string> files_;
    std::vector<std::string> here_;
};

void require_program(const char* name, const char* purpose, const char* remedy) {
    if (!program_path(name).empty()) return;
    throw Error(Trouble::usage, {.what = fmt::format("there is no {} to {}", name, purpose),
                                 .where = "PATH",
                                 .remedy = remedy});
}

void require_programs(const std::vector<Host>& hosts) {
    require_program("mpirun", "start the ranks with",
                    "install Open MPI (openmpi-bin) on every host");
    require_program("sha256sum", "compare the hosts' files by", "install coreutils on every host");
    const auto is_here = [](const Host& host) { return is_this_machine(host.name); };
    if (!std::ranges::all_of(hosts, is_here))
        require_program("ssh", "reach the other hosts by", "install openssh-client");
}

// The first failing rank's error, or which was lost, after everything that was printed.
[[noreturn]] void fail(const RankOutput& output, int code) {
    const auto trouble = code >= 1 && code <= static_cast<int>(Trouble::rank_lost)
                             ? static_cast<Trouble>(code)
                             : Trouble::rank_lost;
    std::string reason = output.reason();
    if (reason.empty()) {
        throw Error(trouble, {.what = "the ranks ended without saying why",
                              .where = "mpirun",
                              .measured = "exit code " + std::to_string(code),
                              .remedy = "see what [mpirun] said above"});
    }
    throw Error(trouble, {.what = std::move(reason)});
}

void run_launch(const LaunchOptions& options) {
    const std::vector<Host> hosts =
        choose_hosts(read_hostfile(options.hostfile), options.include, options.exclude);
    const std::vector<std::string> words = mpirun_words(options, hosts);
    if (options.dry_run) {
        print("{}\n", shown_shell_line(words));
        return;
    }
    require_programs(hosts);
    const SameFiles files(options);
    for (const Host& host : hosts) files.check(host.name);
    print("{} ranks on {} hosts\n", ranks_on(hosts), hosts.size());
    check_output();  // before the work, not after it

    catch_interrupts();
    RankOutput output;
    ChildProcess mpirun(words);
    // Which mpirun passes on. At a signal to end it would leave the ranks some seconds, and steps
    // may be longer.
    const int code =
        mpirun.run([&](int stream, std::string_view bytes) { output.add(stream, bytes); }, SIGUSR1);
    output.finish();
    if (code == 0) return;
    end_if_interrupted();
    fail(output, code);
}

}  // namespace
}  // namespace ferry::tools

void add_launch_command(CLI::App& app) {
    using namespace ferry::tools;
    const auto options = std::make_shared<LaunchOptions>();
    CLI::App* command =
        app.add_subcommand("launch", "train on several hosts or GPUs: a rank on every slot");
    command->add_option("config", options->config, "of `ferry train`, the same on every host")
        ->required();
    command->add_option("arguments", options->arguments,
                        "further ones of `ferry train`, behind --");
    command->add_option("--hostfile", options->hostfile, "lines `host slots=N`")->required();
    command->add_option("--include", options->include,
                        "only these hosts and slots: worker-0@worker-1:0,2");
    command->add_option("--exclude", options->exclude, "all but these");
    command->add_flag("--dry-run", options->dry_run, "print the command that would run, no more");
    command->footer(
        "Before it starts, every other host is asked over ssh whether program and configuration\n"
        "are the same there. Each line of output begins with its rank. When a rank fails, all "
        "end,\n"
        "and its error is printed last; the exit code is that of the rank that ended first.\n"
        "Ctrl-C ends all ranks after their step, a second one at once.\n"
        "Slots are GPUs, from 0: a host of which only some are chosen shows its ranks only those\n"
        "(CUDA_VISIBLE_DEVICES). NCCL_*, FERRY_* and OPENBLAS_* are passed on to the ranks.\n"
        "Example: ferry launch my.json --hostfile hosts --include worker-0@worker-1:0,2 -- --json");
    command->callback([options] { run_launch(*options); });
}
