// One suite for every implementation of the codecs: the reference, each SIMD target, and CUDA where
// a GPU is.
#include "zero/codec.h"

#include <gtest/gtest.h>

#ifdef FERRY_CUDA
#include <cuda_runtime.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/simd_dispatch.h"
#include "ops/ops.h"
#include "zero/feedback.h"

namespace ferry::zero {
namespace {

const std::string kReference = "reference";
const std::string kCuda = "cuda";

std::vector<std::string> implementations() {
    std::vector<std::string> names = simd_targets();
    names.push_back(kReference);
#ifdef FERRY_CUDA
    names.push_back(kCuda);
#endif
    return names;
}

#ifdef FERRY_CUDA

void check(cudaError_t status) { FERRY_CHECK(status == cudaSuccess, cudaGetErrorString(status)); }

// A copy of an array in device memory, `offset` bytes behind a boundary that suits every access.
// Nothing is allocated behind it, so that compute-sanitizer sees the first byte too many; the last
// byte of its own tells of it too.
class OnDevice {
public:
    OnDevice(const void* from, int64_t bytes, size_t offset = 0)
        : bytes_(static_cast<size_t>(bytes)) {
        check(cudaMalloc(&memory_, offset + bytes_ + 1));
        data_ = static_cast<std::byte*>(memory_) + offset;
        check(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice));
        check(cudaMemset(data_ + bytes_, 0x5a, 1));
    }
    ~OnDevice() { cudaFree(memory_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    std::byte* data() { return data_; }
    float* floats() { return reinterpret_cast<float*>(data_); }
    void read(void* to) {
        std::byte behind{};
        check(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost));
        check(cudaMemcpy(&behind, data_ + bytes_, 1, cudaMemcpyDeviceToHost));
        EXPECT_EQ(behind, std::byte{0x5a});
    }

private:
    size_t bytes_;
    void* memory_ = nullptr;
    std::byte* data_ = nullptr;
};

void encode_there(const Codec& codec, const float* values, int64_t count, Part part,
                  int64_t first) {
    OnDevice from(values, count * 4), to(part.data, codec.bytes(part.count));
    cuda::encode(codec, DType::f32, from.data(), count, {to.data(), part.count}, first, {},
                 nullptr);
    to.read(part.data);
}
void decode_there(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    OnDevice from(part.data, codec.bytes(part.count)), to(values, count * 4);
    cuda::decode(codec, {from.data(), part.count}, first, count, DType::f32, to.data(), {},
                 nullptr);
    to.read(values);
}
void add_there(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    OnDevice from(part.data, codec.bytes(part.count)), to(values, count * 4);
    cuda::decode_add(codec, {from.data(), part.count}, first, count, to.floats(), nullptr);
    to.read(values);
}

#endif

struct Functions {
    decltype(&encode) put = encode;
    decltype(&decode) take = decode, add = decode_add;
};
Functions functions_of(const std::string& implementation) {
    if (implementation == kReference)
        return {encode_reference, decode_reference, decode_add_reference};
#ifdef FERRY_CUDA
    if (implementation == kCuda) return {encode_there, decode_there, add_there};
#endif
    return {};
}

const std::vector<Codec>& codecs() {
    static const std::vector<Codec> all = [] {
        std::vector<Codec> made;
        for (const CodecKind kind : {CodecKind::int8, CodecKind::int4}) {
            for (int64_t block = kLeastBlock; block <= kLargestBlock; block *= 2)
                made.push_back({kind, block});
        }
        return made;
    }();
    return all;
}

// And that of signs, which has no levels.
const std::vector<Codec>& codecs_and_signs() {
    static const std::vector<Codec> all = [] {
        std::vector<Codec> made = codecs();
        for (int64_t block = kLeastBlock; block <= kLargestBlock; block *= 2)
            made.push_back({CodecKind::sign, block});
        return made;
    }();
    return all;
}

float levels_of(const Codec& codec) { return codec.kind == CodecKind::int8 ? 127 : 7; }

class Codecs : public testing::TestWithParam<std::string> {
protected:
    void SetUp() override {
        if (GetParam() == kReference) return;
        if (GetParam() == kCuda) {
            if (!cuda::available()) GTEST_SKIP() << "no GPU that runs these kernels";
            return;
        }
        force_simd_target(GetParam());
        ASSERT_EQ(codec_target(), GetParam()) << "the target was never dispatched";
    }
    void TearDown() override { force_simd_target(""); }

    static Functions functions() { return functions_of(GetParam()); }

    // A byte behind the part tells whether it was overrun.
    std::vector<std::byte> encoded(const Codec& codec, const std::vector<float>& values) const {
        const auto count = static_cast<int64_t>(values.size());
        const auto bytes = static_cast<size_t>(codec.bytes(count));
        std::vector<std::byte> data(bytes + 1, std::byte{0x5a});
        functions().put(codec, values.data(), count, {data.data(), count}, 0);
        EXPECT_EQ(data.back(), std::byte{0x5a});
        data.pop_back();
        return data;
    }
    std::vector<float> decoded(const Codec& codec, const std::vector<std::byte>& data,
                               size_t count) const {
        std::vector<float> values(count + 1, 12345.0f);
        const auto elements = static_cast<int64_t>(count);
        functions().take(codec, {data.data(), elements}, 0, elements, values.data());
        EXPECT_EQ(values.back(), 12345.0f);
        values.pop_back();
        return values;
    }
    std::vector<float> round_trip(const Codec& codec, const std::vector<float>& values) const {
        return decoded(codec, encoded(codec, values), values.size());
    }
};

std::vector<float> random_values(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = std::ldexp(normal(random), -static_cast<int>(seed % 40));
    return values;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
    std::vector<uint32_t> bits;
    for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
    return bits;
}

// Any bits at all: denormals, infinities and NaNs among them.
std::vector<float> any_bits(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& value : values) value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    return values;
}

TEST_P(Codecs, GiveTheReferencesBitsAtEverySize) {
    for (const Codec& codec : codecs_and_signs()) {
        for (size_t count = 0; count <= 300; count += count < 140 ? 1 : 13) {
            for (const auto& values :
                 {random_values(count, static_cast<uint32_t>(count)), any_bits(count, 3)}) {
                const auto elements = static_cast<int64_t>(count);
                std::vector<std::byte> want(static_cast<size_t>(codec.bytes(elements)));
                encode_reference(codec, values.data(), elements, {want.data(), elements}, 0);
                const std::vector<std::byte> got = encoded(codec, values);
                ASSERT_EQ(got, want) << text_of(codec) << ", " << count;
                std::vector<float> back(count);
                decode_reference(codec, {want.data(), elements}, 0, elements, back.data());
                ASSERT_EQ(bits_of(decoded(codec, got, count)), bits_of(back))
                    << text_of(codec) << ", " << count;
            }
        }
    }
}

// Several of what a kernel codes at once, and what is left over; blocks of every sort among them.
TEST_P(Codecs, GiveTheReferencesBitsInLargeParts) {
    for (const size_t count : {size_t{4096}, size_t{16384 + 2048 + 77}, size_t{3 * 16384}}) {
        std::vector<float> values = random_values(count, 4);
        const auto fill = [&](size_t first, float value) {
            for (size_t i = first; i < first + 64; ++i) values[i] = value;
        };
        fill(64, 0.0f);
        fill(192, -0.0f);
        fill(256, -std::numeric_limits<float>::denorm_min());
        fill(2048, -0x1p-101f);
        for (size_t i = 512; i < count; i += 701) values[i] *= 0x1p20f;
        values[count - 5] = std::numeric_limits<float>::infinity();
        values[count / 2] = -std::nanf("1");
        values[3000] = -0x1p101f;
        const auto elements = static_cast<int64_t>(count);
        for (const Codec& codec : codecs_and_signs()) {
            std::vector<std::byte> want(static_cast<size_t>(codec.bytes(elements)));
            encode_reference(codec, values.data(), elements, {want.data(), elements}, 0);
            const std::vector<std::byte> got = encoded(codec, values);
            ASSERT_EQ(got, want) << text_of(codec) << ", " << count;
            std::vector<float> back(count);
            decode_reference(codec, {want.data(), elements}, 0, elements, back.data());
            ASSERT_EQ(bits_of(decoded(codec, got, count)), bits_of(back)) << text_of(codec);
        }
    }
}

// Where decode begins to write past the caches: a value fewer, a last block of every sort, and
// values that begin on no cache line.
TEST_P(Codecs, GiveTheReferencesBitsWhereDecodeStreams) {
    constexpr int64_t kLeast = kLeastStreamedBytes / 4;
    constexpr size_t kLine = 16;
    struct alignas(64) Line {
        std::array<float, kLine> values;
    };
    std::vector<float> values = random_values(static_cast<size_t>(kLeast) + 2048 + 77, 8);
    // A few blocks of other sorts. Most stay finite: in one that is NaN all codes are 0, and a
    // wrong place of a code would not be seen.
    const auto fill = [&](size_t first, float value) {
        for (size_t i = first; i < first + 2048; ++i) values[i] = value;
    };
    fill(2048, 0.0f);
    fill(3 * 2048, -0.0f);
    fill(5 * 2048, -std::numeric_limits<float>::denorm_min());
    values[7 * 2048 + 70] = std::numeric_limits<float>::infinity();
    values[9 * 2048 + 300] = -std::nanf("1");
    values[11 * 2048 + 1999] = -0x1p101f;
    for (const Codec& codec : codecs_and_signs()) {
        if (codec.block != 64 && codec.block != 256 && codec.block != 2048) continue;
        for (const int64_t count : {kLeast - 1, kLeast, kLeast + 1, kLeast + 2048 + 77}) {
            std::vector<std::byte> part(static_cast<size_t>(codec.bytes(count)));
            encode_reference(codec, values.data(), count, {part.data(), count}, 0);
            std::vector<float> want(static_cast<size_t>(count));
            decode_reference(codec, {part.data(), count}, 0, count, want.data());
            ASSERT_LT(std::ranges::count_if(want, [](float value) { return std::isnan(value); }),
                      count / 50);
            ASSERT_GT(std::ranges::count_if(want, [](float value) { return value != 0; }),
                      count / 2);
            for (const size_t offset : {size_t{0}, size_t{1}, size_t{8}}) {
                std::vector<Line> memory(static_cast<size_t>(count) / kLine + 2);
                float* got = memory.front().values.data() + offset;
                got[count] = 12345.0f;
                functions().take(codec, {part.data(), count}, 0, count, got);
                ASSERT_EQ(std::memcmp(got, want.data(), want.size() * 4), 0)
                    << text_of(codec) << ", " << count << " values, offset " << offset;
                ASSERT_EQ(got[count], 12345.0f) << text_of(codec) << ", " << count;
            }
        }
    }
}

TEST_P(Codecs, ComeWithinHalfAStepOfEveryValue) {
    for (const Codec& codec : codecs()) {
        const std::vector<float> values = random_values(4096 + 77, 5);
        const std::vector<float> back = round_trip(codec, values);
        const auto block = static_cast<size_t>(codec.block);
        for (size_t at = 0; at < values.size(); at += block) {
            const size_t end = std::min(values.size(), at + block);
            float largest = 0;
            for (size_t i = at; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
            const float half = largest / levels_of(codec) / 2;
            for (size_t i = at; i < end; ++i) {
                ASSERT_NEAR(back[i], values[i], half * 1.00001f) << text_of(codec) << ", " << i;
                if (std::abs(values[i]) == largest) {
                    ASSERT_NEAR(back[i], values[i], largest * 3e-7f);
                }
            }
        }
    }
}

TEST_P(Codecs, KeepConstantsAndZeros) {
    for (const Codec& codec : codecs_and_signs()) {
        for (const float value : {0.0f, -0.0f, 127.0f, -7.0f * 127, 889.0f * 0x1p-60f}) {
            const std::vector<float> values(static_cast<size_t>(codec.block) + 9, value);
            for (const float back : round_trip(codec, values)) ASSERT_EQ(back, value);
        }
    }
}

TEST_P(Codecs, TakeWhatIsTooSmallForZero) {
    const float denormal = std::numeric_limits<float>::denorm_min();
    for (const Codec& codec : codecs()) {
        for (const float value : {denormal, -denormal, 0x1p-126f, 0x0.ffffffp-100f}) {
            std::vector<float> values(static_cast<size_t>(codec.block), value);
            for (const float back : round_trip(codec, values)) ASSERT_EQ(back, 0);
            values[3] = kLeastCoded;
            ASSERT_NEAR(round_trip(codec, values)[3], kLeastCoded, 0x1p-120f);
        }
    }
}

TEST_P(Codecs, MakeABlockNanForAValueThatNoNormTakes) {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const Codec& codec : codecs_and_signs()) {
        const auto block = static_cast<size_t>(codec.block);
        for (const float bad : {infinity, -infinity, std::nanf(""), -std::nanf("1"), kBeyondCoded,
                                -std::numeric_limits<float>::max()}) {
            for (const size_t where : {size_t{0}, block / 2 - 1, block - 1}) {
                std::vector<float> values = random_values(3 * block, 1);
                const std::vector<float> good = round_trip(codec, values);
                values[block + where] = bad;
                const std::vector<float> back = round_trip(codec, values);
                for (size_t i = 0; i < values.size(); ++i) {
                    if (i / block == 1)
                        ASSERT_TRUE(std::isnan(back[i])) << text_of(codec) << ", " << i;
                    else
                        ASSERT_EQ(back[i], good[i]) << "its neighbours are as they were";
                }
            }
        }
        const std::vector<float> large(block, std::nextafter(kBeyondCoded, 0.0f));
        for (const float back : round_trip(codec, large)) ASSERT_TRUE(std::isfinite(back));
    }
}

TEST_P(Codecs, SendTheSignsAndTheMeanMagnitude) {
    for (int64_t block = kLeastBlock; block <= kLargestBlock; block *= 2) {
        const Codec codec{CodecKind::sign, block};
        const std::vector<float> values = random_values(static_cast<size_t>(3 * block + 37), 6);
        const std::vector<float> back = round_trip(codec, values);
        for (size_t at = 0; at < values.size(); at += static_cast<size_t>(block)) {
            const size_t end = std::min(values.size(), at + static_cast<size_t>(block));
            double sum = 0;
            for (size_t i = at; i < end; ++i) sum += std::abs(values[i]);
            const double mean = sum / static_cast<double>(end - at);
            for (size_t i = at; i < end; ++i) {
                ASSERT_EQ(std::signbit(back[i]), std::signbit(values[i])) << block << ", " << i;
                ASSERT_NEAR(std::abs(back[i]), mean, mean * 1e-6) << block << ", " << i;
            }
        }
    }
}

// A block whose largest magnitude is below 2^-100 is zero; one denormal among others counts.
TEST_P(Codecs, SendNoSignOfWhatIsTooSmall) {
    const Codec codec{CodecKind::sign, 64};
    std::vector<float> values(64, -std::numeric_limits<float>::denorm_min());
    for (const float back : round_trip(codec, values)) ASSERT_EQ(back, 0);
    values[5] = kLeastCoded;
    const std::vector<float> back = round_trip(codec, values);
    EXPECT_EQ(back[5], kLeastCoded / 64 + 63 * std::numeric_limits<float>::denorm_min() / 64);
    EXPECT_EQ(back[6], -back[5]);
}

// By tiles, as several threads go through a part.
TEST_P(Codecs, GiveTheSamePieceByPiece) {
    constexpr int64_t kCount = 3 * 4096, kPiece = 4096;
    const std::vector<float> values = random_values(kCount, 9);
    for (const Codec& codec : codecs_and_signs()) {
        const std::vector<std::byte> whole = encoded(codec, values);
        std::vector<std::byte> pieces(whole.size());
        const auto [put, take, add] = functions();
        std::vector<float> back(kCount);
        for (const int64_t first : {2 * kPiece, int64_t{0}, kPiece}) {
            put(codec, values.data() + first, kPiece, {pieces.data(), kCount}, first);
            take(codec, {whole.data(), kCount}, first, kPiece, back.data() + first);
        }
        ASSERT_EQ(pieces, whole);
        ASSERT_EQ(bits_of(back), bits_of(decoded(codec, whole, kCount)));
    }
}

TEST_P(Codecs, AddInFp32InTheOrderOfTheRanks) {
    constexpr int kRanks = 5;
    constexpr size_t kCount = 4096 + 65;
    const auto add = functions().add;
    for (const Codec& codec : codecs_and_signs()) {
        std::vector<float> want(kCount), got;
        for (uint32_t rank = 0; rank < kRanks; ++rank) {
            const std::vector<std::byte> part = encoded(codec, random_values(kCount, rank * 7 + 1));
            const std::vector<float> its = decoded(codec, part, kCount);
            if (rank == 0)
                got = its;
            else
                add(codec, {part.data(), int64_t{kCount}}, 0, int64_t{kCount}, got.data());
            for (size_t i = 0; i < kCount; ++i) want[i] = rank == 0 ? its[i] : want[i] + its[i];
        }
        ASSERT_EQ(bits_of(got), bits_of(want)) << text_of(codec);
    }
}

INSTANTIATE_TEST_SUITE_P(all, Codecs, testing::ValuesIn(implementations()),
                         [](const auto& one) { return one.param; });

#ifdef FERRY_CUDA

class CodecsOnAGpu : public testing::Test {
protected:
    void SetUp() override {
        if (!cuda::available()) GTEST_SKIP() << "no GPU that runs these kernels";
    }
    static std::vector<std::byte> part_of(const Codec& codec, const std::vector<float>& values) {
        const auto count = static_cast<int64_t>(values.size());
        std::vector<std::byte> part(static_cast<size_t>(codec.bytes(count)));
        encode_reference(codec, values.data(), count, {part.data(), count}, 0);
        return part;
    }
};

// In a type's bytes, rounded once.
std::vector<std::byte> narrowed(const std::vector<float>& values, DType type) {
    const auto count = static_cast<int64_t>(values.size());
    std::vector<std::byte> bytes(static_cast<size_t>(count * size_of(type)));
    ops::make_reference_ops()->cast(ops::ConstView::of(values.data(), DType::f32, 1, count),
                                    ops::View::of(bytes.data(), type, 1, count));
    return bytes;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

// Of weights; and of values that lie where no four can be loaded at once.
TEST_F(CodecsOnAGpu, WidenValuesOfEveryTypeAndRoundThemInTheEnd) {
    constexpr int64_t kCount = 2 * 4096 + 128 + 37;
    const std::vector<float> values = random_values(kCount, 8);
    for (const Codec& codec : codecs()) {
        for (const DType type : kTypes) {
            for (const int64_t off : {0, 1}) {
                const std::vector<std::byte> narrow = narrowed(values, type);
                std::vector<float> wide(kCount), back(kCount);
                widen(type, narrow.data(), kCount, wide.data());
                const std::vector<std::byte> want = part_of(codec, wide);
                const auto offset = static_cast<size_t>(off * size_of(type));
                OnDevice from(narrow.data(), std::ssize(narrow), offset);
                OnDevice part(want.data(), std::ssize(want));
                check(cudaMemset(part.data(), 0xff, want.size()));
                cuda::encode(codec, type, from.data(), kCount, {part.data(), kCount}, 0, {},
                             nullptr);
                std::vector<std::byte> got(want.size()), rounded(narrow.size());
                part.read(got.data());
                ASSERT_EQ(got, want) << text_of(codec) << ", " << name_of(type) << ", " << off;
                cuda::decode(codec, {part.data(), kCount}, 0, kCount, type, from.data(), {},
                             nullptr);
                from.read(rounded.data());
                decode_reference(codec, {want.data(), kCount}, 0, kCount, back.data());
                ASSERT_EQ(rounded, narrowed(back, type)) << text_of(codec) << ", " << off;
            }
        }
    }
}

TEST_F(CodecsOnAGpu, CodeSeveralRunsAtOnce) {
    constexpr int64_t kCount = 4096 + 2048, kApart = 3 * 4096, kRuns = 3;
    const std::vector<float> values = random_values((kRuns - 1) * kApart + kCount, 3);
    for (const Codec& codec : codecs_and_signs()) {
        const int64_t bytes = codec.bytes(kCount), apart = 2 * bytes;
        const cuda::Several several{kRuns, kApart, apart};
        std::vector<std::byte> parts(static_cast<size_t>((kRuns - 1) * apart + bytes));
        OnDevice from(values.data(), std::ssize(values) * 4);
        OnDevice there(parts.data(), std::ssize(parts));
        cuda::encode(codec, DType::f32, from.data(), kCount, {there.data(), kCount}, 0, several,
                     nullptr);
        there.read(parts.data());
        std::vector<float> got(values);
        cuda::decode(codec, {there.data(), kCount}, 0, kCount, DType::f32, from.data(), several,
                     nullptr);
        from.read(got.data());
        std::vector<float> want(values);
        for (int64_t run = 0; run < kRuns; ++run) {
            const auto first = values.begin() + run * kApart;
            const std::vector<std::byte> part = part_of(codec, {first, first + kCount});
            const auto its = parts.begin() + run * apart;
            ASSERT_TRUE(std::equal(part.begin(), part.end(), its)) << text_of(codec) << ", " << run;
            decode_reference(codec, {part.data(), kCount}, 0, kCount, want.data() + run * kApart);
        }
        ASSERT_EQ(bits_of(got), bits_of(want)) << text_of(codec);
    }
}

// As an owner's processors add what they decode, round it and take its norm.
TEST_F(CodecsOnAGpu, SumPartsInTheOrderOfTheRanks) {
    const auto reference = ops::make_reference_ops();
    for (const Codec& codec : codecs()) {
        for (const int64_t count : {int64_t{4096}, 2 * int64_t{4096} + codec.block}) {
            std::vector<std::byte> parts;
            std::vector<float> sum(static_cast<size_t>(count));
            for (uint32_t sender = 0; sender < 5; ++sender) {
                std::vector<float> values = random_values(sum.size(), sender * 7 + 1);
                for (size_t i = 0; i < 64; ++i) values[i] = 0x1p-61f;  // no part of a norm
                const std::vector<std::byte> part = part_of(codec, values);
                parts.insert(parts.end(), part.begin(), part.end());
                const auto take = sender == 0 ? decode_reference : decode_add_reference;
                take(codec, {part.data(), count}, 0, count, sum.data());
                OnDevice sent(parts.data(), std::ssize(parts));
                for (const DType type : kTypes) {
                    const auto leaves = static_cast<size_t>((count + 4095) / 4096);
                    std::vector<float> want(leaves), got(leaves);
                    std::vector<std::byte> wire(static_cast<size_t>(count * size_of(type)));
                    std::vector<std::byte> rounded(wire.size());
                    reference->round_gradient(sum.data(), count, type, wire.data(), want.data());
                    OnDevice on_wire(rounded.data(), std::ssize(rounded));
                    OnDevice norms(got.data(), std::ssize(got) * 4);
                    cuda::sum(codec, sent.data(), static_cast<int>(sender) + 1, count, type,
                              on_wire.data(), norms.floats(), nullptr);
                    on_wire.read(rounded.data());
                    norms.read(got.data());
                    ASSERT_EQ(rounded, wire) << text_of(codec) << ", " << name_of(type);
                    ASSERT_EQ(bits_of(got), bits_of(want)) << text_of(codec) << ", " << count;
                }
            }
        }
    }
}

// As a host's processors add its ranks' parts, of each host in their order, and code them again.
TEST_F(CodecsOnAGpu, CombineTheRanksOfEachHost) {
    constexpr int kHosts = 3;
    for (const Codec& codec : codecs()) {
        for (const int senders : {1, 2, 5}) {
            for (const int64_t count :
                 {int64_t{4096}, int64_t{20480}, 2 * int64_t{2048} + 3 * codec.block}) {
                const auto elements = static_cast<size_t>(count);
                const auto bytes = static_cast<size_t>(codec.bytes(count));
                std::vector<std::byte> parts, want(kHosts * bytes), got(want.size());
                std::vector<std::vector<float>> sums(kHosts, std::vector<float>(elements));
                for (int sender = 0; sender < senders; ++sender) {
                    for (size_t host = 0; host < kHosts; ++host) {
                        auto values = random_values(
                            elements, static_cast<uint32_t>(sender * kHosts) + uint32_t(host) + 1);
                        for (size_t i = 64; i < 128; ++i) values[i] = 0;
                        // A block that nobody can add to.
                        if (host == 1 && sender == senders - 1) values[700] = std::nanf("1");
                        if (host == 2) values[elements - 1] = 0x1p99f;
                        const std::vector<std::byte> part = part_of(codec, values);
                        parts.insert(parts.end(), part.begin(), part.end());
                        const auto take = sender == 0 ? decode_reference : decode_add_reference;
                        take(codec, {part.data(), count}, 0, count, sums[host].data());
                    }
                }
                for (size_t host = 0; host < kHosts; ++host)
                    encode_reference(codec, sums[host].data(), count,
                                     {want.data() + host * bytes, count}, 0);
                OnDevice sent(parts.data(), std::ssize(parts));
                OnDevice combined(got.data(), std::ssize(got));
                cuda::combine(codec, sent.data(), senders, kHosts, count, combined.data(), nullptr);
                combined.read(got.data());
                ASSERT_EQ(got, want) << text_of(codec) << ", " << senders << ", " << count;
            }
        }
    }
}

// Runs of a rank's gradient, rounded, each leaf the sum of theirs in order.
TEST_F(CodecsOnAGpu, KeepGradientsWithTheirNorms) {
    constexpr int64_t kCount = 3 * 4096, kApart = 5 * 4096;
    const auto reference = ops::make_reference_ops();
    for (const int ranks : {1, 2, 5}) {
        std::vector<float> values =
            random_values(static_cast<size_t>((ranks - 1) * kApart + kCount), 2);
        for (size_t i = 0; i < 64; ++i) values[i] = 0x1p-61f;  // no part of a norm
        values[100] = 65519.0f;                                // rounds to fp16's largest
        OnDevice gradient(values.data(), std::ssize(values) * 4);
        for (const DType type : kTypes) {
            const int64_t bytes = kCount * size_of(type);
            std::vector<std::byte> want(static_cast<size_t>(ranks * bytes)), got(want.size());
            std::vector<float> sums(3), leaves(3);
            for (int rank = 0; rank < ranks; ++rank) {
                std::vector<float> its(3);
                reference->round_gradient(values.data() + rank * kApart, kCount, type,
                                          want.data() + rank * bytes, its.data());
                for (size_t leaf = 0; leaf < 3; ++leaf) sums[leaf] += its[leaf];
            }
            OnDevice kept(got.data(), std::ssize(got)), norms(leaves.data(), 12);
            cuda::keep(gradient.floats(), ranks, kApart, kCount, type, kept.data(), norms.floats(),
                       nullptr);
            kept.read(got.data());
            norms.read(leaves.data());
            ASSERT_EQ(got, want) << ranks << ", " << name_of(type);
            ASSERT_EQ(bits_of(leaves), bits_of(sums)) << ranks << ", " << name_of(type);
        }
    }
}

// Every rank then skips the step.
TEST_F(CodecsOnAGpu, SumToNanWhereOneSenderOverflowed) {
    constexpr int64_t kCount = 2 * 4096;
    for (const Codec& codec : codecs()) {
        std::vector<float> values = random_values(kCount, 2);
        std::vector<std::byte> parts = part_of(codec, values);
        values[4096 + 70] = std::numeric_limits<float>::infinity();
        const std::vector<std::byte> second = part_of(codec, values);
        parts.insert(parts.end(), second.begin(), second.end());
        OnDevice sent(parts.data(), std::ssize(parts)), wire(values.data(), kCount * 4);
        std::vector<float> leaves(2);
        OnDevice norms(leaves.data(), 8);
        cuda::sum(codec, sent.data(), 2, kCount, DType::f32, wire.data(), norms.floats(), nullptr);
        norms.read(leaves.data());
        EXPECT_TRUE(std::isfinite(leaves[0])) << text_of(codec);
        EXPECT_TRUE(std::isnan(leaves[1])) << text_of(codec);
    }
}

TEST_F(CodecsOnAGpu, EncodeBesideTheDevicesStreams) {
    constexpr int64_t kCount = 4096;
    const Codec codec{CodecKind::int8, 256};
    const std::vector<float> values = random_values(kCount, 5);
    const std::vector<std::byte> narrow = narrowed(values, DType::bf16);
    std::vector<float> wide(kCount);
    widen(DType::bf16, narrow.data(), kCount, wide.data());
    const std::vector<std::byte> want = part_of(codec, wide);
    std::vector<std::byte> got(want.size());
    OnDevice from(narrow.data(), std::ssize(narrow)), part(got.data(), std::ssize(got));
    cuda::Beside beside(codec, DType::bf16);
    cuda::encode(codec, DType::bf16, from.data(), kCount, {part.data(), kCount}, 0, {},
                 beside.stream());
    beside.wait();
    part.read(got.data());
    EXPECT_EQ(got, want);
}

#endif

TEST(CodecSizes, AreOfScalesAndCodes) {
    const Codec int8{CodecKind::int8, 256}, int4{CodecKind::int4, 64};
    EXPECT_EQ(int8.bytes(4096), 16 * 4 + 4096);
    EXPECT_EQ(int8.bytes(257), 2 * 4 + 257);
    EXPECT_EQ(int4.bytes(4096), 64 * 4 + 2048);
    EXPECT_EQ(int4.bytes(64 + 3), 2 * 4 + 32 + 2);
    EXPECT_EQ(int4.bytes(0), 0);
    const Codec signs{CodecKind::sign, 256};
    EXPECT_EQ(signs.bytes(4096), 16 * 4 + 512);
    EXPECT_EQ(signs.bytes(256 + 9), 2 * 4 + 32 + 2);
}

}  // namespace
}  // namespace ferry::zero
