#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/comm.h"

namespace ferry::comm {
namespace {

constexpr Topic kFacts{.of = "facts on which all ranks must agree"};

std::string bytes_of(std::span<const Fact> facts) {
    std::string text;
    for (const Fact& fact : facts) text.append(fact.key).append(1, '\0').append(fact.value) += '\0';
    return text;
}

// Collects every rank's text, each padded to the longest, in parts that one exchange can carry.
std::vector<std::string> gather(Communicator& communicator, Executor& executor, std::string mine) {
    const auto size = static_cast<size_t>(communicator.size());
    const uint64_t length = mine.size();
    std::vector<uint64_t> lengths(size);
    agree(communicator, executor, std::as_bytes(std::span(&length, 1)),
          std::as_writable_bytes(std::span(lengths)), kFacts);
    mine.resize(*std::ranges::max_element(lengths));
    std::vector<std::string> each(size);
    constexpr size_t kBlock = Communicator::kAgreedBytes;
    for (size_t at = 0; at < mine.size(); at += kBlock) {
        const std::string block = mine.substr(at, kBlock);
        std::string all(size * block.size(), '\0');
        agree(communicator, executor, std::as_bytes(std::span(block)),
              std::as_writable_bytes(std::span(all)), kFacts);
        for (size_t r = 0; r < size; ++r) each[r] += all.substr(r * block.size(), block.size());
    }
    for (size_t r = 0; r < size; ++r) each[r].resize(lengths[r]);
    return each;
}

std::vector<Fact> facts_in(const std::string& bytes) {
    std::vector<Fact> facts;
    for (size_t at = 0; at < bytes.size();) {
        Fact fact{.key = bytes.c_str() + at, .value = ""};
        at += fact.key.size() + 1;
        fact.value = bytes.c_str() + at;
        at += fact.value.size() + 1;
        facts.push_back(std::move(fact));
    }
    return facts;
}

// The part of a long text in which it begins to differ from another.
std::string excerpt(const std::string& text, const std::string& other) {
    constexpr size_t kBefore = 20, kLength = 80;
    if (text.size() <= kLength) return "\"" + text + "\"";
    const auto differs = std::ranges::mismatch(text, other).in1 - text.begin();
    const size_t from = std::max<size_t>(static_cast<size_t>(differs), kBefore) - kBefore;
    return "\"..." + text.substr(from, kLength) + "...\"";
}

}  // namespace

void agree(Communicator& communicator, Executor& executor, std::span<const std::byte> mine,
           std::span<std::byte> all, Topic topic) {
    FERRY_CHECK(all.size() == mine.size() * static_cast<size_t>(communicator.size()));
    std::atomic<uint64_t> done = 0;
    communicator.all_gather_host(
        {.mine = mine.data(), .all = all.data(), .bytes = static_cast<int64_t>(mine.size())},
        topic);
    communicator.signal(done);
    while (done.load(std::memory_order_acquire) == 0) executor.wait(kForever);
    communicator.check();
}

void await_all(Communicator& communicator, Executor& executor) {
    const std::byte mine{};
    std::vector<std::byte> all(static_cast<size_t>(communicator.size()));
    try {
        agree(communicator, executor, {&mine, 1}, all, {.of = "end"});
    } catch (const Error&) {  // the first to end may be gone already
    }
}

void require_same(Communicator& communicator, Executor& executor, std::span<const Fact> facts) {
    const std::vector<std::string> each = gather(communicator, executor, bytes_of(facts));
    const std::vector<Fact> first = facts_in(each.front());
    std::string keys, values;
    for (size_t rank = 1; rank < each.size(); ++rank) {
        const std::vector<Fact> theirs = facts_in(each[rank]);
        const auto [a, b] = std::ranges::mismatch(theirs, first, [](const Fact& x, const Fact& y) {
            return x.key == y.key && x.value == y.value;
        });
        if (a == theirs.end() && b == first.end()) continue;
        const Fact nothing{}, &is = a == theirs.end() ? nothing : *a,
                              &wanted = b == first.end() ? nothing : *b;
        const std::string who = "rank " + std::to_string(rank);
        keys += (keys.empty() ? "" : "; ") + (wanted.key.empty() ? is : wanted).key + " on " + who;
        if (values.empty())
            values = "rank 0 has " + excerpt(wanted.value, is.value) + ", " + who + " " +
                     excerpt(is.value, wanted.value);
    }
    if (keys.empty()) return;
    // Every rank finds the same difference, and says so itself.
    await_all(communicator, executor);
    throw Error(Trouble::usage,
                {.what = "the ranks were not started alike",
                 .where = keys,
                 .measured = values,
                 .limit = "the same on every rank",
                 .remedy = "start every rank from the same ferry with the same configuration and "
                           "options"});
}

}  // namespace ferry::comm
