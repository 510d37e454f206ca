// Newton-Schulz and Muon's update on every device that this machine has: near the processors'
// numbers, and on one device the same bits wherever the state lies and however it got there.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "train/kernels/muon.h"

namespace ferry::train {
namespace {

constexpr std::pair<int64_t, int64_t> kShapes[] = {{96, 160}, {160, 96}, {128, 128},
                                                   {1, 64},   {130, 7},  {700, 33}};

float value_at(int64_t i) {
    const auto bits = philox({7, Purpose::test}, {static_cast<uint32_t>(i), 0, 0, 0});
    return (static_cast<float>(bits[0] >> 8) * 0x1p-24f - 0.5f) * 0.25f;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double apart = 0, whole = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        apart += std::pow(double{a[i]} - b[i], 2);
        whole += std::pow(double{b[i]}, 2);
    }
    return std::sqrt(apart / whole);
}

std::vector<float> by_processors(int64_t rows, int64_t cols, DType products) {
    const int64_t count = round_up(rows * cols, optim::kLeaf);
    NodeTeams teams(*this_machine(), 2);
    std::vector<std::byte> room(
        static_cast<size_t>(planner::workspace_of(rows, cols, count, products).bytes()),
        std::byte{0xff});
    NewtonSchulz iteration({.ns_products = products}, ops::make_cpu_matrix_kernels(teams.all()),
                           room, 0);
    std::fill_n(iteration.workspace(), count, 0.0f);
    for (int64_t i = 0; i < rows * cols; ++i) iteration.workspace()[i] = value_at(i);
    const float* o = iteration.orthogonalise(rows, cols, count);
    for (int64_t i = rows * cols; i < count; ++i) EXPECT_EQ(o[i], 0);
    return {o, o + count};
}

// Factors of bf16 end as far from fp32 as torch's do.
TEST(NewtonSchulz, RoundsItsFactorsWhereAsked) {
    for (const auto& [rows, cols] : kShapes) {
        const double apart =
            distance(by_processors(rows, cols, DType::bf16), by_processors(rows, cols, DType::f32));
        EXPECT_GT(apart, 1e-5) << rows << " x " << cols;
        EXPECT_LT(apart, 1e-1) << rows << " x " << cols;
    }
}

class MuonOnGpu : public testing::Test {
protected:
    void SetUp() override {
        executor_ = make_thread_executor();
        try {
            device_ = Device::open(DeviceKind::cuda, *executor_);
        } catch (const Error& error) {
            GTEST_SKIP() << error.what();
        }
        device_->reserve(kRoom);
    }

    // From the beginning of the arena on, each at a page.
    std::span<std::byte> take(int64_t bytes) {
        const auto found =
            device_->memory().subspan(static_cast<size_t>(taken_), static_cast<size_t>(bytes));
        taken_ += round_up(bytes, planner::kPage);
        return found;
    }
    static int64_t scratch(int64_t rows, int64_t cols, const ops::Ops& ops) {
        model::Segment segment;
        segment.matrices.push_back({rows, cols});
        model::Layer layer;
        layer.segments.push_back(segment);
        return matrix_scratch_bytes(ops, {layer});
    }
    // As many elements as a test wants to and fro, and then done.
    void copy(void* to, const void* from, int64_t bytes) {
        std::atomic<uint64_t> done = 0;
        Stream& stream = device_->stream(StreamKind::compute);
        stream.copy(to, from, bytes);
        stream.signal(done);
        while (done.load() == 0) executor_->wait(kForever);
        device_->check();
    }

    std::vector<float> orthogonal(int64_t rows, int64_t cols, DType products, bool beside) {
        taken_ = 0;
        const int64_t count = round_up(rows * cols, optim::kLeaf);
        auto kernels = ops::make_cuda_matrix_kernels(*device_, beside);
        const int64_t first = scratch(rows, cols, kernels->ops());
        const auto room = take(first + planner::workspace_of(rows, cols, count, products).bytes());
        NewtonSchulz iteration({.ns_products = products}, std::move(kernels), room, first);
        std::vector<float> x(static_cast<size_t>(count));
        for (int64_t i = 0; i < rows * cols; ++i) x[static_cast<size_t>(i)] = value_at(i);
        iteration.kernels().send(iteration.workspace(), x.data(), count);
        iteration.kernels().fetch(x.data(), iteration.orthogonalise(rows, cols, count), count);
        device_->check();
        return x;
    }

    static constexpr int64_t kRoom = 256 * kMiB;
    std::unique_ptr<Executor> executor_{};
    std::unique_ptr<Device> device_{};
    int64_t taken_ = 0;
};

TEST_F(MuonOnGpu, OrthogonalisesAsTheProcessorsDo) {
    for (const DType products : {DType::f32, DType::bf16}) {
        for (const auto& [rows, cols] : kShapes) {
            SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + ", " +
                         std::string(name_of(products)));
            const auto found = orthogonal(rows, cols, products, true);
            EXPECT_LT(distance(found, by_processors(rows, cols, products)),
                      products == DType::f32 ? 1e-4 : 1e-1);
            EXPECT_EQ(orthogonal(rows, cols, products, true), found) << "again";
            EXPECT_EQ(orthogonal(rows, cols, products, false), found) << "another stream";
        }
    }
}

// All that an update of a matrix reads and writes, in one run of memory.
struct State {
    int64_t count = 0;
    StateFormat format{};
    std::vector<std::byte> bytes{};  // gradient, master, moment, scales, weight

    int64_t master_bytes() const { return count * (format.split ? 2 : 4); }
    int64_t moment_bytes() const { return count * size_of(format.moment_type); }
    int64_t scale_bytes() const { return count / kMomentBlock * 4; }
    int64_t size() const {
        return count * 4 + master_bytes() + moment_bytes() + scale_bytes() + count * 2;
    }
    optim::Span span(std::byte* at) const {
        auto* master = at + count * 4;
        auto* moment = master + master_bytes();
        auto* scales = reinterpret_cast<float*>(moment + moment_bytes());
        auto* weight = reinterpret_cast<std::byte*>(scales) + scale_bytes();
        optim::Span span{.count = count,
                         .gradient = at,
                         .moment_type = format.moment_type,
                         .m_in = moment,
                         .m = moment,
                         .weight = weight,
                         .weight_type = DType::bf16};
        if (format.moment_type == MomentType::int8) span.m_scale_in = span.m_scale = scales;
        if (format.split) {
            span.weight_in = reinterpret_cast<uint16_t*>(weight);
            span.low_in = span.low = reinterpret_cast<uint16_t*>(master);
        } else {
            span.p_in = span.p = reinterpret_cast<float*>(master);
        }
        return span;
    }
    State(int64_t rows, int64_t cols, const StateFormat& kept)
        : count(round_up(rows * cols, optim::kLeaf)), format(kept) {
        bytes.resize(static_cast<size_t>(size()));
        const optim::Span s = span(bytes.data());
        auto* gradient = reinterpret_cast<float*>(bytes.data());
        for (int64_t i = 0; i < rows * cols; ++i) {
            gradient[i] = value_at(3 * i + 1);
            const auto bits = std::bit_cast<uint32_t>(value_at(5 * i));
            const optim::Halves halves = optim::split(bits);
            static_cast<uint16_t*>(s.weight)[i] = halves.weight;
            if (format.split)
                s.low[i] = halves.low;
            else
                s.p[i] = std::bit_cast<float>(bits);
        }
        if (format.moment_type != MomentType::int8) return;
        const float zero = 0;
        uint8_t code = 0;
        float scale = 0;
        optim::encode_block(optim::Map::with_sign, {&zero, 1}, &code, &scale);
        std::memset(s.m, code, static_cast<size_t>(moment_bytes()));
        std::fill_n(s.m_scale, count / kMomentBlock, scale);
    }
};

TEST_F(MuonOnGpu, UpdatesToTheSameBitsWhereverTheStateLies) {
    const optim::Hyper hyper{.method = optim::Method::muon,
                             .lr = 0.02,
                             .weight_decay = 0.1,
                             .momentum = 0.95,
                             .nesterov = true};
    NodeTeams teams(*this_machine(), 2);
    const auto ops = ops::make_cuda_ops(*device_, AttentionKernels::ferry);
    for (const auto& [rows, cols] : kShapes) {
        for (const MomentType moment : {MomentType::f32, MomentType::bf16, MomentType::int8}) {
            for (const bool split : {false, true}) {
                SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + ", " +
                             std::string(name_of(moment)) + (split ? ", split" : ""));
                State host(rows, cols, {.moments = 1, .moment_type = moment, .split = split});
                taken_ = 0;
                const int64_t first = scratch(rows, cols, *ops);
                const int64_t room =
                    first + planner::workspace_of(rows, cols, host.count, DType::f32).bytes();
                std::vector<std::byte> sent(static_cast<size_t>(host.count * 4));
                const auto of_sent = take(room), own = take(room), state = take(host.size());
                Muon muon({}, teams, *device_, {sent, of_sent, own, first});
                copy(state.data(), host.bytes.data(), host.size());
                for (int64_t step = 1; step <= 3; ++step) {
                    const optim::Scalars scalars = optim::scalars_of(hyper, step, 1);
                    muon.update(rows, cols, host.span(host.bytes.data()), scalars);
                    muon.update_on_device(rows, cols, host.span(state.data()), scalars);
                }
                std::vector<std::byte> found(host.bytes.size());
                copy(found.data(), state.data(), host.size());
                EXPECT_EQ(std::memcmp(found.data(), host.bytes.data(), found.size()), 0);
            }
        }
    }
}

}  // namespace
}  // namespace ferry::train
