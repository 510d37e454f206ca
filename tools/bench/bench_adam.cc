#include "bench_adam.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>

#include "adam_plain.h"
#include "base/process_limits.h"
#include "ferry/error.h"

namespace ferry::tools {
namespace {

double seconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

// Filled by the threads that will use it, with ordinary magnitudes: denormals would be four times
// slower and measure something else.
class Array {
public:
    Array(int64_t bytes, uint32_t word, Team& team)
        : data_(static_cast<uint32_t*>(std::aligned_alloc(2 << 20, size(bytes)))) {
        if (!data_) {
            throw Error(Trouble::does_not_fit, {.what = "the system gives no memory for an array",
                                                .where = "--millions",
                                                .measured = std::to_string(bytes) + " B",
                                                .limit = address_space_limit(),
                                                .remedy = "measure fewer elements"});
        }
        constexpr int64_t kWords = 1 << 16;
        team.parallel(ceil_div(bytes / 4, kWords), [&](int64_t part) {
            const int64_t end = std::min(bytes / 4, (part + 1) * kWords);
            std::fill(data_.get() + part * kWords, data_.get() + end, word);
        });
    }
    float* floats() { return reinterpret_cast<float*>(data_.get()); }
    uint16_t* halves() { return reinterpret_cast<uint16_t*>(data_.get()); }

private:
    static size_t size(int64_t bytes) { return static_cast<size_t>(round_up(bytes, 2 << 20)); }
    struct Free {
        void operator()(uint32_t* data) const { std::free(data); }
    };
    std::unique_ptr<uint32_t, Free> data_;
};

// p, m, v, and out of place their copies.
int state_arrays(const AdamBench& what) { return what.out_of_place ? 6 : 3; }

struct Buffers {
    Buffers(const AdamBench& what, Team& team)
        : gradient(what.count * 4, 0x3a833a83u, team), weight(what.count * 2, 0, team) {
        for (int k = 0; k < state_arrays(what); ++k) {
            state.emplace_back(what.count * 4, 0x3a83126fu, team);
        }
        for (int k = 0; k < 2; ++k)
            scales.emplace_back(scale_bytes(MomentType::int8, what.count), 0x3a83126fu, team);
    }
    Array gradient, weight;
    std::vector<Array> state{};
    std::vector<Array> scales{};  // where m and v are coded
};

using Work = std::function<void()>;

// Contiguous equal shares, as an OpenMP loop would.
void on_threads(Team& team, int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    const int64_t share = round_up(ceil_div(count, team.threads()), 64);
    team.parallel(team.threads(), [&](int64_t t) {
        const int64_t begin = std::min(count, t * share);
        body(begin, std::min(share, count - begin));
    });
}

double timed(const Work& work) {
    const double start = seconds();
    work();
    return seconds() - start;
}

// Pairs in the order A B B A, so that a drift of the machine's speed hits both alike.
Row compare(std::string name, const Work& ours, const Work& theirs, int pairs, int64_t count) {
    std::vector<double> values, references, ratios;
    ours();
    if (theirs) theirs();
    for (int i = 0; i < pairs; ++i) {
        double reference = 0, value = 0;
        for (int k = 0; k < 2; ++k) {
            if ((i + k) % 2)
                value = timed(ours);
            else if (theirs)
                reference = timed(theirs);
        }
        values.push_back(value);
        references.push_back(reference);
        ratios.push_back(reference / value);
    }
    const double per_element = 1e9 / static_cast<double>(count);
    for (std::vector<double>* side : {&values, &references}) {
        for (double& value : *side) value *= per_element;
    }
    if (!theirs) return {.name = std::move(name), .value = median(values), .unit = "ns/param"};
    return compared(std::move(name), "ns/param", values, references, ratios);
}

class Bench {
public:
    Bench(const AdamBench& what, int threads)
        : what_(what), threads_(threads), team_(threads), buffers_(what, team_) {}

    void run(AdamRows& measured) {
        std::vector<Row>& rows = measured.rows;
        measure_triad();
        for (const DType type : what_.gradient_types) {
            if (type == DType::f32) measured.in_place_fp32.emplace(threads_, rows.size());
            rows.push_back(adamw(type, false, Stores::plain));
            if (!what_.out_of_place) continue;
            rows.push_back(adamw(type, true, Stores::plain));
            rows.push_back(adamw(type, true, Stores::non_temporal));
        }
        rows.push_back(norms());
        const DType first = what_.gradient_types.front();
        for (const optim::Method method : what_.methods)
            rows.push_back(other_method(method, first));
        for (const StateFormat& format : what_.formats) rows.push_back(adamw_in(format, first));
        for (const std::string& target : what_.targets) {
            const size_t before = rows.size();
            optim::force_target(target);
            rows.push_back(adamw(first, false, Stores::plain));
            for (const StateFormat& format : what_.formats) rows.push_back(adamw_in(format, first));
            for (size_t i = before; i < rows.size(); ++i) rows[i].name += ", " + target;
            optim::force_target("");
        }
    }

private:
    void measure_triad() {
        std::vector<double> rounds;
        rounds.reserve(5);
        for (int i = 0; i < 5; ++i) {
            rounds.push_back(timed([&] {
                on_threads(team_, what_.count, [&](int64_t begin, int64_t n) {
                    plain_triad(buffers_.state[0].floats() + begin,
                                buffers_.state[1].floats() + begin,
                                buffers_.state[2].floats() + begin, n);
                });
            }));
        }
        triad_bytes_per_second_ = 12.0 * static_cast<double>(what_.count) / median(rounds);
    }

    optim::Span span(DType gradient, bool out_of_place, const StateFormat& format = {}) {
        auto& s = buffers_.state;
        const size_t to = out_of_place ? 3 : 0;
        optim::Span span{.count = what_.count,
                         .gradient = buffers_.gradient.floats(),
                         .gradient_type = gradient,
                         .moment_type = format.moment_type,
                         .p_in = s[0].floats(),
                         .m_in = s[1].floats(),
                         .v_in = s[2].floats(),
                         .p = s[to].floats(),
                         .m = s[to + 1].floats(),
                         .v = s[to + 2].floats(),
                         .weight = buffers_.weight.halves(),
                         .weight_type = what_.weight_type};
        if (format.moment_type == MomentType::int8) {
            span.m_scale_in = span.m_scale = buffers_.scales[0].floats();
            span.v_scale_in = span.v_scale = buffers_.scales[1].floats();
        }
        if (!format.split) return span;
        span.p_in = span.p = nullptr;
        span.weight_in = buffers_.weight.halves();
        span.low_in = s[0].halves();
        span.low = s[to].halves();
        return span;
    }

    // Bytes the update itself has to move.
    double of_triad(const Row& row, DType gradient, const StateFormat& format) const {
        const int64_t weights = format.split ? 4 : 2;
        const double bytes =
            2 * format.element_bytes() + static_cast<double>(size_of(gradient) + weights);
        return bytes / row.value * 1e9 / triad_bytes_per_second_;
    }

    std::string name(const std::string& what, DType gradient) const {
        return what + ", " + std::string(ferry::name_of(gradient)) + " -> " +
               std::string(ferry::name_of(what_.weight_type)) + ", " + std::to_string(threads_) +
               (threads_ == 1 ? " thread" : " threads");
    }

    Row adamw(DType gradient, bool out_of_place, Stores stores) {
        const optim::Scalars scalars = optim::scalars_of(
            {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}, 100, 0.9);
        const optim::Span s = span(gradient, out_of_place);
        const PlainArrays plain{.count = s.count,
                                .gradient = s.gradient,
                                .gradient_type = gradient,
                                .p_in = s.p_in,
                                .m_in = static_cast<const float*>(s.m_in),
                                .v_in = static_cast<const float*>(s.v_in),
                                .p = s.p,
                                .m = static_cast<float*>(s.m),
                                .v = static_cast<float*>(s.v),
                                .weight = buffers_.weight.halves(),
                                .weight_type = what_.weight_type};
        Work theirs;
        if (plain_kind()) {
            theirs = [&] {
                on_threads(team_, what_.count,
                           [&](int64_t begin, int64_t n) { plain_adamw(plain, begin, n, stores); });
            };
        }
        std::string what = out_of_place ? "adamw out of place" : "adamw in place";
        if (out_of_place)
            what +=
                stores == Stores::plain ? " (by hand: plain stores)" : " (by hand: non-temporal)";
        Row row = compare(
            name(what, gradient), [&] { optim::update(team_, s, scalars); }, theirs, what_.pairs,
            what_.count);
        row.more.emplace_back("triad", of_triad(row, gradient, {}));
        return row;
    }

    Row other_method(optim::Method method, DType gradient) {
        const optim::Hyper hyper{.method = method,
                                 .lr = 1e-4,
                                 .weight_decay = 0.1,
                                 .momentum = method == optim::Method::sgd ? 0.9 : 0};
        const optim::Scalars scalars = optim::scalars_of(hyper, 100, 0.9);
        const optim::Span s = span(gradient, false);
        Row row = compare(
            name(std::string(optim::name_of(method)) + " in place", gradient),
            [&] { optim::update(team_, s, scalars); }, {}, what_.pairs, what_.count);
        row.more.emplace_back("triad",
                              of_triad(row, gradient, {.moments = optim::moments_of(method)}));
        return row;
    }

    Row adamw_in(const StateFormat& format, DType gradient) {
        const optim::Scalars scalars = optim::scalars_of(
            {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}, 100, 0.9);
        const optim::Span s = span(gradient, false, format);
        std::string what = "adamw in place";
        if (format.moment_type != MomentType::f32)
            what += ", " + std::string(name_of(format.moment_type)) + " moments";
        if (format.split) what += ", split master";
        Row row = compare(
            name(what, gradient), [&] { optim::update(team_, s, scalars); }, {}, what_.pairs,
            what_.count);
        row.more.emplace_back("triad", of_triad(row, gradient, format));
        return row;
    }

    Row norms() {
        std::vector<float> leaves(static_cast<size_t>(optim::leaves_of(what_.count)));
        const float* values = buffers_.state[0].floats();
        const Work ours = [&] {
            optim::leaf_norms(team_, values, DType::f32, what_.count, leaves.data());
        };
        Work theirs;
        std::atomic<float> sink{0};
        if (plain_kind()) {
            theirs = [&] {
                on_threads(team_, what_.count, [&](int64_t begin, int64_t n) {
                    sink = plain_squares(values + begin, n);
                });
            };
        }
        const std::string count =
            std::to_string(threads_) + (threads_ == 1 ? " thread" : " threads");
        Row row = compare("leaf norms, fp32, " + count, ours, theirs, what_.pairs, what_.count);
        row.more.emplace_back("triad", 4 / row.value * 1e9 / triad_bytes_per_second_);
        return row;
    }

    const AdamBench& what_;
    int threads_;
    Team team_;
    Buffers buffers_;
    double triad_bytes_per_second_ = 1;
};

}  // namespace

int64_t bytes_of(const AdamBench& what) {
    return what.count * (4 + 2 + 4 * int64_t{state_arrays(what)});
}

AdamRows measure_adam(const AdamBench& given) {
    AdamBench what = given;
    what.count = round_up(what.count, 64);  // the hand-written loop knows no tails
    AdamRows measured;
    for (const int threads : what.threads) Bench(what, threads).run(measured);
    return measured;
}

}  // namespace ferry::tools
