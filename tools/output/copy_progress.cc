#include "copy_progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/log.h"
#include "base/progress.h"
#include "base/text.h"

namespace ferry::tools {
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
    const std::string text = one_line(what_) + ": " + progress_text(bytes, of, seconds());
    if (!terminal_) return log_info(text);
    std::fprintf(stderr, "\r\033[K%s", text.c_str());
    std::fflush(stderr);
    shown_ = true;
}

}  // namespace ferry::tools
