// The seams between what all kinds of ranks have in common (CommThread) and the libraries that move
// the bytes.
#pragma once

#include <bitset>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "operation.h"

namespace ferry::comm {

struct RankPlace {
    int rank = 0, size = 1, local_rank = 0, local_size = 1, host = 0;
};

class CommThread;

// Moves the bytes of operations. All calls come from the comm thread, but for the constructor, the
// destructor, kind(), place() and uses_streams().
class Transport {
public:
    static constexpr size_t kWindow = 8;  // operations that were started and have not ended

    virtual ~Transport() = default;
    virtual std::string_view kind() const noexcept = 0;
    virtual RankPlace place() const noexcept = 0;
    // Whether it enqueues on a stream that an operation names (OperationQueue::post_on).
    virtual bool uses_streams() const noexcept { return false; }

    // Whether start() may be called; asked again later where it may not.
    virtual bool ready() { return true; }
    // Begins an operation and returns; `slot` < kWindow is free. They are started in the order in
    // which they were enqueued, and stay where they are until they are finished.
    virtual void start(const Operation& operation, size_t slot) = 0;
    // Looks, without blocking, whether the oldest operation has ended. All three throw what the
    // library reports.
    virtual bool finished(size_t slot) = 0;
    // Ranks that the operation still waits for, as far as the library says.
    virtual std::vector<int> awaited(size_t slot) const = 0;
    // After a failure: nothing else is called any more, and nothing that was started may hang on.
    virtual void abort() noexcept {}

    // Communicator::group, whose ranks are `of`: on the caller's thread, beside the comm thread.
    virtual std::unique_ptr<Transport> group(Communicator& of, std::span<const int> members) = 0;
    // Of the communicator by which these ranks met; null: there is none.
    virtual CommThread* watch() const { return nullptr; }
};

// A message between ranks beside the operations. Its bytes travel as they are.
struct News {
    enum class Kind : int32_t {
        waiting,   // the sender is in an operation for long: it is alive, and not to blame
        going_on,  // which has ended after all
        lost,      // `ranks` are; `how`
    };
    static constexpr int kRanks = 4096;  // further ones have no names here
    Kind kind = Kind::waiting;
    std::bitset<kRanks> ranks{};   // none: it cannot be said which
    std::array<char, 1016> how{};  // ended by a zero
};

// Carries news; on the comm thread too.
class Wire {
public:
    virtual ~Wire() = default;
    // Tells all others, without waiting for any of them; whoever cannot be told is left out.
    virtual void tell(const News& news) noexcept = 0;
    // Returns when what was told has left, or soon.
    virtual void flush() noexcept = 0;
    struct Heard {
        int from;
        News news;
    };
    virtual std::optional<Heard> hear() = 0;
    // A rank whose process has ended, as far as this machine can say. Any thread.
    virtual std::optional<int> ended() = 0;
};

}  // namespace ferry::comm
