// One suite for every implementation of the codecs: the reference, and each SIMD target.
#include "zero/codec.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/simd_dispatch.h"

namespace ferry::zero {
namespace {

const std::string kReference = "reference";

std::vector<std::string> implementations() {
    std::vector<std::string> names = simd_targets();
    names.push_back(kReference);
    return names;
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
        if (is_reference()) return;
        force_simd_target(GetParam());
        ASSERT_EQ(codec_target(), GetParam()) << "the target was never dispatched";
    }
    void TearDown() override { force_simd_target(""); }

    bool is_reference() const { return GetParam() == kReference; }

    // A byte behind the part tells whether it was overrun.
    std::vector<std::byte> encoded(const Codec& codec, const std::vector<float>& values) const {
        const auto count = static_cast<int64_t>(values.size());
        const auto bytes = static_cast<size_t>(codec.bytes(count));
        std::vector<std::byte> data(bytes + 1, std::byte{0x5a});
        const auto run = is_reference() ? encode_reference : encode;
        run(codec, values.data(), count, {data.data(), count}, 0);
        EXPECT_EQ(data.back(), std::byte{0x5a});
        data.pop_back();
        return data;
    }
    std::vector<float> decoded(const Codec& codec, const std::vector<std::byte>& data,
                               size_t count) const {
        std::vector<float> values(count + 1, 12345.0f);
        const auto run = is_reference() ? decode_reference : decode;
        const auto elements = static_cast<int64_t>(count);
        run(codec, {data.data(), elements}, 0, elements, values.data());
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
        const auto put = is_reference() ? encode_reference : encode;
        const auto take = is_reference() ? decode_reference : decode;
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
    const auto add = is_reference() ? decode_add_reference : decode_add;
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
