// Attention of a part of a sequence's queries to a part of its keys, and what the parts of keys
// give together: for ranks that share a sequence and have its parts in turn.
#pragma once

#include "ops/ops.h"

namespace ferry::ops {

// `shape` is the whole sequence's, of one sequence, with its masks: positions are the sequence's,
// wherever a part begins. Rows of the operands are the part's own. Operations and scratch are as
// those of Ops.
class PartAttention {
public:
    virtual ~PartAttention() = default;

    // Of either pass, for parts of so many tokens at most. Throws usage where there are no kernels
    // for this shape: a GPU's are of 16 bits.
    virtual int64_t part_scratch_bytes(const Attention& shape, int64_t queries,
                                       int64_t keys) const = 0;
    // out: fp32, the softmax over the part's keys; lse: [heads, queries.count], -infinity for a
    // query that sees none of them, whose output is 0.
    virtual void part_forward(const Attention& shape, SequencePart queries, SequencePart keys,
                              ConstView q, ConstView k, ConstView v, View out, float* lse,
                              std::byte* scratch) = 0;
    // What the part's keys give. out, lse: over all keys that the queries see. dq, dk, dv: fp32.
    virtual void part_backward(const Attention& shape, SequencePart queries, SequencePart keys,
                               ConstView q, ConstView k, ConstView v, ConstView out, ConstView dout,
                               const float* lse, View dq, View dk, View dv, std::byte* scratch) = 0;
    // Outputs over two sets of keys, fp32 [rows, heads * head_dim], become the one over both: in
    // `sum` and `sum_lse`. The log-sum-exps are [heads, rows].
    virtual void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum,
                             float* sum_lse) = 0;
};

// Those of these operations; null: they have none. Ops must outlive it.
PartAttention* part_attention_of(Ops& ops);

}  // namespace ferry::ops
