#include "interrupt.h"

#include <csignal>
#include <cstdio>
#include <initializer_list>

namespace ferry::tools {
namespace {

volatile std::sig_atomic_t caught = 0, count = 0;

void request(int signal) {
    caught = signal;
    count = count + 1;
}

}  // namespace

void catch_interrupts() {
    struct sigaction action {};
    action.sa_handler = request;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
        // nohup wants this one to outlive its terminal. A shell ignores SIGINT for what it starts
        // behind it; whoever sends one to that means it.
        struct sigaction inherited {};
        sigaction(signal, nullptr, &inherited);
        if (signal == SIGHUP && inherited.sa_handler == SIG_IGN) continue;
        action.sa_flags = SA_RESTART;
        if (signal != SIGUSR1) action.sa_flags |= static_cast<int>(SA_RESETHAND);
        sigaction(signal, &action, nullptr);
    }
}

int requests() noexcept { return count; }

void end_if_interrupted() {
    if (!interrupted()) return;
    std::fflush(nullptr);
    std::signal(caught, SIG_DFL);
    std::raise(caught);
}

}  // namespace ferry::tools
