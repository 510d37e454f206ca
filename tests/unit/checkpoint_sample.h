// Small checkpoints for tests.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/array_file.h"
#include "checkpoint/steps.h"

namespace ferry::checkpoint::test {

inline Manifest sample_manifest(int64_t step) {
    return {.step = step,
            .steps = 100,
            .updates = step - 1,
            .tokens = 64 * step,
            .sequences = 2 * step,
            .loss_scale = 65536,
            .ferry = "0.1",
            .model = "somewhere",
            .training = "seed = 7\nclip_norm = 0.1\n",
            .numerics = "0123 (cpu)",
            .numerics_hash = 0x123,
            .ranks = 2};
}

// Two files with three arrays and one of text; every value of "w" is `value`.
inline void write_sample(Steps& steps, int64_t step, float value = 1) {
    steps.add(sample_manifest(step), [&](const std::string& draft) {
        const std::vector<float> w(6, value), m(4, value / 2);
        ArrayFile weights(draft + "/model.safetensors",
                          {{"w", "F32", {2, 3}, 24}, {"v", "F32", {4}, 16}});
        weights.write(std::as_bytes(std::span(w)));
        weights.write(std::as_bytes(std::span(m)));
        ArrayFile moments(draft + "/exp_avg.safetensors", {{"w.exp_avg", "BF16", {2, 3}, 12}});
        moments.write(std::as_bytes(std::span(w)).first(12));
        return std::vector<Shard>{weights.finish(), moments.finish(),
                                  write_text_shard(draft, "config.json", "{}")};
    });
}

}  // namespace ferry::checkpoint::test
