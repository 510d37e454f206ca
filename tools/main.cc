// `ferry`: one program, one subcommand a file.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>

#include "commands.h"
#include "ferry/base.h"

int main(int argc, char** argv) {
    std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit is an error to report, not a kill
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
        return app.exit(error) == 0 ? 0 : static_cast<int>(ferry::Trouble::usage);
    } catch (const ferry::Error& error) {
        std::fprintf(stderr, "ferry: %s\n", error.what());
        return error.exit_code();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "ferry: %s\n", error.what());
        return static_cast<int>(ferry::Trouble::internal);
    }
}
