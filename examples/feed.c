// The engine in a C program that has its own batches: a small decoder learns to count, fed from memory
// through libferry.so. The program also gives the memory for the state, and hears how a checkpoint
// gets on.
//   feed_c DIRECTORY
#include <stdio.h>
#include <stdlib.h>

#include "ferry/ferry.h"

enum { STEPS = 60, WORDS = 32 };

static const char* const kConfig =
    "{'model': {'hidden': 32, 'layers': 2, 'heads': 2, 'kv_heads': 2, 'intermediate': 64, 'vocab': 32},"
    " 'batch': {'sequence': 16, 'micro_batch': 4, 'micro_batches': 2}, 'evaluate': {'micro_batches': 1},"
    " 'optimizer': {'lr': 0.01}, 'clip_norm': 1, 'seed': 1, 'steps': 60, 'threads': 2}";

static void must(ferry_status status) {
    if (status == FERRY_OK) return;
    fprintf(stderr, "%s\n", ferry_last_error());
    exit(status);
}

// Sequences that count on from somewhere: of a step, or with 0 to evaluate on.
static int64_t load(void* context, int64_t step, int64_t sequences, int64_t sequence,
                    int32_t* tokens, int32_t* targets) {
    int64_t row, at;
    ++*(int64_t*)context;
    for (row = 0; row < sequences; ++row) {
        const int64_t first = step * 7 + row * 5;
        for (at = 0; at < sequence; ++at) {
            tokens[row * sequence + at] = (int32_t)((first + at) % WORDS);
            targets[row * sequence + at] = (int32_t)((first + at + 1) % WORDS);
        }
    }
    return sequences;
}

// The program's memory: here the heap's, aligned by hand. The block's address stands before it.
static void* allocate(void* context, int64_t bytes, int64_t alignment) {
    char* const block = (char*)malloc((size_t)(bytes + alignment) + sizeof(void*));
    char* memory;
    if (!block) return NULL;
    memory = block + sizeof(void*);
    memory += alignment - (int64_t)((uintptr_t)memory % (uintptr_t)alignment);
    memcpy(memory - sizeof(void*), &block, sizeof block);
    *(int64_t*)context += bytes;
    return memory;
}

static void release(void* context, void* memory, int64_t bytes) {
    void* block;
    memcpy(&block, (char*)memory - sizeof block, sizeof block);
    free(block);
    *(int64_t*)context -= bytes;
}

static void progress(void* context, const char* stage, int64_t bytes, int64_t of) {
    (void)context;
    if (bytes == of) printf("%s: %ld bytes\n", stage, (long)of);
}

int main(int argc, char** argv) {
    const char* const directory = argc > 1 ? argv[1] : ".";
    char config[1024], *quote, path[1024];
    int64_t held = 0, loads = 0;
    ferry_allocator allocator;
    ferry_engine_options options;
    ferry_engine* engine = NULL;
    ferry_step_report first, report;
    ferry_evaluation evaluation;
    int step;
    snprintf(config, sizeof config, "%s", kConfig);
    for (quote = config; (quote = strchr(quote, '\'')) != NULL;) *quote = '"';
    FERRY_INIT(allocator);
    FERRY_INIT(options);
    FERRY_INIT(first);
    FERRY_INIT(report);
    FERRY_INIT(evaluation);
    allocator.context = &held;
    allocator.allocate = allocate;
    allocator.release = release;
    options.config_json = config;
    options.load = load;
    options.load_context = &loads;
    options.progress = progress;
    options.allocator = &allocator;
    must(ferry_engine_create(&options, &engine));
    printf("%ld bytes of the program's memory hold the state\n", (long)held);
    must(ferry_engine_step(engine, &first));
    for (step = 2; step <= STEPS; ++step) must(ferry_engine_step(engine, &report));
    must(ferry_engine_evaluate(engine, &evaluation));
    snprintf(path, sizeof path, "%s/checkpoint", directory);
    must(ferry_engine_save(engine, path));
    must(ferry_engine_destroy(engine));
    printf("%ld batches; the loss fell from %.3f to %.3f, on other text %.3f\n", (long)loads,
           first.loss, report.loss, evaluation.loss);
    return held == 0 && report.loss < first.loss / 4 ? 0 : 4;
}
