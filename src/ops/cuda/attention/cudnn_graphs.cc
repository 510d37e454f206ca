#include "cudnn_graphs.h"

#ifdef FERRY_CUDNN

#include <cudnn_frontend.h>

#include <algorithm>
#include <unordered_map>

#include "base/log.h"
#include "ferry/device.h"

namespace ferry::ops::cuda {
namespace {

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

void demand(fe::error_t error, const char* call) {
    if (error.is_good() || gpu_work_failed()) return;
    throw Error(
        Trouble::internal,
        {.what = "cuDNN's attention failed", .where = call, .measured = error.get_message()});
}

void check(cudnnStatus_t status, const char* call) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    throw Error(Trouble::internal, {.what = "cuDNN cannot start",
                                    .where = call,
                                    .measured = cudnnGetErrorString(status),
                                    .remedy = "set numerics.attention to ferry"});
}

// Throws where cuDNN could not even look for a kernel. Which attention runs follows from shape, GPU
// and version alone, so nothing else may take its place.
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

class GraphBuilder {
public:
    explicit GraphBuilder(const CudnnCall& call) : call_(call) {
        graph_
            .set_io_data_type(call.type == DType::bf16 ? fe::DataType_t::BFLOAT16
                                                       : fe::DataType_t::HALF)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    CudnnGraph build(cudnnHandle_t handle) {
        call_.backward ? backward() : forward();
        fe::error_t error = graph_.build(handle, {fe::HeurMode_t::A});
        if (error.is_bad()) {
            refuse_failure(error);
            return instead(error.get_message());
        }
        CudnnGraph built{.graph = std::make_shared<Graph>(std::move(graph_))};
        demand(built.graph->get_workspace_size(built.bytes), "workspace");
        if (built.bytes > kMostWorkspace)
            return instead("its workspace is " + format_bytes(built.bytes));
        return built;
    }

private:
    CudnnGraph instead(const std::string& why) const {
        const std::string of_keys =
            call_.keys == call_.queries ? "" : " and " + std::to_string(call_.keys) + " keys";
        log_info(std::string("no attention by cuDNN ") + (call_.backward ? "backward" : "forward") +
                 " for " + std::to_string(call_.queries) + " tokens" + of_keys +
                 (call_.window > 0 ? " in a window of " + std::to_string(call_.window) : "") +
                 ", ferry's own is used: " + why);
        return {.why = why};
    }
    // [sequences, heads, tokens, head_dim], tokens outermost in memory but for the sequence.
    template <class Attributes>
    Attributes& shaped(Attributes& tensor, size_t operand) const {
        const int64_t row = call_.row[operand];
        const bool of_keys = operand == kK || operand == kV || operand == kDk || operand == kDv;
        const int64_t heads = of_keys ? call_.kv_heads : call_.heads;
        const int64_t tokens = of_keys ? call_.keys : call_.queries;
        tensor.set_uid(static_cast<int64_t>(operand))
            .set_dim({call_.sequences, heads, tokens, call_.head_dim})
            .set_stride({tokens * row, call_.head_dim, row, 1});
        return tensor;
    }
    template <class Attributes>
    Attributes& shaped_lse(Attributes& tensor) const {
        tensor.set_uid(kLse)
            .set_dim({call_.sequences, call_.heads, call_.queries, 1})
            .set_stride({call_.heads * call_.queries, call_.queries, 1, 1})
            .set_data_type(fe::DataType_t::FLOAT);
        return tensor;
    }
    Tensor input(size_t operand) {
        fe::graph::Tensor_attributes tensor;
        return graph_.tensor(operand == kLse ? shaped_lse(tensor) : shaped(tensor, operand));
    }
    void output(const Tensor& tensor, size_t operand) const {
        (operand == kLse ? shaped_lse(*tensor) : shaped(*tensor, operand)).set_output(true);
    }
    template <class Options>
    Options masked() const {
        using enum fe::DiagonalAlignment_t;
        Options options;
        options.set_name(call_.backward ? "attention backward" : "attention forward")
            .set_attn_scale(static_cast<float>(call_.scale));
        if (!call_.causal) return options;
        options.set_diagonal_alignment(call_.queries == call_.keys ? TOP_LEFT : BOTTOM_RIGHT)
            .set_diagonal_band_right_bound(0);
        // Keys after query - window, as Attention::first_key.
        if (call_.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(call_.window));
        return options;
    }

    void forward() {
        auto options = masked<fe::graph::SDPA_attributes>().set_generate_stats(true);
        auto [out, lse] = graph_.sdpa(input(kQ), input(kK), input(kV), options);
        output(out, kOut);
        output(lse, kLse);
    }
    void backward() {
        auto options =
            masked<fe::graph::SDPA_backward_attributes>().set_deterministic_algorithm(true);
        auto [dq, dk, dv] = graph_.sdpa_backward(input(kQ), input(kK), input(kV), input(kOut),
                                                 input(kDout), input(kLse), options);
        output(dq, kDq);
        output(dk, kDk);
        output(dv, kDv);
    }

    const CudnnCall& call_;
    Graph graph_{};
};

}  // namespace

CudnnGraphs::CudnnGraphs(cudaStream_t stream) {
    check(cudnnCreate(&handle_), "cudnnCreate");
    check(cudnnSetStream(handle_, stream), "cudnnSetStream");
}

CudnnGraphs::~CudnnGraphs() {
    built_.clear();
    cudnnDestroy(handle_);
}

const CudnnGraph* CudnnGraphs::known(const CudnnCall& call) const {
    const auto found = built_.find(call);
    return found == built_.end() ? nullptr : &found->second;
}

const CudnnGraph& CudnnGraphs::of(const CudnnCall& call) {
    if (const CudnnGraph* found = known(call)) return *found;
    return built_.emplace(call, GraphBuilder(call).build(handle_)).first->second;
}

void CudnnGraphs::run(const CudnnCall& call, const CudnnGraph& graph, const OperandData& operands,
                      std::byte* workspace) {
    std::unordered_map<int64_t, void*> pack;
    const size_t count = call.backward ? kOperands : kLse + 1;
    for (size_t i = 0; i < count; ++i) pack.emplace(static_cast<int64_t>(i), operands[i]);
    demand(graph.graph->execute(handle_, pack, workspace),
           call.backward ? "attention backward" : "attention forward");
}

}  // namespace ferry::ops::cuda

#endif
