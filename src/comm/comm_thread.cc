#include "comm_thread.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "base/threads.h"

namespace ferry::comm {
namespace {

constexpr Nanos kMillisecond = 1'000'000;
// How long one without work sleeps between two looks for news.
constexpr auto kIdleLook = std::chrono::milliseconds(5);
// The last words of a rank that ended may still be on their way. So may its part of an operation
// that it has finished: then this rank goes on, and often meets the same error, which says more.
constexpr Nanos kLastWords = 50 * kMillisecond;
constexpr const char* kEnded = "its process has ended";
// Between two questions to the kernel whether a process has ended.
constexpr Nanos kLook = 5 * kMillisecond;
// Past its deadline, or once a rank is known to be lost, the library may keep the comm thread so
// long.
constexpr Nanos kGrace = 5000 * kMillisecond;
// How long a rank that gives up waits until the others are told.
constexpr auto kFarewell = std::chrono::milliseconds(500);

News news_of(News::Kind kind, std::span<const int> ranks = {}, std::string_view how = "") {
    News news{.kind = kind};
    for (const int rank : ranks)
        if (rank < News::kRanks) news.ranks.set(static_cast<size_t>(rank));
    how = how.substr(0, news.how.size() - 1);
    std::memcpy(news.how.data(), how.data(), how.size());
    return news;
}

std::vector<int> ranks_in(const News& news) {
    std::vector<int> ranks;
    for (int rank = 0; rank < News::kRanks; ++rank)
        if (news.ranks.test(static_cast<size_t>(rank))) ranks.push_back(rank);
    return ranks;
}

}  // namespace

CommThread::CommThread(Executor& executor, const CommOptions& options,
                       std::unique_ptr<Transport> transport, Sources sources)
    : executor_(executor),
      options_(options),
      timeout_(static_cast<Nanos>(options.timeout_seconds * 1e9)),
      transport_(std::move(transport)),
      sources_(std::move(sources)),
      place_(transport_->place()),
      operations_(kDepth),
      waits_(static_cast<size_t>(place_.size)),
      watchdog_([this](Nanos stuck) { return judge(stuck); }) {
    FERRY_CHECK(!executor.simulated(), "ranks of other processes do not run in virtual time");
    if (CommThread* const watch = sources_.watch) {
        const std::lock_guard lock(watch->watched_mutex_);
        watch->watched_.push_back(this);
    }
    executor_.host(*this);
}

CommThread::~CommThread() {
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return ended_ == posted_; });
    }
    executor_.retire(*this);
    if (CommThread* const watch = sources_.watch) {
        const std::lock_guard lock(watch->watched_mutex_);
        std::erase(watch->watched_, this);
    }
}

// ---------------------------------------------------------------- any thread

void CommThread::post(const Operation& operation) {
    {
        const std::lock_guard lock(mutex_);
        FERRY_CHECK(posted_ - ended_ < kDepth, "too many operations of a communicator");
        at(posted_++) = operation;
    }
    changed_.notify_all();
}

std::optional<Error> CommThread::failure() const {
    if (!failed_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    return failure_;
}

void CommThread::check() {
    if (const auto error = failure()) throw Error(*error);
}

void CommThread::give_up(std::span<const int> ranks, std::string_view how) noexcept {
    std::unique_lock lock(mutex_);
    if (!given_up_) given_up_.emplace(std::vector(ranks.begin(), ranks.end()), how);
    changed_.notify_all();
    // Who called may end the process: not before the others were told.
    changed_.wait_for(lock, kFarewell, [this] { return failure_.has_value(); });
}

void CommThread::abandon(std::string_view why) noexcept {
    why = why.substr(0, why.find('\n'));  // the rest is said by this rank
    give_up({&place_.rank, 1}, "it ended with an error: " + std::string(why));
}

std::unique_ptr<Communicator> CommThread::group(std::span<const int> members) {
    return group_on(executor_, members);
}

std::unique_ptr<Communicator> CommThread::beside(Executor& executor) {
    if (CommThread* const met = transport_->watch()) return met->beside(executor);
    if (!sources_.wire) return nullptr;
    std::vector<int> all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    return group_on(executor, all);
}

std::unique_ptr<Communicator> CommThread::group_on(Executor& executor,
                                                   std::span<const int> members) {
    FERRY_CHECK(sources_.members.empty(), "a group has no groups");
    FERRY_CHECK(std::ranges::is_sorted(members) && std::ranges::count(members, rank()) == 1);
    std::unique_ptr<Transport> transport = transport_->group(*this, members);
    Sources sources{.watch = transport->watch()};
    if (!sources.watch) sources = {.watch = this, .members = {members.begin(), members.end()}};
    return std::make_unique<CommThread>(executor, options_, std::move(transport),
                                        std::move(sources));
}

void CommThread::set_waiting(bool waiting) {
    if (sources_.watch) return sources_.watch->set_waiting(waiting);
    asked_waiting_ += waiting ? 1 : -1;
}

bool CommThread::waits(int rank) const noexcept {
    if (sources_.watch) return sources_.watch->waits(watched(rank));
    return waits_[static_cast<size_t>(rank)];
}

int CommThread::name_of(int rank) const noexcept {
    return sources_.watch ? sources_.watch->name_of(watched(rank)) : rank;
}

std::vector<int> CommThread::watched(std::span<const int> ranks) const {
    std::vector<int> found;
    for (const int rank : ranks) found.push_back(watched(rank));
    return found;
}

Error CommThread::lost_here(std::span<const int> ranks, const std::string& how,
                            const std::string& where, const std::string& remedy) const {
    std::vector<int> names;
    for (const int rank : ranks) names.push_back(name_of(rank));
    return lost(names, how, where, remedy);
}

void CommThread::interrupt() {
    {
        const std::lock_guard lock(mutex_);
        interrupted_ = true;
    }
    changed_.notify_all();
}

// ---------------------------------------------------------------- the comm thread

void CommThread::run_once(Nanos) {
    watchdog_.enter();
    const bool moved = advance();
    watchdog_.leave();
    if (!moved) rest();
}

// Whether there may be more to do at once.
bool CommThread::advance() {
    try {
        if (!over_) return progress();
        drop_all();
    } catch (const Error& error) {
        // The library's own error; this rank ends by it, in whatever it was doing.
        Problem problem = error.problem();
        const std::string operation = where();
        if (!operation.empty())
            problem.where = operation + (problem.where.empty() ? "" : ": " + problem.where);
        fail_and_tell({error.trouble(), problem}, {&place_.rank, 1},
                      problem.what + " " + problem.measured);
    }
    return false;
}

// Whether anything was started or has ended.
bool CommThread::progress() {
    take_news();
    heed_what_was_told();
    if (over_) return true;
    bool moved = false;
    while (start_next()) moved = true;
    while (finish_oldest()) moved = true;
    if (!moved) keep_watch();
    return moved || over_;
}

bool CommThread::start_next() {
    if (started_ - first_ == Transport::kWindow) return false;
    {
        const std::lock_guard lock(mutex_);
        if (started_ == posted_) return false;
    }
    const Operation& next = at(started_);
    if (!next.counter) {
        if (!transport_->ready()) return false;
        transport_->start(next, started_ % Transport::kWindow);
    }
    if (started_++ == first_) oldest_since_ = executor_.now();
    return true;
}

bool CommThread::finish_oldest() {
    if (first_ == started_) return false;
    if (!at(first_).counter && !transport_->finished(first_ % Transport::kWindow)) return false;
    announce(false);
    end_oldest();
    return true;
}

void CommThread::end_oldest() {
    Executor& executor = executor_;
    if (auto* counter = at(first_).counter) counter->fetch_add(1, std::memory_order_release);
    executor.wake();
    ++first_;
    oldest_since_ = executor.now();
    {
        const std::lock_guard lock(mutex_);
        ended_ = first_;
    }
    changed_.notify_all();
}

// After a failure: what is enqueued ends at once.
void CommThread::drop_all() {
    std::unique_lock lock(mutex_);
    while (first_ < posted_) {
        lock.unlock();
        end_oldest();
        lock.lock();
    }
}

void CommThread::take_news() {
    decltype(given_up_) given_up;
    {
        const std::lock_guard lock(mutex_);
        given_up = given_up_;
    }
    if (given_up) {
        const auto& [ranks, how] = *given_up;
        return fail_and_tell(lost_here(ranks, how, where(ranks), ""), ranks, how);
    }
    if (sources_.watch) {
        if (const auto error = sources_.watch->failure()) {
            Problem problem = error->problem();
            if (problem.where.empty()) problem.where = where();
            fail({error->trouble(), std::move(problem)});
        }
        return;
    }
    if (!sources_.wire) return;
    if (first_ == started_) announce(asked_waiting_ > 0);
    while (true) {
        const std::optional<Wire::Heard> heard = sources_.wire->hear();
        if (!heard) return;
        const auto& [from, news] = *heard;
        waits_[static_cast<size_t>(from)] = news.kind == News::Kind::waiting;
        if (news.kind != News::Kind::lost) continue;
        const std::string how = news.how.data();
        const std::vector<int> ranks = ranks_in(news);
        if (told_) continue;
        told_at_ = executor_.now();
        told_of_ = ranks;
        told_ = std::ranges::find(ranks, rank()) == ranks.end()
                    ? lost(ranks, how, "",
                           "see what that rank said last; end the run and start it again")
                    : Error(Trouble::rank_lost,
                            {.what = "rank " + std::to_string(from) + " has given this rank (" +
                                     std::to_string(rank()) + ") up: " + how,
                             .remedy = "raise zero.timeout_seconds if a step may take so long"});
    }
}

void CommThread::heed_what_was_told() {
    if (!told_ || executor_.now() - told_at_ < kLastWords) return;
    Problem problem = told_->problem();
    problem.where = where(told_of_);
    fail({told_->trouble(), std::move(problem)});
}

void CommThread::keep_watch() {
    if (first_ == started_ && asked_waiting_ == 0) return;
    const Nanos now = executor_.now();
    look_for_ended(now);
    if (over_ || first_ == started_) return;
    const Nanos waited = now - oldest_since_;
    if (waited >= std::min(timeout_ / 4, 1000 * kMillisecond) || others_wait()) announce(true);
    if (waited >= timeout_) run_out_of_time();
}

void CommThread::look_for_ended(Nanos now) {
    if (!sources_.wire || now < next_look_ || told_) return;  // what was told says more
    next_look_ = now + kLook;
    const std::optional<int> rank = sources_.wire->ended();
    if (!rank) return;
    ended_seen_at_ = std::min(ended_seen_at_, now);
    if (now - ended_seen_at_ < kLastWords) return;
    fail_and_tell(lost({&*rank, 1}, kEnded, where({&*rank, 1}),
                       "see what it or its launcher said last; the kernel may have killed it for "
                       "memory (dmesg)"),
                  {&*rank, 1}, kEnded);
}

void CommThread::run_out_of_time() {
    const std::vector<int> awaited = transport_->awaited(first_ % Transport::kWindow);
    // A rank that waits itself is not to blame.
    std::vector<int> silent;
    std::ranges::copy_if(awaited, std::back_inserter(silent),
                         [this](int rank) { return !waits(rank); });
    const std::string within = " within " + seconds_text(static_cast<double>(timeout_) * 1e-9);
    const std::string how =
        silent.empty() && !awaited.empty()
            ? "every rank is in the " + where() + ", which does not end" + within
            : "took no part in the " + where() + within;
    fail_and_tell(lost_here(silent, how, where(),
                            "see what that rank said last, and the network between the ranks; "
                            "raise zero.timeout_seconds if a step may take so long"),
                  silent, how);
}

bool CommThread::others_wait() const {
    for (int other = 0; other < size(); ++other)
        if (other != rank() && waits(other)) return true;
    return false;
}

void CommThread::announce(bool waiting) {
    waiting = waiting || asked_waiting_ > 0;
    if (waiting == announced_) return;
    announced_ = waiting;
    if (sources_.watch) {
        sources_.watch->set_waiting(waiting);
    } else if (sources_.wire) {
        sources_.wire->tell(news_of(waiting ? News::Kind::waiting : News::Kind::going_on));
    }
}

// In which operation this rank is; of several at once in one with a rank that is lost.
std::string CommThread::where(std::span<const int> lost) const {
    if (first_ < started_) return operations_[first_ % kDepth].text() + among();
    return where_of_watched(lost);
}

std::string CommThread::where_of_watched(std::span<const int> lost) const {
    const std::lock_guard lock(watched_mutex_);
    std::string with_others;
    for (const CommThread* one : watched_) {
        std::string operation = one->oldest();
        const std::vector<int>& members = one->sources_.members;
        const auto has = [&](int rank) {
            return std::ranges::find(members, rank) != members.end();
        };
        if (operation.empty()) continue;
        if (members.empty() || std::ranges::any_of(lost, has)) return operation;
        if (with_others.empty()) with_others = operation;
    }
    return with_others;
}

// Of a group, who is in it.
std::string CommThread::among() const {
    std::string text;
    for (const int member : sources_.members)
        text += (text.empty() ? " among ranks " : ", ") + std::to_string(member);
    return text;
}

void CommThread::fail(const Error& error) {
    if (over_) return;
    over_ = true;
    transport_->abort();
    {
        const std::lock_guard lock(mutex_);
        failure_ = error;
        failed_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
    executor_.wake();
    drop_all();
}

void CommThread::fail_and_tell(const Error& error, std::span<const int> ranks,
                               std::string_view how) {
    if (over_) return;
    if (sources_.watch) {
        sources_.watch->give_up(watched(ranks), how);
    } else if (sources_.wire) {
        sources_.wire->tell(news_of(News::Kind::lost, ranks, how));
        sources_.wire->flush();
    }
    fail(error);
}

// Until there is something to do: briefly while operations are in flight or others may have news.
void CommThread::rest() {
    if (!over_ && first_ < started_) return nap_after(executor_.now() - oldest_since_);
    std::unique_lock lock(mutex_);
    const auto called = [this] {
        return interrupted_ || posted_ > ended_ || (!over_ && given_up_.has_value());
    };
    if (!over_ && (sources_.wire || sources_.watch)) {
        changed_.wait_for(lock, kIdleLook, called);
    } else {
        changed_.wait(lock, called);
    }
    interrupted_ = false;
}

// ---------------------------------------------------------------- the watchdog's thread

// The comm thread hears no news and keeps no deadline while the library does not return to it.
std::optional<Error> CommThread::judge(Nanos stuck) const {
    if (stuck < kGrace) return std::nullopt;
    const std::optional<Error> cause = known();
    if (!cause && stuck - kGrace < timeout_) return std::nullopt;
    const std::string operation = oldest(), library(transport_->kind());
    return Error(Trouble::rank_lost,
                 {.what = cause ? cause->problem().what
                                : "lost a rank: a call of " + library + " does not return",
                  .where = "rank " + std::to_string(name_of(rank())) +
                           (operation.empty() ? "" : ": ") + operation,
                  .measured = "in a call of " + library + " for " +
                              seconds_text(static_cast<double>(stuck) * 1e-9),
                  .limit = "zero.timeout_seconds, or 5 s once a rank is known to be lost",
                  .remedy = "see what the other ranks said last"});
}

// That a rank is lost, as far as this can be learnt beside the comm thread.
std::optional<Error> CommThread::known() const {
    {
        const std::lock_guard lock(mutex_);
        if (given_up_) return lost_here(given_up_->first, given_up_->second, "", "");
    }
    if (sources_.watch) return sources_.watch->failure();
    const std::optional<int> rank = sources_.wire ? sources_.wire->ended() : std::nullopt;
    if (!rank) return std::nullopt;
    return lost({&*rank, 1}, kEnded, "", "");
}

// The text of where(), with the mutex held.
std::string CommThread::oldest() const {
    const std::lock_guard lock(mutex_);
    for (uint64_t number = ended_; number < posted_; ++number) {
        const Operation& operation = operations_[number % kDepth];
        if (!operation.counter) return operation.text() + among();
    }
    return "";
}

}  // namespace ferry::comm
