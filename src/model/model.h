// A decoder-only transformer, one layer at a time: what its flat buffers hold, and the forward and
// backward pass of each kind of layer over one micro-batch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/dtype.h"
#include "model/saved_activations.h"
#include "ops/ops.h"

namespace ferry::model {

// How a family names and lays out its tensors. Shape has what else differs, huggingface.h reads it.
enum class Family : uint8_t { llama, mistral, qwen2, qwen3, gpt2 };

// How RoPE is stretched beyond the text that a model was first trained on.
struct RopeScaling {
    enum class Kind : uint8_t { none, linear, llama3, yarn, dynamic, longrope, proportional };
    Kind kind = Kind::none;
    double factor = 1;
    // llama3, yarn, longrope: of the first training; dynamic: that the model was made for.
    double original_positions = 0;
    double low_frequency = 1, high_frequency = 4;  // llama3: turns in the original text
    double beta_fast = 32, beta_slow = 1;          // yarn: the same
    double amplitude = 1;                          // yarn, longrope: of both queries and keys
    bool truncate = true;                          // yarn: whole dimensions
    std::vector<double> short_factors{}, long_factors{};  // longrope: divide the frequencies
    double rotated = 1;  // proportional: the share of a head's pairs that turns
};

// Pre-norm blocks of grouped-query attention and an MLP. hidden, intermediate, ... in elements.
struct Shape {
    int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0;
    int64_t vocab = 0;
    bool tie_embeddings = false;
    double rope_theta = 10000, norm_eps = 1e-5;
    Family family = Family::llama;
    bool layer_norm = false;  // LayerNorm with biases; else RMSNorm
    bool gated = true;        // SwiGLU; else GELU in its tanh form
    bool qkv_bias = false, output_bias = false, mlp_bias = false;
    bool head_norms = false;        // RMSNorm of each head's queries and keys, before RoPE
    int64_t learned_positions = 0;  // rows of a table added to the embedding; 0: RoPE
    RopeScaling rope_scaling{};
    std::vector<int64_t> windows{};  // by block, in tokens; 0: none. Empty: none has one
    // By block: the blocks of keys that its attention sees; null: all. Empty: none has a pattern.
    std::vector<std::shared_ptr<const ops::BlockLists>> patterns{};
    std::string pattern_text{};  // what the user calls them
    const ops::BlockLists* pattern_of(int64_t block) const {
        return patterns.empty() ? nullptr : patterns[static_cast<size_t>(block)].get();
    }
    double initial_deviation = 0.02;  // random weights' standard deviation
    bool smaller_residuals = true;    // random output and down projections / sqrt(2 layers)
    // Row of the embedding that learns nothing from where it is looked up and starts as zeros, as
    // torch.nn.Embedding's padding_idx; -1: none.
    int64_t padding_token = -1;
    int64_t window_of(int64_t block) const {
        return windows.empty() ? 0 : windows[static_cast<size_t>(block)];
    }
};

// The settings that order or round a floating-point operation (numerics.md). Nothing else may.
struct Numerics {
    int64_t sequence = 0, micro_batch = 0;  // tokens a sequence; sequences a kernel
    // Ranks may share each sequence: `sequence` is then this rank's part of it, the part-th.
    int parts = 1, part = 0;
    // How: each has all tokens of some heads for attention, or its own tokens of all heads, and
    // keys and queries go round (ring_attention.h).
    bool ring = false;
    // Ranks may share each block's tensors: this one has the slice-th of so many slices. So many
    // neighbours of them have the same heads of keys and values.
    int slices = 1, slice = 0, key_holders = 1;
    int64_t head_tile = 1024;    // tokens a tile of the fused head and loss
    int64_t mlp_tile = 0;        // tokens a tile of the MLP; 0: whole micro-batch
    bool documents = false;      // a sequence holds some that do not see each other
    DType compute = DType::f32;  // weights and GEMM inputs
    DType residual = DType::f32, wire = DType::f32;  // wire: gradients, rounded once
    int64_t tokens() const { return sequence * micro_batch; }
    int64_t whole_sequence() const { return sequence * parts; }
    int64_t whole_tokens() const { return tokens() * parts; }
    // Of a rank's attention.
    int64_t attended_tokens() const { return ring ? tokens() : whole_tokens(); }
    // int32 of a micro-batch's tokens, targets and, where there are some, documents.
    int64_t token_numbers() const {
        const int64_t of_documents = 2 * whole_tokens() + (parts > 1 ? tokens() : 0);
        return 2 * tokens() + (documents ? of_documents : 0);
    }
};

// The role of a tensor, in the order in which a layer's buffer holds them. A bias follows its
// weight's place: the operands of one GEMM lie together.
enum class Role : uint8_t {
    token_table,
    position_table,
    head_table,
    query,
    key,
    value,
    query_key_value,
    output,
    gate,
    up,
    down,
    attention_norm,
    attention_norm_bias,
    mlp_norm,
    mlp_norm_bias,
    final_norm,
    final_norm_bias,
    query_norm,
    key_norm,
    query_bias,
    key_bias,
    value_bias,
    query_key_value_bias,
    output_bias,
    gate_bias,
    up_bias,
    down_bias
};

// Which of so many ranks that share tensors.
struct Slicing {
    int ranks = 1, rank = 0;
};

// Rows or columns of a slice, and where they are in the whole tensor.
struct Band {
    int64_t at = 0, from = 0, count = 0;
};

struct Tensor {
    std::string name{};  // Hugging Face's: model.layers.0.self_attn.q_proj.weight
    Role role{};
    // A matrix is [outputs, inputs], in gpt2's blocks the reverse. Of a slice, the slice's.
    std::vector<int64_t> shape{};
    int64_t offset = 0, count = 0;  // elements in the layer's flat buffer
    bool decays = true, trainable = true;
    bool fp32_moments = false;  // whatever the run's moments are kept in
    bool by_muon = false;       // the rest is AdamW's
    // A slice: the whole tensor's shape, and the bands of it that are here, along one axis. Rows or
    // columns that no band has are padding, zeros. Empty: this is the whole tensor.
    std::vector<int64_t> whole{};
    std::vector<Band> bands{};
    int axis = 0;
    int holders = 1;  // neighbours among the ranks that share tensors that have the same elements
    bool is_slice() const { return !whole.empty(); }
    const std::vector<int64_t>& whole_shape() const { return is_slice() ? whole : shape; }
    int64_t whole_count() const;
};

// Elements that lie in a row in a slice and in its whole tensor.
struct SliceRun {
    int64_t at = 0, from = 0, count = 0;  // at: in the slice
};
// All of the slice's elements [first, first + count) that are no padding, rising in both.
std::vector<SliceRun> runs_of(const Tensor& tensor, int64_t first, int64_t count);

struct MatrixShape {
    int64_t rows = 1, cols = 1;
};

// A run of the flat buffer: multiples of 4,096 times the shards it is cut into, padded with zeros.
struct Segment {
    int64_t offset = 0, count = 0;
    bool decays = true, trainable = true;
    bool fp32_moments = false;
    int holders = 1;  // of each of its tensors
    // Muon's, of which each shard holds one whole; a shard for which there was none has a matrix of
    // one zero. Empty: the segment is a run of elements, of one tensor or many.
    std::vector<MatrixShape> matrices{};
    bool has_matrices() const { return !matrices.empty(); }
};

// Which tensors keep fp32 moments where the others' are coded in blocks: vectors (norms, biases),
// what has fewer than 4,096 elements or is not whole blocks of 256, and what a pattern names.
struct CodedMoments {
    bool coded = false;  // else no tensor is told apart
    std::span<const std::string> fp32{};
    bool must_match = true;  // each pattern some tensor
};

// Which tensors Muon updates: the matrices of blocks that train, but those that a pattern names.
struct MuonMatrices {
    bool on = false;
    std::span<const std::string> adamw{};
};

enum class LayerKind : uint8_t { embedding, block, head };

// One flat buffer, ordered [trainable, decayed | trainable, not decayed | frozen]; of each that
// trains first what has coded moments, where some have, and of that first what no other rank holds.
// Muon's matrices come before all.
struct Layer {
    LayerKind kind = LayerKind::block;
    int64_t index = 0;  // of the block
    std::vector<Tensor> tensors{};
    std::vector<Segment> segments{};
    int64_t elements = 0, trainable_elements = 0;  // padded; the prefix with gradients and state
    const Tensor* find(Role role) const;           // null where the layer has none
};

// Embedding, blocks, head. With tied embeddings the head's layer holds the final norm alone and the
// head multiplies by the embedding's table. `freeze` are glob patterns ('*' and '?') over tensor
// names; a pattern that matches nothing throws Trouble::usage. Norm weights and biases do not decay
// unless `decay_norms`. Throws usage where Muon is left no matrix. `shards`: that every segment can
// be cut into, one a rank. Muon's matrices are dealt to the shards, largest first, and a segment's
// shards are as large as its largest matrix; the block's number says which shard comes first.
// `slicing`: the layers have this rank's slices of the blocks' tensors. They lie alike on all
// ranks.
std::vector<Layer> layers_of(const Shape& shape, std::span<const std::string> freeze,
                             bool decay_norms, int shards = 1, const CodedMoments& moments = {},
                             const MuonMatrices& muon = {}, const Slicing& slicing = {});

// ---------------------------------------------------------------- slices (parallel.tensor)

// Ranks divide the heads of keys with the queries' that read them, and the MLP's inner width. Where
// these do not divide, some ranks have one less, and zeros in its place. Of more ranks than heads
// of keys, neighbours have the same one and divide its queries.
//
// Throws usage where so many ranks cannot: more than heads, or heads of keys that neither they are
// divided by nor they divide, or a pattern's heads that do not divide evenly.
void require_slices(const Shape& whole, int ranks);
// The shape of what a rank computes with.
Shape slice_of(const Shape& whole, const Slicing& slicing);
// The same of a tensor: as it is, where every rank has all of it.
Tensor slice_of(const Shape& whole, Tensor tensor, const Slicing& slicing);
// How many neighbours have the same heads of keys.
int key_holders_of(const Shape& whole, int ranks);

// Angles of RoPE: position * frequency, and what cosine and sine are multiplied by. Empty where
// positions are learned. To dynamic and longrope a text is as long as a whole sequence, always.
struct RopeTable {
    std::vector<double> frequencies{};  // [head_dim / 2]
    double amplitude = 1;
};
RopeTable rope_table(const Shape& shape, int64_t sequence);

// A micro-batch's documents as ops::Attention has them, by token of the whole sequences; null:
// numerics has none. `part_start`: of this rank's tokens, counted from the first of its part, which
// may be behind it.
struct Documents {
    const int32_t* start = nullptr;
    const int32_t* end = nullptr;
    const int32_t* part_start = nullptr;
};

struct Shift {  // as comm's: to the rank `by` places behind, from the one as far before
    const std::byte* to = nullptr;
    std::byte* from = nullptr;
    int64_t to_bytes = 0, from_bytes = 0;
    int by = 0;
};

// Ranks that a layer's kernels talk to, in the order of the compute stream. Those that share a
// micro-batch's sequences: between its products of tokens and its attention a block gives each of
// them the heads that are theirs, and gets all tokens of its own. Those that share its tensors:
// each adds up its rows of what attention, the MLP and the embedding give, all get the normed rows
// of each, and they put the loss together. Declared here so that `model` need not see `comm`.
// `block`: -1 the embedding, behind the last one the head.
class KernelRanks {
public:
    virtual ~KernelRanks() = default;
    // Sends the r-th `bytes` of `to` to rank r, and receives its into the same place of `from`.
    // `block`: for whoever must be told.
    virtual void exchange(const std::byte* to, std::byte* from, int64_t bytes, int64_t block) = 0;
    // Every rank's `bytes` come to its place of `all`; `mine` may be there.
    virtual void gather(const std::byte* mine, std::byte* all, int64_t bytes, int64_t block) = 0;
    virtual void shift(const Shift& parts, int64_t block) = 0;
};
struct Neighbours {
    KernelRanks* sequence = nullptr;  // null: none, or nothing but time and memory is asked for
    KernelRanks* slices = nullptr;
};

// What a block's kernels, or another layer's, send to other ranks from within, and in how many
// calls.
struct BlockExchanges {
    struct Group {
        int64_t forward_bytes = 0, backward_bytes = 0;
        int64_t forward_calls = 0, backward_calls = 0;
        // Of backward's, what it spares where attention's results are saved.
        int64_t attention_bytes = 0, attention_calls = 0;
        int64_t bytes(bool back) const { return back ? backward_bytes : forward_bytes; }
        int64_t calls(bool back) const { return back ? backward_calls : forward_calls; }
    };
    Group sequence{}, slices{};  // with those that share the sequence, or the block's tensors
    int64_t bytes(bool back) const { return sequence.bytes(back) + slices.bytes(back); }
    int64_t calls(bool back) const { return sequence.calls(back) + slices.calls(back); }
};
// Of a layer of each kind. The head goes back in the same visit: `backward` is both, `forward` of
// evaluation.
struct Exchanges {
    BlockExchanges embedding{}, block{}, head{};
    const BlockExchanges& of(LayerKind kind) const {
        return kind == LayerKind::block ? block : kind == LayerKind::head ? head : embedding;
    }
};

// Heads of keys and values of which one of these ranks has all tokens, with the queries' heads that
// read them. Where ranks do not divide the heads, some have one more.
struct HeadShare {
    int64_t first = 0, count = 0;
};
HeadShare head_share(int64_t kv_heads, int parts, int part);

class Carver;
class Head;
class SliceSum;

// What a block's attention sees of the tokens before.
struct Mask {
    const ops::BlockLists* pattern = nullptr;
    ops::BlockListsView lists{};
    Documents documents{};
    Neighbours ranks{};
};

// Every method is called inside a job of the compute stream; pointers are device memory, laid out
// as Layer says, in the compute type; activations are [tokens, hidden] in the residual type. Of
// ranks that share tensors each has the rows of a part of the tokens (slice_sum.h).
// `scratch` has scratch_bytes(). Nothing allocates.
class Decoder {
public:
    // `ranks` have the other parts of the sequences, and the other slices; `shape` is this slice's.
    // Null where there are none, or nothing but time and memory is asked for: then what they would
    // send is whatever lies there.
    Decoder(Shape shape, Numerics numerics, std::vector<Layer> layers, ops::Ops& ops,
            Neighbours ranks = {});
    const Shape& shape() const noexcept { return shape_; }
    const Numerics& numerics() const noexcept { return numerics_; }
    const std::vector<Layer>& layers() const noexcept { return layers_; }
    const ops::Ops& ops() const noexcept { return ops_; }
    int64_t activation_bytes() const;       // of one block input of one micro-batch
    int64_t scratch_bytes() const;          // the largest of any call below
    int64_t saved_bytes(Saved what) const;  // of a block and micro-batch
    int64_t deferred_bytes() const;         // likewise, where backward leaves weights' gradients
    Exchanges exchanges() const;            // of a micro-batch and layers that train
    // Bytes of the patterns' lists, each once, and of where a part's positions begin. Operations
    // read them in device memory: before the first one, place_patterns gets so much of that memory,
    // and copies them by `copy`.
    int64_t pattern_bytes() const;
    using Copy = std::function<void(std::byte* to, std::span<const std::byte> from)>;
    void place_patterns(std::byte* memory, const Copy& copy);

    // tokens: [micro_batch, sequence] int32, each in [0, vocab). weights: the embedding layer's.
    void embed(const int32_t* tokens, const void* weights, void* x, std::byte* scratch,
               const Documents& documents = {}) const;
    // *nonfinite |= 1 when an element of x_out is NaN or Inf. `saved`: null, or saved_bytes() for a
    // result; backward, given the same, overwrites it and does not compute it again.
    void forward(int64_t block, const void* weights, const void* x_in, void* x_out,
                 uint32_t* nonfinite, std::byte* scratch, const SavedMemory& saved = {},
                 const Documents& documents = {}) const;
    // Recomputes the block from x_in. dx holds d(x_out) and receives d(x_in), unless !needs_dx.
    // Adds to `gradient` (fp32, the layer's trainable prefix); of a fresh one it writes every
    // element, here and below.
    void backward(int64_t block, const void* weights, const void* x_in, void* dx, bool needs_dx,
                  ops::Accumulator gradient, std::byte* scratch, const SavedMemory& saved = {},
                  const Documents& documents = {}) const;
    // The same in two, to the bit. The first leaves in `deferred` (deferred_bytes()), and in
    // `saved`, what the gradients of matrices and biases are products of. Norms' it adds to
    // `norms` (fp32, norm_elements()), which may serve several micro-batches: the second one adds
    // them, where they are given to it, to those of `gradient`, zero until then.
    void input_gradients(int64_t block, const void* weights, const void* x_in, void* dx,
                         bool needs_dx, float* norms, std::byte* scratch, const SavedMemory& saved,
                         const Documents& documents, std::byte* deferred) const;
    void weight_gradients(int64_t block, bool needs_dx, ops::Accumulator gradient,
                          std::byte* scratch, const SavedMemory& saved, std::byte* deferred,
                          const float* norms) const;
    // Alone, of whatever lies in `scratch`: to be timed.
    void compute_saved(Saved what, int64_t block, const void* weights, std::byte* scratch,
                       const Documents& documents = {}) const;
    // Final norm, logits, cross-entropy, fused over tiles of numerics().head_tile tokens. targets:
    // int32, -1 where not real. `embedding` and `embedding_gradient` are the embedding layer's when
    // tied, else null. Each target's gradient carries `scale` (1 / the step's real targets). dx
    // receives d(x). gradient pointers may be null where nothing in them trains. dx may be null.
    // Adds the losses (natural logarithm) over real targets to *loss_sum.
    void head(const void* weights, const void* embedding, const void* x, const int32_t* targets,
              float scale, void* dx, ops::Accumulator gradient, ops::Accumulator embedding_gradient,
              double* loss_sum, std::byte* scratch) const;
    // Sees fp32 logits, in scratch: of tokens from `first` on, and of the vocabulary from `column`
    // on, all of it where no ranks share the tables. Of those that do all must ask, or none. On
    // CUDA they are on their way there: what it does with them it enqueues by the same Ops.
    using LogitsSink = std::function<void(int64_t first, int64_t column, ops::ConstView logits)>;
    void head_loss(const void* weights, const void* embedding, const void* x,
                   const int32_t* targets, double* loss_sum, std::byte* scratch,
                   const LogitsSink& logits = {}) const;
    // Adds each token's row of dx, in token order, to the embedding layer's gradient, which holds
    // nothing but these: the head's of a tied table is kept apart. The padding token's row is zero.
    void embed_backward(const int32_t* tokens, const void* dx, float* gradient, std::byte* scratch,
                        const Documents& documents = {}) const;

private:
    struct EmbedBuffers;
    Mask mask_of(int64_t block, const Documents& documents) const;
    SliceSum embedding_sum() const;
    EmbedBuffers cut_embedding(Carver& carver) const;
    Head head_of(const void* weights, ops::Accumulator gradient, const void* embedding,
                 ops::Accumulator embedding_gradient, std::byte* scratch) const;
    Shape shape_;
    Numerics numerics_;
    RopeTable rope_;
    std::vector<Layer> layers_;
    // By block: its pattern for this rank's heads, and the same in the device's memory.
    std::vector<std::shared_ptr<const ops::BlockLists>> patterns_{};
    std::vector<ops::BlockListsView> lists_{};
    std::vector<int32_t> part_starts_{};  // in ring order without documents: of rows, as theirs
    const int32_t* placed_part_starts_ = nullptr;  // the same in the device's memory
    Neighbours ranks_;
    ops::Ops& ops_;
};

// fp32 master weights of a layer's elements from `first` on, by (seed, tensor, element of the whole
// tensor) alone; `shape` is the whole model's:
// normal with the shape's deviation; norms one; biases, padding and the padding token zero.
void initialise(const Shape& shape, const Layer& layer, uint32_t seed, int64_t first,
                std::span<float> out);

}  // namespace ferry::model
