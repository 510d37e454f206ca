#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "model/model.h"

namespace ferry::model {
namespace {

Shape small(bool tied) {
    return {.hidden = 48,
            .layers = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = 12,
            .intermediate = 100,
            .vocab = 31,
            .tie_embeddings = tied};
}

const Tensor& tensor(const Layer& layer, Role role) {
    const Tensor* found = layer.find(role);
    FERRY_CHECK(found != nullptr);
    return *found;
}

std::vector<Layer> layers(bool tied, std::vector<std::string> freeze = {},
                          bool decay_norms = false) {
    return layers_of(small(tied), freeze, decay_norms);
}

// Tensors lie inside segments of their own fate, in order, without overlap; segments are padded.
void check_layout(const Layer& layer) {
    int64_t end = 0, trainable = 0, last = 0;
    for (const Segment& s : layer.segments) {
        EXPECT_EQ(s.offset, end);
        EXPECT_EQ(s.count % 4096, 0);
        end += s.count;
        if (s.trainable) trainable = end;
        for (const Tensor& t : layer.tensors) {
            if (t.offset < s.offset || t.offset >= s.offset + s.count) continue;
            EXPECT_EQ(t.trainable, s.trainable);
            EXPECT_EQ(t.decays, s.decays);
            EXPECT_LE(t.offset + t.count, s.offset + s.count);
            EXPECT_GE(t.offset, last);
            last = t.offset + t.count;
        }
    }
    EXPECT_EQ(layer.elements, end);
    EXPECT_EQ(layer.trainable_elements, trainable);
}

TEST(Layers, a_block_is_one_buffer_with_its_norms_apart) {
    const auto all = layers(false);
    ASSERT_EQ(all.size(), 4u);
    for (const Layer& l : all) check_layout(l);
    const Layer& block = all[2];
    EXPECT_EQ(block.index, 1);
    EXPECT_EQ(block.tensors.size(), 9u);
    ASSERT_EQ(block.segments.size(), 2u);
    EXPECT_TRUE(block.segments[0].decays);
    EXPECT_FALSE(block.segments[1].decays);
    EXPECT_EQ(tensor(block, Role::key).offset, 48 * 48);
    EXPECT_EQ(tensor(block, Role::value).offset, 48 * 48 + 24 * 48);
    EXPECT_EQ(tensor(block, Role::up).offset, tensor(block, Role::gate).offset + 48 * 100);
    EXPECT_EQ(tensor(block, Role::query).name, "model.layers.1.self_attn.q_proj.weight");
}

TEST(Layers, norms_decay_when_asked) {
    const Layer block = layers(false, {}, true)[1];
    EXPECT_EQ(block.segments.size(), 1u);
    EXPECT_TRUE(tensor(block, Role::attention_norm).decays);
}

TEST(Layers, a_tied_head_has_the_norm_alone) {
    EXPECT_EQ(layers(true).back().tensors.size(), 1u);
    EXPECT_EQ(layers(false).back().tensors.size(), 2u);
}

TEST(Layers, frozen_tensors_come_last_and_q_k_v_stay_together) {
    const auto all = layers(false, {"*.1.self_attn.?_proj.weight", "model.embed*"});
    for (const Layer& l : all) check_layout(l);
    EXPECT_EQ(all[0].trainable_elements, 0);
    EXPECT_EQ(all[1].trainable_elements, all[1].elements);
    const Layer& block = all[2];
    ASSERT_EQ(block.segments.size(), 3u);
    EXPECT_FALSE(block.segments[2].trainable);
    const Tensor &q = tensor(block, Role::query), &k = tensor(block, Role::key);
    EXPECT_EQ(q.offset, block.trainable_elements);
    EXPECT_EQ(k.offset, q.offset + q.count);
}

TEST(Layers, a_pattern_without_a_match_is_an_error) {
    try {
        layers(true, {"lm_head*"});
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.trouble(), Trouble::usage);
        EXPECT_NE(std::string(e.what()).find("lm_head*"), std::string::npos) << e.what();
    }
}

bool freezes_q_proj(const std::string& pattern) {
    try {
        const Layer block = layers(false, {pattern})[1];
        return !tensor(block, Role::query).trainable;
    } catch (const Error& e) {
        EXPECT_EQ(e.problem().what, "freeze pattern matches no tensor");
        return false;
    }
}

TEST(Layers, a_star_stands_for_any_run_and_a_question_mark_for_one_character) {
    const std::string name = "model.layers.0.self_attn.q_proj.weight";
    for (const std::string& pattern :
         {name, "*" + name, name + "*", "**" + name + "**", std::string("*"),
          std::string("*q_proj*"), std::string("model*.?.*proj.weight"),
          std::string("*l*l*?.*proj*t"), std::string("*.weight"), std::string(name.size(), '?'),
          std::string(name.size() - 1, '?') + "*?"})
        EXPECT_TRUE(freezes_q_proj(pattern)) << pattern;
    for (const std::string& pattern :
         {std::string("?"), name + "?", "?" + name, name.substr(1), std::string("*q_proj"),
          std::string("model*.?.?proj.weight"), std::string("*weight*weight"),
          std::string(name.size() + 1, '?'), std::string(name.size(), '?') + "*?"})
        EXPECT_FALSE(freezes_q_proj(pattern)) << pattern;
}

// Trying each way in which stars can share a name takes years.
TEST(Layers, a_pattern_of_many_stars_is_judged_at_once) {
    std::string any;
    for (int i = 0; i < 20; ++i) any += "*?";
    EXPECT_FALSE(freezes_q_proj(any + "!"));
    EXPECT_FALSE(freezes_q_proj(std::string(1000, '*') + "!"));
    EXPECT_TRUE(freezes_q_proj(any + std::string(1000, '*') + "t"));
}

std::vector<float> initial(const Layer& layer, uint32_t seed = 7) {
    std::vector<float> out(static_cast<size_t>(layer.elements), 9.0f);
    initialise(small(false), layer, seed, 0, out);
    return out;
}

TEST(Initialise, any_part_gives_the_same_values_and_padding_is_zero) {
    const Layer layer = layers(false)[1];
    const auto whole = initial(layer);
    for (const auto& [first, count] : {std::pair{0, 1}, {2300, 700}, {4090, 5000}}) {
        std::vector<float> part(static_cast<size_t>(count));
        initialise(small(false), layer, 7, first, part);
        for (int i = 0; i < count; ++i) {
            ASSERT_EQ(part[static_cast<size_t>(i)], whole[static_cast<size_t>(first + i)]);
        }
    }
    int64_t covered = 0;
    for (const Tensor& t : layer.tensors) covered += t.count;
    EXPECT_EQ(std::ranges::count(whole, 0.0f), layer.elements - covered);
    EXPECT_NE(whole, initial(layer, 8));
}

TEST(Initialise, the_padding_token_starts_as_zeros) {
    const Layer layer = layers(false)[0];
    Shape shape = small(false);
    shape.padding_token = 3;
    const auto plain = initial(layer);
    const int64_t row = tensor(layer, Role::token_table).offset + 3 * shape.hidden;
    for (const int64_t first : {int64_t{0}, row - 1, row + 2, row + shape.hidden}) {
        std::vector<float> part(static_cast<size_t>(shape.hidden + 5));
        initialise(shape, layer, 7, first, part);
        for (int64_t i = 0; i < std::ssize(part); ++i) {
            const bool padding = first + i >= row && first + i < row + shape.hidden;
            ASSERT_EQ(part[static_cast<size_t>(i)],
                      padding ? 0.0f : plain[static_cast<size_t>(first + i)]);
        }
    }
}

TEST(Initialise, freezing_moves_values_but_does_not_change_them) {
    const Layer free = layers(false)[1], part = layers(false, {"*.0.*q_proj*", "*.0.*up_proj*"})[1];
    const auto a = initial(free), b = initial(part);
    for (const Tensor& t : free.tensors) {
        const Tensor& u = tensor(part, t.role);
        for (int64_t i = 0; i < t.count; ++i) {
            ASSERT_EQ(a[static_cast<size_t>(t.offset + i)], b[static_cast<size_t>(u.offset + i)]);
        }
    }
}

// The deviation of a role's random values in the first block, about zero.
double deviation(const Shape& shape, Role role) {
    const Layer layer = layers_of(shape, {}, false)[1];
    std::vector<float> values(static_cast<size_t>(layer.elements));
    initialise(shape, layer, 7, 0, values);
    const Tensor& t = tensor(layer, role);
    double sum = 0;
    for (int64_t i = 0; i < t.count; ++i) {
        const double x = values[static_cast<size_t>(t.offset + i)];
        sum += x * x;
    }
    return std::sqrt(sum / static_cast<double>(t.count));
}

TEST(Initialise, deviations_are_as_said) {
    EXPECT_NEAR(deviation(small(false), Role::gate), 0.02, 0.001);
    EXPECT_NEAR(deviation(small(false), Role::down), 0.01, 0.0005);
    EXPECT_EQ(deviation(small(false), Role::attention_norm), 1);
    Shape as_llama = small(false);
    as_llama.smaller_residuals = false;
    as_llama.initial_deviation = 0.1;
    as_llama.qkv_bias = as_llama.head_norms = true;
    EXPECT_NEAR(deviation(as_llama, Role::down), 0.1, 0.005);
    EXPECT_EQ(deviation(as_llama, Role::query_bias), 0);
    EXPECT_EQ(deviation(as_llama, Role::key_norm), 1);
}

TEST(Layers, gpt2_is_laid_out_as_its_files_are) {
    Shape s = small(true);
    s.family = Family::gpt2;
    s.kv_heads = s.heads;
    s.gated = false;
    s.layer_norm = s.qkv_bias = s.output_bias = s.mlp_bias = true;
    s.learned_positions = 9;
    const auto all = layers_of(s, {}, false);
    for (const Layer& l : all) check_layout(l);
    EXPECT_EQ(tensor(all[0], Role::position_table).name, "transformer.wpe.weight");
    const Tensor& fused = tensor(all[1], Role::query_key_value);
    EXPECT_EQ(fused.name, "transformer.h.0.attn.c_attn.weight");
    EXPECT_EQ(fused.shape, (std::vector<int64_t>{48, 144}));
    EXPECT_EQ(all[1].find(Role::query), nullptr);
    EXPECT_EQ(all[1].tensors.size(), 12u);
    EXPECT_EQ(all.back().tensors.size(), 2u);  // the final norm and its bias
}

TEST(Layers, of_a_tied_head_that_is_to_be_frozen_the_embedding_is_named) {
    const auto refusal = [](bool tied, const std::string& pattern) -> std::string {
        try {
            layers(tied, {pattern});
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.what();
        }
        return "";
    };
    for (const char* pattern : {"lm_head.weight", "lm_head*"}) {
        const std::string said = refusal(true, pattern);
        for (const char* part : {"the embedding is the head", pattern, "model.embed_tokens.weight"})
            EXPECT_NE(said.find(part), std::string::npos) << said;
        EXPECT_EQ(refusal(false, pattern), "");
    }
    EXPECT_NE(refusal(true, "nothing.*").find("matches no tensor"), std::string::npos);
}

// fp32 moments are those that torchao keeps so (small tensors, and no whole moment blocks),
// vectors' and those that are named.
TEST(CodedMoments, are_of_matrices_of_whole_blocks_apart_from_the_others) {
    Shape shape = small(false);
    shape.hidden = 64, shape.head_dim = 32, shape.heads = 2, shape.kv_heads = 1;
    shape.intermediate = 96;
    const std::vector<std::string> fp32{"*embed_tokens*", "*gate*"};
    for (const bool decay_norms : {false, true}) {
        for (const int shards : {1, 3}) {
            const auto all =
                layers_of(shape, {}, decay_norms, shards, {.coded = true, .fp32 = fp32});
            for (const Layer& layer : all) {
                check_layout(layer);
                for (const Tensor& t : layer.tensors) {
                    const bool coded = t.role == Role::query || t.role == Role::output ||
                                       t.role == Role::up || t.role == Role::down;
                    EXPECT_EQ(t.fp32_moments, !coded) << t.name;
                    if (coded) {
                        EXPECT_EQ(t.offset % kMomentBlock, 0) << t.name;
                    }
                    for (const Segment& s : layer.segments) {
                        if (t.offset >= s.offset && t.offset < s.offset + s.count) {
                            EXPECT_EQ(t.fp32_moments, s.fp32_moments) << t.name;
                        }
                    }
                }
            }
        }
    }
    for (const Layer& layer : layers_of(shape, {}, false)) {
        for (const Tensor& t : layer.tensors) EXPECT_FALSE(t.fp32_moments);
    }
}

// Each has a segment that says its shape; all else lies as it does without Muon.
TEST(MuonMatrices, are_those_of_blocks_each_in_a_segment_of_its_own) {
    const std::vector<std::string> freeze{"*.0.self_attn.k_proj*"}, adamw{"*down_proj*"};
    for (const bool coded : {false, true}) {
        const auto all = layers_of(small(false), freeze, false, 1, {.coded = coded}, {true, adamw});
        for (const Layer& layer : all) {
            check_layout(layer);
            int64_t matrices = 0;
            for (const Tensor& t : layer.tensors) {
                const bool muon = layer.kind == LayerKind::block && t.shape.size() == 2 &&
                                  t.trainable && t.role != Role::down;
                EXPECT_EQ(t.by_muon, muon) << t.name;
                for (const Segment& s : layer.segments) {
                    if (t.offset < s.offset || t.offset >= s.offset + s.count) continue;
                    EXPECT_EQ(s.has_matrices(), muon) << t.name;
                    if (!muon) continue;
                    ++matrices;
                    EXPECT_EQ(t.offset, s.offset);
                    ASSERT_EQ(s.matrices.size(), 1u);
                    EXPECT_EQ((std::vector<int64_t>{s.matrices[0].rows, s.matrices[0].cols}),
                              t.shape);
                    EXPECT_EQ(s.count, round_up(t.count, int64_t{4096}));
                    EXPECT_EQ(s.fp32_moments, t.fp32_moments);
                }
            }
            const auto of_layer = std::ranges::count_if(layer.segments, &Segment::has_matrices);
            EXPECT_EQ(of_layer, matrices) << "one tensor a segment";
            if (layer.kind != LayerKind::block) {
                EXPECT_EQ(of_layer, 0);
            }
        }
    }
}

// Each lies whole at the beginning of a shard; the others of its segment are no larger, and are
// kept in the same format; a shard of no matrix has one zero. Every rank gets the largest in turn.
TEST(MuonMatrices, are_dealt_whole_to_shards) {
    const std::vector<std::string> fp32{"*o_proj*"};
    Shape shape = small(false);
    shape.hidden = 64, shape.head_dim = 16, shape.intermediate = 128;
    for (const int shards : {2, 3, 4, 7}) {
        std::set<int64_t> first;
        const auto all =
            layers_of(shape, {}, false, shards, {.coded = true, .fp32 = fp32}, {.on = true});
        for (const Layer& layer : all) {
            check_layout(layer);
            std::map<int64_t, const Tensor*> at;
            for (const Tensor& t : layer.tensors) {
                if (t.by_muon) at[t.offset] = &t;
            }
            size_t seen = 0;
            for (const Segment& s : layer.segments) {
                if (!s.has_matrices()) continue;
                ASSERT_EQ(std::ssize(s.matrices), shards);
                const int64_t shard = s.count / shards;
                int64_t most = 0;
                for (int64_t i = 0; i < shards; ++i) {
                    const auto& [rows, cols] = s.matrices[static_cast<size_t>(i)];
                    const auto found = at.find(s.offset + i * shard);
                    if (found == at.end()) {
                        EXPECT_EQ(rows * cols, 1);
                        continue;
                    }
                    const Tensor& t = *found->second;
                    EXPECT_EQ((std::vector<int64_t>{rows, cols}), t.shape);
                    EXPECT_LE(t.count, shard);
                    EXPECT_EQ(t.fp32_moments, s.fp32_moments) << t.name;
                    if (t.role == Role::gate) first.insert(i);
                    most = std::max(most, t.count);
                    ++seen;
                }
                EXPECT_EQ(shard, round_up(most, int64_t{4096})) << "as large as the largest";
            }
            EXPECT_EQ(seen, at.size()) << "every matrix";
        }
        EXPECT_EQ(std::ssize(first), std::min<int64_t>(shards, shape.layers));
    }
}

TEST(CodedMoments, of_a_pattern_that_matches_nothing_are_refused) {
    const std::vector<std::string> fp32{"*no_such*"};
    const auto make = [&](bool must_match) {
        layers_of(small(false), {}, false, 1,
                  {.coded = true, .fp32 = fp32, .must_match = must_match});
    };
    EXPECT_NO_THROW(make(false));
    try {
        make(true);
        ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.problem().where, "optimizer.fp32_moments[0]");
    }
}

}  // namespace
}  // namespace ferry::model
