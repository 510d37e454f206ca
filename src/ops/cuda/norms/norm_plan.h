// How rows of a norm are shared out among threads, and the shared memory that their backward pass
// has. No device code: what a GPU has room for is asked, and tested, without one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ferry/units.h"
#include "ops/cuda/shared/pack_size.h"

namespace ferry::ops::cuda {

// How the elements of rows lie. `whole`: all bf16, packs at multiples of 16 bytes, rows that
// threads hold: nothing is asked for each pack, so that loads and sums of several are under way
// together. The other two ask, of 16-bit elements and of any. All three add in one order.
enum class Lie { any, halves, whole };

// Threads of a block whose rows have `row` threads each: small blocks come and go evenly.
constexpr int block_of(int row) { return row < 128 ? 128 : row; }
constexpr int kMostThreads = 256;
// The most elements of a row that threads hold between its sums and its result.
constexpr int64_t kMostHeld = int64_t{4} * kMostThreads * kPack;

// Places of 16 bytes that a thread's packs take.
constexpr int places_of(int held, Lie lie) { return lie == Lie::any ? 2 * held : held; }

// Threads of a multiprocessor that find registers for what they hold: the more of them, the more
// memory is under way. 512 for all but the widest rows, where much would lie in memory instead.
constexpr int resident(int held, Lie lie) { return held == 4 && lie == Lie::any ? 256 : 512; }

// How the rows of a block that sums the weight's gradient lie: each group has some, one after the
// other, and the block's sum over them is one partial sum. Of many rows groups have more than
// kRowsOfGroup, so that all blocks are at work from the start: the fewer partial sums, the better.
template <int kRow, int kHeld, Lie kLie>
struct Summing {
    static constexpr int kGroups = block_of(kRow) / kRow;
    static constexpr int kRowsOfGroup = kGroups == 1 || kRow < 32 ? 16 : 8;
    static constexpr int kRows = kGroups * kRowsOfGroup;
    // The next row is under way in shared memory while one is worked on in registers.
    static constexpr int kPlaces = 3 * places_of(kHeld, kLie);
    static constexpr bool kAhead = kPlaces <= 12;
    static constexpr int64_t kRowRoom = int64_t{block_of(kRow)} * kPlaces * 16;
    static constexpr int64_t kRoom = std::max<int64_t>(
        kAhead ? kRowRoom : 0, kGroups > 1 ? block_of(kRow) * kHeld * kPack * 4 : 0);
    // Behind it, the sums of the bias's gradient: registers have no room for them too.
    static constexpr int64_t kBiasRoom = block_of(kRow) * kHeld * kPack * 4;
    static constexpr int64_t room(bool biased) { return kRoom + (biased ? kBiasRoom : 0); }
};

// For some plans whole_sums.h has a second kernel, for rows that lie whole. It has two rows in
// shared memory.
constexpr bool has_whole_form(int held, Lie lie) { return lie == Lie::whole && held > 2; }
constexpr int whole_places(int held) { return 3 * held; }
constexpr int64_t whole_room(int row, int held) {
    return int64_t{2} * block_of(row) * whole_places(held) * 16;
}

// What blocks can have of shared memory if they ask: a limit of the GPU. Volta has the least.
constexpr int64_t kLeastOptIn = 96 * kKiB;
// Both forms add in one order: which of them runs changes no bit.
constexpr bool whole_form_fits(int row, int held, int64_t opt_in_bytes) {
    constexpr int64_t kStatic = 2 * kKiB;  // beside it, the sums of warps
    return whole_room(row, held) + kStatic <= opt_in_bytes;
}

}  // namespace ferry::ops::cuda
