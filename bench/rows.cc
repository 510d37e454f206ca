// Speed of the GPU's operations on rows and of its optimizer's update, beside a copy within the
// GPU's memory in the same run: what share of the copy's bytes a second each reaches, of the bytes
// that it must touch at least.
//   bench_rows [--only TEXT] [--rows N] [--shape NAME] [--json FILE]
// --only: cases whose name has the text. --rows: tokens in place of the shape's own. --json: FILE
// has a run as bench/results/ holds them: each case's milliseconds beside those of a copy of its
// bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/random.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/optim.h"
#include "ferry/streams.h"
#include "ops/ops.h"

namespace {

using namespace ferry;
using ops::ConstView;
using ops::View;

struct Shape {
    const char* name;
    int64_t rows, hidden, inner, heads, kv_heads, head_dim, sequence, vocab;
    bool layer_norm = false, head_norms = false;
};
constexpr Shape kShapes[] = {
    {"576", 2048, 576, 1536, 9, 3, 64, 2048, 49152},
    {"gpt2", 16384, 768, 3072, 12, 12, 64, 1024, 50257, true},
    {"gpt2-xl", 16384, 1600, 6400, 25, 25, 64, 1024, 50257, true},
    {"0.5b", 16384, 896, 4864, 14, 2, 64, 2048, 151936},
    {"1b", 32768, 2048, 8192, 32, 8, 64, 4096, 128256},
    {"qwen3", 65536, 1024, 3072, 16, 8, 128, 4096, 151936, false, true},
    {"4b", 16384, 2560, 9728, 32, 8, 128, 8192, 151936, false, true},
    {"3b", 16384, 2048, 11008, 16, 2, 128, 4096, 151936},
    {"phi", 16384, 3072, 8192, 32, 32, 96, 4096, 32064},
    {"8192", 8192, 8192, 28672, 64, 8, 128, 4096, 128256},
};

void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

// Zeros, or normal deviates of a seeded generator, again and again.
class Memory {
public:
    explicit Memory(int64_t bytes) : bytes_(bytes) {
        check(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(bytes, 256))));
        check(cudaMemset(data_, 0, static_cast<size_t>(bytes)));
    }
    Memory(DType type, int64_t count, float scale = 1, bool positive = false)
        : Memory(count * size_of(type)) {
        constexpr int64_t kBlock = 1 << 16;
        std::vector<uint32_t> words(static_cast<size_t>(std::min(kBlock, count)) + 1);
        auto* narrow = reinterpret_cast<uint16_t*>(words.data());
        for (int64_t i = 0; i < std::min(kBlock, count); ++i) {
            const auto at = static_cast<uint32_t>(i);
            float value = scale * philox_normal({1, Purpose::test}, {at, 0, 0, 0});
            if (positive) value = value * value;
            if (type == DType::f32) std::memcpy(&words[static_cast<size_t>(i)], &value, 4);
            if (type == DType::bf16) narrow[i] = to_bf16(value);
            if (type == DType::f16) narrow[i] = to_f16(value);
        }
        for (int64_t at = 0; at < count; at += kBlock) {
            const int64_t bytes = std::min(kBlock, count - at) * size_of(type);
            check(cudaMemcpy(static_cast<char*>(data_) + at * size_of(type), words.data(),
                             static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { cudaFree(data_); }
    template <class T>
    T* as() {
        return static_cast<T*>(data_);
    }
    void fill(const void* from) {
        check(cudaMemcpy(data_, from, static_cast<size_t>(bytes_), cudaMemcpyHostToDevice));
    }

private:
    int64_t bytes_;
    void* data_ = nullptr;
};

struct Matrix {
    DType type;
    int64_t rows, cols;
    Memory memory;
    Matrix(DType t, int64_t r, int64_t c, float scale = 1)
        : type(t), rows(r), cols(c), memory(t, r * c, scale) {}
    View view() { return View::of(memory.as<void>(), type, rows, cols); }
    int64_t bytes() const { return rows * cols * size_of(type); }
};

class Bench {
public:
    explicit Bench(std::string only)
        : only_(std::move(only)),
          executor_(make_thread_executor()),
          device_(Device::open(DeviceKind::cuda, *executor_)),
          stream_(static_cast<cudaStream_t>(device_->stream(StreamKind::compute).native())),
          ops_(ops::make_cuda_ops(*device_)) {
        check(cudaEventCreate(&begin_));
        check(cudaEventCreate(&end_));
        cudaDeviceProp found{};
        check(cudaGetDeviceProperties(&found, 0));
        std::printf("%s, %d multiprocessors\n", found.name, found.multiProcessorCount);
        gpu_ = found.name;
        measure_copy();
    }
    ~Bench() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }

    void shape(const Shape& s) {
        std::printf(
            "\n%s: %lld rows, hidden %lld, inner %lld, %lld/%lld heads of %lld, vocabulary "
            "%lld\n",
            s.name, number(s.rows), number(s.hidden), number(s.inner), number(s.heads),
            number(s.kv_heads), number(s.head_dim), number(s.vocab));
        of_shape_ = std::string(s.name) + ": ";
        for (const DType residual : {DType::bf16, DType::f32}) norms(s, residual);
        if (s.head_norms) head_norms(s);
        if (!s.layer_norm) turn(s);
        activations(s);
        whole(s);
        loss(s);
        embedding(s);
    }

    void updates() {
        std::printf("\nupdates and gradients of 64 Mi elements\n");
        of_shape_.clear();
        const int64_t n = int64_t{64} << 20;
        rounding(n);
        for (const auto method : {optim::Method::adamw, optim::Method::lion, optim::Method::sgd}) {
            update(method, n, MomentType::f32, false);
            update(method, n, MomentType::bf16, true);
        }
        update(optim::Method::adamw, n, MomentType::bf16, false);
        update(optim::Method::adamw, n, MomentType::int8, false);
        update(optim::Method::lion, n, MomentType::int8, false);
        update(optim::Method::adamw, n, MomentType::f32, true);
        chunks(24, 4 << 20);
        chunks(24, 1 << 20);
        update(optim::Method::adamw, 4 << 20, MomentType::f32, false);
        update(optim::Method::adamw, 1 << 20, MomentType::f32, false);
    }

    // A run as bench/make_page.py reads it.
    nlohmann::ordered_json run(const std::string& command) const {
        char date[16];
        const std::time_t now = std::time(nullptr);
        std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
        const std::string note = "copy within the GPU's memory " +
                                 std::to_string(std::llround(copy_ * 1e-9)) +
                                 " GB/s, read and written; reference: that copy of the bytes that "
                                 "the kernel must touch; value: the fastest of four batches";
        return {{"machine", {{"processor", processor()}, {"gpus", {gpu_}}}},
                {"command", command},
                {"date", date},
                {"rows", rows_},
                {"notes", {note}}};
    }

private:
    static std::string processor() {
        std::ifstream file("/proc/cpuinfo");
        for (std::string line; std::getline(file, line);) {
            const size_t colon = line.find(": ");
            if (line.starts_with("model name") && colon != std::string::npos)
                return line.substr(colon + 2);
        }
        return "unknown";
    }
    static long long number(int64_t value) { return static_cast<long long>(value); }

    // Seconds of the fastest of some batches: other work only slows.
    double seconds(const std::function<void()>& work) {
        work();
        work();
        double best = 1e9;
        for (int batch = 0; batch < 4; ++batch) {
            constexpr int kRuns = 5;
            check(cudaEventRecord(begin_, stream_));
            for (int i = 0; i < kRuns; ++i) work();
            check(cudaEventRecord(end_, stream_));
            check(cudaEventSynchronize(end_));
            float ms = 0;
            check(cudaEventElapsedTime(&ms, begin_, end_));
            best = std::min(best, ms * 1e-3 / kRuns);
        }
        return best;
    }

    void measure_copy() {
        const int64_t bytes = int64_t{1} << 30;
        Memory from(bytes), to(bytes);
        const double s = seconds([&] {
            check(cudaMemcpyAsync(to.as<void>(), from.as<void>(), static_cast<size_t>(bytes),
                                  cudaMemcpyDeviceToDevice, stream_));
        });
        copy_ = 2.0 * static_cast<double>(bytes) / s;
        std::printf("copy within the GPU's memory %.0f GB/s, read and written\n", copy_ * 1e-9);
    }

    void report(const std::string& name, int64_t bytes, const std::function<void()>& work) {
        if (name.find(only_) == std::string::npos) return;
        const double s = seconds(work);
        const double rate = static_cast<double>(bytes) / s;
        std::printf("%-44s %10.1f MB %9.4f ms %7.0f GB/s  %5.2f of the copy\n", name.c_str(),
                    static_cast<double>(bytes) * 1e-6, s * 1e3, rate * 1e-9, rate / copy_);
        std::fflush(stdout);
        rows_.push_back({{"name", of_shape_ + name},
                         {"value", s * 1e3},
                         {"unit", "ms"},
                         {"reference", static_cast<double>(bytes) / copy_ * 1e3},
                         {"ratio", rate / copy_}});
    }
    bool wanted(const std::string& part) const {
        return only_.empty() || part.find(only_) != std::string::npos ||
               only_.find(part) != std::string::npos;
    }

    void norms(const Shape& s, DType residual) {
        const std::string kind = s.layer_norm ? "layer norm" : "norm";
        if (!wanted(kind)) return;
        const std::string with = ", residual " + std::string(name_of(residual));
        Matrix x(residual, s.rows, s.hidden), dx(residual, s.rows, s.hidden);
        Matrix w(DType::bf16, 1, s.hidden), b(DType::bf16, 1, s.hidden);
        Matrix y(DType::bf16, s.rows, s.hidden);
        Memory stats(2 * s.rows * 4), dw(s.hidden * 4), db(s.hidden * 4),
            room(ops_->layer_norm_backward_scratch_bytes(s.rows, s.hidden));
        auto* r = stats.as<float>();
        report(kind + " forward" + with, x.bytes() + y.bytes(), [&] {
            s.layer_norm ? ops_->layer_norm_forward(x.view(), w.view(), b.view(), 1e-5, y.view(), r)
                         : ops_->norm_forward(x.view(), w.view(), 1e-5, y.view(), r);
        });
        const auto backward = [&](float* gradient, float* of_bias) {
            s.layer_norm
                ? ops_->layer_norm_backward(y.view(), x.view(), w.view(), r, dx.view(), dx.view(),
                                            gradient, of_bias, room.as<std::byte>())
                : ops_->norm_backward(y.view(), x.view(), w.view(), r, dx.view(), dx.view(),
                                      gradient, room.as<std::byte>());
        };
        const int64_t bytes = x.bytes() + y.bytes() + 2 * dx.bytes();
        report(kind + " backward" + with, bytes, [&] { backward(dw.as<float>(), nullptr); });
        if (s.layer_norm) {
            report(kind + " backward, bias" + with, bytes,
                   [&] { backward(dw.as<float>(), db.as<float>()); });
        }
        report(kind + " backward, frozen weight" + with, bytes,
               [&] { backward(nullptr, nullptr); });
    }

    void head_norms(const Shape& s) {
        if (!wanted("norm of heads")) return;
        const int64_t query = s.heads * s.head_dim, key = s.kv_heads * s.head_dim;
        Matrix qkv(DType::bf16, s.rows, query + 2 * key), out(DType::bf16, s.rows, query + key);
        Matrix dqkv(DType::bf16, s.rows, query + 2 * key), w(DType::bf16, 1, s.head_dim);
        Memory rstd(s.rows * s.heads * 4), dw(s.head_dim * 4);
        Memory room(ops_->norm_backward_scratch_bytes(s.rows * s.heads, s.head_dim));
        const std::vector<double> frequencies(static_cast<size_t>(s.head_dim / 2), 0.01);
        ops::Rope rope{.sequence = s.sequence,
                       .heads = s.heads,
                       .head_dim = s.head_dim,
                       .frequencies = frequencies.data()};
        Memory angles(ops_->rope_angles_floats(rope) * 4);
        report("angles of rope", ops_->rope_angles_floats(rope) * 4,
               [&] { ops_->rope_angles(rope, angles.as<float>()); });
        const auto of = [&](const char* which, int64_t column, int64_t heads) {
            const int64_t cols = heads * s.head_dim, bytes = s.rows * cols * 2;
            const View x = qkv.view().col_range(column, cols);
            const View dx = dqkv.view().col_range(column, cols);
            const View y = out.view().col_range(column, cols);
            const std::string name = std::string(", ") + which;
            rope.heads = heads;
            rope.inverse = false;
            report("norm of heads forward" + name, 2 * bytes,
                   [&] { ops_->norm_forward(x, w.view(), 1e-6, y, rstd.as<float>()); });
            report("norm of heads backward" + name, 3 * bytes, [&] {
                ops_->norm_backward(dx, x, w.view(), rstd.as<float>(), {}, dx, dw.as<float>(),
                                    room.as<std::byte>());
            });
            report("norm of heads and rope forward" + name, 2 * bytes, [&] {
                ops_->norm_rope_forward(x, w.view(), 1e-6, y, rstd.as<float>(), rope,
                                        angles.as<float>());
            });
            rope.inverse = true;
            report("norm of heads and rope backward" + name, 3 * bytes, [&] {
                ops_->norm_rope_backward(dx, x, w.view(), rstd.as<float>(), dw.as<float>(), rope,
                                         angles.as<float>(), room.as<std::byte>());
            });
        };
        of("queries", 0, s.heads);
        of("keys", query, s.kv_heads);
    }

    void turn(const Shape& s) {
        if (!wanted("rope")) return;
        const int64_t cols = (s.heads + 2 * s.kv_heads) * s.head_dim;
        Matrix qkv(DType::bf16, s.rows, cols);
        std::vector<double> frequencies;
        for (int64_t i = 0; i < s.head_dim / 2; ++i)
            frequencies.push_back(std::pow(1e4, -2.0 * double(i) / double(s.head_dim)));
        const int64_t heads = s.heads + s.kv_heads;
        report("rope of queries and keys", 2 * s.rows * heads * s.head_dim * 2, [&] {
            ops_->rope(qkv.view().col_range(0, heads * s.head_dim),
                       {.sequence = s.sequence,
                        .heads = heads,
                        .head_dim = s.head_dim,
                        .frequencies = frequencies.data()});
        });
    }

    void activations(const Shape& s) {
        if (!wanted(s.layer_norm ? "gelu" : "swiglu")) return;
        Matrix inner(DType::bf16, s.rows, (s.layer_norm ? 1 : 2) * s.inner);
        Matrix active(DType::bf16, s.rows, s.inner);
        const View i = inner.view(), a = active.view();
        const int64_t forward = inner.bytes() + active.bytes();
        if (s.layer_norm) {
            report("gelu forward", forward, [&] { ops_->gelu_forward(i, a); });
            report("gelu backward", 2 * forward, [&] { ops_->gelu_backward(a, i); });
        } else {
            report("swiglu forward", forward, [&] { ops_->swiglu_forward(i, a); });
            report("swiglu backward", 2 * forward, [&] { ops_->swiglu_backward(a, i); });
        }
    }

    // Operations that touch a whole matrix once.
    void whole(const Shape& s) {
        if (!wanted("cast") && !wanted("check finite") && !wanted("sum of rows")) return;
        Matrix wide(DType::f32, s.rows, s.hidden), narrow(DType::bf16, s.rows, s.hidden);
        Memory bad(4), sums(s.hidden * 4);
        Memory room(ops_->norm_backward_scratch_bytes(s.rows, s.hidden));
        report("cast fp32 to bf16", wide.bytes() + narrow.bytes(),
               [&] { ops_->cast(wide.view(), narrow.view()); });
        report("check finite", narrow.bytes(),
               [&] { ops_->check_finite(narrow.view(), bad.as<uint32_t>()); });
        report("sum of rows (bias)", narrow.bytes(),
               [&] { ops_->sum_rows(narrow.view(), sums.as<float>(), room.as<std::byte>()); });
    }

    void loss(const Shape& s) {
        if (!wanted("cross entropy")) return;
        const int64_t rows = std::min<int64_t>(s.rows, 4096);  // a tile of the head
        Matrix logits(DType::f32, rows, s.vocab), narrow(DType::bf16, rows, s.vocab);
        Memory targets(rows * 4), sum(8), room(ops_->cross_entropy_scratch_bytes(rows));
        const auto into = [&](View d) {
            ops_->cross_entropy(logits.view(), targets.as<int32_t>(), 1e-4f, d, sum.as<double>(),
                                room.as<std::byte>());
        };
        report("cross entropy, loss alone", logits.bytes(), [&] { into({}); });
        report("cross entropy, bf16 gradient", logits.bytes() + narrow.bytes(),
               [&] { into(narrow.view()); });
        report("cross entropy, fp32 gradient in place", 2 * logits.bytes(),
               [&] { into(logits.view()); });
    }

    void embedding(const Shape& s) {
        if (!wanted("embed")) return;
        Matrix table(DType::bf16, s.vocab, s.hidden), x(DType::bf16, s.rows, s.hidden);
        Memory gradient(s.vocab * s.hidden * 4), on_device(s.rows * 4);
        std::vector<int32_t> tokens;  // as in text: the n-th word about 1 / n as often as the first
        for (int64_t t = 0; t < s.rows; ++t) {
            const double u = double(philox({2, Purpose::test}, {uint32_t(t), 0, 0, 0})[0]) / 0x1p32;
            tokens.push_back(static_cast<int32_t>(std::pow(double(s.vocab), u)) - 1);
        }
        on_device.fill(tokens.data());
        std::vector<int32_t> sorted = tokens;
        std::sort(sorted.begin(), sorted.end());
        const int64_t unique = std::unique(sorted.begin(), sorted.end()) - sorted.begin();
        const auto* at = on_device.as<int32_t>();
        report("embed", 2 * x.bytes(),
               [&] { ops_->embed(at, table.view(), {}, nullptr, x.view()); });
        Memory room(ops_->embed_backward_scratch_bytes(s.rows));
        report("embed backward", x.bytes() + unique * s.hidden * 8, [&] {
            ops_->embed_backward(at, x.view(), gradient.as<float>(), room.as<std::byte>());
        });
        if (!s.layer_norm) return;
        report("positions backward", x.bytes() + s.sequence * s.hidden * 8, [&] {
            ops_->positions_backward(x.view(), s.sequence, nullptr, gradient.as<float>(), nullptr);
        });
        Memory starts(s.rows * 4);  // one document a sequence
        report("positions backward, documents", x.bytes() + s.sequence * s.hidden * 8, [&] {
            ops_->positions_backward(x.view(), s.sequence, starts.as<int32_t>(),
                                     gradient.as<float>(), room.as<std::byte>());
        });
    }

    void rounding(int64_t n) {
        if (!wanted("round") && !wanted("sum gradient") && !wanted("add")) return;
        Memory sum(DType::f32, n), wire(n * 4), leaves(n / 4096 * 4), pieces(DType::bf16, 4 * n);
        report("round gradient to bf16, with leaves", n * 6, [&] {
            ops_->round_gradient(sum.as<float>(), n, DType::bf16, wire.as<void>(),
                                 leaves.as<float>());
        });
        report("round gradient to fp32, with leaves", n * 8, [&] {
            ops_->round_gradient(sum.as<float>(), n, DType::f32, wire.as<void>(),
                                 leaves.as<float>());
        });
        report("sum gradient of 4 ranks, bf16", n * 10, [&] {
            ops_->sum_gradient(ConstView::of(pieces.as<void>(), DType::bf16, 4, n), wire.as<void>(),
                               leaves.as<float>());
        });
        report("add", n * 12, [&] { ops_->add(sum.as<float>(), wire.as<float>(), n); });
        report("recast to bf16", n * 6, [&] {
            optim::cuda::recast(sum.as<float>(), n, DType::bf16, wire.as<void>(), stream_);
        });
        report("leaf norms of bf16", n * 2, [&] {
            optim::cuda::leaf_norms(pieces.as<void>(), DType::bf16, n, leaves.as<float>(), stream_);
        });
    }

    void update(optim::Method method, int64_t n, MomentType moment, bool split) {
        if (!wanted("update")) return;
        const int moments = optim::moments_of(method);
        Memory gradient(DType::bf16, n, 1e-2f), weight(DType::bf16, n), p(DType::f32, n);
        // Any float's bytes are good codes; their scales are floats.
        const DType as = moment == MomentType::bf16 ? DType::bf16 : DType::f32;
        Memory m(as, n, 1e-2f), v(as, n, 1e-2f, true);
        Memory m_scale(DType::f32, n / kMomentBlock + 1, 1e-2f, true),
            v_scale(DType::f32, n / kMomentBlock + 1, 1e-2f, true);
        optim::Span span{.count = n,
                         .gradient = gradient.as<void>(),
                         .gradient_type = DType::bf16,
                         .moment_type = moment,
                         .m_in = m.as<void>(),
                         .m = m.as<void>(),
                         .weight = weight.as<void>(),
                         .weight_type = DType::bf16};
        if (moments == 2) span.v_in = span.v = v.as<void>();
        if (moment == MomentType::int8) {
            span.m_scale_in = span.m_scale = m_scale.as<float>();
            if (moments == 2) span.v_scale_in = span.v_scale = v_scale.as<float>();
        }
        if (split) {
            span.weight_in = weight.as<uint16_t>();
            span.low_in = span.low = p.as<uint16_t>();
        } else {
            span.p_in = span.p = p.as<float>();
        }
        const optim::Scalars scalars = optim::scalars_of(
            {.method = method, .lr = 1e-4, .weight_decay = 0.1, .momentum = 0.9}, 100, 0.5);
        const StateFormat format{.moments = moments, .moment_type = moment, .split = split};
        const int64_t bytes = 2 * format.bytes(n) + n * (split ? 6 : 4);
        report("update " + std::string(name_of(method)) + ", moments " +
                   std::string(name_of(moment)) + (split ? ", split" : "") + ", " +
                   std::to_string(n >> 20) + " Mi",
               bytes, [&] { optim::cuda::update(span, scalars, stream_); });
    }

    // Chunks of an array, as a run has them: a launch each, and together.
    void chunks(int64_t count, int64_t elements) {
        if (!wanted("update")) return;
        const int64_t n = count * elements;
        Memory gradient(DType::bf16, n, 1e-2f), weight(DType::bf16, n), p(DType::f32, n);
        Memory m(DType::f32, n, 1e-2f), v(DType::f32, n, 1e-2f, true);
        std::vector<optim::Span> spans;
        for (int64_t at = 0; at < n; at += elements) {
            optim::Span span{.count = elements,
                             .gradient = gradient.as<uint16_t>() + at,
                             .gradient_type = DType::bf16,
                             .weight = weight.as<uint16_t>() + at,
                             .weight_type = DType::bf16};
            span.p_in = span.p = p.as<float>() + at;
            span.m_in = span.m = m.as<float>() + at;
            span.v_in = span.v = v.as<float>() + at;
            spans.push_back(span);
        }
        const optim::Scalars scalars =
            optim::scalars_of({.lr = 1e-4, .weight_decay = 0.1}, 100, 0.5);
        const std::string what = "update adamw, " + std::to_string(count) + " chunks of " +
                                 std::to_string(elements >> 20) + " Mi";
        report(what + ", one by one", n * 28, [&] {
            for (const optim::Span& span : spans) optim::cuda::update(span, scalars, stream_);
        });
        report(what + ", together", n * 28, [&] { optim::cuda::update(spans, scalars, stream_); });
    }

    std::string only_, gpu_, of_shape_;
    nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Device> device_;
    cudaStream_t stream_;
    std::unique_ptr<ops::Ops> ops_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
    double copy_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    ferry::hold_standard_streams();
    std::string only, shape, json, command = "bench_rows";
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    int64_t rows = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view name = argv[i];
        if (name == "--only") only = argv[i + 1];
        if (name == "--shape") shape = argv[i + 1];
        if (name == "--json") json = argv[i + 1];
        if (name == "--rows") rows = std::atoll(argv[i + 1]);
    }
    try {
        Bench bench(only);
        for (Shape s : kShapes) {
            if (!shape.empty() && shape != s.name) continue;
            if (rows > 0) s.rows = rows;
            bench.shape(s);
        }
        if (shape.empty()) bench.updates();
        if (!json.empty()) {
            std::ofstream file(json);
            file << bench.run(command).dump(1) << "\n";
            if (!file.flush()) {
                std::fprintf(stderr, "%s cannot be written\n", json.c_str());
                return 1;
            }
        }
    } catch (const Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
