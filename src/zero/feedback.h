// 1-bit Adam's exchange (Tang et al. 2021, arXiv 2102.02888): after a warm-up of AdamW the second
// moment stays as it is, and ranks exchange their shares of the first one as signs with a scale a
// block. What a code is off by is kept, and joins what is sent next: on the rank that sends, and on
// the owner of a shard, which codes the sum once more for everyone.
//
// A turn is a chunk of its owner's shard and the runs that lie alike in the others'. Of each turn
// a rank keeps the momentum of all N runs, the errors of what it has sent of them, and as owner
// the error of what it has returned. A step's operations on an element, each rounded once:
//
//     g  = gradient (widened exactly) * gradient_scale, zero below 2^-60
//     c  = (m * (beta1 / N) + g * (1 - beta1)) + error
//     error' = c - decoded(c)                                 c goes to the owner as a code
//     s  = the ranks' decoded c in rank order, + owner_error
//     owner_error' = s - decoded(s)                           s goes to all as a code
//     m' = decoded(s)
//
// Where the second moment is zero no gradient ever came, and none is divided by it: there m is -0,
// which stays so, and c, s and both errors are zero. m is -0 nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec.h"
#include "ferry/dtype.h"

namespace ferry::zero {

// The factors of a step, rounded once to float.
struct MomentumShare {
    float gradient_scale = 1;  // clip factor / loss scale
    float momentum = 0;        // beta1 / N
    float gradient = 0;        // 1 - beta1
};

// A turn's arrays of `count` floats each, one after the other.
template <class Float>
struct FeedbackOf {
    Float* data = nullptr;
    int64_t count = 0;
    int ranks = 1;

    Float* momentum(int rank) const { return data + rank * count; }
    Float* error(int rank) const { return data + (ranks + rank) * count; }
    Float* owner_error() const { return data + 2 * ranks * count; }
};
using Feedback = FeedbackOf<float>;
constexpr int64_t feedback_bytes(int64_t count, int ranks) { return (2 * ranks + 1) * count * 4; }

// Elements [first, first + count) of a turn, from the beginning of a block; the pointers are to
// those alone. Serial; any thread.
constexpr int64_t kMostAtOnce = 4096;  // count at most

// One run of a turn: encodes c into its part.
void compress(const Codec& codec, const MomentumShare& share, DType wire, const std::byte* gradient,
              const float* momentum, float* error, Part part, int64_t first, int64_t count);
// The owner's run: `parts` are the ranks', one behind the other, `merged` is its own.
void merge(const Codec& codec, const std::byte* parts, int ranks, const float* momentum,
           float* owner_error, Part merged, int64_t first, int64_t count);
void average(const Codec& codec, ConstPart merged, float* momentum, int64_t first, int64_t count);
// Momentum as it is kept, of both moments.
void mark_untouched(const float* first_moment, const float* second_moment, int64_t count,
                    float* momentum);

}  // namespace ferry::zero
