// Decoders that have a slice of each tensor, one a thread: together they are the whole one. On a
// GPU too, which all of them share.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/random.h"
#include "model/model.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::model {
namespace {

// Where the ranks leave what the others take.
class Meeting {
public:
    explicit Meeting(int ranks) : ranks_(ranks), met_(ranks), given_(static_cast<size_t>(ranks)) {}

    // `from`: where in what a rank gives this rank's bytes begin.
    void take(int rank, const std::byte* given, int64_t from, std::byte* to, int64_t bytes) {
        given_[static_cast<size_t>(rank)] = given;
        met_.arrive_and_wait();
        for (int r = 0; r < ranks_; ++r) {
            const std::byte* its = given_[static_cast<size_t>(r)] + from;
            if (its != to + r * bytes) std::memcpy(to + r * bytes, its, static_cast<size_t>(bytes));
        }
        met_.arrive_and_wait();
    }

private:
    const int ranks_;
    std::barrier<> met_;
    std::vector<const std::byte*> given_;
};

class MeetingRank final : public KernelRanks {
public:
    MeetingRank(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
    void exchange(const std::byte* to, std::byte* from, int64_t bytes, int64_t) override {
        meeting_.take(rank_, to, rank_ * bytes, from, bytes);
    }
    void gather(const std::byte* mine, std::byte* all, int64_t bytes, int64_t) override {
        meeting_.take(rank_, mine, 0, all, bytes);
    }
    void shift(const Shift&, int64_t) override { FAIL() << "nothing goes round"; }

private:
    Meeting& meeting_;
    const int rank_;
};

struct Case {
    const char* name;
    Shape shape;
    std::vector<std::string> freeze{};
    int64_t head_tile = 5, mlp_tile = 0;
    friend void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }
};

using Values = std::vector<std::vector<float>>;  // of each layer

// Large enough that every term matters.
Values weights_of(const Shape& shape, const std::vector<Layer>& layers) {
    Values all;
    for (const Layer& layer : layers) {
        std::vector<float>& w = all.emplace_back(static_cast<size_t>(layer.elements));
        initialise(shape, layer, 3, 0, w);
        for (const Tensor& t : layer.tensors) {
            for (int64_t i = 0; i < t.count; ++i) {
                float& x = w[static_cast<size_t>(t.offset + i)];
                const uint32_t element = static_cast<uint32_t>(i);
                const float noise = philox_normal({1, Purpose::test},
                                                  {0, 0, static_cast<uint32_t>(t.role), element});
                x = t.shape.size() == 1 ? x + 0.3f * noise : x * 15;
            }
        }
    }
    return all;
}

// Calls each(element of the slice's layer, element of the whole's) for all that the slice has.
template <class Each>
void for_elements(const Layer& slice, const Layer& whole, bool trainable, const Each& each) {
    for (const Tensor& t : slice.tensors) {
        if (trainable && !t.trainable) continue;
        for (const SliceRun& run : runs_of(t, 0, t.count)) {
            for (int64_t i = 0; i < run.count; ++i)
                each(static_cast<size_t>(t.offset + run.at + i),
                     static_cast<size_t>(whole.find(t.role)->offset + run.from + i));
        }
    }
}

struct Found {
    double loss = 0, evaluated = 0;
    Values gradients{};
    std::vector<float> logits{};
};

class OneRank {
public:
    OneRank(std::unique_ptr<ops::Ops> ops, const Shape& slice, const Numerics& numerics,
            std::vector<Layer> layers, Values weights, KernelRanks* ranks)
        : ops_(std::move(ops)),
          decoder_(slice, numerics, std::move(layers), *ops_, {.slices = ranks}),
          weights_(std::move(weights)) {}

    Found step(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
        const Shape& shape = decoder_.shape();
        const auto blocks = static_cast<size_t>(shape.layers), last = blocks + 1;
        const auto floats = static_cast<size_t>(decoder_.activation_bytes() / 4);
        Values x(blocks + 1, std::vector<float>(floats));
        std::vector<float> dx(floats);
        std::vector<std::byte> scratch(static_cast<size_t>(decoder_.scratch_bytes()) + 64);
        std::byte* room =
            scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
        Found found;
        for (const Layer& layer : decoder_.layers())
            found.gradients.emplace_back(static_cast<size_t>(layer.trainable_elements));
        const auto gradient = [&](size_t layer) {
            auto& its = found.gradients[layer];
            return its.empty() ? nullptr : its.data();
        };
        const bool tied = shape.tie_embeddings;
        const float* table = tied ? weights_[0].data() : nullptr;
        uint32_t nonfinite = 0;
        decoder_.embed(tokens.data(), weights_[0].data(), x[0].data(), room);
        for (size_t b = 0; b < blocks; ++b)
            decoder_.forward(static_cast<int64_t>(b), weights_[b + 1].data(), x[b].data(),
                             x[b + 1].data(), &nonfinite, room);
        EXPECT_EQ(nonfinite, 0U);
        found.logits.resize(tokens.size() * static_cast<size_t>(shape.vocab));
        decoder_.head_loss(
            weights_[last].data(), table, x[blocks].data(), targets.data(), &found.evaluated, room,
            [&](int64_t first, int64_t column, ops::ConstView logits) {
                for (int64_t t = 0; t < logits.rows; ++t)
                    std::memcpy(
                        &found.logits[static_cast<size_t>((first + t) * shape.vocab + column)],
                        logits.row_range(t, 1).data, static_cast<size_t>(logits.cols * 4));
            });
        decoder_.head(weights_[last].data(), table, x[blocks].data(), targets.data(), 0.1f,
                      dx.data(), gradient(last), tied ? gradient(0) : nullptr, &found.loss, room);
        for (size_t b = blocks; b-- > 0;)
            decoder_.backward(static_cast<int64_t>(b), weights_[b + 1].data(), x[b].data(),
                              dx.data(), true, gradient(b + 1), room);
        if (gradient(0) != nullptr) {
            // Apart, as the padding token's row holds nothing but what was looked up.
            std::vector<float> looked_up(found.gradients[0].size());
            decoder_.embed_backward(tokens.data(), dx.data(), looked_up.data(), room);
            for (size_t i = 0; i < looked_up.size(); ++i) found.gradients[0][i] += looked_up[i];
        }
        return found;
    }

private:
    std::unique_ptr<ops::Ops> ops_;
    Decoder decoder_;
    const Values weights_;
};

class SharedTensors : public testing::TestWithParam<std::tuple<Case, int, DeviceKind>> {
protected:
    void SetUp() override {
        if (!ops()) GTEST_SKIP() << "no GPU, or built without CUDA";
    }
    static bool on_gpu() { return std::get<2>(GetParam()) == DeviceKind::cuda; }
    static std::unique_ptr<ops::Ops> ops() {
        std::string why;
        return on_gpu() ? ops::make_mirrored_ops(why) : ops::make_reference_ops();
    }
    static constexpr int64_t kSequence = 7, kSequences = 2;
    const Case& of() const { return std::get<0>(GetParam()); }
    int ranks() const { return std::get<1>(GetParam()); }
    Numerics numerics(int slices, int slice) const {
        return {.sequence = kSequence,
                .micro_batch = kSequences,
                .slices = slices,
                .slice = slice,
                .key_holders = key_holders_of(of().shape, slices),
                .head_tile = of().head_tile,
                .mlp_tile = of().mlp_tile};
    }
    std::vector<Layer> layers(int slices, int slice) const {
        return layers_of(of().shape, of().freeze, false, 1, {}, {}, {slices, slice});
    }
};

TEST_P(SharedTensors, GiveTheLossLogitsAndGradientsOfOne) {
    const Shape& shape = of().shape;
    const std::vector<Layer> whole = layers(1, 0);
    const Values weights = weights_of(shape, whole);
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < kSequence * kSequences; ++i) {
        tokens.push_back(static_cast<int32_t>((i * i * 5 + i) % shape.vocab));
        targets.push_back(i % 4 == 2 ? -1 : static_cast<int32_t>((i * 11 + 3) % shape.vocab));
    }
    const Found one =
        OneRank(ops(), shape, numerics(1, 0), whole, weights, nullptr).step(tokens, targets);
    Meeting meeting(ranks());
    std::vector<Found> found(static_cast<size_t>(ranks()));
    std::vector<std::vector<Layer>> sliced;
    for (int rank = 0; rank < ranks(); ++rank) sliced.push_back(layers(ranks(), rank));
    std::vector<std::unique_ptr<ops::Ops>> theirs;
    for (int rank = 0; rank < ranks(); ++rank) theirs.push_back(ops());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks(); ++rank) {
        threads.emplace_back([&, rank] {
            const auto& own = sliced[static_cast<size_t>(rank)];
            Values slices;
            for (size_t l = 0; l < own.size(); ++l) {
                auto& values = slices.emplace_back(static_cast<size_t>(own[l].elements));
                for_elements(own[l], whole[l], false,
                             [&](size_t at, size_t from) { values[at] = weights[l][from]; });
            }
            MeetingRank its(meeting, rank);
            OneRank run(std::move(theirs[static_cast<size_t>(rank)]),
                        slice_of(shape, {ranks(), rank}), numerics(ranks(), rank), own,
                        std::move(slices), &its);
            found[static_cast<size_t>(rank)] = run.step(tokens, targets);
        });
    }
    for (std::thread& thread : threads) thread.join();
    const double rounding = on_gpu() ? 1e-4 : 1e-5;
    for (int rank = 0; rank < ranks(); ++rank) {
        SCOPED_TRACE(testing::Message() << "rank " << rank);
        const Found& its = found[static_cast<size_t>(rank)];
        EXPECT_EQ(its.loss, found[0].loss);
        EXPECT_EQ(its.evaluated, its.loss);
        EXPECT_NEAR(its.loss, one.loss, rounding * one.loss);
        for (size_t i = 0; i < one.logits.size(); ++i)
            ASSERT_NEAR(its.logits[i], one.logits[i], 10 * rounding) << i;
        for (size_t l = 0; l < whole.size(); ++l) {
            double apart = 0, all = 0;
            for_elements(sliced[static_cast<size_t>(rank)][l], whole[l], true,
                         [&](size_t at, size_t from) {
                             const double a = its.gradients[l][at], b = one.gradients[l][from];
                             apart += (a - b) * (a - b);
                             all += b * b;
                         });
            EXPECT_LE(std::sqrt(apart), rounding * std::sqrt(all)) << "layer " << l;
        }
    }
}

Shape llama() {
    return {.hidden = 12,
            .layers = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = 6,
            .intermediate = 21,
            .vocab = 19};
}
Shape tied() {
    Shape shape = llama();
    shape.tie_embeddings = true;
    shape.padding_token = 16;
    return shape;
}
Shape qwen() {
    Shape shape = llama();
    shape.family = Family::qwen3;
    shape.head_norms = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
    return shape;
}
Shape gpt2() {
    Shape shape = llama();
    shape.family = Family::gpt2;
    shape.kv_heads = 4;
    shape.gated = false;
    shape.tie_embeddings = true;
    shape.layer_norm = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
    shape.learned_positions = 9;
    return shape;
}

INSTANTIATE_TEST_SUITE_P(
    of, SharedTensors,
    testing::Combine(testing::Values(Case{"plain", llama()}, Case{"tied", tied()},
                                     Case{"norms_and_biases", qwen()}, Case{"gpt2", gpt2()},
                                     Case{"tiles", qwen(), {}, 3, 4},
                                     Case{"frozen", llama(), {"*lm_head*", "*.1.*norm*"}},
                                     Case{"frozen_table", gpt2(), {"*wte*"}}),
                     testing::Values(2, 4), testing::Values(DeviceKind::cpu, DeviceKind::cuda)),
    [](const auto& one) {
        return std::string(std::get<0>(one.param).name) + "_on_" +
               std::to_string(std::get<1>(one.param)) + "_" +
               std::string(name_of(std::get<2>(one.param)));
    });

}  // namespace
}  // namespace ferry::model
