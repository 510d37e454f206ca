// Codecs of what ranks exchange: fp32 values as codes in blocks. The sender encodes; the owner of a
// shard decodes and adds the ranks' parts in rank order, in fp32. A part is one array of fp32
// scales, one a block, and then the codes.
//
// A block of values x, of magnitude m at most, with L = 127 (int8) or 7 (int4):
//
//     scale = m / L         code = x * (L / m), to the nearest integer, half way to even
//     decoded = code * scale
//
// m below 2^-100: scale and codes are zero, so zeros stay zeros. m of 2^100 or more, infinite or
// NaN: the scale is NaN, the codes are zero, and all of the block decodes to NaN. No norm is finite
// with a value that large. int8: a byte a code. int4: of a block of n, byte j has code j in its low
// half and code ceil(n / 2) + j in its high one. The last block may be shorter than the others.
//
// sign: of each value its sign alone. L1 is the sum of the block's magnitudes: lane j of 16 adds
// those of elements j, j+16, ... in order from 0, then lanes are added pairwise, j with j+8, j+4,
// j+2, j+1; a last block that is shorter counts as if padded by zeros.
//
//     scale = L1 / (elements of the block)     decoded = the scale with the value's sign
//
// The limits of m are as above. Element j of a block is bit j mod 8 of byte j / 8, 1 where the
// value's sign bit is.
//
// Serial and stateless; any thread, any alignment of values. Every implementation gives the bits of
// the reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/codec_kind.h"
#include "ferry/dtype.h"

namespace ferry::zero {

constexpr float kLeastCoded = 0x1p-100f, kBeyondCoded = 0x1p100f;  // magnitudes of a block
constexpr int64_t kLeastBlock = 64, kLargestBlock = 2048;          // elements, a power of two
// With so many bytes of values or more, which begin at a multiple of 64, decode writes past the
// caches. It is about one thread's share of the last cache.
constexpr int64_t kLeastStreamedBytes = int64_t{2} << 20;

struct Codec {
    CodecKind kind = CodecKind::none;
    int64_t block = 256;

    bool on() const { return kind != CodecKind::none; }
    // Of a whole block's codes, and of the codes of any count.
    int64_t code_bytes(int64_t count) const {
        if (kind == CodecKind::sign) return count / block * (block / 8) + (count % block + 7) / 8;
        if (kind != CodecKind::int4) return count;
        return count / block * (block / 2) + (count % block + 1) / 2;
    }
    int64_t scale_bytes(int64_t count) const { return (count + block - 1) / block * 4; }
    // Of a part: `count` elements from the beginning of a block.
    int64_t bytes(int64_t count) const { return scale_bytes(count) + code_bytes(count); }
    bool operator==(const Codec&) const = default;
};
std::string text_of(const Codec& codec);  // "int8 in blocks of 256"

// A part of `count` elements, and a run of it that begins with a block.
template <class Byte>
struct PartOf {
    Byte* data = nullptr;
    int64_t count = 0;

    Byte* scales(const Codec& codec, int64_t first) const {
        return data + codec.scale_bytes(first);
    }
    Byte* codes(const Codec& codec, int64_t first) const {
        return data + codec.scale_bytes(count) + codec.code_bytes(first);
    }
};
using Part = PartOf<std::byte>;
using ConstPart = PartOf<const std::byte>;

// Encodes elements [first, first + count) of a part. `values` holds those alone.
void encode(const Codec& codec, const float* values, int64_t count, Part part, int64_t first);
// values[i] = decoded, or values[i] += decoded.
void decode(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values);
void decode_add(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values);

// `count` values of a type in fp32.
void widen(DType type, const std::byte* data, int64_t count, float* values);

// Plain loops: the oracle.
void encode_reference(const Codec& codec, const float* values, int64_t count, Part part,
                      int64_t first);
void decode_reference(const Codec& codec, ConstPart part, int64_t first, int64_t count,
                      float* values);
void decode_add_reference(const Codec& codec, ConstPart part, int64_t first, int64_t count,
                          float* values);

// For tests: the SIMD target that runs (base/simd_dispatch.h).
std::string codec_target();

// The same bits on a GPU, of memory there: enqueued on a cudaStream_t. Values of int8 and int4 may
// be of any type: they are widened first, or rounded at last. A part begins at a multiple of 4
// bytes. What CUDA refuses throws Trouble::internal, and does_not_fit where memory is short.
namespace cuda {

// Whether a GPU is there that runs these kernels. False in a build without CUDA, which has none of
// the others.
bool available();

// Runs of as many elements, a part each.
struct Several {
    int64_t count = 1;
    int64_t values_apart = 0, parts_apart = 0;  // from one to the next: elements, bytes
};
void encode(const Codec& codec, DType type, const void* values, int64_t count, Part part,
            int64_t first, const Several& several, void* stream);
void decode(const Codec& codec, ConstPart part, int64_t first, int64_t count, DType type,
            void* values, const Several& several, void* stream);
void decode_add(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values,
                void* stream);
// What an owner makes of the senders' int8 or int4 parts, which follow each other: their sum in
// fp32 and in their order, rounded once, and its norm leaves (ops::Ops::round_gradient). `count`:
// whole blocks. `wire` begins at a multiple of four elements.
void sum(const Codec& codec, const std::byte* parts, int senders, int64_t count, DType wire_type,
         void* wire, float* leaves, void* stream);
// What the ranks of a host have for each of several hosts, as int8 or int4: added in fp32 in the
// senders' order and encoded once more. `parts`: [senders, hosts] of them, `combined`: [hosts], one
// behind the other. `count`: whole blocks.
void combine(const Codec& codec, const std::byte* parts, int senders, int hosts, int64_t count,
             std::byte* combined, void* stream);

// A stream beside the device's own, whose kernels go before theirs. Made while the GPU is idle: it
// loads the kernel that encodes this type. One thread.
class Beside {
public:
    Beside(const Codec& codec, DType type);
    ~Beside();
    Beside(const Beside&) = delete;
    Beside& operator=(const Beside&) = delete;
    void* stream() const { return stream_; }
    void wait();  // until all that was enqueued is done

private:
    void *stream_ = nullptr, *event_ = nullptr;
};

}  // namespace cuda

}  // namespace ferry::zero
