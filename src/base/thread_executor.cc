// The executor of real runs: a thread for each lane and each service.
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/executor.h"

namespace ferry {
namespace {

void name_this_thread(std::string_view name) {
    pthread_setname_np(pthread_self(), std::string(name.substr(0, 15)).c_str());
}

// Not std::thread: its stack is by default what ulimit -s says, or 2 MiB where that is unlimited,
// and kernels want more.
class Thread {
public:
    Thread(const std::string& name, std::function<void()> body) : start_{name, std::move(body)} {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        int error = pthread_attr_setstacksize(&attributes, size_t{2 * kStackBytes});
        if (error == 0) error = pthread_create(&thread_, &attributes, run, &start_);
        pthread_attr_destroy(&attributes);
        if (error != 0) refuse_thread("thread \"" + name + "\"", std::strerror(error));
    }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;
    void join() { pthread_join(thread_, nullptr); }

private:
    struct Start {
        std::string name;
        std::function<void()> body;
    };
    static void* run(void* start) {
        const Start& mine = *static_cast<const Start*>(start);
        name_this_thread(mine.name);
        mine.body();
        return nullptr;
    }

    Start start_;
    pthread_t thread_{};
};

// A bounded FIFO of jobs and the thread that runs them.
class Lane {
public:
    Lane(const std::string& name, int depth)
        : ring_(static_cast<size_t>(depth)), thread_(name, [this] { loop(); }) {}

    ~Lane() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        filled_.notify_one();
        thread_.join();
    }

    void post(Job job) {
        {
            const std::lock_guard lock(mutex_);
            FERRY_CHECK(count_ < ring_.size(), "executor lane is full");
            ring_[(first_ + count_++) % ring_.size()] = job;
        }
        filled_.notify_one();
    }

private:
    void loop() {
        std::unique_lock lock(mutex_);
        while (true) {
            filled_.wait(lock, [this] { return count_ > 0 || stopping_; });
            if (count_ == 0) return;        // stops only once everything posted has run
            const Job job = ring_[first_];  // stays counted until it has run
            lock.unlock();
            job.run(job.context, job.argument);
            lock.lock();
            first_ = (first_ + 1) % ring_.size();
            --count_;
        }
    }

    std::mutex mutex_;
    std::condition_variable filled_;
    std::vector<Job> ring_;
    size_t first_ = 0, count_ = 0;
    bool stopping_ = false;
    Thread thread_;
};

class ThreadExecutor final : public Executor {
public:
    ~ThreadExecutor() override {
        FERRY_CHECK(services_.empty(), "a service outlives its executor");
    }

    LaneId add_lane(std::string name, int lane_depth) override {
        lanes_.push_back(std::make_unique<Lane>(std::move(name), lane_depth));
        return static_cast<LaneId>(lanes_.size() - 1);
    }

    void host(Service& service) override { services_.push_back(std::make_unique<Hosted>(service)); }

    void retire(Service& service) override {
        std::erase_if(services_, [&](const auto& hosted) { return &hosted->service == &service; });
    }

    void post(LaneId lane, Job job) override { lanes_[lane]->post(job); }

    void wait(Nanos until) override {
        std::unique_lock lock(mutex_);
        const auto woken = [this] { return woken_; };
        if (until == kForever) {
            waker_.wait(lock, woken);
        } else {
            waker_.wait_for(lock, std::chrono::nanoseconds(until - now()), woken);
        }
        woken_ = false;
    }

    void wake() noexcept override {
        {
            const std::lock_guard lock(mutex_);
            woken_ = true;
        }
        waker_.notify_one();
    }

    Nanos now() const noexcept override {
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }

private:
    struct Hosted {
        explicit Hosted(Service& hosted_service)
            : service(hosted_service), thread(std::string(service.name()), [this] {
                  while (!stopping.load(std::memory_order_acquire)) service.run_once(kForever);
              }) {}
        ~Hosted() {
            stopping.store(true, std::memory_order_release);
            service.interrupt();
            thread.join();
        }
        Service& service;
        std::atomic<bool> stopping = false;
        Thread thread;
    };

    std::mutex mutex_;
    std::condition_variable waker_;
    bool woken_ = false;
    std::vector<std::unique_ptr<Hosted>> services_;
    std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace

std::unique_ptr<Executor> make_thread_executor() { return std::make_unique<ThreadExecutor>(); }

}  // namespace ferry
