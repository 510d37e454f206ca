// Preloaded into the ranks by ranks_ended_test.py: one of them dies, as if by the kernel's hand, at
// the message that the test chose. Messages are those of the ranks' operations and of their groups'
// (src/comm/mpi.cc), counted from 1.
//   FERRY_TEST_MORTAL=1       the rank that is meant
//   FERRY_TEST_MESSAGES=FILE  keeps the bytes of each of its messages, a line each
//   FERRY_TEST_DIES_AT=17     it is killed instead of sending that one; 0: where the ranks meet
//   FERRY_TEST_LATE_AT=17     it sends that one late, by FERRY_TEST_LATE_SECONDS
#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kNewsTag = 2;

bool is_mortal() {
    const char* mortal = std::getenv("FERRY_TEST_MORTAL");
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    return mortal && rank && std::strcmp(mortal, rank) == 0;
}

long number_in(const char* name) {
    const char* text = std::getenv(name);
    return text ? std::strtol(text, nullptr, 10) : -1;
}

void die_at(long message) {
    if (number_in("FERRY_TEST_DIES_AT") == message && is_mortal()) std::raise(SIGKILL);
}

void be_late_at(long message) {
    if (number_in("FERRY_TEST_LATE_AT") == message && is_mortal())
        sleep(static_cast<unsigned>(number_in("FERRY_TEST_LATE_SECONDS")));
}

void keep(int bytes) {
    const char* name = std::getenv("FERRY_TEST_MESSAGES");
    std::FILE* file = name && is_mortal() ? std::fopen(name, "a") : nullptr;
    if (!file) return;
    std::fprintf(file, "%d\n", bytes);
    std::fclose(file);
}

}  // namespace

extern "C" {

int MPI_Isend(const void* from, int count, MPI_Datatype type, int to, int tag, MPI_Comm ranks,
              MPI_Request* request) {
    static long sent = 0;  // one call at a time, by whichever comm thread
    if (tag != kNewsTag) {
        die_at(++sent);
        be_late_at(sent);
        keep(count);
    }
    return PMPI_Isend(from, count, type, to, tag, ranks, request);
}

int MPI_Iallgather(const void* from, int sent, MPI_Datatype sent_type, void* to, int received,
                   MPI_Datatype received_type, MPI_Comm ranks, MPI_Request* request) {
    die_at(0);
    return PMPI_Iallgather(from, sent, sent_type, to, received, received_type, ranks, request);
}

}  // extern "C"
