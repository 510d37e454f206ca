// Slices of tensors: together they are the model, whatever heads and ranks do not divide.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ferry/error.h"
#include "model/model.h"

namespace ferry::model {
namespace {

Shape llama(int64_t heads, int64_t kv_heads, int64_t intermediate) {
    return {.hidden = 24,
            .layers = 1,
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = 4,
            .intermediate = intermediate,
            .vocab = 37};
}

Shape qwen(int64_t heads, int64_t kv_heads) {
    Shape shape = llama(heads, kv_heads, 40);
    shape.family = Family::qwen3;
    shape.head_norms = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
    return shape;
}

Shape gpt2(int64_t heads) {
    Shape shape = llama(heads, heads, 50);
    shape.family = Family::gpt2;
    shape.gated = false;
    shape.layer_norm = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
    shape.learned_positions = 9;
    return shape;
}

Shape with_padding(Shape shape) {
    shape.padding_token = 25;
    return shape;
}

struct Setting {
    const char* name;
    Shape shape;
    int ranks;
    friend void PrintTo(const Setting& s, std::ostream* out) { *out << s.name; }
};

std::vector<float> initial(const Shape& shape, const Layer& layer, int64_t first, int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    initialise(shape, layer, 5, first, values);
    return values;
}

class Slices : public testing::TestWithParam<Setting> {
protected:
    std::vector<Layer> layers(int rank) const {
        return layers_of(GetParam().shape, {}, false, 1, {}, {}, {GetParam().ranks, rank});
    }
};

TEST_P(Slices, AreTheModelEveryElementAsOftenAsItIsHeld) {
    const auto& [name, shape, ranks] = GetParam();
    const auto whole = layers_of(shape, {}, false);
    for (size_t l = 0; l < whole.size(); ++l) {
        for (const Tensor& t : whole[l].tensors) {
            SCOPED_TRACE(t.name);
            const std::vector<float> values = initial(shape, whole[l], t.offset, t.count);
            std::vector<int> held(values.size());
            int holders = 0;
            for (int rank = 0; rank < ranks; ++rank) {
                const Layer layer = layers(rank)[l];
                const Tensor& slice = *layer.find(t.role);
                EXPECT_EQ(slice.whole_shape(), t.shape);
                EXPECT_EQ(slice.whole_count(), t.count);
                holders = slice.holders;
                const std::vector<float> own = initial(shape, layer, slice.offset, slice.count);
                std::vector<float> rest = own;
                for (const SliceRun& run : runs_of(slice, 0, slice.count)) {
                    for (int64_t i = 0; i < run.count; ++i) {
                        const auto at = static_cast<size_t>(run.at + i),
                                   from = static_cast<size_t>(run.from + i);
                        ASSERT_EQ(own[at], values[from]) << "rank " << rank << ", element " << from;
                        ++held[from];
                        rest[at] = 0;
                    }
                }
                EXPECT_THAT(rest, testing::Each(0.0f));  // padding
            }
            EXPECT_THAT(held, testing::Each(holders));
        }
    }
}

TEST_P(Slices, LieAlikeOnAllRanksAndWhatSeveralHoldLiesApart) {
    const auto first = layers(0);
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
        const auto own = layers(rank);
        for (size_t l = 0; l < own.size(); ++l) {
            EXPECT_EQ(own[l].elements, first[l].elements);
            ASSERT_EQ(own[l].tensors.size(), first[l].tensors.size());
            for (size_t i = 0; i < own[l].tensors.size(); ++i) {
                const Tensor &a = own[l].tensors[i], &b = first[l].tensors[i];
                EXPECT_EQ(a.offset, b.offset) << a.name;
                EXPECT_EQ(a.shape, b.shape) << a.name;
                for (const Segment& s : own[l].segments) {
                    const bool inside = a.offset >= s.offset && a.offset < s.offset + s.count;
                    if (inside) {
                        EXPECT_EQ(s.holders, a.holders) << a.name;
                    }
                }
            }
        }
    }
}

// From any element on: chunks begin where they like.
TEST_P(Slices, AreCutAnywhere) {
    for (const Layer& layer : layers(GetParam().ranks - 1)) {
        const std::vector<float> all = initial(GetParam().shape, layer, 0, layer.elements);
        for (const int64_t first : {1, 17, 400, 4095}) {
            const int64_t count = std::min<int64_t>(333, layer.elements - first);
            const std::vector<float> part = initial(GetParam().shape, layer, first, count);
            for (int64_t i = 0; i < count; ++i)
                ASSERT_EQ(part[static_cast<size_t>(i)], all[static_cast<size_t>(first + i)]);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(of, Slices,
                         testing::Values(Setting{"Alone", llama(6, 3, 40), 1},
                                         Setting{"Even", llama(8, 4, 40), 2},
                                         Setting{"ThreeHeadsOfKeysOnTwo", llama(6, 3, 41), 2},
                                         Setting{"FiveHeadsOnFour", llama(5, 5, 13), 4},
                                         Setting{"AHeadOfKeysOnTwo", qwen(8, 2), 4},
                                         Setting{"OneHeadOfKeysOnAll", llama(6, 1, 40), 3},
                                         Setting{"NormsAndBiases", qwen(6, 3), 3},
                                         Setting{"PaddingToken", with_padding(qwen(6, 3)), 3},
                                         Setting{"InputMajor", gpt2(4), 2},
                                         Setting{"InputMajorUneven", gpt2(5), 3}),
                         [](const auto& setting) { return setting.param.name; });

std::string refusal(const Shape& shape, int ranks) {
    try {
        require_slices(shape, ranks);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return error.what();
    }
    return "";
}

TEST(Slices, ThatCannotBeAreRefusedWithWhatCan) {
    EXPECT_EQ(refusal(llama(14, 2, 40), 2), "");
    EXPECT_EQ(refusal(llama(28, 2, 40), 4), "");
    EXPECT_THAT(refusal(llama(14, 2, 40), 4), testing::HasSubstr("set parallel.tensor to 2"));
    EXPECT_THAT(refusal(llama(6, 3, 40), 4), testing::HasSubstr("set parallel.tensor to 3"));
    EXPECT_THAT(refusal(llama(4, 4, 40), 8), testing::HasSubstr("than it has heads"));
    EXPECT_THAT(refusal(llama(8, 8, 5), 8), testing::HasSubstr("than it is wide"));
    Shape few = llama(8, 8, 40);
    few.vocab = 3;
    EXPECT_THAT(refusal(few, 4), testing::HasSubstr("vocabulary than it has tokens"));
    EXPECT_THAT(refusal(few, 4), testing::HasSubstr("set parallel.tensor to 3 or less"));
}

}  // namespace
}  // namespace ferry::model
