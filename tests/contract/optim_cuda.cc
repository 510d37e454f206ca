// The CUDA kernels against the scalar reference, bit by bit. Needs a GPU; skipped where there is
// none.
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <vector>

#include "ferry/error.h"
#include "tests/unit/optim_arrays.h"

#ifdef FERRY_CUDA
#include <cuda_runtime.h>

namespace ferry::optim {
namespace {

const Method kMethods[] = {Method::adamw, Method::adam, Method::sgd, Method::lion, Method::adagrad};
const DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

// A copy of an array in device memory, at the same distance from a 64-byte boundary and with
// nothing allocated behind it, so that compute-sanitizer sees the first byte too many.
class OnDevice {
public:
    explicit OnDevice(const Bytes& bytes) : OnDevice(bytes.data(), bytes.size()) {}
    OnDevice(const void* bytes, int64_t size) : size_(static_cast<size_t>(size)) {
        const size_t offset = reinterpret_cast<uintptr_t>(bytes) % 64;
        check(cudaMalloc(&memory_, offset + size_ + 1));
        data_ = static_cast<char*>(memory_) + offset;
        check(cudaMemcpy(data_, bytes, size_, cudaMemcpyHostToDevice));
    }
    ~OnDevice() { cudaFree(memory_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    void* data() { return data_; }
    float* floats() { return reinterpret_cast<float*>(data_); }
    void read(void* to) { check(cudaMemcpy(to, data_, size_, cudaMemcpyDeviceToHost)); }

private:
    static void check(cudaError_t error) {
        FERRY_CHECK(error == cudaSuccess, cudaGetErrorString(error));
    }
    size_t size_;
    void* memory_ = nullptr;
    char* data_ = nullptr;
};

// Copies of host arrays, and the span of them.
class SpanOnDevice {
public:
    SpanOnDevice(Arrays& arrays, const Case& c)
        : arrays_(arrays),
          case_(c),
          gradient_(arrays.gradient()),
          weight_(arrays.weight()),
          weight_in_(arrays.weight_in()),
          p_in_(arrays.in(0)),
          m_in_(arrays.in(1)),
          v_in_(arrays.in(2)),
          p_out_(arrays.out(0)),
          m_out_(arrays.out(1)),
          v_out_(arrays.out(2)),
          ms_in_(arrays.scale_in(1)),
          ms_out_(arrays.scale_out(1)),
          vs_in_(arrays.scale_in(2)),
          vs_out_(arrays.scale_out(2)) {}

    Span span() {
        Span span = arrays_.span();
        if (span.m_scale) {
            span.m_scale_in = ms_in_.floats(), span.m_scale = ms().floats();
            span.v_scale_in = vs_in_.floats(), span.v_scale = vs().floats();
        }
        span.gradient = gradient_.data();
        span.v_in = v_in_.data();
        span.v = v().data();
        if (span.m) span.m_in = m_in_.data(), span.m = m().data();
        if (span.weight) span.weight = weight_.data();
        if (case_.split) {
            OnDevice& weight_in = case_.out_of_place ? weight_in_ : weight_;
            span.weight_in = static_cast<uint16_t*>(weight_in.data());
            span.low_in = static_cast<uint16_t*>(p_in_.data());
            span.low = static_cast<uint16_t*>(p().data());
        } else {
            span.p_in = p_in_.floats();
            span.p = p().floats();
        }
        return span;
    }

    // What an update has left, to the host's arrays.
    void read() {
        p().read(arrays_.out(0).data());
        m().read(arrays_.out(1).data());
        v().read(arrays_.out(2).data());
        ms().read(arrays_.scale_out(1).data());
        vs().read(arrays_.scale_out(2).data());
        weight_.read(arrays_.weight().data());
    }

private:
    OnDevice& p() { return case_.out_of_place ? p_out_ : p_in_; }
    OnDevice& m() { return case_.out_of_place ? m_out_ : m_in_; }
    OnDevice& v() { return case_.out_of_place ? v_out_ : v_in_; }
    OnDevice& ms() { return case_.out_of_place ? ms_out_ : ms_in_; }
    OnDevice& vs() { return case_.out_of_place ? vs_out_ : vs_in_; }

    Arrays& arrays_;
    const Case case_;
    OnDevice gradient_, weight_, weight_in_, p_in_, m_in_, v_in_, p_out_, m_out_, v_out_;
    OnDevice ms_in_, ms_out_, vs_in_, vs_out_;
};

// Does on the device what update() does to host arrays.
void update_on_device(Arrays& arrays, const Case& c, const Scalars& scalars) {
    SpanOnDevice there(arrays, c);
    cuda::update(there.span(), scalars, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    there.read();
}

class Cuda : public testing::Test {
protected:
    void SetUp() override {
        if (!cuda::available()) GTEST_SKIP() << "no GPU that runs these kernels";
    }

    static void expect_same(Case c, const Scalars& scalars) {
        c.positive_m = scalars.method == Method::adagrad;
        Arrays got(c), want(c);
        update_on_device(got, c, scalars);
        update_reference(want.span(), scalars);
        EXPECT_EQ(difference(got, want, c), "")
            << name_of(scalars.method) << ", count " << c.count << ", gradient "
            << name_of(c.gradient_type) << ", weight " << name_of(c.weight_type) << ", offset "
            << c.offset << ", moments " << name_of(c.moment_type) << (c.split ? ", split" : "")
            << ", seed " << c.seed;
    }

    static void expect_same_norms(const Case& c) {
        Arrays arrays(c);
        const auto leaves = static_cast<size_t>(leaves_of(c.count));
        std::vector<float> got(leaves + 1, -1), want(leaves + 1, -1);
        OnDevice gradient(arrays.gradient());
        OnDevice sums(got.data(), static_cast<int64_t>(got.size()) * 4);
        cuda::leaf_norms(gradient.data(), c.gradient_type, c.count, sums.floats(), nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        sums.read(got.data());
        leaf_norms_reference(arrays.gradient().data(), c.gradient_type, c.count, want.data());
        for (size_t i = 0; i <= leaves; ++i) {
            EXPECT_TRUE(same_float(got[i], want[i]))
                << "leaf " << i << " of " << c.count << " elements, " << name_of(c.gradient_type);
        }
    }
};
// Everything at sizes that compute-sanitizer gets through.
using CudaSmall = Cuda;

// More than a launch takes, of sizes that end within a block, within a pack and within a run, and
// of formats that no launch takes together.
TEST_F(CudaSmall, many_spans_at_once) {
    const int64_t sizes[] = {32, 8192, 1, 0, 2048, 257, 4096, 33, 7, 2049};
    for (const Method method : kMethods) {
        std::vector<std::unique_ptr<Arrays>> got, want;
        std::vector<std::unique_ptr<SpanOnDevice>> there;
        std::vector<Case> cases;
        std::vector<Span> spans;
        for (int i = 0; i < 67; ++i) {
            Case c{.count = sizes[static_cast<size_t>(i) % std::size(sizes)],
                   .gradient_type = i < 40 ? DType::bf16 : DType::f32,
                   .weight_type = DType::bf16,
                   .seed = static_cast<uint64_t>(100 + i),
                   .offset = i % 9 == 8 ? 4 : 0,
                   .out_of_place = i % 4 == 3};
            c.positive_m = method == Method::adagrad;
            if (i >= 50) c.split = true;
            if (i >= 55) c.moment_type = MomentType::bf16;
            if (i >= 60) c.moment_type = MomentType::int8;
            cases.push_back(c);
            got.push_back(std::make_unique<Arrays>(c));
            want.push_back(std::make_unique<Arrays>(c));
            there.push_back(std::make_unique<SpanOnDevice>(*got.back(), c));
            spans.push_back(there.back()->span());
        }
        const Scalars scalars = scalars_for(method);
        cuda::update(spans, scalars, nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        for (size_t i = 0; i < cases.size(); ++i) {
            there[i]->read();
            update_reference(want[i]->span(), scalars);
            EXPECT_EQ(difference(*got[i], *want[i], cases[i]), "")
                << name_of(method) << ", span " << i << " of " << cases[i].count << " elements";
        }
    }
}

// The kernels of a call, as a captured graph has them.
size_t launches_of(std::span<const Span> spans, const Scalars& scalars) {
    cudaStream_t stream;
    cudaGraph_t graph;
    size_t nodes = 0;
    EXPECT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cuda::update(spans, scalars, stream);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return nodes;
}

TEST_F(CudaSmall, spans_of_one_format_share_launches) {
    const Case c{.count = 4096};
    Arrays arrays(c);
    SpanOnDevice there(arrays, c);
    const Scalars scalars = scalars_for(Method::adamw);
    std::vector<Span> spans(24, there.span());
    EXPECT_EQ(launches_of(spans, scalars), 1U);
    spans.resize(49, there.span());
    EXPECT_EQ(launches_of(spans, scalars), 3U);
    spans[0].count = 4095;  // the elements behind its last run
    EXPECT_EQ(launches_of(spans, scalars), 4U);
    spans[0].count = 0;
    EXPECT_EQ(launches_of(spans, scalars), 2U);
}

TEST_F(CudaSmall, every_size_type_and_method) {
    const int64_t sizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 31, 33, 255, 256, 257, 1023, 1025};
    for (const Method method : kMethods) {
        for (const int64_t count : sizes) {
            for (const DType gradient : kTypes) {
                for (const DType weight : kTypes) {
                    expect_same({.count = count,
                                 .gradient_type = gradient,
                                 .weight_type = weight,
                                 .fill = count % 2 ? Fill::edges : Fill::ordinary,
                                 .seed = static_cast<uint64_t>(count)},
                                scalars_for(method));
                }
            }
        }
    }
}

TEST_F(CudaSmall, every_format_of_the_state) {
    const StateFormat formats[] = {{.moment_type = MomentType::bf16},
                                   {.split = true},
                                   {.moment_type = MomentType::bf16, .split = true},
                                   {.moment_type = MomentType::int8},
                                   {.moment_type = MomentType::int8, .split = true}};
    for (const Method method : kMethods) {
        Scalars scalars = scalars_for(method);
        scalars.seed = 0xfedcba98u;
        for (const StateFormat& format : formats) {
            for (const int64_t count : {0, 1, 2, 3, 4, 5, 31, 32, 33, 255, 257, 1025, 70001}) {
                for (const bool out_of_place : {false, true}) {
                    for (const int64_t offset : {0, 4}) {
                        expect_same({.count = count,
                                     .gradient_type = kTypes[count % 3],
                                     .weight_type = offset == 0 ? DType::bf16 : DType::f16,
                                     .fill = Fill::any_finite,
                                     .seed = static_cast<uint64_t>(count),
                                     .offset = offset,
                                     .out_of_place = out_of_place,
                                     .moment_type = format.moment_type,
                                     .split = format.split,
                                     .element = (int64_t{1} << 34) - (1 << 17)},
                                    scalars);
                    }
                }
            }
        }
    }
    const Scalars sgd = scalars_of({.method = Method::sgd, .weight_decay = 0.1}, 1, 1);
    for (const MomentType type : {MomentType::bf16, MomentType::int8})
        expect_same({.count = 99, .with_m = false, .moment_type = type, .split = true}, sgd);
}

TEST_F(CudaSmall, split_masters_beside_fp16) {
    for (const Method method : kMethods) {
        for (const MomentType type : {MomentType::f32, MomentType::bf16, MomentType::int8}) {
            for (const Fill fill : {Fill::ordinary, Fill::edges}) {
                for (const DType gradient : kTypes) {
                    expect_same({.count = 2077,
                                 .gradient_type = gradient,
                                 .weight_type = DType::f16,
                                 .fill = fill,
                                 .out_of_place = fill == Fill::edges,
                                 .moment_type = type,
                                 .split = true},
                                scalars_for(method));
                }
            }
        }
    }
}

// Tails, borders of blocks, and what a block's values can be.
TEST_F(CudaSmall, blocks_of_codes) {
    for (const Method method : kMethods) {
        for (const int64_t count : {255, 256, 257, 511, 513, 2048, 4096, 5000}) {
            for (const Fill fill : {Fill::ordinary, Fill::edges, Fill::any_finite}) {
                for (const DType weight : kTypes) {
                    expect_same({.count = count,
                                 .gradient_type = kTypes[count % 3],
                                 .weight_type = weight,
                                 .fill = fill,
                                 .seed = static_cast<uint64_t>(count),
                                 .offset = count % 16 * 4,
                                 .out_of_place = weight == DType::bf16,
                                 .moment_type = MomentType::int8},
                                scalars_for(method));
                }
            }
        }
    }
}

TEST_F(CudaSmall, what_is_not_finite_makes_its_block_nan_and_no_other) {
    for (const Method method : kMethods) {
        for (const float bad : {std::nanf(""), INFINITY}) {
            Case c{.count = 600, .moment_type = MomentType::int8};
            c.positive_m = method == Method::adagrad;
            Arrays got(c), want(c);
            got.gradient().put(300, bad);
            want.gradient().put(300, bad);
            update_on_device(got, c, scalars_for(method));
            update_reference(want.span(), scalars_for(method));
            EXPECT_EQ(difference(got, want, c), "") << name_of(method);
            EXPECT_TRUE(std::isnan(got.value(1, 256)) && !std::isnan(got.value(1, 255)));
        }
    }
}

TEST_F(CudaSmall, views_aligned_to_an_element_only) {
    for (const Method method : kMethods) {
        for (int64_t offset = 0; offset < 64; offset += 4) {
            expect_same({.count = 133,
                         .gradient_type = kTypes[offset / 4 % 3],
                         .weight_type = kTypes[offset / 12 % 3],
                         .offset = offset,
                         .out_of_place = offset % 8 == 0},
                        scalars_for(method));
        }
    }
}

TEST_F(CudaSmall, absent_weight_and_absent_moment) {
    for (int64_t count = 0; count < 20; ++count) {
        for (const Method method : kMethods) {
            expect_same({.count = count, .with_weight = false}, scalars_for(method));
        }
        const Scalars sgd = scalars_of({.method = Method::sgd, .weight_decay = 0.1}, 1, 1);
        expect_same({.count = count, .with_m = false}, sgd);
        expect_same({.count = count}, sgd);
        const Hyper nesterov{.method = Method::sgd, .momentum = 0.9, .nesterov = true};
        expect_same({.count = count}, scalars_of(nesterov, 1, 1));
    }
}

TEST_F(CudaSmall, leaf_norms_have_the_tree_of_the_header) {
    for (const DType type : kTypes) {
        for (const int64_t count : {0, 1, 15, 16, 17, 63, 4095, 4096, 4097, 8192, 20000, 36865}) {
            for (const Fill fill : {Fill::ordinary, Fill::edges, Fill::any_finite}) {
                expect_same_norms({.count = count, .gradient_type = type, .fill = fill});
            }
        }
    }
}

TEST_F(CudaSmall, a_gradient_that_is_not_finite_shows_in_its_leaf) {
    for (const float value : {std::nanf(""), INFINITY, -INFINITY}) {
        for (const int64_t at : {0, 17, 4096, 9001}) {
            Arrays arrays({.count = 9002, .seed = 3});
            arrays.gradient().put(at, value);
            std::vector<float> leaves(3);
            OnDevice gradient(arrays.gradient()), sums(leaves.data(), 12);
            cuda::leaf_norms(gradient.data(), DType::f32, 9002, sums.floats(), nullptr);
            sums.read(leaves.data());
            for (size_t leaf = 0; leaf < 3; ++leaf) {
                EXPECT_EQ(std::isfinite(leaves[leaf]), leaf != static_cast<size_t>(at / kLeaf));
            }
        }
    }
}

TEST_F(CudaSmall, recast_of_every_size) {
    for (const DType type : kTypes) {
        for (int64_t count = 0; count <= 70; ++count) {
            const Case c{.count = count, .weight_type = type, .offset = count % 3 * 4};
            Arrays got(c), want(c);
            OnDevice p(got.in(0)), weight(got.weight());
            cuda::recast(p.floats(), count, type, weight.data(), nullptr);
            weight.read(got.weight().data());
            recast(want.in(0).floats(), count, type, want.weight().data());
            EXPECT_EQ(difference(got, want, c), "") << name_of(type) << ", count " << count;
        }
    }
}

// All 2^16 values of a half as gradient; every half-way point and its neighbours as weight.
TEST_F(Cuda, every_half_and_every_tie) {
    for (const DType type : {DType::bf16, DType::f16}) {
        std::vector<float> values;
        std::vector<uint16_t> halves, want;
        for (uint32_t half = 0; half < 0x10000; ++half) {
            const auto widened = [&](uint32_t bits) {
                const auto low = static_cast<uint16_t>(bits);
                return type == DType::bf16 ? from_bf16(low) : from_f16(low);
            };
            const float value = widened(half);
            const auto tie = static_cast<float>((double{value} + widened(half + 1)) / 2);
            for (const float v :
                 {value, tie, std::nextafter(tie, INFINITY), std::nextafter(tie, -INFINITY)}) {
                if (v != v) continue;
                values.push_back(v);
                want.push_back(type == DType::bf16 ? to_bf16(v) : to_f16(v));
            }
            halves.push_back(finite_half(type, half));
        }
        const auto count = static_cast<int64_t>(values.size());
        std::vector<uint16_t> rounded(values.size());
        OnDevice p(values.data(), count * 4), weight(rounded.data(), count * 2);
        cuda::recast(p.floats(), count, type, weight.data(), nullptr);
        weight.read(rounded.data());
        EXPECT_EQ(std::memcmp(rounded.data(), want.data(), rounded.size() * 2), 0);

        std::vector<float> got(0x10000), reference(0x10000);
        const Scalars sgd = scalars_of({.method = Method::sgd, .lr = 1}, 1, 1);
        Span span{.count = 0x10000, .gradient = halves.data(), .gradient_type = type};
        span.p_in = span.p = reference.data();
        update_reference(span, sgd);
        OnDevice gradient(halves.data(), 0x20000), moved(got.data(), 0x40000);
        span.gradient = gradient.data();
        span.p_in = span.p = moved.floats();
        cuda::update(span, sgd, nullptr);
        moved.read(got.data());
        EXPECT_EQ(std::memcmp(got.data(), reference.data(), got.size() * 4), 0);
    }
}

// 2^24 random finite bit patterns for each input of every method, and 2^20 of the edges.
TEST_F(Cuda, random_bit_patterns) {
    constexpr int64_t kBlock = 1 << 20;
    for (const Method method : kMethods) {
        const Scalars scalars[] = {scalars_for(method), scalars_for(method, 0.3, 1.0)};
        for (uint64_t block = 0; block < (1 << 24) / kBlock; ++block) {
            expect_same({.count = kBlock,
                         .gradient_type = kTypes[block % 3],
                         .weight_type = kTypes[block / 3 % 3],
                         .fill = Fill::any_finite,
                         .seed = block},
                        scalars[block % 2]);
        }
        expect_same({.count = 1 << 20, .fill = Fill::edges, .seed = 99}, scalars[0]);
    }
    for (const DType type : kTypes) {
        expect_same_norms({.count = (1 << 22) + 5, .gradient_type = type, .fill = Fill::edges});
        expect_same_norms(
            {.count = (1 << 22) + 5, .gradient_type = type, .fill = Fill::any_finite});
    }
}

TEST_F(CudaSmall, streams_other_than_the_default) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const Case c{.count = 1000};
    Arrays got(c), want(c);
    OnDevice p(got.in(0)), weight(got.weight());
    cuda::recast(p.floats(), c.count, c.weight_type, weight.data(), stream);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    weight.read(got.weight().data());
    recast(want.in(0).floats(), c.count, c.weight_type, want.weight().data());
    EXPECT_EQ(difference(got, want, c), "");
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace ferry::optim

#endif

namespace ferry::optim {
namespace {

TEST(CudaBuild, without_a_gpu_the_caller_is_told) {
    if (cuda::available()) GTEST_SKIP() << "there is a GPU";
    float p = 1;
    uint16_t weight = 0;
    EXPECT_THROW(cuda::recast(&p, 1, DType::bf16, &weight, nullptr), Error);
    EXPECT_THROW(cuda::leaf_norms(&p, DType::f32, 1, &p, nullptr), Error);
    const Scalars sgd = scalars_of({.method = Method::sgd}, 1, 1);
    EXPECT_THROW(cuda::update({.count = 1, .gradient = &p, .p_in = &p, .p = &p}, sgd, nullptr),
                 Error);
}

}  // namespace
}  // namespace ferry::optim
