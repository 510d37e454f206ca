// Tensors of files, read ahead in an order that is known: around the page cache where the file
// system has that, several transfers in flight, each byte once. What has checksums is proved before
// it is given.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/io_memory.h"
#include "ferry/executor.h"
#include "ferry/team.h"
#include "ferry/user_files.h"

namespace ferry::checkpoint {

// A tensor and where it lies. It outlives who reads it.
struct TensorSource {
    const Weights* weights = nullptr;
    const StoredTensor* stored = nullptr;
    int64_t bytes = 0;
    std::span<const uint64_t> stripes{};  // checksums (stripe_sums.h); none: nothing proves it
};

// Of one thread, but for read() and read_floats().
class TensorsAhead {
public:
    // The team's threads prove. `memory`: the most of what waits to be taken, but for a step that
    // wants more by itself.
    static constexpr int64_t kMemory = 256 * kMiB;  // that does to have a drive busy
    explicit TensorsAhead(Team& team, int64_t memory = kMemory);
    ~TensorsAhead();
    TensorsAhead(const TensorsAhead&) = delete;
    TensorsAhead& operator=(const TensorsAhead&) = delete;

    // First all that will be wanted: bytes [first, first + bytes) of tensors, step by step. Throws
    // io where a file cannot be opened once more, and where a tensor has more or fewer checksums
    // than stripes.
    void want(const TensorSource& tensor, int64_t first, int64_t bytes);
    void end_step();
    // Then a step after the other: all of it is there at return, and what the step before wanted is
    // not any more. Throws io: what cannot be read, is another than was written, or was changed.
    void next();

    // Bytes of what the present step wanted. Any thread.
    void read(const StoredTensor& tensor, int64_t first, std::span<std::byte> out) const;
    // Elements from `first` on as fp32, as Weights::read() gives them. Any thread.
    void read_floats(const StoredTensor& tensor, int64_t first, std::span<float> out) const;
    // The same as `type`: as they lie in the file where that is theirs, else by way of fp32. Throws
    // as convert() does.
    void read_as(const StoredTensor& tensor, int64_t first, DType type,
                 std::span<std::byte> out) const;

private:
    struct Stripe {
        const StoredTensor* stored = nullptr;
        const Weights* weights = nullptr;
        aio::FileNumber file = 0;
        int64_t first = 0, bytes = 0;  // in the tensor
        const uint64_t* sum = nullptr;
        size_t last_step = 0;  // that wants it
        int64_t at = -1;       // in the ring, counted as tail_; -1: not begun
        bool landed = false, proved = false;
    };

    static void require_sums(const TensorSource& tensor);
    static int64_t begin_in_file(const Stripe& stripe);  // rounded down to a block
    static int64_t room_of(const Stripe& stripe);        // with what blocks add
    const std::byte* bytes_of(const Stripe& stripe) const;
    void begin();
    void read_more();
    void land_one();
    void prove(std::span<const size_t> stripes);
    void release();

    Team& team_;
    const int64_t memory_,
        kept_;  // a stripe that comes again so soon stays; later it is read again
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<IoMemory> ring_{};
    std::vector<aio::Operation> operations_;
    std::vector<size_t> free_operations_{};
    std::map<int, aio::FileNumber> numbers_{};                           // by descriptor
    std::map<std::pair<const StoredTensor*, int64_t>, size_t> found_{};  // stripes by their place
    std::vector<Stripe> stripes_{};
    std::vector<int64_t> ends_{};             // bytes of room up to and with each stripe
    std::vector<std::vector<size_t>> steps_;  // stripes of each
    int64_t largest_step_ = 0, step_room_ = 0;
    int64_t tail_ = 0, head_ = 0;
    size_t begun_ = 0, released_ = 0, step_ = 0;  // stripes; step_: the next
    bool started_ = false;
    std::unique_ptr<aio::UserFiles> files_;  // goes first: it waits for transfers
};

}  // namespace ferry::checkpoint
