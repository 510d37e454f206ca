// Layers larger than their memory, in an order that nobody knows beforehand. There are eight of
// 8 MiB, three of them in buffers and the others on disk.
//   leases DIRECTORY
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "ferry/aio.h"
#include "ferry/lease.h"
#include "ferry/streams.h"

using namespace ferry;
int main(int argc, char** argv) try {
    hold_standard_streams();
    constexpr int64_t kBytes = 8 * kMiB;
    constexpr uint32_t kLayers = 8, kBuffers = 3, kVisits = 40;
    const std::unique_ptr<std::byte, decltype(&std::free)> memory(
        static_cast<std::byte*>(std::aligned_alloc(4096, kBuffers * kBytes)), &std::free);
    auto executor = make_thread_executor();
    auto volume = aio::Volume::open(
        {.paths = {{.path = argc > 1 ? argv[1] : "."}},
         .classes = {{.name = "layers", .slot_bytes = kBytes, .slots = kLayers + kBuffers}}},
        *executor);
    const swap::LeasedObject layer{.home = swap::Home::nvme, .bytes = kBytes, .slot_class = 0};
    auto store =
        swap::LeasedStore::make({.objects = std::vector<swap::LeasedObject>(kLayers, layer),
                                 .buffers = {memory.get(), kBuffers * kBytes}},
                                *executor, volume.get());
    for (uint32_t id = 0; id < kLayers; ++id) {
        const swap::Lease lease = store->acquire(id, swap::Access::overwrite);
        std::ranges::fill(lease.bytes(), std::byte{0});
    }
    std::mt19937 random(1);
    uint8_t visits[kLayers] = {};
    for (uint32_t i = 0, next = 0; i < kVisits; ++i) {
        const uint32_t id = next;
        next = random() % kLayers;
        store->prefetch(next);  // read while this one is worked on
        const swap::Lease lease = store->acquire(id, swap::Access::write);
        for (std::byte& byte : lease.bytes())
            byte = static_cast<std::byte>(static_cast<uint8_t>(byte) + 1);
        ++visits[id];
    }
    store->flush();
    int64_t wrong = 0;
    for (uint32_t id = 0; id < kLayers; ++id) {
        const swap::Lease lease = store->acquire(id, swap::Access::read);
        wrong += kBytes - std::ranges::count(lease.bytes(), static_cast<std::byte>(visits[id]));
    }
    const swap::LeaseReport report = store->report();
    printf("%d leases, %d of them without a wait; %d layers read, %d written\n",
           static_cast<int>(report.acquired), static_cast<int>(report.hits),
           static_cast<int>(report.reads), static_cast<int>(report.writes));
    printf("%s\n", wrong == 0 ? "every layer is what it was made" : "layers are wrong");
    return wrong == 0 ? 0 : 4;
} catch (const Error& error) {
    fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
}
