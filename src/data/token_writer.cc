#include <algorithm>
#include <cstring>
#include <utility>

#include "data/tokens.h"
#include "ferry/error.h"
#include "token_header.h"

namespace ferry {
namespace {

template <class Token>
void narrow(std::span<const uint32_t> tokens, std::vector<std::byte>& to) {
    to.resize(tokens.size() * sizeof(Token));
    for (size_t i = 0; i < tokens.size(); ++i) {
        const auto token = static_cast<Token>(tokens[i]);
        std::memcpy(to.data() + i * sizeof(Token), &token, sizeof(Token));
    }
}

uint32_t width_for(uint64_t vocabulary) {
    return vocabulary <= 256 ? 1 : vocabulary <= 65536 ? 2 : 4;
}

}  // namespace

TokenWriter::TokenWriter(std::string path, uint64_t vocabulary)
    : path_(std::move(path)),
      draft_(path_, "cannot write the token file", {},
             {.beginning = std::string_view(kTokenMagic, sizeof kTokenMagic)}),
      info_{.vocabulary = vocabulary, .token_bytes = width_for(vocabulary)} {
    const TokenHeader later{};  // its place
    draft_.write(std::as_bytes(std::span(&later, 1)));
}

void TokenWriter::add_tokens(std::span<const uint32_t> tokens) {
    FERRY_CHECK(marks_ == 0 && info_.documents == 0, "tokens come before marks and documents");
    const auto bad =
        std::ranges::find_if(tokens, [this](uint32_t token) { return token >= info_.vocabulary; });
    if (bad != tokens.end()) {
        const uint64_t index = info_.count + static_cast<uint64_t>(bad - tokens.begin());
        throw Error(Trouble::usage,
                    {.what = "a token outside the vocabulary",
                     .where = path_,
                     .measured = std::to_string(*bad) + " at " + std::to_string(index),
                     .limit = "below " + std::to_string(info_.vocabulary),
                     .remedy = "give the vocabulary of the tokenizer that made them"});
    }
    if (info_.token_bytes == 1) narrow<uint8_t>(tokens, narrow_);
    if (info_.token_bytes == 2) narrow<uint16_t>(tokens, narrow_);
    if (info_.token_bytes == 4) narrow<uint32_t>(tokens, narrow_);
    write(narrow_);
    info_.count += tokens.size();
}

void TokenWriter::add_marks(std::span<const uint8_t> marks) {
    FERRY_CHECK(info_.documents == 0, "marks come before documents");
    narrow_.resize(marks.size());
    std::ranges::transform(marks, narrow_.begin(),
                           [](uint8_t masked) { return std::byte{masked != 0}; });
    write(narrow_);
    marks_ += marks.size();
}

void TokenWriter::add_documents(std::span<const uint64_t> firsts) {
    FERRY_CHECK(firsts.empty() || info_.documents > 0 || firsts.front() == 0);
    write(std::as_bytes(firsts));
    info_.documents += firsts.size();
}

void TokenWriter::finish() {
    const auto refuse = [this](const char* what, std::string measured, std::string limit,
                               const char* remedy) {
        throw Error(Trouble::usage, {.what = what,
                                     .where = path_,
                                     .measured = std::move(measured),
                                     .limit = std::move(limit),
                                     .remedy = remedy});
    };
    if (info_.count == 0) refuse("no tokens to write", "", "", "give some text");
    if (marks_ != 0 && marks_ != info_.count)
        refuse("the mask is not as long as the tokens", std::to_string(marks_),
               std::to_string(info_.count), "give a mark for each token");
    const bool documents = info_.documents > 0;
    TokenHeader header{
        .version = documents ? kTokenVersionOfDocuments : kTokenVersion,
        .token_bytes = info_.token_bytes,
        .vocabulary = info_.vocabulary,
        .count = info_.count,
        .flags = (marks_ == 0 ? 0 : kTokenMaskFollows) | (documents ? kDocumentsFollow : 0),
        .checksum = checksum_.value(),
        .documents = info_.documents};
    std::memcpy(header.magic, kTokenMagic, sizeof kTokenMagic);
    draft_.write_again(0, std::as_bytes(std::span(&header, 1)));
    draft_.publish();
}

void TokenWriter::write(std::span<const std::byte> bytes) {
    checksum_.add(bytes);
    draft_.write(bytes);
}

}  // namespace ferry
