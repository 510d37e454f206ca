// Attention of ranks that have all heads of their own part of a sequence each.
//
// A query needs the keys of its own part and of all before. Parts that differ by d are a pair once
// a circle is closed: with S ranks the step d = 1 .. S / 2 makes the pairs (i, i - d), by the rank
// of the queries, and (i, i - (S - d)), by that of the keys. So each rank makes one pair a step,
// whatever its part is: it gets keys from the rank d before it, or queries from there, and what
// these give goes back. In the last step of an even number both ranks of a pair make half of it,
// each with half of the keys. A rank adds up in the order of the steps, its own part first.
#pragma once

#include <vector>

#include "carver.h"
#include "model/model.h"
#include "ops/part_attention.h"

namespace ferry::model {

class RingAttention {
public:
    // `whole`: of the sequences with their masks; its sequences are a micro-batch's.
    RingAttention(const Numerics& numerics, const ops::Attention& whole, ops::Ops& ops,
                  KernelRanks* ranks, int64_t block);

    // Buffers of both passes, in which nothing stays from one call to the next.
    struct Room {
        std::byte *to = nullptr, *from = nullptr;  // a message each
        // fp32: what is added up, what a pair gives, what comes back of another.
        float *sum = nullptr, *part = nullptr, *arrived = nullptr;
    };
    Room cut(Carver& carver) const;
    void use(const Room& room) { room_ = room; }
    int64_t scratch_bytes() const;
    static BlockExchanges::Group exchanges(const Shape& shape, const Numerics& numerics);

    // As Ops::attention_forward and attention_backward, of all rows of this rank's part.
    void forward(ops::ConstView q, ops::ConstView k, ops::ConstView v, ops::View out, float* lse,
                 std::byte* scratch);
    void backward(ops::ConstView q, ops::ConstView k, ops::ConstView v, ops::ConstView out,
                  ops::ConstView dout, const float* lse, ops::View dq, ops::View dk, ops::View dv,
                  std::byte* scratch);

private:
    // What one rank gives another.
    struct Keys {
        ops::ConstView k{}, v{};
    };
    struct Queries {
        ops::ConstView q{}, dout{}, out{};  // all but q in backward alone
        const float* lse = nullptr;
    };
    struct Gradients {  // fp32
        ops::View dq{}, dk{}, dv{};
    };
    // The matrices of a message lie behind each other, and log-sum-exps behind three.
    ops::View matrix_in(std::byte* memory, int index, int64_t columns) const;
    float* lse_behind(std::byte* memory) const;
    Keys keys_in(std::byte* memory) const;
    Queries queries_in(std::byte* memory, bool backward) const;
    ops::View output_in(float* memory) const;
    float* lse_in(float* memory) const { return memory + tokens() * query_; }
    Gradients gradients_in(float* memory) const;

    int64_t tokens() const { return numerics_.tokens(); }
    int64_t lse_floats() const { return whole_.heads * tokens(); }
    int64_t keys_bytes() const;
    int64_t queries_bytes(bool backward) const;
    int steps() const { return numerics_.parts / 2; }
    // Whether in a step this rank gets the keys of an earlier part, or queries of a later one; and
    // what it gives: the same of the rank that gets it.
    bool gets_keys(int step) const { return numerics_.part >= step; }
    bool gives_keys(int step) const { return numerics_.part + step < numerics_.parts; }
    // The keys of a pair of the step that this rank takes, within their part.
    ops::SequencePart keys_of(int step) const;
    void shift(int by, const void* to, int64_t to_bytes, void* from, int64_t from_bytes);
    void give(int step, const Keys& keys, const Queries& queries, bool backward);

    // One sequence of a pair at a time. Parts by number; `of_keys` within theirs.
    template <class Each>
    void for_sequences(int queries, int keys, ops::SequencePart of_keys, const Each& each) const;
    void attend(int queries, int keys, ops::SequencePart of_keys, const Queries& q, const Keys& k,
                ops::View out, float* lse, std::byte* scratch);
    void attend_back(int queries, int keys, ops::SequencePart of_keys, const Queries& q,
                     const Keys& k, const Gradients& to, std::byte* scratch);

    const Numerics& numerics_;
    const ops::Attention whole_;
    ops::Ops& ops_;
    ops::PartAttention* const parts_;
    KernelRanks* const ranks_;  // null: nothing but time and memory is asked for
    const int64_t block_;
    const int64_t query_, key_;  // columns of the queries of all heads, and of the keys
    Room room_{};
};

}  // namespace ferry::model
