// Ranks over NCCL: device memory. NCCL is asked never to block, so that a rank that is missing ends
// in a named error and ncclCommAbort, not in a hang. It does not say whom it waits for: that is
// known by the communicator through which the ranks met.
#ifdef FERRY_NCCL

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "alike.h"
#include "base/threads.h"
#include "comm_thread.h"

namespace ferry::comm {
namespace {

// An error of NCCL's is often another rank's end. This long the ranks' news may tell which.
constexpr Nanos kHearsay = 5'000'000'000;
constexpr Topic kMeeting{.of = "NCCL unique ids"};
constexpr Topic kMachines{.of = "machines"};

Error refused(const std::string& call, const std::string& measured) {
    return {Trouble::internal,
            {.what = "NCCL or the GPU refused a call",
             .where = call,
             .measured = measured,
             .remedy = "set NCCL_DEBUG=WARN to see what NCCL says of it"}};
}
void demand(cudaError_t status, const char* call) {
    if (status != cudaSuccess) throw refused(call, cudaGetErrorString(status));
}
// In progress is no error: whoever asks for more looks first whether it has ended.
void demand(ncclResult_t status, const char* call) {
    if (status != ncclSuccess && status != ncclInProgress)
        throw refused(call, ncclGetErrorString(status));
}

template <auto kFree>
struct FreedBy {
    template <class T>
    void operator()(T* what) const noexcept {
        kFree(what);
    }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, FreedBy<cudaStreamDestroy>>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, FreedBy<cudaEventDestroy>>;
using OnDevice = std::unique_ptr<std::byte, FreedBy<cudaFree>>;
using OnHost = std::unique_ptr<std::byte, FreedBy<cudaFreeHost>>;
// One that has not been left in order waits for nobody.
using Comm = std::unique_ptr<std::remove_pointer_t<ncclComm_t>, FreedBy<ncclCommAbort>>;

// A rank's own data, exchanged before the ranks can use NCCL.
struct Card {
    ncclUniqueId id{};
    GpuId gpu{};
};

class Nccl final : public Transport {
public:
    // With `bootstrap`, `ranks` is not looked at.
    Nccl(Device& device, Executor& executor, std::unique_ptr<CommThread> bootstrap, NcclRanks ranks,
         const CommOptions& options)
        : device_(device),
          executor_(executor),
          options_(options),
          bootstrap_(std::move(bootstrap)),
          until_(executor.now() + static_cast<Nanos>(options.timeout_seconds * 1e9)) {
        FERRY_CHECK(device.kind() == DeviceKind::cuda, "NCCL moves a GPU's memory");
        if (bootstrap_) ranks = meet();
        place_ = {.rank = ranks.rank, .size = ranks.size};
        make_stream();
        if (!bootstrap_) stage();
        join(ranks);
        place_ = bootstrap_ ? bootstrap_->place() : introduce();
    }
    ~Nccl() override { leave(); }
    Nccl(const Nccl&) = delete;
    Nccl& operator=(const Nccl&) = delete;

    std::string_view kind() const noexcept override { return "nccl"; }
    RankPlace place() const noexcept override { return place_; }
    bool uses_streams() const noexcept override { return true; }
    CommThread* watch() const override { return bootstrap_.get(); }

    std::unique_ptr<Transport> group(Communicator& of, std::span<const int> members) override {
        if (bootstrap_) {
            auto* met = static_cast<CommThread*>(bootstrap_->group(members).release());
            return connected(std::make_unique<Nccl>(
                device_, executor_, std::unique_ptr<CommThread>(met), NcclRanks{}, options_));
        }
        const auto own = std::ranges::find(members, place_.rank) - members.begin();
        ncclUniqueId id{};
        if (own == 0) demand(ncclGetUniqueId(&id), "ncclGetUniqueId");
        std::vector<ncclUniqueId> ids(static_cast<size_t>(place_.size));
        agree(of, executor_, std::as_bytes(std::span(&id, 1)),
              std::as_writable_bytes(std::span(ids)), kMeeting);
        NcclRanks ranks{.rank = static_cast<int>(own), .size = static_cast<int>(members.size())};
        std::memcpy(ranks.unique_id.data(), &ids[static_cast<size_t>(members.front())],
                    sizeof(ncclUniqueId));
        return connected(std::make_unique<Nccl>(device_, executor_, nullptr, ranks, options_));
    }

    // NCCL launches on a thread of its own; what comes after it on the stream must wait for that.
    bool ready() override {
        if (!launching_) return true;
        if (!is_idle()) return false;
        if (launching_->host) take_back(*launching_);
        demand(cudaEventRecord(launching_->ended.get(), launching_->stream), "cudaEventRecord");
        if (launching_->enqueued) launching_->enqueued->fetch_add(1, std::memory_order_release);
        launching_ = nullptr;
        return true;
    }

    void start(const Operation& operation, size_t slot) override {
        Flight& flight = flights_[slot];
        const bool host = operation.kind == Operation::Kind::all_gather_host;
        flight.host = host ? operation.transfers.data() : nullptr;
        flight.stream =
            operation.stream ? static_cast<cudaStream_t>(operation.stream) : stream_.get();
        flight.enqueued = operation.enqueued;
        if (host && bootstrap_) return start_by_bootstrap(operation, flight);
        if (host) copy_to_device(flight);
        if (operation.kind == Operation::Kind::exchange) copy_own_parts(operation, flight.stream);
        demand(ncclGroupStart(), "ncclGroupStart");
        const bool shifts = operation.kind == Operation::Kind::shift;
        if (shifts) shift(operation, flight.stream);
        for (size_t i = 0; i < operation.count && !shifts; ++i) {
            const Transfer& transfer = operation.transfers[i];
            if (transfer.bytes == 0) continue;
            if (host) {
                std::byte* all = flight.on_device;
                gather(all + place_.rank * transfer.bytes, all, transfer.bytes, flight.stream);
            } else if (operation.kind == Operation::Kind::all_gather) {
                gather(transfer.out, transfer.in, transfer.bytes, flight.stream);
            } else {
                exchange(operation, transfer, flight.stream);
            }
        }
        demand(ncclGroupEnd(), "ncclGroupEnd");
        launching_ = &flight;
    }

    bool finished(size_t slot) override {
        Flight& flight = flights_[slot];
        if (flight.host && bootstrap_) {
            return host_done_.load(std::memory_order_acquire) >= flight.host_number;
        }
        ready();  // a later one may be launching, and its caller waits for that
        if (&flight == launching_) return false;
        const ncclResult_t found = state();
        if (found != ncclSuccess && found != ncclInProgress) return false;
        const cudaError_t status = cudaEventQuery(flight.ended.get());
        if (status == cudaErrorNotReady) return false;
        demand(status, "work of NCCL's");
        if (flight.host) hand_over(flight);
        return true;
    }

    std::vector<int> awaited(size_t) const override {
        std::vector<int> others;
        for (int rank = 0; bootstrap_ && rank < place_.size; ++rank)
            if (rank != place_.rank) others.push_back(rank);
        return others;
    }

    void abort() noexcept override { comm_.reset(); }

private:
    struct Flight {
        Event ended{};
        cudaStream_t stream = nullptr;
        std::atomic<uint64_t>* enqueued = nullptr;
        // A gather of host memory: it goes by the bootstrap, else by a place on the GPU.
        const Transfer* host = nullptr;
        uint64_t host_number = 0;
        std::byte *on_host = nullptr, *on_device = nullptr;
    };

    // Whether NCCL has taken all that it was given.
    bool is_idle() { return state() == ncclSuccess; }

    // Throws when NCCL has failed and nobody has said for a while what of.
    ncclResult_t state() {
        ncclResult_t found = ncclSuccess;
        const ncclResult_t asked = ncclCommGetAsyncError(comm_.get(), &found);
        if (asked != ncclSuccess) found = asked;
        if (found == ncclSuccess || found == ncclInProgress) return found;
        if (found == ncclInvalidUsage) throw misused();
        const Nanos now = executor_.now();
        if (failed_at_ == 0) failed_at_ = now;
        if (bootstrap_ && now - failed_at_ < kHearsay) return found;
        throw Error(Trouble::rank_lost,
                    {.what = "lost a rank: NCCL's connection to it failed",
                     .measured = std::string(ncclGetErrorString(found)) + ": " +
                                 ncclGetLastError(comm_.get()),
                     .remedy = "see what the other ranks said last; NCCL_DEBUG=WARN says more"});
    }

    Error misused() const {
        return {
            Trouble::usage,
            {.what = "NCCL refuses these ranks",
             .where = "rank " + std::to_string(place_.rank) + " of " + std::to_string(place_.size),
             .measured = ncclGetLastError(comm_.get()),
             .remedy = "give each rank a GPU and a number of its own, and all of them the same "
                       "unique id and size; NCCL_DEBUG=WARN says more"}};
    }

    // The ranks' common unique id; every GPU has one rank.
    NcclRanks meet() const {
        cudaDeviceProp properties{};
        demand(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
        Card own;
        static_assert(sizeof(own.gpu) == sizeof(properties.uuid));
        std::memcpy(own.gpu.data(), &properties.uuid, sizeof(own.gpu));
        if (bootstrap_->rank() == 0) demand(ncclGetUniqueId(&own.id), "ncclGetUniqueId");
        std::vector<Card> cards(static_cast<size_t>(bootstrap_->size()));
        agree(*bootstrap_, executor_, std::as_bytes(std::span(&own, 1)),
              std::as_writable_bytes(std::span(cards)), kMeeting);
        std::vector<GpuId> gpus;
        gpus.reserve(cards.size());
        for (const Card& card : cards) gpus.push_back(card.gpu);
        require_own_gpus(gpus, properties.name);
        NcclRanks ranks{.rank = bootstrap_->rank(), .size = bootstrap_->size()};
        static_assert(sizeof(ranks.unique_id) == sizeof(ncclUniqueId));
        std::memcpy(ranks.unique_id.data(), &cards[0].id, sizeof(ncclUniqueId));
        return ranks;
    }

    void make_stream() {
        cudaStream_t stream = nullptr;
        demand(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
        stream_.reset(stream);
        for (Flight& flight : flights_) {
            cudaEvent_t event = nullptr;
            demand(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                   "cudaEventCreateWithFlags");
            flight.ended.reset(event);
        }
    }

    // The others are told at once when this rank fails, and this rank when one of them does.
    void join(const NcclRanks& ranks) {
        if (!bootstrap_) return meet_over_nccl(ranks);
        bootstrap_->set_waiting(true);
        try {
            meet_over_nccl(ranks);
        } catch (const Error& error) {
            bootstrap_->abandon(error.what());
            throw;
        }
        bootstrap_->set_waiting(false);
    }
    void meet_over_nccl(const NcclRanks& ranks) {
        ncclUniqueId id{};
        std::memcpy(&id, ranks.unique_id.data(), sizeof(id));
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        ncclComm_t comm = nullptr;
        const ncclResult_t status =
            ncclCommInitRankConfig(&comm, ranks.size, id, ranks.rank, &config);
        comm_.reset(comm);
        demand(status, "ncclCommInitRankConfig");
        await([this] { return is_idle(); });
    }
    // Without a bootstrap the ranks tell each other over NCCL itself.
    RankPlace introduce() {
        const uint64_t own = machine_id();
        std::vector<uint64_t> machines(static_cast<size_t>(place_.size));
        const Gather all{reinterpret_cast<const std::byte*>(&own),
                         reinterpret_cast<std::byte*>(machines.data()), sizeof(own)};
        const Operation gather = Operation::gather_host(all, kMachines);
        start(gather, 0);
        await([this] { return finished(0); });
        return place_among(machines, place_.rank);
    }
    // The first of a group's operations make connections, take memory and load kernels. That may
    // wait for all that the GPU does, which may wait for another rank: so they come while it is
    // idle.
    static std::unique_ptr<Nccl> connected(std::unique_ptr<Nccl> group) {
        constexpr int64_t kBytes = 16;
        const int64_t all = kBytes * group->place_.size;
        void* memory = nullptr;
        demand(cudaMalloc(&memory, static_cast<size_t>(2 * all)), "cudaMalloc");
        const OnDevice both(static_cast<std::byte*>(memory));
        demand(cudaMemsetAsync(memory, 0, static_cast<size_t>(2 * all), group->stream_.get()),
               "cudaMemsetAsync");
        const Exchange parts{both.get(), both.get() + all, kBytes};
        const Gather same{both.get(), both.get() + all, kBytes};
        for (const Operation& first : {Operation::exchange({&parts, 1}, kMeeting),
                                       Operation::gather({&same, 1}, kMeeting)}) {
            group->start(first, 0);
            group->await([&] { return group->finished(0); });
        }
        return group;
    }
    template <class Met>
    void await(const Met& met) {
        const Nanos start = executor_.now();
        for (Nanos now = start; !met(); now = executor_.now()) {
            if (bootstrap_) bootstrap_->check();
            if (now > until_)
                throw lost(silent(), "the ranks did not meet over NCCL within zero.timeout_seconds",
                           "start-up",
                           "NCCL_DEBUG=INFO shows which of them came and by what network");
            nap_after(now - start);
        }
    }

    // Those that have not said that they wait, too.
    std::vector<int> silent() const {
        std::vector<int> others = awaited(0);
        std::erase_if(others, [this](int rank) { return bootstrap_->waits(rank); });
        return others;
    }

    // After everything; what others have not taken yet is theirs to wait for.
    void leave() noexcept {
        if (!comm_) return;
        const Nanos start = executor_.now();
        ncclResult_t status = ncclCommFinalize(comm_.get());
        for (Nanos now = start; status == ncclInProgress && now < start + kHearsay;
             now = executor_.now()) {
            nap_after(now - start);
            ncclCommGetAsyncError(comm_.get(), &status);
        }
        if (status == ncclSuccess) ncclCommDestroy(comm_.release());
    }

    void gather(const std::byte* out, std::byte* in, int64_t bytes, cudaStream_t stream) {
        demand(ncclAllGather(out, in, static_cast<size_t>(bytes), ncclInt8, comm_.get(), stream),
               "ncclAllGather");
    }
    void exchange(const Operation& operation, const Transfer& transfer, cudaStream_t stream) {
        const auto bytes = static_cast<size_t>(transfer.bytes);
        for (int rank = 0; rank < place_.size; ++rank) {
            if (rank == place_.rank) continue;
            if (operation.sends(transfer))
                demand(ncclSend(operation.out_for(transfer, rank), bytes, ncclInt8, rank,
                                comm_.get(), stream),
                       "ncclSend");
            if (operation.receives(transfer))
                demand(ncclRecv(operation.in_from(transfer, rank), bytes, ncclInt8, rank,
                                comm_.get(), stream),
                       "ncclRecv");
        }
    }
    void shift(const Operation& operation, cudaStream_t stream) {
        const Transfer &leaves = operation.leaving(), &arrives = operation.arriving();
        if (leaves.bytes > 0) {
            demand(ncclSend(leaves.out, static_cast<size_t>(leaves.bytes), ncclInt8,
                            operation.target(place_.rank, place_.size), comm_.get(), stream),
                   "ncclSend");
        }
        if (arrives.bytes > 0) {
            demand(ncclRecv(arrives.in, static_cast<size_t>(arrives.bytes), ncclInt8,
                            operation.source(place_.rank, place_.size), comm_.get(), stream),
                   "ncclRecv");
        }
    }
    void copy_own_parts(const Operation& operation, cudaStream_t stream) {
        for (size_t i = 0; i < operation.count; ++i) {
            const Transfer& transfer = operation.transfers[i];
            demand(cudaMemcpyAsync(transfer.in + place_.rank * transfer.bytes,
                                   operation.out_for(transfer, place_.rank),
                                   static_cast<size_t>(transfer.bytes), cudaMemcpyDeviceToDevice,
                                   stream),
                   "cudaMemcpyAsync");
        }
    }

    void start_by_bootstrap(const Operation& operation, Flight& flight) {
        const Transfer& transfer = operation.transfers[0];
        bootstrap_->all_gather_host({transfer.out, transfer.in, transfer.bytes}, operation.topic);
        bootstrap_->signal(host_done_);
        flight.host_number = ++host_posted_;
    }

    // Without a bootstrap: memory on both sides for a gather of host memory in every slot.
    void stage() {
        const int64_t bytes = Communicator::kAgreedBytes * place_.size;
        void *device = nullptr, *host = nullptr;
        demand(cudaMalloc(&device, kWindow * static_cast<size_t>(bytes)), "cudaMalloc");
        on_device_.reset(static_cast<std::byte*>(device));
        demand(cudaMallocHost(&host, kWindow * static_cast<size_t>(bytes)), "cudaMallocHost");
        on_host_.reset(static_cast<std::byte*>(host));
        for (size_t slot = 0; slot < kWindow; ++slot) {
            flights_[slot].on_device = on_device_.get() + static_cast<int64_t>(slot) * bytes;
            flights_[slot].on_host = on_host_.get() + static_cast<int64_t>(slot) * bytes;
        }
    }
    void copy_to_device(const Flight& flight) {
        const Transfer& transfer = *flight.host;
        const int64_t own = place_.rank * transfer.bytes;
        const auto bytes = static_cast<size_t>(transfer.bytes);
        if (bytes == 0) return;
        std::memcpy(flight.on_host + own, transfer.out, bytes);
        demand(cudaMemcpyAsync(flight.on_device + own, flight.on_host + own, bytes,
                               cudaMemcpyHostToDevice, stream_.get()),
               "cudaMemcpyAsync");
    }
    void take_back(const Flight& flight) {
        demand(cudaMemcpyAsync(flight.on_host, flight.on_device, all_of(flight),
                               cudaMemcpyDeviceToHost, stream_.get()),
               "cudaMemcpyAsync");
    }
    void hand_over(const Flight& flight) {
        if (all_of(flight) > 0) std::memcpy(flight.host->in, flight.on_host, all_of(flight));
    }
    size_t all_of(const Flight& flight) const {
        return static_cast<size_t>(place_.size * flight.host->bytes);
    }

    Device& device_;
    Executor& executor_;
    const CommOptions options_;
    std::atomic<uint64_t> host_done_ = 0;  // by the bootstrap, which ends before it
    uint64_t host_posted_ = 0;
    std::unique_ptr<CommThread> bootstrap_;
    const Nanos until_;  // the ranks must have met
    RankPlace place_{};
    Flight* launching_ = nullptr;  // given to NCCL, which has not launched it yet
    Nanos failed_at_ = 0;
    // Each ends before what it uses.
    OnHost on_host_{};
    OnDevice on_device_{};
    Stream stream_{};
    std::array<Flight, kWindow> flights_{};
    Comm comm_{};
};

std::unique_ptr<Communicator> over(std::unique_ptr<Nccl> nccl, Executor& executor,
                                   const CommOptions& options) {
    CommThread* watch = nccl->watch();
    return std::make_unique<CommThread>(executor, options, std::move(nccl),
                                        CommThread::Sources{.watch = watch});
}

}  // namespace

std::unique_ptr<Communicator> make_nccl(Device& device, Executor& executor,
                                        std::unique_ptr<Communicator> bootstrap,
                                        const CommOptions& options) {
    auto* ranks = dynamic_cast<CommThread*>(bootstrap.get());
    FERRY_CHECK(ranks || bootstrap->size() == 1, "ranks that meet over MPI, or one");
    if (ranks) {
        static_cast<void>(bootstrap.release());  // `ranks` is the same
        return over(std::make_unique<Nccl>(device, executor, std::unique_ptr<CommThread>(ranks),
                                           NcclRanks{}, options),
                    executor, options);
    }
    ncclUniqueId id{};
    demand(ncclGetUniqueId(&id), "ncclGetUniqueId");
    NcclRanks alone;
    std::memcpy(alone.unique_id.data(), &id, sizeof(id));
    return make_nccl(device, executor, alone, options);
}

std::unique_ptr<Communicator> make_nccl(Device& device, Executor& executor, const NcclRanks& ranks,
                                        const CommOptions& options) {
    return over(std::make_unique<Nccl>(device, executor, nullptr, ranks, options), executor,
                options);
}

}  // namespace ferry::comm

#endif
