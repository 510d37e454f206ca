#include <algorithm>
#include <map>

#include "block.h"
#include "carver.h"
#include "model/model.h"

namespace ferry::model {
namespace {

using ops::ConstView;
using ops::Form;
using ops::View;

// The head's tensors; `table` is the embedding's where they are tied.
struct Head {
    Norm norm{};
    Parameter table{};  // [V, H]

    Head(const Shape& s, const LayerMemory& own, const LayerMemory& embedding)
        : norm{own(Role::final_norm), own(Role::final_norm_bias), s.norm_eps},
          table(s.tie_embeddings ? embedding(Role::token_table) : own(Role::head_table)) {}
};

// Buffers of one tile of the head: H hidden, V vocabulary, M tokens of a tile.
struct HeadBuffers {
    View n{}, dn{};  // [M, H], compute type
    // [M, V], fp32 and compute type; one buffer when both are fp32. Rows begin at multiples of 64
    // elements whatever V is: products of odd rows run at a sixth of a GPU's speed.
    View logits{}, dlogits{};
    float* stats = nullptr;  // what the norm saves for its backward pass
    std::byte* ops = nullptr;

    static HeadBuffers cut(const Shape& s, const Numerics& n, const Head& head, ops::Ops& ops,
                           Carver& carver);
};

int64_t head_op_bytes(const Shape& s, const Numerics& n, const Head& head, int64_t tile,
                      ops::Ops& ops) {
    const DType type = n.compute;
    const ConstView table = ConstView::of(nullptr, type, s.vocab, s.hidden);
    const ConstView rows = ConstView::of(nullptr, type, tile, s.hidden);
    Carver nowhere(nullptr);
    const ConstView dlogits = nowhere.padded_matrix(type, tile, s.vocab, 0);
    const View logits = nowhere.padded_matrix(DType::f32, tile, s.vocab, 0);
    const View drows = View::of(nullptr, type, tile, s.hidden);
    const View gradient = View::of(nullptr, DType::f32, s.vocab, s.hidden);
    return std::max(
        {ops.gemm_scratch_bytes({.form = Form::nt, .a = rows, .b = table, .c = logits}),
         ops.gemm_scratch_bytes({.form = Form::nn, .a = dlogits, .b = table, .c = drows}),
         ops.gemm_scratch_bytes(
             {.form = Form::tn, .a = dlogits, .b = rows, .c = gradient, .accumulate = true}),
         head.norm.scratch_bytes(tile, ops), ops.cross_entropy_scratch_bytes(tile)});
}

HeadBuffers HeadBuffers::cut(const Shape& s, const Numerics& n, const Head& head, ops::Ops& ops,
                             Carver& carver) {
    const int64_t tile = std::min(n.head_tile, n.tokens());
    HeadBuffers b;
    b.n = carver.matrix(n.compute, tile, s.hidden);
    b.dn = carver.matrix(n.compute, tile, s.hidden);
    b.logits = carver.padded_matrix(DType::f32, tile, s.vocab, 0);
    b.dlogits =
        n.compute == DType::f32 ? b.logits : carver.padded_matrix(n.compute, tile, s.vocab, 0);
    b.stats = carver.floats(head.norm.stats_floats(tile));
    b.ops = carver.bytes(head_op_bytes(s, n, head, tile, ops));
    return b;
}

// One tile, forward and, where anything asks for it, backward. x, dx: [M, H] residual type. The
// sink sees the logits before the loss may overwrite them.
template <class Sink>
void head_tile(ops::Ops& ops, const Head& h, const HeadBuffers& buffers, ConstView x,
               const int32_t* targets, float scale, View dx, double* loss_sum, const Sink& sink) {
    const int64_t tokens = x.rows;
    const ConstView& table = h.table.value;
    const View n = buffers.n.row_range(0, tokens), dn = buffers.dn.row_range(0, tokens);
    const View logits = buffers.logits.row_range(0, tokens);
    const bool into_norm = dx.data != nullptr || h.norm.trains();
    const bool backward = into_norm || h.table.trains();
    const View dlogits = backward ? buffers.dlogits.row_range(0, tokens) : View{};
    h.norm.forward(ops, x, n, buffers.stats);
    ops.gemm({.form = Form::nt, .a = n, .b = table, .c = logits}, buffers.ops);
    sink(logits);
    ops.cross_entropy(logits, targets, scale, dlogits, loss_sum, buffers.ops);
    if (h.table.trains()) {
        ops.gemm({.form = Form::tn,
                  .a = dlogits,
                  .b = n,
                  .c = View::of(h.table.gradient, DType::f32, table.rows, table.cols),
                  .accumulate = true},
                 buffers.ops);
    }
    if (!into_norm) return;
    ops.gemm({.form = Form::nn, .a = dlogits, .b = table, .c = dn}, buffers.ops);
    h.norm.backward(ops, dn, x, buffers.stats, {}, dx, buffers.ops);
}

}  // namespace

HeadShare head_share(int64_t kv_heads, int parts, int part) {
    const int64_t first = kv_heads * part / parts;
    return {first, kv_heads * (part + 1) / parts - first};
}

namespace {

// By block, each of those that blocks share once.
std::vector<std::shared_ptr<const ops::BlockLists>> patterns_of_heads(const Shape& shape,
                                                                      const Numerics& numerics) {
    if (numerics.parts == 1 || numerics.ring) return shape.patterns;
    const int64_t group = shape.heads / shape.kv_heads;
    const HeadShare share = head_share(shape.kv_heads, numerics.parts, numerics.part);
    std::map<const ops::BlockLists*, std::shared_ptr<const ops::BlockLists>> made;
    std::vector<std::shared_ptr<const ops::BlockLists>> found;
    for (const auto& pattern : shape.patterns) {
        auto& own = made[pattern.get()];
        if (pattern && !own)
            own = std::make_shared<ops::BlockLists>(
                pattern->of_heads(share.first * group, share.count * group));
        found.push_back(own);
    }
    return found;
}

}  // namespace

Decoder::Decoder(Shape shape, Numerics numerics, std::vector<Layer> layers, ops::Ops& ops,
                 Neighbours ranks)
    : shape_(std::move(shape)),
      numerics_(numerics),
      rope_(rope_table(shape_, numerics.whole_sequence())),
      layers_(std::move(layers)),
      patterns_(patterns_of_heads(shape_, numerics)),
      ranks_(ranks),
      ops_(ops) {
    FERRY_CHECK(numerics_.part >= 0 && numerics_.part < numerics_.parts);
    FERRY_CHECK(numerics_.slice >= 0 && numerics_.slice < numerics_.slices);
    FERRY_CHECK(static_cast<int64_t>(layers_.size()) == shape_.layers + 2);
    FERRY_CHECK(shape_.kv_heads > 0 && shape_.heads % shape_.kv_heads == 0);
    FERRY_CHECK(shape_.head_dim > 0);
    FERRY_CHECK(shape_.learned_positions == 0 ||
                shape_.learned_positions >= numerics_.whole_sequence());
    FERRY_CHECK(numerics_.tokens() > 0 && numerics_.head_tile > 0 && numerics_.mlp_tile >= 0);
    FERRY_CHECK(shape_.patterns.empty() || std::ssize(shape_.patterns) == shape_.layers);
    // In ring order a rank turns heads of its own part: rows whose positions begin behind it. Where
    // rows hold documents, these say so.
    if (numerics_.ring && !numerics_.documents)
        part_starts_.assign(static_cast<size_t>(numerics_.tokens()),
                            static_cast<int32_t>(-numerics_.part * numerics_.sequence));
    for (const auto& pattern : patterns_)  // until they have their place
        lists_.push_back(pattern ? pattern->view() : ops::BlockListsView{});
}

namespace {

// Each of the patterns once, by the first block that has it.
std::vector<size_t> first_blocks(
    const std::vector<std::shared_ptr<const ops::BlockLists>>& patterns) {
    std::vector<size_t> blocks;
    for (size_t i = 0; i < patterns.size(); ++i) {
        const auto first = std::ranges::find(patterns, patterns[i]);
        if (patterns[i] && static_cast<size_t>(first - patterns.begin()) == i) blocks.push_back(i);
    }
    return blocks;
}

}  // namespace

int64_t Decoder::pattern_bytes() const {
    int64_t bytes = 0;
    for (const size_t block : first_blocks(patterns_))
        bytes += round_up(patterns_[block]->memory_bytes(), 64);
    return bytes + round_up(std::ssize(part_starts_) * int64_t{sizeof(int32_t)}, 64);
}

void Decoder::place_patterns(std::byte* memory, const Copy& copy) {
    for (const size_t first : first_blocks(patterns_)) {
        const ops::BlockLists& lists = *patterns_[first];
        std::byte* at = memory;
        for (const auto* list :
             {&lists.row_starts, &lists.columns, &lists.column_starts, &lists.rows}) {
            copy(at, std::as_bytes(std::span(*list)));
            at += std::ssize(*list) * int64_t{sizeof(int32_t)};
        }
        for (size_t block = first; block < patterns_.size(); ++block) {
            if (patterns_[block] == patterns_[first]) lists_[block] = lists.view_at(memory);
        }
        memory += round_up(lists.memory_bytes(), 64);
    }
    if (part_starts_.empty()) return;
    copy(memory, std::as_bytes(std::span(part_starts_)));
    placed_part_starts_ = reinterpret_cast<const int32_t*>(memory);
}

Mask Decoder::mask_of(int64_t block, const Documents& documents) const {
    FERRY_CHECK(numerics_.documents == (documents.start != nullptr) &&
                numerics_.documents == (documents.end != nullptr));
    const auto at = static_cast<size_t>(block);
    const ops::BlockLists* pattern = patterns_.empty() ? nullptr : patterns_[at].get();
    Documents of_rows = documents;
    if (!part_starts_.empty())
        of_rows.part_start = placed_part_starts_ ? placed_part_starts_ : part_starts_.data();
    return {.pattern = pattern,
            .lists = pattern ? lists_[at] : ops::BlockListsView{},
            .documents = of_rows,
            .ranks = ranks_};
}

int64_t Decoder::activation_bytes() const {
    return numerics_.tokens() * shape_.hidden * size_of(numerics_.residual);
}

int64_t Decoder::scratch_bytes() const {
    const LayerMemory head(layers_.back(), numerics_.compute, nullptr, nullptr);
    const LayerMemory embedding(layers_.front(), numerics_.compute, nullptr, nullptr);
    Carver carver(nullptr);
    HeadBuffers::cut(shape_, numerics_, Head(shape_, head, embedding), ops_, carver);
    int64_t most = std::max(carver.peak(), ops_.embed_backward_scratch_bytes(numerics_.tokens()));
    for (const Layer& layer : layers_) {
        if (layer.kind == LayerKind::block)
            most = std::max(most, Block::scratch_bytes(shape_, numerics_, rope_, ops_, layer));
    }
    return most;
}

int64_t Decoder::saved_bytes(Saved what) const {
    return Block::saved_bytes(shape_, numerics_, rope_, ops_, layers_[1], what);
}

int64_t Decoder::deferred_bytes() const {
    return Block::deferred_bytes(shape_, numerics_, rope_, ops_, layers_[1]);
}

namespace {

// To the other parts of a sequence: queries, keys and values, and attention's output. Backward
// does that again, and sends the gradients of both.
BlockExchanges::Group of_sequence(const Shape& shape, const Numerics& numerics) {
    if (numerics.parts == 1) return {};
    if (numerics.ring) return RingAttention::exchanges(shape, numerics);
    const int64_t heads = ceil_div(shape.kv_heads, numerics.parts);
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t columns = heads * shape.head_dim * (2 * group + 2);
    const int64_t bytes =
        (numerics.parts - 1) * numerics.tokens() * columns * size_of(numerics.compute);
    return {bytes, 2 * bytes, 2, 4};
}

// To the other slices: attention's sum and, tile by tile, the MLP's. Backward makes attention's
// again, and sums the gradients that go into both, tile by tile.
BlockExchanges::Group of_slices(const Shape& shape, const Numerics& numerics) {
    if (numerics.slices == 1) return {};
    const int64_t others = numerics.slices - 1, tokens = numerics.tokens();
    const auto sum = [&](int64_t rows, DType type) {  // there and back
        return 2 * others * ceil_div(rows, int64_t{numerics.slices}) * shape.hidden * size_of(type);
    };
    const int64_t tile = numerics.mlp_tile > 0 ? std::min(numerics.mlp_tile, tokens) : tokens;
    const int64_t tiles = ceil_div(tokens, tile);
    const auto of_tiles = [&](DType type) {
        return (tokens / tile) * sum(tile, type) + sum(tokens % tile, type);
    };
    BlockExchanges::Group found{
        .forward_bytes = sum(tokens, numerics.residual) + of_tiles(numerics.residual),
        .backward_bytes = sum(tokens, numerics.residual) + 2 * of_tiles(numerics.compute),
        .forward_calls = 2 + 2 * tiles,
        .backward_calls = 2 + 4 * tiles};
    if (shape.head_norms) {
        found.backward_bytes += others * 2 * shape.head_dim * size_of(DType::f32);
        ++found.backward_calls;
    }
    if (numerics.key_holders > 1) {
        const int64_t heads =
            numerics.ring ? shape.kv_heads : ceil_div(shape.kv_heads, int64_t{numerics.parts});
        found.backward_bytes += others * numerics.attended_tokens() * 2 * heads * shape.head_dim *
                                size_of(numerics.compute);
        ++found.backward_calls;
    }
    return found;
}

}  // namespace

BlockExchanges Decoder::exchanges() const {
    return {of_sequence(shape_, numerics_), of_slices(shape_, numerics_)};
}

namespace {

// Positions of a part begin behind those of the parts before it, which documents count themselves.
int64_t first_position(const Numerics& numerics, const Documents& documents) {
    return documents.start ? 0 : numerics.part * numerics.sequence;
}
const int32_t* starts_in_part(const Numerics& numerics, const Documents& documents) {
    return numerics.parts > 1 ? documents.part_start : documents.start;
}

}  // namespace

void Decoder::embed(const int32_t* tokens, const void* weights, void* x,
                    const Documents& documents) const {
    const LayerMemory memory(layers_.front(), numerics_.compute, weights, nullptr);
    const Parameter positions = memory(Role::position_table);
    const ConstView of_sequence =
        positions.exists()
            ? positions.value.row_range(first_position(numerics_, documents), numerics_.sequence)
            : ConstView{};
    ops_.embed(tokens, memory(Role::token_table).value, of_sequence,
               starts_in_part(numerics_, documents),
               View::of(x, numerics_.residual, numerics_.tokens(), shape_.hidden));
}

void Decoder::embed_backward(const int32_t* tokens, const void* dx, float* gradient,
                             std::byte* scratch, const Documents& documents) const {
    const LayerMemory memory(layers_.front(), numerics_.compute, nullptr, gradient);
    const ConstView d = ConstView::of(dx, numerics_.residual, numerics_.tokens(), shape_.hidden);
    const Parameter table = memory(Role::token_table), positions = memory(Role::position_table);
    if (table.trains()) ops_.embed_backward(tokens, d, table.gradient, scratch);
    if (table.trains() && shape_.padding_token >= 0) {
        ops_.fill_zero(table.gradient + shape_.padding_token * shape_.hidden,
                       shape_.hidden * size_of(DType::f32));
    }
    if (positions.trains())
        ops_.positions_backward(
            d, numerics_.sequence, starts_in_part(numerics_, documents),
            positions.gradient + first_position(numerics_, documents) * shape_.hidden, scratch);
}

namespace {

void save(Block& pass, const SavedMemory& saved, bool known) {
    for (const Saved what : kAllSaved) {
        if (saved[at(what)] != nullptr) pass.save(what, saved[at(what)], known);
    }
}

}  // namespace

void Decoder::forward(int64_t block, const void* weights, const void* x_in, void* x_out,
                      uint32_t* nonfinite, std::byte* scratch, const SavedMemory& saved,
                      const Documents& documents) const {
    const LayerMemory memory(layers_[static_cast<size_t>(block + 1)], numerics_.compute, weights,
                             nullptr);
    Block pass(shape_, numerics_, rope_, ops_, memory, mask_of(block, documents), scratch);
    save(pass, saved, false);
    const View out = View::of(x_out, numerics_.residual, numerics_.tokens(), shape_.hidden);
    pass.forward(ConstView::of(x_in, numerics_.residual, out.rows, out.cols), out);
    ops_.check_finite(out, nonfinite);
}

void Decoder::backward(int64_t block, const void* weights, const void* x_in, void* dx,
                       bool needs_dx, float* gradient, std::byte* scratch, const SavedMemory& saved,
                       const Documents& documents) const {
    const Layer& layer = layers_[static_cast<size_t>(block + 1)];
    if (!needs_dx && layer.trainable_elements == 0) return;
    const LayerMemory memory(layer, numerics_.compute, weights, gradient);
    Block pass(shape_, numerics_, rope_, ops_, memory, mask_of(block, documents), scratch);
    save(pass, saved, true);
    const View d = View::of(dx, numerics_.residual, numerics_.tokens(), shape_.hidden);
    pass.backward(ConstView::of(x_in, numerics_.residual, d.rows, d.cols), d, needs_dx);
}

void Decoder::input_gradients(int64_t block, const void* weights, const void* x_in, void* dx,
                              bool needs_dx, float* norms, std::byte* scratch,
                              const SavedMemory& saved, const Documents& documents,
                              std::byte* deferred) const {
    const Layer& layer = layers_[static_cast<size_t>(block + 1)];
    // An address that says what trains: nothing is added there.
    const LayerMemory memory(layer, numerics_.compute, weights, reinterpret_cast<float*>(deferred));
    Block pass(shape_, numerics_, rope_, ops_, memory, mask_of(block, documents), scratch);
    save(pass, saved, true);
    pass.defer(deferred);
    pass.add_norms_to(norms);
    const View d = View::of(dx, numerics_.residual, numerics_.tokens(), shape_.hidden);
    pass.backward(ConstView::of(x_in, numerics_.residual, d.rows, d.cols), d, needs_dx);
}

void Decoder::weight_gradients(int64_t block, bool needs_dx, float* gradient, std::byte* scratch,
                               const SavedMemory& saved, std::byte* deferred,
                               const float* norms) const {
    const LayerMemory memory(layers_[static_cast<size_t>(block + 1)], numerics_.compute, nullptr,
                             gradient);
    Block pass(shape_, numerics_, rope_, ops_, memory, {}, scratch);
    save(pass, saved, true);
    pass.defer(deferred);
    pass.add_weight_gradients(needs_dx, norms);
}

void Decoder::compute_saved(Saved what, int64_t block, const void* weights, std::byte* scratch,
                            const Documents& documents) const {
    const LayerMemory memory(layers_[static_cast<size_t>(block + 1)], numerics_.compute, weights,
                             nullptr);
    Block(shape_, numerics_, rope_, ops_, memory, mask_of(block, documents), scratch).compute(what);
}

struct Decoder::HeadPass {
    const void *weights = nullptr, *embedding = nullptr, *x = nullptr;
    const int32_t* targets = nullptr;
    float scale = 0;
    void* dx = nullptr;
    float *gradient = nullptr, *embedding_gradient = nullptr;
    double* loss_sum = nullptr;
    LogitsSink logits{};
};

void Decoder::run_head(const HeadPass& pass, std::byte* scratch) const {
    const int64_t tokens = numerics_.tokens(), tile = std::min(numerics_.head_tile, tokens);
    const DType type = numerics_.residual;
    const Head h(
        shape_, LayerMemory(layers_.back(), numerics_.compute, pass.weights, pass.gradient),
        LayerMemory(layers_.front(), numerics_.compute, pass.embedding, pass.embedding_gradient));
    Carver carver(scratch);
    const HeadBuffers buffers = HeadBuffers::cut(shape_, numerics_, h, ops_, carver);
    const ConstView rows = ConstView::of(pass.x, type, tokens, shape_.hidden);
    const View drows = View::of(pass.dx, type, tokens, shape_.hidden);
    for (int64_t first = 0; first < tokens; first += tile) {
        const int64_t count = std::min(tile, tokens - first);
        const auto sink = [&](ConstView logits) {
            if (pass.logits) pass.logits(first, logits);
        };
        head_tile(ops_, h, buffers, rows.row_range(first, count), pass.targets + first, pass.scale,
                  pass.dx == nullptr ? View{} : drows.row_range(first, count), pass.loss_sum, sink);
    }
}

void Decoder::head(const void* weights, const void* embedding, const void* x,
                   const int32_t* targets, float scale, void* dx, float* gradient,
                   float* embedding_gradient, double* loss_sum, std::byte* scratch) const {
    run_head({.weights = weights,
              .embedding = embedding,
              .x = x,
              .targets = targets,
              .scale = scale,
              .dx = dx,
              .gradient = gradient,
              .embedding_gradient = embedding_gradient,
              .loss_sum = loss_sum},
             scratch);
}

void Decoder::head_loss(const void* weights, const void* embedding, const void* x,
                        const int32_t* targets, double* loss_sum, std::byte* scratch,
                        const LogitsSink& logits) const {
    run_head({.weights = weights,
              .embedding = embedding,
              .x = x,
              .targets = targets,
              .loss_sum = loss_sum,
              .logits = logits},
             scratch);
}

}  // namespace ferry::model
