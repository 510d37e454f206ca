// Starting the optimizer's kernels.
#pragma once

#include <cuda_runtime.h>

#include "ferry/error.h"
#include "optim/internal.h"

namespace ferry::optim::cuda {

constexpr int kThreads = 256;  // threads of a thread block

__device__ inline int64_t thread_index() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

inline unsigned blocks_for(int64_t threads) {
    return static_cast<unsigned>(ceil_div(threads, kThreads));
}

// The spans of a launch, which are its argument: each has blocks of its own, one after the other.
constexpr int kSpans = 24;
struct Spans {
    Span at[kSpans];
    unsigned end[kSpans];  // of a span's blocks
    int count;
};
static_assert(sizeof(Spans) + sizeof(Scalars) <= 4096, "a kernel's arguments are as large at most");

// The span that this block has a part of, by halving.
__device__ inline int span_of_block(const Spans& spans) {
    int low = 0, high = spans.count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (blockIdx.x < spans.end[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}
// The thread's number among those of its block's span.
__device__ inline int64_t thread_of_span(const Spans& spans, int span) {
    const unsigned first = span == 0 ? 0 : spans.end[span - 1];
    return int64_t{blockIdx.x - first} * kThreads + threadIdx.x;
}

// Throws Trouble::internal when the kernel named did not start.
void check_launch(const char* kernel);
// Updates spans whose moments are codes (coded.cu).
void update_coded(const Spans& spans, const Scalars& scalars, cudaStream_t stream);
// The blocks that such a span takes.
unsigned coded_blocks(const Span& span);

template <DType kType>
struct Constant {
    static constexpr DType kValue = kType;
};

// call(Constant<type>()): a template for a value.
template <class Call>
void with_type(DType type, const Call& call) {
    switch (type) {
        case DType::f32:
            return call(Constant<DType::f32>());
        case DType::bf16:
            return call(Constant<DType::bf16>());
        case DType::f16:
            return call(Constant<DType::f16>());
    }
}

inline bool aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// call(method's MethodOf): a template for a value.
template <Method kMethod>
struct MethodOf {
    static constexpr Method kValue = kMethod;
};
template <class Call>
void with_method(Method method, const Call& call) {
    switch (method) {
        case Method::adamw:
            return call(MethodOf<Method::adamw>());
        case Method::adam:
            return call(MethodOf<Method::adam>());
        case Method::sgd:
            return call(MethodOf<Method::sgd>());
        case Method::lion:
            return call(MethodOf<Method::lion>());
        case Method::adagrad:
            return call(MethodOf<Method::adagrad>());
        case Method::muon:
        case Method::onebit_adam:
        case Method::zeroone_adam:
            break;
    }
    FERRY_CHECK(false, "not a method of single elements");
}

}  // namespace ferry::optim::cuda
