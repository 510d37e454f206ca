// Measures the overhead of a call through the C ABI: nanoseconds a call.
//   bench_capi DIRECTORY
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "ferry/ferry.h"

namespace {

void must(ferry_status status) {
    if (status == FERRY_OK || status == FERRY_AGAIN) return;
    fprintf(stderr, "%s\n", ferry_last_error());
    std::exit(status);
}

// The best of several rounds: whatever else the machine does only adds.
template <class Call>
void report(const char* name, const Call& call) {
    constexpr int kRounds = 7, kCalls = 100'000;
    double best = 1e9;
    for (int round = 0; round < kRounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kCalls; ++i) call();
        const std::chrono::duration<double, std::nano> took =
            std::chrono::steady_clock::now() - start;
        if (took.count() / kCalls < best) best = took.count() / kCalls;
    }
    printf("%-44s %7.0f ns\n", name, best);
}

template <class T>
T sized() {
    T made;
    FERRY_INIT(made);
    return made;
}

void of_store(const char* directory) {
    ferry_store* store = nullptr;
    auto path = sized<ferry_path>();
    auto options = sized<ferry_store_options>();
    path.path = directory;
    options.paths = &path;
    options.path_count = 1;
    options.host_bytes = 1 << 20;
    uint32_t object = 0;
    uint64_t lease = 0;
    void* bytes = nullptr;
    must(ferry_store_create(&options, &store));
    must(ferry_store_register(store, 4096, FERRY_HOST, &object));
    must(ferry_store_register(store, 4096, FERRY_NVME, &object));
    must(ferry_store_open(store));
    must(ferry_store_acquire(store, 1, FERRY_OVERWRITE, &lease, &bytes));
    must(ferry_store_release(store, lease));
    must(ferry_store_flush(store));
    for (object = 0; object < 2; ++object)
        report(
            object ? "acquire and release, on NVMe, in a buffer" : "acquire and release, in memory",
            [&] {
                must(ferry_store_acquire(store, object, FERRY_READ, &lease, &bytes));
                must(ferry_store_release(store, lease));
            });
    object = 1;
    report("prefetch of what is there", [&] { must(ferry_store_prefetch(store, &object, 1)); });
    must(ferry_store_destroy(store));
}

void of_aio(const char* directory) {
    ferry_aio* aio = nullptr;
    auto path = sized<ferry_path>();
    auto one = sized<ferry_slot_class>();
    auto options = sized<ferry_aio_options>();
    auto completion = sized<ferry_completion>();
    path.path = directory;
    one.slot_bytes = 4096, one.slots = 1;
    options.paths = &path, options.path_count = 1;
    options.classes = &one, options.class_count = 1;
    must(ferry_aio_open(&options, &aio));
    report("poll of nothing", [&] { must(ferry_aio_poll(aio, &completion)); });
    must(ferry_aio_close(aio));
}

void of_optim() {
    auto hyper = sized<ferry_hyper>();
    auto update = sized<ferry_update>();
    float arrays[4][16] = {};
    must(ferry_hyper_default(FERRY_ADAMW, &hyper));
    update.count = 16;
    update.gradient = arrays[0];
    update.p = arrays[1], update.m = arrays[2], update.v = arrays[3];
    report("AdamW of 16 elements, on this thread",
           [&] { must(ferry_optim_update(nullptr, &hyper, 10, 1, &update)); });
    report("a refused call, with its text", [&] {
        if (ferry_team_destroy(nullptr) != FERRY_BAD_HANDLE) std::abort();
    });
}

}  // namespace

int main(int argc, char** argv) {
    const char* directory = argc > 1 ? argv[1] : ".";
    of_store(directory);
    of_aio(directory);
    of_optim();
    return 0;
}
