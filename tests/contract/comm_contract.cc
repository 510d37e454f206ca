// The contract of a communicator, for every kind of ranks.
#include <algorithm>
#include <numeric>
#include <optional>
#include <thread>

#include "comm_fixture.h"

namespace ferry::comm {
namespace {

class CommContract : public testing::TestWithParam<RanksKind> {
protected:
    void on(const RankTest& test, CommOptions options = {.timeout_seconds = 60}) {
        on_ranks(GetParam(), options, test);
    }
};

using Bytes = std::vector<uint8_t>;

// The bytes that rank `from` sends to rank `to` in operation `op`, different for each of them.
Bytes message(int from, int to, int op, size_t bytes) {
    Bytes data(bytes);
    uint32_t state = static_cast<uint32_t>(from * 7919 + to * 104729 + op * 1299709 + 1);
    for (uint8_t& byte : data) {
        state = state * 1664525 + 1013904223;
        byte = static_cast<uint8_t>(state >> 24);
    }
    return data;
}
constexpr int kAll = 1000;  // as `to`: the same for every rank

Bytes& operator+=(Bytes& a, const Bytes& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}
Bytes from_all(const Rank& rank, int to, int op, size_t bytes) {
    Bytes all;
    for (int from = 0; from < rank.size(); ++from) all += message(from, to, op, bytes);
    return all;
}
Bytes to_all(const Rank& rank, int op, size_t bytes) {
    Bytes all;
    for (int to = 0; to < rank.size(); ++to) all += message(rank.rank(), to, op, bytes);
    return all;
}

// An operation with its memory, enqueued; then what must have arrived.
class Gathered {
public:
    Gathered(Rank& rank, int op, std::vector<size_t> sizes) : rank_(rank), op_(op), sizes_(sizes) {
        std::vector<Gather> pieces;
        for (size_t i = 0; i < sizes_.size(); ++i) {
            const Bytes mine = message(rank.rank(), kAll, op + static_cast<int>(i), sizes_[i]);
            Bytes all(sizes_[i] * static_cast<size_t>(rank.size()), 0xEE);
            const bool in_place = (op + static_cast<int>(i)) % 2 == 0;
            const size_t own = sizes_[i] * static_cast<size_t>(rank.rank());
            if (in_place) std::ranges::copy(mine, all.begin() + static_cast<std::ptrdiff_t>(own));
            all_.push_back(rank.put(all));
            const std::byte* place = in_place ? all_.back() + own : rank.put(mine);
            pieces.push_back({place, all_.back(), static_cast<int64_t>(sizes_[i])});
        }
        rank.comm.all_gather(pieces, {.of = "weights", .layer = op, .step = 1});
    }
    void check() {
        for (size_t i = 0; i < sizes_.size(); ++i) {
            const Bytes expected = from_all(rank_, kAll, op_ + static_cast<int>(i), sizes_[i]);
            EXPECT_EQ(rank_.get(all_[i], expected.size()), expected) << "operation " << op_;
        }
    }

private:
    Rank& rank_;
    int op_;
    std::vector<size_t> sizes_;
    std::vector<std::byte*> all_{};
};

class Exchanged {
public:
    Exchanged(Rank& rank, int op, std::vector<size_t> sizes) : rank_(rank), op_(op), sizes_(sizes) {
        std::vector<Exchange> pieces;
        for (size_t i = 0; i < sizes_.size(); ++i) {
            const Bytes to = to_all(rank, op + static_cast<int>(i), sizes_[i]);
            from_.push_back(rank.put(Bytes(to.size(), 0xEE)));
            pieces.push_back({rank.put(to), from_.back(), static_cast<int64_t>(sizes_[i])});
        }
        rank.comm.exchange(pieces, {.of = "gradient", .layer = op, .step = 1});
    }
    void check() {
        for (size_t i = 0; i < sizes_.size(); ++i) {
            const Bytes expected =
                from_all(rank_, rank_.rank(), op_ + static_cast<int>(i), sizes_[i]);
            EXPECT_EQ(rank_.get(from_[i], expected.size()), expected) << "operation " << op_;
        }
    }

private:
    Rank& rank_;
    int op_;
    std::vector<size_t> sizes_;
    std::vector<std::byte*> from_{};
};

TEST_P(CommContract, ARankKnowsItsPlace) {
    on([](Rank& rank) {
        EXPECT_GE(rank.rank(), 0);
        EXPECT_LT(rank.rank(), rank.size());
        EXPECT_LT(rank.comm.local_rank(), rank.comm.local_size());
        EXPECT_EQ(rank.comm.local_size(), rank.size());  // all of these tests run on one machine
        EXPECT_EQ(rank.comm.local_rank(), rank.rank());
        EXPECT_EQ(rank.comm.host(), 0);
        if (const char* launched = std::getenv("OMPI_COMM_WORLD_SIZE"); launched != nullptr) {
            EXPECT_EQ(rank.size(), std::stoi(launched));
            EXPECT_EQ(rank.rank(), std::stoi(std::getenv("OMPI_COMM_WORLD_RANK")));
        }
    });
}

TEST_P(CommContract, GathersAreExactAtAnySize) {
    on([](Rank& rank) {
        for (const size_t bytes : {1, 2, 3, 255, 4096, 4097, 65'535, 1'000'003}) {
            rank.forget_memory();
            Gathered in_place(rank, 0, {bytes}), apart(rank, 1, {bytes});
            rank.finish();
            in_place.check();
            apart.check();
        }
        rank.comm.check();
    });
}

TEST_P(CommContract, ExchangesAreExactAtAnySize) {
    on([](Rank& rank) {
        for (const size_t bytes : {1, 2, 3, 255, 4096, 4097, 65'535, 1'000'003}) {
            rank.forget_memory();
            Exchanged exchanged(rank, 3, {bytes});
            rank.finish();
            exchanged.check();
        }
        rank.comm.check();
    });
}

TEST_P(CommContract, NothingIsMovedByNothing) {
    on([](Rank& rank) {
        rank.comm.all_gather({}, {.of = "weights"});
        rank.comm.exchange({}, {.of = "gradient"});
        Gathered gathered(rank, 1, {0, 5, 0});
        Exchanged exchanged(rank, 2, {0, 0, 7});
        rank.finish();
        gathered.check();
        exchanged.check();
        rank.comm.check();
    });
}

TEST_P(CommContract, SeveralPiecesAreOneOperation) {
    on([](Rank& rank) {
        static_assert(Communicator::kTransfers == 8);
        Gathered gathered(rank, 10, {1, 20'000, 3, 0, 77'777, 2, 4096, 5});
        Exchanged exchanged(rank, 20, {5, 4096, 2, 77'777, 0, 3, 20'000, 1});
        rank.finish();
        gathered.check();
        exchanged.check();
        rank.comm.check();
    });
}

// More than are started at once, of both kinds and all sizes, each with its signal in order.
TEST_P(CommContract, ManyInFlightEndInOrder) {
    on([](Rank& rank) {
        constexpr int kOperations = 60;
        std::vector<Gathered> gathered;
        std::vector<Exchanged> exchanged;
        std::vector<std::atomic<uint64_t>> ended(kOperations);
        gathered.reserve(kOperations);
        exchanged.reserve(kOperations);
        for (int op = 0; op < kOperations; ++op) {
            const auto bytes = static_cast<size_t>(op * op * 11 % 9001);
            if (op % 3 == 0) {
                exchanged.emplace_back(rank, op, std::vector{bytes, bytes / 2});
            } else {
                gathered.emplace_back(rank, op, std::vector{bytes});
            }
            rank.comm.signal(ended[static_cast<size_t>(op)]);
        }
        for (int op = kOperations - 1; op >= 0; --op) {
            rank.wait_for(ended[static_cast<size_t>(op)], 1);  // the last one first: all have ended
            EXPECT_EQ(ended[static_cast<size_t>(op)], 1u);
        }
        for (Gathered& each : gathered) each.check();
        for (Exchanged& each : exchanged) each.check();
        rank.comm.check();
    });
}

TEST_P(CommContract, ACounterCountsEverySignal) {
    on([](Rank& rank) {
        std::atomic<uint64_t> counter = 0;
        for (uint64_t i = 1; i <= 20; ++i) {
            rank.comm.signal(counter);
            rank.wait_for(counter, i);
            EXPECT_EQ(counter, i);
        }
    });
}

// Some ranks come late, each in turn.
TEST_P(CommContract, ALateRankIsWaitedFor) {
    on([](Rank& rank) {
        for (int op = 0; op < 2 * rank.size(); ++op) {
            if (op % rank.size() == rank.rank()) rank.sleep(0.02);
            Exchanged exchanged(rank, op, {1000});
            Gathered gathered(rank, op, {100'000});
            rank.finish();
            exchanged.check();
            gathered.check();
            rank.forget_memory();
        }
        rank.comm.check();
    });
}

TEST_P(CommContract, PiecesLargerThanAMessageTravelInSeveral) {
    on(
        [](Rank& rank) {
            for (const size_t bytes : {999, 1000, 1001, 2000, 54'321}) {
                Gathered gathered(rank, 1, {bytes, 3, bytes + 1});
                Exchanged exchanged(rank, 2, {bytes, 1});
                rank.finish();
                gathered.check();
                exchanged.check();
            }
            rank.comm.check();
        },
        {.timeout_seconds = 60, .message_bytes = 1000});
}

TEST_P(CommContract, AgreesOnHostMemory) {
    on([](Rank& rank) {
        for (const size_t bytes : {0, 1, 8, 65'536}) {
            const Bytes mine = message(rank.rank(), kAll, 5, bytes);
            Bytes all(bytes * static_cast<size_t>(rank.size()));
            rank.agree(mine, all);
            EXPECT_EQ(all, from_all(rank, kAll, 5, bytes));
        }
    });
}

// Between every two neighbours of a ring, in groups of their own; both ways at the same time.
TEST_P(CommContract, APassGoesFromOneRankOfTwoToTheOther) {
    on([](Rank& rank) {
        if (rank.size() % 2 != 0) return;
        const std::vector<int> pair = run_of(rank.rank(), 2);
        const auto group = rank.comm.group(pair);
        Rank within = rank.in(*group, 1);
        const int me = rank.rank() % 2;
        for (const size_t bytes : {1, 255, 4097, 1'000'003}) {
            rank.forget_memory();
            std::vector<std::byte*> places;
            for (int op = 0; op < 6; ++op) {
                const bool sends = (op / 2 + me) % 2 == 0;
                const Bytes mine = message(rank.rank(), kAll, op, bytes);
                places.push_back(rank.put(sends ? mine : Bytes(bytes, 0xEE)));
                const auto size = static_cast<int64_t>(bytes);
                group->pass(sends ? Pass{.from = places.back(), .bytes = size}
                                  : Pass{.to = places.back(), .bytes = size},
                            {.of = "block input", .layer = op, .step = 1});
            }
            within.finish();
            for (int op = 0; op < 6; ++op) {
                const bool sends = (op / 2 + me) % 2 == 0;
                const int from = sends ? rank.rank() : pair[static_cast<size_t>(1 - me)];
                EXPECT_EQ(rank.get(places[static_cast<size_t>(op)], bytes),
                          message(from, kAll, op, bytes));
            }
        }
        group->check();
    });
}

TEST_P(CommContract, SaysWhichRankDiffersInWhat) {
    on([](Rank& rank) {
        const std::vector<Fact> same{{"binary", "ferry 1"}, {"numerics", std::string(500, 'x')}};
        rank.require_same(same);
        rank.require_same({});
        rank.require_same({{"freeze", std::string(3 * Communicator::kAgreedBytes + 7, 'f')}});
        const bool last = rank.rank() == rank.size() - 1;
        const std::string record = std::string(300, 'x') + (last ? "bf16" : "fp32") + ", tile 64";
        const std::vector<Fact> facts{{"binary", "ferry 1"}, {"numerics", record}};
        if (rank.size() == 1) return rank.require_same(facts);
        try {
            rank.require_same(facts);
            ADD_FAILURE() << "nothing was found";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            const std::string who = "rank " + std::to_string(rank.size() - 1);
            EXPECT_EQ(error.problem().where, "numerics on " + who);
            EXPECT_NE(error.problem().measured.find("fp32, tile 64"), std::string::npos);
            EXPECT_NE(error.problem().measured.find(who + " \"...xxxx"), std::string::npos)
                << error.what();
        }
        rank.comm.check();  // the ranks themselves are well
    });
}

TEST_P(CommContract, FactsMayLackOnARank) {
    on([](Rank& rank) {
        std::vector<Fact> facts{{"binary", "ferry 1"}};
        if (rank.rank() == 0) facts.push_back({"plan", "7"});
        if (rank.size() == 1) return rank.require_same(facts);
        try {
            rank.require_same(facts);
            ADD_FAILURE() << "nothing was found";
        } catch (const Error& error) {
            std::string where;
            for (int other = 1; other < rank.size(); ++other)
                where += (other > 1 ? "; plan on rank " : "plan on rank ") + std::to_string(other);
            EXPECT_EQ(error.problem().where, where);
        }
    });
}

// Numbers by which a size divides the ranks.
std::vector<int> divisors(int ranks) {
    std::vector<int> found;
    for (int size = 1; size <= ranks; ++size)
        if (ranks % size == 0) found.push_back(size);
    return found;
}

TEST(CommGroups, AreRunsOfNeighboursOrAcrossThem) {
    EXPECT_EQ(run_of(0, 1), std::vector{0});
    EXPECT_EQ(run_of(5, 3), (std::vector{3, 4, 5}));
    EXPECT_EQ(across_runs(5, 3, 9), (std::vector{2, 5, 8}));
    EXPECT_EQ(across_runs(3, 1, 4), (std::vector{0, 1, 2, 3}));
    for (const int ranks : {1, 4, 6, 12}) {
        for (const int size : divisors(ranks)) {
            std::vector<int> seen(static_cast<size_t>(ranks));
            for (int rank = 0; rank < ranks; ++rank) {
                const std::vector<int> run = run_of(rank, size),
                                       across = across_runs(rank, size, ranks);
                EXPECT_EQ(std::ssize(run), size);
                EXPECT_EQ(std::ssize(across), ranks / size);
                EXPECT_EQ(std::ranges::count(run, rank), 1);
                EXPECT_EQ(std::ranges::count(across, rank), 1);
                for (const int other : run) seen[static_cast<size_t>(other)] += 1;
            }
            for (const int count : seen) EXPECT_EQ(count, size);
        }
    }
}

TEST_P(CommContract, AGroupHasPlacesOfItsOwn) {
    on([](Rank& rank) {
        for (const int size : divisors(rank.size())) {
            const std::vector<int> run = run_of(rank.rank(), size),
                                   across = across_runs(rank.rank(), size, rank.size());
            const auto neighbours = rank.comm.group(run), others = rank.comm.group(across);
            EXPECT_EQ(neighbours->kind(), rank.comm.kind());
            EXPECT_EQ(neighbours->rank(), rank.rank() % size);
            EXPECT_EQ(neighbours->size(), size);
            EXPECT_EQ(others->rank(), rank.rank() / size);
            EXPECT_EQ(others->size(), rank.size() / size);
            for (const auto* group : {neighbours.get(), others.get()}) {
                EXPECT_EQ(group->local_rank(),
                          group->rank());  // all of these ranks share a machine
                EXPECT_EQ(group->local_size(), group->size());
                EXPECT_EQ(group->host(), 0);
            }
        }
    });
}

// Each group's messages and everybody's, all under way together, are told apart.
TEST_P(CommContract, GroupsSendBesideEverybody) {
    on([](Rank& rank) {
        // Of simulated ranks the one thread waits in one communicator at a time.
        if (rank.executor().simulated() && rank.size() > 1) return;
        for (const int size : divisors(rank.size())) {
            const std::vector<int> run = run_of(rank.rank(), size),
                                   across = across_runs(rank.rank(), size, rank.size());
            const auto neighbours = rank.comm.group(run), others = rank.comm.group(across);
            for (const size_t bytes : {0, 1, 4097, 100'003}) {
                Rank in_run = rank.in(*neighbours, 1), in_across = rank.in(*others, 2);
                rank.forget_memory();
                const int of_run = 100 + 20 * run.front(), of_across = 1000 + 20 * across.front();
                Exchanged all(rank, 1, {bytes, 3});
                Exchanged near(in_run, of_run, {bytes, 5});
                Gathered far(in_across, of_across, {bytes});
                Gathered weights(rank, 5, {bytes});
                Gathered near_again(in_run, of_run + 5, {bytes + 1});
                Exchanged far_again(in_across, of_across + 5, {bytes + 7});
                rank.finish();
                in_across.finish();
                in_run.finish();
                all.check();
                weights.check();
                near.check();
                near_again.check();
                far.check();
                far_again.check();
                const Bytes mine = message(in_run.rank(), kAll, of_run + 9, 8);
                Bytes agreed(8 * static_cast<size_t>(in_run.size()));
                in_run.agree(mine, agreed);
                EXPECT_EQ(agreed, from_all(in_run, kAll, of_run + 9, 8));
            }
            neighbours->check();
            others->check();
        }
        rank.comm.check();
    });
}

// A group's calls have no order beside everybody's: here each rank has another one.
TEST_P(CommContract, AGroupsOrderIsItsOwn) {
    on([](Rank& rank) {
        if (rank.executor().simulated()) return;  // likewise
        const std::vector<int> all = across_runs(0, 1, rank.size());
        const auto group = rank.comm.group(all);
        for (int op = 0; op < 12; ++op) {
            Rank in_group = rank.in(*group, 1);
            rank.forget_memory();
            const bool group_first = (op + rank.rank()) % 2 == 0;
            std::optional<Exchanged> early, late;
            if (group_first) early.emplace(in_group, 100 + op, std::vector<size_t>{30'000});
            Gathered gathered(rank, op, {20'000});
            if (group_first) in_group.finish();
            rank.finish();
            if (!group_first) late.emplace(in_group, 100 + op, std::vector<size_t>{30'000});
            if (!group_first) in_group.finish();
            gathered.check();
            (group_first ? early : late)->check();
        }
        group->check();
    });
}

// Another thread's calls have an order of their own, and wake an executor of their own.
TEST_P(CommContract, BesideItAnotherThreadGathersHostMemory) {
    on([](Rank& rank) {
        const auto executor = make_thread_executor();
        const auto beside = rank.comm.beside(*executor);
        if (!beside) return;  // one rank alone, or in virtual time
        const auto size = static_cast<size_t>(rank.size());
        ASSERT_EQ(beside->rank(), rank.rank());
        ASSERT_EQ(beside->size(), rank.size());
        std::thread other([&] {
            constexpr size_t kBytes = 100;
            for (int op = 0; op < 40; ++op) {
                const auto said_by = [op](int one) { return static_cast<std::byte>(7 * op + one); };
                const std::vector<std::byte> mine(kBytes, said_by(rank.rank()));
                std::vector<std::byte> all(size * kBytes);
                agree(*beside, *executor, mine, all, {.of = "state", .step = op});
                for (int one = 0; one < rank.size(); ++one)
                    EXPECT_EQ(all[static_cast<size_t>(one) * kBytes + kBytes - 1], said_by(one));
            }
        });
        for (int op = 0; op < 12; ++op) {
            rank.forget_memory();
            Gathered gathered(rank, op, {20'000});
            rank.finish();
            gathered.check();
        }
        other.join();
        beside->check();
    });
}

// To each distance of the circle, of sizes that differ from rank to rank and may be nothing.
TEST_P(CommContract, ShiftsGoRoundTheCircle) {
    on([](Rank& rank) {
        const auto bytes_of = [](int from, size_t size) {
            return from % 3 == 1 ? size_t{0} : size + static_cast<size_t>(from);
        };
        for (const size_t size : {0, 1, 4097, 300'001}) {
            for (int by = 1; by < rank.size(); ++by) {
                rank.forget_memory();
                const int before = (rank.rank() + rank.size() - by) % rank.size();
                const Bytes mine = message(rank.rank(), by, 5, bytes_of(rank.rank(), size));
                const Bytes expected = message(before, by, 5, bytes_of(before, size));
                std::byte* from = rank.put(Bytes(expected.size(), 0xEE));
                Gathered gathered(rank, 6, {300});
                rank.comm.shift({.to = rank.put(mine),
                                 .from = from,
                                 .to_bytes = std::ssize(mine),
                                 .from_bytes = std::ssize(expected),
                                 .by = by},
                                {.of = "keys", .layer = by, .step = 1});
                Exchanged exchanged(rank, 7, {500});
                rank.finish();
                gathered.check();
                EXPECT_EQ(rank.get(from, expected.size()), expected) << "by " << by;
                exchanged.check();
            }
        }
        rank.comm.check();
    });
}

// Within a job of the compute stream, while everybody's operations go on. What the stream does
// before and after is its order too: copies bring what is sent and take what came.
TEST_P(CommContract, AKernelExchangesInItsMidst) {
    on([](Rank& rank) {
        if (rank.executor().simulated()) return;
        if (rank.device().kind() == DeviceKind::cuda && rank.comm.kind() != "nccl") return;
        for (const int size : divisors(rank.size())) {
            const auto exchange = make_stream_exchange(rank.device(), rank.executor(),
                                                       rank.comm.group(run_of(rank.rank(), size)));
            EXPECT_EQ(exchange->rank(), rank.rank() % size);
            EXPECT_EQ(exchange->size(), size);
            for (const int64_t bytes : {0, 1, 5000, 400'000}) {
                // More rounds than a communicator has operations under way; an odd number, after
                // which each part is back where it was sent to.
                constexpr int kRounds = 21;
                struct Kernel {
                    StreamExchange& exchange;
                    std::byte *to, *from;
                    int64_t bytes;
                    int rounds = 0;
                    void run() {
                        for (; rounds < kRounds; ++rounds) {
                            exchange.exchange({to, from, bytes},
                                              {.of = "heads", .layer = rounds, .step = 1});
                            std::swap(to, from);  // what came goes on
                        }
                    }
                };
                Bytes sent, expected;
                for (int to = 0; to < size; ++to)
                    sent += message(rank.rank(), rank.rank() / size * size + to, 7,
                                    static_cast<size_t>(bytes));
                for (int from = 0; from < size; ++from)
                    expected += message(rank.rank() / size * size + from, rank.rank(), 7,
                                        static_cast<size_t>(bytes));
                rank.forget_memory();
                const auto all = std::ssize(sent);
                std::byte* given = rank.put(sent);
                std::byte* taken = rank.put(Bytes(sent.size(), 0xEE));
                Kernel kernel{*exchange, rank.put(Bytes(sent.size(), 0xEE)),
                              rank.put(Bytes(sent.size(), 0xEE)), bytes};
                Stream& compute = rank.device().stream(StreamKind::compute);
                Gathered before(rank, 1, {70'000});
                std::atomic<uint64_t> done = 0;
                std::byte *first = kernel.to, *last = kernel.from;
                if (all > 0) compute.copy(first, given, all);
                compute.launch(
                    {[](void* self, uint64_t) { static_cast<Kernel*>(self)->run(); }, &kernel});
                if (all > 0) compute.copy(taken, last, all);
                compute.signal(done);
                Gathered after(rank, 2, {70'000});
                rank.wait_for(done, 1);
                rank.finish();
                EXPECT_EQ(kernel.rounds, kRounds);
                EXPECT_EQ(rank.get(taken, sent.size()), expected);
                before.check();
                after.check();
            }
        }
        rank.comm.check();
    });
}

INSTANTIATE_TEST_SUITE_P(Here, CommContract,
                         testing::Values(RanksKind{"Solo", 1}, RanksKind{"Sim", 1},
                                         RanksKind{"Sim", 2}, RanksKind{"Sim", 3},
                                         RanksKind{"Sim", 4}, RanksKind{"Threads", 3},
                                         RanksKind{"Threads", 4}),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Launched, CommContract,
                         testing::Values(RanksKind{"Mpi"}
#ifdef FERRY_NCCL
                                         ,
                                         RanksKind{"Nccl"}, RanksKind{"NcclById"}
#endif
                                         ),
                         test_name);

}  // namespace
}  // namespace ferry::comm
