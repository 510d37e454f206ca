// NVIDIA's libraries, loaded when they are first called: a program that embeds libferry.so, or
// imports the Python package, may bring others of the same names (torch does). The first one loaded
// counts for the whole process, and nothing that ferry does on the CPU needs one. The functions of
// these names are libferry.so's own and are not exported; the static libraries link the real ones.
// The program has this file too: to load those libraries takes most of a short run's start.
//
// Where a library is missing every call fails, and its text of an error says so.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#ifdef FERRY_NCCL
#include <nccl.h>
#endif
#ifdef FERRY_CUDNN
#include <cudnn.h>
#include <nvrtc.h>
#endif

#include <algorithm>
#include <cstring>
#include <string>

namespace {

#define FERRY_TEXT_OF(number) #number
#define FERRY_TEXT(number) FERRY_TEXT_OF(number)

class Library {
public:
    // One that is loaded already is taken.
    explicit Library(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
        const char* const reason = handle_ ? nullptr : dlerror();
        if (!handle_) why_ = std::string("it cannot be loaded: ") + (reason ? reason : name);
    }
    template <class Function>
    Function symbol(const char* name) const {
        return handle_ ? reinterpret_cast<Function>(dlsym(handle_, name)) : nullptr;
    }
    // Whatever the status: no call has come through.
    const char* why() const { return why_.empty() ? "a function is missing" : why_.c_str(); }

private:
    void* const handle_;  // until the process ends
    std::string why_{};
};

const Library& cublas() {
    static const Library* const kLibrary =
        new Library("libcublasLt.so." FERRY_TEXT(CUBLAS_VER_MAJOR));
    return *kLibrary;
}

}  // namespace

// A function with the signature of its header, which calls the library's. `arguments` come with
// their parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define FERRY_LATE(library, result, failure, name, parameters, arguments)     \
    extern "C" result name parameters {                                       \
        static const auto kCall = library().symbol<decltype(&(name))>(#name); \
        return kCall ? kCall arguments : failure;                             \
    }
// NOLINTEND(bugprone-macro-parentheses)

// ---------------------------------------------------------------- cuBLASLt

#define FERRY_CUBLAS(name, parameters, arguments) \
    FERRY_LATE(cublas, cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, name, parameters, arguments)

FERRY_LATE(cublas, const char*, cublas().why(), cublasLtGetStatusName, (cublasStatus_t status),
           (status))
FERRY_LATE(cublas, size_t, 0, cublasLtGetVersion, (), ())
FERRY_CUBLAS(cublasLtCreate, (cublasLtHandle_t * handle), (handle))
FERRY_CUBLAS(cublasLtDestroy, (cublasLtHandle_t handle), (handle))
FERRY_CUBLAS(cublasLtMatmul,
             (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
              cudaStream_t stream),
             (handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
              algorithm, workspace, workspace_bytes, stream))
FERRY_CUBLAS(cublasLtMatmulAlgoCheck,
             (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
              const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result),
             (handle, operation, a, b, c, d, algorithm, result))
FERRY_CUBLAS(cublasLtMatmulAlgoGetHeuristic,
             (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
              cublasLtMatmulPreference_t preference, int most,
              cublasLtMatmulHeuristicResult_t results[], int* found),
             (handle, operation, a, b, c, d, preference, most, results, found))
FERRY_CUBLAS(cublasLtMatmulDescCreate,
             (cublasLtMatmulDesc_t * made, cublasComputeType_t compute, cudaDataType_t scale),
             (made, compute, scale))
FERRY_CUBLAS(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t of), (of))
FERRY_CUBLAS(cublasLtMatmulDescSetAttribute,
             (cublasLtMatmulDesc_t of, cublasLtMatmulDescAttributes_t attribute, const void* value,
              size_t bytes),
             (of, attribute, value, bytes))
FERRY_CUBLAS(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * made), (made))
FERRY_CUBLAS(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t of), (of))
FERRY_CUBLAS(cublasLtMatmulPreferenceSetAttribute,
             (cublasLtMatmulPreference_t of, cublasLtMatmulPreferenceAttributes_t attribute,
              const void* value, size_t bytes),
             (of, attribute, value, bytes))
FERRY_CUBLAS(cublasLtMatrixLayoutCreate,
             (cublasLtMatrixLayout_t * made, cudaDataType type, uint64_t rows, uint64_t columns,
              int64_t leading),
             (made, type, rows, columns, leading))
FERRY_CUBLAS(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t of), (of))

// ---------------------------------------------------------------- cuDNN, and NVRTC for its kernels

#ifdef FERRY_CUDNN
namespace {

const Library& cudnn() {
    static const Library* const kLibrary = new Library("libcudnn.so." FERRY_TEXT(CUDNN_MAJOR));
    return *kLibrary;
}
const Library& nvrtc() {
    static const Library* const kLibrary =
        new Library(("libnvrtc.so." + std::to_string(CUDART_VERSION / 1000)).c_str());
    return *kLibrary;
}

}  // namespace

#define FERRY_DNN(name, parameters, arguments) \
    FERRY_LATE(cudnn, cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, name, parameters, arguments)

FERRY_LATE(cudnn, size_t, 0, cudnnGetVersion, (), ())
FERRY_LATE(cudnn, const char*, cudnn().why(), cudnnGetErrorString, (cudnnStatus_t status), (status))
extern "C" void cudnnGetLastErrorString(char* message, size_t bytes) {
    static const auto kCall =
        cudnn().symbol<decltype(&cudnnGetLastErrorString)>("cudnnGetLastErrorString");
    if (kCall) return kCall(message, bytes);
    if (bytes == 0) return;
    const std::string why = cudnn().why();
    const size_t count = std::min(bytes - 1, why.size());
    std::memcpy(message, why.data(), count);
    message[count] = '\0';
}
FERRY_DNN(cudnnCreate, (cudnnHandle_t * handle), (handle))
FERRY_DNN(cudnnDestroy, (cudnnHandle_t handle), (handle))
FERRY_DNN(cudnnGetStream, (cudnnHandle_t handle, cudaStream_t* stream), (handle, stream))
FERRY_DNN(cudnnSetStream, (cudnnHandle_t handle, cudaStream_t stream), (handle, stream))
FERRY_DNN(cudnnBackendCreateDescriptor,
          (cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made), (type, made))
FERRY_DNN(cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t of), (of))
FERRY_DNN(cudnnBackendFinalize, (cudnnBackendDescriptor_t of), (of))
FERRY_DNN(cudnnBackendExecute,
          (cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t variants),
          (handle, plan, variants))
FERRY_DNN(cudnnBackendGetAttribute,
          (cudnnBackendDescriptor_t const of, cudnnBackendAttributeName_t name,
           cudnnBackendAttributeType_t type, int64_t wanted, int64_t* found, void* elements),
          (of, name, type, wanted, found, elements))
FERRY_DNN(cudnnBackendSetAttribute,
          (cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name,
           cudnnBackendAttributeType_t type, int64_t count, const void* elements),
          (of, name, type, count, elements))

#define FERRY_NVRTC(name, parameters, arguments) \
    FERRY_LATE(nvrtc, nvrtcResult, NVRTC_ERROR_INTERNAL_ERROR, name, parameters, arguments)

FERRY_NVRTC(nvrtcCreateProgram,
            (nvrtcProgram * made, const char* source, const char* name, int headers,
             const char* const* texts, const char* const* names),
            (made, source, name, headers, texts, names))
FERRY_NVRTC(nvrtcDestroyProgram, (nvrtcProgram * of), (of))
FERRY_NVRTC(nvrtcCompileProgram, (nvrtcProgram of, int count, const char* const* options),
            (of, count, options))
FERRY_NVRTC(nvrtcGetCUBIN, (nvrtcProgram of, char* cubin), (of, cubin))
FERRY_NVRTC(nvrtcGetCUBINSize, (nvrtcProgram of, size_t* bytes), (of, bytes))
FERRY_NVRTC(nvrtcGetProgramLog, (nvrtcProgram of, char* log), (of, log))
FERRY_NVRTC(nvrtcGetProgramLogSize, (nvrtcProgram of, size_t* bytes), (of, bytes))
#endif

// ---------------------------------------------------------------- NCCL

#ifdef FERRY_NCCL
namespace {

const Library& nccl() {
    static const Library* const kLibrary = new Library("libnccl.so." FERRY_TEXT(NCCL_MAJOR));
    return *kLibrary;
}

}  // namespace

#define FERRY_RANKS(name, parameters, arguments) \
    FERRY_LATE(nccl, ncclResult_t, ncclSystemError, name, parameters, arguments)

FERRY_LATE(nccl, const char*, nccl().why(), ncclGetErrorString, (ncclResult_t status), (status))
FERRY_LATE(nccl, const char*, nccl().why(), ncclGetLastError, (ncclComm_t of), (of))
FERRY_RANKS(ncclGetUniqueId, (ncclUniqueId * id), (id))
FERRY_RANKS(ncclCommInitRankConfig,
            (ncclComm_t * made, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config),
            (made, ranks, id, rank, config))
FERRY_RANKS(ncclCommAbort, (ncclComm_t of), (of))
FERRY_RANKS(ncclCommDestroy, (ncclComm_t of), (of))
FERRY_RANKS(ncclCommFinalize, (ncclComm_t of), (of))
FERRY_RANKS(ncclCommGetAsyncError, (ncclComm_t of, ncclResult_t* found), (of, found))
FERRY_RANKS(ncclGroupStart, (), ())
FERRY_RANKS(ncclGroupEnd, (), ())
FERRY_RANKS(ncclAllGather,
            (const void* out, void* in, size_t count, ncclDataType_t type, ncclComm_t of,
             cudaStream_t stream),
            (out, in, count, type, of, stream))
FERRY_RANKS(ncclSend,
            (const void* out, size_t count, ncclDataType_t type, int rank, ncclComm_t of,
             cudaStream_t stream),
            (out, count, type, rank, of, stream))
FERRY_RANKS(ncclRecv,
            (void* in, size_t count, ncclDataType_t type, int rank, ncclComm_t of,
             cudaStream_t stream),
            (in, count, type, rank, of, stream))
#endif
