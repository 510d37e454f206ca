#include "cudnn_attention.h"

#ifdef FERRY_CUDNN

#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <unordered_map>

#include "base/log.h"

namespace ferry::ops::cuda {
namespace {

namespace fe = cudnn_frontend;

// The operands, by the numbers that the graphs know them by.
constexpr int kQ = 0, kK = 1, kV = 2, kOut = 3, kLse = 4, kDout = 5, kDq = 6, kDk = 7, kDv = 8;
constexpr int kOperands = 9;

// Bounds of a backward call. On Hopper the deterministic kernel keeps a slope of 2 B for each pair
// of query and key: of several sequences as many as fill the GPU; one alone may ask for more, and
// beyond that its groups of heads are calls of their own. Neither sequences nor groups know of each
// other, so no bit depends on this.
constexpr int64_t kSeveralBytes = 512 * kMiB, kOneBytes = kGiB;

// What one call takes: whole sequences, or of one the heads that share `kv_heads` heads of keys.
struct Portion {
    int64_t sequences = 1, kv_heads = 1;
    bool ordered = false;  // sums the queries' gradients in order, with no slopes kept
};

Portion backward_portion(const Attention& s) {
    const int64_t ratio = s.heads / s.kv_heads;
    const int64_t group = 2 * ratio * round_up(s.sequence, 64) * round_up(s.sequence, 128);
    const int64_t one = group * s.kv_heads;
    if (one <= kOneBytes)
        return {std::clamp<int64_t>(kSeveralBytes / one, 1, s.sequences), s.kv_heads};
    const int64_t most = kOneBytes / group;
    // The kernel without slopes came with cuDNN 9.25. It is the slower one where both run.
    constexpr size_t kOrdered = 92500;
    if (most == 0 && cudnnGetVersion() >= kOrdered) return {1, s.kv_heads, true};
    const int64_t calls = ceil_div(s.kv_heads, std::max<int64_t>(most, 1));
    return {1, ceil_div(s.kv_heads, calls)};
}

Attention part_of(Attention s, const Portion& portion) {
    s.heads = s.heads / s.kv_heads * portion.kv_heads;
    s.kv_heads = portion.kv_heads;
    s.sequences = portion.sequences;
    return s;
}

// What a graph is built for: the shape of a call, and how far apart rows are.
struct Key {
    bool backward = false, ordered = false;  // ordered: Portion's
    int64_t sequences = 0;                   // of the call
    int64_t sequence = 0, heads = 0, kv_heads = 0, head_dim = 0;
    int64_t window = 0;  // 0: none, or as long as the sequence
    DType type = DType::bf16;
    double scale = 0;
    std::array<int64_t, kOperands> row{};  // elements from one token to the next
    auto operator<=>(const Key&) const = default;
};

Key key_of(const Attention& s, bool backward, bool ordered = false) {
    Key key{.backward = backward,
            .ordered = ordered,
            .sequences = s.sequences,
            .sequence = s.sequence,
            .heads = s.heads,
            .kv_heads = s.kv_heads,
            .head_dim = s.head_dim,
            .window = s.window < s.sequence ? s.window : 0,
            .type = s.type,
            .scale = s.scale};
    const int64_t query = s.heads * s.head_dim, key_value = s.kv_heads * s.head_dim;
    key.row = {query, key_value, key_value, query, 1, query, query, key_value, key_value};
    return key;
}

void demand(fe::error_t error, const char* call) {
    if (error.is_good() || gpu_work_failed()) return;
    throw Error(
        Trouble::internal,
        {.what = "cuDNN's attention failed", .where = call, .measured = error.get_message()});
}

// Of an answer that is none: cuDNN could not look for a kernel. Which attention runs follows from
// shape, GPU and version alone, so nothing else may take its place.
void refuse_failure(fe::error_t error) {
    const std::string text = error.get_message();
    const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
    const bool no_memory = cudaGetLastError() == cudaErrorMemoryAllocation ||
                           says("DEVICE_ALLOCATION_FAILED") || says("out of memory");
    if (no_memory) throw out_of_gpu_memory("building cuDNN's attention");
    using enum fe::error_code_t;
    const std::array broken{CUDA_API_FAILED, INVALID_CUDA_DEVICE, HANDLE_ERROR,
                            NVRTC_COMPILATION_FAILED};
    // A library of cuDNN's or one that it loads is missing, or of another version.
    const bool missing = says("SUBLIBRARY") || says("PREREQUISITE_MISSING") ||
                         says("NOT_INITIALIZED") || says("HOST_ALLOCATION_FAILED");
    if (!missing && std::ranges::find(broken, error.get_code()) == broken.end()) return;
    throw Error(Trouble::internal,
                {.what = "cuDNN could not build its attention",
                 .where = "numerics.attention",
                 .measured = text,
                 .remedy = "install all of cuDNN's libraries, of one version (and NVRTC's), or set "
                           "numerics.attention to ferry"});
}

using Graph = fe::graph::Graph;
// What cuDNN built for a key; null: nothing.
struct Built {
    std::unique_ptr<Graph> graph{};
    int64_t bytes = 0;  // of its workspace
    std::string why{};  // there is nothing
};
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// cudnn-frontend takes Hopper's ordered kernel where this variable keeps slopes out of the
// workspace; there is no other way to ask for it. It is read while a graph is built.
class NoSlopes {
public:
    explicit NoSlopes(bool wanted) : wanted_(wanted) {
        if (!wanted_) return;
        if (const char* before = getenv(kName)) before_ = before;
        setenv(kName, "0", 1);
    }
    ~NoSlopes() {
        if (!wanted_) return;
        before_ ? setenv(kName, before_->c_str(), 1) : unsetenv(kName);
    }
    NoSlopes(const NoSlopes&) = delete;
    NoSlopes& operator=(const NoSlopes&) = delete;

private:
    static constexpr const char* kName = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT";
    bool wanted_;
    std::optional<std::string> before_{};
};

class GraphBuilder {
public:
    explicit GraphBuilder(const Key& key) : key_(key) {
        graph_
            .set_io_data_type(key.type == DType::bf16 ? fe::DataType_t::BFLOAT16
                                                      : fe::DataType_t::HALF)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    Built build(cudnnHandle_t handle) {
        const NoSlopes no_slopes(key_.ordered);
        key_.backward ? backward() : forward();
        fe::error_t error = graph_.build(handle, {fe::HeurMode_t::A});
        if (error.is_bad()) {
            refuse_failure(error);
            return instead(error.get_message());
        }
        Built built{.graph = std::make_unique<Graph>(std::move(graph_))};
        demand(built.graph->get_workspace_size(built.bytes), "workspace");
        if (built.bytes > CudnnAttention::kMostWorkspace)
            return instead("its workspace is " + format_bytes(built.bytes));
        return built;
    }

private:
    Built instead(const std::string& why) const {
        log_info(std::string("no attention by cuDNN ") + (key_.backward ? "backward" : "forward") +
                 " for " + std::to_string(key_.sequence) + " tokens" +
                 (key_.window > 0 ? " in a window of " + std::to_string(key_.window) : "") +
                 ", ferry's own is used: " + why);
        return {.why = why};
    }
    // [sequences, heads, sequence, head_dim], tokens outermost in memory but for the sequence.
    template <class Attributes>
    Attributes& shaped(Attributes& tensor, int operand) const {
        const int64_t row = key_.row[static_cast<size_t>(operand)];
        const bool of_keys = operand == kK || operand == kV || operand == kDk || operand == kDv;
        const int64_t heads = of_keys ? key_.kv_heads : key_.heads;
        tensor.set_uid(operand)
            .set_dim({key_.sequences, heads, key_.sequence, key_.head_dim})
            .set_stride({key_.sequence * row, key_.head_dim, row, 1});
        return tensor;
    }
    template <class Attributes>
    Attributes& shaped_lse(Attributes& tensor) const {
        tensor.set_uid(kLse)
            .set_dim({key_.sequences, key_.heads, key_.sequence, 1})
            .set_stride({key_.heads * key_.sequence, key_.sequence, 1, 1})
            .set_data_type(fe::DataType_t::FLOAT);
        return tensor;
    }
    Tensor input(int operand) {
        fe::graph::Tensor_attributes tensor;
        return graph_.tensor(operand == kLse ? shaped_lse(tensor) : shaped(tensor, operand));
    }
    void output(const Tensor& tensor, int operand) const {
        (operand == kLse ? shaped_lse(*tensor) : shaped(*tensor, operand)).set_output(true);
    }
    template <class Options>
    Options causal() const {
        Options options;
        options.set_name(key_.backward ? "attention backward" : "attention forward")
            .set_attn_scale(static_cast<float>(key_.scale))
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        // Keys after query - window, as Attention::first_key.
        if (key_.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(key_.window));
        return options;
    }

    void forward() {
        auto options = causal<fe::graph::SDPA_attributes>().set_generate_stats(true);
        auto [out, lse] = graph_.sdpa(input(kQ), input(kK), input(kV), options);
        output(out, kOut);
        output(lse, kLse);
    }
    void backward() {
        auto options =
            causal<fe::graph::SDPA_backward_attributes>().set_deterministic_algorithm(true);
        auto [dq, dk, dv] = graph_.sdpa_backward(input(kQ), input(kK), input(kV), input(kOut),
                                                 input(kDout), input(kLse), options);
        output(dq, kDq);
        output(dk, kDk);
        output(dv, kDv);
    }

    const Key& key_;
    Graph graph_{};
};

// One backward call after the other: over the groups of heads of its sequences, over sequences.
class Part {
public:
    Part(const Attention& whole, const Portion& most) : whole_(whole), most_(most) {}
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
    ConstView queries(ConstView of) const { return cut(of, ratio() * kv_head_, shape().heads); }
    ConstView keys(ConstView of) const { return cut(of, kv_head_, shape().kv_heads); }
    int64_t lse_index() const {
        return whole_.lse_index(sequence_ * whole_.sequence, ratio() * kv_head_);
    }

private:
    int64_t ratio() const { return whole_.heads / whole_.kv_heads; }
    ConstView cut(ConstView of, int64_t head, int64_t heads) const {
        const int64_t d = whole_.head_dim, rows = whole_.sequence;
        return of.block(sequence_ * rows, shape().sequences * rows, head * d, heads * d);
    }

    const Attention& whole_;
    const Portion most_;
    int64_t sequence_ = 0, kv_head_ = 0;
};

class Cudnn final : public CudnnAttention {
public:
    explicit Cudnn(cudaStream_t stream) {
        check(cudnnCreate(&handle_), "cudnnCreate");
        check(cudnnSetStream(handle_, stream), "cudnnSetStream");
    }
    ~Cudnn() override {
        built_.clear();
        cudnnDestroy(handle_);
    }
    Cudnn(const Cudnn&) = delete;
    Cudnn& operator=(const Cudnn&) = delete;

    std::optional<int64_t> forward_bytes(const Attention& shape) override {
        return bytes_of(planned(key_of(shape, false)));
    }
    std::optional<int64_t> backward_bytes(const Attention& shape) override {
        return bytes_of(planned(backward_key(shape)));
    }

    std::string why_not(const Attention& shape, bool backward) override {
        const Key key = backward ? backward_key(shape) : key_of(shape, false);
        if (!could(key)) return "cuDNN is asked for 16-bit heads of 64, 80, 96, 112 and 128 alone";
        return built_for(key).why;
    }

    bool forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                 float* lse, std::byte* workspace) override {
        const Key dense = key_of(shape, false);
        Key key = dense;
        key.row = {q.ld, k.ld, v.ld, out.ld};
        const Built* built = built_for_call(key, dense);
        if (built == nullptr) return false;
        Pack pack = {{kQ, mutable_data(q)},
                     {kK, mutable_data(k)},
                     {kV, mutable_data(v)},
                     {kOut, out.data},
                     {kLse, lse}};
        run(*built, key, pack, workspace);
        return true;
    }

    bool backward(const Attention& shape, ConstView q, ConstView k, ConstView v, ConstView out,
                  ConstView dout, const float* lse, View dq, View dk, View dv,
                  std::byte* workspace) override {
        const Portion most = backward_portion(shape);
        const Key dense = backward_key(shape);
        const std::array rows{q.ld, k.ld, v.ld, out.ld, int64_t{1}, dout.ld, dq.ld, dk.ld, dv.ld};
        for (Part part(shape, most); part.any(); part.next()) {
            Key key = key_of(part.shape(), true, most.ordered);
            key.row = rows;
            const Built* built = built_for_call(key, dense);
            if (built == nullptr) return false;
            Pack pack = {{kQ, mutable_data(part.queries(q))},
                         {kK, mutable_data(part.keys(k))},
                         {kV, mutable_data(part.keys(v))},
                         {kOut, mutable_data(part.queries(out))},
                         {kLse, const_cast<float*>(lse + part.lse_index())},
                         {kDout, mutable_data(part.queries(dout))},
                         {kDq, mutable_data(part.queries(dq))},
                         {kDk, mutable_data(part.keys(dk))},
                         {kDv, mutable_data(part.keys(dv))}};
            run(*built, key, pack, workspace);
        }
        return true;
    }

private:
    using Pack = std::unordered_map<int64_t, void*>;

    static void check(cudnnStatus_t status, const char* call) {
        if (status == CUDNN_STATUS_SUCCESS) return;
        throw Error(Trouble::internal, {.what = "cuDNN cannot start",
                                        .where = call,
                                        .measured = cudnnGetErrorString(status),
                                        .remedy = "set numerics.attention to ferry"});
    }
    // cuDNN takes every operand as one that it might write.
    static void* mutable_data(ConstView view) { return const_cast<void*>(view.data); }

    // Those whose rows its kernels read in whole vectors.
    static bool could(const Key& key) {
        return (key.type == DType::bf16 || key.type == DType::f16) && key.head_dim >= 64 &&
               key.head_dim <= 128 && key.head_dim % 16 == 0;
    }
    // Of the largest call, for rows without gaps.
    static Key backward_key(const Attention& shape) {
        const Portion portion = backward_portion(shape);
        return key_of(part_of(shape, portion), true, portion.ordered);
    }

    const Built& built_for(const Key& key) {
        const auto known = built_.find(key);
        if (known != built_.end()) return known->second;
        return built_.emplace(key, GraphBuilder(key).build(handle_)).first->second;
    }

    // For rows without gaps, which is all that is known at plan time; null where there is none.
    const Built* planned(const Key& dense) {
        if (!could(dense)) return nullptr;
        const Built& built = built_for(dense);
        return built.graph ? &built : nullptr;
    }
    static std::optional<int64_t> bytes_of(const Built* built) {
        return built == nullptr ? std::nullopt : std::optional(built->bytes);
    }

    // One look a call: what there is for a layout, be it nothing, is known since its first call,
    // when it was held against what was planned as `dense`.
    const Built* built_for_call(const Key& key, const Key& dense) {
        if (!could(key)) return nullptr;
        if (const auto known = built_.find(key); known != built_.end())
            return known->second.graph ? &known->second : nullptr;
        const Built* plan = planned(dense);
        if (plan == nullptr) {
            built_.try_emplace(key);
            return nullptr;
        }
        const Built& built = built_for(key);
        FERRY_CHECK(built.graph != nullptr, "cuDNN knows this shape in one layout only");
        FERRY_CHECK(built.bytes <= plan->bytes, "cuDNN's workspace depends on the layout");
        return &built;
    }

    void run(const Built& built, const Key& key, Pack& pack, std::byte* workspace) {
        demand(built.graph->execute(handle_, pack, workspace),
               key.backward ? "attention backward" : "attention forward");
    }

    cudnnHandle_t handle_ = nullptr;
    std::map<Key, Built> built_{};  // whose elements stay where they are
};

}  // namespace

std::unique_ptr<CudnnAttention> CudnnAttention::make(cudaStream_t stream) {
    return std::make_unique<Cudnn>(stream);
}

std::string cudnn_version() {
    const size_t version = cudnnGetVersion();
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

}  // namespace ferry::ops::cuda

#endif
