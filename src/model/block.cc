#include "block.h"

#include <algorithm>
#include <cmath>

#include "families.h"

namespace ferry::model {

using ops::ConstView;
using ops::View;

Block::Block(const Shape& shape, const Numerics& numerics, const RopeTable& rope, ops::Ops& ops,
             const LayerMemory& memory, const Mask& mask, std::byte* scratch)
    : Block(shape, numerics, rope, ops, memory, mask, names_of(shape.family).input_major) {
    Carver carver(scratch);
    b_ = cut(carver, 0);
    if (ring_) ring_->use(b_.ring);
}

Block::Block(const Shape& shape, const Numerics& numerics, const RopeTable& rope, ops::Ops& ops,
             const LayerMemory& memory, const Mask& mask, bool input_major)
    : shape_(shape),
      numerics_(numerics),
      rope_(rope),
      ops_(ops),
      mask_(mask),
      memory_(memory),
      layer_(memory.layer()),
      index_(layer_.index),
      sums_(numerics, mask.ranks.slices, ops, index_),
      all_(heads(shape.kv_heads)),
      own_(heads_of(head_share(shape.kv_heads, numerics.parts, numerics.part))),
      most_(heads_of({0, ceil_div(shape.kv_heads, int64_t{numerics.parts})})),
      norm1_{memory(Role::attention_norm), memory(Role::attention_norm_bias), shape.norm_eps},
      norm2_{memory(Role::mlp_norm), memory(Role::mlp_norm_bias), shape.norm_eps},
      query_norm_{memory(Role::query_norm), {}, shape.norm_eps},
      key_norm_{memory(Role::key_norm), {}, shape.norm_eps},
      qkv_(memory, input_major, {Role::query, Role::key, Role::value, Role::query_key_value},
           {Role::query_bias, Role::key_bias, Role::value_bias, Role::query_key_value_bias}),
      output_(memory, input_major, {Role::output}, {Role::output_bias}, numerics.slice == 0),
      up_(memory, input_major, {Role::gate, Role::up}, {Role::gate_bias, Role::up_bias}),
      down_(memory, input_major, {Role::down}, {Role::down_bias}, numerics.slice == 0) {
    if (numerics.ring) ring_.emplace(numerics, attention(all_), ops, mask.ranks.sequence, index_);
}

int64_t Block::scratch_bytes(const Shape& shape, const Numerics& numerics, const RopeTable& rope,
                             ops::Ops& ops, const Layer& layer) {
    const LayerMemory nowhere(layer, numerics.compute, nullptr, nullptr);
    const Mask mask{.pattern = shape.pattern_of(layer.index)};
    Block block(shape, numerics, rope, ops, nowhere, mask, nullptr);
    Carver carver(nullptr);
    block.cut(carver, block.op_scratch_bytes());
    return carver.peak();
}

Block::Heads Block::heads(int64_t of_keys) const {
    const int64_t queries = of_keys * (shape_.heads / shape_.kv_heads);
    return {queries, of_keys, queries * shape_.head_dim, of_keys * shape_.head_dim};
}

View Block::of_heads(Carver& carver, int64_t columns, int64_t most) const {
    const View room = carver.matrix(numerics_.compute, numerics_.attended_tokens(), most);
    return View::of(room.data, room.type, room.rows, columns);
}

void Block::cut_attention(Carver& carver, Buffers& b) const {
    b.attended = shares() ? of_heads(carver, own_.query, most_.query)
                          : output_.input(carver, numerics_.tokens());
    b.lse = carver.floats(most_.queries * numerics_.attended_tokens());
}

void Block::cut_saved(Saved what, Carver& carver, Buffers& b) const {
    const int64_t tokens = numerics_.tokens();
    switch (what) {
        case Saved::attention:
            cut_attention(carver, b);
            return;
        case Saved::mlp:
            b.inner = carver.matrix(numerics_.compute, tokens, up_.outputs());
            return;
        case Saved::projections:
            if (exchanges()) return;
            b.qkv = of_heads(carver, own_.all(), most_.all());
            b.x_mid = carver.matrix(numerics_.residual, tokens, shape_.hidden);
            return;
    }
}

int64_t Block::saved_bytes(const Shape& shape, const Numerics& numerics, const RopeTable& rope,
                           ops::Ops& ops, const Layer& layer, Saved what) {
    const LayerMemory nowhere(layer, numerics.compute, nullptr, nullptr);
    Carver carver(nullptr);
    Buffers unused;
    Block(shape, numerics, rope, ops, nowhere, {}, nullptr).cut_saved(what, carver, unused);
    return carver.peak();
}

void Block::save(Saved what, std::byte* memory, bool known) {
    // Every rank takes part in the exchanges between them, so none has their results already.
    if (what == Saved::projections && exchanges()) return;
    Carver carver(memory);
    cut_saved(what, carver, b_);
    saved_[at(what)] = true;
    known_[at(what)] = known;
}

// The views of a backward that defers are of all tokens, and of memory that outlives it. What it
// saves has memory of its own, and so have gradients of n1 and n2.
void Block::cut_deferred(Carver& carver, Buffers& b) const {
    const int64_t tokens = numerics_.tokens(), rows = sums_.rows.padded;
    const DType compute = numerics_.compute;
    b.n1 = qkv_.input(carver, rows);
    if (shares()) {  // of own tokens and all heads, whatever attention saves of own heads
        b.all_heads = carver.matrix(compute, tokens, all_.all());
        b.all_attended = output_.input(carver, tokens);
    } else {
        b.dqkv = of_heads(carver, own_.all(), most_.all());
        if (!saved_[at(Saved::attention)]) b.attended = output_.input(carver, tokens);
    }
    b.dmid = carver.matrix(compute, rows, shape_.hidden);
    b.n2 = up_.input(carver, rows);
    if (!saved_[at(Saved::mlp)]) b.inner = carver.matrix(compute, tokens, up_.outputs());
    b.active = down_.input(carver, tokens);
    b.dout = carver.matrix(compute, rows, shape_.hidden);
}

int64_t Block::deferred_bytes(const Shape& shape, const Numerics& numerics, const RopeTable& rope,
                              ops::Ops& ops, const Layer& layer) {
    const LayerMemory nowhere(layer, numerics.compute, nullptr, nullptr);
    Carver carver(nullptr);
    Buffers unused;
    Block(shape, numerics, rope, ops, nowhere, {}, nullptr).cut_deferred(carver, unused);
    return carver.peak();
}

template <class Each>
void Block::for_norms(const Each& each) {
    for (Parameter* parameter : {&norm1_.weight, &norm1_.bias, &norm2_.weight, &norm2_.bias,
                                 &query_norm_.weight, &key_norm_.weight}) {
        if (parameter->exists()) each(*parameter);
    }
}

template <class Each>
void Block::for_trained_norms(const Each& each) {
    for_norms([&](Parameter& parameter) {
        if (parameter.trains()) each(parameter);
    });
}

void Block::defer(std::byte* memory) {
    Carver carver(memory);
    cut_deferred(carver, b_);
    deferring_ = true;
}

void Block::add_norms_to(float* norms) {
    for_trained_norms([&](Parameter& parameter) {
        parameter.gradient = norms;
        parameter.fresh = false;
        norms += room_of_norm(parameter.value.cols);
    });
}

int64_t Block::tile() const {
    const int64_t tokens = numerics_.tokens();
    return numerics_.mlp_tile > 0 ? std::min(numerics_.mlp_tile, tokens) : tokens;
}

Block::Buffers Block::cut(Carver& carver, int64_t op_scratch_bytes) {
    const int64_t tokens = numerics_.tokens(), tile = this->tile();
    const int64_t hidden = shape_.hidden;
    const int64_t normed = shape_.head_norms ? numerics_.attended_tokens() : 0;
    const DType compute = numerics_.compute;
    Buffers b;
    b.n1 = qkv_.input(carver, normed_rows());
    b.qkv = of_heads(carver, own_.all(), most_.all());
    if (shape_.head_norms) b.normed = of_heads(carver, own_.seen(), most_.seen());
    cut_attention(carver, b);
    if (shares()) {
        b.all_heads = carver.matrix(compute, tokens, all_.all());
        b.all_attended = output_.input(carver, tokens);
    }
    // The MLP's backward pass is the last to read x_mid, and attention's the first with dattended.
    const int64_t middle = carver.mark();
    b.x_mid =
        carver.matrix(numerics_.residual, sums_.rows.each, hidden).row_range(0, sums_.rows.own);
    const int64_t behind = carver.mark();
    carver.rewind(middle);
    b.dattended = of_heads(carver, own_.query, most_.query);
    carver.rewind(std::max(behind, carver.mark()));
    const bool apart = compute != numerics_.residual && !slices();
    b.dy = carver.matrix(compute, apart ? tokens : 0, hidden);
    // A norm's output is read for the last time before the gradient of it is written. Its rows may
    // be further apart, never nearer.
    b.dn1 = View::of(b.n1.data, compute, normed_rows(), hidden);
    if (slices()) cut_slices(carver, b);
    b.stats1 = carver.floats(norm1_.stats_floats(norm_rows()));
    b.query_rstd = carver.floats(normed * most_.queries);
    b.key_rstd = carver.floats(normed * most_.keys);
    if (shape_.head_norms)
        b.angles = carver.floats(ops_.rope_angles_floats(rope(most_.queries, false)));
    const int64_t shared = carver.mark();
    b.n2 = up_.input(carver, normed_rows());
    b.dn2 = View::of(b.n2.data, compute, normed_rows(), hidden);
    b.inner = carver.matrix(compute, tile, up_.outputs());
    b.active = down_.input(carver, tile);
    b.stats2 = carver.floats(norm2_.stats_floats(norm_rows()));
    carver.rewind(shared);
    b.dqkv = of_heads(carver, own_.all(), most_.all());
    if (ring_) b.ring = ring_->cut(carver);
    if (shares()) {
        const int64_t messages = numerics_.parts * message_bytes(Columns::queries_keys_values);
        b.sent = carver.bytes(messages);
        b.received = carver.bytes(messages);
    }
    carver.rewind(carver.peak());
    b.ops = carver.bytes(op_scratch_bytes);
    return b;
}

void Block::cut_slices(Carver& carver, Buffers& b) {
    const int64_t hidden = shape_.hidden;
    const int64_t width = std::max(size_of(numerics_.compute), size_of(numerics_.residual));
    b.part = carver.bytes(sums_.rows.padded * hidden * width);
    int64_t of_keys = 0;
    if (numerics_.key_holders > 1) {
        b.own_keys = carver.matrix(numerics_.compute, numerics_.attended_tokens(), 2 * most_.key);
        of_keys = b.own_keys.rows * b.own_keys.cols;
        b.all_keys = carver.bytes(numerics_.slices * of_keys * size_of(numerics_.compute));
    }
    b.sums = sums_.cut(carver, hidden * width, hidden, of_keys);
    b.norm_gradient = carver.floats(norm_floats());
    b.all_norm_gradients = carver.floats(numerics_.slices * norm_floats());
}

// Of the gradients of all its norms, one after the other.
int64_t Block::norm_floats() {
    int64_t floats = 0;
    for_norms([&](const Parameter& norm) { floats += room_of_norm(norm.value.cols); });
    return floats;
}

// Forward: what the norms give is gathered, and what comes behind is added up. Backward does so
// again but for the last sum; the gradients of both sums are gathered, those of both norms added
// up.
BlockExchanges::Group Block::exchanges_of_slices(const Shape& shape, const Numerics& numerics,
                                                 const RopeTable& rope, ops::Ops& ops,
                                                 const Layer& layer) {
    if (numerics.slices == 1) return {};
    const LayerMemory nowhere(layer, numerics.compute, nullptr, nullptr);
    Block block(shape, numerics, rope, ops, nowhere, {}, nullptr);
    const SliceSum& sums = block.sums_;
    const int64_t compute = size_of(numerics.compute);
    const int64_t normed = sums.bytes((block.b_.n1.ld + block.b_.n2.ld) * compute);
    const int64_t slope = sums.bytes(shape.hidden * compute);
    const int64_t sum = sums.bytes(shape.hidden * size_of(numerics.residual));
    const int64_t norms = sums.gathered_bytes(block.norm_floats() * size_of(DType::f32));
    BlockExchanges::Group found{.forward_bytes = normed + 2 * sum,
                                .backward_bytes = normed + sum + 4 * slope + norms,
                                .forward_calls = 4,
                                .backward_calls = 8};
    if (numerics.key_holders > 1) {
        const View& keys = block.b_.own_keys;
        found.backward_bytes += sums.gathered_bytes(keys.rows * keys.cols * compute);
        ++found.backward_calls;
    }
    return found;
}

int64_t Block::op_scratch_bytes() const {
    const int64_t tokens = numerics_.tokens(), tile = this->tile();
    const DType compute = numerics_.compute, residual = numerics_.residual;
    int64_t most = std::max(
        {norm1_.scratch_bytes(norm_rows(), ops_), norm2_.scratch_bytes(norm_rows(), ops_),
         qkv_.scratch_bytes(ops_, tile, compute), output_.scratch_bytes(ops_, tokens, residual),
         up_.scratch_bytes(ops_, tile, compute), down_.scratch_bytes(ops_, tile, residual)});
    // Ranks that share sequences have so many heads each, or one less. All need the same plan, and
    // fewer heads can need more: they may go in larger calls.
    if (ring_) most = std::max(most, ring_->scratch_bytes());
    for (const int64_t keys : {most_.keys, shape_.kv_heads / numerics_.parts}) {
        if (keys == 0 || ring_) continue;
        const ops::Attention its = attention(heads(keys));
        most = std::max({most, ops_.attention_forward_scratch_bytes(its),
                         ops_.attention_backward_scratch_bytes(its)});
    }
    if (shape_.head_norms)
        most = std::max(
            most, query_norm_.scratch_bytes(numerics_.attended_tokens() * most_.queries, ops_));
    return most;
}

// ---------------------------------------------------------------- parts

ConstView Block::in_compute_type(ConstView x, View room) {
    if (x.type == numerics_.compute) return x;
    const View copy = room.row_range(0, x.rows);
    ops_.cast(x, copy);
    return copy;
}

ops::Attention Block::attention(const Heads& heads) const {
    const int64_t window = shape_.window_of(index_), sequence = numerics_.whole_sequence();
    return {.sequences = numerics_.micro_batch,
            .sequence = sequence,
            .heads = heads.queries,
            .kv_heads = heads.keys,
            .head_dim = shape_.head_dim,
            .scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim)),
            .type = numerics_.compute,
            .window = window < sequence ? window : 0,
            .pattern = mask_.pattern,
            .blocks = mask_.lists,
            .documents = numerics_.documents,
            .document_start = mask_.documents.start,
            .document_end = mask_.documents.end};
}

ops::Rope Block::rope(int64_t heads, bool inverse) const {
    // In ring order positions begin behind those of the parts before it.
    return {.sequence = numerics_.ring ? numerics_.sequence : numerics_.whole_sequence(),
            .heads = heads,
            .head_dim = shape_.head_dim,
            .frequencies = rope_.frequencies.data(),
            .amplitude = rope_.amplitude,
            .inverse = inverse,
            .document_start = numerics_.ring ? mask_.documents.part_start : mask_.documents.start,
            .positions = numerics_.whole_sequence()};
}

// Norms of queries' and keys' heads, where the family has them, and their rotation.
void Block::turn_heads() {
    FERRY_CHECK(!shape_.head_norms || !rope_.frequencies.empty());
    // The embedding knows the positions, or other ranks have all heads.
    if (rope_.frequencies.empty() || own_.keys == 0) return;
    // Queries and keys lie side by side, so one rotation turns both.
    if (!shape_.head_norms) return ops_.rope(seen(), rope(own_.queries + own_.keys, false));
    const ops::Rope of_queries = rope(own_.queries, false), of_keys = rope(own_.keys, false);
    ops_.rope_angles(of_queries, b_.angles);
    ops_.norm_rope_forward(queries(b_.qkv), query_norm_.weight.value, query_norm_.eps,
                           queries(b_.normed), b_.query_rstd, of_queries, b_.angles);
    ops_.norm_rope_forward(keys(b_.qkv), key_norm_.weight.value, key_norm_.eps, keys(b_.normed),
                           b_.key_rstd, of_keys, b_.angles);
}

// dqkv holds the gradients of what turn_heads gave, and receives those of what it took.
void Block::turn_heads_back() {
    if (rope_.frequencies.empty() || own_.keys == 0) return;
    if (!shape_.head_norms) {
        return ops_.rope(b_.dqkv.col_range(0, own_.seen()), rope(own_.queries + own_.keys, true));
    }
    ops_.norm_rope_backward(queries(b_.dqkv), queries(b_.qkv), query_norm_.weight.value,
                            b_.query_rstd, part_of(query_norm_.weight), rope(own_.queries, true),
                            b_.angles, b_.ops);
    ops_.norm_rope_backward(keys(b_.dqkv), keys(b_.qkv), key_norm_.weight.value, b_.key_rstd,
                            part_of(key_norm_.weight), rope(own_.keys, true), b_.angles, b_.ops);
}

// ---------------------------------------------------------------- ranks of a sequence

// each(first column among all heads', first among the part's own, columns), for queries, keys and
// values in turn.
template <class Each>
void Block::for_heads(int part, Columns columns, const Each& each) const {
    const HeadShare share = head_share(shape_.kv_heads, numerics_.parts, part);
    const Heads before = heads(share.first), its = heads(share.count);
    each(before.query, int64_t{0}, its.query);
    if (columns == Columns::queries) return;
    each(all_.query + before.key, its.query, its.key);
    each(all_.query + all_.key + before.key, its.query + its.key, its.key);
}

// Of what goes from one rank to another; of all of them the same.
int64_t Block::message_bytes(Columns columns) const {
    const int64_t width = columns == Columns::queries ? most_.query : most_.all();
    return numerics_.tokens() * width * size_of(numerics_.compute);
}

void Block::share_heads(ConstView from, View to, Columns columns) {
    const int64_t bytes = message_bytes(columns), rows = numerics_.sequence;
    for (int part = 0; part < numerics_.parts; ++part) {
        const HeadShare share = head_share(shape_.kv_heads, numerics_.parts, part);
        const Heads its = heads(share.count);
        const View message = View::of(b_.sent + part * bytes, from.type, from.rows,
                                      columns == Columns::queries ? its.query : its.all());
        for_heads(part, columns, [&](int64_t column, int64_t at, int64_t count) {
            if (count > 0)
                ops_.copy_out(from.col_range(column, count), message.col_range(at, count));
        });
    }
    if (mask_.ranks.sequence) mask_.ranks.sequence->exchange(b_.sent, b_.received, bytes, index_);
    for (int part = 0; part < numerics_.parts && to.cols > 0; ++part) {
        const ConstView message =
            ConstView::of(b_.received + part * bytes, to.type, numerics_.tokens(), to.cols);
        for (int64_t i = 0; i < numerics_.micro_batch; ++i) {
            ops_.copy_out(message.row_range(i * rows, rows),
                          to.row_range((i * numerics_.parts + part) * rows, rows));
        }
    }
}

void Block::share_tokens(ConstView from, View to, Columns columns) {
    const int64_t bytes = message_bytes(columns), rows = numerics_.sequence;
    for (int part = 0; part < numerics_.parts && from.cols > 0; ++part) {
        const View message =
            View::of(b_.sent + part * bytes, from.type, numerics_.tokens(), from.cols);
        for (int64_t i = 0; i < numerics_.micro_batch; ++i) {
            ops_.copy_out(from.row_range((i * numerics_.parts + part) * rows, rows),
                          message.row_range(i * rows, rows));
        }
    }
    if (mask_.ranks.sequence) mask_.ranks.sequence->exchange(b_.sent, b_.received, bytes, index_);
    for (int part = 0; part < numerics_.parts; ++part) {
        const Heads its = heads(head_share(shape_.kv_heads, numerics_.parts, part).count);
        const ConstView message =
            ConstView::of(b_.received + part * bytes, to.type, to.rows,
                          columns == Columns::queries ? its.query : its.all());
        for_heads(part, columns, [&](int64_t column, int64_t at, int64_t count) {
            if (count > 0) ops_.copy_out(message.col_range(at, count), to.col_range(column, count));
        });
    }
}

// ---------------------------------------------------------------- ranks that share tensors

void Block::add_up_keys() {
    if (numerics_.key_holders == 1 || own_.keys == 0) return;
    const View own = View::of(b_.own_keys.data, numerics_.compute, b_.dqkv.rows, 2 * own_.key);
    const View columns = b_.dqkv.col_range(own_.query, 2 * own_.key);
    const int64_t elements = own.rows * own.cols, bytes = elements * size_of(own.type);
    ops_.copy_out(columns, own);
    if (mask_.ranks.slices)
        mask_.ranks.slices->gather(static_cast<const std::byte*>(own.data), b_.all_keys, bytes,
                                   index_);
    const int64_t first = round_down(int64_t{numerics_.slice}, int64_t{numerics_.key_holders});
    ops_.sum_gradient(
        ConstView::of(b_.all_keys + first * bytes, own.type, numerics_.key_holders, elements),
        own.data, b_.sums.leaves);
    ops_.copy_out(own, columns);
}

// Every holder of a head of keys has all of its gradient; one of them hands it to the layer below.
void Block::drop_keys(View dqkv) {
    if (numerics_.slice % numerics_.key_holders == 0) return;
    const View none = View::of(b_.own_keys.data, dqkv.type, dqkv.rows, 2 * all_.key);
    ops_.fill_zero(none.data, none.rows * none.cols * size_of(none.type));
    ops_.copy_out(none, dqkv.col_range(all_.query, 2 * all_.key));
}

ops::Accumulator Block::part_of(const Parameter& of_norm) {
    if (!slices() || !of_norm.trains()) return of_norm.sums(true);
    float *at = b_.norm_gradient, *found = nullptr;
    for_norms([&](const Parameter& norm) {
        if (&norm == &of_norm) found = at;
        at += room_of_norm(norm.value.cols);
    });
    return found;
}

// Adds all ranks' gradients of norms, in rank order: of their rows, or heads; of keys that several
// have, once.
void Block::add_up_norms() {
    bool trains = false;
    for_trained_norms([&](const Parameter&) { trains = true; });
    if (!trains) return;
    sums_.gather(b_.norm_gradient, b_.all_norm_gradients, norm_floats() * size_of(DType::f32));
    const float* its = b_.all_norm_gradients;
    for (int rank = 0; rank < numerics_.slices; ++rank) {
        const bool has_keys = rank % numerics_.key_holders == 0;
        for_norms([&](const Parameter& norm) {
            if (norm.trains() && (has_keys || &norm != &key_norm_.weight))
                ops_.add(norm.gradient, its, norm.value.cols);
            its += room_of_norm(norm.value.cols);
        });
    }
}

void Block::share_normed(const Norm& norm, ConstView x, View n, float* stats) {
    if (x.rows > 0) norm.forward(ops_, x, sums_.own(n), stats);
    sums_.gather(n);
}

ConstView Block::share_slope(ConstView dx, View room) {
    const View own = sums_.own(room);
    if (own.rows > 0) dx.type == own.type ? ops_.copy_out(dx, own) : ops_.cast(dx, own);
    sums_.gather(room);
    return sums_.real(room);
}

void Block::norm_backward(const Norm& norm, View dn, ConstView x, const float* stats,
                          ConstView addend, View dx) {
    const View sum = sums_.own(dn);
    add_up(dn, {}, sum);
    if (x.rows == 0) return;
    Norm its = norm;
    its.weight.gradient = part_of(norm.weight).at;
    its.bias.gradient = part_of(norm.bias).at;
    its.backward(ops_, sum, x, stats, addend, dx, false, b_.ops);
}

// ---------------------------------------------------------------- passes

void Block::attend(ConstView x_in, View x_mid) {
    const bool known = known_[at(Saved::projections)];
    const int64_t tokens = numerics_.tokens();
    if (slices()) share_normed(norm1_, x_in, b_.n1, b_.stats1);
    for_tiles(tokens, [&](int64_t first, int64_t count) {
        if (known && tokens > tile()) return;  // backward makes it again
        const View n1 = normed(b_.n1, first, count);
        if (!slices()) norm1_.forward(ops_, x_in.row_range(first, count), n1, b_.stats1);
        if (!known) qkv_.apply(ops_, n1, qkv_of_tokens().row_range(first, count), {}, b_.ops);
    });
    if (shares()) share_heads(b_.all_heads, b_.qkv, Columns::queries_keys_values);
    // Without norms heads are turned where they lie.
    if (!known || shape_.head_norms) turn_heads();
    if (!known_[at(Saved::attention)]) attention_forward();
    if (shares()) share_tokens(b_.attended, b_.all_attended, Columns::queries);
    if (known) return;
    if (!slices()) return output_.apply(ops_, attended_of_tokens(), x_mid, x_in, b_.ops);
    const View sum = part(x_mid.type);
    output_.apply(ops_, attended_of_tokens(), sums_.real(sum), {}, b_.ops);
    add_up(sum, x_in, x_mid);
}

// To be timed: all of it that backward leaves out where it is known.
void Block::compute_projections() {
    if (exchanges()) return;
    const int64_t tokens = numerics_.tokens();
    for_tiles(tokens, [&](int64_t first, int64_t count) {
        qkv_.apply(ops_, b_.n1.row_range(0, count), b_.qkv.row_range(first, count), {}, b_.ops);
    });
    if (!shape_.head_norms) turn_heads();
    // Added in place 16-bit products would copy it first, which no pass of a block does.
    const bool apart = b_.dn1.type == b_.x_mid.type;
    for_tiles(tokens, [&](int64_t first, int64_t count) {
        const View x_mid = b_.x_mid.row_range(first, count);
        output_.apply(ops_, b_.attended.row_range(first, count), x_mid,
                      apart ? b_.dn1.row_range(0, count) : x_mid, b_.ops);
    });
}

void Block::attention_forward() {
    if (own_.keys == 0) return;
    if (ring_)
        return ring_->forward(queries(seen()), keys(seen()), values(b_.qkv), b_.attended, b_.lse,
                              b_.ops);
    ops_.attention_forward(attention(own_), queries(seen()), keys(seen()), values(b_.qkv),
                           b_.attended, b_.lse, b_.ops);
}

View Block::inner_of(int64_t first, int64_t tokens) const {
    return b_.inner.row_range(saved_[at(Saved::mlp)] || deferring_ ? first : 0, tokens);
}

// dx in the compute type: where it lies, or where it is kept, for dx itself changes.
ConstView Block::slope(ConstView dx, const View& kept, int64_t first) {
    if (!deferring_) return in_compute_type(dx, b_.dy);
    const View copy = kept.row_range(first, dx.rows);
    if (dx.type == copy.type)
        ops_.copy_out(dx, copy);
    else
        ops_.cast(dx, copy);
    return copy;
}

void Block::compute(Saved what) {
    if (what == Saved::attention) return attention_forward();
    if (what == Saved::projections) return compute_projections();
    for_tiles(numerics_.tokens(), [&](int64_t first, int64_t count) {
        up_.apply(ops_, b_.n2.row_range(0, count), inner_of(first, count), {}, b_.ops);
    });
}

// n2, unless it is there, and what the MLP's first matrices make of it, of a tile of x_mid.
void Block::mlp(int64_t first, int64_t tokens) {
    const View n2 = normed(b_.n2, first, tokens);
    if (!slices()) norm2_.forward(ops_, b_.x_mid.row_range(first, tokens), n2, b_.stats2);
    if (!known_[at(Saved::mlp)]) up_.apply(ops_, n2, inner_of(first, tokens), {}, b_.ops);
}

// Applies the activation to what those give.
void Block::activate(ConstView inner, View active) {
    if (shape_.gated) {
        ops_.swiglu_forward(inner, active);
    } else {
        ops_.gelu_forward(inner, active);
    }
}

// One pass over both: `active` holds its gradient and receives what forward gave.
void Block::activate_backward(View active, View inner) {
    if (shape_.gated) {
        ops_.swiglu_backward(active, inner);
    } else {
        ops_.gelu_backward(active, inner);
    }
}

void Block::forward(ConstView x_in, View x_out) {
    attend(x_in, b_.x_mid);
    if (slices()) share_normed(norm2_, b_.x_mid, b_.n2, b_.stats2);
    const View sum = part(x_out.type);
    for_tiles(numerics_.tokens(), [&](int64_t first, int64_t count) {
        mlp(first, count);
        activate(inner_of(first, count), b_.active.row_range(0, count));
        // Not into x_mid itself: on a GPU that costs a copy of it first.
        down_.apply(ops_, b_.active.row_range(0, count),
                    (slices() ? sum : x_out).row_range(first, count),
                    slices() ? ConstView{} : ConstView(b_.x_mid.row_range(first, count)), b_.ops);
    });
    if (slices()) add_up(sum, b_.x_mid, x_out);
}

// Whether backward writes every element of a fresh gradient. Norms that are sums over the ranks are
// added, and so are those of heads where this rank has none.
bool Block::writes(Role role) const {
    const bool of_heads = role == Role::query_norm || role == Role::key_norm;
    if (of_heads && own_.keys == 0) return false;
    return !slices() || !is_norm(role);
}

void Block::backward(ConstView x_in, View dx, bool needs_dx) {
    const InputGradients asked = input_gradients_of(layer_, needs_dx);
    if (slices()) ops_.fill_zero(b_.norm_gradient, norm_floats() * size_of(DType::f32));
    memory_.zero_others(
        ops_, [this](const Tensor& tensor) { return writes(tensor.role) ? tensor.count : 0; });
    attend(x_in, b_.x_mid);
    mlp_backward(dx, asked);
    if (asked.mid) attention_backward(x_in, dx, needs_dx, asked);
    if (slices()) add_up_norms();
}

// dx holds d(x_out) and receives d(x_mid).
void Block::mlp_backward(View dx, const InputGradients& asked) {
    if (!asked.down && !down_.trains()) return;
    ConstView dy;
    if (slices()) {
        share_normed(norm2_, b_.x_mid, b_.n2, b_.stats2);
        dy = share_slope(dx, deferring_ ? b_.dout : part(numerics_.compute));
    }
    const auto norm_to = [&](View d) { return asked.mid ? d : View{}; };
    for_tiles(numerics_.tokens(), [&](int64_t first, int64_t count) {
        mlp(first, count);
        if (slices()) return mlp_products_backward(dy.row_range(first, count), first, asked);
        const View d = dx.row_range(first, count);
        mlp_products_backward(slope(d, b_.dout, first), first, asked);
        if (!asked.up) return;
        norm2_.backward(ops_, b_.dn2.row_range(0, count), b_.x_mid.row_range(first, count),
                        b_.stats2, norm_to(d), norm_to(d), first == 0, b_.ops);
    });
    if (slices() && asked.up)
        norm_backward(norm2_, b_.dn2, b_.x_mid, b_.stats2, norm_to(dx), norm_to(dx));
}

// Of a tile that mlp() has made: its weights' gradients, and that of n2.
void Block::mlp_products_backward(ConstView dy, int64_t first, const InputGradients& asked) {
    const View inner = inner_of(first, dy.rows), active = tile_of(b_.active, first, dy.rows);
    if (asked.down) {
        down_.apply_transposed(ops_, dy, active, b_.ops);
        activate_backward(active, inner);
    } else {
        activate(inner, active);
    }
    if (!deferring_) add_mlp_gradients(dy, first, asked);
    if (asked.up)
        up_.apply_transposed(ops_, inner, slope_of_normed(b_.dn2, first, dy.rows), b_.ops);
}

// Of a tile whose `active` is what forward gave, and `inner`, where asked for, its gradient.
void Block::add_mlp_gradients(ConstView dy, int64_t first, const InputGradients& asked) {
    down_.add_gradient(ops_, dy, tile_of(b_.active, first, dy.rows), first == 0, b_.ops);
    if (!asked.down) return;
    up_.add_gradient(ops_, inner_of(first, dy.rows), normed(b_.n2, first, dy.rows), first == 0,
                     b_.ops);
}

// dx holds d(x_mid) and receives d(x_in).
void Block::attention_backward(ConstView x_in, View dx, bool needs_dx,
                               const InputGradients& asked) {
    const ConstView dy = slices() ? share_slope(dx, deferring_ ? b_.dmid : part(numerics_.compute))
                                  : slope(dx, b_.dmid, 0);
    if (!deferring_) output_.add_gradient(ops_, dy, attended_of_tokens(), true, b_.ops);
    if (!asked.output) return;
    // Where ranks share sequences, all heads' queries, keys and values have left by now.
    const View dattended = shares()
                               ? View::of(b_.all_heads.data, numerics_.compute, dy.rows, all_.query)
                               : b_.dattended;
    output_.apply_transposed(ops_, dy, dattended, b_.ops);
    if (shares()) share_heads(dattended, b_.dattended, Columns::queries);
    if (ring_) {
        ring_->backward(queries(seen()), keys(seen()), values(b_.qkv), b_.attended, b_.dattended,
                        b_.lse, queries(b_.dqkv), keys(b_.dqkv), values(b_.dqkv), b_.ops);
    } else if (own_.keys > 0) {
        ops_.attention_backward(attention(own_), queries(seen()), keys(seen()), values(b_.qkv),
                                b_.attended, b_.dattended, b_.lse, queries(b_.dqkv), keys(b_.dqkv),
                                values(b_.dqkv), b_.ops);
    }
    add_up_keys();
    turn_heads_back();
    if (shares()) share_tokens(b_.dqkv, b_.all_heads, Columns::queries_keys_values);
    projections_backward(x_in, dqkv_of_tokens(), dx, needs_dx, asked);
}

// Of norm1 as well, tile by tile. dx holds d(x_mid) and receives d(x_in).
void Block::projections_backward(ConstView x_in, View dqkv, View dx, bool needs_dx,
                                 const InputGradients& asked) {
    for_tiles(dqkv.rows, [&](int64_t first, int64_t count) {
        const View n1 = normed(b_.n1, first, count), dn1 = slope_of_normed(b_.dn1, first, count);
        const View part = dqkv.row_range(first, count);
        if (dqkv.rows > tile() && !slices())  // another tile's is there
            norm1_.forward(ops_, x_in.row_range(first, count), n1, b_.stats1);
        if (!deferring_) qkv_.add_gradient(ops_, part, n1, first == 0, b_.ops);
        if (!asked.qkv) return;
        // Dropped keys are kept where their own gradient is still to come.
        const View keys = part.col_range(all_.query, 2 * all_.key);
        const bool restores = deferring_ && numerics_.slice % numerics_.key_holders != 0;
        const View aside = View::of(b_.all_keys, keys.type, keys.rows, keys.cols);
        if (restores) ops_.copy_out(keys, aside);
        drop_keys(part);
        qkv_.apply_transposed(ops_, part, dn1, b_.ops);
        if (restores) ops_.copy_out(aside, keys);
        if (slices()) return;
        const View d = needs_dx ? dx.row_range(first, count) : View{};
        norm1_.backward(ops_, dn1, x_in.row_range(first, count), b_.stats1, d, d, first == 0,
                        b_.ops);
    });
    const View d = needs_dx ? dx : View{};
    if (slices() && asked.qkv) norm_backward(norm1_, b_.dn1, x_in, b_.stats1, d, d);
}

// In backward's order, so that every sum has the bits that it has there.
void Block::add_weight_gradients(bool needs_dx, const float* norms) {
    const InputGradients asked = input_gradients_of(layer_, needs_dx);
    const int64_t tokens = numerics_.tokens();
    memory_.zero_others(
        ops_, [](const Tensor& tensor) { return is_norm(tensor.role) ? 0 : tensor.count; });
    if (asked.down || down_.trains()) {
        for_tiles(tokens, [&](int64_t first, int64_t count) {
            add_mlp_gradients(b_.dout.row_range(first, count), first, asked);
        });
    }
    if (asked.mid)
        output_.add_gradient(ops_, sums_.real(b_.dmid), attended_of_tokens(), true, b_.ops);
    if (asked.output) {
        for_tiles(tokens, [&](int64_t first, int64_t count) {
            qkv_.add_gradient(ops_, dqkv_of_tokens().row_range(first, count),
                              b_.n1.row_range(first, count), first == 0, b_.ops);
        });
    }
    if (norms == nullptr) return;
    for_trained_norms([&](const Parameter& parameter) {
        ops_.add(parameter.gradient, norms, parameter.value.cols);
        norms += room_of_norm(parameter.value.cols);
    });
}

}  // namespace ferry::model
