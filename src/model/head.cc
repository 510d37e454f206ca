#include "head.h"

#include <algorithm>

namespace ferry::model {

using ops::ConstView;
using ops::Form;
using ops::Ops;
using ops::View;

namespace {
constexpr int64_t kToldBytes = Ops::kLossParts * int64_t{sizeof(double)};  // of a token
constexpr int64_t kGatheredRows = 8;  // of logits that someone asks for, at once
}  // namespace

Table::Table(const LayerMemory& memory, Role role) : all(memory(role)), count(all.value.rows) {
    const Tensor* const tensor = memory.layer().find(role);
    if (tensor == nullptr || !tensor->is_slice()) return;
    FERRY_CHECK(tensor->bands.size() == 1, "a rank's rows of a table follow each other");
    first = tensor->bands[0].from;
    count = tensor->bands[0].count;
}

Head::Head(const Shape& shape, const Numerics& numerics, ops::Ops& ops, KernelRanks* slices,
           const LayerMemory& own, const LayerMemory& embedding)
    : shape_(shape),
      numerics_(numerics),
      ops_(ops),
      ranks_(slices),
      sums_(numerics, slices, ops, shape.layers),
      own_(own),
      embedding_(embedding),
      norm_{own(Role::final_norm), own(Role::final_norm_bias), shape.norm_eps},
      table_(shape.tie_embeddings ? Table(embedding, Role::token_table)
                                  : Table(own, Role::head_table)) {}

Head::Head(const Shape& shape, const Numerics& numerics, ops::Ops& ops, KernelRanks* slices,
           const LayerMemory& own, const LayerMemory& embedding, std::byte* scratch)
    : Head(shape, numerics, ops, slices, own, embedding) {
    Carver carver(scratch);
    b_ = cut(carver);
}

int64_t Head::scratch_bytes(const Shape& shape, const Numerics& numerics, ops::Ops& ops,
                            const Layer& own, const Layer& embedding) {
    Carver carver(nullptr);
    Head(shape, numerics, ops, nullptr, LayerMemory(own, numerics.compute, nullptr, nullptr),
         LayerMemory(embedding, numerics.compute, nullptr, nullptr))
        .cut(carver);
    return carver.peak();
}

int64_t Head::tile() const { return std::min(numerics_.head_tile, numerics_.tokens()); }

// What the operations over so many rows of the table ask for.
int64_t Head::op_scratch_bytes(int64_t vocab, int64_t ld) const {
    const DType type = numerics_.compute;
    const int64_t tile = this->tile();
    const ConstView table = ConstView::of(nullptr, type, vocab, shape_.hidden);
    const ConstView rows = ConstView::of(nullptr, type, tile, shape_.hidden);
    const ConstView dlogits(nullptr, type, tile, vocab, ld);
    const View logits{nullptr, DType::f32, tile, vocab, ld};
    const View drows = View::of(nullptr, type, tile, shape_.hidden);
    const View gradient = View::of(nullptr, DType::f32, vocab, shape_.hidden);
    return std::max(
        {ops_.gemm_scratch_bytes({.form = Form::nt, .a = rows, .b = table, .c = logits}),
         ops_.gemm_scratch_bytes({.form = Form::nn, .a = dlogits, .b = table, .c = drows}),
         ops_.gemm_scratch_bytes(
             {.form = Form::tn, .a = dlogits, .b = rows, .c = gradient, .accumulate = true}),
         norm_.scratch_bytes(norm_rows(), ops_), ops_.cross_entropy_scratch_bytes(tile)});
}

Head::Buffers Head::cut(Carver& carver) const {
    const int64_t tile = this->tile(), vocab = table_.all.value.rows;
    const DType compute = numerics_.compute;
    Buffers b;
    // Of all tokens one buffer is both: a tile's n is read for the last time before its gradient is
    // written.
    b.n = carver.matrix(compute, slices() ? sums_.rows.padded : tile, shape_.hidden);
    b.dn = slices() ? b.n : carver.matrix(compute, tile, shape_.hidden);
    b.logits = carver.padded_matrix(DType::f32, tile, vocab, 0);
    b.dlogits = compute == DType::f32 ? b.logits : carver.padded_matrix(compute, tile, vocab, 0);
    b.stats = carver.floats(norm_.stats_floats(norm_rows()));
    if (slices()) cut_slices(carver, b);
    // Of ranks that share the tables some have a row less, which can ask for more: all need the
    // same plan.
    int64_t of_ops = op_scratch_bytes(vocab, b.logits.ld);
    if (slices())
        of_ops = std::max(of_ops, op_scratch_bytes(shape_.vocab / numerics_.slices, b.logits.ld));
    b.ops = carver.bytes(of_ops);
    return b;
}

void Head::cut_slices(Carver& carver, Buffers& b) const {
    const int64_t tile = this->tile(), ranks = numerics_.slices;
    b.targets = reinterpret_cast<int32_t*>(carver.bytes(tile * int64_t{sizeof(int32_t)}));
    b.told = reinterpret_cast<double*>(carver.bytes(tile * kToldBytes));
    b.all_told = reinterpret_cast<double*>(carver.bytes(ranks * tile * kToldBytes));
    b.gathered =
        carver.bytes(ranks * std::min(kGatheredRows, tile) * b.logits.ld * size_of(DType::f32));
    b.norm_gradient = carver.floats(norm_floats(shape_));
    b.all_norm_gradients = carver.floats(ranks * norm_floats(shape_));
    b.sums = sums_.cut(carver, shape_.hidden * size_of(numerics_.compute), shape_.hidden);
}

// What the norm gives, and of each tile the numbers that ranks tell of its loss; backward, the sum
// of its gradients, and the norm's own.
BlockExchanges::Group Head::exchanges(const Shape& shape, const Numerics& numerics) {
    if (numerics.slices == 1) return {};
    const int64_t tokens = numerics.tokens(), tiles = ceil_div(tokens, numerics.head_tile);
    const int64_t others = numerics.slices - 1;
    const int64_t rows =
        others * RowShare(numerics).each * shape.hidden * size_of(numerics.compute);
    const int64_t forward = rows + others * tokens * kToldBytes;
    const int64_t norm = others * norm_floats(shape) * size_of(DType::f32);
    return {.forward_bytes = forward,
            .backward_bytes = forward + rows + norm,
            .forward_calls = 1 + tiles,
            .backward_calls = 1 + tiles + 2};
}

// ---------------------------------------------------------------- passes

void Head::run(const Pass& pass) {
    const int64_t tokens = numerics_.tokens();
    zero_others();
    if (slices()) {
        if (pass.x.rows > 0) norm_.forward(ops_, pass.x, sums_.own(b_.n), b_.stats);
        sums_.gather(b_.n);
    }
    for (int64_t first = 0; first < tokens; first += tile())
        run(pass, {first, std::min(tile(), tokens - first)});
    if (slices() && backward_into_norm(pass)) norm_backward_of_rows(pass);
}

// Of a table the rows that are here are written, and of a tied table's layer nothing else. A norm
// that is a sum over the ranks is added.
void Head::zero_others() {
    const auto written = [this](const Tensor& tensor) {
        const bool table = tensor.role == Role::token_table || tensor.role == Role::head_table;
        if (table) return table_.count * shape_.hidden;
        const bool of_norm = tensor.role != Role::position_table;
        return of_norm && !slices() ? tensor.count : 0;
    };
    own_.zero_others(ops_, written);
    if (shape_.tie_embeddings) embedding_.zero_others(ops_, written);
}

void Head::run(const Pass& pass, const Tile& tile) {
    const ConstView table = table_.rows();
    const View n = rows_of(b_.n, tile), dn = rows_of(b_.dn, tile);
    const View logits = b_.logits.block(0, tile.tokens, 0, table_.count);
    const bool into_norm = backward_into_norm(pass);
    const bool backward = into_norm || table_.all.trains();
    const View dlogits = backward ? b_.dlogits.block(0, tile.tokens, 0, table_.count) : View{};
    if (!slices()) norm_.forward(ops_, pass.x.row_range(tile.first, tile.tokens), n, b_.stats);
    ops_.gemm({.form = Form::nt, .a = n, .b = table, .c = logits}, b_.ops);
    if (pass.logits) show(tile, logits, pass.logits);  // before the loss may overwrite them
    add_loss(pass, tile, logits, dlogits);
    if (table_.all.trains()) {
        ops_.gemm({.form = Form::tn,
                   .a = dlogits,
                   .b = n,
                   .c = View::of(table_.all.gradient, DType::f32, table.rows, table.cols),
                   .accumulate = true,
                   .fresh = table_.all.fresh && tile.first == 0},
                  b_.ops);
    }
    if (!into_norm) return;
    ops_.gemm({.form = Form::nn, .a = dlogits, .b = table, .c = dn}, b_.ops);
    if (slices()) return;
    norm_.backward(ops_, dn, pass.x.row_range(tile.first, tile.tokens), b_.stats, {},
                   pass.dx.data ? pass.dx.row_range(tile.first, tile.tokens) : View{},
                   tile.first == 0, b_.ops);
}

// The gradient of what the norm gave is a sum over the ranks, that of the norm one over their rows.
void Head::norm_backward_of_rows(const Pass& pass) {
    const View sum = sums_.own(b_.dn);
    sums_.add_up(b_.dn, {}, sum, b_.sums);
    const int64_t bytes = norm_floats(shape_) * size_of(DType::f32);
    const int64_t bias_at = room_of_norm(shape_.hidden);
    ops_.fill_zero(b_.norm_gradient, bytes);
    if (pass.x.rows > 0) {
        Norm its = norm_;
        if (norm_.weight.trains()) its.weight.gradient = b_.norm_gradient;
        if (norm_.bias.trains()) its.bias.gradient = b_.norm_gradient + bias_at;
        its.backward(ops_, sum, pass.x, b_.stats, {}, pass.dx, false, b_.ops);
    }
    if (!norm_.trains()) return;
    sums_.gather(b_.norm_gradient, b_.all_norm_gradients, bytes);
    for (int rank = 0; rank < numerics_.slices; ++rank) {
        const float* parts = b_.all_norm_gradients + rank * norm_floats(shape_);
        if (norm_.weight.trains()) ops_.add(norm_.weight.gradient, parts, shape_.hidden);
        if (norm_.bias.trains()) ops_.add(norm_.bias.gradient, parts + bias_at, shape_.hidden);
    }
}

// Every rank's logits of a few tokens at a time: none has them all.
void Head::show(const Tile& tile, ConstView logits, const Decoder::LogitsSink& sink) {
    if (!slices()) return sink(tile.first, 0, logits);
    for (int64_t at = 0; at < tile.tokens; at += kGatheredRows) {
        const int64_t rows = std::min(kGatheredRows, tile.tokens - at);
        const int64_t bytes = rows * logits.ld * size_of(DType::f32);
        if (ranks_)
            ranks_->gather(static_cast<const std::byte*>(logits.row_range(at, rows).data),
                           b_.gathered, bytes, shape_.layers);
        for (int rank = 0; rank < numerics_.slices; ++rank) {
            const HeadShare its = head_share(shape_.vocab, numerics_.slices, rank);
            sink(tile.first + at, its.first,
                 ConstView(b_.gathered + rank * bytes, DType::f32, rows, its.count, logits.ld));
        }
    }
}

void Head::add_loss(const Pass& pass, const Tile& tile, ConstView logits, View dlogits) {
    const int32_t* const targets = pass.targets + tile.first;
    if (!slices())
        return ops_.cross_entropy(logits, targets, pass.scale, dlogits, pass.loss_sum, b_.ops);
    ops_.own_rows(targets, tile.tokens, table_.first, table_.count, b_.targets);
    ops_.loss_parts(logits, b_.targets, b_.told);
    if (ranks_)
        ranks_->gather(reinterpret_cast<const std::byte*>(b_.told),
                       reinterpret_cast<std::byte*>(b_.all_told), tile.tokens * kToldBytes,
                       shape_.layers);
    ops_.cross_entropy_of_parts(logits, {targets, b_.targets}, b_.all_told, numerics_.slices,
                                pass.scale, dlogits, pass.loss_sum, b_.ops);
}

}  // namespace ferry::model
