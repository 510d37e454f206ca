#include "interrupt.h"

#include <csignal>
#include <cstdio>
#include <initializer_list>

namespace ferry::tools {
namespace {

volatile std::sig_atomic_t caught = 0;

}  // namespace

void catch_interrupts() {
    struct sigaction action {};
    action.sa_handler = [](int signal) { caught = signal; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        // Whoever started this one may want it to outlive the signal, as nohup does.
        struct sigaction inherited {};
        sigaction(signal, nullptr, &inherited);
        if (inherited.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
    }
}

bool interrupted() noexcept { return caught != 0; }

void end_if_interrupted() {
    if (!interrupted()) return;
    std::fflush(nullptr);
    std::signal(caught, SIG_DFL);
    std::raise(caught);
}

}  // namespace ferry::tools
