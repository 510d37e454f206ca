#include "cudnn_attention.h"

#ifdef FERRY_CUDNN

#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

#include "base/log.h"

namespace ferry::ops::cuda {
namespace {

namespace fe = cudnn_frontend;

// The operands, by the numbers that the graphs know them by.
constexpr int kQ = 0, kK = 1, kV = 2, kOut = 3, kLse = 4, kDout = 5, kDq = 6, kDk = 7, kDv = 8;
constexpr int kOperands = 9;

// Sequences a backward call: its deterministic kernel keeps a slope of 2 B for each pair of query
// and key, so only few fit its workspace. Sequences are independent, so no bit depends on this.
constexpr int64_t kBackwardBytes = 256 * kMiB;

int64_t sequences_of_backward(const Attention& s) {
    const int64_t one = 2 * s.heads * round_up(s.sequence, 64) * round_up(s.sequence, 128);
    return std::clamp<int64_t>(kBackwardBytes / one, 1, s.sequences);
}

// What a graph is built for: the shape of a call, and how far apart rows are.
struct Key {
    bool backward = false;
    int64_t sequences = 0;  // of the call
    int64_t sequence = 0, heads = 0, kv_heads = 0, head_dim = 0;
    int64_t window = 0;  // 0: none, or as long as the sequence
    DType type = DType::bf16;
    double scale = 0;
    std::array<int64_t, kOperands> row{};  // elements from one token to the next
    auto operator<=>(const Key&) const = default;
};

Key key_of(const Attention& s, bool backward, int64_t sequences) {
    Key key{.backward = backward,
            .sequences = sequences,
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
};
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

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
        return {};
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
        return bytes_of(planned(shape, false, shape.sequences));
    }
    std::optional<int64_t> backward_bytes(const Attention& shape) override {
        return bytes_of(planned(shape, true, sequences_of_backward(shape)));
    }

    bool forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                 float* lse, std::byte* workspace) override {
        Key key = key_of(shape, false, shape.sequences);
        key.row = {q.ld, k.ld, v.ld, out.ld};
        const Built* built = built_for_call(shape, key, shape.sequences);
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
        const int64_t most = sequences_of_backward(shape);
        for (int64_t first = 0; first < shape.sequences; first += most) {
            const int64_t count = std::min(most, shape.sequences - first);
            const int64_t row = first * shape.sequence, rows = count * shape.sequence;
            Key key = key_of(shape, true, count);
            key.row = {q.ld, k.ld, v.ld, out.ld, 1, dout.ld, dq.ld, dk.ld, dv.ld};
            const Built* built = built_for_call(shape, key, most);
            if (built == nullptr) return false;
            Pack pack = {{kQ, mutable_data(q.row_range(row, rows))},
                         {kK, mutable_data(k.row_range(row, rows))},
                         {kV, mutable_data(v.row_range(row, rows))},
                         {kOut, mutable_data(out.row_range(row, rows))},
                         {kLse, const_cast<float*>(lse + shape.lse_index(row, 0))},
                         {kDout, mutable_data(dout.row_range(row, rows))},
                         {kDq, dq.row_range(row, rows).data},
                         {kDk, dk.row_range(row, rows).data},
                         {kDv, dv.row_range(row, rows).data}};
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

    static bool could(const Attention& s) {
        return (s.type == DType::bf16 || s.type == DType::f16) &&
               (s.head_dim == 64 || s.head_dim == 128);
    }

    const Built& built_for(const Key& key) {
        const auto known = built_.find(key);
        if (known != built_.end()) return known->second;
        return built_.emplace(key, GraphBuilder(key).build(handle_)).first->second;
    }

    // For rows without gaps, which is all that is known at plan time; null where there is none.
    const Built* planned(const Attention& shape, bool backward, int64_t sequences) {
        if (!could(shape)) return nullptr;
        const Built& built = built_for(key_of(shape, backward, sequences));
        return built.graph ? &built : nullptr;
    }
    static std::optional<int64_t> bytes_of(const Built* built) {
        return built == nullptr ? std::nullopt : std::optional(built->bytes);
    }

    // One look a call: what there is for a layout, be it nothing, is known since its first call,
    // when it was held against what was planned with `sequences`.
    const Built* built_for_call(const Attention& shape, const Key& key, int64_t sequences) {
        if (!could(shape)) return nullptr;
        if (const auto known = built_.find(key); known != built_.end())
            return known->second.graph ? &known->second : nullptr;
        const Built* plan = planned(shape, key.backward, sequences);
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
