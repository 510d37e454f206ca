#include "cudnn_attention.h"

#ifdef FERRY_CUDNN

#include <algorithm>

#include "cudnn_graphs.h"
#include "ops/attention_tiles.h"
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"

namespace ferry::ops::cuda {
namespace {

// The part of one backward call: whole sequences, or the heads of one that share `kv_heads` heads
// of keys. Neither sequences nor groups of heads know of each other, so no bit depends on this.
struct Portion {
    int64_t sequences = 1, kv_heads = 1;
};

// All calls of about one size. Nothing where one head of keys alone has too many slopes.
std::optional<Portion> backward_portion(const Attention& s, int64_t most_bytes) {
    const int64_t ratio = s.heads / s.kv_heads;
    const int64_t group = slope_bytes(ratio, s.sequence, s.sequence);
    if (group > most_bytes) return std::nullopt;
    const auto share = [&](int64_t all, int64_t bytes) {
        const int64_t most = std::max<int64_t>(most_bytes / bytes, 1);
        return ceil_div(all, ceil_div(all, most));
    };
    const int64_t one = group * s.kv_heads;
    if (one <= most_bytes) return Portion{share(s.sequences, one), s.kv_heads};
    return Portion{1, share(s.kv_heads, group)};
}

Attention part_of(Attention s, const Portion& portion) {
    s.heads = s.heads / s.kv_heads * portion.kv_heads;
    s.kv_heads = portion.kv_heads;
    s.sequences = portion.sequences;
    return s;
}

// The call for whole sequences, with rows without gaps.
CudnnCall call_of(const Attention& s, bool backward) {
    CudnnCall call{.backward = backward,
                   .sequences = s.sequences,
                   .queries = s.sequence,
                   .keys = s.sequence,
                   .heads = s.heads,
                   .kv_heads = s.kv_heads,
                   .head_dim = s.head_dim,
                   .window = s.window < s.sequence ? s.window : 0,
                   .type = s.type,
                   .scale = s.scale};
    const int64_t query = s.heads * s.head_dim, key_value = s.kv_heads * s.head_dim;
    call.row = {query, key_value, key_value, query, 1, query, query, key_value, key_value};
    return call;
}

// cuDNN takes every operand as one that it might write.
void* mutable_data(ConstView view) { return const_cast<void*>(view.data); }

OperandData data_of(const BackwardOperands& o) {
    return {mutable_data(o.q),   mutable_data(o.k),         mutable_data(o.v),
            mutable_data(o.out), const_cast<float*>(o.lse), mutable_data(o.dout),
            mutable_data(o.dq),  mutable_data(o.dk),        mutable_data(o.dv)};
}

CudnnCall with_rows_of(const BackwardOperands& o, CudnnCall call) {
    call.row = {o.q.ld, o.k.ld, o.v.ld, o.out.ld, 1, o.dout.ld, o.dq.ld, o.dk.ld, o.dv.ld};
    return call;
}

// One backward call after the other: over the groups of heads of its sequences, over sequences.
class BackwardCalls {
public:
    BackwardCalls(const Attention& whole, const Portion& most) : whole_(whole), most_(most) {}
    bool any() const { return sequence_ < whole_.sequences; }
    void next() {
        kv_head_ += most_.kv_heads;
        if (kv_head_ < whole_.kv_heads) return;
        kv_head_ = 0;
        sequence_ += most_.sequences;
    }
    Attention shape() const {
        return part_of(whole_,
                       {.sequences = std::min(most_.sequences, whole_.sequences - sequence_),
                        .kv_heads = std::min(most_.kv_heads, whole_.kv_heads - kv_head_)});
    }
    BackwardOperands of(const BackwardOperands& all) const {
        const int64_t ratio = whole_.heads / whole_.kv_heads, head = ratio * kv_head_;
        const Attention part = shape();
        const auto queries = [&](const auto& of) { return cut(of, head, part.heads); };
        const auto keys = [&](const auto& of) { return cut(of, kv_head_, part.kv_heads); };
        return {.q = queries(all.q),
                .k = keys(all.k),
                .v = keys(all.v),
                .out = queries(all.out),
                .dout = queries(all.dout),
                .lse = all.lse + whole_.lse_index(sequence_ * whole_.sequence, head),
                .dq = queries(all.dq),
                .dk = keys(all.dk),
                .dv = keys(all.dv)};
    }

private:
    template <class AnyView>
    AnyView cut(const AnyView& of, int64_t head, int64_t heads) const {
        const int64_t d = whole_.head_dim, rows = whole_.sequence;
        return of.block(sequence_ * rows, shape().sequences * rows, head * d, heads * d);
    }

    const Attention& whole_;
    const Portion most_;
    int64_t sequence_ = 0, kv_head_ = 0;
};

// Memory of a backward pass by tiles beside cuDNN's workspace, for one group of heads. A tile's
// gradients are rounded to the compute type; they are added in fp32, in the order of the tiles, and
// the sums rounded once more. dk and dv lie side by side.
struct TileRoom {
    TileRoom(const Attention& s, const AttentionTiles& tiles, std::byte* room) {
        const int64_t query = s.heads / s.kv_heads * tiles.kv_heads() * s.head_dim;
        const int64_t keys = 2 * tiles.kv_heads() * s.head_dim;
        const int64_t strip = tiles.most_queries(), sums = tiles.sums_queries() ? strip : 0;
        const auto take = [&](DType type, int64_t rows, int64_t cols) {
            void* at = room == nullptr ? nullptr : room + bytes;
            bytes += round_up(rows * cols * size_of(type), kUnit);
            return View::of(at, type, rows, cols);
        };
        lse = take(DType::f32, query / s.head_dim, strip);
        query_part = take(s.type, sums, query);
        query_sums = take(DType::f32, sums, query);
        key_part = take(s.type, tiles.most_keys(), keys);
        key_sums = take(DType::f32, s.sequence, keys);
    }
    static constexpr int64_t kUnit = 256;

    int64_t bytes = 0;
    View lse, query_part, query_sums, key_part, key_sums;
};

// The operands of a tile, whose heads and sequence are those of `all`. Queries' gradients go to
// their place where no other tile has a share in them.
BackwardOperands tile_of(const BackwardOperands& all, const AttentionTile& t,
                         const AttentionTiles& tiles, const TileRoom& room) {
    const auto queries = [&](const auto& of) { return of.row_range(t.query, t.queries); };
    const auto keys = [&](const auto& of) { return of.row_range(t.key, t.keys); };
    const int64_t width = room.key_part.cols / 2;
    return {.q = queries(all.q),
            .k = keys(all.k),
            .v = keys(all.v),
            .out = queries(all.out),
            .dout = queries(all.dout),
            .lse = static_cast<const float*>(room.lse.data),
            .dq = tiles.sums_queries() ? room.query_part.row_range(0, t.queries) : queries(all.dq),
            .dk = room.key_part.block(0, t.keys, 0, width),
            .dv = room.key_part.block(0, t.keys, width, width)};
}

// For rows without gaps; s: of one sequence and of the heads of a call.
CudnnCall call_of(const Attention& s, const AttentionTile& t) {
    CudnnCall call = call_of(s, true);
    call.queries = t.queries;
    call.keys = t.keys;
    call.causal = t.causal;
    call.window = t.causal && s.window < t.keys ? s.window : 0;
    call.row[kDk] = call.row[kDv] = 2 * s.kv_heads * s.head_dim;
    return call;
}

void zero(const View& sums, cudaStream_t stream) {
    cudaMemsetAsync(sums.data, 0, static_cast<size_t>(sums.rows * sums.cols * 4), stream);
    check_launch("attention backward, sums");
}

class Cudnn final : public CudnnAttention {
public:
    Cudnn(cudaStream_t stream, int64_t most_slope_bytes)
        : graphs_(stream), stream_(stream), most_slope_bytes_(most_slope_bytes) {}

    std::optional<int64_t> forward_bytes(const Attention& shape) override {
        return bytes_of(planned(call_of(shape, false)));
    }
    std::optional<int64_t> backward_bytes(const Attention& shape) override {
        if (const auto portion = backward_portion(shape, most_slope_bytes_))
            return bytes_of(planned(call_of(part_of(shape, *portion), true)));
        const AttentionTiles tiles(shape, most_slope_bytes_);
        const std::optional<int64_t> workspace = tile_workspace(shape, tiles);
        if (!workspace) return std::nullopt;
        return *workspace + TileRoom(shape, tiles, nullptr).bytes;
    }

    std::string why_not(const Attention& shape, bool backward) override {
        const CudnnCall whole = call_of(shape, backward);
        if (!could(whole))
            return "cuDNN is asked for 16-bit heads of 64, 80, 96, 112 and 128 alone";
        if (!backward) return graphs_.of(whole).why;
        if (const auto portion = backward_portion(shape, most_slope_bytes_))
            return graphs_.of(call_of(part_of(shape, *portion), true)).why;
        std::string why;
        each_tile(shape, AttentionTiles(shape, most_slope_bytes_), [&](const CudnnCall& call) {
            if (why.empty()) why = graphs_.of(call).why;
        });
        return why;
    }

    bool forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                 float* lse, std::byte* workspace) override {
        const CudnnCall dense = call_of(shape, false);
        CudnnCall call = dense;
        call.row = {q.ld, k.ld, v.ld, out.ld};
        const CudnnGraph* graph = graph_for(call, dense);
        if (graph == nullptr) return false;
        graphs_.run(call, *graph,
                    {mutable_data(q), mutable_data(k), mutable_data(v), out.data, lse}, workspace);
        return true;
    }

    bool backward(const Attention& shape, const BackwardOperands& operands,
                  std::byte* workspace) override {
        const auto portion = backward_portion(shape, most_slope_bytes_);
        if (!portion) return by_tiles(shape, operands, workspace);
        const CudnnCall dense = call_of(part_of(shape, *portion), true);
        for (BackwardCalls part(shape, *portion); part.any(); part.next()) {
            if (!run(call_of(part.shape(), true), dense, part.of(operands), workspace))
                return false;  // the first of them as the others
        }
        return true;
    }

private:
    bool by_tiles(const Attention& shape, const BackwardOperands& operands, std::byte* workspace) {
        const AttentionTiles tiles(shape, most_slope_bytes_);
        const std::optional<int64_t> bytes = tile_workspace(shape, tiles);
        if (!bytes) return false;
        const TileRoom room(shape, tiles, workspace + *bytes);
        const Portion portion{1, tiles.kv_heads()};
        for (BackwardCalls part(shape, portion); part.any(); part.next())
            heads_by_tiles(part.shape(), tiles, part.of(operands), room, workspace);
        return true;
    }

    // A sequence and the heads of one call.
    void heads_by_tiles(const Attention& s, const AttentionTiles& tiles,
                        const BackwardOperands& all, const TileRoom& room, std::byte* workspace) {
        zero(room.key_sums, stream_);
        for (int64_t strip = 0; strip < tiles.strips(); ++strip) {
            pack_lse(s, all.lse, tiles.tile(strip, 0), room);
            if (tiles.sums_queries()) zero(room.query_sums, stream_);
            for (int64_t i = 0; i < tiles.tiles(strip); ++i) {
                const AttentionTile t = tiles.tile(strip, i);
                const CudnnCall dense = call_of(s, t);
                const BackwardOperands operands = tile_of(all, t, tiles, room);
                const bool ran = run(dense, dense, operands, workspace);
                FERRY_CHECK(ran, "a tile that was planned has a kernel");
                add(room.key_part.row_range(0, t.keys), room.key_sums.row_range(t.key, t.keys),
                    stream_);
                if (tiles.sums_queries()) add(operands.dq, room.query_sums, stream_);
            }
            const AttentionTile t = tiles.tile(strip, 0);
            if (tiles.sums_queries())
                cast(room.query_sums, all.dq.row_range(t.query, t.queries), stream_);
        }
        const int64_t width = room.key_sums.cols / 2;
        cast(room.key_sums.col_range(0, width), all.dk, stream_);
        cast(room.key_sums.col_range(width, width), all.dv, stream_);
    }

    // cuDNN below 9.26 wants them without gaps.
    void pack_lse(const Attention& s, const float* lse, const AttentionTile& t,
                  const TileRoom& room) {
        const auto row = static_cast<size_t>(t.queries * 4);
        cudaMemcpy2DAsync(room.lse.data, row, lse + t.query, static_cast<size_t>(s.sequence * 4),
                          row, static_cast<size_t>(s.heads), cudaMemcpyDeviceToDevice, stream_);
        check_launch("attention backward, log-sum-exps");
    }

    // Those whose rows its kernels read in whole vectors.
    static bool could(const CudnnCall& call) {
        return (call.type == DType::bf16 || call.type == DType::f16) && call.head_dim >= 64 &&
               call.head_dim <= 128 && call.head_dim % 16 == 0;
    }

    // The calls for rows without gaps.
    template <class Visit>
    static void each_tile(const Attention& shape, const AttentionTiles& tiles, const Visit& visit) {
        const Attention heads = part_of(shape, {1, tiles.kv_heads()});
        for (int64_t strip = 0; strip < tiles.strips(); ++strip)
            for (int64_t i = 0; i < tiles.tiles(strip); ++i)
                visit(call_of(heads, tiles.tile(strip, i)));
    }
    // The most of any tile, up to where other room may begin. Nothing where one has no kernel.
    std::optional<int64_t> tile_workspace(const Attention& shape, const AttentionTiles& tiles) {
        std::optional<int64_t> most = 0;
        each_tile(shape, tiles, [&](const CudnnCall& call) {
            const CudnnGraph* graph = most ? planned(call) : nullptr;
            most = graph == nullptr ? std::nullopt : std::optional(std::max(*most, graph->bytes));
        });
        if (!most) return std::nullopt;
        return round_up(*most, TileRoom::kUnit);
    }

    // For rows without gaps, which is all that is known at plan time; null where there is none.
    const CudnnGraph* planned(const CudnnCall& dense) {
        if (!could(dense)) return nullptr;
        const CudnnGraph& graph = graphs_.of(dense);
        return graph.graph ? &graph : nullptr;
    }
    static std::optional<int64_t> bytes_of(const CudnnGraph* graph) {
        return graph == nullptr ? std::nullopt : std::optional(graph->bytes);
    }

    // One look a call: what there is for a layout, be it nothing, is known since its first call,
    // when it was held against what was planned as `dense`.
    const CudnnGraph* graph_for(const CudnnCall& call, const CudnnCall& dense) {
        if (!could(call)) return nullptr;
        if (const CudnnGraph* known = graphs_.known(call)) return known->graph ? known : nullptr;
        const CudnnGraph* plan = planned(dense);
        if (plan == nullptr) {
            graphs_.refuse(call);
            return nullptr;
        }
        const CudnnGraph& graph = graphs_.of(call);
        FERRY_CHECK(graph.graph != nullptr, "cuDNN knows this shape in one layout only");
        FERRY_CHECK(graph.bytes <= plan->bytes, "cuDNN's workspace depends on the layout");
        return &graph;
    }

    bool run(const CudnnCall& shape, const CudnnCall& dense, const BackwardOperands& operands,
             std::byte* workspace) {
        const CudnnCall call = with_rows_of(operands, shape);
        const CudnnGraph* graph = graph_for(call, dense);
        if (graph != nullptr) graphs_.run(call, *graph, data_of(operands), workspace);
        return graph != nullptr;
    }

    CudnnGraphs graphs_;
    cudaStream_t stream_;
    int64_t most_slope_bytes_;
};

}  // namespace

std::unique_ptr<CudnnAttention> CudnnAttention::make(cudaStream_t stream,
                                                     int64_t most_slope_bytes) {
    return std::make_unique<Cudnn>(stream, most_slope_bytes);
}

std::string cudnn_version() {
    const size_t version = cudnnGetVersion();
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

}  // namespace ferry::ops::cuda

#endif
