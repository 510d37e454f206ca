// Handles, structures and texts of the C ABI: what is wrong is an error, never a crash.
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "callbacks.h"
#include "comm/watchdog.h"
#include "ferry/error.h"
#include "handles.h"
#include "tests/support/c_abi.h"
#include "tests/support/child.h"

namespace ferry::capi {
namespace {

ferry_team* make_team() {
    ferry_team* team = nullptr;
    EXPECT_EQ(ferry_team_create(1, &team), FERRY_OK) << ferry_last_error();
    return team;
}

// All arguments are wrong: the handle is looked at first.
void expect_no_call_takes(void* handle) {
    auto* aio = static_cast<ferry_aio*>(handle);
    auto* pool = static_cast<ferry_pool*>(handle);
    auto* store = static_cast<ferry_store*>(handle);
    auto* engine = static_cast<ferry_engine*>(handle);
    auto* files = static_cast<ferry_files*>(handle);
    const std::vector<std::pair<const char*, ferry_status>> results{
        {"aio_close", ferry_aio_close(aio)},
        {"aio_alignment", ferry_aio_alignment(aio, nullptr)},
        {"aio_slot_bytes", ferry_aio_slot_bytes(aio, 0, nullptr)},
        {"aio_allocate", ferry_aio_allocate(aio, 0, nullptr)},
        {"aio_free", ferry_aio_free(aio, 0)},
        {"aio_read", ferry_aio_read(aio, 0, 0, nullptr, 0, 0, 0)},
        {"aio_write", ferry_aio_write(aio, 0, 0, nullptr, 0, 0, 0)},
        {"aio_poll", ferry_aio_poll(aio, nullptr)},
        {"aio_wait", ferry_aio_wait(aio, -1, nullptr)},
        {"aio_cancel", ferry_aio_cancel(aio)},
        {"aio_descriptor", ferry_aio_descriptor(aio, nullptr)},
        {"aio_in_flight", ferry_aio_in_flight(aio, nullptr)},
        {"aio_flush", ferry_aio_flush(aio)},
        {"aio_stats", ferry_aio_stats(aio, 0, nullptr)},
        {"pool_destroy", ferry_pool_destroy(pool)},
        {"pool_reserve", ferry_pool_reserve(pool, nullptr, 0, nullptr)},
        {"pool_seal", ferry_pool_seal(pool)},
        {"pool_reserved_bytes", ferry_pool_reserved_bytes(pool, nullptr)},
        {"store_register", ferry_store_register(store, 0, 0, nullptr)},
        {"store_open", ferry_store_open(store)},
        {"store_destroy", ferry_store_destroy(store)},
        {"store_abandon", ferry_store_abandon(store)},
        {"store_acquire", ferry_store_acquire(store, 0, 0, nullptr, nullptr)},
        {"store_release", ferry_store_release(store, 0)},
        {"store_prefetch", ferry_store_prefetch(store, nullptr, 1)},
        {"store_flush", ferry_store_flush(store)},
        {"store_check", ferry_store_check(store)},
        {"store_revert", ferry_store_revert(store, 0)},
        {"store_get_stats", ferry_store_get_stats(store, nullptr)},
        {"engine_destroy", ferry_engine_destroy(engine)},
        {"engine_step", ferry_engine_step(engine, nullptr)},
        {"engine_last_step", ferry_engine_last_step(engine, nullptr)},
        {"engine_evaluate", ferry_engine_evaluate(engine, nullptr)},
        {"engine_state_hash", ferry_engine_state_hash(engine, nullptr)},
        {"engine_export", ferry_engine_export(engine, nullptr, 0)},
        {"engine_save", ferry_engine_save(engine, nullptr)},
        {"engine_feed", ferry_engine_feed(engine, nullptr)},
        {"engine_batch_shape", ferry_engine_batch_shape(engine, 0, nullptr, nullptr)},
        {"engine_report", ferry_engine_report(engine, nullptr)},
        {"files_destroy", ferry_files_destroy(files)},
        {"files_open", ferry_files_open(files, nullptr, 0, nullptr)},
        {"files_open_descriptor", ferry_files_open_descriptor(files, 0, nullptr)},
        {"files_close", ferry_files_close(files, 0)},
        {"files_size", ferry_files_size(files, 0, nullptr)},
        {"files_read", ferry_files_read(files, 0, 0, nullptr, 0, 0, 0)},
        {"files_write", ferry_files_write(files, 0, 0, nullptr, 0, 0, 0)},
        {"files_wait", ferry_files_wait(files, -1, nullptr)},
        {"files_cancel", ferry_files_cancel(files)},
        {"files_descriptor", ferry_files_descriptor(files, nullptr)},
        {"files_flush", ferry_files_flush(files, 0)}};
    for (const auto& [name, status] : results) EXPECT_EQ(status, FERRY_BAD_HANDLE) << name;
}

TEST(CapiHandles, ThatNeverWereOne) {
    int object = 0;
    for (void* handle : {static_cast<void*>(nullptr), static_cast<void*>(&object),
                         reinterpret_cast<void*>(~uintptr_t{0}), reinterpret_cast<void*>(1)}) {
        expect_no_call_takes(handle);
        auto* const team = static_cast<ferry_team*>(handle);
        EXPECT_EQ(ferry_team_destroy(team), FERRY_BAD_HANDLE);
        if (!team) continue;  // none: this thread alone
        EXPECT_EQ(ferry_optim_update(team, nullptr, 0, 0, nullptr), FERRY_BAD_HANDLE);
        EXPECT_EQ(ferry_optim_leaf_norms(team, nullptr, 0, 0, nullptr), FERRY_BAD_HANDLE);
    }
    EXPECT_REFUSED(ferry_team_destroy(nullptr), FERRY_BAD_HANDLE,
                   "ferry_team_destroy: the handle is NULL");
}

TEST(CapiHandles, OfAnotherKind) {
    ferry_team* team = make_team();
    expect_no_call_takes(team);
    EXPECT_REFUSED(ferry_store_flush(reinterpret_cast<ferry_store*>(team)), FERRY_BAD_HANDLE,
                   "a ferry_team, not a ferry_store");
    EXPECT_EQ(ferry_team_destroy(team), FERRY_OK);
}

TEST(CapiHandles, ThatWereClosed) {
    ferry_team* team = make_team();
    EXPECT_EQ(ferry_team_destroy(team), FERRY_OK);
    EXPECT_REFUSED(ferry_team_destroy(team), FERRY_BAD_HANDLE, "closed");
    ferry_team* next = make_team();  // in the same place
    EXPECT_NE(next, team);
    EXPECT_EQ(ferry_team_destroy(team), FERRY_BAD_HANDLE);
    EXPECT_EQ(ferry_team_destroy(next), FERRY_OK);
}

TEST(CapiHandles, AfterFork) {
    ferry_team* team = make_team();
    const int status = in_child([&] {
        ferry_team* fresh = nullptr;
        return ferry_team_destroy(team) == FERRY_BAD_HANDLE &&
                       ferry_team_create(1, &fresh) == FERRY_BAD_HANDLE
                   ? 0
                   : 1;
    });
    EXPECT_EQ(status, 0);
    EXPECT_EQ(ferry_team_destroy(team), FERRY_OK);
}

// ---------------------------------------------------------------- bugs

// Stands in a handle for what meets bugs when it is told to.
struct Probe {
    static constexpr HandleKind kKind = HandleKind::aio;
    explicit Probe(bool& ended_flag) : ended(ended_flag) {}
    ~Probe() { ended = true; }
    bool& ended;
};

class CapiBugs : public testing::Test {
protected:
    CapiBugs() { hand_out(&handle_, std::make_unique<Probe>(ended_)); }
    template <class Body>
    ferry_status call(const Body& body) {
        return with<Probe>("a_call", handle_, body);
    }

    bool ended_ = false;
    ferry_aio* handle_ = nullptr;
};

TEST_F(CapiBugs, PoisonTheHandle) {
    EXPECT_REFUSED(call([](Probe&) { FERRY_CHECK(1 > 2, "as it must not be"); }), FERRY_INTERNAL,
                   "1 > 2 as it must not be");
    EXPECT_REFUSED(call([](Probe&) {}), FERRY_POISONED, "can only be closed");
    EXPECT_EQ(ferry_aio_flush(handle_), FERRY_POISONED);
    EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_OK);
    EXPECT_FALSE(ended_) << "nobody knows what its destructor would meet";
    EXPECT_EQ(ferry_aio_flush(handle_), FERRY_BAD_HANDLE);
}

TEST_F(CapiBugs, AreToldFromTheWorldsFailures) {
    const auto failing = [](Trouble trouble) {
        return [trouble](Probe&) { throw Error(trouble, {.what = "of the world"}); };
    };
    EXPECT_REFUSED(call(failing(Trouble::io)), FERRY_IO, "a_call: of the world");
    EXPECT_EQ(call([](Probe&) { throw std::bad_alloc(); }), FERRY_NO_MEMORY);
    EXPECT_EQ(call([](Probe&) { return FERRY_AGAIN; }), FERRY_AGAIN);
    EXPECT_EQ(call([](Probe&) {}), FERRY_OK);
    EXPECT_EQ(call(failing(Trouble::internal)), FERRY_INTERNAL);
    EXPECT_EQ(call([](Probe&) {}), FERRY_POISONED);
    EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_OK);
}

TEST_F(CapiBugs, OfStrangersPoisonAsWell) {
    EXPECT_REFUSED(call([](Probe&) { throw 3; }), FERRY_INTERNAL, "unknown type");
    EXPECT_EQ(call([](Probe&) {}), FERRY_POISONED);
    EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_OK);
}

TEST_F(CapiBugs, CloseEndsTheObject) {
    EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_OK);
    EXPECT_TRUE(ended_);
}

TEST(CapiBugsElsewhere, EndTheProcessAsBefore) {
    EXPECT_DEATH(FERRY_CHECK(false, "outside of any call"), "");
    EXPECT_DEATH(
        static_cast<void>(guarded("call", [] { std::thread([] { FERRY_CHECK(false); }).join(); })),
        "");
}

// ---------------------------------------------------------------- callbacks

TEST_F(CapiBugs, ACallFromWithinACallIsRefused) {
    EXPECT_EQ(call([&](Probe&) {
                  EXPECT_REFUSED(call([](Probe&) {}), FERRY_BUSY, "whose call it is within");
                  EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_BUSY);
                  ferry_team* const other = make_team();  // other handles are free
                  EXPECT_EQ(ferry_team_destroy(other), FERRY_OK);
              }),
              FERRY_OK);
    EXPECT_EQ(call([](Probe&) {}), FERRY_OK) << "neither poisoned nor locked";
    EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_OK);
}

// Which would wait for a call that waits for it.
TEST_F(CapiBugs, ACallFromACallbackOnAnotherThreadIsRefused) {
    EXPECT_EQ(call([&](Probe& probe) {
                  std::thread([&] {
                      const InCallback within(&probe);
                      const InCallback of_another(&within);
                      EXPECT_REFUSED(call([](Probe&) {}), FERRY_BUSY, "whose call it is within");
                      EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_BUSY);
                      ferry_team* const other = make_team();
                      EXPECT_EQ(ferry_team_destroy(other), FERRY_OK);
                  }).join();
              }),
              FERRY_OK);
    EXPECT_EQ(call([](Probe&) {}), FERRY_OK);
    EXPECT_EQ(close_handle<Probe>("close", handle_), FERRY_OK);
}

// Stands for an engine whose call may be the one that is stuck.
struct StuckEngine {
    static constexpr HandleKind kKind = HandleKind::engine;
};
struct Told {
    ferry_engine* engine = nullptr;
    std::atomic<ferry_status> engine_said = -1, replaced = -1;
    static void tell(void* context, const char* text) {
        auto& mine = *static_cast<Told*>(context);
        EXPECT_STREQ(text, "stuck");
        mine.engine_said = with<StuckEngine>("a_call", mine.engine, [](StuckEngine&) {});
        mine.replaced = ferry_on_stuck(nullptr, nullptr);
    }
};

TEST(CapiStuck, MayBeReplacedFromWithinAndCallsNoEngine) {
    Told told;
    hand_out(&told.engine, std::make_unique<StuckEngine>());
    ASSERT_DONE(ferry_on_stuck(&Told::tell, &told));
    comm::Watchdog watchdog(
        [](Nanos) { return std::optional(Error(Trouble::rank_lost, {.what = "stuck"})); });
    watchdog.enter();
    while (told.replaced < 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    watchdog.leave();
    EXPECT_EQ(told.engine_said, FERRY_BUSY);
    EXPECT_EQ(told.replaced, FERRY_OK);
    EXPECT_EQ(close_handle<StuckEngine>("close", told.engine), FERRY_OK);
}

TEST(CapiStuck, IsTakenAndGivenBack) {
    EXPECT_EQ(ferry_on_stuck([](void*, const char*) {}, nullptr), FERRY_OK);
    EXPECT_EQ(ferry_on_stuck(nullptr, nullptr), FERRY_OK);
}

// ---------------------------------------------------------------- texts and structures

TEST(CapiErrors, AreOfTheThread) {
    EXPECT_EQ(ferry_team_destroy(nullptr), FERRY_BAD_HANDLE);
    const std::string mine = ferry_last_error();
    std::thread([] { EXPECT_STREQ(ferry_last_error(), ""); }).join();
    EXPECT_EQ(ferry_last_error(), mine);
    ferry_team* team = make_team();
    EXPECT_EQ(ferry_last_error(), mine) << "a call that succeeds leaves it";
    EXPECT_EQ(ferry_team_destroy(team), FERRY_OK);
}

TEST(CapiErrors, AreCutAtTheirRoom) {
    EXPECT_EQ(guarded("call", [] { throw std::runtime_error(std::string(10000, 'x')); }),
              FERRY_INTERNAL);
    EXPECT_EQ(std::string(ferry_last_error()).size(), 4095u);
}

TEST(CapiErrors, HaveNames) {
    EXPECT_STREQ(ferry_status_name(FERRY_OK), "ok");
    EXPECT_STREQ(ferry_status_name(FERRY_CANCELLED), "cancelled");
    EXPECT_STREQ(ferry_status_name(FERRY_BUSY), "busy");
    for (const ferry_status none : {-1, FERRY_BUSY + 1, INT32_MIN, INT32_MAX})
        EXPECT_STREQ(ferry_status_name(none), "unknown");
    EXPECT_EQ(ferry_abi_version(), 6);
    EXPECT_EQ(std::string(ferry_version()).find("0."), 0u);
}

TEST(CapiStructures, SayTheirSize) {
    ferry_pool* pool = nullptr;
    ferry_pool_options options{};
    EXPECT_REFUSED(ferry_pool_create(nullptr, &pool), FERRY_USAGE, "options is NULL");
    // Of the first version, to which later ones have added.
    const size_t first = offsetof(ferry_pool_options, allocator);
    for (const size_t size : {size_t{0}, size_t{8}, first - 1, SIZE_MAX}) {
        options.size = size;
        EXPECT_REFUSED(ferry_pool_create(&options, &pool), FERRY_USAGE, "size is wrong");
    }
    EXPECT_EQ(pool, nullptr);
    options.size = first;
    options.budget_bytes = 1 << 20;
    options.allocator = reinterpret_cast<ferry_allocator*>(8);  // what lies behind it
    ASSERT_DONE(ferry_pool_create(&options, &pool));
    EXPECT_EQ(ferry_pool_destroy(pool), FERRY_OK);
}

TEST(CapiStructures, OfANewerProgramAreTakenWhereItAsksForNothingNew) {
    struct Newer {
        ferry_hyper known = sized<ferry_hyper>();
        int64_t fresh = 0;
    } newer;
    int32_t moments = 0;
    float initial = 0;
    newer.known.size = sizeof newer;
    EXPECT_EQ(ferry_hyper_default(FERRY_ADAM, &newer.known), FERRY_OK);
    EXPECT_EQ(newer.known.size, sizeof newer) << "the caller's stays";
    EXPECT_EQ(ferry_optim_moments(&newer.known, &moments, &initial), FERRY_OK);
    EXPECT_EQ(moments, 2);
    newer.fresh = 1;
    EXPECT_REFUSED(ferry_optim_moments(&newer.known, &moments, &initial), FERRY_USAGE,
                   "does not know");
}

// ---------------------------------------------------------------- log

TEST(CapiLog, GoesWhereItIsAsked) {
    using Lines = std::vector<std::pair<int32_t, std::string>>;
    Lines lines;
    const auto keep = [](void* context, int32_t level, const char* text) {
        static_cast<Lines*>(context)->emplace_back(level, text);
    };
    testing::internal::CaptureStderr();
    log_warn("to nobody");
    ASSERT_DONE(ferry_log_to(keep, &lines, FERRY_LOG_INFO));
    log_debug("below the level");
    log_info("a line");
    log_warn("another");
    ASSERT_DONE(ferry_log_to(nullptr, nullptr, FERRY_LOG_DEBUG));
    log_warn("to nobody again");
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    EXPECT_EQ(lines, (Lines{{FERRY_LOG_INFO, "a line"}, {FERRY_LOG_WARN, "another"}}));
    testing::internal::CaptureStderr();
    ASSERT_DONE(ferry_log_to_stderr(FERRY_LOG_WARN));
    log_warn("as asked");
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "ferry: warning: as asked\n");
    ASSERT_DONE(ferry_log_to(nullptr, nullptr, FERRY_LOG_DEBUG));
    for (const int32_t level : {-1, FERRY_LOG_BUG + 1})
        EXPECT_REFUSED(ferry_log_to(nullptr, nullptr, level), FERRY_USAGE, "level");
}

// It is called with the log's own lock held, beside calls that hold a handle's.
TEST(CapiLog, ItsCallbackCallsNothingOfFerrys) {
    struct Seen {
        int lines = 0;
        ferry_status log = FERRY_OK, team = FERRY_OK, handle = FERRY_OK;
        std::string why{};
    } seen;
    const auto call = [](void* context, int32_t, const char*) {
        auto& mine = *static_cast<Seen*>(context);
        ferry_team* team = nullptr;
        ++mine.lines;
        log_warn("from within");
        mine.log = ferry_log_to(nullptr, nullptr, FERRY_LOG_WARN);
        mine.why = ferry_last_error();
        mine.team = ferry_team_create(1, &team);
        mine.handle = ferry_team_destroy(nullptr);
    };
    ASSERT_DONE(ferry_log_to(call, &seen, FERRY_LOG_WARN));
    log_warn("a line");
    ASSERT_DONE(ferry_log_to(nullptr, nullptr, FERRY_LOG_WARN));
    EXPECT_EQ(seen.lines, 1);
    for (const ferry_status status : {seen.log, seen.team, seen.handle})
        EXPECT_EQ(status, FERRY_BUSY);
    EXPECT_NE(seen.why.find("ferry_log_to: the callback for the log"), std::string::npos);
    ferry_team* const team = make_team();
    EXPECT_EQ(ferry_team_destroy(team), FERRY_OK);
}

}  // namespace
}  // namespace ferry::capi
