#include "kernel_exchange.h"

namespace ferry::train {

void KernelExchange::count(Sent& sent, int64_t bytes) {
    ++sent.calls;
    sent.bytes += bytes;
}

void KernelExchange::exchange(const std::byte* to, std::byte* from, int64_t bytes, int64_t block) {
    if (step_ == kAlone) return;
    count(exchanged_, (ranks_.size() - 1) * bytes);
    ranks_.exchange({to, from, bytes}, topic(block));
}

void KernelExchange::gather(const std::byte* mine, std::byte* all, int64_t bytes, int64_t block) {
    if (step_ == kAlone) return;
    count(gathered_, (ranks_.size() - 1) * bytes);
    ranks_.all_gather({mine, all, bytes}, topic(block));
}

void KernelExchange::shift(const model::Shift& parts, int64_t block) {
    if (step_ == kAlone) return;
    count(shifted_, parts.to_bytes);
    ranks_.shift({parts.to, parts.from, parts.to_bytes, parts.from_bytes, parts.by}, topic(block));
}

std::vector<CollectiveReport> KernelExchange::sent() const {
    std::vector<CollectiveReport> found;
    const auto add = [&](const char* call, const Sent& sent) {
        if (sent.calls == 0) return;
        found.push_back({.collective = std::string(call) + of_,
                         .calls = sent.calls,
                         .raw_bytes = sent.bytes,
                         .sent_bytes = sent.bytes});
    };
    add("exchange ", exchanged_);
    add("gather ", gathered_);
    add("shift ", shifted_);
    return found;
}

void KernelExchange::count_anew() {
    for (Sent* sent : {&exchanged_, &gathered_, &shifted_}) sent->calls = sent->bytes = 0;
}

}  // namespace ferry::train
