// The stack below a plan: threads, the arenas of device and host, storage, kernels and the store.
// It is brought up in five stages, in this order, each of them once:
//
//   plan     a plan that the machine has memory for; takes nothing
//   reserve  the arenas, with their buffers page-locked
//   open     the volume's files, the kernels and the store
//   warm     a GPU has loaded its kernels, and holds the memory that they take
//   fill     every object has contents, and all host memory is page-locked
//
// A stage out of its turn is a bug. A stage that throws closes the stack: files, page-locked and
// reserved memory are given back, only the team's threads stay. They go with the stack.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/pinned_mem.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "model/model.h"
#include "ops/ops.h"
#include "planner/planner.h"
#include "start_up.h"
#include "swap/store.h"
#include "topology/topology.h"
#include "train/kernels/kernel_exchange.h"
#include "train/kernels/step_kernels.h"
#include "train/kernels/step_state.h"
#include "train/setup/rank_share.h"
#include "warm_up.h"

namespace ferry::train {

class TierStack {
public:
    // The stack borrows all of it; it must outlive the stack.
    struct Ground {
        const Config& config;
        const RankShare& share;  // this rank's
        Executor& executor;
        Device& device;
        Topology machine{};  // that this rank may use
        int ranks = 1;
        Progress progress{};             // of the start-up; may be empty
        pinned_mem::Allocator memory{};  // the host's; none: the system's
    };
    struct Model {
        model::Shape shape{};
        model::Numerics numerics{};
        std::vector<model::Layer> layers{};
        // Optional: decoder and kernels call what this returns instead of the stack's own
        // operations, such as a layer that times them. It must outlive the stack.
        std::function<ops::Ops&(ops::Ops& own)> around{};
        KernelExchanges exchanges{};  // with the ranks that share sequences or tensors
    };

    // Starts the team's threads and takes nothing else. Without a model there are no operations and
    // no decoder: nothing but updates is computed.
    TierStack(Ground ground, std::optional<Model> model);
    // close(), and the threads end.
    ~TierStack();
    TierStack(const TierStack&) = delete;
    TierStack& operator=(const TierStack&) = delete;

    // ---- stages

    // The first stage. It takes the plan, and no memory. Throws does_not_fit where the machine has
    // less memory left than the plan needs.
    void plan(planner::Plan plan);

    struct Reserving {
        int64_t host_budget_bytes = 0;  // that no slab may exceed
        std::string name = "state and staging";
    };
    // After plan(). Reserves the device's arena and the host's, and page-locks the host's buffers.
    // With a GPU, the homes in the host arena are not touched yet. Throws does_not_fit.
    void reserve(const Reserving& reserving);

    struct Opening {
        // Volume: as Runtime::open_volume, and what of its options the configuration does not say.
        std::function<std::unique_ptr<aio::Volume>(aio::VolumeOptions, Executor&)> open_volume =
            &aio::Volume::open;
        uint64_t run_id = 0;
        bool resume = false;  // takes over what a run of this id left
        // Optional: whether the run whose durable state is found, of this id, has come to its end.
        // Nobody goes on from it then, and it is removed.
        std::function<bool(const aio::Volume&)> has_ended{};
        bool lays_out_later = false;  // by fill(), and not where first contents were written
        aio::Tracer tracer{};
        // Kernels: what they read of a run, beside the stack's own model and device.
        const Batches* loader = nullptr;
        int64_t evaluation_micro_batches = 0;
        WorkerRows* workers = nullptr;
        // Optional: the store calls these kernels instead of the step's. They may call those.
        std::function<std::unique_ptr<swap::Kernels>(StepKernels&)> instead{};
        // Store.
        trace::Recording* recording = nullptr;
        std::array<trace::RowId, swap::kLanes> rows{};
        swap::Collectives* collectives = nullptr;
        // The plan's objects have no place: its buffers alone are used, to measure on. No volume.
        bool buffers_alone = false;
    };
    // After reserve(). It seals the pool's memory, and makes the files where the plan stores
    // anything. All that `opening` names must outlive the stack, and so must the schedules that its
    // store is given. Throws usage, io or does_not_fit.
    void open(const Opening& opening);

    // After open(), before anything has contents. It runs the kernels of `step`, and its updates
    // with these scalars. So a GPU takes all the memory that it will take. Throws does_not_fit
    // where that is more than the budget. On the CPU device it does nothing.
    void warm(const swap::Schedule& step, const ScalarsByKind& scalars);

    // After open(), and after warm() where that is called. `contents` gives every object its first
    // contents, through the store or in place. It may call lock_homes() and homes_locked(). Where
    // it does not, fill() does afterwards. fill() also lays out the free slots. Throws what
    // `contents` throws, io and does_not_fit.
    void fill(const std::function<void()>& contents);

    // Within fill(): begins to page-lock the rest of host memory in the background. The driver does
    // one thing at a time, so make copies to a GPU before.
    void lock_homes();
    void homes_locked();  // waits for that

    // Waits for what is under way, then gives back everything but the threads. It may be called at
    // any stage, and again. The device keeps its arena.
    void close() noexcept;

    // ---- what it has

    Executor& executor() const { return ground_.executor; }
    Device& device() const { return ground_.device; }
    const Topology& machine() const { return ground_.machine; }
    NodeTeams& teams() const { return *teams_; }
    ops::Ops& ops() const { return *called_; }                   // with a model
    const model::Decoder& decoder() const { return *decoder_; }  // with a model
    const planner::Plan& plan() const { return plan_; }          // empty before its stage
    pinned_mem::Pool& pool() { return *pool_; }                  // from reserve() on, as the arena
    std::span<std::byte> arena() const { return arena_; }
    bool is_open() const { return store_ != nullptr; }
    aio::Volume* volume() const { return volume_.get(); }  // null: nothing is stored
    StepKernels& kernels() { return *kernels_; }           // from open() on, as the store
    swap::Store& store() const { return *store_; }
    Bench bench();
    Reserved reserved() const;
    StartUp& start_up() { return start_up_; }

private:
    void place_patterns();
    void make_muon();
    enum class Stage : uint8_t { none, planned, reserved, open, warm, filled, closed };
    template <class Work>
    void stage(std::initializer_list<Stage> after, Stage next, const Work& work);
    std::unique_ptr<aio::Volume> volume_of(const Opening& opening) const;
    bool finds_ended(const Opening& opening, const aio::VolumeOptions& options) const;
    swap::StoreOptions store_options(const Opening& opening) const;

    const Ground ground_;
    StartUp start_up_{ground_.executor, ground_.progress};
    Stage stage_ = Stage::none;
    std::unique_ptr<NodeTeams> teams_;
    std::unique_ptr<ops::Ops> ops_{};
    ops::Ops* called_ = nullptr;  // ops_, or what is around them
    KernelExchanges exchanges_{};
    std::optional<model::Decoder> decoder_{};
    planner::Plan plan_{};
    // Each of these uses those before it.
    std::optional<pinned_mem::Pool> pool_{};
    std::span<std::byte> arena_{};
    std::unique_ptr<aio::Volume> volume_{};
    std::optional<Muon> muon_{};
    std::optional<StepKernels> kernels_{};
    std::unique_ptr<swap::Kernels> instead_{};
    std::unique_ptr<swap::Store> store_{};
    std::future<void> homes_{};  // valid: lock_homes() is under way
    bool homes_begun_ = false;
};

}  // namespace ferry::train
