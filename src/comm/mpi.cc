// Ranks over MPI: host memory. Every operation is messages between pairs of ranks, not one of MPI's
// collectives: those do not say whom they wait for.
#ifdef FERRY_MPI

#include <mpi.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "alike.h"
#include "base/checksum.h"
#include "base/log.h"
#include "base/threads.h"
#include "comm_thread.h"
#include "launched.h"
#include "throttled.h"
#include "watchdog.h"

namespace ferry::comm {
namespace {

constexpr int kOperationTag = 1, kNewsTag = 2;
constexpr int kGroupTag = 3;  // the first group's, and so on
constexpr Nanos kFlush = 200'000'000;

void demand(int status, const std::string& call) {
    if (status == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(status, text.data(), &length);
    throw Error(Trouble::internal,
                {.what = "MPI refused a call",
                 .where = call,
                 .measured = text.data(),
                 .remedy = "see what MPI said before it; the ranks may have made different calls"});
}

// A rank was lost: MPI_Finalize would wait for it.
std::atomic<bool> broken = false;

void finalise() {
    int finalised = 0;
    MPI_Finalized(&finalised);
    if (!broken && !finalised) MPI_Finalize();
}

// MPI_Init_thread returns when every rank that was launched is in it; it takes no deadline, and
// whoever waits in it can throw nothing.
std::optional<Error> judge_start(Nanos stuck, double timeout_seconds) {
    if (static_cast<double>(stuck) < timeout_seconds * 1e9) return std::nullopt;
    const int launched = launched_ranks().value_or(0), rank = launched_rank().value_or(0);
    return Error(
        Trouble::rank_lost,
        {.what = "lost a rank: not all of them came to MPI's start",
         .where = "rank " + std::to_string(rank) + ": MPI_Init_thread",
         .measured = "waited " + seconds_text(timeout_seconds) + " for " +
                     std::to_string(launched) + " ranks",
         .limit = "zero.timeout_seconds",
         .remedy = "see what each of them said last, and whether every launched program is ferry; "
                   "raise the limit if they start that slowly"});
}

// Once a process, unless it is an embedder's who did.
void initialise(double timeout_seconds) {
    int done = 0, level = 0;
    MPI_Initialized(&done);
    if (done) {
        MPI_Query_thread(&level);
    } else {
        Watchdog watchdog([=](Nanos stuck) { return judge_start(stuck, timeout_seconds); });
        watchdog.enter();
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
        std::atexit(finalise);
    }
    if (level >= MPI_THREAD_SERIALIZED) return;
    throw Error(Trouble::usage,
                {.what = "MPI may be called from its main thread only",
                 .where = "MPI_Init_thread",
                 .remedy = "initialise it with MPI_THREAD_SERIALIZED, or use an MPI "
                           "that was built with threads"});
}

// A rank's own data, given when the ranks meet.
struct Card {
    uint64_t machine = 0;
    uint64_t processes = 0;  // the namespace in which its process has its number
    int64_t process = 0;
};

Card own_card() {
    struct stat processes {};
    stat("/proc/self/ns/pid", &processes);
    return {machine_id(), processes.st_ino, getpid()};
}

// A message of news until it has left.
struct Letter {
    News news;
    MPI_Request request = MPI_REQUEST_NULL;
};

// MPI is initialised for one call at a time, and every communicator has a thread.
std::mutex one_call;
using OneCall = std::lock_guard<std::mutex>;

// Operations as messages between the ranks of an MPI communicator, or some of them.
class Messages : public Transport {
public:
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    std::string_view kind() const noexcept override { return "mpi"; }
    RankPlace place() const noexcept override { return place_; }

    void start(const Operation& operation, size_t slot) override {
        const OneCall guard(one_call);
        Flight& flight = flights_[slot];
        flight.parts.clear();
        flight.requests.clear();
        if (operation.kind == Operation::Kind::shift) {
            shift(operation, flight);
        } else {
            meet_all(operation, flight);
        }
        flight.indices.resize(flight.requests.size());
        flight.statuses.resize(flight.requests.size());
    }

    bool finished(size_t slot) override {
        const OneCall guard(one_call);
        Flight& flight = flights_[slot];
        int count = 0;
        const int status =
            MPI_Testsome(static_cast<int>(flight.requests.size()), flight.requests.data(), &count,
                         flight.indices.data(), flight.statuses.data());
        if (status != MPI_ERR_IN_STATUS) demand(status, "MPI_Testsome");
        if (count == MPI_UNDEFINED) return true;
        for (int i = 0; i < count; ++i) {
            const auto at = static_cast<size_t>(i);
            const Part& part = flight.parts[static_cast<size_t>(flight.indices[at])];
            const MPI_Status& found = flight.statuses[at];
            if (status == MPI_ERR_IN_STATUS) demand(found.MPI_ERROR, text_of(part));
            if (part.arrives) check_count(part, found);
        }
        return false;  // the next look finds none left
    }

    std::vector<int> awaited(size_t slot) const override {
        const Flight& flight = flights_[slot];
        std::vector<int> ranks;
        for (size_t i = 0; i < flight.requests.size(); ++i)
            if (flight.requests[i] != MPI_REQUEST_NULL) ranks.push_back(flight.parts[i].rank);
        std::ranges::sort(ranks);
        ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
        return ranks;
    }

    // A receive that has not begun never will: its memory may be given back.
    void abort() noexcept override {
        const OneCall guard(one_call);
        broken = true;
        for (Flight& flight : flights_)
            for (size_t i = 0; i < flight.requests.size(); ++i)
                if (flight.parts[i].arrives) cancel(flight.requests[i]);
    }

protected:
    Messages(int64_t message_bytes, int tag) : message_bytes_(message_bytes), tag_(tag) {}

    static void cancel(MPI_Request& request) noexcept {
        if (request == MPI_REQUEST_NULL) return;
        MPI_Cancel(&request);
        MPI_Request_free(&request);
    }
    template <class Each>
    void for_others(Each each) const {
        for (int step = 1; step < place_.size; ++step) each((place_.rank + step) % place_.size);
    }

    const int64_t message_bytes_;
    MPI_Comm world_ = MPI_COMM_NULL;
    RankPlace place_{};
    std::vector<int> members_{};  // of `world_`, by rank; empty: all of them

private:
    struct Part {
        int rank;
        int bytes;
        bool arrives;
    };
    // The messages of one operation. Nothing of it shrinks.
    struct Flight {
        std::vector<Part> parts{};
        std::vector<MPI_Request> requests{};
        std::vector<int> indices{};
        std::vector<MPI_Status> statuses{};
    };

    int in_world(int rank) const {
        return members_.empty() ? rank : members_[static_cast<size_t>(rank)];
    }
    std::string text_of(const Part& part) const {
        return "message " + std::string(part.arrives ? "from" : "to") + " rank " +
               std::to_string(in_world(part.rank)) + " of " + std::to_string(part.bytes) + " bytes";
    }
    void check_count(const Part& part, const MPI_Status& status) const {
        int count = 0;
        demand(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
        if (count == part.bytes) return;
        throw Error(Trouble::internal, {.what = "the ranks make different calls",
                                        .where = text_of(part),
                                        .measured = std::to_string(count) + " bytes"});
    }

    // MPI counts in an int; both sides cut alike.
    template <class Each>
    void cut(Flight& flight, int64_t bytes, int rank, bool arrives, Each each) const {
        for (int64_t at = 0; at < bytes; at += message_bytes_) {
            const int part = static_cast<int>(std::min(bytes - at, message_bytes_));
            flight.parts.push_back({rank, part, arrives});
            each(at, part, &flight.requests.emplace_back(MPI_REQUEST_NULL));
        }
    }
    void meet_all(const Operation& operation, Flight& flight) const {
        for (size_t i = 0; i < operation.count; ++i) {
            const Transfer& transfer = operation.transfers[i];
            if (!operation.receives(transfer)) continue;
            for_others([&](int rank) {
                receive(flight, operation.in_from(transfer, rank), transfer.bytes, rank);
            });
        }
        for (size_t i = 0; i < operation.count; ++i) {
            const Transfer& transfer = operation.transfers[i];
            if (!operation.sends(transfer)) continue;
            for_others([&](int rank) {
                send(flight, operation.out_for(transfer, rank), transfer.bytes, rank);
            });
            copy_own(operation, transfer, place_.rank);
        }
    }
    void shift(const Operation& operation, Flight& flight) const {
        const Transfer &arrives = operation.arriving(), &leaves = operation.leaving();
        receive(flight, arrives.in, arrives.bytes, operation.source(place_.rank, place_.size));
        send(flight, leaves.out, leaves.bytes, operation.target(place_.rank, place_.size));
    }
    void receive(Flight& flight, std::byte* place, int64_t all, int rank) const {
        cut(flight, all, rank, true, [&](int64_t at, int bytes, MPI_Request* request) {
            demand(MPI_Irecv(place + at, bytes, MPI_BYTE, in_world(rank), tag_, world_, request),
                   "MPI_Irecv");
        });
    }
    void send(Flight& flight, const std::byte* from, int64_t all, int rank) const {
        cut(flight, all, rank, false, [&](int64_t at, int bytes, MPI_Request* request) {
            demand(MPI_Isend(from + at, bytes, MPI_BYTE, in_world(rank), tag_, world_, request),
                   "MPI_Isend");
        });
    }

    const int tag_;
    std::array<Flight, kWindow> flights_{};
};

// A group of the run's ranks: its messages are told from theirs by a tag, so nobody waits for
// anybody when it is made.
class GroupMessages final : public Messages {
public:
    GroupMessages(MPI_Comm world, RankPlace place, std::span<const int> members,
                  int64_t message_bytes, int tag)
        : Messages(message_bytes, tag) {
        world_ = world;
        place_ = place;
        members_.assign(members.begin(), members.end());
    }
    std::unique_ptr<Transport> group(Communicator&, std::span<const int>) override {
        bug("a group has no groups");
    }
};

class Mpi final : public Messages, public Wire {
public:
    Mpi(Executor& executor, const CommOptions& options)
        : Messages(options.message_bytes, kOperationTag),
          executor_(executor),
          meet_until_(executor.now() + static_cast<Nanos>(options.timeout_seconds * 1e9)) {
        MPI_Request copied = MPI_REQUEST_NULL;
        demand(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
               "MPI_Comm_set_errhandler");
        demand(MPI_Comm_idup(MPI_COMM_WORLD, &world_, &copied), "MPI_Comm_idup");
        meet(copied);
        demand(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        demand(MPI_Comm_rank(world_, &place_.rank), "MPI_Comm_rank");
        demand(MPI_Comm_size(world_, &place_.size), "MPI_Comm_size");
        introduce();
        listen();
    }
    ~Mpi() override {
        for (const pollfd& process : processes_) close(process.fd);
        if (broken) return;
        flush();
        const OneCall guard(one_call);
        cancel(hearing_);
        MPI_Comm_free(&world_);
    }

    std::unique_ptr<Transport> group(Communicator&, std::span<const int> members) override {
        std::vector<uint64_t> machines;
        int own = 0;
        for (const int member : members) {
            if (member == place_.rank) own = static_cast<int>(std::ssize(machines));
            machines.push_back(machines_[static_cast<size_t>(member)]);
        }
        return std::make_unique<GroupMessages>(world_, place_among(machines, own), members,
                                               message_bytes_, kGroupTag + groups_++);
    }

    void abort() noexcept override {
        Messages::abort();
        const OneCall guard(one_call);
        cancel(hearing_);
    }

    void tell(const News& news) noexcept override {
        const OneCall guard(one_call);
        for_others([&](int rank) {
            Letter& letter = letters_.emplace_back(Letter{.news = news});
            MPI_Isend(&letter.news, sizeof(News), MPI_BYTE, rank, kNewsTag, world_,
                      &letter.request);
        });
        forget_sent();
    }

    void flush() noexcept override {
        const auto under_way = [this] {
            const OneCall guard(one_call);
            return forget_sent();
        };
        const Nanos start = executor_.now();
        for (Nanos now = start; under_way() && now - start < kFlush; now = executor_.now())
            nap_after(now - start);
    }

    std::optional<Heard> hear() override {
        const OneCall guard(one_call);
        int arrived = 0;
        MPI_Status status{};
        demand(MPI_Test(&hearing_, &arrived, &status), "MPI_Test for news");
        if (!arrived) return std::nullopt;
        const Heard heard{status.MPI_SOURCE, heard_};
        listen();
        return heard;
    }

    std::optional<int> ended() override {
        if (poll(processes_.data(), processes_.size(), 0) <= 0) return std::nullopt;
        for (size_t i = 0; i < processes_.size(); ++i)
            if (processes_[i].revents != 0) return process_ranks_[i];
        return std::nullopt;
    }

private:
    void listen() {
        demand(
            MPI_Irecv(&heard_, sizeof(News), MPI_BYTE, MPI_ANY_SOURCE, kNewsTag, world_, &hearing_),
            "MPI_Irecv for news");
    }
    // Whether any are still on their way.
    bool forget_sent() noexcept {
        while (!letters_.empty()) {
            int sent = 0;
            MPI_Test(&letters_.front().request, &sent, MPI_STATUS_IGNORE);
            if (!sent) return true;
            letters_.pop_front();
        }
        return false;
    }

    // Waits for one of MPI's own collectives while the ranks meet.
    void meet(MPI_Request& request) const {
        const Nanos start = executor_.now();
        for (int done = 0;;) {
            demand(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test while the ranks meet");
            if (done) return;
            const Nanos now = executor_.now();
            if (now > meet_until_) {
                broken = true;
                throw lost({}, "not all ranks came to the start within zero.timeout_seconds",
                           "start-up", "see what each of them said last");
            }
            nap_after(now - start);
        }
    }

    void introduce() {
        const Card own = own_card();
        std::vector<Card> cards(static_cast<size_t>(place_.size));
        MPI_Request exchanged = MPI_REQUEST_NULL;
        demand(MPI_Iallgather(&own, sizeof(Card), MPI_BYTE, cards.data(), sizeof(Card), MPI_BYTE,
                              world_, &exchanged),
               "MPI_Iallgather");
        meet(exchanged);
        std::vector<uint64_t> machines(cards.size());
        std::ranges::transform(cards, machines.begin(), &Card::machine);
        place_ = place_among(machines, place_.rank);
        machines_ = std::move(machines);
        for (int rank = 0; rank < place_.size; ++rank) {
            const Card& card = cards[static_cast<size_t>(rank)];
            if (card.machine != own.machine || card.processes != own.processes) continue;
            if (rank == place_.rank) continue;
            // The kernel says when that process ends. One that cannot be asked (Linux before 5.3,
            // a container's filter) is missed by the timeout only.
            const auto handle = static_cast<int>(syscall(SYS_pidfd_open, card.process, 0));
            if (handle < 0) continue;
            processes_.push_back({.fd = handle, .events = POLLIN, .revents = 0});
            process_ranks_.push_back(rank);
        }
    }

    Executor& executor_;
    const Nanos meet_until_;
    std::vector<uint64_t> machines_{};  // of the ranks
    int groups_ = 0;                    // made so far, on every rank alike
    std::vector<pollfd> processes_{};   // the other ranks' of this machine
    std::vector<int> process_ranks_{};
    News heard_{};
    MPI_Request hearing_ = MPI_REQUEST_NULL;
    std::deque<Letter> letters_{};  // in which none moves
};

void check_world(const Mpi& mpi) {
    const int found = mpi.place().size, launched = launched_ranks().value_or(found);
    if (launched == found) return;
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> version{};
    int length = 0;
    MPI_Get_library_version(version.data(), &length);
    throw Error(Trouble::usage,
                {.what = "the ranks do not find each other",
                 .where = "MPI_COMM_WORLD",
                 .measured = std::to_string(found) + " of " + std::to_string(launched) + " ranks",
                 .limit = version.data(),
                 .remedy = "start them with the mpirun of that MPI; with srun, say the --mpi that "
                           "it knows (srun --mpi=list)"});
}

// ---------------------------------------------------------------- last words

constexpr int kLastWordsTag = 1;  // of MPI_COMM_WORLD, which has no other messages
// In a hurry the first rank may have spoken already: its end makes a launcher end the others.
constexpr Nanos kFirstRankSpeaks = 10'000'000'000, kHurry = 300'000'000, kBetweenLooks = 1'000'000;

// Errors may come before any communicator does. MPI comes back from its start when all are in it.
bool others_are_there() {
    int done = 0, level = 0, size = 0;
    MPI_Initialized(&done);
    if (!done) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size > 1;
}

uint64_t digest_of(const Error& error) {
    return checksum(std::as_bytes(std::span(std::string_view(error.what()))));
}

// To all others: it leaves at once where MPI is in order, and nobody needs it where it is not.
void tell_others(uint64_t digest) {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    std::vector<MPI_Request> requests(static_cast<size_t>(size), MPI_REQUEST_NULL);
    for (int rank = 1; rank < size; ++rank)
        MPI_Isend(&digest, sizeof(digest), MPI_BYTE, rank, kLastWordsTag, MPI_COMM_WORLD,
                  &requests[static_cast<size_t>(rank)]);
    int sent = 0;
    for (Nanos waited = 0; waited < kFlush; waited += kBetweenLooks) {
        MPI_Testall(size, requests.data(), &sent, MPI_STATUSES_IGNORE);
        if (sent) return;
        std::this_thread::sleep_for(std::chrono::nanoseconds(kBetweenLooks));
    }
}

// Whether the first rank has said this.
bool first_rank_said(uint64_t digest, const std::function<bool()>& hurried) {
    uint64_t theirs = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Irecv(&theirs, sizeof(theirs), MPI_BYTE, 0, kLastWordsTag, MPI_COMM_WORLD, &request);
    for (Nanos waited = 0; waited < (hurried() ? kHurry : kFirstRankSpeaks);
         waited += kBetweenLooks) {
        int arrived = 0;
        MPI_Test(&request, &arrived, MPI_STATUS_IGNORE);
        if (arrived) return theirs == digest;
        std::this_thread::sleep_for(std::chrono::nanoseconds(kBetweenLooks));
    }
    return false;  // the process ends, and the request with it
}

// Whoever has lost a rank ends behind it: a launcher ends with the first one's exit code, which is
// to be that of the error and not of the loss.
struct Lingering {
    explicit Lingering(const Error& error)
        : lost(launched_as_rank() && error.trouble() == Trouble::rank_lost) {}
    Lingering(const Lingering&) = delete;
    Lingering& operator=(const Lingering&) = delete;
    ~Lingering() {
        constexpr std::chrono::seconds kTime{1};
        if (lost) std::this_thread::sleep_for(kTime);
    }
    const bool lost;
};

bool may_be_alike(const Error& error) {
    return error.trouble() == Trouble::usage || error.trouble() == Trouble::does_not_fit;
}

}  // namespace

void say_once(const Error& error, const std::function<void()>& say,
              const std::function<bool()>& hurried) {
    const bool first = launched_rank() == 0;
    if (!launched_as_rank() || first || !may_be_alike(error)) say();
    const Lingering lingering(error);
    if (!launched_as_rank() || (!first && !may_be_alike(error))) return;
    // MPI may keep this rank: others may never come to its start, or be lost.
    if (first) on_stuck([](const Error& said) { std::_Exit(said.exit_code()); });
    Watchdog watchdog([&](Nanos stuck) {
        const bool enough = stuck > 2 * (hurried() ? kHurry : kFirstRankSpeaks);
        return enough ? std::optional(error) : std::nullopt;
    });
    watchdog.enter();
    bool said = first;
    if (others_are_there()) {
        const OneCall guard(one_call);
        if (first) tell_others(digest_of(error));
        said = first || first_rank_said(digest_of(error), hurried);
    }
    watchdog.leave();
    if (!said) say();
}

std::unique_ptr<Communicator> make_mpi(Executor& executor, const CommOptions& options) {
    FERRY_CHECK(options.message_bytes > 0 && options.message_bytes <= kGiB);
    initialise(options.timeout_seconds);
    auto mpi = std::make_unique<Mpi>(executor, options);
    check_world(*mpi);
    Wire* wire = mpi.get();
    std::unique_ptr<Transport> transport = std::move(mpi);
    if (const auto network = EmulatedNetwork::asked_for()) {
        network->require_whole_hosts(transport->place().size);
        if (transport->place().rank == 0)
            log_info((network->ranks_per_host == 1 ? "a network is emulated, every rank a host: "
                                                   : "a network is emulated: ") +
                     network->text());
        transport = std::make_unique<Throttled>(std::move(transport), *network,
                                                [&executor] { return executor.now(); });
    }
    return std::make_unique<CommThread>(executor, options, std::move(transport),
                                        CommThread::Sources{.wire = wire});
}

}  // namespace ferry::comm

#endif
