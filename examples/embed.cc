// A layer that ferry knows nothing of, trained with its state on disk: y = W x, learned from what
// another W gives. W is cut into eight blocks of rows. An object of the leased store holds a
// block's master weights and AdamW's two moments; three of the eight have a buffer in memory.
//   embed DIRECTORY
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "ferry/aio.h"
#include "ferry/lease.h"
#include "ferry/optim.h"
#include "ferry/pinned_mem.h"
#include "ferry/streams.h"
#include "ferry/team.h"

using namespace ferry;
namespace {

constexpr int64_t kInputs = 256, kOutputs = 256, kBlocks = 8, kBuffers = 3, kBatch = 32;
constexpr int64_t kRows = kOutputs / kBlocks, kWeights = kRows * kInputs;  // of a block
constexpr int64_t kBytes = 3 * kWeights * 4;                               // p, m and v
constexpr int kSteps = 60;

float* floats(const swap::Lease& lease) { return reinterpret_cast<float*>(lease.bytes().data()); }

// Adds half the squared error of one block's outputs, and its gradient by the block's weights.
double loss_of_block(const float* p, const std::vector<float>& x, const float* target, float* g) {
    double loss = 0;
    for (int64_t sample = 0; sample < kBatch; ++sample) {
        const float* in = &x[static_cast<size_t>(sample * kInputs)];
        for (int64_t row = 0; row < kRows; ++row) {
            float error = 0;
            for (int64_t i = 0; i < kInputs; ++i)
                error += (p[row * kInputs + i] - target[row * kInputs + i]) * in[i];
            loss += 0.5 * error * error / kBatch;
            for (int64_t i = 0; i < kInputs; ++i) g[row * kInputs + i] += error * in[i] / kBatch;
        }
    }
    return loss;
}

}  // namespace

int main(int argc, char** argv) try {
    hold_standard_streams();
    const auto machine = this_machine();
    NodeTeams teams(*machine, 2);
    pinned_mem::Pool pool(*machine, 16 * kMiB);
    const std::span<std::byte> buffers = pool.reserve("buffers", kBuffers * kBytes, teams);
    pool.seal();
    auto executor = make_thread_executor();
    auto volume = aio::Volume::open(
        {.paths = {{.path = argc > 1 ? argv[1] : "."}},
         .classes = {{.name = "blocks", .slot_bytes = kBytes, .slots = kBlocks + kBuffers}}},
        *executor);
    const swap::LeasedObject block{.home = swap::Home::nvme, .bytes = kBytes, .slot_class = 0};
    auto store = swap::LeasedStore::make(
        {.objects = std::vector<swap::LeasedObject>(kBlocks, block), .buffers = buffers}, *executor,
        volume.get());

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(kBatch * kInputs), target(kOutputs * kInputs), gradient(target.size());
    for (float& value : target) value = normal(random) / std::sqrt(float{kInputs});
    for (uint32_t id = 0; id < kBlocks; ++id)
        std::fill_n(floats(store->acquire(id, swap::Access::overwrite)), kBytes / 4, 0.0f);

    std::vector<float> leaves(static_cast<size_t>(optim::leaves_of(kOutputs * kInputs)));
    double first = 0, loss = 0;
    for (int step = 1; step <= kSteps; ++step) {
        for (float& value : x) value = normal(random);
        std::ranges::fill(gradient, 0.0f);
        loss = 0;
        for (uint32_t id = 0; id < kBlocks; ++id) {
            store->prefetch((id + 1) % kBlocks);  // read while this one is worked on
            const swap::Lease lease = store->acquire(id, swap::Access::read);
            loss +=
                loss_of_block(floats(lease), x, &target[id * kWeights], &gradient[id * kWeights]);
        }
        optim::leaf_norms(teams.all(), gradient.data(), DType::f32, std::ssize(gradient),
                          leaves.data());
        const double norm = std::sqrt(optim::sum_leaves(leaves));
        const optim::Scalars scalars =
            optim::scalars_of({.lr = 0.005}, step, optim::clip_factor(norm, /*max_norm=*/5));
        for (uint32_t id = 0; id < kBlocks; ++id) {
            store->prefetch((id + 1) % kBlocks);
            const swap::Lease lease = store->acquire(id, swap::Access::write);
            float *p = floats(lease), *m = p + kWeights, *v = m + kWeights;
            optim::update(teams.all(),
                          {.count = kWeights,
                           .gradient = &gradient[id * kWeights],
                           .p_in = p,
                           .m_in = m,
                           .v_in = v,
                           .p = p,
                           .m = m,
                           .v = v},
                          scalars);
        }
        if (step == 1) first = loss;
        if (step % 10 == 1 || step == kSteps)
            printf("step %2d  loss %9.4f  gradient norm %8.4f\n", step, loss, norm);
    }
    store->flush();
    const swap::LeaseReport report = store->report();
    printf("%d blocks read, %d written; the loss fell to %.1f %%\n", static_cast<int>(report.reads),
           static_cast<int>(report.writes), 100 * loss / first);
    return loss < first / 10 ? 0 : 4;
} catch (const Error& error) {
    fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
}
