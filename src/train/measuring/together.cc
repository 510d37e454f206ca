#include "together.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

#include "base/of_rank.h"
#include "base/process_limits.h"
#include "ferry/error.h"

namespace ferry::train {

Together& alone() {
    static Alone one;
    return one;
}

double Together::least(double mine) {
    for (const std::vector<double>& one : all({&mine, 1})) mine = std::min(mine, one.front());
    return mine;
}

double Together::most(double mine) {
    for (const std::vector<double>& one : all({&mine, 1})) mine = std::max(mine, one.front());
    return mine;
}

// ---------------------------------------------------------------- ranks

void RanksTogether::run(const Work& work, const Work& load) {
    constexpr comm::Topic kBegin{.of = "measurements that begin"}, kEnd{.of = "measurements"};
    std::vector<std::byte> here(static_cast<size_t>(size()));
    constexpr std::byte kHere{1};
    comm::agree(ranks_, executor_, {&kHere, 1}, here, kBegin);
    if (work) work();
    std::vector<std::byte> ended(here.size());
    std::atomic<uint64_t> done = 0;
    ranks_.all_gather_host({&kHere, ended.data(), 1}, kEnd);
    ranks_.signal(done);
    try {
        while (load && done.load(std::memory_order_acquire) == 0) load();
    } catch (...) {
        // The exchange still writes to this function's own memory.
        while (done.load(std::memory_order_acquire) == 0) executor_.wait(kForever);
        throw;
    }
    while (done.load(std::memory_order_acquire) == 0) executor_.wait(kForever);
    ranks_.check();
}

std::vector<std::vector<double>> RanksTogether::all(std::span<const double> mine) {
    constexpr comm::Topic kNumbers{.of = "measurements that the ranks compare"};
    const auto ranks = static_cast<size_t>(size());
    std::vector<uint64_t> counts(ranks);
    const uint64_t count = mine.size();
    comm::agree(ranks_, executor_, std::as_bytes(std::span(&count, 1)),
                std::as_writable_bytes(std::span(counts)), kNumbers);
    const size_t most = *std::ranges::max_element(counts);
    constexpr size_t kBlock = comm::Communicator::kAgreedBytes / sizeof(double);
    std::vector<double> padded(mine.begin(), mine.end());
    padded.resize(most);
    std::vector<std::vector<double>> found(ranks);
    for (size_t at = 0; at < most; at += kBlock) {
        const size_t block = std::min(kBlock, most - at);
        std::vector<double> part(ranks * block);
        comm::agree(ranks_, executor_, std::as_bytes(std::span(padded).subspan(at, block)),
                    std::as_writable_bytes(std::span(part)), kNumbers);
        for (size_t rank = 0; rank < ranks; ++rank)
            found[rank].insert(found[rank].end(),
                               part.begin() + static_cast<ptrdiff_t>(rank * block),
                               part.begin() + static_cast<ptrdiff_t>((rank + 1) * block));
    }
    for (size_t rank = 0; rank < ranks; ++rank) found[rank].resize(counts[rank]);
    return found;
}

// ---------------------------------------------------------------- threads

class ThreadsTogether::End final : public Together {
public:
    End(ThreadsTogether& all, int index) : all_(all), index_(static_cast<size_t>(index)) {}
    int size() const noexcept override { return all_.size_; }

    void run(const Work& work, const Work& load) override {
        {
            const std::lock_guard lock(all_.mutex_);
            ++all_.working_;
        }
        all_.meet();
        if (work) work();
        {
            const std::lock_guard lock(all_.mutex_);
            --all_.working_;
        }
        while (load && goes_on()) load();
        all_.meet();
    }

    std::vector<std::vector<double>> all(std::span<const double> mine) override {
        all_.numbers_[index_].assign(mine.begin(), mine.end());
        all_.meet();
        std::vector<std::vector<double>> found = all_.numbers_;
        all_.meet();
        return found;
    }

private:
    bool goes_on() const {
        const std::lock_guard lock(all_.mutex_);
        return all_.working_ > 0 && !all_.failure_;
    }

    ThreadsTogether& all_;
    const size_t index_;
};

void ThreadsTogether::meet() {
    std::unique_lock lock(mutex_);
    const int64_t meeting = meetings_;
    if (++here_ == size_) {
        here_ = 0;
        ++meetings_;
        changed_.notify_all();
    }
    changed_.wait(lock, [&] { return meetings_ > meeting || failure_; });
    if (failure_) std::rethrow_exception(failure_);
}

void ThreadsTogether::fail(std::exception_ptr failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    changed_.notify_all();
}

void ThreadsTogether::run_one(int index, const Body& body) noexcept {
    try {
        const OfRank says_as(index);
        End end(*this, index);
        body(index, end);
    } catch (...) {
        fail(std::current_exception());
    }
}

void ThreadsTogether::each(const Body& body) {
    {
        std::vector<std::jthread> others;
        try {
            for (int i = 1; i < size_; ++i)
                others.emplace_back([this, i, &body] { run_one(i, body); });
        } catch (const std::system_error& error) {
            fail(std::make_exception_ptr(error));
            others.clear();
            refuse_thread("a thread of ranks that are timed together", error.what());
        }
        run_one(0, body);
    }
    if (failure_) std::rethrow_exception(failure_);
}

// ---------------------------------------------------------------- figures

namespace {

using cost::Measurements;

constexpr std::array kRates{
    &Measurements::copy_bytes_per_s,   &Measurements::dram_bytes_per_s,
    &Measurements::check_bytes_per_s,  &Measurements::momentum_bytes_per_s,
    &Measurements::device_bytes_per_s, &Measurements::device_copy_bytes_per_s,
    &Measurements::product_flops_per_s};
constexpr std::array kOverheads{&Measurements::update_overhead_s, &Measurements::out_of_place};
constexpr size_t kFixed = kRates.size() + kOverheads.size() + model::kSaved;
constexpr size_t kOfAKernel = std::tuple_size_v<cost::KernelTimes::Kind> + 1;

std::vector<double> numbers_of(const Measurements& measured) {
    std::vector<double> numbers;
    numbers.reserve(kFixed + kOfAKernel * measured.kernels.seconds.size());
    for (const auto rate : kRates) numbers.push_back(measured.*rate);
    for (const auto overhead : kOverheads) numbers.push_back(measured.*overhead);
    for (const double seconds : measured.kernels.saved_s) numbers.push_back(seconds);
    for (const auto& [kind, seconds] : measured.kernels.seconds) {
        for (const int64_t part : kind) numbers.push_back(static_cast<double>(part));
        numbers.push_back(seconds);
    }
    return numbers;
}

}  // namespace

void agree_on_slowest(Together& together, Measurements& measured) {
    if (together.size() == 1) return;
    for (const std::vector<double>& other : together.all(numbers_of(measured))) {
        FERRY_CHECK(other.size() >= kFixed && (other.size() - kFixed) % kOfAKernel == 0,
                    std::to_string(other.size()));
        size_t at = 0;
        for (const auto rate : kRates) measured.*rate = std::min(measured.*rate, other[at++]);
        for (const auto overhead : kOverheads)
            measured.*overhead = std::max(measured.*overhead, other[at++]);
        for (double& seconds : measured.kernels.saved_s) seconds = std::max(seconds, other[at++]);
        for (; at < other.size(); at += kOfAKernel) {
            cost::KernelTimes::Kind kind;
            for (size_t i = 0; i < kind.size(); ++i) kind[i] = static_cast<int64_t>(other[at + i]);
            const auto known = measured.kernels.seconds.find(kind);
            if (known == measured.kernels.seconds.end()) continue;  // of another stage
            known->second = std::max(known->second, other[at + kOfAKernel - 1]);
        }
    }
}

}  // namespace ferry::train
