// ferry data TEXT... -o tokens.bin: text files to a file of byte-level tokens; or what a tokenizer
// made of them, as raw ids.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "commands.h"
#include "ferry/tokens.h"

namespace {

using ferry::Error;
using ferry::Trouble;

constexpr uint64_t kByteVocabulary = 256;

struct DataOptions {
    std::vector<std::string> texts{};
    std::string output{};
    std::string mask{};
    std::string ids{};  // their type; empty: the files are text
    uint64_t vocabulary = kByteVocabulary;
    bool documents = false, json = false;
};

std::string read_file(const std::string& path) {
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    if (!file.is_open() || !(text << file.rdbuf())) {
        const Trouble trouble = errno == EIO ? Trouble::io : Trouble::usage;
        throw Error(trouble, {.what = errno ? "cannot read the file" : "the file is empty",
                              .where = path,
                              .measured = errno ? std::strerror(errno) : "0 bytes",
                              .remedy = errno == EISDIR ? "name the files in it"
                                        : errno         ? "name a file that you may read"
                                                        : "name a file with text in it"});
    }
    return std::move(text).str();
}

bool begins_as_tokens(const std::string& path) {
    constexpr std::string_view kMagic = "FERRYTOK";
    std::ifstream file(path, std::ios::binary);
    std::string start(kMagic.size(), '\0');
    return file.read(start.data(), static_cast<std::streamsize>(start.size())) && start == kMagic;
}

// `ferry data *.txt -o notes.txt` must not eat the notes.
void check_output(const std::string& path) {
    const auto parent = std::filesystem::path(path).parent_path();
    if (!parent.empty() && !std::filesystem::is_directory(parent)) {
        throw Error(Trouble::usage, {.what = "the output's directory does not exist",
                                     .where = path,
                                     .remedy = "make the directory first"});
    }
    const bool empty = std::ifstream(path).peek() == std::ifstream::traits_type::eof();
    if (empty || begins_as_tokens(path)) return;
    throw Error(Trouble::usage, {.what = "the output exists and is no token file",
                                 .where = path,
                                 .remedy = "remove it, or choose another name after -o"});
}

template <class Id>
void append_ids(const std::string& path, std::vector<uint32_t>& tokens) {
    static_assert(std::endian::native == std::endian::little, "the files are");
    const std::string raw = read_file(path);
    if (raw.size() % sizeof(Id) != 0) {
        throw Error(Trouble::usage, {.what = "the file ends inside an id",
                                     .where = path,
                                     .measured = std::to_string(raw.size()) + " bytes",
                                     .limit = std::to_string(sizeof(Id)) + " bytes an id",
                                     .remedy = "check --ids and how the file was written"});
    }
    for (size_t at = 0; at < raw.size(); at += sizeof(Id)) {
        Id id = 0;
        std::memcpy(&id, raw.data() + at, sizeof id);
        tokens.push_back(id);
    }
}

void append_tokens(const std::string& path, const std::string& ids, std::vector<uint32_t>& tokens) {
    if (ids == "uint16") return append_ids<uint16_t>(path, tokens);
    if (ids == "uint32") return append_ids<uint32_t>(path, tokens);
    append_ids<uint8_t>(path, tokens);
}

// One byte a token: 0 or '0' a target, 1 or '1' none.
std::vector<uint8_t> read_mask(const std::string& path, size_t count) {
    std::string marks = read_file(path);
    // The newline that an editor leaves at the end of '0101...'.
    if (marks.size() == count + 1 && marks.back() == '\n') marks.pop_back();
    if (marks.size() != count) {
        throw Error(Trouble::usage,
                    {.what = "the mask is not as long as the tokens",
                     .where = path,
                     .measured = std::to_string(marks.size()) + " bytes",
                     .limit = std::to_string(count) + " tokens, of text its bytes"});
    }
    std::vector<uint8_t> mask(count);
    for (size_t i = 0; i < count; ++i) {
        const int mark = static_cast<unsigned char>(marks[i]);
        if (mark != 0 && mark != 1 && mark != '0' && mark != '1') {
            throw Error(Trouble::usage, {.what = "the mask holds something else than 0 and 1",
                                         .where = path + ", byte " + std::to_string(i),
                                         .measured = "byte " + std::to_string(mark),
                                         .remedy = "write 0 for a target and 1 for none"});
        }
        mask[i] = mark == 1 || mark == '1';
    }
    return mask;
}

void check_input(const std::string& path, const std::string& output) {
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

void write_data(const DataOptions& options) {
    check_output(options.output);
    for (const std::string& path : options.texts) check_input(path, options.output);
    std::vector<uint32_t> tokens;
    std::vector<size_t> firsts;
    for (const std::string& path : options.texts) {
        firsts.push_back(tokens.size());
        append_tokens(path, options.ids, tokens);
    }
    std::vector<uint8_t> mask;
    if (!options.mask.empty()) mask = read_mask(options.mask, tokens.size());
    if (options.documents) {
        mask.resize(tokens.size());
        for (const size_t first : firsts) mask[first] = 1;
    }
    ferry::write_tokens(options.output, tokens, options.vocabulary, mask);

    const auto masked = std::count(mask.begin(), mask.end(), 1);
    if (options.json) {
        const nlohmann::ordered_json line = {{"output", options.output},
                                             {"files", options.texts.size()},
                                             {"tokens", tokens.size()},
                                             {"vocabulary", options.vocabulary},
                                             {"masked", masked}};
        std::printf("%s\n", line.dump().c_str());
    } else {
        std::printf("%s: %zu tokens from %zu file%s, vocabulary %llu, %lld masked\n",
                    options.output.c_str(), tokens.size(), options.texts.size(),
                    options.texts.size() == 1 ? "" : "s",
                    static_cast<unsigned long long>(options.vocabulary),
                    static_cast<long long>(masked));
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
    command->add_flag("--documents", options->documents,
                      "Each file is a document: its first token, which nothing in it foretells, is "
                      "no target");
    CLI::Option* ids = command
                           ->add_option("--ids", options->ids,
                                        "The files are raw little-endian ids of a tokenizer: "
                                        "uint16 or uint32")
                           ->check(CLI::IsMember({"uint16", "uint32"}));
    constexpr uint64_t kMostTokens = 1 << 30;
    CLI::Option* vocabulary = command
                                  ->add_option("--vocab", options->vocabulary,
                                               "All ids are below it: vocab_size of config.json")
                                  ->check(CLI::Range(uint64_t{1}, kMostTokens));
    ids->needs(vocabulary);
    vocabulary->needs(ids);
    command->add_flag("--json", options->json, "Print one JSON object");
    command->callback([options] { write_data(*options); });
}
