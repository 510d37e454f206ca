#include "ring_attention.h"

#include <algorithm>

namespace ferry::model {

using ops::ConstView;
using ops::SequencePart;
using ops::View;

namespace {

int64_t float_bytes(int64_t count) { return count * size_of(DType::f32); }

}  // namespace

RingAttention::RingAttention(const Numerics& numerics, const ops::Attention& whole, ops::Ops& ops,
                             KernelRanks* ranks, int64_t block)
    : numerics_(numerics),
      whole_(whole),
      ops_(ops),
      parts_(ops::part_attention_of(ops)),
      ranks_(ranks),
      block_(block),
      query_(whole.heads * whole.head_dim),
      key_(whole.kv_heads * whole.head_dim) {
    FERRY_CHECK(parts_, "ring order is of operations that have parts");
}

RingAttention::Room RingAttention::cut(Carver& carver) const {
    const int64_t bytes = std::max(keys_bytes(), queries_bytes(true));
    Room room;
    room.to = carver.bytes(bytes);
    room.from = carver.bytes(bytes);
    room.sum = carver.floats(tokens() * (query_ + 2 * key_));
    room.part = carver.floats(tokens() * (query_ + 2 * key_) + lse_floats());
    room.arrived = carver.floats(tokens() * std::max(query_, 2 * key_) + lse_floats());
    return room;
}

int64_t RingAttention::scratch_bytes() const {
    ops::Attention one = whole_;
    one.sequences = 1;
    return parts_->part_scratch_bytes(one, numerics_.sequence, numerics_.sequence);
}

int64_t RingAttention::keys_bytes() const {
    return 2 * tokens() * key_ * size_of(numerics_.compute);
}

int64_t RingAttention::queries_bytes(bool backward) const {
    const int64_t one = tokens() * query_ * size_of(numerics_.compute);
    return backward ? round_up(3 * one, 64) + float_bytes(lse_floats()) : one;
}

// The most that a rank gives: which of keys and queries go where differs from part to part, and all
// ranks need one plan.
BlockExchanges::Group RingAttention::exchanges(const Shape& shape, const Numerics& numerics) {
    const int64_t width = size_of(numerics.compute), tokens = numerics.tokens();
    const int64_t query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
    const int64_t lse = float_bytes(shape.heads * tokens), keys = 2 * tokens * key;
    const int64_t queries = tokens * query, steps = numerics.parts / 2;
    BlockExchanges::Group most{
        .forward_calls = 2 * steps, .backward_calls = 4 * steps, .attention_calls = 2 * steps};
    int64_t most_without = 0;  // backward's, where it does not attend again
    for (int part = 0; part < numerics.parts; ++part) {
        int64_t forward = 0, backward = 0;
        for (int step = 1; step <= steps; ++step) {
            const bool gives_keys = part + step < numerics.parts, gets_keys = part >= step;
            forward += (gives_keys ? keys : queries) * width;
            forward += gets_keys ? 0 : float_bytes(queries) + lse;
            backward += gives_keys ? keys * width : round_up(3 * queries * width, 64) + lse;
            backward += float_bytes(gets_keys ? keys : queries);
        }
        most.forward_bytes = std::max(most.forward_bytes, forward);
        most.backward_bytes = std::max(most.backward_bytes, forward + backward);
        most_without = std::max(most_without, backward);
    }
    most.attention_bytes = most.backward_bytes - most_without;
    return most;
}

View RingAttention::matrix_in(std::byte* memory, int index, int64_t columns) const {
    const int64_t bytes = tokens() * columns * size_of(numerics_.compute);
    return View::of(memory + index * bytes, numerics_.compute, tokens(), columns);
}

float* RingAttention::lse_behind(std::byte* memory) const {
    const int64_t matrices = 3 * tokens() * query_ * size_of(numerics_.compute);
    return reinterpret_cast<float*>(memory + round_up(matrices, 64));
}

RingAttention::Keys RingAttention::keys_in(std::byte* memory) const {
    return {matrix_in(memory, 0, key_), matrix_in(memory, 1, key_)};
}

RingAttention::Queries RingAttention::queries_in(std::byte* memory, bool backward) const {
    if (!backward) return {.q = matrix_in(memory, 0, query_)};
    return {matrix_in(memory, 0, query_), matrix_in(memory, 1, query_),
            matrix_in(memory, 2, query_), lse_behind(memory)};
}

View RingAttention::output_in(float* memory) const {
    return View::of(memory, DType::f32, tokens(), query_);
}

RingAttention::Gradients RingAttention::gradients_in(float* memory) const {
    float* const keys = memory + tokens() * query_;
    return {output_in(memory), View::of(keys, DType::f32, tokens(), key_),
            View::of(keys + tokens() * key_, DType::f32, tokens(), key_)};
}

// In the last step of an even number both ranks make the pair: that of the keys takes the first of
// them.
SequencePart RingAttention::keys_of(int step) const {
    const int64_t all = numerics_.sequence, half = all / 2;
    if (2 * step < numerics_.parts) return {0, all};
    return gets_keys(step) ? SequencePart{half, all - half} : SequencePart{0, half};
}

void RingAttention::shift(int by, const void* to, int64_t to_bytes, void* from,
                          int64_t from_bytes) {
    if (ranks_ == nullptr) return;
    ranks_->shift({static_cast<const std::byte*>(to), static_cast<std::byte*>(from), to_bytes,
                   from_bytes, by},
                  block_);
}

void RingAttention::give(int step, const Keys& keys, const Queries& queries, bool backward) {
    const auto bytes = [&](bool of_keys) {
        return of_keys ? keys_bytes() : queries_bytes(backward);
    };
    if (gives_keys(step)) {
        ops_.copy_out(keys.k, matrix_in(room_.to, 0, key_));
        ops_.copy_out(keys.v, matrix_in(room_.to, 1, key_));
    } else {
        ops_.copy_out(queries.q, matrix_in(room_.to, 0, query_));
        if (backward) {
            ops_.copy_out(queries.dout, matrix_in(room_.to, 1, query_));
            ops_.copy_out(queries.out, matrix_in(room_.to, 2, query_));
            ops_.copy_out(ConstView::of(queries.lse, DType::f32, 1, lse_floats()),
                          View::of(lse_behind(room_.to), DType::f32, 1, lse_floats()));
        }
    }
    shift(step, room_.to, bytes(gives_keys(step)), room_.from, bytes(gets_keys(step)));
}

// each(the sequence's shape, its queries and keys as parts, their first rows, its number).
template <class Each>
void RingAttention::for_sequences(int queries, int keys, SequencePart of_keys,
                                  const Each& each) const {
    const int64_t rows = numerics_.sequence;
    const SequencePart q{queries * rows, rows}, k{keys * rows + of_keys.first, of_keys.count};
    for (int64_t i = 0; i < numerics_.micro_batch; ++i) {
        ops::Attention one = whole_;
        one.sequences = 1;
        if (one.document_start != nullptr) {
            one.document_start += i * whole_.sequence;
            one.document_end += i * whole_.sequence;
        }
        each(one, q, k, i * rows, i * rows + of_keys.first, i);
    }
}

void RingAttention::attend(int queries, int keys, SequencePart of_keys, const Queries& q,
                           const Keys& k, View out, float* lse, std::byte* scratch) {
    for_sequences(queries, keys, of_keys,
                  [&](const ops::Attention& one, SequencePart of_q, SequencePart of_k, int64_t row,
                      int64_t key_row, int64_t i) {
                      parts_->part_forward(one, of_q, of_k, q.q.row_range(row, of_q.count),
                                           k.k.row_range(key_row, of_k.count),
                                           k.v.row_range(key_row, of_k.count),
                                           out.row_range(row, of_q.count),
                                           lse + i * whole_.heads * of_q.count, scratch);
                  });
}

void RingAttention::attend_back(int queries, int keys, SequencePart of_keys, const Queries& q,
                                const Keys& k, const Gradients& to, std::byte* scratch) {
    if (of_keys.count < numerics_.sequence)  // the other rows' are none
        ops_.fill_zero(to.dk.data, float_bytes(2 * tokens() * key_));
    for_sequences(
        queries, keys, of_keys,
        [&](const ops::Attention& one, SequencePart of_q, SequencePart of_k, int64_t row,
            int64_t key_row, int64_t i) {
            const auto of_query = [&](const auto& x) { return x.row_range(row, of_q.count); };
            const auto of_key = [&](const auto& x) { return x.row_range(key_row, of_k.count); };
            parts_->part_backward(one, of_q, of_k, of_query(q.q), of_key(k.k), of_key(k.v),
                                  of_query(q.out), of_query(q.dout),
                                  q.lse + i * whole_.heads * of_q.count, of_query(to.dq),
                                  of_key(to.dk), of_key(to.dv), scratch);
        });
}

void RingAttention::forward(ConstView q, ConstView k, ConstView v, View out, float* lse,
                            std::byte* scratch) {
    const Queries own{.q = q};
    const Keys own_keys{k, v};
    const View sum = output_in(room_.sum), part = output_in(room_.part);
    const int me = numerics_.part, parts = numerics_.parts;
    attend(me, me, {0, numerics_.sequence}, own, own_keys, sum, lse, scratch);
    const int64_t answer = float_bytes(tokens() * query_ + lse_floats());
    // A row's log-sum-exps stand by sequence, so each sequence is merged by itself.
    const auto merge = [&](float* other) {
        for (int64_t i = 0; i < numerics_.micro_batch; ++i) {
            const int64_t rows = numerics_.sequence, at = i * whole_.heads * rows;
            parts_->merge_parts(whole_.heads, output_in(other).row_range(i * rows, rows),
                                lse_in(other) + at, sum.row_range(i * rows, rows), lse + at);
        }
    };
    for (int step = 1; step <= steps(); ++step) {
        give(step, own_keys, own, false);
        if (gets_keys(step)) {
            attend(me, me - step, keys_of(step), own, keys_in(room_.from), part, lse_in(room_.part),
                   scratch);
            merge(room_.part);
        } else {
            attend(me - step + parts, me, keys_of(step), queries_in(room_.from, false), own_keys,
                   part, lse_in(room_.part), scratch);
        }
        shift(parts - step, room_.part, gets_keys(step) ? 0 : answer, room_.arrived,
              gives_keys(step) ? 0 : answer);
        if (!gives_keys(step)) merge(room_.arrived);
    }
    ops_.cast(sum, out);
}

void RingAttention::backward(ConstView q, ConstView k, ConstView v, ConstView out, ConstView dout,
                             const float* lse, View dq, View dk, View dv, std::byte* scratch) {
    const Queries own{q, dout, out, lse};
    const Keys own_keys{k, v};
    const Gradients sum = gradients_in(room_.sum), part = gradients_in(room_.part);
    const int me = numerics_.part, parts = numerics_.parts;
    attend_back(me, me, {0, numerics_.sequence}, own, own_keys, sum, scratch);
    const int64_t of_queries = tokens() * query_, of_keys = 2 * tokens() * key_;
    float *const sum_keys = room_.sum + of_queries, *const part_keys = room_.part + of_queries;
    for (int step = 1; step <= steps(); ++step) {
        give(step, own_keys, own, true);
        const bool mine = gets_keys(step);  // the pair's queries, else its keys
        if (mine) {
            attend_back(me, me - step, keys_of(step), own, keys_in(room_.from), part, scratch);
            ops_.add(room_.sum, room_.part, of_queries);
        } else {
            attend_back(me - step + parts, me, keys_of(step), queries_in(room_.from, true),
                        own_keys, part, scratch);
            ops_.add(sum_keys, part_keys, of_keys);
        }
        shift(parts - step, mine ? part_keys : room_.part, float_bytes(mine ? of_keys : of_queries),
              room_.arrived, float_bytes(gives_keys(step) ? of_keys : of_queries));
        ops_.add(gives_keys(step) ? sum_keys : room_.sum, room_.arrived,
                 gives_keys(step) ? of_keys : of_queries);
    }
    ops_.cast(sum.dq, dq);
    ops_.cast(sum.dk, dk);
    ops_.cast(sum.dv, dv);
}

}  // namespace ferry::model
