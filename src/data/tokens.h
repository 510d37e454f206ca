// A file of tokens, and the batches a run draws from it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/files.h"

namespace ferry {

// Layout, little endian: magic "FERRYTOK", uint32 version (1, or 2 with documents), uint32 token
// bytes (1, 2 or 4), uint64 vocabulary, uint64 count, uint64 flags (bit 0: a mask follows; bit 1:
// documents do), uint64 checksum of what follows the 64-byte header, uint64 documents, zero padding
// to 64; count tokens; with bit 0 count bytes, 1 where the token is no target; with bit 1 a uint64
// for each document, the index of its first token: ascending from 0.
struct TokenFileInfo {
    uint64_t vocabulary = 0, count = 0;
    uint32_t token_bytes = 1;
    bool masked = false;
    uint64_t documents = 0;  // whose beginnings it knows; 0: none
    uint64_t checksum = 0;   // over all that follows the header
};

constexpr uint64_t kVocabularyMost = uint64_t{1} << 30;

// Reads the header of a token file and nothing behind it. Throws usage or io where it is no token
// file or not as long as its header says. A header has no checksum of its own, so what no writer
// puts there is refused as well.
TokenFileInfo read_token_info(const std::string& path);

// Writes such a file part by part, as a Draft: a reader sees the old file or the new one. First
// all tokens, then either none or a mark for each: 1, it is no target; last the documents' first
// tokens, or none. Throws usage where a token is not below the vocabulary or there are none, io
// where the disk refuses.
class TokenWriter {
public:
    TokenWriter(std::string path, uint64_t vocabulary);

    void add_tokens(std::span<const uint32_t> tokens);
    void add_marks(std::span<const uint8_t> marks);
    // Ascending, the first of them 0.
    void add_documents(std::span<const uint64_t> firsts);
    void finish();

private:
    void write(std::span<const std::byte> bytes);

    const std::string path_;
    Draft draft_;
    TokenFileInfo info_{};
    uint64_t marks_ = 0;
    RunningChecksum checksum_{};
    std::vector<std::byte> narrow_{};
};

// One micro-batch, or a rank's part of each of its sequences: [micro_batch, sequence / parts];
// target -1 is not real.
struct MicroBatch {
    std::span<int32_t> tokens{};
    std::span<int32_t> targets{};
    // Where in its row a token's document begins and where it has ended, of all parts:
    // [micro_batch, sequence]; empty unless documents are isolated.
    std::span<int32_t> document_start{}, document_end{};
    // Where the documents of the part's own tokens begin, from its first; empty of whole sequences.
    std::span<int32_t> part_start{};
};

// How a run's batches are cut, and which of them are a rank's.
struct BatchShape {
    int64_t sequence = 0, micro_batch = 0;
    int64_t micro_batches = 0;             // of a rank's, in a step
    int64_t evaluation_micro_batches = 0;  // of all ranks; refused where there are not as many
    int64_t vocab = 0;                     // the model's
    int rank = 0, ranks = 1;
    int part = 0, parts = 1;  // of each sequence
};

// Where a run's batches come from. A step's targets are known once it is loaded.
class Batches {
public:
    virtual ~Batches() = default;
    virtual const TokenFileInfo& info() const = 0;
    // Brings what step `step` (from 1) is to see, or with 0 what evaluation is, before anything of
    // it is asked for. What it throws leaves all as it was.
    virtual void load(int64_t step) = 0;
    // A sum over what was loaded last, the same on ranks that were given the same.
    virtual uint64_t loaded_sum() const = 0;
    // Real targets of the whole step over all micro-batches and ranks.
    virtual int64_t count_targets(int64_t step) const = 0;
    virtual void fill(int64_t step, int64_t micro_batch_index, MicroBatch out) const = 0;
    // Micro-batch i of the text to evaluate on; fewer sequences than a whole one repeat with
    // targets -1.
    virtual void fill_evaluation(int64_t micro_batch_index, MicroBatch out) const = 0;
};

// Checks the file whole (header, size, checksum, every token below its vocabulary and the
// model's); throws usage or io naming the file and the first bad token. It goes on reading
// from it. A token block that is no longer as it was then is an io error, which says what changed.
//
// Sequences start at multiples of `sequence` tokens. An epoch visits every training sequence
// once, in an order that is a function of (seed, epoch). Global sequence s of the run is number
// s % n of epoch s / n. So a step's batch is a function of (seed, step, rank) alone, and a run
// restarts anywhere. A part's targets go on into the next part.
//
// Isolated documents do not see each other, and the last token of one has no target. What a row's
// end cuts off goes on in the next row as a document of its own.
class TokenLoader final : public Batches {
public:
    struct Options : BatchShape {
        std::string path{};
        double held_back = 0;
        bool trains = true;  // false: the whole file is held back
        bool isolates_documents = false;
        uint32_t seed = 0;
    };
    explicit TokenLoader(Options options);
    ~TokenLoader() override;
    const TokenFileInfo& info() const override;
    int64_t training_sequences() const;
    int64_t evaluation_sequences() const;
    // All of it is there, in the file.
    void load(int64_t) override {}
    uint64_t loaded_sum() const override { return 0; }
    int64_t count_targets(int64_t step) const override;
    // Both throw io where the file cannot be read, or is not as it was.
    void fill(int64_t step, int64_t micro_batch_index, MicroBatch out) const override;
    void fill_evaluation(int64_t micro_batch_index, MicroBatch out) const override;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// How a loader cuts a file into sequences, by its header alone. Throws usage where there is no
// sequence to train on, or none to evaluate on. So it does where less is held back than evaluation
// needs, and where the file knows no documents that are to be isolated.
struct TokenSplit {
    int64_t training = 0, evaluation = 0;  // sequences
    int64_t evaluation_begin = 0;          // token
};
TokenSplit split_tokens(const TokenLoader::Options& options, const TokenFileInfo& info);

}  // namespace ferry
