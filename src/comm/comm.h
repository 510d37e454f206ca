// The ranks of a run and the few things that they send each other. All gather shards of weights,
// all exchange parts of gradients, and all agree on small facts. Groups of them do the same.
// Nothing here adds numbers: sums have an order (docs/numerics.md), and the owner of a shard makes
// them.
//
// Every rank makes the same calls in the same order. It is the order of the schedule's comm lane,
// which the hash of the plan covers. A communicator makes all calls of its library on one thread of
// its own. Only when it is made and when it ends does it meet the other ranks on the caller's
// thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/device.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "ferry/units.h"

namespace ferry::comm {

// `all` is size() * bytes; what rank r gives stands at r * bytes. `mine` may be its own place
// there.
struct Gather {
    const std::byte* mine = nullptr;
    std::byte* all = nullptr;
    int64_t bytes = 0;  // each rank's; 0 is allowed
};
// Both are size() * bytes, apart from each other: the part for rank r leaves from r * bytes of
// `to`, the part of rank r arrives at r * bytes of `from`. A rank's own part is copied.
struct Exchange {
    const std::byte* to = nullptr;
    std::byte* from = nullptr;
    int64_t bytes = 0;  // each part's; 0 is allowed
};

// In a group of two, from one rank to the other. The sender sets `from`, and the receiver `to`.
struct Pass {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    int64_t bytes = 0;
};

// In a circle: `to` goes to the rank `by` places behind this one. `from` gets what the rank `by`
// places before it gives. 0 < by < size(), the same on all ranks. 0 bytes: nothing goes that way.
struct Shift {
    const std::byte* to = nullptr;
    std::byte* from = nullptr;
    int64_t to_bytes = 0, from_bytes = 0;
    int by = 0;
};

// The purpose of a call, as an error names it: "all-gather of the weights of block 3, step 12".
struct Topic {
    const char* of = "";  // "weights", "gradient", "outcome", "configuration"
    int64_t layer = -1;   // -1: none
    int64_t step = -1;    // -1: before or after the steps
};

class Communicator {
public:
    virtual ~Communicator() = default;  // after everything enqueued is done, or failed

    virtual std::string_view kind() const noexcept = 0;  // "solo", "mpi", "nccl"
    virtual int rank() const noexcept = 0;
    virtual int size() const noexcept = 0;
    // Ranks of this machine are numbered from 0 in the order of their ranks.
    virtual int local_rank() const noexcept = 0;
    virtual int local_size() const noexcept = 0;
    // The lowest rank of this machine. All its ranks have this number in common, and no others do.
    virtual int host() const noexcept = 0;

    // These enqueue and return. They copy the spans, at most kTransfers of them, which are moved as
    // one operation. Memory is the device's (host memory on a CPU device), and must be ready when
    // the call is made. Nothing allocates after the first calls of a size.
    static constexpr size_t kTransfers = 8;
    virtual void all_gather(std::span<const Gather> transfers, Topic topic) = 0;
    virtual void exchange(std::span<const Exchange> transfers, Topic topic) = 0;
    virtual void pass(const Pass& transfer, Topic topic) = 0;
    virtual void shift(const Shift& parts, Topic topic) = 0;
    // The same as all_gather for at most kAgreedBytes of host memory a rank, on any device.
    static constexpr int64_t kAgreedBytes = 64 << 10;
    virtual void all_gather_host(Gather transfer, Topic topic) = 0;
    // After everything enqueued so far: increments `counter`, then calls the executor's wake(). It
    // does so even when that failed: check() then throws.
    virtual void signal(std::atomic<uint64_t>& counter) = 0;

    // A communicator of some of these ranks. Its calls have an order of their own beside this
    // one's. `members` are numbers of ranks here, rising, with this rank among them. The group's
    // rank r is members[r]. All ranks call it at once at start-up, each with its own group. Groups
    // of one call have no rank in common, and a group has no groups. It ends before this one does.
    // When one of the two fails, the other does too. Errors name ranks by their numbers here.
    virtual std::unique_ptr<Communicator> group(std::span<const int> members) = 0;

    // A second communicator of the same ranks, for all_gather_host alone. Its calls have an order
    // of their own, for another thread, which `executor` wakes. All ranks call it at once at
    // start-up. It ends before this one does, and when either fails both do. Null: there can be
    // none, as where ranks exchange host memory by NCCL alone.
    virtual std::unique_ptr<Communicator> beside(Executor&) { return nullptr; }

    // Throws the first failure: a rank that ended or did not take part in time (Trouble::rank_lost,
    // naming the rank, the operation and the step), or the library's own error. After a failure
    // nothing waits for the other ranks any more.
    virtual void check() = 0;
    // Tells the other ranks that this one ends with an error, by the first line of `why`. So they
    // name it at once instead of after the timeout. Never throws, never waits long.
    virtual void abandon(std::string_view why) noexcept = 0;
};

// Calls all_gather_host and waits for it, at start-up and after a drain. `all` has size() *
// mine.size() bytes.
void agree(Communicator& communicator, Executor& executor, std::span<const std::byte> mine,
           std::span<std::byte> all, Topic topic);

// To be called before all ranks end with an error of the same cause, so that none is taken for
// lost. Returns when all ranks are here, or when some have ended, which it does not throw.
void await_all(Communicator& communicator, Executor& executor);

// The ranks that share something with `rank`, where `ranks` are cut into runs of `size` neighbours.
std::vector<int> run_of(int rank, int size);
// The ranks that have the position of `rank` in their runs.
std::vector<int> across_runs(int rank, int size, int ranks);

// Exchanges that a kernel makes from within, with the ranks of a group.
class StreamExchange {
public:
    virtual ~StreamExchange() = default;
    virtual int rank() const noexcept = 0;
    virtual int size() const noexcept = 0;
    // As Communicator::exchange, in the order of the compute stream. All ranks of the group call it
    // in a job of that stream, in the same order. Work of the stream before it has written `to`.
    // Work after it finds `from` written. Throws the group's failure.
    virtual void exchange(const Exchange& parts, Topic topic) = 0;
    // The same of Communicator::all_gather and shift.
    virtual void all_gather(const Gather& parts, Topic topic) = 0;
    virtual void shift(const Shift& parts, Topic topic) = 0;
};
// On a CPU device a call returns when its parts are there, as its thread is the stream's. On CUDA
// it returns when the exchange is enqueued on the compute stream, which waits for the parts. The
// next call, or the communicator of the run, throws a failure after that.
std::unique_ptr<StreamExchange> make_stream_exchange(Device& device, Executor& executor,
                                                     std::unique_ptr<Communicator> group);

// A value that must be equal on all ranks: the configuration's hash, the binary's version.
struct Fact {
    std::string key;
    std::string value;
};
// The same keys in the same order on every rank. Throws usage on every rank, naming each rank that
// differs from rank 0, the first key in which it does, and both values.
void require_same(Communicator& communicator, Executor& executor, std::span<const Fact> facts);

// Sets what happens where a library does not return (docs/ranks.md). `instead` is called once for
// each such call of any communicator of the process, on a watchdog's thread. The library's call
// stays where it is. Empty: the process ends. When this returns, calls of the function before are
// over, except one that this is called within.
using Stuck = std::function<void(const Error&)>;
void on_stuck(Stuck instead);

// Ranks of one machine that see the same of something there share it out. `seen` is a hash of what
// a rank sees. Ranks to which the launcher gave different things do not share. Parts go in the
// order of `place`, and of ranks.
struct PartOfAlike {
    int index = 0, of = 1;
};
PartOfAlike part_among_alike(Communicator& communicator, Executor& executor, uint64_t seen,
                             Topic topic, int place = 0);
// Which of the GPUs that this rank sees (CUDA_VISIBLE_DEVICES) is its own, where the ranks of a
// host see the same. Every rank asks, before it opens a device.
int gpu_of_rank(Communicator& communicator, Executor& executor);

// ---------------------------------------------------------------- who is there

struct CommOptions {
    // How long a rank waits for the others in one operation, the slowest rank's lag included.
    double timeout_seconds = 300;
    int64_t message_bytes = kGiB;  // the most in one message of MPI, which counts in an int
};
// A communicator of one rank, of host memory: a GPU without other ranks gathers nothing.
std::unique_ptr<Communicator> make_solo(Executor& executor);
// Whether mpirun or srun started this process as one of several ranks, by the environment alone.
bool launched_as_rank();
// Which of the ranks it is, as the launcher says. None: it is alone, or the launcher does not say.
std::optional<int> launched_rank();
// The ranks that mpirun or srun started, of host memory. The first call in a process initialises
// MPI, unless the embedder did (MPI_THREAD_SERIALIZED). All ranks make the same calls. Throws usage
// where this build has no MPI or the launcher's ranks do not find each other. After a failure the
// process ends without MPI_Finalize, which would wait for the lost rank. Where a rank does not come
// to MPI_Init in time, the others cannot throw. Their processes end, with the text of rank_lost on
// standard error and its exit code. So does a process that MPI or NCCL keeps in a call for 5 s
// longer than the timeout, or for 5 s once a rank is known to be lost.
std::unique_ptr<Communicator> make_mpi(Executor& executor, const CommOptions& options);
// Says by `say` the last words of a launched process that ends with `error`, except where the first
// rank has said the same. The first rank says its own before it tells the others, and they end
// after that. They wait only with usage and does_not_fit, which all ranks may find alike. They say
// their own where the first one is not heard within 10 s, or within 0.3 s where `hurried` says so.
// That is called on any thread. Starts MPI where no rank has. To be called once, when no
// communicator is left. Never throws.
void say_once(const Error& error, const std::function<void()>& say,
              const std::function<bool()>& hurried);

// Device memory of a CUDA device, by NCCL. The ranks meet through `bootstrap`, which stays theirs
// for all_gather_host and for news of ranks that end. Throws usage where this build has no NCCL.
std::unique_ptr<Communicator> make_nccl(Device& device, Executor& executor,
                                        std::unique_ptr<Communicator> bootstrap,
                                        const CommOptions& options);
// The same for a runtime that brings its own ranks, by an ncclUniqueId that is equal on all of
// them. They tell each other which of them share a host. Errors then name the operation and the
// step, and no rank. Throws usage where NCCL refuses them: two on one GPU, or unique ids that
// differ.
struct NcclRanks {
    std::array<std::byte, 128> unique_id{};
    int rank = 0, size = 1;
};
std::unique_ptr<Communicator> make_nccl(Device& device, Executor& executor, const NcclRanks& ranks,
                                        const CommOptions& options);

}  // namespace ferry::comm
