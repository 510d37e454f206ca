#include "sparse_attention.h"

#ifdef FERRY_TRITON

#include <cuda.h>

#include <algorithm>
#include <array>

#include "ferry/device.h"
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "spans.h"

namespace ferry::ops::cuda {
namespace {

void demand(cudaError_t error, const char* call) {
    if (error == cudaSuccess || gpu_work_failed()) return;
    if (error == cudaErrorMemoryAllocation) throw out_of_gpu_memory(call);
    throw Error(Trouble::internal, {.what = "the GPU's attention over blocks failed",
                                    .where = call,
                                    .measured = std::string(cudaGetErrorName(error)) + ", " +
                                                cudaGetErrorString(error)});
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's, found at run time: a program must start where there is no driver.
EncodeTiled encode_tiled() {
    static const EncodeTiled kFound = [] {
        void* at = nullptr;
        cudaDriverEntryPointQueryResult result{};
        demand(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000,
                                                cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
        return reinterpret_cast<EncodeTiled>(at);
    }();
    FERRY_CHECK(kFound != nullptr, "the driver has no tensor maps");
    return kFound;
}

}  // namespace

// Of one launch, in the order of the kernel's.
class SparseAttention::Parameters {
public:
    explicit Parameters(const SparseImage& image) : image_(image) {}

    template <class T>
    void add(const T& value) {
        static_assert(sizeof(T) <= sizeof(CUtensorMap));  // NOLINT(bugprone-sizeof-expression)
        FERRY_CHECK(count_ < kMost);
        *reinterpret_cast<T*>(&room_[count_]) = value;
        pointers_[count_] = &room_[count_];
        ++count_;
    }
    void add_sizes(std::initializer_list<int64_t> sizes) {
        for (const int64_t size : sizes) add(static_cast<int32_t>(size));
    }

    // A tile of `own` rows of all heads side by side: [tokens, heads * head_dim].
    void add_own(const ConstView& x) {
        if (!maps()) return add(x.data);
        add_map<2>(x, {x.cols, mapped(x.rows)}, {x.ld}, {kBox, image_.own});
    }
    // Of `step` rows: [sequences, rows of each, heads, head_dim], zero outside.
    void add_step(const ConstView& x, const Attention& s, int64_t heads) {
        if (!maps()) return add(x.data);
        const int64_t rows = mapped(x.rows / s.sequences);
        add_map<4>(x, {s.head_dim, heads, rows, s.sequences}, {s.head_dim, x.ld, rows * x.ld},
                   {kBox, 1, image_.step, 1});
    }

    void** all() { return pointers_.data(); }

private:
    static constexpr int kMost = 64, kBox = 64;  // elements of a row in shared memory: 128 bytes

    bool maps() const { return image_.architecture >= 90; }
    // A map has rows, also where a part has no keys: nothing is read then.
    static int64_t mapped(int64_t rows) { return std::max<int64_t>(rows, 1); }

    // Sizes and strides, in elements, with the innermost first; it has no stride of its own. The
    // kernel has the map, then the outermost first.
    template <int kRank>
    void add_map(const ConstView& x, std::array<int64_t, kRank> sizes,
                 std::array<int64_t, kRank - 1> strides, std::array<int, kRank> box) {
        std::array<cuuint64_t, kRank> of{};
        std::array<cuuint64_t, kRank - 1> apart{};
        std::array<cuuint32_t, kRank> tile{}, unit{};
        for (size_t i = 0; i < kRank; ++i) {
            of[i] = static_cast<cuuint64_t>(sizes[i]);
            tile[i] = static_cast<cuuint32_t>(box[i]);
            unit[i] = 1;
            if (i + 1 < kRank) apart[i] = static_cast<cuuint64_t>(strides[i] * size_of(x.type));
        }
        CUtensorMap map{};
        const auto type = x.type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        const CUresult result = encode_tiled()(
            &map, type, kRank, const_cast<void*>(x.data), of.data(), apart.data(), tile.data(),
            unit.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        FERRY_CHECK(result == CUDA_SUCCESS, "the driver refused a tensor map");
        add(map);
        for (size_t i = kRank; i-- > 0;) add(static_cast<int32_t>(sizes[i]));
        for (size_t i = kRank - 1; i-- > 0;) add(strides[i]);
        add(int64_t{1});
    }

    const SparseImage& image_;
    int count_ = 0;
    std::array<CUtensorMap, kMost> room_;
    std::array<void*, kMost> pointers_{};
};

namespace {

int log2_of(int64_t power) {
    int log = 0;
    while ((int64_t{1} << log) < power) ++log;
    return log;
}

int width_of(const Attention& shape) {
    return shape.head_dim <= 64 ? 64 : shape.head_dim <= 128 ? 128 : 256;
}

int64_t block_of(const Attention& shape) { return SpanRoom(shape, nullptr, false).block; }

// What delta knows of a part of one sequence.
Attention part_of(const Attention& shape, int64_t queries) {
    Attention part = shape;
    part.sequence = queries;
    return part;
}

// Delta stands behind the room.
int64_t delta_bytes(const Attention& shape) {
    return shape.heads * shape.sequences * shape.sequence * 4;
}

bool aligned(const ConstView& x) {
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.ld % 8 == 0;
}

}  // namespace

SparseAttention::SparseAttention(cudaStream_t stream, bool any_gpu) : stream_(stream) {
    int device = 0, major = 0, minor = 0;
    demand(cudaGetDevice(&device), "cudaGetDevice");
    demand(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
           "a GPU's type");
    demand(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
           "a GPU's type");
    const bool hopper = major == 9 && minor == 0 && !any_gpu;
    architecture_ = hopper ? 90 : major >= 8 ? 80 : 0;
}

const SparseImage* SparseAttention::image_for(SparseKernel kernel, const Attention& shape,
                                              bool part) const {
    for (const auto images : sparse_images()) {
        for (const SparseImage& image : images) {
            if (image.kernel == kernel && image.part == part &&
                image.architecture == architecture_ && image.type == shape.type &&
                image.width == width_of(shape) &&
                std::max(image.own, image.step) <= block_of(shape))
                return &image;
        }
    }
    return nullptr;
}

std::string SparseAttention::why_not(const Attention& shape) const {
    if (architecture_ == 0) return "this GPU is older than sm_80";
    if (size_of(shape.type) != 2) return "types of 16 bits only";
    if (shape.head_dim % 8 != 0 || shape.head_dim > kMaxHeadDim)
        return "heads of at most " + std::to_string(kMaxHeadDim) +
               " elements, multiples of 8, only";
    return image_for(SparseKernel::forward, shape, false) == nullptr
               ? "this build has no kernel for it"
               : "";
}

// Measured on an H200 beside cuDNN 9.19, which keeps a slope for each pair (bench/attention.py).
// Seven products from shared memory beat five with slopes where a row of slopes is as long as this
// and a product of heads this narrow does not hide them; heads of 128 where a sequence is several
// calls of cuDNN's, but no tiles yet.
bool SparseAttention::is_faster_backward(const Attention& shape) const {
    constexpr int64_t kOf64 = 4096, kOf128 = 8192, kTilesOf128 = 16384;
    if (architecture_ != 90 || !shape.dense() || !why_not(shape).empty()) return false;
    if (shape.window > 0 && shape.window < shape.sequence) return false;
    if (shape.head_dim == 64) return shape.sequence >= kOf64;
    return shape.head_dim == 128 && shape.sequence >= kOf128 && shape.sequence < kTilesOf128;
}

std::string triton_version() { return FERRY_TRITON_VERSION; }

const SparseAttention::Loaded& SparseAttention::loaded(SparseKernel kernel, const Attention& shape,
                                                       bool part) {
    const SparseImage* image = image_for(kernel, shape, part);
    FERRY_CHECK(image != nullptr);
    const auto found = loaded_.find(image);
    if (found != loaded_.end()) return found->second;
    cudaLibrary_t library{};
    cudaKernel_t entry{};
    demand(cudaLibraryLoadData(&library, image->code, nullptr, nullptr, 0, nullptr, nullptr, 0),
           "cudaLibraryLoadData");
    demand(cudaLibraryGetKernel(&entry, library, image->name), "cudaLibraryGetKernel");
    demand(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                image->shared_bytes),
           "shared memory of an attention's tiles");
    return loaded_.emplace(image, Loaded{image, entry}).first->second;
}

int64_t SparseAttention::forward_bytes(const Attention& shape) {
    loaded(SparseKernel::forward, shape, false);
    return SpanRoom(shape, nullptr, false).bytes();
}

int64_t SparseAttention::backward_bytes(const Attention& shape) {
    loaded(SparseKernel::backward_queries, shape, false);
    loaded(SparseKernel::backward_keys, shape, false);
    return SpanRoom(shape, nullptr, true).bytes() + delta_bytes(shape);
}

int64_t SparseAttention::part_bytes(const Attention& shape, int64_t queries, int64_t keys) {
    for (const SparseKernel kernel :
         {SparseKernel::forward, SparseKernel::backward_queries, SparseKernel::backward_keys})
        loaded(kernel, shape, true);
    return SpanRoom::largest(shape, queries, keys, true).bytes() +
           delta_bytes(part_of(shape, queries));
}

// What all three kernels end with, and the launch: a program a tile of each of `heads` heads of
// each sequence, over so many blocks. `section`: heads whose tiles are taken in turn.
void SparseAttention::start(const Loaded& to, Parameters& p, const Attention& shape,
                            const SpanRoom& room, int64_t blocks, int64_t heads, int64_t section) {
    // Of so many blocks the longest come first, those of all heads.
    constexpr int64_t kEarlyShare = 16;
    const SparseImage& image = *to.image;
    p.add_sizes({shape.heads, shape.kv_heads, room.layouts, shape.sequence, shape.head_dim, blocks,
                 blocks / kEarlyShare, section, log2_of(room.block / image.own),
                 log2_of(room.block / image.step)});
    constexpr double kLog2E = 1.4426950408889634;
    p.add(static_cast<float>(shape.scale * kLog2E));
    if (image.part)
        p.add_sizes({room.queries.first, room.queries.count, room.keys.first, room.keys.count});
    p.add(static_cast<void*>(nullptr));  // Triton's kernels end with two pointers to scratch
    p.add(static_cast<void*>(nullptr));
    const int64_t programs = blocks * (room.block / image.own) * heads * shape.sequences;
    FERRY_CHECK(programs <= INT32_MAX);
    demand(cudaLaunchKernel(to.kernel, dim3(static_cast<unsigned>(programs)),
                            dim3(static_cast<unsigned>(32 * image.warps)), p.all(),
                            static_cast<size_t>(image.shared_bytes), stream_),
           image.name);
}

void SparseAttention::forward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                              View out, float* lse, std::byte* scratch) {
    FERRY_CHECK(aligned(out));
    forward_of(shape, SpanRoom(shape, scratch, false), false, q, k, v, out, lse);
}

void SparseAttention::part_forward(const Attention& shape, const SequencePart& queries,
                                   const SequencePart& keys, ConstView q, ConstView k, ConstView v,
                                   View out, float* lse, std::byte* scratch) {
    FERRY_CHECK(shape.sequences == 1 && queries.count > 0 && out.type == DType::f32);
    forward_of(shape, SpanRoom(shape, queries, keys, scratch, false), true, q, k, v, out, lse);
}

void SparseAttention::forward_of(const Attention& shape, const SpanRoom& room, bool part,
                                 ConstView q, ConstView k, ConstView v, View out, float* lse) {
    FERRY_CHECK(aligned(q) && aligned(k) && aligned(v));
    find_spans(shape, room, stream_);
    const Loaded& kernel = loaded(SparseKernel::forward, shape, part);
    Parameters p(*kernel.image);
    p.add_own(q);
    p.add_step(k, shape, shape.kv_heads);
    p.add_step(v, shape, shape.kv_heads);
    p.add(out.data);
    p.add(lse);
    p.add(room.of_queries);
    p.add(room.order_of_queries);
    p.add(shape.pattern != nullptr ? shape.blocks.columns : room.identity);
    p.add(room.low);
    p.add_sizes({q.ld, k.ld, v.ld, out.ld});
    start(kernel, p, shape, room, room.query_blocks, shape.heads, shape.heads / shape.kv_heads);
}

void SparseAttention::backward(const Attention& shape, const BackwardOperands& o,
                               std::byte* scratch) {
    FERRY_CHECK(aligned(o.dq) && aligned(o.dk) && aligned(o.dv));
    const SpanRoom room(shape, scratch, true);
    auto* delta = reinterpret_cast<float*>(scratch + room.bytes());
    attention_delta(shape, o.out, o.dout, delta, stream_);
    backward_of(shape, room, false, o, delta);
}

void SparseAttention::part_backward(const Attention& shape, const SequencePart& queries,
                                    const SequencePart& keys, const BackwardOperands& o,
                                    std::byte* scratch) {
    FERRY_CHECK(shape.sequences == 1 && queries.count > 0);
    for (const View& to : {o.dq, o.dk, o.dv}) FERRY_CHECK(to.type == DType::f32);
    const SpanRoom room(shape, queries, keys, scratch, true);
    auto* delta = reinterpret_cast<float*>(scratch + room.bytes());
    attention_delta(part_of(shape, queries.count), o.out, o.dout, delta, stream_);
    backward_of(shape, room, true, o, delta);
}

void SparseAttention::backward_of(const Attention& shape, const SpanRoom& room, bool part,
                                  const BackwardOperands& o, float* delta) {
    FERRY_CHECK(aligned(o.q) && aligned(o.k) && aligned(o.v) && aligned(o.dout));
    find_spans(shape, room, stream_);
    if (room.key_blocks > 0) keys_of(shape, room, part, o, delta);
    queries_of(shape, room, part, o, delta);
}

void SparseAttention::keys_of(const Attention& shape, const SpanRoom& room, bool part,
                              const BackwardOperands& o, const float* delta) {
    const Loaded& kernel = loaded(SparseKernel::backward_keys, shape, part);
    Parameters p(*kernel.image);
    p.add_step(o.q, shape, shape.heads);
    p.add_own(o.k);
    p.add_own(o.v);
    p.add_step(o.dout, shape, shape.heads);
    p.add(o.lse);
    p.add(delta);
    p.add(o.dk.data);
    p.add(o.dv.data);
    p.add(room.of_keys);
    p.add(room.order_of_keys);
    p.add(shape.pattern != nullptr ? shape.blocks.rows : room.identity);
    p.add(room.high);
    p.add_sizes({o.q.ld, o.k.ld, o.v.ld, o.dout.ld, o.dk.ld, o.dv.ld});
    start(kernel, p, shape, room, room.key_blocks, shape.kv_heads, 1);
}

void SparseAttention::queries_of(const Attention& shape, const SpanRoom& room, bool part,
                                 const BackwardOperands& o, const float* delta) {
    const Loaded& kernel = loaded(SparseKernel::backward_queries, shape, part);
    Parameters p(*kernel.image);
    p.add_own(o.q);
    p.add_step(o.k, shape, shape.kv_heads);
    p.add_step(o.v, shape, shape.kv_heads);
    p.add_own(o.dout);
    p.add(o.lse);
    p.add(delta);
    p.add(o.dq.data);
    p.add(room.of_queries);
    p.add(room.order_of_queries);
    p.add(shape.pattern != nullptr ? shape.blocks.columns : room.identity);
    p.add(room.low);
    p.add_sizes({o.q.ld, o.k.ld, o.v.ld, o.dout.ld, o.dq.ld});
    start(kernel, p, shape, room, room.query_blocks, shape.heads, shape.heads / shape.kv_heads);
}

}  // namespace ferry::ops::cuda

#endif
