// The bytes that a volume's layout writes. Its counters have them together with its probes' writes.
#pragma once

#include <atomic>
#include <memory>

#include "ferry/aio.h"

namespace ferry::aio {

struct LaidOut {
    std::unique_ptr<std::atomic<int64_t>> bytes = std::make_unique<std::atomic<int64_t>>(0);
    std::unique_ptr<Volume> volume{};
    int64_t layout_bytes = 0;
};

inline LaidOut open_and_count(VolumeOptions options, Executor& executor) {
    LaidOut laid_out;
    options.tracer = {.transfer =
                          [](void* context, const TransferTrace& trace) {
                              if (trace.verb == Verb::write)
                                  *static_cast<std::atomic<int64_t>*>(context) += trace.bytes;
                          },
                      .context = laid_out.bytes.get()};
    laid_out.volume = Volume::open(std::move(options), executor);
    laid_out.layout_bytes = *laid_out.bytes;
    return laid_out;
}

}  // namespace ferry::aio
