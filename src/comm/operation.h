// One call on a communicator, as it waits for its turn and is carried out.
#pragma once

#include <string>

#include "comm/comm.h"

namespace ferry::comm {

// A gather sends `out` to every rank, an exchange the part at r * bytes of it to rank r. What rank
// r sent arrives at r * bytes of `in`. A shift has two, and a pass one of the two: what leaves, and
// what arrives.
struct Transfer {
    const std::byte* out = nullptr;
    std::byte* in = nullptr;
    int64_t bytes = 0;  // from one rank to another
};

struct Operation {
    enum class Kind : uint8_t { all_gather, exchange, pass, all_gather_host, shift, signal };

    Kind kind = Kind::signal;
    size_t count = 0;  // transfers in it
    std::array<Transfer, Communicator::kTransfers> transfers{};
    Topic topic{};
    int by = 0;                                // of a shift
    std::atomic<uint64_t>* counter = nullptr;  // what a signal sets
    // Where its order is that of a GPU's stream: that stream, and what counts when the operation is
    // enqueued there. Null: the communicator's own stream, of which nobody asks.
    void* stream = nullptr;
    std::atomic<uint64_t>* enqueued = nullptr;

    static Operation gather(std::span<const Gather> transfers, Topic topic);
    static Operation exchange(std::span<const Exchange> transfers, Topic topic);
    static Operation pass(const Pass& transfer, Topic topic);
    static Operation gather_host(Gather transfer, Topic topic);
    static Operation shift(const Shift& parts, Topic topic);
    static Operation signal(std::atomic<uint64_t>& counter);

    // Of a shift: what leaves and what arrives, and where to and from.
    const Transfer& leaving() const { return transfers[0]; }
    const Transfer& arriving() const { return transfers[1]; }
    int target(int rank, int size) const { return (rank + by) % size; }
    int source(int rank, int size) const { return (rank + size - by) % size; }
    // What this rank sends to all others together; of a pass, what one of the two does.
    int64_t sent_bytes(int size) const;

    // The bytes that leave for `rank`.
    const std::byte* out_for(const Transfer& transfer, int rank) const {
        return kind == Kind::exchange ? transfer.out + rank * transfer.bytes : transfer.out;
    }
    // Where what `rank` sends arrives.
    std::byte* in_from(const Transfer& transfer, int rank) const {
        return kind == Kind::pass ? transfer.in : transfer.in + rank * transfer.bytes;
    }
    // Of a pass one rank sends, and one receives; of a shift each does one by one transfer.
    bool sends(const Transfer& transfer) const { return to_all() || transfer.out; }
    bool receives(const Transfer& transfer) const { return to_all() || transfer.in; }
    bool to_all() const { return kind != Kind::pass && kind != Kind::shift; }
    // "all-gather of the weights of layer 3, step 12"
    std::string text() const;
};

// A communicator whose calls wait for their turn as operations.
class OperationQueue : public Communicator {
public:
    void all_gather(std::span<const Gather> transfers, Topic topic) final {
        post(Operation::gather(transfers, topic));
    }
    void exchange(std::span<const Exchange> transfers, Topic topic) final {
        post(Operation::exchange(transfers, topic));
    }
    void pass(const Pass& transfer, Topic topic) final {
        FERRY_CHECK(size() == 2, "a pass is between two ranks");
        post(Operation::pass(transfer, topic));
    }
    void all_gather_host(Gather transfer, Topic topic) final {
        post(Operation::gather_host(transfer, topic));
    }
    void shift(const Shift& parts, Topic topic) final { post(Operation::shift(parts, topic)); }
    void signal(std::atomic<uint64_t>& counter) final { post(Operation::signal(counter)); }
    // Whether operations can go among a stream's kernels, by post_on().
    virtual bool uses_streams() const noexcept { return false; }
    // In the order of `stream`, a cudaStream_t. Until `enqueued` has counted, or check() throws,
    // nobody else enqueues there.
    void post_on(void* stream, std::atomic<uint64_t>& enqueued, Operation operation) {
        operation.stream = stream;
        operation.enqueued = &enqueued;
        post(operation);
    }

private:
    virtual void post(const Operation& operation) = 0;
};

// A rank's own part of a transfer in host memory, where it is not there already.
void copy_own(const Operation& operation, const Transfer& transfer, int rank);

std::string seconds_text(double seconds);  // "1.0 s"

// "lost rank 2: HOW"; without ranks it cannot be said which.
Error lost(std::span<const int> ranks, const std::string& how, const std::string& where,
           const std::string& remedy);

}  // namespace ferry::comm
