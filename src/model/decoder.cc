#include <algorithm>
#include <map>

#include "block.h"
#include "carver.h"
#include "head.h"
#include "model/model.h"
#include "slice_sum.h"

namespace ferry::model {

using ops::ConstView;
using ops::View;

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
    return RowShare(numerics_).each * shape_.hidden * size_of(numerics_.residual);
}

// The embedding's, of ranks that share its table: the tokens among this rank's rows, and of all
// tokens its part of a sum, or the gradients.
struct Decoder::EmbedBuffers {
    int32_t* own = nullptr;
    View all{};
    SliceSum::Room sums{};
    std::byte* ops = nullptr;
};

SliceSum Decoder::embedding_sum() const { return {numerics_, ranks_.slices, ops_, -1}; }

Decoder::EmbedBuffers Decoder::cut_embedding(Carver& carver) const {
    EmbedBuffers b;
    const int64_t tokens = numerics_.tokens();
    if (numerics_.slices > 1) {
        b.own = reinterpret_cast<int32_t*>(carver.bytes(tokens * int64_t{sizeof(int32_t)}));
        b.all = carver.matrix(numerics_.residual, RowShare(numerics_).padded, shape_.hidden);
        b.sums =
            embedding_sum().cut(carver, shape_.hidden * size_of(numerics_.residual), shape_.hidden);
    }
    b.ops = carver.bytes(ops_.embed_backward_scratch_bytes(tokens));
    return b;
}

int64_t Decoder::scratch_bytes() const {
    Carver carver(nullptr);
    cut_embedding(carver);
    int64_t most = std::max(carver.peak(), Head::scratch_bytes(shape_, numerics_, ops_,
                                                               layers_.back(), layers_.front()));
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

}  // namespace

Exchanges Decoder::exchanges() const {
    Exchanges found{
        .block = {of_sequence(shape_, numerics_),
                  Block::exchanges_of_slices(shape_, numerics_, rope_, ops_, layers_[1])},
        .head = {.slices = Head::exchanges(shape_, numerics_)}};
    if (numerics_.slices == 1) return found;
    const int64_t rows = embedding_sum().bytes(shape_.hidden * size_of(numerics_.residual));
    found.embedding.slices = {
        .forward_bytes = rows, .backward_bytes = rows, .forward_calls = 1, .backward_calls = 1};
    return found;
}

namespace {

// This rank's rows of the residual stream, or of its gradient.
View stream_at(void* x, const Shape& shape, const Numerics& numerics) {
    return View::of(x, numerics.residual, RowShare(numerics).own, shape.hidden);
}
ConstView stream_at(const void* x, const Shape& shape, const Numerics& numerics) {
    return stream_at(const_cast<void*>(x), shape, numerics);
}

// Positions of a part begin behind those of the parts before it, which documents count themselves.
int64_t first_position(const Numerics& numerics, const Documents& documents) {
    return documents.start ? 0 : numerics.part * numerics.sequence;
}
const int32_t* starts_in_part(const Numerics& numerics, const Documents& documents) {
    return numerics.parts > 1 ? documents.part_start : documents.start;
}

}  // namespace

// Of a table that ranks share each token's row is with one of them: the others' parts of the sum
// are zeros.
void Decoder::embed(const int32_t* tokens, const void* weights, void* x, std::byte* scratch,
                    const Documents& documents) const {
    const LayerMemory memory(layers_.front(), numerics_.compute, weights, nullptr);
    const Parameter positions = memory(Role::position_table);
    const Table table(memory, Role::token_table);
    const ConstView of_sequence =
        positions.exists()
            ? positions.value.row_range(first_position(numerics_, documents), numerics_.sequence)
            : ConstView{};
    const View out = stream_at(x, shape_, numerics_);
    const int32_t* const starts = starts_in_part(numerics_, documents);
    if (numerics_.slices == 1) return ops_.embed(tokens, table.rows(), of_sequence, starts, out);
    Carver carver(scratch);
    const EmbedBuffers b = cut_embedding(carver);
    const SliceSum sum = embedding_sum();
    ops_.own_rows(tokens, numerics_.tokens(), table.first, table.count, b.own);
    ops_.embed(b.own, table.rows(), of_sequence, starts, sum.real(b.all));
    sum.add_up(b.all, {}, out, b.sums);
}

void Decoder::embed_backward(const int32_t* tokens, const void* dx, float* gradient,
                             std::byte* scratch, const Documents& documents) const {
    const LayerMemory memory(layers_.front(), numerics_.compute, nullptr, gradient);
    const Parameter positions = memory(Role::position_table);
    Carver carver(scratch);
    const EmbedBuffers b = cut_embedding(carver);
    ConstView d = stream_at(dx, shape_, numerics_);
    if (numerics_.slices > 1) {  // of all tokens
        const SliceSum sum = embedding_sum();
        if (d.rows > 0) ops_.copy_out(d, sum.own(b.all));
        sum.gather(b.all);
        d = sum.real(b.all);
    }
    const Table table(memory, Role::token_table);
    if (table.all.trains()) {
        if (numerics_.slices > 1) ops_.own_rows(tokens, d.rows, table.first, table.count, b.own);
        ops_.embed_backward(numerics_.slices > 1 ? b.own : tokens, d, table.all.gradient, b.ops);
    }
    const int64_t padding = shape_.padding_token - table.first;
    if (table.all.trains() && shape_.padding_token >= 0 && padding >= 0 && padding < table.count) {
        ops_.fill_zero(table.all.gradient + padding * shape_.hidden,
                       shape_.hidden * size_of(DType::f32));
    }
    if (positions.trains())
        ops_.positions_backward(
            d, numerics_.sequence, starts_in_part(numerics_, documents),
            positions.gradient + first_position(numerics_, documents) * shape_.hidden, b.ops);
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
    const View out = stream_at(x_out, shape_, numerics_);
    pass.forward(stream_at(x_in, shape_, numerics_), out);
    if (out.rows > 0) ops_.check_finite(out, nonfinite);
}

void Decoder::backward(int64_t block, const void* weights, const void* x_in, void* dx,
                       bool needs_dx, ops::Accumulator gradient, std::byte* scratch,
                       const SavedMemory& saved, const Documents& documents) const {
    const Layer& layer = layers_[static_cast<size_t>(block + 1)];
    if (!needs_dx && layer.trainable_elements == 0) return;
    const LayerMemory memory(layer, numerics_.compute, weights, gradient);
    Block pass(shape_, numerics_, rope_, ops_, memory, mask_of(block, documents), scratch);
    save(pass, saved, true);
    pass.backward(stream_at(x_in, shape_, numerics_), stream_at(dx, shape_, numerics_), needs_dx);
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
    pass.backward(stream_at(x_in, shape_, numerics_), stream_at(dx, shape_, numerics_), needs_dx);
}

void Decoder::weight_gradients(int64_t block, bool needs_dx, ops::Accumulator gradient,
                               std::byte* scratch, const SavedMemory& saved, std::byte* deferred,
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

void Decoder::head(const void* weights, const void* embedding, const void* x,
                   const int32_t* targets, float scale, void* dx, ops::Accumulator gradient,
                   ops::Accumulator embedding_gradient, double* loss_sum,
                   std::byte* scratch) const {
    head_of(weights, gradient, embedding, embedding_gradient, scratch)
        .run({.x = stream_at(x, shape_, numerics_),
              .targets = targets,
              .scale = scale,
              .dx = stream_at(dx, shape_, numerics_),
              .loss_sum = loss_sum});
}

void Decoder::head_loss(const void* weights, const void* embedding, const void* x,
                        const int32_t* targets, double* loss_sum, std::byte* scratch,
                        const LogitsSink& logits) const {
    head_of(weights, nullptr, embedding, nullptr, scratch)
        .run({.x = stream_at(x, shape_, numerics_),
              .targets = targets,
              .loss_sum = loss_sum,
              .logits = logits});
}

Head Decoder::head_of(const void* weights, ops::Accumulator gradient, const void* embedding,
                      ops::Accumulator embedding_gradient, std::byte* scratch) const {
    return {shape_,
            numerics_,
            ops_,
            ranks_.slices,
            LayerMemory(layers_.back(), numerics_.compute, weights, gradient),
            LayerMemory(layers_.front(), numerics_.compute, embedding, embedding_gradient),
            scratch};
}

}  // namespace ferry::model
