// 1-bit Adam's exchange, turn by turn, beside the same lines written plainly.
#include "zero/feedback.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace ferry::zero {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kCount = 4096;
const Codec kCodec{CodecKind::sign, 128};
const MomentumShare kShare{.gradient_scale = 0.5f, .momentum = 0.9f / kRanks, .gradient = 0.1f};

using Values = std::vector<float>;

Values random_values(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Values values(kCount);
    for (float& value : values) value = normal(random);
    return values;
}

// One run of a turn, of which rank 0 is the owner: what each rank keeps of it.
struct Kept {
    std::vector<Values> momentum{kRanks, Values(kCount)}, error{kRanks, Values(kCount)};
    Values owner_error = Values(kCount);
};

// The signs of a block, with the mean of its magnitudes.
Values decoded(const Values& values) {
    std::vector<std::byte> bytes(static_cast<size_t>(kCodec.bytes(kCount)));
    encode_reference(kCodec, values.data(), kCount, {bytes.data(), kCount}, 0);
    Values found(kCount);
    decode_reference(kCodec, {bytes.data(), kCount}, 0, kCount, found.data());
    return found;
}

bool is_untouched(float momentum) { return std::bit_cast<uint32_t>(momentum) == 0x80000000u; }

// A step as feedback.h says; every rank's momentum is the same. What was sent, by rank.
std::vector<Values> plain_step(const std::vector<Values>& gradients, Kept& kept) {
    std::vector<Values> sent;
    Values sum(kCount);
    for (size_t rank = 0; rank < kRanks; ++rank) {
        Values c(kCount);
        for (size_t i = 0; i < kCount; ++i) {
            if (is_untouched(kept.momentum[rank][i])) continue;
            float g = gradients[rank][i] * kShare.gradient_scale;
            if (std::abs(g) < 0x1p-60f) g = 0;
            const float old = kept.momentum[rank][i] * kShare.momentum;
            c[i] = (old + g * kShare.gradient) + kept.error[rank][i];
        }
        sent.push_back(decoded(c));
        for (size_t i = 0; i < kCount; ++i) {
            const bool untouched = is_untouched(kept.momentum[rank][i]);
            kept.error[rank][i] = untouched ? 0 : c[i] - sent.back()[i];
            sum[i] = rank == 0 ? sent.back()[i] : sum[i] + sent.back()[i];
        }
    }
    for (size_t i = 0; i < kCount; ++i)
        sum[i] = is_untouched(kept.momentum[0][i]) ? 0 : sum[i] + kept.owner_error[i];
    const Values merged = decoded(sum);
    for (size_t i = 0; i < kCount; ++i) {
        if (is_untouched(kept.momentum[0][i])) continue;
        kept.owner_error[i] = sum[i] - merged[i];
        for (Values& momentum : kept.momentum) momentum[i] = merged[i] + 0.0f;
    }
    return sent;
}

// The same by what the kernels call.
void step(const std::vector<Values>& gradients, Kept& kept) {
    const auto bytes = static_cast<size_t>(kCodec.bytes(kCount));
    std::vector<std::byte> parts(kRanks * bytes), merged(bytes);
    for (size_t rank = 0; rank < kRanks; ++rank) {
        const Part part{parts.data() + rank * bytes, kCount};
        compress(kCodec, kShare, DType::f32,
                 reinterpret_cast<const std::byte*>(gradients[rank].data()),
                 kept.momentum[rank].data(), nullptr, kept.error[rank].data(), part, 0, kCount);
    }
    merge(kCodec, parts.data(), kRanks, kept.momentum[0].data(), kept.owner_error.data(),
          {merged.data(), kCount}, 0, kCount);
    for (Values& momentum : kept.momentum)
        average(kCodec, kShare, {merged.data(), kCount}, momentum.data(), 0, kCount);
}

std::vector<uint32_t> bits_of(const Values& values) {
    std::vector<uint32_t> bits;
    for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
    return bits;
}

void expect_equal(const Kept& a, const Kept& b) {
    for (size_t rank = 0; rank < kRanks; ++rank) {
        ASSERT_EQ(bits_of(a.momentum[rank]), bits_of(b.momentum[rank]));
        ASSERT_EQ(bits_of(a.error[rank]), bits_of(b.error[rank]));
    }
    ASSERT_EQ(bits_of(a.owner_error), bits_of(b.owner_error));
}

Kept begun() {
    Kept kept;
    const Values first = random_values(1);
    Values second(kCount, 1.0f);
    for (size_t i = 0; i < kCount; i += 5) second[i] = 0;  // no gradient has come there
    for (Values& momentum : kept.momentum)
        mark_untouched(first.data(), second.data(), kCount, momentum.data());
    return kept;
}

std::vector<Values> gradients_of(uint32_t step) {
    std::vector<Values> gradients;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
        gradients.push_back(random_values(100 * step + rank));
    return gradients;
}

TEST(Feedback, FollowsThePlainLines) {
    Kept kept = begun(), plain = begun();
    for (uint32_t number = 1; number <= 20; ++number) {
        step(gradients_of(number), kept);
        plain_step(gradients_of(number), plain);
        expect_equal(kept, plain);
    }
}

// All that was sent, and the error that is left, are what there was to send: within the rounding of
// a step each.
TEST(Feedback, LosesNothingOfWhatItIsToSend) {
    Kept kept = begun();
    std::vector<double> wanted(kCount), sent(kCount), returned(kCount);
    constexpr uint32_t kSteps = 50;
    for (uint32_t number = 1; number <= kSteps; ++number) {
        const std::vector<Values> gradients = gradients_of(number);
        const Kept before = kept;
        const std::vector<Values> its = plain_step(gradients, kept);
        for (size_t i = 0; i < kCount; ++i) {
            if (is_untouched(before.momentum[0][i])) continue;
            for (size_t rank = 0; rank < kRanks; ++rank) {
                wanted[i] += double{before.momentum[rank][i]} * kShare.momentum +
                             double{gradients[rank][i]} * kShare.gradient_scale * kShare.gradient;
                sent[i] += its[rank][i];
            }
            returned[i] += kept.momentum[0][i];
        }
    }
    double largest = 0;
    for (size_t i = 0; i < kCount; ++i) {
        double errors = 0;
        for (const Values& error : kept.error) errors += error[i];
        EXPECT_NEAR(sent[i] + errors, wanted[i], 1e-5);
        EXPECT_NEAR(returned[i] + kept.owner_error[i], sent[i], 1e-5);
        largest = std::max(largest, std::abs(errors));
    }
    EXPECT_GT(largest, 0.01) << "no code was off";
}

TEST(Feedback, StaysZeroWhereNoGradientEverCame) {
    Kept kept = begun();
    for (uint32_t number = 1; number <= 5; ++number) {
        std::vector<Values> gradients = gradients_of(number);
        step(gradients, kept);
        for (size_t i = 0; i < kCount; i += 5) {
            for (size_t rank = 0; rank < kRanks; ++rank) {
                ASSERT_TRUE(is_untouched(kept.momentum[rank][i])) << i;
                ASSERT_EQ(kept.error[rank][i], 0) << i;
            }
            ASSERT_EQ(kept.owner_error[i], 0) << i;
        }
        for (size_t i = 1; i < kCount; i += 5) ASSERT_FALSE(is_untouched(kept.momentum[0][i]));
    }
}

// Zeros are sent as such where all is: no -0 comes of them, which would say that no gradient came.
TEST(Feedback, KeepsAMomentumThatIsZeroApart) {
    Kept kept;
    const Values none(kCount), some(kCount, 1.0f);
    for (Values& momentum : kept.momentum)
        mark_untouched(none.data(), some.data(), kCount, momentum.data());
    step(std::vector<Values>(kRanks, Values(kCount, -0.0f)), kept);
    for (const float momentum : kept.momentum[0]) ASSERT_EQ(std::bit_cast<uint32_t>(momentum), 0u);
    step(gradients_of(1), kept);
    double sum = 0;
    for (const float momentum : kept.momentum[0]) sum += std::abs(momentum);
    EXPECT_GT(sum, 0);
}

// In pieces that begin with blocks, and of gradients in 16 bits.
TEST(Feedback, IsTheSameByPieces) {
    const Values gradient = random_values(8);
    std::vector<uint16_t> narrow(kCount);
    for (size_t i = 0; i < kCount; ++i) narrow[i] = to_bf16(gradient[i]);
    const auto bytes = static_cast<size_t>(kCodec.bytes(kCount));
    Kept kept = begun(), pieces = begun();
    std::vector<std::byte> whole(bytes), part(bytes);
    const auto run = [&](Kept& of, std::vector<std::byte>& out, int64_t first, int64_t count) {
        compress(kCodec, kShare, DType::bf16, reinterpret_cast<const std::byte*>(&narrow[first]),
                 of.momentum[0].data() + first, nullptr, of.error[0].data() + first,
                 {out.data(), kCount}, first, count);
    };
    run(kept, whole, 0, kCount);
    for (const int64_t first : {int64_t{1024}, int64_t{0}, int64_t{2048}, int64_t{3072}})
        run(pieces, part, first, 1024);
    EXPECT_EQ(part, whole);
    expect_equal(pieces, kept);
}

// Three updates of 0/1 Adam, two of them without an exchange: what is sent is what all three moved,
// and what comes back is divided by their rates.
TEST(Feedback, SendsWhatWasMovedSinceTheLastExchange) {
    const std::vector<float> steps{0.25f, 0.5f, 0.125f};
    std::vector<std::byte> part(static_cast<size_t>(kCodec.bytes(kCount)));
    Kept kept = begun();
    const Values before = kept.momentum[0];
    Values momentum = before, moved(kCount, 7.0f), wanted(kCount);  // what was moved before is over
    Values plain = before;
    MomentumShare share{.gradient_scale = 0.5f, .momentum = 0.9f, .gradient = 0.3f};
    for (size_t number = 0; number < steps.size(); ++number) {
        share.step = steps[number];
        share.begins = number == 0;
        const Values gradient = gradients_of(static_cast<uint32_t>(number))[0];
        for (size_t i = 0; i < kCount; ++i) {
            if (is_untouched(before[i])) continue;
            plain[i] = plain[i] * 0.9f + gradient[i] * 0.5f * 0.3f;
            wanted[i] = number == 0 ? plain[i] * steps[0] : wanted[i] + plain[i] * steps[number];
        }
        const auto* bytes = reinterpret_cast<const std::byte*>(gradient.data());
        if (number + 1 < steps.size()) {
            move_alone(share, DType::f32, bytes, momentum.data(), moved.data(), kCount);
            ASSERT_EQ(bits_of(momentum), bits_of(plain));
            ASSERT_EQ(bits_of(moved), bits_of(wanted));
            continue;
        }
        compress(kCodec, share, DType::f32, bytes, momentum.data(), moved.data(),
                 kept.error[0].data(), {part.data(), kCount}, 0, kCount);
    }
    const Values sent = decoded(wanted);
    Values got(kCount);
    decode_reference(kCodec, {part.data(), kCount}, 0, kCount, got.data());
    EXPECT_EQ(bits_of(got), bits_of(sent));
    share.average = 4;
    average(kCodec, share, {part.data(), kCount}, momentum.data(), 0, kCount);
    for (size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(kept.error[0][i], is_untouched(before[i]) ? 0 : wanted[i] - sent[i]);
        ASSERT_EQ(momentum[i], is_untouched(before[i]) ? 0 : 4 * sent[i]);
        ASSERT_EQ(is_untouched(momentum[i]), is_untouched(before[i]));
    }
}

}  // namespace
}  // namespace ferry::zero
