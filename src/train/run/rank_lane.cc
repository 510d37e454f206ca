#include "rank_lane.h"

#include <algorithm>

namespace ferry::train {

namespace {

cost::StageLink link_of(const swap::Task& task) { return static_cast<cost::StageLink>(task.flags); }
const char* what_passes(const swap::Task& task) {
    using cost::StageLink;
    const bool leaves = cost::row_of(task).stage_end == cost::StageEnd::sends;
    if (link_of(task) == StageLink::table) return "table";
    return (link_of(task) == StageLink::next) == leaves ? "block input" : "block input's gradient";
}

}  // namespace

bool RankLane::one_order() const {
    return (sharers_ == &ranks_ || !sharers_) && !hosts_.inside &&
           std::ranges::all_of(links_, [](const auto* other) { return other == nullptr; });
}

comm::Communicator& RankLane::communicator(size_t on) const {
    if (on == run) return ranks_;
    if (on == slice) return *sharers_;
    if (on == inside) return *hosts_.inside;
    return on == across ? *hosts_.across : *links_[on - link];
}

void RankLane::signal(std::atomic<uint64_t>& counter) {
    if (one_order()) return ranks_.signal(counter);
    FERRY_CHECK(posted_ - told_ < kTasks, "too many tasks of the lane are under way");
    counter_ = &counter;
    on_[posted_++ % kTasks] = static_cast<uint8_t>(last_);
    communicator(last_).signal(ended_[last_]);
}

void RankLane::tell_ended() {
    while (told_ < posted_) {
        const size_t on = on_[told_ % kTasks];
        if (ended_[on].load(std::memory_order_acquire) == taken_[on]) return;
        ++taken_[on];
        ++told_;
        counter_->fetch_add(1, std::memory_order_release);
    }
}

void RankLane::check() {
    tell_ended();
    ranks_.check();
    for (auto* other : {sharers_, hosts_.inside, hosts_.across})
        if (other) other->check();
    for (auto* other : links_)
        if (other) other->check();
}

void RankLane::count(const swap::Task& task, int64_t others, int64_t raw_bytes,
                     int64_t sent_bytes) {
    Sent& sent = sent_[task.op];
    ++sent.calls;
    sent.raw_bytes += others * raw_bytes;
    sent.sent_bytes += others * sent_bytes;
}

std::vector<CollectiveReport> RankLane::collectives() const {
    std::vector<CollectiveReport> found;
    for (size_t op = 0; op < sent_.size(); ++op) {
        const Sent& sent = sent_[op];
        if (sent.calls == 0) continue;
        found.push_back({.collective = cost::name_of(static_cast<cost::Op>(op)),
                         .calls = sent.calls,
                         .raw_bytes = sent.raw_bytes,
                         .sent_bytes = sent.sent_bytes});
    }
    return found;
}

size_t RankLane::on_of(const swap::Task& task) {
    const cost::OperationRow& row = cost::row_of(task);
    if (row.stage_end != cost::StageEnd::none) return link + static_cast<size_t>(link_of(task));
    if (row.of_all_stages) return run;
    switch (cost::among(task)) {
        case cost::Among::all:
            return slice;
        case cost::Among::host:
            return inside;
        case cost::Among::hosts:
            return across;
    }
    bug("no such ranks");
}

void RankLane::start(const swap::Call& call) {
    last_ = on_of(*call.task);
    cost::op::run(cost::op::Exchanges{}, *call.task, call.at,
                  [&](const auto& operands) { exchange(*call.task, operands); });
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherCodes<At>& at) {
    const model::Layer& layer = plan_.layers[static_cast<size_t>(task.layer)];
    zero::Partition raw = plan_.partition;
    raw.codecs = {};
    count(task, others(), zero::gathered_bytes(raw, layer, plan_.compute) / others(),
          zero::gathered_bytes(plan_.partition, layer, plan_.compute) / others());
    zero::gather_codes(*sharers_, plan_.partition, layer, at.codes, topic("weight codes", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherWeights<At>& at) {
    const model::Layer& layer = plan_.layers[static_cast<size_t>(task.layer)];
    const int64_t bytes = zero::gathered_bytes(plan_.partition, layer, plan_.compute) / others();
    count(task, others(), bytes, bytes);
    zero::gather_weights(*sharers_, plan_.partition, layer, plan_.compute, at.shards, at.whole,
                         topic("weights", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherCodesInHost<At>& at) {
    gather_second_shards(task, at.codes);
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherWeightsInHost<At>& at) {
    gather_second_shards(task, at.whole);
}

void RankLane::gather_second_shards(const swap::Task& task, std::byte* all) {
    const model::Layer& layer = plan_.layers[static_cast<size_t>(task.layer)];
    const int64_t here = plan_.partition.hosts.each - 1;
    zero::Partition raw = plan_.partition;
    raw.codecs = {};
    count(task, here, zero::gathered_in_host_bytes(raw, layer, plan_.compute) / here,
          task.bytes / here);
    zero::gather_second_shards(*hosts_.inside, plan_.partition, layer, plan_.compute, all,
                               topic("weights in the host", task));
}

// For each rank of the host the parts of those that stand alike in all hosts.
void RankLane::exchange(const swap::Task& task, const cost::op::ExchangeInHost<At>& at) {
    const zero::Partition& partition = plan_.partition;
    const int64_t elements = plan_.chunks[static_cast<size_t>(task.item)].count;
    const comm::Exchange parts{
        .to = at.to_ranks,
        .from = at.from_ranks,
        .bytes = partition.host_count() * partition.part_bytes(elements, plan_.wire)};
    count(task, partition.hosts.each - 1, partition.host_count() * elements * size_of(plan_.wire),
          parts.bytes);
    hosts_.inside->exchange({&parts, 1}, topic("gradient in the host", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::Exchange<At>& at) {
    const int64_t elements = plan_.chunks[static_cast<size_t>(task.item)].count;
    const comm::Exchange parts{.to = at.to_ranks,
                               .from = at.from_ranks,
                               .bytes = plan_.partition.part_bytes(elements, plan_.wire)};
    const size_t on = on_of(task);
    count(task, on == across ? plan_.partition.host_count() - 1 : others(),
          elements * size_of(plan_.wire), parts.bytes);
    communicator(on).exchange({&parts, 1}, topic("gradient", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherGradient<At>& at) {
    const int64_t elements = plan_.chunks[static_cast<size_t>(task.item)].count;
    const comm::Gather parts{at.mine, at.all, elements * size_of(plan_.wire)};
    count(task, others(), parts.bytes, parts.bytes);
    sharers_->all_gather({&parts, 1}, topic("gradient", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::ExchangeMomentum<At>& at) {
    const int64_t elements = plan_.chunks[static_cast<size_t>(task.item)].count;
    const comm::Exchange parts{.to = at.to_ranks,
                               .from = at.from_ranks,
                               .bytes = plan_.partition.codecs.momentum.bytes(elements)};
    count(task, others(), elements * size_of(plan_.wire), parts.bytes);
    sharers_->exchange({&parts, 1}, topic("momentum", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherMomentum<At>& at) {
    const int64_t elements = plan_.chunks[static_cast<size_t>(task.item)].count;
    const int64_t bytes = plan_.partition.codecs.momentum.bytes(elements);
    const comm::Gather parts{at.merged + plan_.partition.rank * bytes, at.merged, bytes};
    count(task, others(), elements * size_of(plan_.wire), bytes);
    sharers_->all_gather({&parts, 1}, topic("momentum", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::PassOn<At>& at) {
    count(task, 1, task.bytes, task.bytes);
    links_[static_cast<size_t>(link_of(task))]->pass({.from = at.what, .bytes = task.bytes},
                                                     topic(what_passes(task), task));
}

// What others send is theirs to count.
void RankLane::exchange(const swap::Task& task, const cost::op::TakeOver<At>& at) {
    links_[static_cast<size_t>(link_of(task))]->pass({.to = at.what, .bytes = task.bytes},
                                                     topic(what_passes(task), task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::Agree<At>&) {
    mine_ = judge_.report();
    count(task, ranks_.size() - 1, sizeof mine_, sizeof mine_);
    ranks_.all_gather_host({.mine = reinterpret_cast<const std::byte*>(&mine_),
                            .all = reinterpret_cast<std::byte*>(reports_.data()),
                            .bytes = sizeof mine_},
                           {.of = "outcome", .step = step_});
}

}  // namespace ferry::train
