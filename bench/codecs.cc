// The rate of the codecs of what ranks exchange, of one thread and of several, beside a copy of the
// same values by as many.
//   bench_codecs [THREADS] [MILLION VALUES]
//   bench_codecs gpu [MILLION VALUES]     the kernels beside a copy within the GPU's memory
// Rates are of the memory that a pass reads and writes: values and codes, decode_add's sums twice.
// The copy is memcpy. It writes past the caches only what one thread copies at once beyond glibc's
// x86_non_temporal_threshold, which is several times 16 MB on some machines; below, it reads what
// it overwrites, which is not counted, and is the slower yardstick. So that it always streams:
//   GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x100000 bench_codecs ...
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#ifdef FERRY_CUDA
#include <cuda_runtime.h>
#endif

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

// Ordinary numbers, of which the first million are drawn.
std::vector<float> values_of(size_t count) {
    std::vector<float> values(count);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; ++i) values[i] = i < 1 << 20 ? normal(random) : values[i % 997];
    return values;
}

// Values that begin on a cache line, as those of ferry's own buffers do.
class Lines {
public:
    explicit Lines(size_t values) : memory_((values + kLine - 1) / kLine) {}
    float* data() { return memory_.front().values; }

private:
    static constexpr size_t kLine = 16;
    struct alignas(64) Line {
        float values[kLine];
    };
    std::vector<Line> memory_;
};

constexpr CodecKind kKinds[] = {CodecKind::int8, CodecKind::int4, CodecKind::sign};
constexpr int64_t kBlocks[] = {64, 256, 2048};

void print(const Codec& codec, const char* what, double rate, double copy) {
    std::printf("  %-22s %-10s %8.2f GB/s  %5.2fx of a copy\n", text_of(codec).c_str(), what,
                rate * 1e-9, rate / copy);
}

#ifdef FERRY_CUDA

void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
    std::exit(1);
}

class Memory {
public:
    explicit Memory(double bytes) {
        check(cudaMalloc(&data_, static_cast<size_t>(bytes)));
        check(cudaMemset(data_, 0, static_cast<size_t>(bytes)));
    }
    ~Memory() { cudaFree(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    template <class T>
    T* as() {
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
};

// Of one call, the best of several runs of ten.
double seconds_on_gpu(const std::function<void()>& body) {
    constexpr int kCalls = 10;
    cudaEvent_t begin = nullptr, end = nullptr;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    double best = 1e9;
    for (int i = 0; i < 9; ++i) {
        check(cudaEventRecord(begin));
        for (int call = 0; call < kCalls; ++call) body();
        check(cudaEventRecord(end));
        check(cudaEventSynchronize(end));
        float took_ms = 0;
        check(cudaEventElapsedTime(&took_ms, begin, end));
        best = std::min(best, took_ms * 1e-3 / kCalls);
    }
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    return best;
}

int run_on_gpu(int64_t millions) {
    constexpr int kSenders = 4;
    const int64_t count = millions * 1'000'000 / 16384 * 16384;
    const double bytes = static_cast<double>(count) * 4;
    Memory values(bytes), sums(bytes), leaves(static_cast<double>(count) / 1024);
    check(cudaMemcpy(values.as<void>(), values_of(static_cast<size_t>(count)).data(),
                     static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
    const double copy =
        2 * bytes / seconds_on_gpu([&] {
            check(cudaMemcpyAsync(sums.as<void>(), values.as<void>(), static_cast<size_t>(bytes),
                                  cudaMemcpyDeviceToDevice));
        });
    cudaDeviceProp gpu{};
    check(cudaGetDeviceProperties(&gpu, 0));
    std::printf("%s, %lld values, cuda; copy: %.2f GB/s\n", gpu.name, static_cast<long long>(count),
                copy * 1e-9);
    for (const CodecKind kind : kKinds) {
        for (const int64_t block : kBlocks) {
            const Codec codec{kind, block};
            const auto coded = static_cast<double>(codec.bytes(count));
            Memory codes(kSenders * coded);
            const Part part{codes.as<std::byte>(), count};
            const ConstPart sent{part.data, count};
            const auto rate = [&](const char* what, double moved, const auto& body) {
                print(codec, what, moved / seconds_on_gpu(body), copy);
            };
            rate("encode", bytes + coded, [&] {
                cuda::encode(codec, ferry::DType::f32, values.as<void>(), count, part, 0, {},
                             nullptr);
            });
            rate("decode", bytes + coded, [&] {
                cuda::decode(codec, sent, 0, count, ferry::DType::f32, sums.as<void>(), {},
                             nullptr);
            });
            rate("decode_add", 2 * bytes + coded,
                 [&] { cuda::decode_add(codec, sent, 0, count, sums.as<float>(), nullptr); });
            if (kind == CodecKind::sign) continue;
            rate("sum_of_4", kSenders * coded + bytes / 2, [&] {
                cuda::sum(codec, part.data, kSenders, count, ferry::DType::bf16, sums.as<void>(),
                          leaves.as<float>(), nullptr);
            });
        }
    }
    check(cudaDeviceSynchronize());
    return 0;
}

#else

int run_on_gpu(int64_t) {
    std::fprintf(stderr, "this build has no CUDA\n");
    return 2;
}

#endif

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::string_view(argv[1]) == "gpu")
        return run_on_gpu(argc > 2 ? std::max(1LL, std::atoll(argv[2])) : 64);
    const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    const int64_t millions = argc > 2 ? std::max(1LL, std::atoll(argv[2])) : 64;
    const int64_t each = millions * 1'000'000 / threads / 4096 * 4096;  // of a thread
    const auto count = static_cast<size_t>(each * threads);
    const std::vector<float> values = values_of(count);
    Lines sums(count);
    const auto bytes = static_cast<double>(count) * 4;
    const double copy =
        2 * bytes / seconds(threads, [&](int thread) {
            const int64_t first = thread * each;
            std::memcpy(sums.data() + first, values.data() + first, static_cast<size_t>(each) * 4);
        });
    std::printf("%d threads, %lld values, %s; copy: %.2f GB/s\n", threads,
                static_cast<long long>(count), codec_target().c_str(), copy * 1e-9);
    for (const CodecKind kind : kKinds) {
        for (const int64_t block : kBlocks) {
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
            print(codec, "encode", moved / in, copy);
            print(codec, "decode", moved / out, copy);
            print(codec, "decode_add", (moved + bytes) / add, copy);
        }
    }
}
