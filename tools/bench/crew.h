// Threads that stay: what the hand-written side of a benchmark runs on, so that no side pays for
// starting threads inside the time that is measured.
#pragma once

#include <barrier>
#include <functional>
#include <thread>
#include <vector>

namespace ferry::tools {

class Crew {
public:
    explicit Crew(int threads) : threads_(threads), gate_(threads) {
        for (int t = 1; t < threads; ++t) others_.emplace_back([this, t] { serve(t); });
    }
    ~Crew() {
        work_ = nullptr;
        gate_.arrive_and_wait();
    }
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;
    int threads() const noexcept { return threads_; }

    // Calls work(t) for t in [0, threads), each on a thread of its own, 0 on the calling one;
    // returns when all are done. Not from two threads at once; work throws nothing.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        gate_.arrive_and_wait();
        work(0);
        gate_.arrive_and_wait();
    }

private:
    void serve(int t) {
        while (true) {
            gate_.arrive_and_wait();
            if (!work_) return;
            (*work_)(t);
            gate_.arrive_and_wait();
        }
    }

    int threads_;
    std::barrier<> gate_;
    const std::function<void(int)>* work_ = nullptr;  // null at the gate: go home
    std::vector<std::jthread> others_{};
};

}  // namespace ferry::tools
