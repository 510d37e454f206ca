// The errors of a run that the GPU fails: enqueued work that failed, and memory that another
// process took. Each test is a process of its own, for a process whose work has failed loses the
// GPU.
#ifdef FERRY_CUDA
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <regex>
#include <string_view>

#include "ferry/device.h"
#include "ops/ops.h"
#include "tests/support/child.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

constexpr int kNoGpu = 77;

// The GPU's memory in another process. Fork before CUDA is called.
class Hog {
public:
    Hog() {
        if (pipe(orders_) != 0 || pipe(answers_) != 0) std::abort();
        child_ = fork();
        if (child_ == 0) take_when_told();
    }
    ~Hog() {
        kill(child_, SIGKILL);
        waitpid(child_, nullptr, 0);
    }
    Hog(const Hog&) = delete;
    Hog& operator=(const Hog&) = delete;

    // All but so many bytes. False where there is no GPU.
    bool take_all_but(size_t bytes) const {
        bool taken = false;
        return write(orders_[1], &bytes, sizeof(bytes)) == sizeof(bytes) &&
               read(answers_[0], &taken, sizeof(taken)) == sizeof(taken) && taken;
    }

private:
    [[noreturn]] void take_when_told() const {
        size_t leave = 0, free = 0, total = 0;
        while (read(orders_[0], &leave, sizeof(leave)) == sizeof(leave)) {
            void* memory = nullptr;
            const bool taken = cudaMemGetInfo(&free, &total) == cudaSuccess && free > leave &&
                               cudaMalloc(&memory, free - leave) == cudaSuccess;
            if (write(answers_[1], &taken, sizeof(taken)) != sizeof(taken)) break;
        }
        _exit(1);
    }

    int orders_[2]{}, answers_[2]{};
    pid_t child_ = -1;
};

class GpuRun {
public:
    // Null where there is no GPU.
    Engine* start() {
        Config config = tiny_config(data_);
        config.device = DeviceKind::cuda;
        config.steps = 10;
        try {
            engine_ = Engine::make(config, {.executor = executor_.get()});
        } catch (const Error& error) {
            if (error.trouble() != Trouble::usage) throw;
        }
        return engine_.get();
    }
    Executor& executor() { return *executor_; }

private:
    TinyData data_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<Engine> engine_;
};

// 0 where the error has the trouble and all the words; they are printed where it has not.
int judge(const Error& error, Trouble trouble, std::initializer_list<std::string_view> words) {
    const std::string_view said = error.what();
    bool good = error.trouble() == trouble;
    for (const std::string_view word : words) good &= said.find(word) != std::string_view::npos;
    if (!good) fprintf(stderr, "child: said %s\n", error.what());
    return good ? 0 : 1;
}

void expect_passed(int status) {
    ASSERT_TRUE(WIFEXITED(status)) << status;
    if (WEXITSTATUS(status) == kNoGpu) GTEST_SKIP() << "no GPU";
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A row of a table that is 128 TiB behind its end, where no process can have memory: the kernel
// starts, and has failed on its way when this returns. False: it has not.
bool read_out_of_range(Device& device) {
    constexpr int64_t kCols = 16384;
    device.reserve(kMiB);
    const auto ops = ops::make_cuda_ops(device);
    auto* memory = device.memory().data();
    const int32_t far = std::numeric_limits<int32_t>::max();
    if (cudaMemcpy(memory, &far, sizeof(far), cudaMemcpyHostToDevice) != cudaSuccess) return false;
    ops->embed(reinterpret_cast<const int32_t*>(memory),
               ops::ConstView::of(memory + 4096, DType::f32, 1, kCols), {}, nullptr,
               ops::View::of(memory + kMiB / 2, DType::f32, 1, kCols));
    return cudaDeviceSynchronize() == cudaErrorIllegalAddress;
}

TEST(GpuFailure, of_work_under_way_names_step_layer_and_operation) {
    expect_passed(in_child([] {
        GpuRun run;
        Engine* engine = run.start();
        if (engine == nullptr) return kNoGpu;
        engine->step();
        engine->step();
        const auto other = Device::open(DeviceKind::cuda, run.executor());
        if (!read_out_of_range(*other)) {
            fprintf(stderr, "child: the GPU did not mind the bad read\n");
            return 1;
        }
        try {
            engine->step();
        } catch (const Error& error) {
            const std::regex where("step 3, (the embedding|block [0-9]+|the head and loss), [a-z]");
            if (!std::regex_search(error.problem().where, where)) {
                fprintf(stderr, "child: where: %s\n", error.problem().where.c_str());
                return 1;
            }
            return judge(error, Trouble::internal,
                         {"work that the GPU was given has failed", "IllegalAddress"});
        }
        fprintf(stderr, "child: nothing was said\n");
        return 1;
    }));
}

TEST(GpuFailure, memory_that_others_take_after_the_start_is_not_missed) {
    expect_passed(in_child([] {
        const Hog hog;
        GpuRun run;
        Engine* engine = run.start();
        if (engine == nullptr) return kNoGpu;
        engine->step();
        if (!hog.take_all_but(0) && !hog.take_all_but(64 << 20)) return kNoGpu;
        for (int i = 0; i < 5; ++i) engine->step();
        return 0;
    }));
}

TEST(GpuFailure, memory_that_others_took_before_is_named) {
    expect_passed(in_child([] {
        const Hog hog;
        if (!hog.take_all_but(64 << 20)) return kNoGpu;
        GpuRun run;
        try {
            run.start();
        } catch (const Error& error) {
            return judge(error, Trouble::does_not_fit, {"memory", "nvidia-smi"});
        }
        fprintf(stderr, "child: it started in 64 MiB\n");
        return 1;
    }));
}

}  // namespace
}  // namespace ferry::train
#endif
