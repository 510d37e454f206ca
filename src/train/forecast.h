// What a step would take: figures of a machine, each measured alone, and a plan's schedules
// simulated with them. Engine compares the same figures with what it measures; `ferry
// plan` needs neither tokens nor the memory of a run.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/config.h"
#include "planner/recorder.h"
#include "swap/schedule.h"

namespace ferry::train {

// ---------------------------------------------------------------- figures

// Link speeds of this machine, each measured alone. 0: not known.
struct LinkSpeeds {
    double copy_bytes_per_s = 0;    // host <-> device, one direction
    double nvme_bytes_per_s = 0;    // reads and writes mixed, all paths; 0: no NVMe
    double dram_bytes_per_s = 0;    // as the optimizer's update reaches alone
    double device_bytes_per_s = 0;  // the same in the device's memory, by the device
    double dram_per_nvme_byte = 1;  // DRAM traffic that a byte from or to storage costs
    // Seconds of a core for the same, checks left out: much where processors copy it (tmpfs).
    double cores_per_nvme_byte = 0;
    double comm_bytes_per_s = 0;  // that reach a rank from the others; 0: as copies do
    double comm_overhead_s = 0;   // of an operation between the ranks, however small
};

struct Machine {
    LinkSpeeds links{};
    double check_bytes_per_s = 0;  // of one thread
    double update_overhead_s = 0;  // of an update, however small: its threads have to meet
    double out_of_place = 1;       // seconds of an update to a fresh slot, of one in place
    int threads = 1;               // of the team
    bool computes_on_host = true;  // kernels and copies take the team's cores
};

// Seconds of a step's compute kernels, each kind measured alone once it is warm.
struct KernelTimes {
    // planner::Op, model::LayerKind, and bytes, elements or flags, whatever the Op has
    using Kind = std::array<int64_t, 3>;
    static std::string name_of(const Kind& kind);  // "backward, block", "zero, head, 1.06 MiB"
    std::map<Kind, double> seconds{};
    double gemm_flops_per_s = 0;  // the best that a large product reaches; 0: not known
    // What gives each result that a block may keep for backward, alone. 0: not known.
    model::OfSaved<double> saved_s{};
    // A kernel of a size that was not measured, as with other chunks, costs by its bytes what the
    // nearest one did; a block's backward that keeps other results what a measured one did, and
    // what gives those. One of a kind that was not measured is a bug: see covers().
    double of(const swap::Task& task, const planner::Plan& plan) const;
    bool covers(const swap::Schedule& step, const planner::Plan& plan) const;
    double sum(const swap::Schedule& step, const planner::Plan& plan) const;
    // Of a block's backward, the part that keeping this result saves, or has saved.
    double saved_by(model::Saved what, const swap::Task& backward, const planner::Plan& plan) const;
};

struct Figures {
    Machine machine{};
    KernelTimes kernels{};
};

// ---------------------------------------------------------------- forecast

// A link of a plan: what a step moves over it, and the seconds that takes with nothing beside it.
struct LinkForecast {
    std::string link{};
    int64_t bytes = 0;
    double seconds = 0;
};

// Of state and the gradients that wait with it, on each tier.
struct StateShares {
    double device = 0, host = 0, nvme = 0;
};

struct Forecast {
    swap::Schedule schedule{};  // of a step among many
    swap::Timeline timeline{};  // its `step_seconds` is the prediction
    bool speculative = false;   // speculative updates that are committed; else none
    std::vector<LinkForecast> links{};
    // Of any placement that the budgets allow, and the link that sets it.
    double bound_seconds = 0;
    std::string bound_link{};
    StateShares planned{}, bound{};  // where the plan has them, and where the bound would
    // Of the blocks that backward visits, those that keep each result for it.
    model::OfSaved<double> planned_kept{}, bound_kept{};
    const LinkForecast& binding() const;  // the link that takes longest: the plan's own bound
};

// What a schedule moves on each lane, to the byte.
struct ScheduleBytes {
    std::string name{};
    std::array<int64_t, swap::kLanes> bytes{};
};
// Every schedule that a run of this plan may replay: its steps, and what ends it.
std::vector<ScheduleBytes> schedule_bytes(const planner::Plan& plan);
ScheduleBytes steady_bytes(
    const planner::Plan& plan);  // of a step without speculative updates among its like

// The plan that Engine::make would work by; touches neither tokens nor disks. Throws Error.
planner::Plan plan_for(const Config& config);
// What the plans of a run are weighed with where nothing is known: "small machine".
std::string_view default_figures_name(const Config& config);

// Of a run: how many there are, and how many of them share a host.
struct RankCount {
    int ranks = 1, on_a_host = 1;
    int gpu = 0;  // of this one's host: which it opens
};

// A device of another machine, as that one's figures describe it. 0: not known.
struct AbsentDevice {
    std::string architecture{};  // "cuda sm_90"
    std::string kernels{};       // Forecaster::kernels_text there
    int64_t memory_bytes = 0;    // that a process can have of it, all told
    planner::DeviceNeeds needs{};
    int threads = 1;  // of the team beside it
};

// Plans one model on one device again and again, with other budgets, and says what a step would
// take: with several ranks each of them. Touches neither tokens nor disks.
class Forecaster {
public:
    // Opens the device, and reserves nothing on it. Throws Error.
    static std::unique_ptr<Forecaster> make(const Config& config, const RankCount& count = {});
    // For a device that is not here: nothing is opened, and measure() throws usage. What the
    // kernels' scratch is not known to be is taken to be as much as the CPU's need.
    static std::unique_ptr<Forecaster> make(const Config& config, const RankCount& count,
                                            const AbsentDevice& device);
    ~Forecaster();
    Forecaster(const Forecaster&) = delete;
    Forecaster& operator=(const Forecaster&) = delete;

    // What is known of the machine: later plans are weighed with it, earlier ones were with the
    // defaults. Storage: as `links.nvme_bytes_per_s`, where that is above 0.
    void plan_by(const std::optional<Machine>& machine, const std::optional<KernelTimes>& kernels);
    // `config` differs from that of make() at most in budgets, swap and io. Throws does_not_fit.
    planner::Plan plan(const Config& config) const;
    // Everything but storage, on device memory and staging memory as large as the plan's buffers.
    // Memory: as a run of this plan meets it, in the caches where all of its state fits into them,
    // or as a large model does. Once; blocks for seconds. Throws Error.
    enum class Memory : uint8_t { of_plan, of_machine };
    Figures measure(const planner::Plan& plan, Memory memory);
    Forecast forecast(const Config& config, const planner::Plan& plan,
                      const Figures& figures) const;
    // Whether a step of this plan can be forecast by these times.
    bool covers(const planner::Plan& plan, const KernelTimes& times) const;
    // What the kernels' times depend on, as text: model, micro-batch, numerics, device, threads.
    std::string kernels_text() const;
    // What the text begins with on every device.
    std::string model_text() const;
    std::string device_text() const;
    // Of the device's memory: what this process can have, and what it needs beside its buffers.
    int64_t device_bytes() const;
    planner::DeviceNeeds needs() const;
    bool is_here() const;
    RankCount count() const;
    // By arithmetic, where nobody has measured: the operations of the products at the default
    // rate, everything else by its bytes. Links as the defaults, too.
    Figures assumed(const planner::Plan& plan) const;
    int threads() const;

private:
    class ModelOnDevice;
    explicit Forecaster(std::unique_ptr<ModelOnDevice> model);
    const std::unique_ptr<ModelOnDevice> model_;
};

}  // namespace ferry::train
