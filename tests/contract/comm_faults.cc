// A rank that ends, stalls or gives up in every kind of operation: the others name it.
#include <gmock/gmock.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "comm_fixture.h"
#include "tests/support/run_ranks.h"

namespace ferry::comm {
namespace {

using testing::HasSubstr;

constexpr int kStep = 4, kLayer = 3;  // where it happens
// "heads": within a group.
const std::vector<std::string> kOperations{"weights", "gradient", "outcome", "heads"};

std::string text_of(const std::string& operation) {
    const bool exchanges = operation == "gradient" || operation == "heads";
    return (exchanges ? "exchange of the " : "all-gather of the ") + operation + " of layer " +
           std::to_string(kLayer) + ", step " + std::to_string(kStep);
}

// One layer's worth of the operations of a step, up to and with the one given.
class Steps {
public:
    Steps(Rank& rank, std::string operation)
        : rank_(rank),
          group_(rank.comm.group(across_runs(0, 1, rank.size()))),
          in_group_(rank.in(*group_, 1)),
          operation_(std::move(operation)),
          part_(30'000),
          a_(rank.put(std::vector<uint8_t>(part_ * static_cast<size_t>(rank.size()), 1))),
          b_(rank.put(std::vector<uint8_t>(part_ * static_cast<size_t>(rank.size()), 2))),
          all_(8 * static_cast<size_t>(rank.size())) {}

    // `at_fault` is called before the operation in question.
    void run(const std::function<void()>& at_fault) {
        for (int64_t step = 1; step <= kStep + 1; ++step) {
            for (int64_t layer = 0; layer < 5; ++layer) {
                for (const std::string& operation : kOperations) {
                    const Topic topic{operation.c_str(), layer, step};
                    if (step == kStep && layer == kLayer && operation == operation_) at_fault();
                    call(operation, topic);
                    Rank& among = operation == "heads" ? in_group_ : rank_;
                    among.finish();
                    among.comm.check();
                }
            }
        }
    }

private:
    void call(const std::string& operation, Topic topic) {
        const auto bytes = static_cast<int64_t>(part_);
        if (operation == "weights") {
            const Gather gather{a_ + rank_.rank() * bytes, a_, bytes};
            rank_.comm.all_gather({&gather, 1}, topic);
        } else if (operation == "gradient") {
            const Exchange exchange{a_, b_, bytes};
            rank_.comm.exchange({&exchange, 1}, topic);
        } else if (operation == "heads") {
            const Exchange exchange{a_, b_, bytes};
            group_->exchange({&exchange, 1}, topic);
        } else {
            rank_.comm.all_gather_host({all_.data() + rank_.rank() * 8, all_.data(), 8}, topic);
        }
    }

    Rank& rank_;
    const std::unique_ptr<Communicator> group_;
    Rank in_group_;
    std::string operation_;
    size_t part_;
    std::byte *a_, *b_;
    std::vector<std::byte> all_;
};

// The fault of rank 1, or of the ranks from there to `last`, at the operation in question.
struct Fault {
    const char* name;
    double timeout_seconds;
    std::function<void(Rank&)> act;
    const char* how;  // the others say of it; %s: the operation
    int last = 1;
};

std::string filled(const std::string& text, const std::string& operation) {
    const size_t at = text.find("%s");
    return at == std::string::npos ? text : text.substr(0, at) + operation + text.substr(at + 2);
}

// Runs the steps; what this rank's communicator says in the end.
std::string outcome(Rank& rank, const std::string& operation, const Fault& fault) {
    try {
        Steps(rank, operation).run([&] {
            if (rank.rank() >= 1 && rank.rank() <= fault.last) fault.act(rank);
        });
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::rank_lost);
        return error.what();
    }
    return "nothing went wrong";
}

struct Ended {};

const std::vector<Fault>& simulated_faults() {
    static const std::vector<Fault> kFaults{
        {"Ends", 60, [](Rank&) { throw Ended{}; }, "lost rank 1: its process has ended"},
        {"Stalls", 0.5, [](Rank& rank) { rank.sleep(1.5); },
         "lost rank 1: took no part in the %s in time"},
        {"GivesUp", 60,
         [](Rank& rank) {
             rank.comm.abandon("the disk is full");
             throw Ended{};
         },
         "lost rank 1: it ended with an error: the disk is full"},
    };
    return kFaults;
}

struct Case {
    RanksKind ranks;
    std::string operation;
    Fault fault;
    friend void PrintTo(const Case& c, std::ostream* out) {
        *out << c.ranks.name << c.ranks.size << " " << c.fault.name << " " << c.operation;
    }
};

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const RanksKind& ranks :
         {RanksKind{"Sim", 2}, RanksKind{"Sim", 4}, RanksKind{"Threads", 3}})
        for (const std::string& operation : kOperations)
            for (const Fault& fault : simulated_faults()) all.push_back({ranks, operation, fault});
    return all;
}

class CommFaults : public testing::TestWithParam<Case> {};

TEST_P(CommFaults, TheOthersNameTheRank) {
    const auto& [ranks, operation, fault] = GetParam();
    std::atomic<int> named = 0;
    try {
        on_ranks(ranks, {.timeout_seconds = fault.timeout_seconds}, [&](Rank& rank) {
            const std::string said = outcome(rank, operation, fault);
            if (rank.rank() == 1) {
                EXPECT_THAT(said, HasSubstr("given this rank (1) up"));
                return;
            }
            EXPECT_THAT(said, HasSubstr(filled(fault.how, text_of(operation))));
            EXPECT_THAT(said, HasSubstr("where:    " + text_of(operation)));
            ++named;
        });
        EXPECT_STREQ(fault.name, "Stalls");
    } catch (const Ended&) {
        EXPECT_STRNE(fault.name, "Stalls");
    }
    EXPECT_EQ(named, ranks.size - 1);
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
    const Case& c = info.param;
    return c.ranks.name + std::to_string(c.ranks.size) + c.fault.name + "In" + c.operation;
}
INSTANTIATE_TEST_SUITE_P(Here, CommFaults, testing::ValuesIn(cases()), case_name);

// Run by tests/contract/comm_faults_test.py on every rank that mpirun starts: FERRY_FAULT is
// "how operation". Says what it came to on standard output.
TEST(DISABLED_LaunchedFault, OfRankOne) {
    std::signal(SIGTERM, SIG_IGN);  // mpirun sends it when a rank has ended; ferry ends in order
    const char* asked = std::getenv("FERRY_FAULT");
    ASSERT_NE(asked, nullptr);
    const std::string text = asked, how = text.substr(0, text.find(' ')),
                      operation = text.substr(text.find(' ') + 1);
    const char* kind = std::getenv("FERRY_FAULT_RANKS");
    const std::vector<Fault> faults{
        {"kill", 60, [](Rank&) { std::raise(SIGKILL); }, ""},
        {"stall", 1, [](Rank& rank) { rank.sleep(2.5); }, ""},
        {"stall-both", 1, [](Rank& rank) { rank.sleep(2.5); }, "", 2},
        {"abandon", 60,
         [](Rank& rank) {
             rank.comm.abandon("the disk is full");
             std::printf("rank 1 gave up\n");
             std::fflush(stdout);
             std::_Exit(4);
         },
         ""},
    };
    ranks_launched();  // MPI's start has a timeout of its own
    for (const Fault& fault : faults) {
        if (how != fault.name) continue;
        std::string said;
        on_ranks({kind != nullptr ? kind : "Mpi"}, {.timeout_seconds = fault.timeout_seconds},
                 [&](Rank& rank) {
                     said = "rank " + std::to_string(rank.rank()) + ": " +
                            outcome(rank, operation, fault);
                     std::printf("%s\n", said.c_str());
                     std::fflush(stdout);
                 });
        std::_Exit(6);  // as ferry does: MPI's own end would wait for the lost rank
    }
    FAIL() << "no such fault: " << how;
}

}  // namespace
}  // namespace ferry::comm
