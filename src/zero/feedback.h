// The exchange of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) and of 0/1 Adam (Lu et al. 2022,
// arXiv 2202.06009): ranks exchange their shares of the first moment as signs with a scale a block.
// The error of a code is kept, and is added to what is sent next. The rank that sends keeps one. So
// does the owner of a shard, which codes the sum once more for everyone.
// train/step/momentum_schedule.h says which updates do so, and what becomes of the second moment.
//
// A turn is a chunk of its owner's shard and the runs that lie alike in the others'. Of each turn
// a rank keeps the momentum of all N runs, the errors of what it has sent of them, and as owner
// the error of what it has returned. A step's operations on an element, each rounded once:
//
//     g  = gradient (widened exactly) * gradient_scale, zero below 2^-60
//     h  = m * momentum + g * gradient
//     c  = h * step + error
//     error' = c - decoded(c)                                 c goes to the owner as a code
//     s  = the ranks' decoded c in rank order, + owner_error
//     owner_error' = s - decoded(s)                           s goes to all as a code
//     m' = decoded(s) * average
//
// The factors (MomentumShare), with N ranks and lr the step's rate over 1 - beta1^t:
//
//                   momentum    gradient           step     average
//     1-bit Adam    beta1 / N   1 - beta1          1        1
//     0/1 Adam      beta1       (1 - beta1) * N    lr / N   1 / lr, summed over the interval
//
// 0/1 Adam sends what moves the weights, so errors keep their weight where lr changes. With local
// steps a rank keeps another sum, u: what its updates moved since the last exchange. An update
// without an exchange ends after the second line. An exchange sends that sum:
//
//     u' = (the first of an interval ? 0 : u) + h * step
//     m' = h                                                  no exchange: of this rank alone
//     c  = u' + error                                         an exchange
//
// Where the second moment is zero no gradient ever came, and nothing is divided by it. There m is
// -0 and stays -0, and c, s, u and both errors are zero. m is -0 nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec.h"
#include "ferry/dtype.h"

namespace ferry::zero {

// The factors of a step, rounded once to float.
struct MomentumShare {
    float gradient_scale = 1;  // clip factor / loss scale
    float momentum = 0, gradient = 0, step = 1, average = 1;
    bool begins = true;  // an interval between exchanges
};

// A turn's arrays of `count` floats each, one after the other.
template <class Float>
struct FeedbackOf {
    Float* data = nullptr;
    int64_t count = 0;
    int ranks = 1;
    bool local_steps = false;

    Float* momentum(int rank) const { return data + rank * count; }
    Float* error(int rank) const { return data + (ranks + rank) * count; }
    Float* owner_error() const { return data + 2 * (ranks * count); }
    // Of what this rank moved since the last exchange. Null without local steps.
    Float* moved(int rank) const {
        return local_steps ? data + (2 * ranks + 1 + rank) * count : nullptr;
    }
};
using Feedback = FeedbackOf<float>;
constexpr int64_t feedback_bytes(int64_t count, int ranks, bool local_steps) {
    return ((local_steps ? 3 : 2) * ranks + 1) * count * 4;
}

// Elements [first, first + count) of a turn, from the beginning of a block; the pointers are to
// those alone. Serial; any thread.
constexpr int64_t kMostAtOnce = 4096;  // count at most

// One run of a turn: encodes c into its part. `moved`: null without local steps.
void compress(const Codec& codec, const MomentumShare& share, DType wire, const std::byte* gradient,
              const float* momentum, const float* moved, float* error, Part part, int64_t first,
              int64_t count);
// Without an exchange: what is moved, and this rank's momentum.
void move_alone(const MomentumShare& share, DType wire, const std::byte* gradient, float* momentum,
                float* moved, int64_t count);
// The owner's run: `parts` are the ranks', one behind the other, `merged` is its own.
void merge(const Codec& codec, const std::byte* parts, int ranks, const float* momentum,
           float* owner_error, Part merged, int64_t first, int64_t count);
void average(const Codec& codec, const MomentumShare& share, ConstPart merged, float* momentum,
             int64_t first, int64_t count);
// Momentum as it is kept, of both moments.
void mark_untouched(const float* first_moment, const float* second_moment, int64_t count,
                    float* momentum);

// On a GPU the codes are made in host memory too, of gradients that it keeps. Enqueued on a
// cudaStream_t: this rank's gradient of each rank's run of a turn, rounded to the wire type, run
// behind run; and norm leaves (ops::Ops::round_gradient), each the sum of all runs' in the ranks'
// order. The runs begin `apart` elements from each other, and have `count`: whole leaves.
// `gradient` and `kept` begin at multiples of four elements. Fails as the kernels of codec.h do.
namespace cuda {
void keep(const float* gradient, int ranks, int64_t apart, int64_t count, DType wire, void* kept,
          float* leaves, void* stream);
}

}  // namespace ferry::zero
