// Decoders that have a slice of each tensor, one a thread: together they are the whole one. On a
// GPU too, which all of them share.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.h"
#include "ferry/units.h"
#include "model/gradients.h"
#include "model/model.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::model {
namespace {

// Where the ranks leave what the others take.
class Meeting {
public:
    explicit Meeting(int ranks) : ranks_(ranks), met_(ranks), given_(static_cast<size_t>(ranks)) {}

    int ranks() const { return ranks_; }
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
        count(bytes);
        meeting_.take(rank_, to, rank_ * bytes, from, bytes);
    }
    void gather(const std::byte* mine, std::byte* all, int64_t bytes, int64_t) override {
        count(bytes);
        meeting_.take(rank_, mine, 0, all, bytes);
    }
    void shift(const Shift&, int64_t) override { FAIL() << "nothing goes round"; }

    struct Sent {
        int64_t bytes = 0, calls = 0;
        bool operator==(const Sent&) const = default;
    };
    // That a rank sends since it was asked last.
    Sent sent() { return std::exchange(sent_, {}); }

private:
    void count(int64_t bytes) {
        sent_.bytes += (meeting_.ranks() - 1) * bytes;
        ++sent_.calls;
    }
    Meeting& meeting_;
    const int rank_;
    Sent sent_{};
};

struct Case {
    const char* name;
    Shape shape;
    std::vector<std::string> freeze{};
    int64_t head_tile = 5, mlp_tile = 0;
    DType type = DType::f32;  // of weights, products and the residual stream
    int64_t sequence = 7;
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
    int64_t stream_bytes = 0;
    Exchanges planned{};
    MeetingRank::Sent embed{}, forward{}, evaluate{}, head{}, backward{}, embed_backward{};
};

// How a rank steps: weights' gradients come in backward, or behind all else; and gradients start
// at zeros, or count as zeros and hold none.
struct Way {
    bool defers = false, fresh = false;
};

class OneRank {
public:
    OneRank(std::unique_ptr<ops::Ops> ops, const Shape& slice, const Numerics& numerics,
            std::vector<Layer> layers, Values weights, MeetingRank* ranks)
        : ranks_(ranks),
          ops_(std::move(ops)),
          decoder_(slice, numerics, std::move(layers), *ops_, {.slices = ranks}),
          weights_(std::move(weights)) {
        if (numerics.compute == DType::f32) return;
        for (const auto& layer : weights_) {
            auto& narrow = narrow_.emplace_back();
            for (const float w : layer) narrow.push_back(to_bf16(w));
        }
    }

    Found step(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets,
               const Way& way) {
        const Shape& shape = decoder_.shape();
        const auto blocks = static_cast<size_t>(shape.layers), last = blocks + 1;
        const auto bytes = static_cast<size_t>(decoder_.activation_bytes());
        std::vector<std::vector<std::byte>> x(blocks + 1, std::vector<std::byte>(bytes));
        std::vector<std::byte> dx(bytes);
        const auto aligned = [](std::vector<std::byte>& of, int64_t count) {
            of.resize(static_cast<size_t>(count) + 64, std::byte{0x55});
            return of.data() + (64 - reinterpret_cast<uintptr_t>(of.data()) % 64) % 64;
        };
        std::vector<std::byte> scratch;
        std::byte* room = aligned(scratch, decoder_.scratch_bytes());
        Found found{.stream_bytes = decoder_.activation_bytes(), .planned = decoder_.exchanges()};
        const bool tied = shape.tie_embeddings;
        for (const Layer& layer : decoder_.layers()) {
            // What is looked up is added to, and adds to few rows.
            const bool starts_at_zeros = !way.fresh || (found.gradients.empty() && !tied);
            found.gradients.emplace_back(
                static_cast<size_t>(layer.trainable_elements),
                starts_at_zeros ? 0.0f : std::numeric_limits<float>::quiet_NaN());
        }
        const auto gradient = [&](size_t layer) {
            auto& its = found.gradients[layer];
            return ops::Accumulator(its.empty() ? nullptr : its.data(), way.fresh);
        };
        const void* table = tied ? at(0) : nullptr;
        uint32_t nonfinite = 0;
        decoder_.embed(tokens.data(), at(0), x[0].data(), room);
        found.embed = sent();
        for (size_t b = 0; b < blocks; ++b) {
            decoder_.forward(static_cast<int64_t>(b), at(b + 1), x[b].data(), x[b + 1].data(),
                             &nonfinite, room);
            found.forward = sent();
        }
        EXPECT_EQ(nonfinite, 0U);
        found.logits.resize(tokens.size() * static_cast<size_t>(shape.vocab));
        decoder_.head_loss(at(last), table, x[blocks].data(), targets.data(), &found.evaluated,
                           room);
        found.evaluate = sent();
        found.evaluated = 0;
        decoder_.head_loss(
            at(last), table, x[blocks].data(), targets.data(), &found.evaluated, room,
            [&](int64_t first, int64_t column, ops::ConstView logits) {
                for (int64_t t = 0; t < logits.rows; ++t)
                    std::memcpy(
                        &found.logits[static_cast<size_t>((first + t) * shape.vocab + column)],
                        logits.row_range(t, 1).data, static_cast<size_t>(logits.cols * 4));
            });
        sent();
        decoder_.head(at(last), table, x[blocks].data(), targets.data(), 0.1f, dx.data(),
                      gradient(last), tied ? gradient(0) : ops::Accumulator(), &found.loss, room);
        found.head = sent();
        struct Deferred {
            std::vector<std::byte> memory{};
            std::byte* products = nullptr;
            std::vector<float> norms{};
        };
        std::vector<Deferred> left(blocks);
        for (size_t b = blocks; b-- > 0;) {
            const auto block = static_cast<int64_t>(b);
            if (way.defers) {
                Deferred& its = left[b];
                its.products = aligned(its.memory, decoder_.deferred_bytes());
                its.norms.resize(static_cast<size_t>(norm_elements(decoder_.layers()[b + 1])));
                decoder_.input_gradients(block, at(b + 1), x[b].data(), dx.data(), true,
                                         its.norms.data(), room, {}, {}, its.products);
            } else {
                decoder_.backward(block, at(b + 1), x[b].data(), dx.data(), true, gradient(b + 1),
                                  room);
            }
            found.backward = sent();
        }
        std::ranges::fill(scratch, std::byte{0x55});
        for (size_t b = 0; b < blocks && way.defers; ++b)
            decoder_.weight_gradients(static_cast<int64_t>(b), true, gradient(b + 1), room, {},
                                      left[b].products, left[b].norms.data());
        EXPECT_EQ(sent(), MeetingRank::Sent{}) << "weights' gradients need nobody";
        if (gradient(0).asked()) {
            // Apart, as the padding token's row holds nothing but what was looked up.
            std::vector<float> looked_up(found.gradients[0].size());
            decoder_.embed_backward(tokens.data(), dx.data(), looked_up.data(), room);
            for (size_t i = 0; i < looked_up.size(); ++i) found.gradients[0][i] += looked_up[i];
        }
        found.embed_backward = sent();
        return found;
    }

private:
    const void* at(size_t layer) const {
        if (narrow_.empty()) return weights_[layer].data();
        return narrow_[layer].data();
    }
    MeetingRank::Sent sent() { return ranks_ ? ranks_->sent() : MeetingRank::Sent{}; }

    MeetingRank* const ranks_;
    std::unique_ptr<ops::Ops> ops_;
    Decoder decoder_;
    const Values weights_;
    std::vector<std::vector<uint16_t>> narrow_{};
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
    static constexpr int64_t kSequences = 2;
    int64_t token_count() const { return of().sequence * kSequences; }
    const Case& of() const { return std::get<0>(GetParam()); }
    int ranks() const { return std::get<1>(GetParam()); }
    Numerics numerics(int slices, int slice) const {
        return {.sequence = of().sequence,
                .micro_batch = kSequences,
                .slices = slices,
                .slice = slice,
                .key_holders = key_holders_of(of().shape, slices),
                .head_tile = of().head_tile,
                .mlp_tile = of().mlp_tile,
                .compute = of().type,
                .residual = of().type,
                .wire = of().type};
    }
    std::vector<Layer> layers(int slices, int slice) const {
        return layers_of(of().shape, of().freeze, false, 1, {}, {}, {slices, slice});
    }
    // Every rank's, of the same step.
    std::vector<Found> run_ranks(const std::vector<std::vector<Layer>>& sliced,
                                 const Way& way = {}) {
        const std::vector<Layer> whole = layers(1, 0);
        const Values weights = weights_of(of().shape, whole);
        Meeting meeting(ranks());
        std::vector<Found> found(static_cast<size_t>(ranks()));
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
                            slice_of(of().shape, {ranks(), rank}), numerics(ranks(), rank), own,
                            std::move(slices), &its);
                found[static_cast<size_t>(rank)] = run.step(tokens(), targets(), way);
            });
        }
        for (std::thread& thread : threads) thread.join();
        return found;
    }
    std::vector<std::vector<Layer>> slices() const {
        std::vector<std::vector<Layer>> sliced;
        for (int rank = 0; rank < ranks(); ++rank) sliced.push_back(layers(ranks(), rank));
        return sliced;
    }
    std::vector<int32_t> tokens() const {
        std::vector<int32_t> found;
        for (int64_t i = 0; i < token_count(); ++i)
            found.push_back(static_cast<int32_t>((i * i * 5 + i) % of().shape.vocab));
        return found;
    }
    std::vector<int32_t> targets() const {
        std::vector<int32_t> found;
        for (int64_t i = 0; i < token_count(); ++i)
            found.push_back(i % 4 == 2 ? -1
                                       : static_cast<int32_t>((i * 11 + 3) % of().shape.vocab));
        return found;
    }
};

TEST_P(SharedTensors, GiveTheLossLogitsAndGradientsOfOne) {
    const Shape& shape = of().shape;
    const std::vector<Layer> whole = layers(1, 0);
    const Found one =
        OneRank(ops(), shape, numerics(1, 0), whole, weights_of(shape, whole), nullptr)
            .step(tokens(), targets(), {});
    const std::vector<std::vector<Layer>> sliced = slices();
    const std::vector<Found> found = run_ranks(sliced);
    // In bf16 a part of a sum is rounded, which one rank's sum is not.
    const bool narrow = of().type == DType::bf16;
    const double rounding = on_gpu() ? 1e-4 : 1e-5;
    const double of_loss = narrow ? 2e-2 : rounding, of_gradient = narrow ? 5e-2 : rounding;
    for (int rank = 0; rank < ranks(); ++rank) {
        SCOPED_TRACE(testing::Message() << "rank " << rank);
        const Found& its = found[static_cast<size_t>(rank)];
        EXPECT_EQ(its.loss, found[0].loss);
        EXPECT_EQ(its.evaluated, its.loss);
        EXPECT_NEAR(its.loss, one.loss, of_loss * one.loss);
        for (size_t i = 0; i < one.logits.size(); ++i)
            ASSERT_NEAR(its.logits[i], one.logits[i], narrow ? 0.5 : 10 * rounding) << i;
        for (size_t l = 0; l < whole.size(); ++l) {
            double apart = 0, all = 0;
            for_elements(sliced[static_cast<size_t>(rank)][l], whole[l], true,
                         [&](size_t at, size_t from) {
                             const double a = its.gradients[l][at], b = one.gradients[l][from];
                             apart += (a - b) * (a - b);
                             all += b * b;
                         });
            EXPECT_LE(std::sqrt(apart), of_gradient * std::sqrt(all)) << "layer " << l;
        }
    }
}

TEST_P(SharedTensors, GiveTheSameBitsWhereWeightsGradientsComeLater) {
    const std::vector<std::vector<Layer>> sliced = slices();
    const std::vector<Found> at_once = run_ranks(sliced),
                             later = run_ranks(sliced, {.defers = true});
    for (size_t rank = 0; rank < at_once.size(); ++rank)
        EXPECT_EQ(later[rank].gradients, at_once[rank].gradients) << "rank " << rank;
}

// Every element is written, padding too, and where a rank has no rows of its own.
TEST_P(SharedTensors, CountFreshGradientsAsZeros) {
    const std::vector<std::vector<Layer>> sliced = slices();
    const std::vector<Found> added = run_ranks(sliced);
    for (const bool defers : {false, true}) {
        SCOPED_TRACE(defers);
        const std::vector<Found> written = run_ranks(sliced, {.defers = defers, .fresh = true});
        for (size_t rank = 0; rank < added.size(); ++rank)
            EXPECT_EQ(written[rank].gradients, added[rank].gradients) << "rank " << rank;
    }
}

// Those of a norm are sums of all ranks' rows, in one order on each of them.
TEST_P(SharedTensors, HaveTheSameBitsOfWhatEachOfThemHolds) {
    const std::vector<std::vector<Layer>> sliced = slices();
    const std::vector<Found> found = run_ranks(sliced);
    for (int rank = 1; rank < ranks(); ++rank) {
        const auto r = static_cast<size_t>(rank);
        for (size_t l = 0; l < sliced[r].size(); ++l) {
            for (const Tensor& tensor : sliced[r][l].tensors) {
                if (tensor.is_slice() || !tensor.trainable) continue;
                for (int64_t i = 0; i < tensor.count; ++i) {
                    const auto at = static_cast<size_t>(tensor.offset + i);
                    ASSERT_EQ(found[r].gradients[l][at], found[0].gradients[l][at])
                        << tensor.name << ", rank " << rank;
                }
            }
        }
    }
}

TEST_P(SharedTensors, HoldAndSendWhatIsPlanned) {
    const std::vector<std::vector<Layer>> sliced = slices();
    const int64_t rows = ceil_div(token_count(), int64_t{ranks()});
    for (const Found& its : run_ranks(sliced)) {
        EXPECT_EQ(its.stream_bytes, rows * of().shape.hidden * size_of(of().type));
        if (!of().freeze.empty()) continue;  // what is planned is of layers that train
        const auto planned = [](const BlockExchanges& of, bool back) -> MeetingRank::Sent {
            return {of.bytes(back), of.calls(back)};
        };
        EXPECT_EQ(its.embed, planned(its.planned.embedding, false));
        EXPECT_EQ(its.embed_backward, planned(its.planned.embedding, true));
        EXPECT_EQ(its.forward, planned(its.planned.block, false));
        EXPECT_EQ(its.backward, planned(its.planned.block, true));
        EXPECT_EQ(its.evaluate, planned(its.planned.head, false));
        EXPECT_EQ(its.head, planned(its.planned.head, true));
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

std::string text_of(const testing::TestParamInfo<std::tuple<Case, int, DeviceKind>>& one) {
    return std::string(std::get<0>(one.param).name) + "_on_" +
           std::to_string(std::get<1>(one.param)) + "_" +
           std::string(name_of(std::get<2>(one.param)));
}
const auto kDevices = testing::Values(DeviceKind::cpu, DeviceKind::cuda);

INSTANTIATE_TEST_SUITE_P(
    of, SharedTensors,
    testing::Combine(testing::Values(Case{"plain", llama()}, Case{"tied", tied()},
                                     Case{"norms_and_biases", qwen()}, Case{"gpt2", gpt2()},
                                     Case{"tiles", qwen(), {}, 3, 4},
                                     Case{"frozen", llama(), {"*lm_head*", "*.1.*norm*"}},
                                     Case{"frozen_table", gpt2(), {"*wte*"}}),
                     testing::Values(2, 4), kDevices),
    text_of);

Shape many_keys(Shape shape) {
    shape.kv_heads = shape.heads;
    return shape;
}

// Ranks that divide neither heads nor rows.
INSTANTIATE_TEST_SUITE_P(uneven, SharedTensors,
                         testing::Combine(testing::Values(Case{"gpt2", gpt2()},
                                                          Case{
                                                              "tiles", many_keys(qwen()), {}, 3, 4},
                                                          Case{"tied", many_keys(tied())}),
                                          testing::Values(3), kDevices),
                         text_of);

// The last rank has no rows of six tokens.
INSTANTIATE_TEST_SUITE_P(
    few_rows, SharedTensors,
    testing::Combine(testing::Values(Case{"gpt2", gpt2(), {}, 5, 0, DType::f32, 3},
                                     Case{"norms_and_biases", qwen(), {}, 3, 4, DType::f32, 3}),
                     testing::Values(4), kDevices),
    text_of);

// Rows of what is multiplied have room behind them for a bias.
INSTANTIATE_TEST_SUITE_P(
    narrow, SharedTensors,
    testing::Combine(testing::Values(Case{"norms_and_biases", qwen(), {}, 3, 4, DType::bf16},
                                     Case{"gpt2", gpt2(), {}, 5, 0, DType::bf16}),
                     testing::Values(2, 4), kDevices),
    text_of);

}  // namespace
}  // namespace ferry::model
