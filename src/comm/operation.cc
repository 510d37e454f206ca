#include "operation.h"

#include <algorithm>
#include <cstring>

namespace ferry::comm {
namespace {

template <class Transfers, class Take>
Operation make(Operation::Kind kind, const Transfers& transfers, Topic topic, Take take) {
    FERRY_CHECK(transfers.size() <= Communicator::kTransfers,
                "too many transfers of one operation");
    Operation operation{.kind = kind, .count = transfers.size(), .topic = topic};
    std::ranges::transform(transfers, operation.transfers.begin(), take);
    return operation;
}

}  // namespace

Operation Operation::gather(std::span<const Gather> transfers, Topic topic) {
    return make(Kind::all_gather, transfers, topic, [](const Gather& gather) {
        return Transfer{gather.mine, gather.all, gather.bytes};
    });
}

Operation Operation::exchange(std::span<const Exchange> transfers, Topic topic) {
    return make(Kind::exchange, transfers, topic, [](const Exchange& exchange) {
        return Transfer{exchange.to, exchange.from, exchange.bytes};
    });
}

Operation Operation::pass(const Pass& transfer, Topic topic) {
    FERRY_CHECK((transfer.from == nullptr) != (transfer.to == nullptr),
                "a rank passes on or takes over");
    return make(Kind::pass, std::span(&transfer, 1), topic, [](const Pass& pass) {
        return Transfer{pass.from, pass.to, pass.bytes};
    });
}

Operation Operation::gather_host(Gather transfer, Topic topic) {
    FERRY_CHECK(transfer.bytes <= Communicator::kAgreedBytes, "too much to agree on");
    Operation operation = gather({&transfer, 1}, topic);
    operation.kind = Kind::all_gather_host;
    return operation;
}

Operation Operation::shift(const Shift& parts, Topic topic) {
    FERRY_CHECK(parts.by > 0 && parts.to_bytes >= 0 && parts.from_bytes >= 0);
    Operation operation{.kind = Kind::shift, .count = 2, .topic = topic, .by = parts.by};
    operation.transfers[0] = {parts.to, nullptr, parts.to_bytes};
    operation.transfers[1] = {nullptr, parts.from, parts.from_bytes};
    return operation;
}

int64_t Operation::sent_bytes(int size) const {
    if (kind == Kind::shift) return leaving().bytes;
    int64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) bytes += transfers[i].bytes;
    return bytes * (size - 1);
}

Operation Operation::signal(std::atomic<uint64_t>& counter) { return {.counter = &counter}; }

std::string Operation::text() const {
    std::string text = kind == Kind::exchange ? "exchange"
                       : kind == Kind::pass   ? "pass"
                       : kind == Kind::shift  ? "shift"
                                              : "all-gather";
    text.append(" of the ").append(topic.of);
    if (topic.layer >= 0) text.append(" of layer ").append(std::to_string(topic.layer));
    if (topic.step >= 0) text.append(", step ").append(std::to_string(topic.step));
    return text;
}

void copy_own(const Operation& operation, const Transfer& transfer, int rank) {
    if (operation.kind == Operation::Kind::pass) return;  // nothing of it stays
    const std::byte* own = operation.out_for(transfer, rank);
    std::byte* place = transfer.in + rank * transfer.bytes;
    if (transfer.bytes > 0 && own != place)
        std::memcpy(place, own, static_cast<size_t>(transfer.bytes));
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
