// The rate of the codecs of what ranks exchange, of one thread and of several, beside a copy of the
// same values by as many.
//   bench_codecs [THREADS] [MILLION VALUES]
// Rates are of the memory that a pass reads and writes: values and codes, decode_add's sums twice.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "zero/codec.h"

namespace {

using namespace ferry::zero;
using ferry::CodecKind;

// The fastest of several: other work on the machine only slows. `body` gets a thread's number.
double seconds(int threads, const std::function<void(int)>& body) {
    double best = 1e9;
    for (int i = 0; i < 9; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        std::vector<std::jthread> all;
        for (int thread = 1; thread < threads; ++thread) all.emplace_back(body, thread);
        body(0);
        all.clear();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        best = std::min(best, took.count());
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    const int64_t millions = argc > 2 ? std::max(1LL, std::atoll(argv[2])) : 64;
    const int64_t each = millions * 1'000'000 / threads / 4096 * 4096;  // of a thread
    const auto count = static_cast<size_t>(each * threads);
    std::vector<float> values(count), sums(count);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; ++i) values[i] = i < 1 << 20 ? normal(random) : values[i % 997];
    const auto bytes = static_cast<double>(count) * 4;
    const double copy =
        2 * bytes / seconds(threads, [&](int thread) {
            const int64_t first = thread * each;
            std::memcpy(sums.data() + first, values.data() + first, static_cast<size_t>(each) * 4);
        });
    std::printf("%d threads, %lld values, %s; copy: %.2f GB/s\n", threads,
                static_cast<long long>(count), codec_target().c_str(), copy * 1e-9);
    for (const CodecKind kind : {CodecKind::int8, CodecKind::int4, CodecKind::sign}) {
        for (const int64_t block : {int64_t{64}, int64_t{256}, int64_t{2048}}) {
            const Codec codec{kind, block};
            std::vector<std::byte> codes(static_cast<size_t>(codec.bytes(each) * threads));
            const auto part = [&](int thread) { return codes.data() + thread * codec.bytes(each); };
            const double moved = bytes + static_cast<double>(codes.size());
            const double in = seconds(threads, [&](int thread) {
                encode(codec, values.data() + thread * each, each, {part(thread), each}, 0);
            });
            const double out = seconds(threads, [&](int thread) {
                decode(codec, {part(thread), each}, 0, each, sums.data() + thread * each);
            });
            const double add = seconds(threads, [&](int thread) {
                decode_add(codec, {part(thread), each}, 0, each, sums.data() + thread * each);
            });
            const auto print = [&](const char* what, double rate) {
                std::printf("  %-22s %-10s %8.2f GB/s  %5.2fx of a copy\n", text_of(codec).c_str(),
                            what, rate * 1e-9, rate / copy);
            };
            print("encode", moved / in);
            print("decode", moved / out);
            print("decode_add", (moved + bytes) / add);
        }
    }
}
