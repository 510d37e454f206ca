// `ferry`: one program, one subcommand a file.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>

#include "commands.h"
#include "ferry/base.h"

namespace {

int report(const ferry::Error& error) {
    std::fprintf(stderr, "ferry: %s\n", error.what());
    return error.exit_code();
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

}  // namespace

int main(int argc, char** argv) {
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
    add_bench_command(app);
    try {
        app.parse(argc, argv);
        check_output();
        return 0;
    } catch (const CLI::ParseError& error) {
        // Help and version are "errors" of code 0; every other one is a usage error.
        if (error.get_exit_code() == 0) return app.exit(error);
        return report(usage_error(app, error));
    } catch (const ferry::Error& error) {
        return report(error);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "ferry: %s\n", error.what());
        return static_cast<int>(ferry::Trouble::internal);
    }
}
