// cuBLASLt thinks in columns: a row-major product c = a b is the column-major c^T = b^T a^T, so the
// operands change places and nothing is transposed in memory.
#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/log.h"
#include "ops/cuda/shared/launch.h"

namespace ferry::ops::cuda {
namespace {

bool is_biased(const Gemm& g) { return g.bias.cols > 0; }

bool takes_addend(const Gemm& g) {
    return g.addend.cols == 0 || (g.addend.type == g.c.type && !g.accumulate);
}

std::string shape_text(const Gemm& g) {
    const int64_t depth = g.form == Form::tn ? g.a.rows : g.a.cols;
    return std::to_string(g.c.rows) + " x " + std::to_string(g.c.cols) + " x " +
           std::to_string(depth) + " of " + std::string(name_of(g.a.type)) +
           (is_biased(g) ? " with a bias" : "");
}

void demand(cublasStatus_t status, const char* call, const std::string& where = {}) {
    if (status == CUBLAS_STATUS_SUCCESS || gpu_work_failed()) return;
    if (status == CUBLAS_STATUS_ALLOC_FAILED) throw out_of_gpu_memory(call);
    throw Error(Trouble::internal, {.what = "cuBLASLt refused a call",
                                    .where = where.empty() ? call : call + (", " + where),
                                    .measured = cublasLtGetStatusName(status)});
}

cudaDataType_t type_of(DType type) {
    switch (type) {
        case DType::bf16:
            return CUDA_R_16BF;
        case DType::f16:
            return CUDA_R_16F;
        case DType::f32:
            break;
    }
    return CUDA_R_32F;
}

// A row-major matrix seen by columns.
cublasLtMatrixLayout_t layout_of(const ConstView& v) {
    cublasLtMatrixLayout_t layout = nullptr;
    demand(cublasLtMatrixLayoutCreate(&layout, type_of(v.type), static_cast<uint64_t>(v.cols),
                                      static_cast<uint64_t>(v.rows), v.ld),
           "cublasLtMatrixLayoutCreate");
    return layout;
}

// The power of two that the address is a multiple of, at most 16.
int alignment_of(const void* at) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    int bytes = 16;
    while (address % static_cast<uintptr_t>(bytes) != 0) bytes /= 2;
    return bytes;
}

template <class Value>
void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute,
         const Value& value) {
    demand(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)),
           "cublasLtMatmulDescSetAttribute");
}

// The matrix that the product is added to: an addend, or c itself.
ConstView added(const Gemm& g) { return g.addend.data != nullptr ? g.addend : ConstView(g.c); }

// Preferences of the search; destroyed with it.
class Preference {
public:
    Preference() {
        demand(cublasLtMatmulPreferenceCreate(&handle_), "cublasLtMatmulPreferenceCreate");
    }
    ~Preference() { cublasLtMatmulPreferenceDestroy(handle_); }
    Preference(const Preference&) = delete;
    Preference& operator=(const Preference&) = delete;
    template <class Value>
    void set(cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
        demand(cublasLtMatmulPreferenceSetAttribute(handle_, attribute, &value, sizeof(value)),
               "cublasLtMatmulPreferenceSetAttribute");
    }
    cublasLtMatmulPreference_t handle() const { return handle_; }

private:
    cublasLtMatmulPreference_t handle_ = nullptr;
};

}  // namespace

Products::Products(int64_t workspace_bytes, ProductTable table)
    : workspace_bytes_(workspace_bytes), table_(std::move(table)) {
    demand(cublasLtCreate(&handle_), "cublasLtCreate");
}

Products::~Products() {
    for (const auto& [key, choice] : choices_) {
        cublasLtMatmulDescDestroy(choice.product);
        for (const auto layout : {choice.a, choice.b, choice.c, choice.d})
            cublasLtMatrixLayoutDestroy(layout);
    }
    cublasLtDestroy(handle_);
}

Products::Choice Products::describe(const Gemm& g, const Key& key) const {
    Choice choice;
    demand(cublasLtMatmulDescCreate(&choice.product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
           "cublasLtMatmulDescCreate");
    set(choice.product, CUBLASLT_MATMUL_DESC_TRANSA,
        g.form == Form::nt ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(choice.product, CUBLASLT_MATMUL_DESC_TRANSB,
        g.form == Form::tn ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (key.biased) {
        // Added to the fp32 sum, before the one rounding.
        set(choice.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(choice.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(g.bias.type));
        set(choice.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.data);
    }
    choice.a = layout_of(g.b);
    choice.b = layout_of(g.a);
    choice.c = layout_of(added(g));
    choice.d = layout_of(g.c);
    return choice;
}

// What the library's heuristic offers, best first.
std::vector<cublasLtMatmulAlgo_t> Products::offered(const Key& key, const Choice& choice,
                                                    int most) const {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes_);
    // Sums of a split depth through the workspace, in a fixed order.
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    const auto& bytes = key.alignments;
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(bytes[0]));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(bytes[1]));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(bytes[2]));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(bytes[3]));
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, choice.product, choice.a, choice.b, choice.c,
                                       choice.d, preference.handle(), most, results.data(), &count);
    std::vector<cublasLtMatmulAlgo_t> found;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; ++i) {
        if (results[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
            found.push_back(results[static_cast<size_t>(i)].algo);
    }
    return found;
}

// The fastest of some batches: other work only slows. Infinity where it does not run.
double Products::seconds_of(const cublasLtMatmulAlgo_t& algorithm, const Gemm& g,
                            const Choice& choice, void* workspace, cudaStream_t stream) const {
    constexpr int kBatches = 5, kRuns = 3;
    double best = std::numeric_limits<double>::infinity();
    cudaEvent_t begin = nullptr, end = nullptr;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int batch = 0; batch < kBatches; ++batch) {
        bool ran = true;
        cudaEventRecord(begin, stream);
        for (int i = 0; i < kRuns; ++i) {
            ran = ran && multiply(g, choice, algorithm, workspace, stream) == CUBLAS_STATUS_SUCCESS;
        }
        cudaEventRecord(end, stream);
        cudaEventSynchronize(end);
        float ms = 0;
        cudaEventElapsedTime(&ms, begin, end);
        if (!ran) break;
        if (batch > 0) best = std::min(best, static_cast<double>(ms) * 1e-3 / kRuns);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    check_launch("a product that is tuned");
    return best;
}

// The first of them, unless another is faster by more than timing is sure of.
cublasLtMatmulAlgo_t Products::fastest(const std::vector<cublasLtMatmulAlgo_t>& of, const Gemm& g,
                                       const Choice& choice, void* workspace,
                                       cudaStream_t stream) const {
    constexpr double kSure = 0.98;
    size_t best = 0;
    double least = seconds_of(of[0], g, choice, workspace, stream) * kSure;
    for (size_t i = 1; i < of.size(); ++i) {
        const double seconds = seconds_of(of[i], g, choice, workspace, stream);
        if (seconds >= least) continue;
        least = seconds;
        best = i;
    }
    return of[best];
}

void Products::look_up(const ProductTable::Algorithm& known, const Gemm& g, Choice& choice) const {
    static_assert(sizeof choice.algorithm == sizeof known);
    std::memcpy(&choice.algorithm, known.data(), sizeof known);
    cublasLtMatmulHeuristicResult_t result{};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle_, choice.product, choice.a, choice.b, choice.c, choice.d,
                                &choice.algorithm, &result);
    choice.found = status == CUBLAS_STATUS_SUCCESS &&
                   result.workspaceSize <= static_cast<size_t>(workspace_bytes_);
    if (choice.found) return;
    throw Error(Trouble::usage,
                {.what = "an algorithm of the table of products does not run here",
                 .where = "numerics.products",
                 .measured = "a product of " + shape_text(g) + ": " + cublasLtGetStatusName(status),
                 .remedy = "write the table again with ferry bench kernels --tune"});
}

Products::Choice Products::choose(const Gemm& g, const Key& key, void* workspace,
                                  cudaStream_t stream) {
    constexpr int kMostTuned = 16;
    Choice choice = describe(g, key);
    const ProductTable::Algorithm* known = table_.empty() ? nullptr : table_.find(text_of(key));
    if (known != nullptr && !tuned_) {
        look_up(*known, g, choice);
        return choice;
    }
    const std::vector<cublasLtMatmulAlgo_t> found = offered(key, choice, tuned_ ? kMostTuned : 1);
    choice.found = !found.empty();
    if (!choice.found) {
        log_info("cuBLASLt has no algorithm for a product of " + shape_text(g) +
                 ": ferry's own kernel runs, slowly");
        return choice;
    }
    choice.algorithm = tuned_ ? fastest(found, g, choice, workspace, stream) : found.front();
    if (tuned_) {
        ProductTable::Algorithm words;
        std::memcpy(words.data(), &choice.algorithm, sizeof words);
        tuned_->set(text_of(key), words);
    }
    return choice;
}

bool Products::takes(const Gemm& g) {
    return (!is_biased(g) || (g.bias.type == DType::f32 && g.c.type == DType::f32)) &&
           takes_addend(g);
}

bool Products::takes_with_bias_in_depth(const Gemm& g) {
    return is_biased(g) && g.spare > 0 && g.form != Form::tn && size_of(g.a.type) == 2 &&
           g.bias.type == g.a.type && takes_addend(g);
}

Products::Key Products::key_of(const Gemm& g) {
    const ConstView c = added(g);
    const bool biased = is_biased(g);
    const int out = alignment_of(g.c.data);
    return {.form = g.form,
            .operands = g.a.type,
            .output = g.c.type,
            .adds = g.accumulate || g.addend.data != nullptr,
            .biased = biased,
            .sizes = {g.c.rows, g.c.cols, g.form == Form::tn ? g.a.rows : g.a.cols},
            .strides = {g.b.ld, g.a.ld, c.ld, g.c.ld},
            .alignments = {alignment_of(g.b.data), alignment_of(g.a.data), alignment_of(c.data),
                           biased ? std::min(out, alignment_of(g.bias.data)) : out}};
}

std::string Products::text_of(const Key& key) {
    constexpr const char* kForms[] = {"nn", "nt", "tn"};
    std::string text = kForms[static_cast<int>(key.form)];
    text.append(" ").append(name_of(key.operands)).append(" to ").append(name_of(key.output));
    text.append(key.adds ? ", added" : "").append(key.biased ? ", biased" : "").append(", sizes");
    for (const int64_t size : key.sizes) text.append(" ").append(std::to_string(size));
    text.append(", strides");
    for (const int64_t stride : key.strides) text.append(" ").append(std::to_string(stride));
    text.append(", aligned");
    for (const int bytes : key.alignments) text.append(" ").append(std::to_string(bytes));
    return text;
}

cublasStatus_t Products::multiply(const Gemm& g, const Choice& choice,
                                  const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                                  cudaStream_t stream) const {
    const ConstView c = added(g);
    const float alpha = 1, beta = g.reads_c() || g.addend.data != nullptr ? 1 : 0;
    return cublasLtMatmul(handle_, choice.product, &alpha, g.b.data, choice.a, g.a.data, choice.b,
                          &beta, c.data, choice.c, g.c.data, choice.d, &algorithm, workspace,
                          static_cast<size_t>(workspace_bytes_), stream);
}

bool Products::run(const Gemm& g, void* workspace, cudaStream_t stream) {
    const Key key = key_of(g);
    auto found = choices_.find(key);
    if (found == choices_.end())
        found = choices_.emplace(key, choose(g, key, workspace, stream)).first;
    const Choice& choice = found->second;
    if (!choice.found) return false;
    if (key.biased) set(choice.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.data);
    demand(multiply(g, choice, choice.algorithm, workspace, stream), "cublasLtMatmul",
           shape_text(g));
    return true;
}

}  // namespace ferry::ops::cuda
