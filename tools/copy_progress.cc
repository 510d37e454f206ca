#include "copy_progress.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "ferry/units.h"

namespace ferry::tools {
namespace {

std::string time_text(double seconds) {
    const auto whole = static_cast<int64_t>(std::ceil(seconds));
    if (whole < 60) return fmt::format("{} s", whole);
    if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
    return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

}  // namespace

std::string progress_text(int64_t bytes, int64_t of, double seconds) {
    const double rate = seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
    std::string text =
        fmt::format("{} of {} ({:.0f} %)", format_bytes(bytes), format_bytes(of),
                    of > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(of) : 100.0);
    if (rate <= 0) return text;
    text += fmt::format(", {:.2f} GB/s", rate * 1e-9);
    return bytes < of ? text + ", " + time_text(static_cast<double>(of - bytes) / rate) + " left"
                      : text;
}

CopyProgress::CopyProgress(std::string what, const Executor& executor)
    : what_(std::move(what)),
      executor_(executor),
      terminal_(::isatty(STDERR_FILENO) == 1),
      began_(executor.now()),
      said_(began_) {}

CopyProgress::~CopyProgress() {
    if (shown_) std::fputs("\r\033[K", stderr);
}

double CopyProgress::seconds() const {
    return static_cast<double>(executor_.now() - began_) * 1e-9;
}

void CopyProgress::at(int64_t bytes, int64_t of) {
    const double since = static_cast<double>(executor_.now() - said_) * 1e-9;
    const double wanted = !terminal_ ? 10 : shown_ ? 0.2 : 1;
    if (since < wanted) return;
    said_ = executor_.now();
    const std::string text = what_ + ": " + progress_text(bytes, of, seconds());
    if (!terminal_) return log_info(text);
    std::fprintf(stderr, "\r\033[K%s", one_line(text).c_str());
    std::fflush(stderr);
    shown_ = true;
}

}  // namespace ferry::tools
