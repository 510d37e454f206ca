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

// Checks the file whole (header, size, checksum, every token below the vocabulary and below
// `model_vocab`); throws usage or io naming the file and the first bad token. It goes on reading
// from it. A token block that is no longer as it was then is an io error, which says what changed.
//
// Sequences start at multiples of `sequence` tokens. An epoch visits every training sequence
// once, in an order that is a function of (seed, epoch). Global sequence s of the run is number
// s % n of epoch s / n. So a step's batch is a function of (seed, step, rank) alone, and a run
// restarts anywhere. A part's targets go on into the next part.
//
// Isolated documents do not see each other, and the last token of one has no target. What a row's
// end cuts off goes on in the next row as a document of its own.
class TokenLoader {
public:
    struct Options {
        std::string path{};
        int64_t sequence = 0, micro_batch = 0, micro_batches = 0;
        int64_t model_vocab = 0;
        double held_back = 0;
        bool trains = true;                    // false: the whole file is held back
        int64_t evaluation_micro_batches = 0;  // that will be asked for; refused when not there
        bool isolates_documents = false;
        uint32_t seed = 0;
        int rank = 0, ranks = 1;
        int part = 0, parts = 1;  // of each sequence
    };
    explicit TokenLoader(Options options);
    ~TokenLoader();
    const TokenFileInfo& info() const;
    int64_t training_sequences() const;
    int64_t evaluation_sequences() const;
    // Real targets of the whole step (from 1) over all micro-batches and ranks.
    int64_t count_targets(int64_t step) const;
    // Both throw io where the file cannot be read, or is not as it was.
    void fill(int64_t step, int64_t micro_batch_index, MicroBatch out) const;
    // Micro-batch i of the held-back text; fewer sequences than a whole one repeat with targets -1.
    void fill_evaluation(int64_t micro_batch_index, MicroBatch out) const;

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
