#include "start_up.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "base/progress.h"
#include "ferry/units.h"

namespace ferry::train {

void StartUp::at(const char* stage, int64_t bytes, int64_t of) {
    if (progress_ && of > 0 && executor_.now() - told_ >= kBetween) {
        progress_(stage, bytes, of);
        told_ = executor_.now();
    }
    if (seconds_since(said_) < 10 || of == 0) return;
    log_info(fmt::format("{}: {}", stage, progress_text(bytes, of, seconds())));
    said_ = executor_.now();
}

void StartUp::done(const char* stage, int64_t bytes) {
    if (progress_) progress_(stage, bytes, bytes);
    if (seconds() >= 1)
        log_info(fmt::format("{}: {} in {:.1f} s, {:.2f} GB/s", stage, format_bytes(bytes),
                             seconds(), static_cast<double>(bytes) * 1e-9 / seconds()));
    next();
}

}  // namespace ferry::train
