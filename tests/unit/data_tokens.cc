// Token files refuse what is damaged; the loader's batches are a function of (seed, step, rank).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>
#include <vector>

#include "data/tokens.h"
#include "ferry/error.h"
#include "sequence_order.h"
#include "tests/support/write_tokens.h"

namespace ferry {
namespace {

using testing::HasSubstr;

constexpr int64_t kSequence = 8;

class Tokens : public testing::Test {
protected:
    void SetUp() override {
        folder_ = std::filesystem::path(testing::TempDir()) /
                  ("ferry_tokens_" + std::to_string(::getpid()));
        std::filesystem::create_directory(folder_);
        path_ = (folder_ / "tokens.bin").string();
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }

    // Token i is i modulo the vocabulary.
    void write(size_t count, uint64_t vocabulary = 256, std::span<const uint8_t> mask = {},
               std::span<const uint64_t> documents = {}) {
        std::vector<uint32_t> tokens(count);
        for (size_t i = 0; i < count; ++i) tokens[i] = static_cast<uint32_t>(i % vocabulary);
        write_tokens(path_, tokens, vocabulary, mask, documents);
    }
    TokenLoader::Options options() const {
        return {{.sequence = kSequence, .micro_batch = 2, .micro_batches = 2}, path_};
    }
    std::string bytes() const {
        std::ifstream file(path_, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    }
    void damage(const std::function<void(std::string&)>& change) {
        std::string content = bytes();
        change(content);
        std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
    }
    void expect_refusal(Trouble trouble, const char* part, int64_t model_vocab = 0) const {
        TokenLoader::Options wanted = options();
        wanted.vocab = model_vocab;
        try {
            TokenLoader loader(wanted);
            ADD_FAILURE() << "accepted; wanted: " << part;
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            EXPECT_THAT(error.what(), HasSubstr(part));
            EXPECT_THAT(error.what(), HasSubstr(path_));
        }
    }

    std::filesystem::path folder_{};
    std::string path_{};
};

struct Batch {
    explicit Batch(const TokenLoader::Options& o)
        : tokens(static_cast<size_t>(o.micro_batch * o.sequence)),
          targets(tokens.size()),
          start(o.isolates_documents ? tokens.size() : 0),
          end(start.size()) {}
    MicroBatch view() {
        return {.tokens = tokens, .targets = targets, .document_start = start, .document_end = end};
    }
    std::vector<int32_t> tokens;
    std::vector<int32_t> targets;
    std::vector<int32_t> start, end;  // of documents
};

TEST_F(Tokens, WidthFollowsTheVocabulary) {
    const std::pair<uint64_t, uint32_t> cases[] = {{256, 1}, {257, 2}, {65536, 2}, {65537, 4}};
    for (const auto& [vocabulary, token_bytes] : cases) {
        write(70000, vocabulary);
        TokenLoader::Options wanted = options();
        wanted.sequence = 69999;
        wanted.micro_batch = 1;
        const TokenLoader loader(wanted);
        EXPECT_EQ(loader.info().token_bytes, token_bytes);
        EXPECT_EQ(loader.info().vocabulary, vocabulary);
        EXPECT_EQ(loader.info().count, 70000u);
        Batch batch(wanted);
        loader.fill(1, 0, batch.view());
        for (size_t i = 0; i < batch.tokens.size(); ++i) {
            ASSERT_EQ(batch.tokens[i], static_cast<int32_t>(i % vocabulary));
            ASSERT_EQ(batch.targets[i], static_cast<int32_t>((i + 1) % vocabulary));
        }
    }
}

TEST_F(Tokens, RefusesWhatIsDamaged) {
    expect_refusal(Trouble::usage, "No such file");
    std::ofstream(path_) << "just text, long enough to hold a header of sixty-four bytes and more";
    expect_refusal(Trouble::usage, "does not start with FERRYTOK");
    std::ofstream(path_) << "short";
    expect_refusal(Trouble::usage, "5 bytes");
    EXPECT_THROW(write(100), Error) << "what is no token file was replaced";
    std::filesystem::remove(path_);

    const std::pair<const char*, std::function<void(std::string&)>> cases[] = {
        {"truncated", [](std::string& s) { s.pop_back(); }},
        {"longer", [](std::string& s) { s.push_back('x'); }},
        {"checksum", [](std::string& s) { s[80] = static_cast<char>(s[80] ^ 1); }},
        {"header is damaged", [](std::string& s) { s[12] = 3; }},
        {"flags 2", [](std::string& s) { s[32] = 2; }},
        {"vocabulary 1073742080", [](std::string& s) { s[19] = 0x40; }},  // 256 and 2^30
        {"vocabulary 0", [](std::string& s) { s[17] = 0; }},
        {"last 8 bytes are not all zero", [](std::string& s) { s[63] = 1; }},
        {"documents 1", [](std::string& s) { s[48] = 1; }},
        {"flags 0", [](std::string& s) { s[8] = 2; }},
        {"truncated", [](std::string& s) { s[31] = '\xff'; }},  // count near 2^64
        {"outside the vocabulary", [](std::string& s) { s[16] = 99, s[17] = 0; }},
    };
    for (const auto& [part, change] : cases) {
        write(100);
        damage(change);
        expect_refusal(Trouble::io, part);
    }
    write(100);
    damage([](std::string& s) { s[8] = 3; });
    expect_refusal(Trouble::usage, "version 3");
}

// ---------------------------------------------------------------- documents

// Tokens 0, 1, 2, ... of documents that begin there.
void write_documents(const std::string& path, uint32_t count, std::vector<uint64_t> firsts,
                     std::vector<uint8_t> mask = {}) {
    std::vector<uint32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), 0U);
    write_tokens(path, tokens, count, mask, firsts);
}

TEST_F(Tokens, DocumentsAreOfVersion2AndCheckedWhole) {
    write_documents(path_, 100, {0, 7, 8, 99});
    EXPECT_EQ(read_token_info(path_).documents, 4U);
    const std::pair<const char*, std::function<void(std::string&)>> cases[] = {
        {"truncated", [](std::string& s) { s.pop_back(); }},
        {"checksum", [](std::string& s) { s[s.size() - 8] = 5; }},
        {"flags 0", [](std::string& s) { s[32] = 0; }},
        {"documents 0", [](std::string& s) { s[48] = 0; }},
        {"documents 101", [](std::string& s) { s[48] = 101; }},
        {"truncated", [](std::string& s) { s[48] = 5; }},
        {"longer", [](std::string& s) { s[48] = 3; }},
    };
    for (const auto& [part, change] : cases) {
        write_documents(path_, 100, {0, 7, 8, 99});
        damage(change);
        expect_refusal(Trouble::io, part);
    }
    for (const std::vector<uint64_t>& firsts :
         {std::vector<uint64_t>{0, 8, 8}, {0, 9, 8}, {0, 100}}) {
        write_documents(path_, 100, firsts);
        expect_refusal(Trouble::io, "documents are not in order");
    }
}

TEST_F(Tokens, DocumentsThatTheFileDoesNotKnowCannotBeIsolated) {
    write(100);
    TokenLoader::Options wanted = options();
    wanted.isolates_documents = true;
    try {
        const TokenLoader loader(wanted);
        ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_THAT(error.what(), HasSubstr("version 1"));
        EXPECT_THAT(error.what(), HasSubstr("data.isolate_documents"));
    }
}

TEST_F(Tokens, IsolatedDocumentsEndAtTheirBordersAndAtTheRows) {
    write_documents(path_, 13, {0, 3, 4, 9});
    TokenLoader::Options wanted = options();
    wanted.sequence = 6;
    wanted.micro_batch = 2;
    wanted.micro_batches = 1;
    wanted.isolates_documents = true;
    const TokenLoader loader(wanted);
    ASSERT_EQ(loader.training_sequences(), 2);
    Batch batch(wanted);
    loader.fill(1, 0, batch.view());
    if (batch.tokens[0] != 0) {  // the order of an epoch
        for (auto* of : {&batch.tokens, &batch.targets, &batch.start, &batch.end})
            std::rotate(of->begin(), of->begin() + 6, of->end());
    }
    using Row = std::vector<int32_t>;
    EXPECT_EQ(batch.start, (Row{0, 0, 0, 3, 4, 4, 0, 0, 0, 3, 3, 3}));
    EXPECT_EQ(batch.end, (Row{3, 3, 3, 4, 6, 6, 3, 3, 3, 6, 6, 6}));
    // The last token of a document predicts nothing; one that a row's end cuts still does.
    EXPECT_EQ(batch.targets, (Row{1, 2, -1, -1, 5, 6, 7, 8, -1, 10, 11, 12}));
    EXPECT_EQ(loader.count_targets(1), 9);
}

TEST_F(Tokens, IsolatedDocumentsKeepTheMask) {
    std::vector<uint8_t> mask(13, 0);
    mask[0] = mask[3] = mask[5] = 1;
    write_documents(path_, 13, {0, 3, 4, 9}, mask);
    TokenLoader::Options wanted = options();
    wanted.sequence = 12;
    wanted.micro_batch = 1;
    wanted.micro_batches = 1;
    wanted.isolates_documents = true;
    const TokenLoader loader(wanted);
    Batch batch(wanted);
    loader.fill(1, 0, batch.view());
    EXPECT_EQ(batch.targets, (std::vector<int32_t>{1, 2, -1, -1, -1, 6, 7, 8, -1, 10, 11, 12}));
    EXPECT_EQ(loader.count_targets(1), 8);
    // Not isolated they are as in a file that knows none.
    wanted.isolates_documents = false;
    const TokenLoader plain(wanted);
    EXPECT_EQ(plain.count_targets(1), 10);
}

// Thousands of documents in many token blocks: found from any row.
TEST_F(Tokens, DocumentsAreFoundFromAnyRow) {
    std::vector<uint64_t> firsts;
    for (uint64_t at = 0; at < 60000; at += 1 + at % 7) firsts.push_back(at);
    write_documents(path_, 60001, firsts);
    TokenLoader::Options wanted = options();
    wanted.sequence = 500;
    wanted.micro_batch = 1;
    wanted.micro_batches = 1;
    wanted.isolates_documents = true;
    const TokenLoader loader(wanted);
    Batch batch(wanted);
    for (int64_t step = 1; step <= 120; ++step) {
        loader.fill(step, 0, batch.view());
        const auto first = static_cast<uint64_t>(batch.tokens[0]);
        for (uint64_t t = 0; t < 500; ++t) {
            const auto next = std::ranges::upper_bound(firsts, first + t);
            const uint64_t begin = *(next - 1), end = next == firsts.end() ? 60001 : *next;
            ASSERT_EQ(static_cast<uint64_t>(batch.start[t]), std::max(begin, first) - first);
            ASSERT_EQ(static_cast<uint64_t>(batch.end[t]), std::min(end, first + 500) - first);
        }
    }
}

// The bytes that a run reads are those that it began with, whatever becomes of the file.
TEST_F(Tokens, ReadsNothingThatChangedSinceTheStart) {
    constexpr size_t kCount = 50000;  // several token blocks
    const auto name = [](const std::filesystem::path& path) { return path.c_str(); };
    const std::pair<const char*, std::function<void()>> cases[] = {
        {"modified since",
         [&] { damage([](std::string& s) { s[40000] = static_cast<char>(s[40000] ^ 1); }); }},
        {"time of modification is as it was",
         [&] {
             struct stat before {};
             ASSERT_EQ(stat(name(path_), &before), 0);
             const int file = ::open(name(path_), O_WRONLY);
             ASSERT_EQ(::pwrite(file, "\xff", 1, 40000), 1);
             const timespec times[2] = {before.st_atim, before.st_mtim};
             ASSERT_EQ(futimens(file, times), 0);
             ::close(file);
         }},
        {"40000 bytes long", [&] { std::filesystem::resize_file(path_, 40000); }},
        {"0 bytes long", [&] { std::filesystem::resize_file(path_, 0); }},
    };
    TokenLoader::Options wanted = options();
    wanted.sequence = 40000;
    wanted.micro_batch = 1;
    for (const auto& [said, change] : cases) {
        SCOPED_TRACE(said);
        write(kCount, 256);
        // Long ago: the clock that stamps files is a coarse one.
        std::filesystem::last_write_time(
            path_, std::filesystem::last_write_time(path_) - std::chrono::hours(1));
        const TokenLoader loader(wanted);
        Batch batch(wanted);
        loader.fill(1, 0, batch.view());
        change();
        try {
            loader.fill(1, 0, batch.view());
            FAIL() << "other tokens were read";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::io);
            EXPECT_THAT(error.what(), HasSubstr(path_));
            EXPECT_THAT(error.what(), HasSubstr("changed while the run read from it"));
            EXPECT_THAT(error.what(), HasSubstr(said));
        }
    }
}

TEST_F(Tokens, AnotherFileUnderItsNameIsNotRead) {
    write(50000, 256);
    const TokenLoader loader(options());
    Batch before(options()), after(options());
    loader.fill(3, 1, before.view());
    write(70000, 65536);  // renamed into place
    loader.fill(3, 1, after.view());
    EXPECT_EQ(before.tokens, after.tokens);
    EXPECT_EQ(before.targets, after.targets);
}

TEST_F(Tokens, AChangedMarkIsNoticedToo) {
    std::vector<uint32_t> tokens(50000, 1);
    const std::vector<uint8_t> mask(tokens.size(), 0);
    write_tokens(path_, tokens, 256, mask);
    const TokenLoader loader(options());
    Batch batch(options());
    damage([](std::string& s) {
        for (size_t i = 64 + 50000; i < s.size(); i += 1000) s[i] = 1;
    });
    EXPECT_THROW(loader.fill(1, 0, batch.view()), Error);
}

TEST_F(Tokens, RefusesTokensTheModelDoesNotKnow) {
    write(100);
    expect_refusal(Trouble::usage, "token 50", 50);
    TokenLoader::Options wanted = options();
    wanted.vocab = 100;  // the file's vocabulary is larger, its tokens are not
    EXPECT_NO_THROW(TokenLoader{wanted});
}

TEST_F(Tokens, RefusesTooLittleText) {
    write(kSequence);
    expect_refusal(Trouble::usage, "shorter than one sequence");
}

TEST_F(Tokens, WritingFailsCleanly) {
    const std::vector<uint32_t> tokens = {1, 2, 300};
    const std::vector<uint8_t> mask = {0};
    const auto refused = [&](std::span<const uint32_t> some, std::span<const uint8_t> with) {
        EXPECT_THROW(write_tokens(path_, some, 256, with), Error);
        EXPECT_FALSE(std::filesystem::exists(path_));
    };
    refused(tokens, {});
    refused(std::span(tokens).first(2), mask);
    refused({}, {});
    try {
        write_tokens((folder_ / "none" / "t.bin").string(), std::span(tokens).first(2), 256, {});
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::io);
        EXPECT_THAT(error.what(), HasSubstr("make the directory first"));
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(Tokens, AFailedWriteKeepsTheOldFile) {
    write(100);
    const std::string before = bytes();
    EXPECT_THROW(write_tokens(path_, std::vector<uint32_t>{999}, 256, {}), Error);
    EXPECT_EQ(bytes(), before);
}

TEST(SequenceOrder, IsAPermutationThatDependsOnSeedAndEpoch) {
    for (const uint64_t count : {1u, 2u, 3u, 5u, 64u, 65u, 1000u}) {
        std::set<uint64_t> seen;
        for (uint64_t i = 0; i < count; ++i) seen.insert(shuffled(7, 3, count, i));
        EXPECT_EQ(seen.size(), count);
        EXPECT_EQ(*seen.rbegin(), count - 1);
    }
    const auto same = [](uint32_t seed, uint64_t epoch) {
        int equal = 0;
        for (uint64_t i = 0; i < 1000; ++i)
            equal += shuffled(1, 0, 1000, i) == shuffled(seed, epoch, 1000, i);
        return equal;
    };
    EXPECT_EQ(same(1, 0), 1000);
    EXPECT_LT(same(1, 1), 20);
    EXPECT_LT(same(2, 0), 20);
    EXPECT_LT(same(1, uint64_t{1} << 32), 20);
}

// Fixed for ever: another order would make checkpoints of older runs continue on other text.
TEST(SequenceOrder, KnownValues) {
    std::vector<uint64_t> order;
    for (uint64_t i = 0; i < 6; ++i) order.push_back(shuffled(1, 0, 6, i));
    EXPECT_EQ(order, (std::vector<uint64_t>{4, 0, 2, 1, 3, 5}));
}

TEST_F(Tokens, AnEpochVisitsEverySequenceOnce) {
    write(256 - 5, 256);  // every first token is unique
    TokenLoader::Options wanted = options();
    wanted.held_back = 0.1;  // 25 tokens
    const TokenLoader loader(wanted);
    ASSERT_EQ(loader.training_sequences(), (251 - 25 - 1) / kSequence);
    Batch batch(wanted);
    std::vector<int32_t> firsts;
    for (int64_t step = 1; step <= loader.training_sequences() / 4 * 2 + 2; ++step) {
        for (int64_t m = 0; m < 2; ++m) {
            loader.fill(step, m, batch.view());
            for (const size_t row : {size_t{0}, static_cast<size_t>(kSequence)})
                firsts.push_back(batch.tokens[row]);
        }
        EXPECT_EQ(loader.count_targets(step), 4 * kSequence);
    }
    const auto n = loader.training_sequences();
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
        const std::set<int32_t> seen(firsts.begin() + epoch * n, firsts.begin() + (epoch + 1) * n);
        EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
        EXPECT_EQ(*seen.rbegin(), (n - 1) * kSequence);
    }
    EXPECT_FALSE(std::equal(firsts.begin(), firsts.begin() + n, firsts.begin() + n));
}

TEST_F(Tokens, RestartsAnywhereAndShardsByRank) {
    write(5000);
    const TokenLoader::Options one = options();
    TokenLoader::Options half = options();
    half.micro_batches = 1;
    half.ranks = 2;
    Batch whole(one), part(half);
    for (const int64_t step : {3, 1, 40}) {
        for (int rank = 0; rank < 2; ++rank) {
            half.rank = rank;
            const TokenLoader loader(half);
            loader.fill(step, 0, part.view());
            TokenLoader(one).fill(step, rank, whole.view());
            EXPECT_EQ(part.tokens, whole.tokens);
            EXPECT_EQ(part.targets, whole.targets);
            EXPECT_EQ(loader.count_targets(step), TokenLoader(one).count_targets(step));
        }
    }
}

// A part's last target is the next part's first token.
TEST_F(Tokens, PartsOfSequencesMakeThemWhole) {
    std::vector<uint64_t> documents;
    for (uint64_t i = 0; i < 5000; ++i)
        if (i * i % 29 == 0) documents.push_back(i);
    write(5000, 256, {}, documents);
    for (const bool isolated : {false, true}) {
        TokenLoader::Options one = options();
        one.isolates_documents = isolated;
        one.held_back = 0.1;
        const auto rows = static_cast<size_t>(one.micro_batch);
        const auto whole = static_cast<size_t>(one.sequence), all = rows * whole;
        const auto of_documents = isolated ? all : 0;
        std::vector<int32_t> tokens(all), targets(all), start(of_documents), end(of_documents);
        for (const bool evaluation : {false, true}) {
            const auto fill = [&](const TokenLoader& loader, const MicroBatch& out) {
                evaluation ? loader.fill_evaluation(1, out) : loader.fill(3, 1, out);
            };
            fill(TokenLoader(one), {tokens, targets, start, end});
            for (const int parts : {2, 4}) {
                TokenLoader::Options of_part = one;
                of_part.parts = parts;
                const size_t length = whole / static_cast<size_t>(parts), size = rows * length;
                for (int part = 0; part < parts; ++part) {
                    of_part.part = part;
                    std::vector<int32_t> its_tokens(size), its_targets(size),
                        its_start(start.size()), its_end(end.size()),
                        part_start(isolated ? size : 0);
                    const TokenLoader loader(of_part);
                    fill(loader, {its_tokens, its_targets, its_start, its_end, part_start});
                    EXPECT_EQ(its_start, start);
                    EXPECT_EQ(its_end, end);
                    EXPECT_EQ(loader.count_targets(3), TokenLoader(one).count_targets(3));
                    const size_t before = static_cast<size_t>(part) * length;
                    for (size_t i = 0; i < size; ++i) {
                        const size_t at = i / length * whole + before + i % length;
                        EXPECT_EQ(its_tokens[i], tokens[at]);
                        EXPECT_EQ(its_targets[i], targets[at]);
                        if (isolated) {
                            EXPECT_EQ(part_start[i] + static_cast<int32_t>(before), start[at]);
                        }
                    }
                }
            }
        }
    }
}

TEST_F(Tokens, MaskedTargetsAreNotReal) {
    std::vector<uint8_t> mask(500);
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 == 0;
    write(500, 256, mask);
    const TokenLoader::Options wanted = options();
    const TokenLoader loader(wanted);
    EXPECT_TRUE(loader.info().masked);
    Batch batch(wanted);
    for (int64_t step = 1; step < 20; ++step) {
        int64_t real = 0;
        for (int64_t m = 0; m < wanted.micro_batches; ++m) {
            loader.fill(step, m, batch.view());
            real += std::count_if(batch.targets.begin(), batch.targets.end(),
                                  [](int32_t target) { return target >= 0; });
        }
        EXPECT_EQ(loader.count_targets(step), real);
        EXPECT_LT(real, 4 * kSequence);
    }
    write(500, 256, std::vector<uint8_t>(500, 1));
    expect_refusal(Trouble::usage, "every training token is masked");
}

TEST_F(Tokens, HeldBackTextIsNeverTrainedOn) {
    write(250);
    TokenLoader::Options wanted = options();
    wanted.held_back = 0.2;  // tokens 200 to 249
    const TokenLoader loader(wanted);
    Batch batch(wanted);
    for (int64_t step = 1; step < 30; ++step) {
        loader.fill(step, step % 2, batch.view());
        for (const int32_t target : batch.targets) EXPECT_LT(target, 200);
    }
    ASSERT_EQ(loader.evaluation_sequences(), 6);
    std::set<int32_t> real;
    for (int64_t m = 0; m < 4; ++m) {  // 8 sequences asked for: the last two are repeats
        loader.fill_evaluation(m, batch.view());
        for (const int32_t token : batch.tokens) EXPECT_GE(token, 200);
        for (const int32_t target : batch.targets) {
            if (target >= 0) {
                EXPECT_TRUE(real.insert(target).second);
            }
        }
    }
    EXPECT_EQ(real.size(), 6u * kSequence);
}

TEST_F(Tokens, EvaluationNeedsATarget) {
    std::vector<uint8_t> mask(250, 0);
    std::fill(mask.begin() + 201, mask.end(), uint8_t{1});  // 200 is a first token, so no target
    write(250, 256, mask);
    TokenLoader::Options wanted = options();
    wanted.held_back = 0.2;                // tokens 200 to 249
    EXPECT_NO_THROW(TokenLoader{wanted});  // nothing is evaluated
    wanted.evaluation_micro_batches = 2;   // targets 201 to 232
    const auto expect_refused = [&] {
        EXPECT_THAT([&] { TokenLoader{wanted}; },
                    testing::Throws<Error>(testing::Property(
                        &Error::what, HasSubstr("every token to evaluate on is masked"))));
    };
    expect_refused();
    mask[233] = 0;
    write(250, 256, mask);
    expect_refused();
    mask[232] = 0;
    write(250, 256, mask);
    EXPECT_NO_THROW(TokenLoader{wanted});
    wanted.trains = false;  // all of it, whatever else is masked
    write(250, 256, std::vector<uint8_t>(250, 1));
    expect_refused();
    write(250, 256, mask);
    EXPECT_NO_THROW(TokenLoader{wanted});
}

TEST_F(Tokens, NothingHeldBack) {
    write(250);
    EXPECT_EQ(TokenLoader(options()).evaluation_sequences(), 0);
    EXPECT_EQ(TokenLoader(options()).training_sequences(), 31);
}

}  // namespace
}  // namespace ferry
