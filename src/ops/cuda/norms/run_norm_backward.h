// Which kernels a norm's backward pass has, by its shape.
#pragma once

#include "heads_backward.h"
#include "norm_backward.h"
#include "norm_sums.h"
#include "ops/cuda/shared/sums_of_rows.h"
#include "whole_sums.h"

namespace ferry::ops::cuda {

// What blocks of the current GPU can have of shared memory.
inline int64_t opt_in_bytes() {
    int device = 0, bytes = 0;
    check_launch("norm backward", cudaGetDevice(&device));
    check_launch("norm backward",
                 cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}

// The kernel that sums the gradients of weight and bias too, and its dynamic shared memory.
template <class Norm>
struct SumsKernel {
    void (*run)(Norm, Backward);
    int64_t room;
};
template <class Norm, class P>
SumsKernel<Norm> sums_kernel(const Backward& a) {
    constexpr int kRow = P::kRow, kHeld = P::kHeld;
    constexpr bool kWhole = has_whole_form(kHeld, P::kLie);
    // Where every GPU has room for that form, the other is not compiled.
    if constexpr (kWhole && whole_form_fits(kRow, kHeld, kLeastOptIn)) {
        return {whole_sums_kernel<Norm, kRow, kHeld>, whole_room(kRow, kHeld)};
    } else {
        if constexpr (kWhole) {
            if (whole_form_fits(kRow, kHeld, opt_in_bytes()))
                return {whole_sums_kernel<Norm, kRow, kHeld>, whole_room(kRow, kHeld)};
        }
        if constexpr (kRow == kHeadRow && P::kLie == Lie::whole && !Norm::kBiased) {
            if (a.addend.data == nullptr) return {heads_sums_kernel<Norm>, kRingRoom};
        }
        return {backward_sums_kernel<Norm, kRow, kHeld, P::kLie>,
                Summing<kRow, kHeld, P::kLie>::room(Norm::kBiased)};
    }
}

// Whether one kernel does both: fewer blocks would leave multiprocessors without work. Never by
// what is asked for: the order of a sum follows from the shape.
inline bool sums_at_once(int64_t n, unsigned blocks) {
    constexpr unsigned kBlocksLeast = 256;
    return n <= kMostHeld && blocks >= kBlocksLeast;
}

template <class Norm>
void run_backward(const Norm& norm, Backward a, Accumulator weight_gradient,
                  Accumulator bias_gradient, cudaStream_t stream) {
    const int64_t n = a.weight.cols;
    const NormTerm<Norm> term{norm, a.dy, a.x, a.runs};
    const Lie lie = lie_of(n, any_wide(a.dy, a.x, a.addend), a.dy, a.x, a.addend, a.weight, a.dx);
    with_plan(n, lie, [&](auto plan) {
        using P = decltype(plan);
        using S = Summing<P::kRow, P::kHeld, P::kLie>;
        static_assert(S::kRows >= kNormRows, "scratch has room for a partial sum of kNormRows");
        const bool asked = weight_gradient.asked() || bias_gradient.asked();
        if (asked && sums_at_once(n, blocks_for(a.runs.count, S::kRows))) {
            constexpr int64_t kGroupsAtOnce =
                int64_t{kMultiprocessors} * resident(P::kHeld, P::kLie) / P::kRow;
            a.rows_of_group =
                std::max<int64_t>(S::kRowsOfGroup, ceil_div(int64_t{a.runs.count}, kGroupsAtOnce));
            const unsigned blocks = blocks_for(a.runs.count, S::kGroups * a.rows_of_group);
            if (bias_gradient.asked()) a.bias_partial = a.partial + int64_t{blocks} * n;
            const auto [kernel, room] = sums_kernel<Norm, P>(a);
            if (room > 47 * kKiB) {
                const auto error = cudaFuncSetAttribute(
                    kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room));
                check_launch("norm backward", error);
            }
            start(kernel, blocks, P::kThreads, room, stream, norm, a);
            if (weight_gradient.asked()) {
                add_partials(a.partial, blocks, n, weight_gradient, bias_gradient, stream);
            } else {
                add_partials(a.bias_partial, blocks, n, bias_gradient, stream);
            }
            return;
        }
        if (bias_gradient.asked()) add_rows(a.dy, a.partial, bias_gradient, stream);
        if (weight_gradient.asked())
            add_sums(term, a.runs.count, n, a.partial, weight_gradient, stream);
        if (a.dx.data != nullptr) {
            start(backward_kernel<Norm, P::kRow, P::kHeld, P::kLie>, P::blocks(a.runs.count),
                  P::kThreads, 0, stream, norm, a);
        }
    });
}

inline Backward backward_of(ConstView dy, ConstView x, ConstView weight, ConstView addend, View dx,
                            float* partial) {
    return {dy,
            x,
            weight,
            addend,
            dx,
            runs_of(x, weight.cols),
            1.0 / static_cast<double>(weight.cols),
            partial};
}

}  // namespace ferry::ops::cuda
