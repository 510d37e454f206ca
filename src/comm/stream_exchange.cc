// Exchanges in the midst of a kernel, and which ranks make them with which.
#include <utility>

#include "base/threads.h"
#include "operation.h"

namespace ferry::comm {
namespace {

// Of a device whose kernels run on the stream's own thread: that waits.
class ThreadExchange final : public StreamExchange {
public:
    ThreadExchange(Executor& executor, std::unique_ptr<Communicator> group)
        : executor_(executor), group_(std::move(group)) {}

    int rank() const noexcept override { return group_->rank(); }
    int size() const noexcept override { return group_->size(); }

    void exchange(const Exchange& parts, Topic topic) override {
        group_->exchange({&parts, 1}, topic);
        wait();
    }
    void all_gather(const Gather& parts, Topic topic) override {
        group_->all_gather({&parts, 1}, topic);
        wait();
    }
    void shift(const Shift& parts, Topic topic) override {
        group_->shift(parts, topic);
        wait();
    }

private:
    void wait() {
        group_->signal(done_);
        ++posted_;
        const Nanos start = executor_.now();
        while (done_.load(std::memory_order_acquire) < posted_) nap_after(executor_.now() - start);
        group_->check();
    }

    Executor& executor_;
    std::atomic<uint64_t> done_ = 0;  // by the group, which ends before it
    uint64_t posted_ = 0;
    std::unique_ptr<Communicator> group_;
};

// Of a GPU: the group's thread enqueues its sends and receives among the compute stream's kernels.
// The caller's, which enqueues those, waits until that is done, and is eight exchanges ahead at
// most.
class QueuedExchange final : public StreamExchange {
public:
    QueuedExchange(Stream& stream, Executor& executor, std::unique_ptr<Communicator> group)
        : stream_(stream), executor_(executor), group_(std::move(group)) {
        queue_ = dynamic_cast<OperationQueue*>(group_.get());
        FERRY_CHECK(queue_ && queue_->uses_streams(), "ranks of GPUs exchange over NCCL");
    }

    int rank() const noexcept override { return group_->rank(); }
    int size() const noexcept override { return group_->size(); }

    void exchange(const Exchange& parts, Topic topic) override {
        enqueue(Operation::exchange({&parts, 1}, topic));
    }
    void all_gather(const Gather& parts, Topic topic) override {
        enqueue(Operation::gather({&parts, 1}, topic));
    }
    void shift(const Shift& parts, Topic topic) override {
        enqueue(Operation::shift(parts, topic));
    }

private:
    void enqueue(const Operation& operation) {
        queue_->post_on(stream_.native(), enqueued_, operation);
        ++posted_;
        const Nanos start = executor_.now();
        while (enqueued_.load(std::memory_order_acquire) < posted_) {
            group_->check();
            nap_after(executor_.now() - start);
        }
    }

    Stream& stream_;
    Executor& executor_;
    std::atomic<uint64_t> enqueued_ = 0;  // by the group, which ends before it
    uint64_t posted_ = 0;
    std::unique_ptr<Communicator> group_;
    OperationQueue* queue_ = nullptr;  // the same
};

}  // namespace

std::vector<int> run_of(int rank, int size) {
    std::vector<int> members;
    for (int member = rank / size * size; std::ssize(members) < size; ++member)
        members.push_back(member);
    return members;
}

std::vector<int> across_runs(int rank, int size, int ranks) {
    std::vector<int> members;
    for (int member = rank % size; member < ranks; member += size) members.push_back(member);
    return members;
}

std::unique_ptr<StreamExchange> make_stream_exchange(Device& device, Executor& executor,
                                                     std::unique_ptr<Communicator> group) {
    if (device.kind() == DeviceKind::cpu)
        return std::make_unique<ThreadExchange>(executor, std::move(group));
    return std::make_unique<QueuedExchange>(device.stream(StreamKind::compute), executor,
                                            std::move(group));
}

}  // namespace ferry::comm
