// `ferry`: one program, one subcommand a file.
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "comm/comm.h"
#include "commands.h"
#include "ferry/error.h"
#include "ops/ops.h"

namespace {

// Everything of ferry's is unwound by now. What libraries do at a normal exit may wait for ever for
// memory or threads that they did not get.
[[noreturn]] void end(const char* message, int exit_code) {
    std::fflush(stdout);
    std::fprintf(stderr, "ferry: %s\n", message);
    std::_Exit(exit_code);
}

[[noreturn]] void end(const ferry::Error& error) { end(error.what(), error.exit_code()); }

ferry::Error out_of_memory() {
    return {ferry::Trouble::does_not_fit,
            {.what = "the process is not given the memory it asks for",
             .limit = "ulimit -v, the container's or the machine's memory",
             .remedy = "raise the limit, or lower budgets.host, budgets.device or threads"}};
}

ferry::Error usage_error(const CLI::App& app, const CLI::ParseError& error) {
    std::string command = "ferry";
    for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
        at = at->get_subcommands().front();
        command += " " + at->get_name();
    }
    return {ferry::Trouble::usage,
            {.what = error.what(), .where = command, .remedy = command + " --help"}};
}

// OpenBLAS reads its choice when it is loaded: for a better one this program starts once more. What
// the environment says stands.
void choose_blas_core(char** argv) {
    if (std::getenv("OPENBLAS_CORETYPE") != nullptr) return;
    const std::string core = ferry::ops::better_blas_core();
    if (core.empty() || setenv("OPENBLAS_CORETYPE", core.c_str(), 0) != 0) return;
    execv("/proc/self/exe", argv);  // where this fails, the slower kernels do
}

// Several ranks write to one terminal. What the environment says stands: `ferry launch` labels
// whole lines, errors too.
void label_log() {
    if (const auto rank = ferry::comm::launched_rank())
        setenv("FERRY_LOG_LABEL", ("rank " + std::to_string(*rank)).c_str(), 0);
}

}  // namespace

int main(int argc, char** argv) {
    label_log();
    choose_blas_core(argv);
    // A file over the limit, or a reader that went away, is an error to report, not a kill: a
    // killed run leaves its files on NVMe.
    std::signal(SIGXFSZ, SIG_IGN);
    std::signal(SIGPIPE, SIG_IGN);
    CLI::App app{
        "ferry trains models larger than memory by moving their state between device, host and "
        "NVMe"};
    app.require_subcommand(1);
    app.set_version_flag("--version", "ferry " FERRY_VERSION);
    add_train_command(app);
    add_plan_command(app);
    add_data_command(app);
    add_eval_command(app);
    add_export_command(app);
    add_launch_command(app);
    add_bench_command(app);
    try {
        app.parse(argc, argv);
        check_output();
        return 0;
    } catch (const CLI::ParseError& error) {
        // Help and version are "errors" of code 0; every other one is a usage error.
        if (error.get_exit_code() == 0) return app.exit(error);
        end(usage_error(app, error));
    } catch (const ferry::Error& error) {
        end(error);
    } catch (const std::bad_alloc&) {
        end(out_of_memory());
    } catch (const std::exception& error) {
        end(error.what(), static_cast<int>(ferry::Trouble::internal));
    }
}
