#include "interrupt.h"

#include <csignal>
#include <cstdio>
#include <initializer_list>

#include "base/files.h"

namespace ferry::tools {
namespace {

volatile std::sig_atomic_t caught = 0, count = 0;

// The default disposition was restored on the way in, the signal is blocked until it returns.
void end_tidily(int signal) {
    remove_drafts();
    std::raise(signal);
}

void end_tidily_at(int signal) {
    struct sigaction action {};
    action.sa_handler = end_tidily;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(signal, &action, nullptr);
}

void request(int signal) {
    caught = signal;
    count = count + 1;
    if (signal != SIGUSR1) end_tidily_at(signal);  // a second one
}

}  // namespace

void leave_no_drafts() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        struct sigaction inherited {};
        sigaction(signal, nullptr, &inherited);
        if (inherited.sa_handler != SIG_IGN) end_tidily_at(signal);
    }
}

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
