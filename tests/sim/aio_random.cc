// Random operations that meet on few slots: conflicts, priorities, cancellations, flushes, discards
// and slots that are freed, over several paths, files and rings, on a disk in trouble. Beside them
// runs an oracle that knows from the order of submission what every read must find, and from the
// trace of the transfers who went before whom.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "aio/buffer.h"
#include "ferry/aio.h"
#include "tests/support/seeds.h"

namespace ferry::aio {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int kBlocks = 5;  // a slot
constexpr int64_t kSlotBytes = kBlocks * kBlock;

// Fills a block as write `id` does: no two are alike.
void fill(std::byte* block, uint64_t id, int number) {
    uint64_t state = (id << 8 | static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15u + 1;
    for (int64_t i = 0; i < kBlock; i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        memcpy(block + i, &state, 8);
    }
}

// An operation as it was submitted, and what became of it.
struct Past {
    Kind kind = Kind::read;
    Priority priority = Priority::normal;
    SlotId slot = kNoSlot;
    int first = 0, count = 0;  // blocks
    Nanos submitted = 0, finished = 0;
    State state = State::queued;
    Nanos cancel_at = kForever;       // the first cancel_queued() since
    std::map<int64_t, Nanos> sent{};  // by offset in the file: the first time
    std::pair<int, int> ring{};

    bool conflicts(const Past& other) const {
        return slot == other.slot && (kind == Kind::write || other.kind == Kind::write) &&
               first < other.first + other.count && other.first < first + count;
    }
};

struct Counts {
    int64_t reads = 0, waited = 0, overtook = 0, cancelled = 0, failed = 0, flushes_failed = 0,
            refused = 0;
};

class RandomRun {
public:
    explicit RandomRun(uint64_t seed)
        : numbers_(seed),
          executor_(make_simulated_executor(seed)),
          disk_(troubled_disk(seed, false), *executor_) {}

    // Returns what was wrong; empty: nothing.
    std::string run(Counts& counts) {
        const VolumeOptions options = draw_options();
        block_bytes_ = options.block_bytes;
        try {
            volume_ = open_simulated_volume(options, *executor_, disk_);
        } catch (const Error&) {
            ++counts.refused;  // the layout's writes failed
            return {};
        }
        works_ = std::vector<Work>(static_cast<size_t>(options.operations_max));
        for (Work& work : works_) idle_.push_back(&work);
        for (SlotId& slot : slots_) slot = volume_->allocate(0);
        for (int step = 0; step < 80 && wrong_.empty(); ++step) act();
        drain();
        for (const SlotId slot : slots_) submit(Kind::read, slot, 0, kBlocks);
        drain();
        volume_.reset();
        if (wrong_.empty()) check_trace();
        count(counts);
        return wrong_;
    }
    uint64_t trace() const { return disk_.trace(); }

private:
    struct Work {
        Operation operation{};
        AlignedBuffer buffer = aligned_buffer(kBlock, kSlotBytes);
        size_t past = 0;
    };

    int draw(int below) { return static_cast<int>(numbers_() % static_cast<uint64_t>(below)); }

    VolumeOptions draw_options() {
        VolumeOptions options{.classes = {{"state", kSlotBytes, 8}},
                              .block_bytes = kBlock << draw(3),
                              .queue_depth = 1 + draw(4),
                              .operations_max = 12 + draw(12),
                              .rings = 1 + draw(3),
                              .write_once = draw(4) == 0};
        options.tracer = {.transfer =
                              [](void* run, const TransferTrace& trace) {
                                  static_cast<RandomRun*>(run)->note(trace);
                              },
                          .context = this};
        const int paths = 1 + draw(3), files = 1 + draw(4);
        for (int i = 0; i < paths; ++i)
            options.paths.push_back(
                {.path = std::string("p").append(std::to_string(i)), .files = files});
        return options;
    }

    void act() {
        const int lot = draw(100);
        const SlotId slot = slots_[static_cast<size_t>(draw(static_cast<int>(slots_.size())))];
        if (lot < 75) {
            const int first = draw(kBlocks), count = 1 + draw(kBlocks - first);
            submit(draw(2) ? Kind::write : Kind::read, slot, first, count);
        } else if (lot < 85) {
            if (volume_->in_flight() > 0) take_one();
        } else if (lot < 90) {
            cancel();
        } else if (lot < 94) {
            flush();
        } else {
            replace(slot);
        }
    }

    void submit(Kind kind, SlotId slot, int first, int count) {
        if (idle_.empty()) {
            Operation more{.slot = slot, .buffer = {works_[0].buffer.get(), kBlock}};
            if (volume_->try_submit(more)) wrong_ = "a full queue took one more";
            take_one();
            return;
        }
        Work& work = *idle_.back();
        idle_.pop_back();
        work.past = past_.size();
        const auto priority = static_cast<Priority>(draw(3));
        std::byte* const buffer = work.buffer.get();
        for (int b = 0; b < count; ++b)
            kind == Kind::write ? fill(buffer + b * kBlock, work.past, first + b)
                                : void(memset(buffer + b * kBlock, 0xee, kBlock));
        past_.push_back({.kind = kind,
                         .priority = priority,
                         .slot = slot,
                         .first = first,
                         .count = count,
                         .submitted = executor_->now()});
        order_[slot].push_back(work.past);
        work.operation = {.kind = kind,
                          .priority = priority,
                          .slot = slot,
                          .offset = first * kBlock,
                          .buffer = {buffer, static_cast<size_t>(count * kBlock)},
                          .tag = work.past + 1};  // 0 is the volume's own
        volume_->submit(work.operation);
    }

    void cancel() {
        for (const Work& work : works_)
            if (work.operation.state == State::queued)
                past_[work.past].cancel_at = std::min(past_[work.past].cancel_at, executor_->now());
        volume_->cancel_queued();
    }

    void flush() {
        bool failed = false;
        try {
            volume_->flush();
        } catch (const Error&) {
            failed = true;
        }
        if (flush_failed_ && !failed) wrong_ = "a flush that failed was forgotten";
        flush_failed_ |= failed;
        for (const Work& work : works_)
            if (work.operation.state == State::queued) wrong_ = "a flush left something under way";
    }

    // Frees a slot, discards what is free, and takes another, whose contents nobody knows.
    void replace(SlotId slot) {
        drain();
        volume_->free(slot);
        if (draw(2)) {
            try {
                volume_->discard_free_slots();
            } catch (const Error&) {
            }
        }
        SlotId& place = *std::ranges::find(slots_, slot);
        place = volume_->allocate(0);
        order_[place].clear();
    }

    void drain() {
        while (volume_->in_flight() > 0) take_one();
    }

    void take_one() {
        Operation* operation = nullptr;
        while (!(operation = volume_->poll())) executor_->wait(kForever);
        Past& past = past_[operation->tag - 1];
        if (past.state != State::queued) wrong_ = "an operation came back twice";
        past.state = operation->state;
        past.finished = operation->finished_ns;
        Work& work = works_[static_cast<size_t>(
            std::ranges::find(works_, operation, [](Work& one) { return &one.operation; }) -
            works_.begin())];
        idle_.push_back(&work);
        const auto size = static_cast<int64_t>(operation->buffer.size());
        if (past.state == State::done && operation->done_bytes != size)
            wrong_ = "an operation is done and its bytes are not";
        if (past.state == State::cancelled && operation->done_bytes != 0)
            wrong_ = "an operation was cancelled and something of it moved";
        if (past.state == State::done && past.kind == Kind::read) check_read(work);
    }

    // Each block holds what the last write before the read, in the order of submission, put there.
    void check_read(const Work& work) {
        const Past& read = past_[work.past];
        ++reads_;
        std::byte expected[kBlock];
        for (int b = 0; b < read.count && wrong_.empty(); ++b) {
            const int number = read.first + b;
            const std::optional<size_t> writer = last_writer(work.past, number);
            if (!writer) continue;
            fill(expected, *writer, number);
            if (memcmp(expected, work.buffer.get() + b * kBlock, kBlock) != 0)
                wrong_ = "operation " + std::to_string(work.past) +
                         " did not read what operation " + std::to_string(*writer) + " wrote";
        }
    }

    // Nothing: it is unknown, since the slot was new or because a write failed.
    std::optional<size_t> last_writer(size_t reader, int block) {
        const std::vector<size_t>& order = order_[past_[reader].slot];
        auto at = std::ranges::find(order, reader);
        while (at != order.begin()) {
            const Past& before = past_[*--at];
            const bool covers = before.kind == Kind::write && before.first <= block &&
                                block < before.first + before.count;
            if (!covers || before.state == State::cancelled) continue;
            if (before.state == State::queued) wrong_ = "a read overtook a write before it";
            if (before.state == State::done) return *at;
            return std::nullopt;
        }
        return std::nullopt;
    }

    // ---------------------------------------------------------------- who went before whom

    void note(const TransferTrace& trace) {
        if (trace.tag == 0) return;
        Past& past = past_[trace.tag - 1];
        past.ring = {trace.path, trace.ring};
        const auto [at, fresh] = past.sent.emplace(trace.offset, trace.start_ns);
        if (!fresh) at->second = std::min(at->second, trace.start_ns);
    }

    // The first times that blocks of it were sent: a short count resumes elsewhere.
    std::vector<Nanos> starts(const Past& past) const {
        std::vector<Nanos> times;
        for (const auto& [offset, time] : past.sent)
            if ((offset - past.sent.begin()->first) % block_bytes_ == 0) times.push_back(time);
        return times;
    }

    // The highest priority that `past_[index]` has by itself or for the sake of those behind it.
    // `all`: of all on its slot, conflicting or not, and up to `at` itself.
    Priority raised(size_t index, Nanos at, bool all) const {
        const Past& one = past_[index];
        Priority priority = one.priority;
        for (size_t i = index + 1; i < past_.size(); ++i) {
            const Past& later = past_[i];
            const bool raises = all ? later.slot == one.slot && later.submitted <= at
                                    : later.conflicts(one) && later.submitted < at;
            if (raises) priority = std::min(priority, later.priority);
        }
        return priority;
    }

    // Whether it could have been sent before `at`.
    bool ready(size_t index, Nanos at) const {
        if (past_[index].submitted >= at) return false;
        for (size_t i = 0; i < index; ++i)
            if (past_[i].conflicts(past_[index]) && past_[i].finished >= at) return false;
        return true;
    }

    void check_trace() {
        for (size_t i = 0; i < past_.size() && wrong_.empty(); ++i) {
            const Past& past = past_[i];
            const std::vector<Nanos> times = starts(past);
            if (past.state == State::cancelled && !times.empty())
                wrong_ = "a cancelled operation reached the disk";
            if (times.empty()) continue;
            if (std::ranges::min(times) > past.cancel_at)
                wrong_ = "an operation began after its cancellation";
            check_conflicts(i, std::ranges::min(times));
            for (const Nanos time : times) check_priority(i, time);
        }
    }

    void check_conflicts(size_t index, Nanos begun) {
        for (size_t i = 0; i < index; ++i) {
            if (!past_[i].conflicts(past_[index])) continue;
            ++waited_;
            if (past_[i].finished > begun) wrong_ = "an operation overtook one that it meets";
        }
    }

    // No block was sent while one of higher priority could have been, on the same ring.
    void check_priority(size_t index, Nanos at) {
        const Past& sent = past_[index];
        const Priority most = raised(index, at, true);
        for (size_t i = 0; i < past_.size(); ++i) {
            const Past& other = past_[i];
            if (other.state != State::done || other.ring != sent.ring) continue;
            if (i > index && other.priority < sent.priority && !other.sent.empty() &&
                std::ranges::max(starts(other)) < at)
                ++overtook_;
            if (raised(i, at, false) < most && std::ranges::max(starts(other)) > at && ready(i, at))
                wrong_ = "an operation went before one of higher priority";
        }
    }

    void count(Counts& counts) const {
        counts.reads += reads_;
        counts.waited += waited_;
        counts.overtook += overtook_;
        counts.flushes_failed += flush_failed_;
        for (const Past& past : past_) {
            counts.cancelled += past.state == State::cancelled;
            counts.failed += past.state == State::failed;
        }
    }

    std::mt19937_64 numbers_;
    std::unique_ptr<Executor> executor_;
    SimulatedDisk disk_;
    std::vector<Work> works_;  // outlives the volume
    std::vector<Work*> idle_;
    std::unique_ptr<Volume> volume_;
    int64_t block_bytes_ = 0;
    std::array<SlotId, 4> slots_{};
    std::vector<Past> past_;
    std::map<SlotId, std::vector<size_t>> order_;  // of submission, since the slot was allocated
    std::string wrong_;
    bool flush_failed_ = false;
    int64_t reads_ = 0, waited_ = 0, overtook_ = 0;
};

TEST(AioRandom, EverySeedKeepsWhatIsPromised) {
    Seeds seeds(10'000);
    Counts counts;
    do {
        const std::string wrong = RandomRun(seeds.now()).run(counts);
        ASSERT_EQ(wrong, "") << "seed " << seeds.now();
    } while (seeds.next());
    if (seeds.replays()) return;
    printf(
        "%ld seeds: %ld reads, %ld conflicts, %ld overtook, %ld cancelled, %ld failed, %ld runs "
        "with a failed flush, %ld not laid out\n",
        static_cast<long>(seeds.count()), static_cast<long>(counts.reads),
        static_cast<long>(counts.waited), static_cast<long>(counts.overtook),
        static_cast<long>(counts.cancelled), static_cast<long>(counts.failed),
        static_cast<long>(counts.flushes_failed), static_cast<long>(counts.refused));
    // A good part of each, or the test tests nothing.
    EXPECT_GT(counts.reads, 10 * seeds.count());
    EXPECT_GT(counts.waited, 10 * seeds.count());
    EXPECT_GT(counts.overtook, seeds.count());
    EXPECT_GT(counts.cancelled, seeds.count());
    EXPECT_GT(counts.failed, seeds.count() / 10);
    EXPECT_GT(counts.flushes_failed, seeds.count() / 100);
    EXPECT_GT(counts.refused, seeds.count() / 1000);
}

TEST(AioRandom, TheSameSeedIsTheSameRun) {
    for (uint64_t seed = 1; seed <= 50; ++seed) {
        Counts counts;
        RandomRun first(seed), again(seed);
        EXPECT_EQ(first.run(counts), again.run(counts));
        EXPECT_EQ(first.trace(), again.trace()) << "seed " << seed;
    }
}

}  // namespace
}  // namespace ferry::aio
