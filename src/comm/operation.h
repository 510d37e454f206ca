// One call on a communicator, as it waits for its turn and is carried out.
#pragma once

#include <string>

#include "comm/comm.h"

namespace ferry::comm {

// A gather sends `out` to every rank, an exchange the part at r * bytes of it to rank r. What rank
// r sent arrives at r * bytes of `in`.
struct Piece {
    const std::byte* out = nullptr;
    std::byte* in = nullptr;
    int64_t bytes = 0;  // from one rank to another
};

struct Operation {
    enum class Kind : uint8_t { all_gather, exchange, all_gather_host, signal };

    Kind kind = Kind::signal;
    size_t count = 0;  // of pieces
    std::array<Piece, Communicator::kPieces> pieces{};
    Topic topic{};
    std::atomic<uint64_t>* counter = nullptr;  // of a signal

    static Operation gather(std::span<const Gather> pieces, Topic topic);
    static Operation exchange(std::span<const Exchange> pieces, Topic topic);
    static Operation gather_host(Gather piece, Topic topic);
    static Operation signal(std::atomic<uint64_t>& counter);

    // What leaves for `rank`.
    const std::byte* out_for(const Piece& piece, int rank) const {
        return kind == Kind::exchange ? piece.out + rank * piece.bytes : piece.out;
    }
    // "all-gather of the weights of layer 3, step 12"
    std::string text() const;
};

// A communicator whose calls wait for their turn as operations.
class OperationQueue : public Communicator {
public:
    void all_gather(std::span<const Gather> pieces, Topic topic) final {
        post(Operation::gather(pieces, topic));
    }
    void exchange(std::span<const Exchange> pieces, Topic topic) final {
        post(Operation::exchange(pieces, topic));
    }
    void all_gather_host(Gather piece, Topic topic) final {
        post(Operation::gather_host(piece, topic));
    }
    void signal(std::atomic<uint64_t>& counter) final { post(Operation::signal(counter)); }

private:
    virtual void post(const Operation& operation) = 0;
};

// A rank's own part of a piece in host memory, where it is not there already.
void copy_own(const Operation& operation, const Piece& piece, int rank);

std::string seconds_text(double seconds);  // "1.0 s"

// "lost rank 2: HOW"; without ranks it cannot be said which.
Error lost(std::span<const int> ranks, const std::string& how, const std::string& where,
           const std::string& remedy);

}  // namespace ferry::comm
