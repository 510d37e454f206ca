// `ferry`: one program, one subcommand a file.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/of_rank.h"
#include "base/process_limits.h"
#include "base/text.h"
#include "comm/comm.h"
#include "commands.h"
#include "ferry/error.h"
#include "ferry/streams.h"
#include "tools/options/command_line.h"
#include "tools/output/output.h"
#include "tools/process/interrupt.h"
#include "tools/process/rank_error.h"

namespace {

void say(const char* message) {
    try {
        ferry::tools::check_output();
    } catch (const ferry::Error& lost) {
        if (std::strcmp(lost.what(), message) != 0)
            std::fprintf(stderr, "ferry: %s\n", lost.what());
    }
    std::fprintf(stderr, "ferry: %s\n", message);
}

// Everything of ferry's is unwound by now. What libraries do at a normal exit may wait for ever for
// memory or threads that they did not get.
[[noreturn]] void end(const char* message, int exit_code) {
    say(message);
    std::_Exit(exit_code);
}

[[noreturn]] void end(const ferry::Error& error) { end(error.what(), error.exit_code()); }

// What the first rank says as well, it says for all. A launcher that ends them all is a hurry.
[[noreturn]] void end(const ferry::tools::RankError& error) {
    ferry::tools::catch_interrupts();
    ferry::comm::say_once(
        error.unnamed(), [&error] { say(error.what()); }, ferry::tools::interrupted);
    std::_Exit(error.exit_code());
}

ferry::Error out_of_memory() {
    const std::string space = ferry::address_space_limit();
    return {ferry::Trouble::does_not_fit,
            {.what = "the process is not given the memory it asks for",
             .limit = space.empty() ? "the container's or the machine's memory" : space,
             .remedy = "raise the limit, or lower budgets.host, budgets.device or threads"}};
}

ferry::Error unusable(const std::filesystem::filesystem_error& error) {
    const std::string limit = ferry::limit_behind(error.code().value());
    return {ferry::trouble_of_reading(error.code().value()),
            {.what = "a path cannot be used",
             .where = error.path1().string(),
             .measured = error.code().message(),
             .limit = limit,
             .remedy = limit.empty() ? "name another, or mend what the path leads through"
                                     : "raise that limit"}};
}

// A thread that nobody else has named.
ferry::Error as_named(const std::system_error& error) {
    if (error.code() == std::errc::resource_unavailable_try_again) {
        try {
            ferry::refuse_thread("", error.what());
        } catch (const ferry::Error& named) {
            return named;
        }
    }
    return {ferry::Trouble::internal, {.what = error.what()}};
}

// Several ranks write to one terminal. What the environment says stands: `ferry launch` labels
// whole lines, errors too.
void label_log() {
    if (const auto rank = ferry::comm::launched_rank())
        setenv("FERRY_LOG_LABEL", ("rank " + std::to_string(*rank)).c_str(), 0);
}

// Help and version are "errors" of code 0; every other one is a usage error.
void parse(CLI::App& app, std::vector<std::string> words) {
    std::ranges::reverse(words);  // as CLI11 takes them
    try {
        app.parse(std::move(words));
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() != 0) end(ferry::tools::usage_error(app, error));
        app.exit(error);
    }
}

}  // namespace

int main(int argc, char** argv) {
    ferry::hold_standard_streams();  // before anything is opened
    label_log();
    // All ranks read the same configuration.
    const ferry::OfRank warns_as(ferry::comm::launched_rank().value_or(0));
    ferry::tools::leave_no_drafts();
    // A file over the limit, or a reader that went away, is an error to report, not a kill: a
    // killed run leaves its files on NVMe.
    std::signal(SIGXFSZ, SIG_IGN);
    std::signal(SIGPIPE, SIG_IGN);
    CLI::App app{
        "ferry trains models larger than memory by moving their state between device, host and "
        "NVMe",
        "ferry"};
    app.require_subcommand(1);
    app.set_version_flag("--version", "ferry " FERRY_VERSION);
    add_train_command(app);
    add_plan_command(app);
    add_data_command(app);
    add_eval_command(app);
    add_export_command(app);
    add_ckpt_command(app);
    add_launch_command(app);
    add_bench_command(app);
    app.footer(
        "`ferry COMMAND --help` has the options of a command, and an example.\n"
        "Example: ferry train my.json --set steps=100 --json");
    ferry::tools::refuse_empty(app);
    try {
        ferry::require_stack();
        parse(app, ferry::tools::words_of(argc, argv));
        ferry::tools::check_output();
        return 0;
    } catch (const ferry::tools::RankError& error) {
        end(error);
    } catch (const ferry::Error& error) {
        end(error);
    } catch (const std::bad_alloc&) {
        end(out_of_memory());
    } catch (const std::filesystem::filesystem_error& error) {
        end(unusable(error));
    } catch (const std::system_error& error) {
        end(as_named(error));
    } catch (const std::exception& error) {
        end(ferry::shown(error.what(), 1000).c_str(), static_cast<int>(ferry::Trouble::internal));
    }
}
