// Leases on a disk that goes wrong: every fault at every transfer of a cycle, and seeded runs of
// random calls beside a model in memory that knows what every object may hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "aio/buffer.h"
#include "ferry/lease.h"
#include "tests/support/seeds.h"

namespace ferry::swap {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kBytes = 2 * kBlock;

// Contents: no two versions of anything are alike, in any block. 0: of nothing.
using Version = uint64_t;
void fill(std::span<std::byte> bytes, Version version) {
    uint64_t state = version * 0x9E3779B97F4A7C15u;
    for (size_t at = 0; at < bytes.size(); at += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        memcpy(bytes.data() + at, &state, std::min<size_t>(8, bytes.size() - at));
    }
}
bool holds(std::span<const std::byte> bytes, Version version) {
    std::vector<std::byte> expected(bytes.size());
    fill(expected, version);
    return std::ranges::equal(bytes, expected);
}

// ---------------------------------------------------------------- every fault at every transfer

class Cycle {
public:
    // `mends`: what goes wrong with an object is made good before it goes on.
    Cycle(aio::SimulatedDiskOptions faults, bool mends)
        : mends_(mends),
          executor_(make_simulated_executor(faults.seed)),
          disk_(std::move(faults), *executor_),
          volume_(aio::open_simulated_volume({.paths = {{.path = "simulated"}},
                                              .classes = {{"state", kBytes, 5}},
                                              .block_bytes = kBlock,
                                              .write_once = false},
                                             *executor_, disk_)),
          store_(LeasedStore::make(
              {.objects = {4, LeasedObject{.home = Home::nvme, .bytes = kBytes, .slot_class = 0}},
               .buffers = {memory_.get(), 2 * kBytes}},
              *executor_, volume_.get())) {}

    // Four objects in two buffers: written, changed out of order, and read.
    void run() {
        for (ObjectId id = 0; id < 4; ++id) change(id, Access::overwrite);
        flush();
        for (const ObjectId id : {2U, 0U, 3U, 1U}) {
            store_->prefetch((id + 1) % 4);
            change(id, Access::write);
        }
        flush();
        for (const ObjectId id : {1U, 2U, 3U, 0U}) change(id, Access::write);
        flush();
        for (ObjectId id = 0; id < 4; ++id) check(id);
    }
    const std::vector<std::string>& errors() const { return errors_; }
    int64_t injected(aio::Fault fault) const { return disk_.injected(fault); }
    int64_t went_back() const { return went_back_; }
    // Free slots of the volume once the store is gone.
    int free_slots() {
        store_.reset();
        int free = 0;
        while (volume_->allocate(0) != aio::kNoSlot) ++free;
        return free;
    }

private:
    void change(ObjectId id, Access access) {
        guarded(id, [&] {
            const Lease lease = store_->acquire(id, access);
            if (access == Access::write) {
                EXPECT_TRUE(holds(lease.bytes(), versions_[id].back()));
            }
            versions_[id].push_back(++newest_);
            fill(lease.bytes(), newest_);
        });
    }
    void check(ObjectId id) {
        guarded(id, [&] {
            EXPECT_TRUE(holds(store_->acquire(id, Access::read).bytes(), versions_[id].back()));
        });
    }
    void flush() {
        for (int rounds = 0; rounds < 5; ++rounds) {
            try {
                return store_->flush();
            } catch (const Error& error) {
                note(error);
                if (!mends_) return;
                for (ObjectId id = 0; id < 4; ++id) mend(id);
            }
        }
        FAIL() << "a flush finds no end of errors";
    }
    void guarded(ObjectId id, const std::function<void()>& body) {
        try {
            body();
        } catch (const Error& error) {
            note(error);
            if (mends_) mend(id);
        }
    }
    void note(const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::io) << error.what();
        errors_.emplace_back(error.what());
    }

    // The object has its newest version, or that before if the newest was lost; or else it gets
    // another.
    void mend(ObjectId id) {
        store_->revert(id);
        std::vector<Version>& versions = versions_[id];
        try {
            const Lease lease = store_->acquire(id, Access::read);
            if (holds(lease.bytes(), versions.back())) return;
            ++went_back_;
            versions.pop_back();
            ASSERT_FALSE(versions.empty());
            EXPECT_TRUE(holds(lease.bytes(), versions.back()));
        } catch (const Error&) {  // nothing, or nothing but wrong bytes
            const Lease lease = store_->acquire(id, Access::overwrite);
            versions.push_back(++newest_);
            fill(lease.bytes(), newest_);
        }
    }

    const bool mends_;
    std::unique_ptr<Executor> executor_;
    aio::SimulatedDisk disk_;
    aio::AlignedBuffer memory_ = aio::aligned_buffer(kBlock, 2 * kBytes);
    std::unique_ptr<aio::Volume> volume_;
    std::unique_ptr<LeasedStore> store_;
    std::array<std::vector<Version>, 4> versions_;
    Version newest_ = 0;
    std::vector<std::string> errors_;
    int64_t went_back_ = 0;
};

struct Tally {
    int64_t fired = 0, caught = 0, went_back = 0;
};

// One run for each transfer that the fault can happen to. Whatever is leased is exact; nothing
// hangs, and nothing stays behind.
Tally at_every_transfer(aio::Fault fault, bool mends) {
    Tally tally;
    for (int64_t nth = 0;; ++nth) {
        SCOPED_TRACE(std::string(aio::name_of(fault)) + " at " + std::to_string(nth));
        Cycle cycle({.seed = 5, .fault = fault, .fault_at = nth}, mends);
        cycle.run();
        EXPECT_EQ(cycle.free_slots(), 5);
        for (const std::string& error : cycle.errors()) {
            EXPECT_NE(error.find("simulated"), std::string::npos) << error;
            EXPECT_NE(error.find("object "), std::string::npos) << error;
        }
        if (cycle.injected(fault) == 0) return tally;
        ++tally.fired;
        tally.caught += !cycle.errors().empty();
        tally.went_back += cycle.went_back();
    }
}

TEST(LeasesSim, EveryFaultAtEveryTransferOfACycle) {
    for (int kind = 1; kind < aio::kFaults; ++kind) {
        const auto fault = static_cast<aio::Fault>(kind);
        // These two are faults of discards and flushes: a cycle has neither.
        if (fault == aio::Fault::unsupported || fault == aio::Fault::failed_flush) continue;
        const bool vanishes = fault == aio::Fault::vanish;
        for (const bool mends : {false, true}) {
            if (vanishes && mends) continue;
            const Tally tally = at_every_transfer(fault, mends);
            const std::string said = std::string(aio::name_of(fault)) + ": " +
                                     std::to_string(tally.caught) + " of " +
                                     std::to_string(tally.fired);
            EXPECT_GE(tally.fired, 20) << said;
            // Nobody misses what a failed prefetch was to bring, or reads a last wrong write.
            const bool fails = aio::silent(fault) || aio::loud_failure(fault);
            EXPECT_EQ(tally.caught > tally.fired / 3, fails) << said;
            EXPECT_EQ(tally.caught > 0, fails) << said;
            EXPECT_EQ(tally.went_back > 0, mends && aio::loud_failure(fault)) << said;
        }
    }
}

// ---------------------------------------------------------------- random calls

struct Counts {
    int64_t leases = 0, hits = 0, conflicts = 0, full = 0, reverted = 0, wrong = 0, unread = 0,
            flushed = 0, flushes_failed = 0;
};

// The possible versions of an object: each since the last one known to be on the disk, the newest
// last. A failed write takes the newest away, and which one is left shows at the next lease.
struct Model {
    int64_t bytes = 0;
    bool stored_at_home = false;
    std::vector<Version> versions{};
    bool flushed = false;    // the first of these
    bool uncertain = false;  // which of these
    int readers = 0;
    bool writer = false;
    bool leased() const { return writer || readers > 0; }
};

class RandomLeases {
public:
    explicit RandomLeases(uint64_t seed)
        : numbers_(seed),
          executor_(make_simulated_executor(seed)),
          disk_(troubled_disk(seed, true), *executor_) {}

    // Returns what was wrong; empty: nothing.
    std::string run(Counts& counts) {
        open();
        for (int step = 0; step < 120 && wrong_.empty(); ++step) act();
        while (!held_.empty()) give_back(0);
        flush();
        for (ObjectId id = 0; id < models_.size() && wrong_.empty(); ++id)
            acquire(id, Access::read);
        while (!held_.empty()) give_back(0);
        counts_.leases = store_->report().acquired;
        counts_.hits = store_->report().hits;
        store_.reset();
        for (int64_t slot = 0; slot < slots_; ++slot)
            if (volume_->allocate(0) == aio::kNoSlot) wrong_ = "a slot was not given back";
        counts = counts_;
        return wrong_;
    }
    uint64_t trace() const { return disk_.trace(); }

private:
    struct Held {
        Lease lease;
        Access access;
        Version version;
    };

    int draw(int below) { return static_cast<int>(numbers_() % static_cast<uint64_t>(below)); }

    void open() {
        std::vector<LeasedObject> objects(static_cast<size_t>(2 + draw(7)));
        slots_ = 1;
        for (size_t id = 0; id < objects.size(); ++id) {
            Model& model = models_.emplace_back();
            model.bytes = draw(2) ? kBytes : 8 + draw(kBytes - 7);
            model.stored_at_home = draw(6) > 0;
            objects[id] = {.home = model.stored_at_home ? Home::nvme : Home::host,
                           .bytes = model.bytes,
                           .offset = static_cast<int64_t>(id) * kBytes,
                           .slot_class = model.stored_at_home ? 0 : -1};
            slots_ += model.stored_at_home;
            // Host memory is what it is: the caller writes it first.
            if (!model.stored_at_home) {
                fill({host_.data() + objects[id].offset, static_cast<size_t>(model.bytes)},
                     ++newest_);
                model.versions.push_back(newest_);
            }
        }
        buffers_ = 1 + draw(5);
        slots_ += draw(static_cast<int>(buffers_) + 1);
        volume_ =
            aio::open_simulated_volume({.paths = {{.path = "simulated", .files = 1 + draw(3)}},
                                        .classes = {{"state", kBytes, slots_}},
                                        .block_bytes = kBlock << draw(2),
                                        .queue_depth = 1 + draw(4),
                                        .operations_max = 1 + draw(8),
                                        .rings = 1 + draw(2),
                                        .write_once = false},
                                       *executor_, disk_);
        store_ =
            LeasedStore::make({.objects = objects,
                               .host_arena = host_,
                               .buffers = {memory_.get(), static_cast<size_t>(buffers_ * kBytes)},
                               .buffer_bytes = kBytes,
                               .spare_buffers = draw(static_cast<int>(buffers_) + 1)},
                              *executor_, volume_.get());
    }

    void act() {
        const int lot = draw(100);
        const auto id = static_cast<ObjectId>(draw(static_cast<int>(models_.size())));
        if (lot < 45) {
            acquire(id, static_cast<Access>(draw(3)));
        } else if (lot < 80) {
            if (!held_.empty())
                give_back(static_cast<size_t>(draw(static_cast<int>(held_.size()))));
        } else if (lot < 92) {
            prefetch();
        } else if (lot < 96) {
            flush();
        } else {
            executor_->wait(executor_->now() + draw(1'000'000));
        }
    }

    // ---- leases

    void acquire(ObjectId id, Access access) {
        try {
            Lease lease = store_->acquire(id, access);
            granted(id, access, std::move(lease));
        } catch (const Error& error) {
            refused(id, access, error);
        }
    }

    bool conflicts(const Model& model, Access access) const {
        return model.writer || (model.readers > 0 && access != Access::read);
    }
    // No buffer but in leases, and none of them with this object.
    bool full(const Model& model) const {
        int64_t leased = 0;
        for (const Model& one : models_) leased += one.stored_at_home && one.leased();
        return model.stored_at_home && !model.leased() && leased == buffers_;
    }

    void granted(ObjectId id, Access access, Lease lease) {
        Model& model = models_[id];
        if (conflicts(model, access)) wrong_ = "a lease beside a writer's";
        if (full(model)) wrong_ = "more buffers than there are";
        if (std::ssize(lease.bytes()) != model.bytes) wrong_ = "a lease of another size";
        if (access == Access::overwrite) {
            fill(lease.bytes(), ++newest_);
            model.versions.push_back(newest_);
            model.uncertain = false;
        } else {
            look(model, lease.bytes());
        }
        if (!wrong_.empty()) return;
        access == Access::read ? void(++model.readers) : void(model.writer = true);
        const Version version = model.versions.back();
        held_.push_back({std::move(lease), access, version});
    }

    void look(Model& model, std::span<const std::byte> bytes) {
        if (model.uncertain) {
            while (!model.versions.empty() && !holds(bytes, model.versions.back()))
                model.versions.pop_back();
            model.uncertain = false;
        }
        if (model.versions.empty())
            wrong_ = "contents older than a flush, or of nothing that was written";
        else if (!holds(bytes, model.versions.back()))
            wrong_ = "wrong contents";
    }

    void refused(ObjectId id, Access access, const Error& error) {
        const Model& model = models_[id];
        const std::string said = error.what();
        const bool nothing = model.versions.empty() || (model.uncertain && !model.flushed);
        switch (error.trouble()) {
            case Trouble::usage:
                if (!conflicts(model, access) && (access == Access::overwrite || !nothing))
                    wrong_ = said;
                counts_.conflicts += conflicts(model, access);
                return;
            case Trouble::does_not_fit:
                if (!full(model)) wrong_ = said;
                ++counts_.full;
                return;
            default:
                if (conflicts(model, access) || access == Access::overwrite) wrong_ = said;
                failed(id, said);
        }
    }

    void failed(ObjectId id, const std::string& said) {
        if (said.find("object " + std::to_string(id)) == std::string::npos) wrong_ = said;
        if (said.find("not those written") != std::string::npos) {
            ++counts_.wrong;
            if (injected(aio::silent) == 0) wrong_ = said;
            return;
        }
        if (injected(aio::loud_failure) == 0) wrong_ = said;
        if (said.find("revert()") == std::string::npos) {
            ++counts_.unread;
            return;
        }
        if (models_[id].leased() || draw(2)) return;
        const bool left = store_->revert(id);
        ++counts_.reverted;
        Model& model = models_[id];
        if (!left && model.flushed) wrong_ = "what was flushed is gone";
        model.uncertain = left;
        if (!left) {
            model.versions.clear();
            return;
        }
        // The newest of these is lost for certain.
        model.versions.pop_back();
        if (model.versions.empty()) wrong_ = "contents of nothing";
    }

    void give_back(size_t index) {
        Held held = std::move(held_[index]);
        held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
        Model& model = models_[held.lease.object()];
        if (!holds(held.lease.bytes(), held.version)) wrong_ = "bytes changed under a lease";
        if (held.access == Access::write) {
            fill(held.lease.bytes(), ++newest_);
            model.versions.push_back(newest_);
        }
        held.access == Access::read ? void(--model.readers) : void(model.writer = false);
        unmoved([&] { held.lease.give_back(); }, "giving back waits");
    }

    void prefetch() {
        std::vector<ObjectId> ids(static_cast<size_t>(1 + draw(4)));
        for (ObjectId& id : ids) id = static_cast<ObjectId>(draw(static_cast<int>(models_.size())));
        unmoved([&] { store_->prefetch(ids); }, "a prefetch waits");
    }

    void flush() {
        try {
            store_->flush();
            ++counts_.flushed;
            for (Model& model : models_) {
                if (model.writer || model.uncertain || model.versions.empty()) continue;
                model.versions = {model.versions.back()};
                model.flushed = true;
            }
        } catch (const Error& error) {
            ++counts_.flushes_failed;
            if (error.trouble() != Trouble::io || injected(aio::loud_failure) == 0)
                wrong_ = error.what();
        }
    }

    template <class Body>
    void unmoved(const Body& body, const char* wrong) {
        const Nanos before = executor_->now();
        body();
        if (executor_->now() != before) wrong_ = wrong;
    }

    int64_t injected(bool (*kind)(aio::Fault)) const {
        int64_t count = 0;
        for (int i = 0; i < aio::kFaults; ++i)
            if (kind(static_cast<aio::Fault>(i)))
                count += disk_.injected(static_cast<aio::Fault>(i));
        return count;
    }

    std::mt19937_64 numbers_;
    std::unique_ptr<Executor> executor_;
    aio::SimulatedDisk disk_;
    aio::AlignedBuffer memory_ = aio::aligned_buffer(kBlock, 5 * kBytes);
    std::vector<std::byte> host_ = std::vector<std::byte>(8 * kBytes);
    std::unique_ptr<aio::Volume> volume_;
    std::unique_ptr<LeasedStore> store_;
    std::vector<Model> models_;
    std::vector<Held> held_;
    int64_t buffers_ = 0, slots_ = 0;
    Version newest_ = 0;
    std::string wrong_;
    Counts counts_;
};

TEST(LeasesSim, EverySeedKeepsWhatIsPromised) {
    Seeds seeds(10'000);
    Counts all;
    do {
        Counts counts;
        const std::string wrong = RandomLeases(seeds.now()).run(counts);
        ASSERT_EQ(wrong, "") << "seed " << seeds.now();
        for (const auto count :
             {&Counts::leases, &Counts::hits, &Counts::conflicts, &Counts::full, &Counts::reverted,
              &Counts::wrong, &Counts::unread, &Counts::flushed, &Counts::flushes_failed})
            all.*count += counts.*count;
    } while (seeds.next());
    if (seeds.replays()) return;
    printf(
        "%ld seeds: %ld leases (%ld without a wait), %ld conflicts, %ld times no buffer, %ld "
        "reverted, %ld with wrong bytes, %ld not read, %ld flushes, %ld failed\n",
        static_cast<long>(seeds.count()), static_cast<long>(all.leases),
        static_cast<long>(all.hits), static_cast<long>(all.conflicts), static_cast<long>(all.full),
        static_cast<long>(all.reverted), static_cast<long>(all.wrong),
        static_cast<long>(all.unread), static_cast<long>(all.flushed),
        static_cast<long>(all.flushes_failed));
    // A good part of each, or the test tests nothing. Of what is rare few seeds may have none.
    const int64_t rare = seeds.count() / 100;
    EXPECT_GT(all.leases, 10 * seeds.count());
    EXPECT_GT(all.leases - all.hits, 2 * seeds.count());
    EXPECT_GT(all.conflicts, seeds.count());
    EXPECT_GT(all.full, seeds.count());
    EXPECT_GE(all.reverted, rare);
    EXPECT_GE(all.wrong, rare);
    EXPECT_GE(all.unread, rare);
    EXPECT_GT(all.flushed, seeds.count());
    EXPECT_GE(all.flushes_failed, rare);
}

TEST(LeasesSim, TheSameSeedIsTheSameRun) {
    for (uint64_t seed = 1; seed <= 50; ++seed) {
        Counts counts;
        RandomLeases first(seed), again(seed);
        EXPECT_EQ(first.run(counts), again.run(counts));
        EXPECT_EQ(first.trace(), again.trace()) << "seed " << seed;
    }
}

}  // namespace
}  // namespace ferry::swap
