// Speed of one decoder block, forward and backward, against the rate of the GEMM alone: what share
// of the arithmetic peak a block reaches, and where the rest goes.
//   bench_block [--threads N] [--bf16] [--hidden H] [--inner I] [--sequence S] [--sequences B]
//   [--tile M]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "ferry/streams.h"
#include "model/model.h"

namespace {

using namespace ferry;

struct Options {
    int threads = 2;
    int64_t hidden = 256, inner = 688, heads = 8, kv_heads = 4, sequence = 256, sequences = 16;
    int64_t vocab = 256, tile = 0;
    DType type = DType::f32;
};

Options parse(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; ++i) {
        const std::string_view name = argv[i];
        const auto number = [&] { return i + 1 < argc ? std::atoll(argv[++i]) : 0; };
        if (name == "--threads")
            o.threads = static_cast<int>(number());
        else if (name == "--hidden")
            o.hidden = number();
        else if (name == "--inner")
            o.inner = number();
        else if (name == "--heads")
            o.heads = number();
        else if (name == "--kv-heads")
            o.kv_heads = number();
        else if (name == "--sequence")
            o.sequence = number();
        else if (name == "--sequences")
            o.sequences = number();
        else if (name == "--vocab")
            o.vocab = number();
        else if (name == "--tile")
            o.tile = number();
        else if (name == "--bf16")
            o.type = DType::bf16;
        else
            std::fprintf(stderr, "unknown option %s\n", argv[i]), std::exit(2);
    }
    return o;
}

// Seconds of the fastest of several runs: other work on the machine only slows. With one thread it
// is the processor's time that counts.
double fastest(const std::function<void()>& work, bool processor_time) {
    using Clock = std::chrono::steady_clock;
    double best = 1e9;
    const auto begin = Clock::now();
    for (int i = 0; i < 200; ++i) {
        const auto start = Clock::now();
        const std::clock_t busy = std::clock();
        work();
        const double wall = std::chrono::duration<double>(Clock::now() - start).count();
        const double own = static_cast<double>(std::clock() - busy) / CLOCKS_PER_SEC;
        best = std::min(best, processor_time ? own : wall);
        if (i > 2 && Clock::now() - begin > std::chrono::seconds(2)) break;
    }
    return best;
}

void report(const char* name, double seconds, double flops) {
    std::printf("%-28s %9.3f ms %8.1f GFLOP/s\n", name, seconds * 1e3, flops / seconds * 1e-9);
}

class Bench {
public:
    explicit Bench(const Options& o) : o_(o), team_(o.threads), ops_(ops::make_cpu_ops(team_)) {}

    void gemms() {
        const int64_t t = o_.sequence * o_.sequences, h = o_.hidden, i = o_.inner;
        gemm("gemm nt [T, 2I] = [T, H] W", ops::Form::nt, t, 2 * i, h);
        gemm("gemm nn [T, H] = [T, 2I] W", ops::Form::nn, t, h, 2 * i);
        gemm("gemm tn [2I, H] += dY^T X", ops::Form::tn, 2 * i, h, t);
        gemm("gemm nt [T, H] = [T, H] W", ops::Form::nt, t, h, h);
        gemm("gemm tn [H, H] += dY^T X", ops::Form::tn, h, h, t);
    }

    void attention() {
        const int64_t d = o_.hidden / o_.heads, t = o_.sequence * o_.sequences;
        const ops::Attention s{o_.sequences, o_.sequence, o_.heads, o_.kv_heads, d, 0.2, o_.type};
        Buffer q(o_.type, t, o_.hidden), k(o_.type, t, o_.kv_heads * d), v(k), out(q), dout(q),
            dq(q), dk(k), dv(k);
        std::vector<float> lse(static_cast<size_t>(o_.heads * t));
        std::vector<std::byte> room(static_cast<size_t>(ops_->attention_backward_scratch_bytes(s) +
                                                        ops_->attention_forward_scratch_bytes(s)));
        const double flops = attention_flops();
        report("attention forward", time([&] {
                   ops_->attention_forward(s, q.view(), k.view(), v.view(), out.view(), lse.data(),
                                           room.data());
               }),
               flops);
        report("attention backward", time([&] {
                   ops_->attention_backward(s, q.view(), k.view(), v.view(), out.view(),
                                            dout.view(), lse.data(), dq.view(), dk.view(),
                                            dv.view(), room.data());
               }),
               2.5 * flops);
    }

    void rows() {
        const int64_t t = o_.sequence * o_.sequences, h = o_.hidden, i = o_.inner;
        Buffer x(o_.type, t, h), w(o_.type, 1, h), y(x), gate(o_.type, t, 2 * i),
            active(o_.type, t, i);
        std::vector<float> rstd(static_cast<size_t>(t), 1.0f), dw(static_cast<size_t>(h));
        std::vector<std::byte> room(static_cast<size_t>(ops_->norm_backward_scratch_bytes(t, h)));
        report("norm forward",
               time([&] { ops_->norm_forward(x.view(), w.view(), 1e-5, y.view(), rstd.data()); }),
               0);
        report("norm backward", time([&] {
                   ops_->norm_backward(y.view(), x.view(), w.view(), rstd.data(), x.view(),
                                       x.view(), dw.data(), room.data());
               }),
               0);
        report("swiglu forward", time([&] { ops_->swiglu_forward(gate.view(), active.view()); }),
               0);
        report("swiglu backward", time([&] { ops_->swiglu_backward(active.view(), gate.view()); }),
               0);
        const std::vector<double> frequencies(static_cast<size_t>(h / o_.heads / 2), 0.01);
        report("rope", time([&] {
                   ops_->rope(x.view(), {.sequence = o_.sequence,
                                         .heads = o_.heads,
                                         .head_dim = h / o_.heads,
                                         .frequencies = frequencies.data()});
               }),
               0);
    }

    void block() {
        const model::Shape shape{.hidden = o_.hidden,
                                 .layers = 1,
                                 .heads = o_.heads,
                                 .kv_heads = o_.kv_heads,
                                 .head_dim = o_.hidden / o_.heads,
                                 .intermediate = o_.inner,
                                 .vocab = o_.vocab};
        const model::Numerics numerics{.sequence = o_.sequence,
                                       .micro_batch = o_.sequences,
                                       .mlp_tile = o_.tile,
                                       .compute = o_.type,
                                       .residual = o_.type};
        model::Decoder decoder(shape, numerics, model::layers_of(shape, {}, false), *ops_);
        const int64_t t = numerics.tokens();
        Buffer x(o_.type, t, o_.hidden), y(x), dx(x);
        std::vector<std::byte> room(static_cast<size_t>(decoder.scratch_bytes()));
        const model::Layer& layer = decoder.layers()[1];
        std::vector<float> w(static_cast<size_t>(layer.elements)), g(w.size());
        model::initialise(shape, layer, 1, 0, w);
        Buffer weights(o_.type, 1, layer.elements);
        ops_->cast(ops::ConstView::of(w.data(), DType::f32, 1, layer.elements), weights.view());
        uint32_t bad = 0;
        int64_t matrices = 0;
        for (const auto& tensor : layer.tensors)
            matrices += tensor.shape.size() == 2 ? tensor.count : 0;
        const double gemm = 2.0 * static_cast<double>(matrices * t),
                     down = 2.0 * static_cast<double>(o_.hidden * o_.inner * t);
        report("block forward", time([&] {
                   decoder.forward(0, weights.data(), x.data(), y.data(), &bad, room.data());
               }),
               gemm + attention_flops());
        report("block backward + recompute", time([&] {
                   decoder.backward(0, weights.data(), x.data(), dx.data(), true, g.data(),
                                    room.data());
               }),
               3 * gemm - down + 3.5 * attention_flops());
        head(decoder, x, dx, room);
    }

private:
    double time(const std::function<void()>& work) { return fastest(work, o_.threads == 1); }

    class Buffer {
    public:
        Buffer(DType type, int64_t rows, int64_t cols)
            : type_(type),
              rows_(rows),
              cols_(cols),
              bytes_(static_cast<size_t>(rows * cols * size_of(type))) {
            for (int64_t i = 0; i < rows * cols; ++i) {
                const float value = static_cast<float>(i % 17) * 0.1f - 0.8f;
                const uint16_t narrow = to_bf16(value);
                std::memcpy(bytes_.data() + i * size_of(type),
                            type == DType::f32 ? static_cast<const void*>(&value) : &narrow,
                            static_cast<size_t>(size_of(type)));
            }
        }
        void* data() { return bytes_.data(); }
        ops::View view() { return ops::View::of(bytes_.data(), type_, rows_, cols_); }

    private:
        DType type_;
        int64_t rows_, cols_;
        std::vector<std::byte> bytes_;
    };

    // The causal half of scores and weighted values.
    double attention_flops() const {
        return 2.0 * static_cast<double>(o_.sequences * o_.sequence * o_.sequence * o_.hidden);
    }

    void gemm(const char* name, ops::Form form, int64_t m, int64_t n, int64_t k) {
        const bool tn = form == ops::Form::tn, nt = form == ops::Form::nt;
        Buffer a(o_.type, tn ? k : m, tn ? m : k), b(o_.type, nt ? n : k, nt ? k : n),
            c(tn ? DType::f32 : o_.type, m, n);
        const ops::Gemm g{
            .form = form, .a = a.view(), .b = b.view(), .c = c.view(), .accumulate = tn};
        std::vector<std::byte> room(static_cast<size_t>(ops_->gemm_scratch_bytes(g)));
        report(name, time([&] { ops_->gemm(g, room.data()); }),
               2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
    }

    void head(model::Decoder& decoder, Buffer& x, Buffer& dx, std::vector<std::byte>& room) {
        const model::Layer& layer = decoder.layers().back();
        const int64_t t = decoder.numerics().tokens();
        Buffer weights(o_.type, 1, layer.elements);
        std::vector<float> g(static_cast<size_t>(layer.elements));
        std::vector<int32_t> targets(static_cast<size_t>(t));
        for (size_t i = 0; i < targets.size(); ++i)
            targets[i] = static_cast<int32_t>(i % static_cast<size_t>(o_.vocab));
        double loss = 0;
        report("head", time([&] {
                   decoder.head(weights.data(), nullptr, x.data(), targets.data(), 1e-4f, dx.data(),
                                g.data(), nullptr, &loss, room.data());
               }),
               6.0 * static_cast<double>(t * o_.vocab * o_.hidden));
    }

    Options o_;
    Team team_;
    std::unique_ptr<ops::Ops> ops_;
};

}  // namespace

int main(int argc, char** argv) {
    ferry::hold_standard_streams();
    const Options o = parse(argc, argv);
    std::printf("%d threads, %s, hidden %lld, MLP %lld, %lld x %lld tokens\n", o.threads,
                std::string(name_of(o.type)).c_str(), static_cast<long long>(o.hidden),
                static_cast<long long>(o.inner), static_cast<long long>(o.sequences),
                static_cast<long long>(o.sequence));
    Bench bench(o);
    bench.gemms();
    bench.attention();
    bench.rows();
    bench.block();
}
