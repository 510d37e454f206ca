// The optimizers' arithmetic through the C ABI: the numbers of ferry/optim.h, and what is refused.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ferry/optim.h"
#include "tests/support/c_abi.h"

namespace ferry {
namespace {

constexpr int64_t kCount = 5000;

std::vector<float> values(float scale) {
    std::vector<float> made(kCount);
    for (size_t i = 0; i < made.size(); ++i)
        made[i] = scale * std::sin(static_cast<float>(i * i % 977));
    return made;
}

struct State {
    std::vector<float> p = values(1), m = std::vector<float>(kCount, 0.01f),
                       v = std::vector<float>(kCount, 0.001f);
    std::vector<uint16_t> weight = std::vector<uint16_t>(kCount);
    bool operator==(const State&) const = default;
};

class CapiOptim : public testing::Test {
protected:
    CapiOptim() {
        EXPECT_EQ(ferry_hyper_default(FERRY_ADAMW, &hyper_), FERRY_OK);
        update_.count = kCount;
        update_.gradient = gradient_.data();
        update_.weight_type = FERRY_BF16;
        point();
    }
    void point() {
        update_.p = state_.p.data();
        update_.m = state_.m.data();
        update_.v = state_.v.data();
        update_.weight = state_.weight.data();
    }
    template <class Change>
    void refuses(Change change, const char* text) {
        ferry_update update = update_;
        ferry_hyper hyper = hyper_;
        change(hyper, update);
        EXPECT_REFUSED(ferry_optim_update(nullptr, &hyper, 1, 1, &update), FERRY_USAGE, text);
        EXPECT_EQ(state_, State()) << "nothing was changed";
    }

    const std::vector<float> gradient_ = values(0.1f);
    State state_;
    ferry_hyper hyper_ = sized<ferry_hyper>();
    ferry_update update_ = sized<ferry_update>();
};

TEST_F(CapiOptim, GivesTheNumbersOfTheReference) {
    ferry_team* team = nullptr;
    ASSERT_DONE(ferry_team_create(2, &team));
    for (const int32_t method : {FERRY_ADAMW, FERRY_ADAM, FERRY_SGD, FERRY_LION, FERRY_ADAGRAD}) {
        ASSERT_DONE(ferry_hyper_default(method, &hyper_));
        hyper_.weight_decay = 0.1;
        if (method == FERRY_SGD) hyper_.momentum = 0.9, hyper_.nesterov = 1;
        State expected;
        const optim::Hyper hyper{.method = static_cast<optim::Method>(method),
                                 .lr = hyper_.lr,
                                 .beta1 = hyper_.beta1,
                                 .beta2 = hyper_.beta2,
                                 .eps = hyper_.eps,
                                 .weight_decay = 0.1,
                                 .momentum = hyper_.momentum,
                                 .nesterov = method == FERRY_SGD};
        const optim::Span span{.count = kCount,
                               .gradient = gradient_.data(),
                               .p_in = expected.p.data(),
                               .m_in = expected.m.data(),
                               .v_in = expected.v.data(),
                               .p = expected.p.data(),
                               .m = expected.m.data(),
                               .v = expected.v.data(),
                               .weight = expected.weight.data(),
                               .weight_type = DType::bf16};
        for (int64_t step = 1; step <= 2; ++step)
            optim::update_reference(span, optim::scalars_of(hyper, step, 0.5));
        state_ = State();
        point();
        ASSERT_DONE(ferry_optim_update(team, &hyper_, 1, 0.5, &update_));
        ASSERT_DONE(ferry_optim_update(nullptr, &hyper_, 2, 0.5, &update_));
        EXPECT_EQ(state_, expected) << method;
        EXPECT_NE(state_, State()) << method;
    }
    ASSERT_DONE(ferry_team_destroy(team));
}

TEST_F(CapiOptim, SplitsTheMaster) {
    std::vector<uint16_t> low(kCount);
    for (size_t i = 0; i < low.size(); ++i) {
        uint32_t bits = 0;
        memcpy(&bits, &state_.p[i], 4);
        const optim::Halves halves = optim::split(bits);
        state_.weight[i] = halves.weight, low[i] = halves.low;
    }
    State whole = state_;
    ferry_update split = update_;
    split.p = nullptr;
    split.low = low.data();
    ASSERT_DONE(ferry_optim_update(nullptr, &hyper_, 1, 1, &split));
    update_.p = whole.p.data(), update_.m = whole.m.data(), update_.v = whole.v.data();
    update_.weight = whole.weight.data();
    ASSERT_DONE(ferry_optim_update(nullptr, &hyper_, 1, 1, &update_));
    for (size_t i = 0; i < low.size(); ++i) {
        const uint32_t joined = optim::join({state_.weight[i], low[i]});
        EXPECT_EQ(memcmp(&joined, &whole.p[i], 4), 0) << i;
    }
}

TEST_F(CapiOptim, KeepsMomentsInInt8) {
    constexpr size_t kBlocks = (kCount + 255) / 256;
    struct Coded {
        std::vector<uint8_t> m = std::vector<uint8_t>(kCount, 127), v = m;
        std::vector<float> m_scale = std::vector<float>(kBlocks, 1e-12f), v_scale = m_scale;
        bool operator==(const Coded&) const = default;
    };
    Coded mine, expected;
    State whole = state_;
    update_.moment_type = FERRY_INT8;
    update_.m = mine.m.data(), update_.v = mine.v.data();
    update_.m_scale = mine.m_scale.data(), update_.v_scale = mine.v_scale.data();
    const optim::Span span{.count = kCount,
                           .gradient = gradient_.data(),
                           .moment_type = MomentType::int8,
                           .p_in = whole.p.data(),
                           .m_in = expected.m.data(),
                           .v_in = expected.v.data(),
                           .p = whole.p.data(),
                           .m = expected.m.data(),
                           .v = expected.v.data(),
                           .m_scale_in = expected.m_scale.data(),
                           .v_scale_in = expected.v_scale.data(),
                           .m_scale = expected.m_scale.data(),
                           .v_scale = expected.v_scale.data(),
                           .weight = whole.weight.data(),
                           .weight_type = DType::bf16};
    const optim::Hyper hyper{.lr = hyper_.lr, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    optim::update_reference(span, optim::scalars_of(hyper, 1, 1));
    ASSERT_DONE(ferry_optim_update(nullptr, &hyper_, 1, 1, &update_));
    EXPECT_EQ(mine, expected);
    EXPECT_EQ(state_, whole);
    EXPECT_NE(mine, Coded());

    const auto refuses_coded = [&](auto change, const char* text) {
        ferry_update update = update_;
        change(update);
        EXPECT_REFUSED(ferry_optim_update(nullptr, &hyper_, 1, 1, &update), FERRY_USAGE, text);
        EXPECT_EQ(mine, expected) << "nothing was changed";
    };
    refuses_coded([](auto& u) { u.m_scale = nullptr; }, "m_scale is NULL");
    refuses_coded([](auto& u) { u.v_scale = nullptr; }, "v_scale is NULL");
    refuses_coded([](auto& u) { u.m_scale_in = u.m_scale + 1; }, "m_scale_in overlaps");
    refuses_coded([](auto& u) { u.v_scale = reinterpret_cast<float*>(65); }, "aligned");
    refuses_coded([](auto& u) { u.element = 32; }, "multiples of 256");
    ASSERT_DONE(ferry_hyper_default(FERRY_LION, &hyper_));
    refuses_coded([](auto& u) { u.v = nullptr; }, "v and its scales come together");
    ASSERT_DONE(ferry_hyper_default(FERRY_SGD, &hyper_));
    refuses_coded([](auto& u) { u.m = nullptr, u.m_scale = nullptr; }, "m_scale is NULL");
}

TEST_F(CapiOptim, TellsWhatCodesStandFor) {
    std::vector<float> shares(256), of_squares(256);
    ASSERT_DONE(ferry_optim_moment_shares(FERRY_ADAMW, 0, shares.data()));
    ASSERT_DONE(ferry_optim_moment_shares(FERRY_ADAMW, 1, of_squares.data()));
    for (int code = 0; code < 256; ++code) {
        const auto at = static_cast<size_t>(code);
        EXPECT_EQ(shares[at], optim::share_of(optim::Map::with_sign, static_cast<uint8_t>(code)));
        EXPECT_EQ(of_squares[at],
                  optim::share_of(optim::Map::without_sign, static_cast<uint8_t>(code)));
    }
    ASSERT_DONE(ferry_optim_moment_shares(FERRY_ADAGRAD, 0, shares.data()));
    EXPECT_EQ(shares, of_squares) << "Adagrad's sum has no sign";
    EXPECT_REFUSED(ferry_optim_moment_shares(5, 0, shares.data()), FERRY_USAGE, "method");
    EXPECT_REFUSED(ferry_optim_moment_shares(0, 2, shares.data()), FERRY_USAGE, "moment");
    EXPECT_REFUSED(ferry_optim_moment_shares(0, 0, nullptr), FERRY_USAGE, "shares is NULL");
}

TEST_F(CapiOptim, MeasuresNormsOverSeveralArrays) {
    std::vector<float> leaves(2);
    double sum = 0;
    for (int array = 0; array < 2; ++array) {
        ASSERT_DONE(
            ferry_optim_leaf_norms(nullptr, gradient_.data(), FERRY_F32, kCount, leaves.data()));
        ASSERT_DONE(ferry_optim_add_leaves(leaves.data(), 2, &sum));
    }
    double exact = 0;
    for (const float g : gradient_) exact += 2.0 * g * g;
    EXPECT_NEAR(sum, exact, 1e-5 * exact);
    EXPECT_DOUBLE_EQ(ferry_optim_clip_factor(2, 1), optim::clip_factor(2, 1));
    EXPECT_EQ(ferry_optim_clip_factor(2, 0), 1);
    EXPECT_EQ(ferry_optim_clip_factor(INFINITY, 1), 0);
}

TEST_F(CapiOptim, RoundsWeights) {
    std::vector<uint16_t> halves(kCount);
    ASSERT_DONE(ferry_optim_recast(state_.p.data(), kCount, FERRY_F16, halves.data()));
    for (size_t i = 0; i < halves.size(); ++i) ASSERT_EQ(halves[i], to_f16(state_.p[i]));
    EXPECT_REFUSED(ferry_optim_recast(nullptr, 1, FERRY_F16, halves.data()), FERRY_USAGE,
                   "p is NULL");
    EXPECT_REFUSED(ferry_optim_recast(state_.p.data(), 1, 3, halves.data()), FERRY_USAGE,
                   "weight_type");
    EXPECT_REFUSED(ferry_optim_recast(state_.p.data(), -1, 0, halves.data()), FERRY_USAGE, "count");
    EXPECT_REFUSED(ferry_optim_recast(state_.p.data(), 4, FERRY_F32, state_.p.data()), FERRY_USAGE,
                   "overlaps");
    EXPECT_REFUSED(ferry_optim_recast(state_.p.data(), INT64_MAX, FERRY_F16, halves.data()),
                   FERRY_USAGE, "count");
}

TEST_F(CapiOptim, KnowsWhatAMethodKeeps) {
    int32_t moments = 0;
    float initial = 0;
    const auto keeps = [&](int32_t method, int32_t expected) {
        ASSERT_DONE(ferry_hyper_default(method, &hyper_));
        ASSERT_DONE(ferry_optim_moments(&hyper_, &moments, &initial));
        EXPECT_EQ(moments, expected) << method;
    };
    keeps(FERRY_ADAMW, 2);
    keeps(FERRY_LION, 1);
    EXPECT_EQ(hyper_.beta2, 0.99);
    keeps(FERRY_SGD, 0);
    keeps(FERRY_ADAGRAD, 1);
    hyper_.initial_accumulator = 0.5;
    ASSERT_DONE(ferry_optim_moments(&hyper_, &moments, &initial));
    EXPECT_EQ(initial, 0.5f);
}

TEST_F(CapiOptim, RefusesArraysThatAreNotThere) {
    refuses([](auto&, auto& u) { u.gradient = nullptr; }, "gradient is NULL");
    refuses([](auto&, auto& u) { u.p = nullptr; }, "p is NULL");
    refuses([](auto&, auto& u) { u.m = nullptr; }, "m is NULL");
    refuses([](auto&, auto& u) { u.v = nullptr; }, "v is NULL");
    refuses([](auto&, auto& u) { u.p = nullptr, u.p_in = reinterpret_cast<float*>(64); },
            "p is NULL");
    refuses([](auto&, auto& u) { u.p_in = u.p + 1; }, "p_in overlaps");
    refuses([](auto&, auto& u) { u.m_in = static_cast<char*>(u.m) + 4 * (kCount - 1); },
            "m_in overlaps");
    refuses([](auto&, auto& u) { u.count = -1; }, "count");
    refuses([](auto&, auto& u) { u.count = INT64_MAX; }, "count");
    refuses([](auto&,
               auto& u) { u.count = int64_t{1} << 44, u.gradient = reinterpret_cast<void*>(-64); },
            "beyond all memory");
    refuses([](auto&, auto& u) { u.low = static_cast<uint16_t*>(u.weight); }, "both given");
    refuses([](auto&, auto& u) { u.p = nullptr, u.low_in = reinterpret_cast<uint16_t*>(64); },
            "low is NULL");
}

TEST_F(CapiOptim, RefusesTypesAndValues) {
    refuses([](auto&, auto& u) { u.gradient_type = 3; }, "gradient_type");
    refuses([](auto&, auto& u) { u.moment_type = FERRY_F16; }, "moment_type");
    refuses([](auto&, auto& u) { u.moment_type = FERRY_INT8; }, "m_scale is NULL");
    refuses([](auto&, auto& u) { u.moment_type = FERRY_BF16, u.element = 5; }, "element");
    refuses([](auto&, auto& u) { u.moment_type = FERRY_BF16, u.element = int64_t{1} << 34; },
            "element");
    refuses([](auto&, auto& u) { u.weight_type = -1; }, "weight_type");
    refuses([](auto&, auto& u) { u.size = 7; }, "size is wrong");
    refuses([](auto& h, auto&) { h.size = 0; }, "size is wrong");
    refuses([](auto& h, auto&) { h.method = 5; }, "method");
    refuses([](auto& h, auto&) { h.nesterov = -1; }, "nesterov");
    refuses([](auto& h, auto&) { h.beta1 = 1; }, "beta");
    refuses([](auto& h, auto&) { h.lr = std::numeric_limits<double>::quiet_NaN(); }, "lr");
    EXPECT_EQ(ferry_optim_update(nullptr, &hyper_, 0, 1, &update_), FERRY_USAGE);
    EXPECT_EQ(ferry_optim_update(nullptr, &hyper_, 1, -1, &update_), FERRY_USAGE);
    EXPECT_REFUSED(ferry_optim_update(nullptr, nullptr, 1, 1, &update_), FERRY_USAGE,
                   "hyper is NULL");
    EXPECT_REFUSED(ferry_optim_update(nullptr, &hyper_, 1, 1, nullptr), FERRY_USAGE,
                   "update is NULL");
    auto* stranger = reinterpret_cast<ferry_team*>(&hyper_);
    EXPECT_EQ(ferry_optim_update(stranger, &hyper_, 1, 1, &update_), FERRY_BAD_HANDLE);
    EXPECT_EQ(state_, State());
}

TEST_F(CapiOptim, RefusesNorms) {
    float leaf = 0;
    double sum = 0;
    EXPECT_REFUSED(ferry_optim_leaf_norms(nullptr, nullptr, 0, 1, &leaf), FERRY_USAGE,
                   "gradient is NULL");
    EXPECT_REFUSED(ferry_optim_leaf_norms(nullptr, &leaf, 0, 1, nullptr), FERRY_USAGE,
                   "leaves is NULL");
    EXPECT_REFUSED(ferry_optim_leaf_norms(nullptr, &leaf, 9, 1, &leaf), FERRY_USAGE, "type");
    EXPECT_REFUSED(ferry_optim_leaf_norms(nullptr, &leaf, 0, -1, &leaf), FERRY_USAGE, "count");
    EXPECT_REFUSED(ferry_optim_add_leaves(nullptr, 1, &sum), FERRY_USAGE, "leaves is NULL");
    EXPECT_REFUSED(ferry_optim_add_leaves(&leaf, 1, nullptr), FERRY_USAGE, "sum is NULL");
    ASSERT_DONE(ferry_optim_leaf_norms(nullptr, nullptr, 0, 0, nullptr));
    ASSERT_DONE(ferry_optim_add_leaves(nullptr, 0, &sum));
}

TEST_F(CapiOptim, OnAGpuSaysWhereThereIsNone) {
    if (optim::cuda::available()) GTEST_SKIP() << "there is one: optim_cuda has its numbers";
    EXPECT_REFUSED(ferry_optim_update_cuda(&hyper_, 1, 1, &update_, nullptr), FERRY_USAGE,
                   "no GPU");
    EXPECT_REFUSED(
        ferry_optim_recast_cuda(state_.p.data(), 1, FERRY_BF16, state_.weight.data(), nullptr),
        FERRY_USAGE, "no GPU");
    EXPECT_REFUSED(
        ferry_optim_leaf_norms_cuda(gradient_.data(), 0, kCount, state_.p.data(), nullptr),
        FERRY_USAGE, "no GPU");
    update_.p_in = reinterpret_cast<float*>(reinterpret_cast<char*>(state_.m.data()) + 1);
    EXPECT_REFUSED(ferry_optim_update_cuda(&hyper_, 1, 1, &update_, nullptr), FERRY_USAGE, "");
}

}  // namespace
}  // namespace ferry
