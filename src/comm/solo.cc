// One rank: what it would send, it has.
#include "operation.h"

namespace ferry::comm {
namespace {

class Solo final : public OperationQueue {
public:
    explicit Solo(Executor& executor)
        : executor_(executor), lane_(executor.add_lane("comm", kDepth)) {}
    ~Solo() override {
        while (done_.load(std::memory_order_acquire) < posted_) executor_.wait(kForever);
    }

    std::string_view kind() const noexcept override { return "solo"; }
    int rank() const noexcept override { return 0; }
    int size() const noexcept override { return 1; }
    int local_rank() const noexcept override { return 0; }
    int local_size() const noexcept override { return 1; }
    int host() const noexcept override { return 0; }

    void check() override {}
    std::unique_ptr<Communicator> group(std::span<const int> members) override {
        FERRY_CHECK(members.size() == 1 && members[0] == 0);
        return make_solo(executor_);
    }
    void abandon(std::string_view) noexcept override {}

private:
    static constexpr size_t kDepth = 256;

    void post(const Operation& operation) override {
        operations_[posted_ % kDepth] = operation;
        executor_.post(lane_,
                       {[](void* self, uint64_t number) { static_cast<Solo*>(self)->run(number); },
                        this, posted_++});
    }

    void run(uint64_t number) {
        const Operation& operation = operations_[number % kDepth];
        for (size_t i = 0; i < operation.count; ++i) copy_own(operation, operation.transfers[i], 0);
        if (operation.counter) operation.counter->fetch_add(1, std::memory_order_release);
        Executor& executor = executor_;  // this may be gone once it is done
        done_.store(number + 1, std::memory_order_release);
        executor.wake();
    }

    Executor& executor_;
    LaneId lane_;
    std::array<Operation, kDepth> operations_{};
    uint64_t posted_ = 0;
    std::atomic<uint64_t> done_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_solo(Executor& executor) {
    return std::make_unique<Solo>(executor);
}

}  // namespace ferry::comm
