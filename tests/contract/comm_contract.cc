// The contract of a communicator, for every kind of ranks.
#include <algorithm>
#include <numeric>

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

INSTANTIATE_TEST_SUITE_P(Here, CommContract,
                         testing::Values(RanksKind{"Solo", 1}, RanksKind{"Sim", 1},
                                         RanksKind{"Sim", 2}, RanksKind{"Sim", 3},
                                         RanksKind{"Sim", 4}, RanksKind{"Threads", 3}),
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
