// examples/embed.cc in C: a layer that ferry knows nothing of, trained with its state on disk through
// libferry.so. Eight blocks of rows of W in y = W x; three of them have a buffer in memory.
//   embed_c DIRECTORY
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ferry/ferry.h"

enum { INPUTS = 256, BLOCKS = 8, ROWS = 32, BATCH = 32, STEPS = 60 };
enum { WEIGHTS = ROWS * INPUTS, LEAVES = (BLOCKS * WEIGHTS + 4095) / 4096 };

static float x[BATCH * INPUTS], target[BLOCKS * WEIGHTS], gradient[BLOCKS * WEIGHTS];

static void must(ferry_status status) {
    if (status == FERRY_OK) return;
    fprintf(stderr, "%s\n", ferry_last_error());
    exit(status);
}

static float uniform(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) * (2.0f / 16777216.0f) - 1.0f;
}

// Half the squared error of one block's outputs; adds its gradient by the block's weights to g.
static double loss_of_block(const float* p, const float* wanted, float* g) {
    double loss = 0;
    for (int sample = 0; sample < BATCH; ++sample) {
        const float* in = x + sample * INPUTS;
        for (int row = 0; row < ROWS; ++row) {
            const int at = row * INPUTS;
            float error = 0;
            for (int i = 0; i < INPUTS; ++i) error += (p[at + i] - wanted[at + i]) * in[i];
            loss += 0.5 * error * error / BATCH;
            for (int i = 0; i < INPUTS; ++i) g[at + i] += error * in[i] / BATCH;
        }
    }
    return loss;
}

static float* lease(ferry_store* store, uint32_t block, int32_t access, uint64_t* number) {
    void* bytes = NULL;
    must(ferry_store_acquire(store, block, access, number, &bytes));
    return (float*)bytes;
}

// A store with the blocks in it: master weights and AdamW's two moments, all zero.
static ferry_store* make_store(const char* directory) {
    const int64_t bytes = 3 * WEIGHTS * (int64_t)sizeof(float);
    ferry_path path;
    ferry_store_options options;
    ferry_store* store = NULL;
    uint32_t block;
    uint64_t number;
    FERRY_INIT(path);
    FERRY_INIT(options);
    path.path = directory;
    options.paths = &path;
    options.path_count = 1;
    options.host_bytes = 3 * bytes;
    must(ferry_store_create(&options, &store));
    for (int i = 0; i < BLOCKS; ++i) must(ferry_store_register(store, bytes, FERRY_NVME, &block));
    must(ferry_store_open(store));
    for (uint32_t i = 0; i < BLOCKS; ++i) {
        memset(lease(store, i, FERRY_OVERWRITE, &number), 0, (size_t)bytes);
        must(ferry_store_release(store, number));
    }
    return store;
}

int main(int argc, char** argv) {
    ferry_store* store = make_store(argc > 1 ? argv[1] : ".");
    ferry_team* team = NULL;
    ferry_hyper hyper;
    ferry_store_stats stats;
    double first = 0, loss = 0;
    static float leaves[LEAVES];
    must(ferry_team_create(2, &team));
    FERRY_INIT(hyper);
    FERRY_INIT(stats);
    must(ferry_hyper_default(FERRY_ADAMW, &hyper));
    hyper.lr = 0.005;
    for (int i = 0; i < BLOCKS * WEIGHTS; ++i) target[i] = uniform() / 16;
    for (int step = 1; step <= STEPS; ++step) {
        double square = 0, factor;
        for (int i = 0; i < BATCH * INPUTS; ++i) x[i] = uniform();
        memset(gradient, 0, sizeof gradient);
        loss = 0;
        for (uint32_t i = 0; i < BLOCKS; ++i) {
            const uint32_t next = (i + 1) % BLOCKS;
            uint64_t number;
            must(ferry_store_prefetch(store, &next, 1));  // read while this one is worked on
            loss += loss_of_block(lease(store, i, FERRY_READ, &number), target + i * WEIGHTS,
                                  gradient + i * WEIGHTS);
            must(ferry_store_release(store, number));
        }
        must(ferry_optim_leaf_norms(team, gradient, FERRY_F32, BLOCKS * WEIGHTS, leaves));
        must(ferry_optim_add_leaves(leaves, LEAVES, &square));
        factor = ferry_optim_clip_factor(sqrt(square), 5);
        for (uint32_t i = 0; i < BLOCKS; ++i) {
            const uint32_t next = (i + 1) % BLOCKS;
            uint64_t number;
            ferry_update update;
            must(ferry_store_prefetch(store, &next, 1));
            FERRY_INIT(update);
            update.count = WEIGHTS;
            update.gradient = gradient + i * WEIGHTS;
            update.p = lease(store, i, FERRY_WRITE, &number);
            update.m = update.p + WEIGHTS;
            update.v = update.p + 2 * WEIGHTS;
            must(ferry_optim_update(team, &hyper, step, factor, &update));
            must(ferry_store_release(store, number));
        }
        if (step == 1) first = loss;
        if (step % 10 == 1 || step == STEPS)
            printf("step %2d  loss %9.4f  gradient norm %8.4f\n", step, loss, sqrt(square));
    }
    must(ferry_store_flush(store));
    must(ferry_store_get_stats(store, &stats));
    printf("%d blocks read, %d written; the loss fell to %.1f %%\n", (int)stats.reads,
           (int)stats.writes, 100 * loss / first);
    must(ferry_team_destroy(team));
    must(ferry_store_destroy(store));
    return loss < first / 10 ? 0 : 4;
}
