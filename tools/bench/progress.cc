#include "progress.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <cstdio>

#include "base/text.h"

namespace ferry::tools {

Progress::Progress(int total)
    : total_(total), terminal_(isatty(STDERR_FILENO) == 1), begin_(Clock::now()), last_(begin_) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
    if (terminal_ && shown_) std::fputs("\r\033[K", stderr);
}

void Progress::show(int done, const std::string& text) {
    const auto now = Clock::now();
    const std::chrono::duration<double> since = now - last_, gone = now - begin_;
    constexpr double kTerminalSeconds = 0.1, kLogSeconds = 5;
    if (since.count() < (terminal_ ? kTerminalSeconds : kLogSeconds) && shown_) return;
    last_ = now;
    shown_ = true;
    std::string left;
    if (done > 0) left = fmt::format(", {:.0f} s left", gone.count() / done * (total_ - done));
    // Files' names may hold anything. Nobody who reads it is no reason to end.
    const std::string line = fmt::format("{}[{}/{}{}] {}{}", terminal_ ? "\r\033[K" : "", done,
                                         total_, left, one_line(text), terminal_ ? "" : "\n");
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);
}

}  // namespace ferry::tools
