// ferry data TEXT... -o tokens.bin: text files to a file of byte-level tokens; or what a tokenizer
// made of them, as raw ids.
#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/process_limits.h"
#include "base/text.h"
#include "data/tokens.h"
#include "ferry/error.h"
#include "looks_like_json.h"
#include "tools/commands.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"

namespace {

using ferry::Error;
using ferry::Trouble;
using ferry::tools::print;

constexpr uint64_t kByteVocabulary = 256;

struct DataOptions {
    std::vector<std::string> texts{};
    std::string output{};
    std::string mask{};
    std::string ids{};  // their type; empty: the files are text
    uint64_t vocabulary = kByteVocabulary;
    std::optional<uint32_t> separator{};
    bool documents = false, json = false, raw = false;
    bool knows_documents() const { return documents || separator; }
};

[[noreturn]] void refuse_unread(const std::string& path, int error) {
    const std::string limit = ferry::limit_behind(error);
    throw Error(ferry::trouble_of_reading(error),
                {.what = error ? "cannot read the file" : "the file is empty",
                 .where = path,
                 .measured = error ? std::strerror(error) : "0 bytes",
                 .limit = limit,
                 .remedy = !limit.empty()    ? "raise that limit"
                           : error == EISDIR ? "name the files in it"
                           : error           ? "name a file that you may read"
                                             : "name a file with text in it"});
}

// A text that is opened, and what it was then.
class Text {
public:
    explicit Text(const std::string& path)
        : path_(path),
          file_(ferry::open_above_standard(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY)) {
        if (file_ < 0 || fstat(file_, &opened_) != 0) refuse_unread(path_, errno);
    }
    ~Text() { close(file_); }
    Text(const Text&) = delete;
    Text& operator=(const Text&) = delete;

    std::string_view next(std::span<char> block) {
        ssize_t got = 0;
        do {
            got = read(file_, block.data(), block.size());
        } while (got < 0 && errno == EINTR);
        if (got < 0) refuse_unread(path_, errno);
        read_ += got;
        return {block.data(), static_cast<size_t>(got)};
    }
    // At its end: a file that was written or cut meanwhile is neither the old nor the new one.
    void require_unchanged() const {
        struct stat now {};
        if (!S_ISREG(opened_.st_mode) || fstat(file_, &now) != 0) return;
        const bool whole = read_ == opened_.st_size || opened_.st_size == 0;  // as in /proc
        const bool same = whole && now.st_size == opened_.st_size &&
                          now.st_mtim.tv_sec == opened_.st_mtim.tv_sec &&
                          now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec;
        if (same) return;
        throw Error(
            Trouble::io,
            {.what = "the file changed while it was read",
             .where = path_,
             .measured = fmt::format("{} bytes read, {} bytes now", read_, int64_t{now.st_size}),
             .limit = fmt::format("{} bytes, as it was at first", int64_t{opened_.st_size}),
             .remedy = "run it again once nothing writes to the file"});
    }

private:
    const std::string& path_;
    const int file_;
    struct stat opened_ {};
    int64_t read_ = 0;
};

// Calls body with all of a file, block after block: texts are larger than memory.
template <class Body>
void read_file(const std::string& path, const Body& body) {
    std::vector<char> block(size_t{1} << 20);
    Text text(path);
    bool empty = true;
    for (std::string_view next = text.next(block); !next.empty(); next = text.next(block)) {
        empty = false;
        body(next);
    }
    text.require_unchanged();
    if (empty) refuse_unread(path, 0);
}

bool is_terminal(const std::string& path) {
    const int file = ferry::open_above_standard(path.c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK);
    if (file < 0) return false;
    const bool terminal = isatty(file) == 1;
    close(file);
    return terminal;
}

constexpr std::string_view kMagic = "FERRYTOK";

bool begins_as_tokens(const std::string& path) {
    // Looking into a pipe would take what is in it, and wait for who writes to it.
    std::error_code unknown;
    if (!std::filesystem::is_regular_file(path, unknown)) return false;
    std::ifstream file(path, std::ios::binary);
    std::string start(kMagic.size(), '\0');
    return file.read(start.data(), static_cast<std::streamsize>(start.size())) && start == kMagic;
}

// `ferry data *.txt -o notes.txt` must not eat the notes.
void check_replaces_tokens(const std::string& path) {
    const auto parent = std::filesystem::path(path).parent_path();
    if (!parent.empty() && ferry::kind_of(parent) != ferry::FileKind::directory) {
        throw Error(Trouble::usage, {.what = "the output's directory does not exist",
                                     .where = path,
                                     .remedy = "make the directory first"});
    }
    const ferry::FileKind kind = ferry::kind_of(path);
    if (kind != ferry::FileKind::none && kind != ferry::FileKind::regular) {
        throw Error(Trouble::usage, {.what = "the output is no regular file",
                                     .where = path,
                                     .remedy = "choose another name after -o"});
    }
    const std::string beginning = ferry::beginning_of(path, kMagic.size(), path);
    if (beginning.empty() || beginning == kMagic) return;
    throw Error(Trouble::usage, {.what = "the output exists and is no token file",
                                 .where = path,
                                 .remedy = "remove it, or choose another name after -o"});
}

void check_whole_ids(const std::string& path, uint64_t bytes, size_t of_an_id) {
    if (bytes % of_an_id == 0) return;
    throw Error(Trouble::usage, {.what = "the file ends inside an id",
                                 .where = path,
                                 .measured = std::to_string(bytes) + " bytes",
                                 .limit = std::to_string(of_an_id) + " bytes an id",
                                 .remedy = "check --ids and how the file was written"});
}

void refuse_json(const std::string& path, std::string_view beginning) {
    if (!ferry::tools::looks_like_json(path, beginning)) return;
    throw Error(Trouble::usage,
                {.what = "the file is JSON: a model would learn its braces, quotes and keys",
                 .where = path,
                 .limit = "plain text, or ids of a tokenizer (--ids)",
                 .remedy = "take the text out of it, as `jq -r .text` does where the key is "
                           "\"text\"; or insist on its bytes with --raw"});
}

// Where documents begin: with each file, and behind each separator.
class Documents {
public:
    explicit Documents(const DataOptions& options)
        : knows_(options.knows_documents()), separator_(options.separator) {}

    void begin_file() { begins_ = true; }
    void add(std::span<const uint32_t> tokens) {
        for (size_t i = 0; knows_ && i < tokens.size(); ++i) {
            if (begins_) firsts_.push_back(count_ + i);
            begins_ = separator_ == tokens[i];
        }
        count_ += tokens.size();
    }
    const std::vector<uint64_t>& firsts() const { return firsts_; }
    uint64_t tokens() const { return count_; }

private:
    const bool knows_;
    const std::optional<uint32_t> separator_;
    bool begins_ = true;
    uint64_t count_ = 0;
    std::vector<uint64_t> firsts_{};
};

// Calls first(block) with the beginning, as a pipe gives its bytes once.
template <class Id, class First>
void copy_ids(const std::string& path, ferry::TokenWriter& to, Documents& documents,
              const First& first) {
    static_assert(std::endian::native == std::endian::little, "the files are");
    // A file of the wrong type would be too large as well, which says less. A pipe has no size yet.
    std::error_code has_none;
    const std::uintmax_t size = std::filesystem::file_size(path, has_none);
    if (!has_none) check_whole_ids(path, size, sizeof(Id));
    std::string left;  // the first bytes of an id that a block ends in
    std::vector<uint32_t> tokens;
    uint64_t bytes = 0;
    bool begun = false, seen = false;  // by something else than white space
    read_file(path, [&](std::string_view block) {
        if (!begun) begun = block.find_first_not_of(" \t\r\n") != std::string_view::npos;
        if (begun && !std::exchange(seen, true)) first(block);
        bytes += block.size();
        left += block;
        tokens.clear();
        size_t at = 0;
        for (; at + sizeof(Id) <= left.size(); at += sizeof(Id)) {
            Id id = 0;
            std::memcpy(&id, left.data() + at, sizeof id);
            tokens.push_back(id);
        }
        left.erase(0, at);
        to.add_tokens(tokens);
        documents.add(tokens);
    });
    check_whole_ids(path, bytes, sizeof(Id));
}

void copy_tokens(const std::string& path, const DataOptions& options, ferry::TokenWriter& to,
                 Documents& documents) {
    const auto any = [](std::string_view) {};
    if (options.ids == "uint16") return copy_ids<uint16_t>(path, to, documents, any);
    if (options.ids == "uint32") return copy_ids<uint32_t>(path, to, documents, any);
    return copy_ids<uint8_t>(path, to, documents, [&](std::string_view beginning) {
        if (!options.raw) refuse_json(path, beginning);
    });
}

// Marks of `count` tokens, in order: of a mask's file, and of the first of each document.
class Marks {
public:
    Marks(ferry::TokenWriter& to, uint64_t count, const std::vector<uint64_t>& firsts)
        : to_(to), count_(count), first_(firsts.begin()), firsts_end_(firsts.end()) {}

    void add(std::vector<uint8_t>& marks) {
        const uint64_t end = index_ + marks.size();
        for (; first_ != firsts_end_ && *first_ < end; ++first_) marks[*first_ - index_] = 1;
        masked_ += static_cast<uint64_t>(std::count(marks.begin(), marks.end(), 1));
        to_.add_marks(marks);
        index_ = end;
    }
    void add_none() {
        constexpr uint64_t kBlock = 1 << 20;
        std::vector<uint8_t> marks;
        while (index_ < count_) {
            marks.assign(std::min(kBlock, count_ - index_), 0);
            add(marks);
        }
    }
    // One byte a token: 0 or '0' a target, 1 or '1' none.
    void copy(const std::string& path) {
        // A device's would never end.
        if (ferry::kind_of(path) == ferry::FileKind::other)
            throw Error(Trouble::usage, {.what = "the mask is no regular file",
                                         .where = path,
                                         .remedy = "write it to a file, and name that"});
        uint64_t bytes = 0;
        bool newline = false;  // that an editor leaves at the end of '0101...'
        std::vector<uint8_t> marks;
        read_file(path, [&](std::string_view block) {
            marks.clear();
            for (const char byte : block) {
                const int mark = static_cast<unsigned char>(byte);
                if (bytes < count_) marks.push_back(mark_of(mark, path, bytes));
                newline = bytes++ == count_ && byte == '\n';
            }
            add(marks);
        });
        if (bytes == count_ || newline) return;
        throw Error(Trouble::usage,
                    {.what = "the mask is not as long as the tokens",
                     .where = path,
                     .measured = std::to_string(bytes) + " bytes",
                     .limit = std::to_string(count_) + " tokens, of text its bytes",
                     .remedy = "give a byte for each token, of all files in their order"});
    }
    uint64_t masked() const { return masked_; }

private:
    static uint8_t mark_of(int mark, const std::string& path, uint64_t at) {
        if (mark == 0 || mark == 1) return static_cast<uint8_t>(mark);
        if (mark == '0' || mark == '1') return mark == '1';
        throw Error(Trouble::usage, {.what = "the mask holds something else than 0 and 1",
                                     .where = path + ", byte " + std::to_string(at),
                                     .measured = "byte " + std::to_string(mark),
                                     .remedy = "write 0 for a target and 1 for none"});
    }

    ferry::TokenWriter& to_;
    const uint64_t count_;
    uint64_t index_ = 0, masked_ = 0;
    std::vector<uint64_t>::const_iterator first_, firsts_end_;
};

// A device may be read for ever. A pipe ends with who writes to it, a terminal with Ctrl-D.
void refuse_device(const std::string& path) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0) return;  // which reading it says
    const bool device = S_ISBLK(status.st_mode) || S_ISCHR(status.st_mode);
    if (!device || is_terminal(path)) return;
    throw Error(Trouble::usage, {.what = "a device, whose bytes may never end",
                                 .where = path,
                                 .limit = "regular files and pipes",
                                 .remedy = "copy what you mean of it to a file, and name that"});
}

void check_input(const std::string& path, const std::string& output) {
    refuse_device(path);
    std::error_code ignored;
    if (std::filesystem::equivalent(path, output, ignored)) {
        throw Error(Trouble::usage, {.what = "the output is one of the inputs",
                                     .where = path,
                                     .remedy = "choose another name after -o"});
    }
    if (begins_as_tokens(path)) {
        throw Error(Trouble::usage, {.what = "a token file, not text",
                                     .where = path,
                                     .remedy = "name the text that it was made of"});
    }
}

void check_separator(const DataOptions& options) {
    if (!options.separator || *options.separator < options.vocabulary) return;
    throw Error(Trouble::usage, {.what = "the separator is no token",
                                 .where = "--separator",
                                 .measured = std::to_string(*options.separator),
                                 .limit = "below " + std::to_string(options.vocabulary),
                                 .remedy = "give the id of the tokenizer's end of text; of text a "
                                           "byte, such as 10 for the end of a line"});
}

void write_data(const DataOptions& options) {
    check_separator(options);
    check_replaces_tokens(options.output);
    for (const std::string& path : options.texts) check_input(path, options.output);
    ferry::TokenWriter file(options.output, options.vocabulary);
    Documents documents(options);
    for (const std::string& path : options.texts) {
        documents.begin_file();
        copy_tokens(path, options, file, documents);
    }
    const uint64_t count = documents.tokens();
    Marks marks(file, count, documents.firsts());
    if (!options.mask.empty()) marks.copy(options.mask);
    if (options.mask.empty() && options.knows_documents()) marks.add_none();
    file.add_documents(documents.firsts());
    file.finish();

    if (options.json) {
        const nlohmann::ordered_json line = {
            {"output", options.output}, {"files", options.texts.size()},
            {"tokens", count},          {"vocabulary", options.vocabulary},
            {"masked", marks.masked()}, {"documents", documents.firsts().size()}};
        print("{}", ferry::tools::json_line(line));
    } else {
        const size_t known = documents.firsts().size();
        print("{}: {} tokens from {} file{}, vocabulary {}, {} masked{}\n",
              ferry::one_line(options.output), count, options.texts.size(),
              options.texts.size() == 1 ? "" : "s", options.vocabulary, marks.masked(),
              known == 0 ? "" : fmt::format(", {} document{}", known, known == 1 ? "" : "s"));
    }
}

}  // namespace

void add_data_command(CLI::App& app) {
    const auto options = std::make_shared<DataOptions>();
    CLI::App* command =
        app.add_subcommand("data", "Turn text files, or a tokenizer's ids, into a file of tokens");
    command->add_option("TEXT", options->texts, "Text files, or files of ids, joined in this order")
        ->required();
    command->add_option("-o,--output", options->output, "Token file to write")->required();
    command->add_option(
        "--mask", options->mask,
        "One byte for each token, which of text is a byte: 1 where it is no target");
    command->add_flag(
        "--documents", options->documents,
        "Each file is a document: its first token, which nothing before it predicts, is "
        "no target, and data.isolate_documents keeps it to itself");
    command->add_option("--separator", options->separator,
                        "A document ends with each token of this id, of text a byte, and with each "
                        "file");
    CLI::Option* ids = command
                           ->add_option("--ids", options->ids,
                                        "The files are raw little-endian ids of a tokenizer: "
                                        "uint16 or uint32")
                           ->check(CLI::IsMember({"uint16", "uint32"}));
    CLI::Option* vocabulary = command
                                  ->add_option("--vocab", options->vocabulary,
                                               "All ids are below it: vocab_size of config.json")
                                  ->check(CLI::Range(uint64_t{1}, ferry::kVocabularyMost));
    ids->needs(vocabulary);
    vocabulary->needs(ids);
    command
        ->add_flag("--raw", options->raw,
                   "Take the bytes of JSON files too, braces and all: else they are refused")
        ->excludes(ids);
    command->add_flag("--json", options->json, "Print one JSON object");
    command->footer("Example: ferry data *.txt --documents -o tokens.bin");
    command->callback([options] { write_data(*options); });
}
