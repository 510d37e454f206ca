#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "data/tokens.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "sequence_order.h"
#include "token_file.h"

namespace ferry {

namespace {

void check_evaluation(const TokenLoader::Options& options, int64_t evaluation) {
    const int64_t there = ceil_div(evaluation, options.micro_batch);
    if (options.evaluation_micro_batches <= there) return;
    throw Error(Trouble::usage,
                {.what = "less text is held back than evaluation asks for",
                 .where = "evaluate.micro_batches",
                 .measured = std::to_string(evaluation) + " sequences are held back, " +
                             std::to_string(there) + " micro-batches",
                 .limit = std::to_string(options.evaluation_micro_batches) + " asked for",
                 .remedy = (there > 0 ? "set evaluate.micro_batches to " + std::to_string(there) +
                                            " or less, or raise"
                                      : std::string("raise")) +
                           " data.held_back"});
}

}  // namespace

TokenSplit split_tokens(const TokenLoader::Options& options, const TokenFileInfo& info) {
    if (options.isolates_documents && info.documents == 0) {
        throw Error(Trouble::usage,
                    {.what = "the token file does not say where documents begin",
                     .where = "data.isolate_documents: " + options.path,
                     .measured = "a token file of version 1",
                     .limit = "version 2",
                     .remedy = "write it again with `ferry data --documents` or `--separator`, or "
                               "set data.isolate_documents to false"});
    }
    const auto count = static_cast<int64_t>(info.count);
    const double held_back = options.trains ? options.held_back : 1;
    const auto held = static_cast<int64_t>(held_back * static_cast<double>(count));
    // A sequence needs one token more than it has, its last target; so no training target lies in
    // the held-back text.
    const int64_t split = count - held, begin = round_up(split, options.sequence);
    const TokenSplit cut{.training = std::max<int64_t>(split - 1, 0) / options.sequence,
                         .evaluation = std::max<int64_t>(count - begin - 1, 0) / options.sequence,
                         .evaluation_begin = begin};
    if ((options.trains ? cut.training : cut.evaluation) == 0) {
        throw Error(Trouble::usage,
                    {.what = "the token file is shorter than one sequence",
                     .where = options.path,
                     .measured = options.trains ? std::to_string(split) + " tokens to train on"
                                                : std::to_string(count) + " tokens",
                     .limit = std::to_string(options.sequence + 1) + " for one sequence",
                     .remedy = "use more text, a shorter batch.sequence or less data.held_back"});
    }
    if (options.trains) check_evaluation(options, cut.evaluation);
    return cut;
}

struct TokenLoader::Impl {
    explicit Impl(Options chosen) : options(std::move(chosen)), file(options.path, options.vocab) {
        const TokenFileInfo& info = file.info();
        const TokenSplit split = split_tokens(options, info);
        training = split.training;
        evaluation = split.evaluation;
        evaluation_begin = split.evaluation_begin;
        const bool some_masked = info.masked || options.isolates_documents;
        if (some_masked) check_evaluation_targets();
        if (!options.trains) return;
        if (some_masked) count_each_sequence();
    }

    // body(where it begins) for each document that begins in [first, first + count).
    template <class Body>
    void for_documents(uint64_t first, uint64_t count, const Body& body) const {
        constexpr uint64_t kBlock = 512;
        const uint64_t documents = file.info().documents;
        std::array<uint64_t, kBlock> firsts{};
        for (uint64_t at = file.document_of(first); at < documents; at += kBlock) {
            const std::span some = std::span(firsts).first(std::min(kBlock, documents - at));
            file.copy_documents(at, some);
            for (const uint64_t begin : some) {
                if (begin >= first + count) return;
                if (begin >= first) body(begin);
            }
        }
    }

    // Which tokens are no targets: by the file's mask, and the first of each isolated document.
    void copy_marks(uint64_t first, std::span<uint8_t> out) const {
        file.copy_marks(first, out);
        if (options.isolates_documents)
            for_documents(first, out.size(), [&](uint64_t begin) { out[begin - first] = 1; });
    }

    // Calls body(i, mark) for tokens first + i, a MiB at a time: each token block is read once.
    template <class Body>
    void for_marks(int64_t first, int64_t count, const Body& body) const {
        std::vector<uint8_t> marks;
        for (int64_t at = 0; at < count; at += std::ssize(marks)) {
            marks.resize(static_cast<size_t>(std::min(kMiB, count - at)));
            copy_marks(static_cast<uint64_t>(first + at), marks);
            for (int64_t i = 0; i < std::ssize(marks); ++i)
                body(at + i, marks[static_cast<size_t>(i)]);
        }
    }

    int64_t count_real(int64_t first, int64_t count) const {
        int64_t real = 0;
        for_marks(first, count, [&real](int64_t, uint8_t mark) { real += mark == 0 ? 1 : 0; });
        return real;
    }

    // A mean over no targets is no loss; better said before the training than in the middle of it.
    void check_evaluation_targets() const {
        const int64_t asked =
            options.trains
                ? std::min(evaluation, options.evaluation_micro_batches * options.micro_batch)
                : evaluation;
        if (count_real(evaluation_begin + 1, asked * options.sequence) > 0) return;
        if (asked == 0) return;
        throw Error(
            Trouble::usage,
            {.what = "every token to evaluate on is masked: there is no loss",
             .where = options.path,
             .measured = "0 targets in " + std::to_string(asked) + " sequences",
             .remedy = options.trains ? "set evaluate.micro_batches to 0, or hold back text "
                                        "with targets in it"
                                      : "the mask is 1 where a token is no target"});
    }

    void count_each_sequence() {
        targets.resize(static_cast<size_t>(training));
        int64_t total = 0;
        for_marks(1, training * options.sequence, [&](int64_t at, uint8_t mark) {
            const bool real = mark == 0;
            targets[static_cast<size_t>(at / options.sequence)] += real ? 1 : 0;
            total += real ? 1 : 0;
        });
        if (total > 0) return;
        throw Error(Trouble::usage, {.what = "every training token is masked: nothing to learn",
                                     .where = options.path,
                                     .remedy = "the mask is 1 where a token is no target"});
    }

    int64_t part_length() const { return options.sequence / options.parts; }
    int64_t sequences_per_rank() const { return options.micro_batch * options.micro_batches; }
    int64_t sequences_per_step() const { return sequences_per_rank() * options.ranks; }

    // Which sequence of the file the run's global sequence is.
    int64_t in_file(int64_t global) const {
        const auto n = static_cast<uint64_t>(training);
        const auto number = static_cast<uint64_t>(global);
        return static_cast<int64_t>(shuffled(options.seed, number / n, n, number % n));
    }

    void copy_sequence(int64_t first_token, std::span<int32_t> tokens,
                       std::span<int32_t> out_targets) const {
        const auto first = static_cast<uint64_t>(first_token);
        // Once: the targets are the tokens, one further on.
        thread_local std::vector<int32_t> both;
        thread_local std::vector<uint8_t> marks;
        both.resize(tokens.size() + 1);
        file.copy_tokens(first, both);
        std::copy(both.begin(), both.end() - 1, tokens.begin());
        std::copy(both.begin() + 1, both.end(), out_targets.begin());
        if (!file.info().masked && !options.isolates_documents) return;
        marks.resize(out_targets.size());
        copy_marks(first + 1, marks);
        for (size_t t = 0; t < out_targets.size(); ++t)
            if (marks[t] != 0) out_targets[t] = -1;
    }

    // The documents of the sequence that begins at this token, as it sees them.
    void copy_documents(int64_t first_token, std::span<int32_t> start,
                        std::span<int32_t> end) const {
        const auto first = static_cast<uint64_t>(first_token);
        size_t begin = 0;
        const auto close = [&](size_t at) {
            for (size_t t = begin; t < at; ++t) {
                start[t] = static_cast<int32_t>(begin);
                end[t] = static_cast<int32_t>(at);
            }
            begin = at;
        };
        for_documents(first, start.size(), [&](uint64_t at) { close(at - first); });
        close(start.size());
    }

    // Row `row` of a micro-batch: the sequence that begins at this token.
    void fill_row(int64_t first_token, int64_t row, const MicroBatch& out) const {
        const auto whole = static_cast<size_t>(options.sequence);
        const auto length = static_cast<size_t>(part_length());
        const size_t at = static_cast<size_t>(row) * length;
        copy_sequence(first_token + options.part * part_length(), out.tokens.subspan(at, length),
                      out.targets.subspan(at, length));
        if (!options.isolates_documents) return;
        const auto start = out.document_start.subspan(static_cast<size_t>(row) * whole, whole);
        copy_documents(first_token, start,
                       out.document_end.subspan(static_cast<size_t>(row) * whole, whole));
        if (options.parts == 1) return;
        const auto before = static_cast<int32_t>(options.part * part_length());
        for (size_t t = 0; t < length; ++t)
            out.part_start[at + t] = start[static_cast<size_t>(before) + t] - before;
    }

    void check(const MicroBatch& out) const {
        const auto size = static_cast<size_t>(options.micro_batch * part_length());
        FERRY_CHECK(out.tokens.size() == size && out.targets.size() == size);
        const auto parts = static_cast<size_t>(options.parts);
        const size_t documents = options.isolates_documents ? size * parts : 0;
        FERRY_CHECK(out.document_start.size() == documents && out.document_end.size() == documents);
        FERRY_CHECK(out.part_start.size() == (parts > 1 && documents > 0 ? size : 0));
    }

    Options options;
    TokenFile file;
    int64_t training = 0, evaluation = 0, evaluation_begin = 0;
    std::vector<int32_t> targets{};  // real ones of each training sequence; empty: all of them
};

TokenLoader::TokenLoader(Options options) {
    FERRY_CHECK(options.sequence > 0 && options.micro_batch > 0 && options.micro_batches > 0);
    FERRY_CHECK(options.rank >= 0 && options.rank < options.ranks);
    FERRY_CHECK(options.part >= 0 && options.part < options.parts);
    FERRY_CHECK(options.sequence % options.parts == 0);
    impl_ = std::make_unique<Impl>(std::move(options));
}

TokenLoader::~TokenLoader() = default;

const TokenFileInfo& TokenLoader::info() const { return impl_->file.info(); }
int64_t TokenLoader::training_sequences() const { return impl_->training; }
int64_t TokenLoader::evaluation_sequences() const { return impl_->evaluation; }

int64_t TokenLoader::count_targets(int64_t step) const {
    FERRY_CHECK(step >= 1);
    const int64_t count = impl_->sequences_per_step();
    if (impl_->targets.empty()) return count * impl_->options.sequence;
    int64_t real = 0;
    for (int64_t i = (step - 1) * count; i < step * count; ++i)
        real += impl_->targets[static_cast<size_t>(impl_->in_file(i))];
    return real;
}

void TokenLoader::fill(int64_t step, int64_t micro_batch_index, MicroBatch out) const {
    const Options& o = impl_->options;
    FERRY_CHECK(step >= 1 && micro_batch_index >= 0 && micro_batch_index < o.micro_batches);
    impl_->check(out);
    const int64_t first = (step - 1) * impl_->sequences_per_step() +
                          o.rank * impl_->sequences_per_rank() + micro_batch_index * o.micro_batch;
    for (int64_t i = 0; i < o.micro_batch; ++i)
        impl_->fill_row(impl_->in_file(first + i) * o.sequence, i, out);
}

void TokenLoader::fill_evaluation(int64_t micro_batch_index, MicroBatch out) const {
    const Options& o = impl_->options;
    FERRY_CHECK(impl_->evaluation > 0 && micro_batch_index >= 0);
    impl_->check(out);
    const auto length = static_cast<size_t>(impl_->part_length());
    for (int64_t i = 0; i < o.micro_batch; ++i) {
        const int64_t number = micro_batch_index * o.micro_batch + i;
        const size_t row = static_cast<size_t>(i) * length;
        const std::span<int32_t> targets = out.targets.subspan(row, length);
        impl_->fill_row(impl_->evaluation_begin + number % impl_->evaluation * o.sequence, i, out);
        if (number >= impl_->evaluation) std::fill(targets.begin(), targets.end(), -1);
    }
}

}  // namespace ferry
