// ferry::aio alone: write a slot, read it back, check every byte.
//   minimal DIRECTORY
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ferry/aio.h"
#include "ferry/streams.h"

using namespace ferry;
int main(int argc, char** argv) try {
    hold_standard_streams();
    constexpr int64_t kBytes = 64 * kMiB;
    auto executor = make_thread_executor();
    auto volume =
        aio::Volume::open({.paths = {{.path = argc > 1 ? argv[1] : "."}},
                           .classes = {{.name = "example", .slot_bytes = kBytes, .slots = 1}}},
                          *executor);
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, kBytes));
    const std::span<std::byte> buffer(memory, kBytes);
    memset(memory, 42, kBytes);
    std::vector<uint64_t> sums(aio::pieces_of(kBytes));
    aio::seal(buffer, /*version=*/1, sums);
    const aio::SlotId slot = volume->allocate(0);
    for (const aio::Kind kind : {aio::Kind::write, aio::Kind::read}) {
        aio::Operation operation{.kind = kind, .slot = slot, .buffer = buffer};
        volume->submit(operation);
        while (!volume->poll()) executor->wait(kForever);
        if (operation.state != aio::State::done) throw aio::to_error(*volume, operation);
        const double seconds = (operation.finished_ns - operation.submitted_ns) * 1e-9;
        printf("%s: %.2f GB/s\n", kind == aio::Kind::read ? "read" : "write",
               kBytes / seconds / 1e9);
        if (kind == aio::Kind::write) memset(memory, 0, kBytes);
    }
    const int64_t bad = aio::verify(buffer, 1, sums);
    printf("%s\n", bad < 0 ? "every byte came back" : "bytes came back wrong");
    std::free(memory);
    return bad < 0 ? 0 : 4;
} catch (const Error& error) {
    fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
}
