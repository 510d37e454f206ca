// The final norm, the logits and their loss over one micro-batch, in tiles of tokens: the logits of
// a batch never exist. Forward and, where anything asks for it, backward of a tile are one visit.
//
// Ranks that share the tables have some rows of them each, and so some columns of the logits. The
// norm's output is gathered from all ranks' rows. They tell each other what their logits make of
// the loss, and each adds up its rows of the gradients of the norm's output.
#pragma once

#include "carver.h"
#include "model/gradients.h"
#include "model/model.h"
#include "slice_sum.h"
#include "tensors.h"

namespace ferry::model {

// What a rank has of a table of the vocabulary: the rows of tokens [first, first + count).
struct Table {
    Table() = default;
    Table(const LayerMemory& memory, Role role);
    ops::ConstView rows() const { return all.value.row_range(0, count); }

    Parameter all{};  // with the padding of a slice, as large as any rank's
    int64_t first = 0, count = 0;
};

class Head {
public:
    // `embedding`: where the tables are tied it is the head's as well.
    Head(const Shape& shape, const Numerics& numerics, ops::Ops& ops, KernelRanks* slices,
         const LayerMemory& own, const LayerMemory& embedding, std::byte* scratch);
    static int64_t scratch_bytes(const Shape& shape, const Numerics& numerics, ops::Ops& ops,
                                 const Layer& own, const Layer& embedding);
    // Of slices; backward: both at once.
    static BlockExchanges::Group exchanges(const Shape& shape, const Numerics& numerics);

    struct Pass {
        ops::ConstView x{};  // [T, H], or this rank's rows
        const int32_t* targets = nullptr;
        float scale = 0;
        ops::View dx{};  // as x; none: nobody asks for it
        double* loss_sum = nullptr;
        Decoder::LogitsSink logits{};
    };
    void run(const Pass& pass);

private:
    // Of one tile: H hidden, V vocabulary, or as many rows of it as any rank has, M tokens of a
    // tile.
    struct Buffers {
        ops::View n{}, dn{};  // [M, H], compute type; of ranks that share the tables of all tokens
        // [M, V], fp32 and compute type; one buffer when both are fp32. Rows begin at multiples of
        // 64 elements whatever V is: products of odd rows run at a sixth of a GPU's speed.
        ops::View logits{}, dlogits{};
        float* stats = nullptr;  // what the norm saves for its backward pass
        // Of ranks that share the tables: the targets among this one's rows, what it and all tell
        // of the loss, and logits of a few tokens, of all ranks.
        int32_t* targets = nullptr;
        double *told = nullptr, *all_told = nullptr;
        std::byte* gathered = nullptr;
        // And the gradients of the norm: of this rank's rows, and of each.
        float *norm_gradient = nullptr, *all_norm_gradients = nullptr;
        SliceSum::Room sums{};
        std::byte* ops = nullptr;
    };
    struct Tile {
        int64_t first = 0, tokens = 0;
    };
    Head(const Shape& shape, const Numerics& numerics, ops::Ops& ops, KernelRanks* slices,
         const LayerMemory& own, const LayerMemory& embedding);
    int64_t tile() const;
    bool slices() const { return numerics_.slices > 1; }
    Buffers cut(Carver& carver) const;
    void cut_slices(Carver& carver, Buffers& b) const;
    int64_t op_scratch_bytes(int64_t vocab, int64_t ld) const;
    // Of n, or dn: where one buffer is of all tokens, or of a tile.
    ops::View rows_of(const ops::View& all, const Tile& tile) const {
        return all.row_range(slices() ? tile.first : 0, tile.tokens);
    }
    int64_t norm_rows() const { return slices() ? sums_.rows.each : tile(); }
    static int64_t norm_floats(const Shape& shape) {
        return (shape.layer_norm ? 2 : 1) * room_of_norm(shape.hidden);
    }
    bool backward_into_norm(const Pass& pass) const {
        return pass.dx.data != nullptr || norm_.trains();
    }
    void zero_others();
    void run(const Pass& pass, const Tile& tile);
    void norm_backward_of_rows(const Pass& pass);
    void show(const Tile& tile, ops::ConstView logits, const Decoder::LogitsSink& sink);
    void add_loss(const Pass& pass, const Tile& tile, ops::ConstView logits, ops::View dlogits);

    const Shape& shape_;
    const Numerics& numerics_;
    ops::Ops& ops_;
    KernelRanks* const ranks_;
    SliceSum sums_;
    const LayerMemory own_, embedding_;
    Norm norm_;
    Table table_;
    Buffers b_{};
};

}  // namespace ferry::model
