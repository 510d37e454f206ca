#include "throttled.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <utility>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::comm {
namespace {

constexpr const char* kVariable = "FERRY_EMULATED_NETWORK";
constexpr Nanos kNever = INT64_MAX;

using Unit = std::pair<std::string_view, double>;
constexpr std::array<Unit, 3> kRates{{{"Gbit", 1e9}, {"Mbit", 1e6}, {"Kbit", 1e3}}};
constexpr std::array<Unit, 2> kDelays{{{"us", 1e3}, {"ms", 1e6}}};

// A number and its unit; none: something else.
std::optional<double> quantity(std::string_view text, std::span<const Unit> units) {
    double number = 0;
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, number);
    if (read.ec != std::errc() || number < 0) return std::nullopt;
    for (const auto& [unit, size] : units)
        if (std::string_view(read.ptr, static_cast<size_t>(end - read.ptr)) == unit)
            return number * size;
    return std::nullopt;
}

// One that is above 0; none: something else.
std::optional<int> whole_number(std::string_view text) {
    int number = 0;
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, number);
    const bool whole = read.ec == std::errc() && read.ptr == end && number > 0;
    return whole ? std::optional(number) : std::nullopt;
}

}  // namespace

EmulatedNetwork EmulatedNetwork::from(const std::string& text) {
    const std::string_view all = text;
    const size_t comma = std::min(all.find(','), all.size()),
                 second = std::min(all.find(',', comma + 1), all.size());
    const auto rate = quantity(all.substr(0, comma), kRates);
    const auto delay = comma == all.size()
                           ? std::optional<double>(0)
                           : quantity(all.substr(comma + 1, second - comma - 1), kDelays);
    const auto ranks =
        second == all.size() ? std::optional<int>(1) : whole_number(all.substr(second + 1));
    if (rate && *rate > 0 && delay && ranks)
        return {.bytes_per_s = *rate / 8,
                .delay = static_cast<Nanos>(*delay),
                .ranks_per_host = *ranks};
    throw Error(Trouble::usage,
                {.what = "not a rate, or a rate, a delay and perhaps ranks a host",
                 .where = kVariable,
                 .measured = text,
                 .remedy = "write it as 100Mbit, as 2.5Gbit,50us, or as 2.5Gbit,50us,2"});
}

std::optional<EmulatedNetwork> EmulatedNetwork::asked_for() {
    const char* text = std::getenv(kVariable);
    if (!text || *text == '\0') return std::nullopt;
    return from(text);
}

void EmulatedNetwork::require_whole_hosts(int ranks) const {
    if (ranks % ranks_per_host == 0) return;
    throw Error(Trouble::usage,
                {.what = "the ranks cannot be cut into the emulated network's hosts",
                 .where = kVariable,
                 .measured = "hosts of " + std::to_string(ranks_per_host) + ", " +
                             std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks"),
                 .limit = "a divisor of the ranks",
                 .remedy = "start " + std::to_string(round_up(ranks, ranks_per_host)) +
                           " ranks, or write " + std::to_string(std::gcd(ranks, ranks_per_host)) +
                           " as the third number"});
}

std::string EmulatedNetwork::text() const {
    std::ostringstream text;
    text << bytes_per_s * 8e-6 << " Mbit/s and a delay of " << static_cast<double>(delay) * 1e-3
         << " us";
    if (ranks_per_host > 1) text << " between hosts of " << ranks_per_host << " ranks";
    return text.str();
}

namespace {

std::vector<int> all_of(int ranks) {
    std::vector<int> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    return all;
}

}  // namespace

Throttled::Throttled(std::unique_ptr<Transport> real, const EmulatedNetwork& network, Clock now)
    : Throttled(std::move(real), network, std::move(now), std::make_shared<Link>(), {}) {}

Throttled::Throttled(std::unique_ptr<Transport> real, const EmulatedNetwork& network, Clock now,
                     std::shared_ptr<Link> link, std::vector<int> members)
    : real_(std::move(real)),
      network_(network),
      now_(std::move(now)),
      link_(std::move(link)),
      members_(members.empty() ? all_of(real_->place().size) : std::move(members)) {}

bool Throttled::is_away(int rank) const {
    const auto host = [this](int of) {
        return members_[static_cast<size_t>(of)] / network_.ranks_per_host;
    };
    return host(rank) != host(place().rank);
}

void Throttled::start(const Operation& operation, size_t slot) {
    const int rank = place().rank, size = place().size;
    int64_t away = 0;
    for (int other = 0; other < size; ++other) away += other != rank && is_away(other);
    bytes_[slot] = operation.sent_bytes(size);
    held_[slot] = away > 0;
    if (operation.to_all()) {
        bytes_[slot] = size > 1 ? bytes_[slot] / (size - 1) * away : 0;
    } else if (operation.kind == Operation::Kind::shift) {
        const bool sends = is_away(operation.target(rank, size));
        bytes_[slot] = sends ? bytes_[slot] : 0;
        held_[slot] = sends || is_away(operation.source(rank, size));
    }
    leaves_[slot] =
        operation.kind != Operation::Kind::pass || operation.sends(operation.transfers[0]);
    due_[slot] = kNever;
    real_->start(operation, slot);
    under_way_.push_back(slot);
}

// Which have really ended, and so were begun by all: the link takes them from here on.
void Throttled::look() {
    while (!under_way_.empty() && real_->finished(under_way_.front())) {
        const size_t slot = under_way_.front();
        under_way_.pop_front();
        if (!held_[slot]) {
            due_[slot] = now_();
            continue;
        }
        const auto takes = static_cast<Nanos>(static_cast<double>(bytes_[slot]) /
                                              network_.bytes_per_s_of_a_rank() * 1e9);
        due_[slot] = (leaves_[slot] ? leave(takes) : now_() + takes) + network_.delay;
    }
}

// When what takes so long has left.
Nanos Throttled::leave(Nanos takes) {
    const std::lock_guard lock(link_->mutex);
    return link_->free_at = std::max(link_->free_at, now_()) + takes;
}

bool Throttled::finished(size_t slot) {
    look();
    return due_[slot] != kNever && now_() >= due_[slot];
}

std::unique_ptr<Transport> Throttled::group(Communicator& of, std::span<const int> members) {
    std::vector<int> of_run;
    for (const int member : members) of_run.push_back(members_[static_cast<size_t>(member)]);
    return std::unique_ptr<Transport>(
        new Throttled(real_->group(of, members), network_, now_, link_, std::move(of_run)));
}

}  // namespace ferry::comm
