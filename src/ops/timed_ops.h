// Operations that say what each of their calls took: a measuring layer around those of a device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/part_attention.h"

namespace ferry::ops {

struct OpCall {
    std::string name{};     // "product nt", "attention forward"
    std::string shape{};    // "16384 x 5120 x 3072, bf16"
    double flops = 0;       // products', and attention's over the keys that are seen
    double bytes = 0;       // each operand read or written once
    double seconds = 0;     // with the gap before it, between two events of the stream
    int64_t launches = -1;  // kernels, copies and fills; -1: not known
};

class TimedOps {
public:
    // Both must outlive it.
    TimedOps(Ops& ops, Device& device);
    ~TimedOps();
    TimedOps(const TimedOps&) = delete;
    TimedOps& operator=(const TimedOps&) = delete;

    enum class Mode : uint8_t {
        off,    // calls go through
        time,   // and are timed
        count,  // are not run: what they would launch is counted. On the CPU they are run
    };
    // Notes every call from here on. Inside a job of the compute stream.
    void begin(Mode mode);
    Ops& ops();
    // Anything else that a job enqueues, beside operations.
    void note(OpCall what, const std::function<void()>& work);
    // Waits for the stream; the calls since begin(), in their order. Back to `off`.
    std::vector<OpCall> take();

private:
    class Layer;
    const std::unique_ptr<Layer> layer_;
};

}  // namespace ferry::ops
