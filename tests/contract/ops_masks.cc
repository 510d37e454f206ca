// Attention under masks, of every implementation of Ops, against a softmax in fp64 over a mask that
// this file draws cell by cell: causal, and of a window, and of a pattern of blocks, and of
// documents.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "ops/part_attention.h"
#include "ops/patterns.h"
#include "tests/contract/ops_fixture.h"
#include "tests/support/quick.h"

namespace ferry::ops {
namespace {

class OpsMasks : public OpsContract {};

// A mask and what it is of.
struct Masked {
    std::string name;
    Attention shape{};
    BlockLists lists{};  // empty: dense
    std::vector<int32_t> starts_of{}, ends_of{};

    int64_t tokens() const { return shape.sequences * shape.sequence; }
    int64_t query() const { return shape.heads * shape.head_dim; }
    int64_t key() const { return shape.kv_heads * shape.head_dim; }

    Masked& window(int64_t tokens) {
        shape.window = tokens;
        return *this;
    }
    Masked& pattern(const Pattern& p) {
        lists = lists_of(p, shape.sequence, shape.heads, 0);
        return *this;
    }
    // Any cells, of one layout or one a head; the causal mask cuts them.
    template <class There>
    Masked& cells(int block, int layouts, const There& there) {
        lists = {.block = block,
                 .layouts = layouts,
                 .blocks = static_cast<int>(ceil_div(shape.sequence, int64_t{block}))};
        lists.row_starts.push_back(0);
        for (int head = 0; head < layouts; ++head) {
            for (int row = 0; row < lists.blocks; ++row) {
                for (int column = 0; column <= row; ++column)
                    if (there(head, row, column)) lists.columns.push_back(column);
                lists.row_starts.push_back(static_cast<int32_t>(lists.columns.size()));
            }
        }
        lists.transpose();
        return *this;
    }
    // So many in each row, of lengths that differ.
    Masked& documents(int64_t count) {
        shape.documents = true;
        for (int64_t row = 0; row < shape.sequences; ++row) {
            int64_t begin = 0;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t odd = (row + i) % 2 == 0 && i + 1 < count ? 1 : 0;
                const int64_t end = std::max(begin + 1, (i + 1) * shape.sequence / count - odd);
                for (int64_t t = begin; t < end; ++t) {
                    starts_of.push_back(static_cast<int32_t>(begin));
                    ends_of.push_back(static_cast<int32_t>(end));
                }
                begin = end;
            }
        }
        return *this;
    }
    Attention with(DType type) const {
        Attention s = shape;
        s.type = type;
        if (lists.blocks > 0) {
            s.pattern = &lists;
            s.blocks = lists.view();
        }
        if (s.documents) {
            s.document_start = starts_of.data();
            s.document_end = ends_of.data();
        }
        return s;
    }
    // By the definition, cell by cell. `q` and `k` are positions in one sequence.
    bool sees(int64_t row, int64_t head, int64_t q, int64_t k) const {
        if (k > q || (shape.window > 0 && k <= q - shape.window)) return false;
        const auto at = static_cast<size_t>(row * shape.sequence + q);
        if (shape.documents && k < starts_of[at]) return false;
        if (lists.blocks == 0) return true;
        for (const int32_t column : lists.keys_of(head % lists.layouts, q / lists.block))
            if (column == k / lists.block) return true;
        return false;
    }
};

Masked of(std::string name, int64_t n, int64_t s, int64_t h, int64_t kv, int64_t d) {
    return {.name = std::move(name),
            .shape = {.sequences = n,
                      .sequence = s,
                      .heads = h,
                      .kv_heads = kv,
                      .head_dim = d,
                      .scale = 1 / std::sqrt(static_cast<double>(d))}};
}

std::vector<Masked> cases() {
    const auto diagonal = [](int, int row, int column) { return row == column; };
    const auto checkers = [](int head, int row, int column) {
        return (row + column + head) % 2 == 0;
    };
    const auto holes = [](int head, int row, int column) {
        return (row + head) % 3 != 1 && (row * 5 + column * 3 + head) % 4 != 0;
    };
    const auto behind = [](int, int row, int column) { return column + 1 == row; };
    const auto nothing = [](int, int, int) { return false; };
    const Pattern window{.kind = PatternKind::window, .num_sliding_window_blocks = 3};
    const Pattern fixed{.kind = PatternKind::fixed,
                        .block = 32,
                        .different_layout_per_head = true,
                        .num_local_blocks = 2,
                        .num_different_global_patterns = 2};
    const Pattern bigbird{.kind = PatternKind::bigbird, .num_random_blocks = 1, .seed = 3};
    const Pattern longformer{.kind = PatternKind::longformer,
                             .block = 16,
                             .num_sliding_window_blocks = 3,
                             .global_block_indices = {0, 9}};
    const Pattern variable{.kind = PatternKind::variable,
                           .block = 128,
                           .num_random_blocks = 1,
                           .local_window_blocks = {1, 2},
                           .global_block_indices = {1}};
    return {
        of("dense", 1, 130, 2, 1, 16).pattern({}),
        of("window", 1, 333, 2, 1, 64).pattern(window),
        of("fixed", 2, 321, 4, 2, 32).pattern(fixed),
        of("bigbird", 1, 325, 2, 2, 64).pattern(bigbird),
        of("longformer", 1, 330, 3, 1, 24).pattern(longformer),
        of("variable", 1, 390, 2, 1, 96).pattern(variable),
        of("diagonal", 1, 193, 2, 1, 128).cells(64, 1, diagonal),
        of("checkers", 2, 290, 2, 2, 16).cells(64, 2, checkers),
        of("blocks of 128", 1, 390, 2, 1, 64).cells(128, 2, checkers),
        of("empty rows", 1, 322, 2, 1, 64).cells(64, 2, holes),
        of("rows with no block", 1, 130, 1, 1, 64).cells(64, 1, nothing),
        of("the block before", 1, 260, 2, 1, 64).cells(64, 1, behind).documents(3),
        of("pattern and window", 1, 300, 2, 1, 16).window(70).cells(64, 2, checkers),
        of("1 document", 2, 70, 2, 1, 16).documents(1),
        of("2 documents", 2, 193, 4, 2, 64).documents(2),
        of("7 documents", 1, 300, 2, 2, 40).documents(7),
        of("64 documents", 2, 330, 2, 1, 64).documents(64),
        of("a document a token", 1, 67, 2, 1, 64).documents(67),
        of("documents and window", 1, 200, 2, 1, 32).window(33).documents(5),
        of("documents and pattern", 2, 321, 4, 2, 64).pattern(fixed).documents(9),
        of("wide heads", 1, 200, 1, 1, 256).pattern(window).documents(3),
        of("one token", 1, 1, 1, 1, 64).pattern(window).documents(1),
    };
}

constexpr int64_t kGap = 8;  // rows begin at multiples of 16 bytes, as a GPU wants them

struct Operands {
    Matrix q, k, v, dout;
    Operands(const Masked& c, DType type)
        : q(Matrix(type, c.tokens(), c.query(), kGap).random(1, 2)),
          k(Matrix(type, c.tokens(), c.key(), kGap).random(2, 2)),
          v(Matrix(type, c.tokens(), c.key(), kGap).random(3)),
          dout(Matrix(type, c.tokens(), c.query(), kGap).random(4)) {}
};
struct Results {
    Matrix out, dq, dk, dv;
    std::vector<float> lse;
    Results(const Masked& c, DType type)
        : out(type, c.tokens(), c.query(), kGap),
          dq(out),
          dk(type, c.tokens(), c.key(), kGap),
          dv(dk),
          lse(static_cast<size_t>(c.shape.heads * c.tokens())) {}
};

// The softmax of one row, over all keys: 0 where it sees none.
std::vector<double> probabilities(const Masked& c, const Operands& o, int64_t token, int64_t head,
                                  float* lse) {
    const Attention& s = c.shape;
    const int64_t row = token / s.sequence, q = token % s.sequence, d = s.head_dim;
    const int64_t kv = head / (s.heads / s.kv_heads);
    std::vector<double> p(static_cast<size_t>(s.sequence), 0);
    double sum = 0;
    for (int64_t k = 0; k < s.sequence; ++k) {
        if (!c.sees(row, head, q, k)) continue;
        double score = 0;
        for (int64_t i = 0; i < d; ++i)
            score += double(o.q.get(token, head * d + i)) *
                     double(o.k.get(row * s.sequence + k, kv * d + i));
        sum += p[static_cast<size_t>(k)] = std::exp(score * s.scale);
    }
    for (double& x : p) x = sum > 0 ? x / sum : 0;
    *lse = static_cast<float>(std::log(sum));
    return p;
}

Results expected(const Masked& c, const Operands& o, DType type) {
    Results found(c, type);
    const Attention& s = c.shape;
    const int64_t d = s.head_dim;
    std::vector<double> dq(static_cast<size_t>(c.tokens() * c.query())),
        dk(static_cast<size_t>(c.tokens() * c.key())), dv = dk;
    for (int64_t head = 0; head < s.heads; ++head) {
        const int64_t kv = head / (s.heads / s.kv_heads);
        for (int64_t token = 0; token < c.tokens(); ++token) {
            const int64_t first = token / s.sequence * s.sequence;
            const auto p = probabilities(c, o, token, head,
                                         &found.lse[static_cast<size_t>(s.lse_index(token, head))]);
            std::vector<double> out(static_cast<size_t>(d)), dp(p.size());
            double dot = 0;
            for (int64_t k = 0; k < s.sequence; ++k) {
                if (p[static_cast<size_t>(k)] == 0) continue;
                for (int64_t i = 0; i < d; ++i) {
                    const double value = o.v.get(first + k, kv * d + i);
                    out[static_cast<size_t>(i)] += p[static_cast<size_t>(k)] * value;
                    dp[static_cast<size_t>(k)] += double(o.dout.get(token, head * d + i)) * value;
                }
                dot += p[static_cast<size_t>(k)] * dp[static_cast<size_t>(k)];
            }
            for (int64_t i = 0; i < d; ++i)
                found.out.set(token, head * d + i, static_cast<float>(out[static_cast<size_t>(i)]));
            for (int64_t k = 0; k < s.sequence; ++k) {
                const double x = p[static_cast<size_t>(k)];
                if (x == 0) continue;
                const double ds = x * (dp[static_cast<size_t>(k)] - dot) * s.scale;
                for (int64_t i = 0; i < d; ++i) {
                    const auto of_key = static_cast<size_t>((first + k) * c.key() + kv * d + i);
                    dq[static_cast<size_t>(token * c.query() + head * d + i)] +=
                        ds * double(o.k.get(first + k, kv * d + i));
                    dk[of_key] += ds * double(o.q.get(token, head * d + i));
                    dv[of_key] += x * double(o.dout.get(token, head * d + i));
                }
            }
        }
    }
    const auto put = [](Matrix& to, const std::vector<double>& from) {
        for (int64_t r = 0; r < to.rows(); ++r)
            for (int64_t i = 0; i < to.cols(); ++i)
                to.set(r, i, static_cast<float>(from[static_cast<size_t>(r * to.cols() + i)]));
    };
    put(found.dq, dq);
    put(found.dk, dk);
    put(found.dv, dv);
    return found;
}

Results run(Ops& ops, const Masked& c, const Operands& o, DType type) {
    Results r(c, type);
    const Attention s = c.with(type);
    auto room = scratch_of(
        std::max(ops.attention_forward_scratch_bytes(s), ops.attention_backward_scratch_bytes(s)));
    ops.attention_forward(s, o.q.view(), o.k.view(), o.v.view(), r.out.view(), r.lse.data(),
                          aligned(room));
    ops.attention_backward(s, o.q.view(), o.k.view(), o.v.view(), r.out.view(), o.dout.view(),
                           r.lse.data(), r.dq.view(), r.dk.view(), r.dv.view(), aligned(room));
    return r;
}

// The same from parts of so many tokens: each pair of them alone, and then put together.
class InParts {
public:
    InParts(PartAttention& parts, Ops& ops, const Masked& c, const Operands& o, DType type,
            int64_t length)
        : parts_(parts), ops_(ops), o_(o), s_(c.with(type)), c_(c), found_(c, type) {
        const int64_t longest = std::min(length, s_.sequence);
        one_ = s_;
        one_.sequences = 1;
        room_ = scratch_of(parts.part_scratch_bytes(one_, longest, longest));
        for (int64_t first = 0; first < s_.sequence; first += length)
            cuts_.push_back({first, std::min(length, s_.sequence - first)});
    }
    Results results() {
        Matrix dq(DType::f32, c_.tokens(), c_.query(), kGap), dk(DType::f32, c_.tokens(), c_.key());
        Matrix dv = dk.fill(0);
        dq.fill(0);
        for (int64_t row = 0; row < s_.sequences; ++row) {
            begin_row(row);
            for (size_t i = 0; i < cuts_.size(); ++i) forward(i);
            for (size_t i = 0; i < cuts_.size(); ++i)
                for (size_t j = 0; j <= i; ++j) backward(cuts_[i], cuts_[j], dq, dk, dv);
        }
        ops_.cast(dq.view(), found_.dq.view());
        ops_.cast(dk.view(), found_.dk.view());
        ops_.cast(dv.view(), found_.dv.view());
        return found_;
    }

private:
    void begin_row(int64_t row) {
        row_ = row;
        if (!s_.documents) return;
        one_.document_start = s_.document_start + row * s_.sequence;
        one_.document_end = s_.document_end + row * s_.sequence;
    }
    template <class Of>
    auto rows(Of& of, const SequencePart& part) const {
        return of.view().row_range(row_ * s_.sequence + part.first, part.count);
    }
    float* lse_of(const SequencePart& part, int64_t head) {
        return found_.lse.data() + (row_ * s_.heads + head) * s_.sequence + part.first;
    }
    // Its own keys first, then those before, from the last one on.
    void forward(size_t i) {
        const SequencePart& q = cuts_[i];
        Matrix sum(DType::f32, q.count, c_.query(), 5), part(DType::f32, q.count, c_.query());
        std::vector<float> lse(static_cast<size_t>(s_.heads * q.count)), part_lse(lse);
        for (size_t j = i + 1; j-- > 0;) {
            const SequencePart& k = cuts_[j];
            parts_.part_forward(one_, q, k, rows(o_.q, q), rows(o_.k, k), rows(o_.v, k),
                                j == i ? sum.view() : part.view(),
                                j == i ? lse.data() : part_lse.data(), aligned(room_));
            if (j < i)
                parts_.merge_parts(s_.heads, part.view(), part_lse.data(), sum.view(), lse.data());
        }
        ops_.cast(sum.view(), rows(found_.out, q));
        for (int64_t head = 0; head < s_.heads; ++head)
            std::copy_n(lse.data() + head * q.count, q.count, lse_of(q, head));
    }
    void backward(const SequencePart& q, const SequencePart& k, Matrix& dq, Matrix& dk,
                  Matrix& dv) {
        std::vector<float> lse;
        for (int64_t head = 0; head < s_.heads; ++head)
            lse.insert(lse.end(), lse_of(q, head), lse_of(q, head) + q.count);
        Matrix of_q(DType::f32, q.count, c_.query()), of_k(DType::f32, k.count, c_.key());
        Matrix of_v = of_k;
        parts_.part_backward(one_, q, k, rows(o_.q, q), rows(o_.k, k), rows(o_.v, k),
                             rows(found_.out, q), rows(o_.dout, q), lse.data(), of_q.view(),
                             of_k.view(), of_v.view(), aligned(room_));
        const auto add = [&](Matrix& to, const SequencePart& part, const Matrix& of) {
            const int64_t first = row_ * s_.sequence + part.first;
            for (int64_t r = 0; r < of.rows(); ++r)
                for (int64_t i = 0; i < of.cols(); ++i)
                    to.set(first + r, i, to.get(first + r, i) + of.get(r, i));
        };
        add(dq, q, of_q);
        add(dk, k, of_k);
        add(dv, k, of_v);
    }

    PartAttention& parts_;
    Ops& ops_;
    const Operands& o_;
    const Attention s_;
    const Masked& c_;
    Results found_;
    Attention one_{};
    std::vector<std::byte> room_{};
    std::vector<SequencePart> cuts_{};
    int64_t row_ = 0;
};

// The sum of what comes out, weighed by dout, in fp64.
double weighed_output(const Masked& c, const Operands& o) {
    const Attention& s = c.shape;
    const int64_t d = s.head_dim;
    double sum = 0;
    float lse = 0;
    for (int64_t head = 0; head < s.heads; ++head) {
        const int64_t kv = head / (s.heads / s.kv_heads);
        for (int64_t token = 0; token < c.tokens(); ++token) {
            const int64_t first = token / s.sequence * s.sequence;
            const auto p = probabilities(c, o, token, head, &lse);
            for (int64_t k = 0; k < s.sequence; ++k) {
                if (p[static_cast<size_t>(k)] == 0) continue;
                double along = 0;
                for (int64_t i = 0; i < d; ++i)
                    along += double(o.dout.get(token, head * d + i)) *
                             double(o.v.get(first + k, kv * d + i));
                sum += p[static_cast<size_t>(k)] * along;
            }
        }
    }
    return sum;
}

// A device without kernels for masks says so when it is planned for.
bool refused(const Ops& ops, const Masked& c, DType type) {
    try {
        ops.attention_forward_scratch_bytes(c.with(type));
        return false;
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return true;
    }
}

bool refused_in_parts(const PartAttention& parts, const Masked& c, DType type) {
    try {
        Attention one = c.with(type);
        one.sequences = 1;
        parts.part_scratch_bytes(one, one.sequence, one.sequence);
        return false;
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return true;
    }
}

void expect_near_lse(const std::vector<float>& actual, const std::vector<float>& expected,
                     double most) {
    for (size_t i = 0; i < actual.size(); ++i) {
        if (std::isinf(expected[i])) {
            ASSERT_EQ(actual[i], expected[i]) << i;
        } else {
            ASSERT_NEAR(actual[i], expected[i], most) << i;
        }
    }
}

TEST_P(OpsMasks, are_a_softmax_over_what_is_seen) {
    const bool gpu = std::get<0>(GetParam()).threads == kGpu;
    bool any = false;
    Spread spread(2, std::get<0>(GetParam()).threads + static_cast<int>(type()));
    for (const Masked& c : cases()) {
        SCOPED_TRACE(c.name);
        if (refused(ops(), c, type())) continue;  // such as heads that a GPU has no kernels for
        any = true;
        if (!spread.takes()) continue;
        const Operands o(c, type());
        const Results want = expected(c, o, type()), found = run(ops(), c, o, type());
        // A GPU's kernels round probabilities to the type.
        expect_near(found.out, want.out, gpu ? 4 : 8, gpu ? unit_of(type()) : 2e-6);
        expect_near_lse(found.lse, want.lse, gpu ? 1e-3 : 1e-5);
        // Narrow types: `out` was rounded, and enters the slope.
        const double scale = type() == DType::f32 ? 40 : 4e4;
        expect_near(found.dq, want.dq, scale);
        expect_near(found.dk, want.dk, scale);
        expect_near(found.dv, want.dv, scale);
    }
    ASSERT_TRUE(any || gpu);
    if (!any) GTEST_SKIP() << "this device has no kernels for masks";
}

// By the definition of a gradient: one operand's element a little more and a little less.
TEST_P(OpsMasks, have_the_slopes_of_what_comes_out_as_gradients) {
    if (type() != DType::f32) GTEST_SKIP() << "a small step is lost in 16 bits";
    const auto holes = [](int head, int row, int column) {
        return row == 1 && (head == 0 || column == 0);
    };
    for (Masked c :
         {of("a window", 1, 9, 2, 1, 4).window(3), of("documents", 1, 12, 2, 2, 4).documents(4),
          of("blocks", 1, 67, 2, 1, 4).cells(64, 2, holes)}) {
        SCOPED_TRACE(c.name);
        if (refused(ops(), c, type())) continue;
        Operands o(c, type());
        const Results found = run(ops(), c, o, type());
        const auto compare = [&](Matrix& of, const Matrix& gradient) {
            constexpr float kStep = 1.0F / 256;
            for (int64_t i = 0; i < of.rows() * of.cols(); i += 23) {
                const int64_t row = i / of.cols(), col = i % of.cols();
                const float was = of.get(row, col), more = was + kStep, less = was - kStep;
                of.set(row, col, more);
                const double above = weighed_output(c, o);
                of.set(row, col, less);
                const double below = weighed_output(c, o);
                of.set(row, col, was);
                const double slope = (above - below) / (double(more) - double(less));
                ASSERT_NEAR(gradient.get(row, col), slope, 3e-4) << row << ", " << col;
            }
        };
        compare(o.q, found.dq);
        compare(o.k, found.dk);
        compare(o.v, found.dv);
    }
}

// Wherever parts begin: within tiles and blocks, with documents or windows that none of a part's
// queries sees, of one token.
TEST_P(OpsMasks, are_what_their_parts_give_together) {
    PartAttention* const parts = part_attention_of(ops());
    if (!parts) GTEST_SKIP() << "this device has no attention of parts";
    std::vector<Masked> all = cases();
    all.push_back(of("no mask", 2, 150, 4, 2, 32));
    all.push_back(of("a window", 1, 260, 2, 1, 16).window(40));
    const bool gpu = std::get<0>(GetParam()).threads == kGpu;
    bool any = false;
    Spread spread(2, std::get<0>(GetParam()).threads + static_cast<int>(type()));
    for (const Masked& c : all) {
        SCOPED_TRACE(c.name);
        if (refused_in_parts(*parts, c, type())) continue;
        any = true;
        if (!spread.takes()) continue;
        const Operands o(c, type());
        const Results want = expected(c, o, type());
        std::vector<int64_t> lengths{67};
        if (!is_quick()) lengths.insert(lengths.end(), {c.shape.sequence, 128, 31});
        for (const int64_t length : lengths) {
            SCOPED_TRACE("parts of " + std::to_string(length));
            const Results found = InParts(*parts, ops(), c, o, type(), length).results();
            // A GPU's kernels round probabilities to the type.
            expect_near(found.out, want.out, gpu ? 4 : 8, gpu ? unit_of(type()) : 2e-6);
            expect_near_lse(found.lse, want.lse, gpu ? 1e-3 : 2e-5);
            const double scale = type() == DType::f32 ? 40 : 4e4;
            expect_near(found.dq, want.dq, scale);
            expect_near(found.dk, want.dk, scale);
            expect_near(found.dv, want.dv, scale);
        }
    }
    ASSERT_TRUE(any || gpu);
    if (!any) GTEST_SKIP() << "this device has no kernels for parts of this type";
}

// Sums over parts do not depend on what ran before: the same bits again.
TEST_P(OpsMasks, in_parts_give_the_same_bits_again) {
    PartAttention* const parts = part_attention_of(ops());
    const Masked c = of("again", 1, 260, 4, 2, 64).window(150).documents(3);
    if (!parts || refused_in_parts(*parts, c, type()))
        GTEST_SKIP() << "this device has no attention of parts";
    const Operands o(c, type());
    const Results a = InParts(*parts, ops(), c, o, type(), 67).results();
    const Results b = InParts(*parts, ops(), c, o, type(), 67).results();
    EXPECT_EQ(a.lse, b.lse);
    EXPECT_TRUE(a.out.same_values(b.out));
    EXPECT_TRUE(a.dq.same_values(b.dq));
    EXPECT_TRUE(a.dk.same_values(b.dk));
    EXPECT_TRUE(a.dv.same_values(b.dv));
}

// One part that is the whole sequence is what attention of all rows is, to the bit.
TEST_P(OpsMasks, of_one_part_have_the_bits_of_the_whole) {
    PartAttention* const parts = part_attention_of(ops());
    if (!parts || type() != DType::f32 || std::get<0>(GetParam()).threads == kGpu)
        GTEST_SKIP() << "no attention of parts, or it rounds later";
    const Masked c = of("whole", 2, 200, 4, 2, 64).documents(3);
    const Operands o(c, type());
    const Results a = run(ops(), c, o, type());
    const Results b = InParts(*parts, ops(), c, o, type(), c.shape.sequence).results();
    EXPECT_TRUE(a.out.same_values(b.out));
    EXPECT_EQ(a.lse, b.lse);
    if (std::get<0>(GetParam()).threads == 0) return;  // the oracle makes a row's sums again
    EXPECT_TRUE(a.dq.same_values(b.dq));
    EXPECT_TRUE(a.dk.same_values(b.dk));
    EXPECT_TRUE(a.dv.same_values(b.dv));
}

TEST_P(OpsMasks, a_row_that_sees_nothing_is_zero_and_has_no_gradient) {
    const Masked c = of("nothing", 1, 130, 2, 1, 64).cells(64, 1, [](int, int row, int column) {
        return row == 2 && column == 0;
    });
    if (refused(ops(), c, type())) GTEST_SKIP() << "this device has no kernels for masks";
    const Operands o(c, type());
    const Results found = run(ops(), c, o, type());
    for (int64_t row = 0; row < 128; ++row) {
        for (int64_t col = 0; col < c.query(); ++col) {
            ASSERT_EQ(found.out.get(row, col), 0.0F);
            ASSERT_EQ(found.dq.get(row, col), 0.0F);
        }
        ASSERT_EQ(found.lse[static_cast<size_t>(row)], -std::numeric_limits<float>::infinity());
    }
    for (int64_t col = 0; col < c.key(); ++col) {  // seen by the last two rows alone
        ASSERT_EQ(found.dk.get(64, col), 0.0F);
        ASSERT_NE(found.dv.get(0, col), 0.0F);
    }
}

// A pattern that has every block, and one document, hide nothing: the same bits as without them.
TEST_P(OpsMasks, that_hide_nothing_change_no_bit) {
    const Masked dense = of("dense", 2, 200, 4, 2, 64);
    Masked whole = of("whole", 2, 200, 4, 2, 64).pattern({}).documents(1);
    if (refused(ops(), whole, type())) GTEST_SKIP() << "this device has no kernels for masks";
    if (std::get<0>(GetParam()).threads == kGpu)
        GTEST_SKIP() << "a GPU has kernels of its own for them";
    const Operands o(dense, type());
    const Results a = run(ops(), dense, o, type()), b = run(ops(), whole, o, type());
    EXPECT_TRUE(a.out.same_bytes(b.out));
    EXPECT_TRUE(a.dq.same_bytes(b.dq));
    EXPECT_TRUE(a.dk.same_bytes(b.dk));
    EXPECT_TRUE(a.dv.same_bytes(b.dv));
    EXPECT_EQ(a.lse, b.lse);
}

TEST_P(OpsMasks, give_the_same_bits_every_time) {
    const Masked c = of("again", 2, 321, 4, 2, 64)
                         .pattern({.kind = PatternKind::bigbird, .num_random_blocks = 2})
                         .documents(5);
    if (refused(ops(), c, type())) GTEST_SKIP() << "this device has no kernels for masks";
    const Operands o(c, type());
    const Results a = run(ops(), c, o, type()), b = run(ops(), c, o, type());
    EXPECT_TRUE(a.out.same_bytes(b.out));
    EXPECT_TRUE(a.dq.same_bytes(b.dq));
    EXPECT_TRUE(a.dk.same_bytes(b.dk));
    EXPECT_TRUE(a.dv.same_bytes(b.dv));
}

// The gradient of sum(out * dout), by central differences of every operand.
TEST_P(OpsMasks, have_the_gradients_of_finite_differences) {
    if (type() != DType::f32) GTEST_SKIP() << "differences need digits";
    const Masked c =
        of("tiny", 1, 70, 2, 1, 4)
            .cells(64, 2, [](int head, int row, int column) { return head == 0 || row == column; })
            .documents(2);
    if (refused(ops(), c, type())) GTEST_SKIP() << "this device has no kernels for masks";
    Operands o(c, type());
    const Results found = run(ops(), c, o, type());
    const auto objective = [&] {
        const Results r = run(oracle(), c, o, DType::f32);
        double sum = 0;
        for (int64_t t = 0; t < c.tokens(); ++t)
            for (int64_t i = 0; i < c.query(); ++i)
                sum += double(r.out.get(t, i)) * double(o.dout.get(t, i));
        return sum;
    };
    const auto check = [&](Matrix& of, const Matrix& gradient) {
        constexpr float kStep = 0x1p-6F;
        for (int64_t t = 0; t < of.rows(); t += 3) {
            for (int64_t i = 0; i < of.cols(); i += 3) {
                const float was = of.get(t, i);
                of.set(t, i, was + kStep);
                const double up = objective();
                of.set(t, i, was - kStep);
                const double down = objective();
                of.set(t, i, was);
                ASSERT_NEAR(gradient.get(t, i), (up - down) / (2 * double(kStep)), 2e-3)
                    << t << "," << i;
            }
        }
    };
    check(o.q, found.dq);
    check(o.k, found.dk);
    check(o.v, found.dv);
}

INSTANTIATE_TEST_SUITE_P(All, OpsMasks, every_implementation_and_type(), name_of_case);

}  // namespace
}  // namespace ferry::ops
