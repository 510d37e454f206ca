#include "throttled.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "ferry/error.h"

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

}  // namespace

EmulatedNetwork EmulatedNetwork::from(const std::string& text) {
    const size_t comma = std::min(text.find(','), text.size());
    const auto rate = quantity(std::string_view(text).substr(0, comma), kRates);
    const auto delay = comma == text.size()
                           ? std::optional<double>(0)
                           : quantity(std::string_view(text).substr(comma + 1), kDelays);
    if (rate && *rate > 0 && delay)
        return {.bytes_per_s = *rate / 8, .delay = static_cast<Nanos>(*delay)};
    throw Error(Trouble::usage, {.what = "not a rate, or a rate and a delay",
                                 .where = kVariable,
                                 .measured = text,
                                 .remedy = "write it as 100Mbit, or as 2.5Gbit,50us"});
}

std::optional<EmulatedNetwork> EmulatedNetwork::asked_for() {
    const char* text = std::getenv(kVariable);
    if (!text || *text == '\0') return std::nullopt;
    return from(text);
}

std::string EmulatedNetwork::text() const {
    std::ostringstream text;
    text << bytes_per_s * 8e-6 << " Mbit/s and a delay of " << static_cast<double>(delay) * 1e-3
         << " us";
    return text.str();
}

Throttled::Throttled(std::unique_ptr<Transport> real, const EmulatedNetwork& network, Clock now)
    : Throttled(std::move(real), network, std::move(now), std::make_shared<Link>()) {}

Throttled::Throttled(std::unique_ptr<Transport> real, const EmulatedNetwork& network, Clock now,
                     std::shared_ptr<Link> link)
    : real_(std::move(real)), network_(network), now_(std::move(now)), link_(std::move(link)) {}

void Throttled::start(const Operation& operation, size_t slot) {
    bytes_[slot] = operation.sent_bytes(place().size);
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
        const auto takes =
            static_cast<Nanos>(static_cast<double>(bytes_[slot]) / network_.bytes_per_s * 1e9);
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
    return std::unique_ptr<Transport>(
        new Throttled(real_->group(of, members), network_, now_, link_));
}

}  // namespace ferry::comm
