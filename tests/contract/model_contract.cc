// A whole step against an independent implementation of the loss in double, written from the
// formulas, and its derivative by central differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "model_fixture.h"
#include "tests/support/quick.h"

namespace ferry::model {
namespace {

using Doubles = std::vector<double>;

// The loss of a Runner's tokens as a function of weights in double.
class Loss {
public:
    Loss(const Setting& s, const Runner& r) : s_(s), r_(r) {
        for (const auto& w : r.weights) weights.emplace_back(w.begin(), w.end());
    }

    double operator()() const {
        const Numerics& n = s_.numerics;
        double total = 0;
        for (int64_t q = 0; q < n.micro_batch; ++q) {
            std::vector<Doubles> x;
            for (int64_t t = 0; t < n.sequence; ++t) {
                x.push_back(
                    row(0, Role::token_table, r_.tokens[static_cast<size_t>(q * n.sequence + t)]));
                if (s_.shape.learned_positions > 0)
                    add(x.back(), row(0, Role::position_table, t - document_start(q, t)));
            }
            for (int64_t b = 0; b < s_.shape.layers; ++b) block(static_cast<size_t>(b + 1), x, q);
            for (int64_t t = 0; t < n.sequence; ++t) {
                const int32_t target = r_.targets[static_cast<size_t>(q * n.sequence + t)];
                if (target >= 0) total += token_loss(x[static_cast<size_t>(t)], target);
            }
        }
        return total;
    }

    std::vector<Doubles> weights{};

private:
    const Tensor* tensor(size_t layer, Role role) const {
        return r_.decoder().layers()[layer].find(role);
    }
    // A row of a matrix, or a whole vector; empty where there is none.
    Doubles row(size_t layer, std::optional<Role> role, int64_t index = 0) const {
        const Tensor* t = role ? tensor(layer, *role) : nullptr;
        if (t == nullptr) return {};
        const int64_t cols = t->shape.back();
        const auto from = weights[layer].begin() + t->offset + index * cols;
        return {from, from + cols};
    }
    // W x + b; gpt2's blocks hold W transposed.
    Doubles times(size_t layer, Role role, const Doubles& x, std::optional<Role> bias = {}) const {
        const bool input_major =
            s_.shape.family == Family::gpt2 && layer > 0 && layer + 1 < weights.size();
        const Tensor* t = tensor(layer, role);
        Doubles y(static_cast<size_t>(t->shape[input_major ? 1 : 0]), 0.0);
        for (int64_t r = 0; r < t->shape[0]; ++r) {
            const Doubles w = row(layer, role, r);
            const auto i = static_cast<size_t>(r);
            for (size_t j = 0; j < w.size(); ++j)
                y[input_major ? j : i] += w[j] * x[input_major ? i : j];
        }
        add(y, row(layer, bias));
        return y;
    }
    Doubles norm(size_t layer, Role role, Doubles x, std::optional<Role> bias = {}) const {
        const Doubles w = row(layer, role), b = row(layer, bias);
        const auto n = static_cast<double>(x.size());
        double mean = 0, squares = 0;
        if (s_.shape.layer_norm) {
            for (const double v : x) mean += v / n;
        }
        for (const double v : x) squares += (v - mean) * (v - mean);
        const double root = std::sqrt(squares / n + s_.shape.norm_eps);
        for (size_t i = 0; i < x.size(); ++i) x[i] = (x[i] - mean) / root * w[i];
        add(x, b);
        return x;
    }
    // Each head of x by itself.
    Doubles norm_heads(size_t layer, Role role, const Doubles& x) const {
        if (tensor(layer, role) == nullptr) return x;
        Doubles y;
        const auto d = static_cast<std::ptrdiff_t>(s_.shape.head_dim);
        for (auto at = x.begin(); at != x.end(); at += d) {
            const Doubles head = norm(layer, role, {at, at + d});
            y.insert(y.end(), head.begin(), head.end());
        }
        return y;
    }
    // rotate_half: x cos + [-x2, x1] sin.
    void rotate(Doubles& x, size_t position) const {
        if (s_.shape.learned_positions > 0) return;
        const auto d = static_cast<size_t>(s_.shape.head_dim);
        const Doubles before = x;
        for (size_t i = 0; i < x.size(); ++i) {
            const size_t pair = i % d % (d / 2), head = i - i % d;
            const double angle = static_cast<double>(position) /
                                 std::pow(s_.shape.rope_theta, 2.0 * static_cast<double>(pair) /
                                                                   static_cast<double>(d)) /
                                 s_.shape.rope_scaling.factor;
            const bool low = i % d < d / 2;
            const double other = low ? -before[head + pair + d / 2] : before[head + pair];
            x[i] = before[i] * std::cos(angle) + other * std::sin(angle);
        }
    }
    int64_t document_start(int64_t row, int64_t t) const {
        const auto& start = s_.document_start;
        return start.empty() ? 0 : start[static_cast<size_t>(row * s_.numerics.sequence + t)];
    }
    // Queries, keys and values of a token.
    std::array<Doubles, 3> project(size_t layer, const Doubles& n) const {
        if (tensor(layer, Role::query_key_value) == nullptr) {
            return {times(layer, Role::query, n, Role::query_bias),
                    times(layer, Role::key, n, Role::key_bias),
                    times(layer, Role::value, n, Role::value_bias)};
        }
        const Doubles all = times(layer, Role::query_key_value, n, Role::query_key_value_bias);
        const auto third = static_cast<std::ptrdiff_t>(all.size() / 3);
        const auto at = all.begin();
        return {Doubles(at, at + third), Doubles(at + third, at + 2 * third),
                Doubles(at + 2 * third, all.end())};
    }
    Doubles mlp(size_t layer, const Doubles& n) const {
        Doubles inner = times(layer, Role::up, n, Role::up_bias);
        if (s_.shape.gated) {
            const Doubles gate = times(layer, Role::gate, n, Role::gate_bias);
            for (size_t i = 0; i < inner.size(); ++i)
                inner[i] *= gate[i] / (1 + std::exp(-gate[i]));
        } else {
            const double scale = std::sqrt(2 / std::acos(-1.0));
            for (double& v : inner) v *= (1 + std::tanh(scale * (v + 0.044715 * v * v * v))) / 2;
        }
        return times(layer, Role::down, inner, Role::down_bias);
    }
    void block(size_t layer, std::vector<Doubles>& x, int64_t row) const {
        std::vector<Doubles> q, k, v;
        for (size_t t = 0; t < x.size(); ++t) {
            auto [query, key, value] =
                project(layer, norm(layer, Role::attention_norm, x[t], Role::attention_norm_bias));
            q.push_back(norm_heads(layer, Role::query_norm, query));
            k.push_back(norm_heads(layer, Role::key_norm, key));
            v.push_back(value);
            const auto begin = static_cast<size_t>(document_start(row, static_cast<int64_t>(t)));
            rotate(q[t], t - begin);
            rotate(k[t], t - begin);
        }
        const auto window =
            static_cast<size_t>(s_.shape.window_of(static_cast<int64_t>(layer) - 1));
        for (size_t t = 0; t < x.size(); ++t) {
            const size_t first =
                std::max(window == 0 || t < window ? 0 : t - window + 1,
                         static_cast<size_t>(document_start(row, static_cast<int64_t>(t))));
            add(x[t], times(layer, Role::output, attend(q[t], k, v, first, t), Role::output_bias));
            add(x[t], mlp(layer, norm(layer, Role::mlp_norm, x[t], Role::mlp_norm_bias)));
        }
    }
    Doubles attend(const Doubles& q, const std::vector<Doubles>& k, const std::vector<Doubles>& v,
                   size_t first, size_t t) const {
        const auto d = static_cast<size_t>(s_.shape.head_dim);
        const auto group = static_cast<size_t>(s_.shape.heads / s_.shape.kv_heads);
        Doubles out(q.size(), 0);
        for (size_t h = 0; h < static_cast<size_t>(s_.shape.heads); ++h) {
            const size_t kv = h / group * d;
            Doubles p;
            double sum = 0;
            for (size_t s = first; s <= t; ++s) {
                double score = 0;
                for (size_t c = 0; c < d; ++c) score += q[h * d + c] * k[s][kv + c];
                p.push_back(std::exp(score / std::sqrt(static_cast<double>(d))));
                sum += p.back();
            }
            for (size_t s = first; s <= t; ++s) {
                for (size_t c = 0; c < d; ++c) out[h * d + c] += p[s - first] / sum * v[s][kv + c];
            }
        }
        return out;
    }
    static void add(Doubles& x, const Doubles& y) {
        for (size_t i = 0; i < y.size(); ++i) x[i] += y[i];
    }
    double token_loss(const Doubles& x, int32_t target) const {
        const size_t head = weights.size() - 1;
        const Doubles n = norm(head, Role::final_norm, x, Role::final_norm_bias);
        const Doubles logits = s_.shape.tie_embeddings ? times(0, Role::token_table, n)
                                                       : times(head, Role::head_table, n);
        double sum = 0;
        for (const double l : logits) sum += std::exp(l);
        return std::log(sum) - logits[static_cast<size_t>(target)];
    }

    const Setting& s_;
    const Runner& r_;
};

Setting tied_setting() {
    Setting s;
    s.shape.tie_embeddings = true;
    s.numerics.mlp_tile = 4;
    s.numerics.head_tile = 64;
    return s;
}
Setting frozen_setting() {
    Setting s;
    s.freeze = {"*.0.*k_proj*", "*.0.*gate_proj*", "*.1.*o_proj*", "*.1.input_layernorm*",
                "lm_head*"};
    return s;
}
Setting single_key_head() {
    Setting s;
    s.shape.kv_heads = 1;
    s.shape.layers = 1;
    return s;
}

// Biases everywhere; a query's bias frozen apart from its neighbours, so that no GEMM does all
// three.
Setting qwen2_setting() {
    Setting s = tied_setting();
    s.shape.family = Family::qwen2;
    s.shape.qkv_bias = true;
    s.shape.windows = {0, 3};
    s.freeze = {"*.1.*q_proj.bias"};
    return s;
}
Setting llama_setting() {
    Setting s;
    s.shape.qkv_bias = s.shape.output_bias = s.shape.mlp_bias = true;
    s.shape.rope_scaling = {.kind = RopeScaling::Kind::linear, .factor = 4};
    s.numerics.mlp_tile = 4;
    return s;
}
Setting qwen3_setting() {
    Setting s;
    s.shape.family = Family::qwen3;
    s.shape.head_norms = true;
    s.shape.head_dim = 10;
    s.shape.windows = {2, 5};
    return s;
}
// Only the norms of the second block's queries train.
Setting head_norms_alone() {
    Setting s = qwen3_setting();
    s.freeze = {"model.embed*",    "lm_head*", "*.0.*",      "*.1.*proj*",
                "*.1.*layernorm*", "*k_norm*", "model.norm*"};
    return s;
}
Setting gpt2_setting() {
    Setting s;
    s.shape.family = Family::gpt2;
    s.shape.kv_heads = s.shape.heads;
    s.shape.tie_embeddings = s.shape.layer_norm = true;
    s.shape.gated = false;
    s.shape.qkv_bias = s.shape.output_bias = s.shape.mlp_bias = true;
    s.shape.learned_positions = 9;
    s.numerics.mlp_tile = 4;
    return s;
}
// The shared table is frozen, the positions beside it train.
Setting frozen_table() {
    Setting s = gpt2_setting();
    s.freeze = {"*wte*"};
    return s;
}
// Some of one token; the second row's first is.
Setting with_documents(Setting s) {
    s.numerics.documents = true;
    s.document_start = {0, 0, 0, 3, 3, 5, 5, 0, 1, 1, 1, 1, 1, 6};
    return s;
}
Setting documents_setting() { return with_documents({}); }
Setting documents_of_gpt2() { return with_documents(gpt2_setting()); }
Setting documents_and_windows() { return with_documents(qwen3_setting()); }

struct Case {
    const char* name;
    Setting (*setting)();
};

class DecoderContract : public testing::TestWithParam<std::tuple<Case, int>> {
protected:
    void SetUp() override {
        Team team(1);
        if (!ops_for(threads_, team)) GTEST_SKIP() << "no GPU, or built without CUDA";
        if (threads_ == kGpu && setting_.numerics.documents && !gpu_knows_documents())
            GTEST_SKIP() << "the GPU has no kernels for documents";
    }
    // It says so when it is planned for.
    bool gpu_knows_documents() const {
        try {
            Runner(setting_, threads_).decoder().scratch_bytes();
            return true;
        } catch (const Error&) {
            return false;
        }
    }
    Setting setting_ = std::get<0>(GetParam()).setting();
    int threads_ = std::get<1>(GetParam());
};

TEST_P(DecoderContract, loss_and_gradients_are_those_of_the_formulas) {
    Runner runner(setting_, threads_);
    const Step step = runner.step();
    Loss loss(setting_, runner);
    const double expected = loss();
    EXPECT_NEAR(step.loss_sum, expected, 2e-6 * expected);
    EXPECT_EQ(step.nonfinite, 0u);
    const auto& layers = runner.decoder().layers();
    for (size_t l = 0; l < layers.size(); ++l) {
        for (const Tensor& t : layers[l].tensors) {
            if (!t.trainable) continue;
            for (int64_t i = 0; i < t.count; i += 1 + t.count / 12) {
                const auto at = static_cast<size_t>(t.offset + i);
                constexpr double h = 1e-4;
                const double before = loss.weights[l][at];
                loss.weights[l][at] = before + h;
                const double above = loss();
                loss.weights[l][at] = before - h;
                const double below = loss();
                loss.weights[l][at] = before;
                const double slope = static_cast<double>(runner.scale) * (above - below) / (2 * h);
                ASSERT_NEAR(step.gradients[l][at], slope, 3e-6 + 2e-5 * std::abs(slope))
                    << t.name << " " << i;
            }
        }
    }
}

TEST_P(DecoderContract, gradients_are_added_and_padding_stays) {
    Runner runner(setting_, threads_);
    const Step from_zero = runner.step(), from_one = runner.step(true, 1.0f);
    const auto& layers = runner.decoder().layers();
    for (size_t l = 0; l < layers.size(); ++l) {
        std::vector<bool> inside(static_cast<size_t>(layers[l].elements));
        for (const Tensor& t : layers[l].tensors) {
            std::fill_n(inside.begin() + t.offset, t.count, true);
        }
        for (size_t i = 0; i < from_zero.gradients[l].size(); ++i) {
            if (!inside[i]) {
                ASSERT_EQ(from_zero.gradients[l][i], 0);
            }
            ASSERT_NEAR(from_one.gradients[l][i], from_zero.gradients[l][i] + 1,
                        1e-6 + 2e-6 * std::abs(from_zero.gradients[l][i]));
        }
    }
}

// Every element is written, padding too, with the bits that a sum with zeros has.
TEST_P(DecoderContract, a_fresh_gradient_counts_as_zeros) {
    Runner runner(setting_, threads_);
    const Step added = runner.step(), of_weights = runner.step(false);
    runner.fresh = true;
    const float nothing = std::numeric_limits<float>::quiet_NaN();
    for (const bool defers : {false, true}) {
        SCOPED_TRACE(defers);
        runner.defers = defers;
        EXPECT_TRUE(runner.step(true, nothing) == added);
        EXPECT_TRUE(runner.step(false, nothing) == of_weights);
    }
}

TEST_P(DecoderContract, without_its_input_s_gradient_a_block_s_own_are_the_same) {
    Runner runner(setting_, threads_);
    Step with = runner.step(true), without = runner.step(false);
    with.gradients[0] = without.gradients[0] = {};
    EXPECT_TRUE(with == without);
}

constexpr std::array kSavings{OfSaved<bool>{true, false, false}, OfSaved<bool>{false, true, false},
                              OfSaved<bool>{false, false, true}, OfSaved<bool>{true, false, true},
                              OfSaved<bool>{false, true, true},  OfSaved<bool>{true, true, true}};

TEST_P(DecoderContract, what_is_saved_changes_no_bit) {
    Runner runner(setting_, threads_);
    const Step recomputed = runner.step(), of_one = runner.step(false, 1.0f);
    for (const OfSaved<bool> saves : kSavings) {
        SCOPED_TRACE(testing::Message() << "attention " << saves[0] << ", MLP " << saves[1]
                                        << ", projections " << saves[2]);
        runner.saves = saves;
        runner.forgets = {};
        EXPECT_TRUE(runner.step() == recomputed);
        EXPECT_TRUE(runner.step(false, 1.0f) == of_one);
        // Backward reads it, and computes none of its own. With its products saved, attention's
        // output serves its own gradient, for which the oracle needs none, and its matrix's.
        const auto& freeze = setting_.freeze;
        const bool output_trains = std::ranges::find(freeze, "*.1.*proj*") == freeze.end();
        for (const Saved what : kAllSaved) {
            if (what == Saved::attention && saves[model::at(Saved::projections)] && !output_trains)
                continue;
            runner.forgets = {};
            runner.forgets[model::at(what)] = true;
            EXPECT_EQ(runner.step() == recomputed, !saves[model::at(what)]);
        }
    }
}

TEST_P(DecoderContract, what_is_deferred_changes_no_bit) {
    Runner runner(setting_, threads_);
    const Step at_once = runner.step(), of_weights = runner.step(false);
    runner.defers = true;
    EXPECT_TRUE(runner.step() == at_once);
    EXPECT_TRUE(runner.step(false) == of_weights);
    for (const OfSaved<bool> saves : kSavings) {
        SCOPED_TRACE(testing::Message() << "attention " << saves[0] << ", MLP " << saves[1]
                                        << ", projections " << saves[2]);
        runner.saves = saves;
        EXPECT_TRUE(runner.step() == at_once);
    }
}

TEST_P(DecoderContract, without_targets_nothing_happens) {
    setting_.mask_all = true;
    Runner runner(setting_, threads_);
    const Step step = runner.step();
    EXPECT_EQ(step.loss_sum, 0);
    for (const auto& g : step.gradients) {
        for (const float x : g) ASSERT_EQ(x, 0);
    }
}

TEST_P(DecoderContract, evaluation_finds_the_training_loss) {
    Runner runner(setting_, threads_);
    const Step step = runner.step();
    std::vector<std::byte> scratch(static_cast<size_t>(runner.decoder().scratch_bytes()) + 64);
    std::byte* room = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
    double loss_sum = 0;
    // A GPU's products want aligned rows of logits, however odd the vocabulary is.
    const auto sink = [&](int64_t, int64_t column, ops::ConstView logits) {
        EXPECT_EQ(column, 0);
        EXPECT_EQ(logits.cols, setting_.shape.vocab);
        EXPECT_EQ(logits.ld % 64, 0);
    };
    runner.decoder().head_loss(runner.weights.back().data(), runner.weights[0].data(),
                               runner.last_x.data(), runner.targets.data(), &loss_sum, room, sink);
    EXPECT_EQ(loss_sum, step.loss_sum);
}

TEST_P(DecoderContract, the_head_gives_its_own_gradients_alone) {
    Runner runner(setting_, threads_);
    const Step step = runner.step();
    runner.stops_at_head = true;
    const Step alone = runner.step();
    EXPECT_EQ(alone.loss_sum, step.loss_sum);
    EXPECT_EQ(alone.gradients.back(), step.gradients.back());
}

INSTANTIATE_TEST_SUITE_P(
    All, DecoderContract,
    testing::Combine(testing::Values(Case{"plain", [] { return Setting{}; }},
                                     Case{"tied", tied_setting}, Case{"frozen", frozen_setting},
                                     Case{"one_kv_head", single_key_head},
                                     Case{"llama", llama_setting}, Case{"qwen2", qwen2_setting},
                                     Case{"qwen3", qwen3_setting},
                                     Case{"head_norms", head_norms_alone},
                                     Case{"gpt2", gpt2_setting}, Case{"frozen_table", frozen_table},
                                     Case{"documents", documents_setting},
                                     Case{"documents_of_gpt2", documents_of_gpt2},
                                     Case{"documents_and_windows", documents_and_windows}),
                     testing::Values(0, 1, 2, kGpu)),
    [](const auto& test) {
        const int threads = std::get<1>(test.param);
        return std::string(std::get<0>(test.param).name) + "_" +
               (threads == 0      ? "reference"
                : threads == kGpu ? "cuda"
                                  : std::to_string(threads) + "_threads");
    });

// ---------------------------------------------------------------- larger, on the fast operations

Setting larger(DType compute, DType residual) {
    Setting s;
    s.shape = {.hidden = 96,
               .layers = 2,
               .heads = 4,
               .kv_heads = 2,
               .head_dim = 24,
               .intermediate = 200,
               .vocab = 301};
    s.numerics = {.sequence = 75,
                  .micro_batch = 3,
                  .head_tile = 100,
                  .mlp_tile = 64,
                  .compute = compute,
                  .residual = residual};
    return s;
}

TEST(Decoder, threads_change_no_bit) {
    for (const DType type : {DType::f32, DType::bf16}) {
        const Setting s = larger(type, type);
        const Step one = Runner(s, 1).step();
        for (const int threads : {2, 2, 3}) EXPECT_TRUE(one == Runner(s, threads).step());
    }
}

// Nor its MLP, which has room beside the gradients of queries, keys and values.
TEST(Decoder, in_tiles_of_tokens_a_block_keeps_no_norm_of_all) {
    Setting s = larger(DType::f32, DType::f32);
    s.shape.hidden = s.shape.intermediate = 64;
    s.shape.kv_heads = 4;
    s.shape.head_dim = 16;
    s.numerics.sequence = 512;
    s.numerics.micro_batch = 1;
    s.numerics.head_tile = 16;
    const auto scratch_of = [&](int64_t tile) {
        s.numerics.mlp_tile = tile;
        return Runner(s, 1).decoder().scratch_bytes();
    };
    const int64_t of_norm = (512 - 128) * 64, of_mlp = 512 * (64 + 2 * 64 + 64 - 3 * 64);
    EXPECT_LE(scratch_of(128) + (of_norm + of_mlp) * size_of(DType::f32), scratch_of(0));
}

// By every attention there is: heads of 64 elements in 16 bits are cuDNN's too.
TEST(Decoder, what_is_saved_changes_no_bit) {
    Team team(1);
    for (const int threads : {0, 2, kGpu, kGpuCudnn}) {
        if (!ops_for(threads, team)) continue;
        for (const auto& [compute, residual] :
             {std::pair{DType::f32, DType::f32}, std::pair{DType::bf16, DType::bf16},
              std::pair{DType::bf16, DType::f32}}) {
            for (const int64_t head_dim : {24, 64}) {
                // The quick run takes the reference with a wider residual alone, and each of the
                // others once.
                if (is_quick() && ((threads == 0) != (residual != compute) ||
                                   (head_dim == 24) != (compute == DType::f32)))
                    continue;
                SCOPED_TRACE(testing::Message() << name_of(compute) << " " << threads
                                                << " threads, heads of " << head_dim);
                Setting s = larger(compute, residual);
                s.shape.head_dim = head_dim;
                s.shape.windows = {0, 20};
                Runner runner(s, threads);
                const Step recomputed = runner.step();
                for (const OfSaved<bool> saves : kSavings) {
                    runner.saves = saves;
                    EXPECT_TRUE(runner.step() == recomputed) << saves[0] << saves[1] << saves[2];
                }
                runner.defers = true;
                EXPECT_TRUE(runner.step() == recomputed);
            }
        }
    }
}

// Cosine and length of b against a.
std::pair<double, double> compare(const std::vector<float>& a, const std::vector<float>& b) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double x = a[i], y = b[i];
        ab += x * y;
        aa += x * x;
        bb += y * y;
    }
    return {ab / std::sqrt(aa * bb), std::sqrt(bb / aa)};
}

TEST(Decoder, the_padding_token_learns_nothing_from_inputs) {
    for (const int threads : {0, 2, kGpu}) {
        Team team(1);
        if (!ops_for(threads, team)) continue;
        SCOPED_TRACE(testing::Message() << threads << " threads");
        const Setting plain = larger(DType::f32, DType::f32);
        Setting padded = plain;
        Runner without(plain, threads);
        padded.shape.padding_token = without.tokens[5];
        Runner with(padded, threads);
        with.weights = without.weights;
        Step expected = without.step();
        const Step found = with.step();
        const int64_t table = with.decoder().layers()[0].find(Role::token_table)->offset;
        const auto row = expected.gradients[0].begin() + table +
                         padded.shape.padding_token * padded.shape.hidden;
        EXPECT_NE(std::count(row, row + padded.shape.hidden, 0.0f), padded.shape.hidden);
        std::fill(row, row + padded.shape.hidden, 0.0f);
        EXPECT_TRUE(found == expected);
    }
}

TEST(Decoder, the_gpu_is_near_the_cpu) {
    Team team(1);
    if (!ops_for(kGpu, team)) GTEST_SKIP() << "no GPU, or built without CUDA";
    const Step cpu = Runner(larger(DType::f32, DType::f32), 2).step();
    const Step gpu = Runner(larger(DType::f32, DType::f32), kGpu).step();
    EXPECT_NEAR(gpu.loss_sum / cpu.loss_sum, 1, 1e-6);
    for (size_t l = 0; l < cpu.gradients.size(); ++l) {
        const auto [cosine, length] = compare(cpu.gradients[l], gpu.gradients[l]);
        EXPECT_NEAR(cosine, 1, 1e-6) << l;
        EXPECT_NEAR(length, 1, 1e-5) << l;
    }
}

// fp16 has three bits more than bf16.
TEST(Decoder, fp16_is_near_fp32) {
    const Step exact = Runner(larger(DType::f32, DType::f32), 2).step();
    for (const int threads : {0, 2, kGpu}) {
        Team team(1);
        if (!ops_for(threads, team)) continue;
        SCOPED_TRACE(testing::Message() << threads << " threads");
        const Step step = Runner(larger(DType::f16, DType::f32), threads).step();
        EXPECT_NEAR(step.loss_sum / exact.loss_sum, 1, 1e-3);
        for (size_t l = 0; l < exact.gradients.size(); ++l) {
            const auto [cosine, length] = compare(exact.gradients[l], step.gradients[l]);
            EXPECT_GT(cosine, 0.9999) << l;
            EXPECT_NEAR(length, 1, 5e-3) << l;
        }
    }
}

TEST(Decoder, bf16_is_near_fp32) {
    const Step exact = Runner(larger(DType::f32, DType::f32), 2).step();
    for (const DType residual : {DType::f32, DType::bf16}) {
        for (const int threads : {0, 2, kGpu}) {
            Team team(1);
            if (!ops_for(threads, team)) continue;
            SCOPED_TRACE(testing::Message() << name_of(residual) << " " << threads << " threads");
            const Step step = Runner(larger(DType::bf16, residual), threads).step();
            EXPECT_NEAR(step.loss_sum / exact.loss_sum, 1, 5e-3);
            for (size_t l = 0; l < exact.gradients.size(); ++l) {
                const auto [cosine, length] = compare(exact.gradients[l], step.gradients[l]);
                EXPECT_GT(cosine, 0.995) << l;
                EXPECT_NEAR(length, 1, 0.03) << l;
            }
        }
    }
}

TEST(Decoder, a_bad_weight_is_seen) {
    Runner runner(larger(DType::f32, DType::f32), 2);
    runner.weights[1][5] = NAN;
    EXPECT_EQ(runner.step().nonfinite, 1u);
}

}  // namespace
}  // namespace ferry::model
