// Foundations every module stands on: errors, units, random numbers, time and threads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ferry {

// ---------------------------------------------------------------- errors

// What kind of trouble an Error reports. The value of each is the exit code of the `ferry` program.
enum class Trouble : int {
    internal = 1,      // a bug in ferry
    usage = 2,         // configuration, command line, environment
    does_not_fit = 3,  // a budget is too small for what was asked
    io = 4,            // storage failed, or bytes came back wrong
    diverged = 5,      // NaN or Inf in loss or gradient
    rank_lost = 6,     // another rank ended, or did not take part in time
};

// One clear error: what went wrong, where, the measured value, the limit it met, and what to do.
// Empty fields are left out of the message.
struct Problem {
    std::string what;
    std::string where{};
    std::string measured{};
    std::string limit{};
    std::string remedy{};
};

class Error : public std::runtime_error {
public:
    Error(Trouble trouble, Problem problem);
    Trouble trouble() const noexcept { return trouble_; }
    const Problem& problem() const noexcept { return problem_; }
    int exit_code() const noexcept { return static_cast<int>(trouble_); }

private:
    Trouble trouble_;
    Problem problem_;
};

// A bug aborts: prints the condition, the values and the place, then calls std::abort. Stays on in
// release builds.
#define FERRY_CHECK(condition, ...) \
    (static_cast<bool>(condition) ? void(0) : ::ferry::bug(#condition __VA_OPT__(, ) __VA_ARGS__))
[[noreturn]] void bug(const char* condition, std::string_view detail = {},
                      std::source_location where = std::source_location::current());

// Log lines go to standard error through spdlog; the level comes from FERRY_LOG (debug, info, warn,
// error; default info).
void log_debug(std::string_view message);
void log_info(std::string_view message);
void log_warn(std::string_view message);

// ---------------------------------------------------------------- units

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t round_down(int64_t value, int64_t multiple) {
    return value / multiple * multiple;
}
constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
    return (value + divisor - 1) / divisor;
}

// "64MiB", "1.5 GiB", "4096", "2GB" -> bytes. Throws Trouble::usage naming `where`.
int64_t parse_bytes(std::string_view text, std::string_view where);
// 1610612736 -> "1.50 GiB"; exact below 1 KiB.
std::string format_bytes(int64_t bytes);
// The word of `known` nearest to `word` by edit distance; empty when none is near, unless it may be
// however far.
std::string nearest_word(std::string_view word, std::span<const std::string> known,
                         bool however_far = false);

// ---------------------------------------------------------------- numbers

enum class DType : uint8_t { f32, bf16, f16 };
constexpr int64_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }
std::string_view name_of(DType type);  // "fp32", "bf16", "fp16"
std::optional<DType> dtype_from_name(std::string_view name);

// Round to nearest, ties to even; NaN stays a NaN.
uint16_t to_bf16(float value) noexcept;
float from_bf16(uint16_t bits) noexcept;
uint16_t to_f16(float value) noexcept;
float from_f16(uint16_t bits) noexcept;

// How an optimizer's state is kept: arrays of the master weight and of the moments, in this order.
struct StateFormat {
    int64_t moments = 2;             // 0 to 2
    DType moment_type = DType::f32;  // or bf16
    bool split = false;              // of the master only the low 16 bits: the weight has the rest
    int64_t master_bytes() const { return split ? 2 : 4; }  // of an element
    int64_t element_bytes() const { return master_bytes() + moments * size_of(moment_type); }
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// numerics.md: key = (seed, purpose), counter = (step, global sequence, site, element).
enum class Purpose : uint32_t { initialise = 1, shuffle = 2, stochastic_rounding = 3, test = 4 };
struct PhiloxKey {
    uint32_t seed;
    Purpose purpose;
};
std::array<uint32_t, 4> philox(PhiloxKey key, std::array<uint32_t, 4> counter) noexcept;
// The normal deviate of one counter: Box-Muller in double, rounded once to float.
float philox_normal(PhiloxKey key, std::array<uint32_t, 4> counter) noexcept;

// XXH3 64-bit of the bytes: the checksum of storage pieces and of the run's final hash.
uint64_t checksum(std::span<const std::byte> bytes) noexcept;

// ---------------------------------------------------------------- time and threads

using Nanos = int64_t;  // monotonic, from an arbitrary start
constexpr Nanos kForever = std::numeric_limits<Nanos>::max();

// Sleeps between two looks at something that takes its time: an eighth of what was waited so far,
// 2 to 50 us. Short work is seen at once, long work costs little.
void nap_after(Nanos waited) noexcept;
// Binds the calling thread to these cores. False where it may not run on any of them, with errno.
bool run_on(std::span<const int> cores) noexcept;

// A piece of work without an allocation. `run` must not throw; the job's owner carries errors in
// its context.
struct Job {
    void (*run)(void* context, uint64_t argument) = nullptr;
    void* context = nullptr;
    uint64_t argument = 0;
    // What the simulated executor charges for it; 0 lets it draw a seeded duration.
    Nanos simulated_ns = 0;
};

// Something with a thread of its own that blocks in the kernel rather than in the executor: an
// io_uring. Real executors call turn(kForever) in a loop on the service's thread; the simulated one
// calls turn(now) on the one thread whenever virtual time reaches next_event().
class Service {
public:
    virtual ~Service() = default;
    virtual std::string_view name() const = 0;
    // Takes what was submitted, moves it on, delivers what finished. May block until `until`, or
    // until interrupt().
    virtual void turn(Nanos until) = 0;
    // Any thread: makes a blocked turn() return soon, or the next one not block.
    virtual void interrupt() = 0;
    // Virtual time of the next thing turn() would do, kForever if none. Simulation only.
    virtual Nanos next_event() const { return kForever; }
};

using LaneId = uint32_t;

// Owns every thread. One thread, "the step thread", calls add_lane, host, post and wait; jobs run
// on lanes, in order within a lane.
class Executor {
public:
    virtual ~Executor() = default;
    // At start-up only. `lane_depth` jobs can be posted and not yet finished.
    virtual LaneId add_lane(std::string name, int lane_depth = 1024) = 0;
    virtual void host(Service& service) = 0;
    virtual void retire(Service& service) = 0;  // returns when turn() will not be called again
    // Never allocates; a full lane is a bug of the caller, who bounds what it posts.
    virtual void post(LaneId lane, Job job) = 0;
    // Step thread: sleeps until wake() was called since the last wait returned, or until `until`.
    // The simulated executor runs the next event instead of sleeping; when there is no event before
    // kForever it aborts with "deadlock": nothing could ever wake it.
    virtual void wait(Nanos until) = 0;
    virtual void wake() noexcept = 0;  // any thread
    virtual Nanos now() const noexcept = 0;
    virtual bool simulated() const noexcept { return false; }
};

std::unique_ptr<Executor> make_thread_executor();
// One thread, virtual time: the same seed runs the same events in the same order.
std::unique_ptr<Executor> make_simulated_executor(uint64_t seed);

}  // namespace ferry
