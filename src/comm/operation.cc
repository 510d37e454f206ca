#include "operation.h"

#include <algorithm>
#include <cstring>

namespace ferry::comm {
namespace {

template <class Pieces, class Take>
Operation make(Operation::Kind kind, const Pieces& pieces, Topic topic, Take take) {
    FERRY_CHECK(pieces.size() <= Communicator::kPieces, "too many pieces of one operation");
    Operation operation{.kind = kind, .count = pieces.size(), .topic = topic};
    std::ranges::transform(pieces, operation.pieces.begin(), take);
    return operation;
}

}  // namespace

Operation Operation::gather(std::span<const Gather> pieces, Topic topic) {
    return make(Kind::all_gather, pieces, topic, [](const Gather& gather) {
        return Piece{gather.mine, gather.all, gather.bytes};
    });
}

Operation Operation::exchange(std::span<const Exchange> pieces, Topic topic) {
    return make(Kind::exchange, pieces, topic, [](const Exchange& exchange) {
        return Piece{exchange.to, exchange.from, exchange.bytes};
    });
}

Operation Operation::gather_host(Gather piece, Topic topic) {
    FERRY_CHECK(piece.bytes <= Communicator::kAgreedBytes, "too much to agree on");
    Operation operation = gather({&piece, 1}, topic);
    operation.kind = Kind::all_gather_host;
    return operation;
}

Operation Operation::signal(std::atomic<uint64_t>& counter) { return {.counter = &counter}; }

std::string Operation::text() const {
    std::string text = kind == Kind::exchange ? "exchange" : "all-gather";
    text.append(" of the ").append(topic.of);
    if (topic.layer >= 0) text.append(" of layer ").append(std::to_string(topic.layer));
    if (topic.step >= 0) text.append(", step ").append(std::to_string(topic.step));
    return text;
}

void copy_own(const Operation& operation, const Piece& piece, int rank) {
    const std::byte* own = operation.out_for(piece, rank);
    std::byte* place = piece.in + rank * piece.bytes;
    if (piece.bytes > 0 && own != place) std::memcpy(place, own, static_cast<size_t>(piece.bytes));
}

std::string seconds_text(double seconds) {
    std::string text = std::to_string(seconds);
    text.resize(text.find('.') + 2);
    return text + " s";
}

Error lost(std::span<const int> ranks, const std::string& how, const std::string& where,
           const std::string& remedy) {
    std::string who = ranks.size() > 1 ? "lost ranks "
                      : ranks.empty()  ? "lost a rank"
                                       : "lost rank ";
    for (size_t i = 0; i < ranks.size(); ++i) {
        if (i > 0) who += i + 1 < ranks.size() ? ", " : " and ";
        who += std::to_string(ranks[i]);
    }
    return {Trouble::rank_lost, {.what = who + ": " + how, .where = where, .remedy = remedy}};
}

}  // namespace ferry::comm
