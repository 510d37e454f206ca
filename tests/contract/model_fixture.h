// A small model, its tokens, and one whole step through a Decoder.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "base/random.h"
#include "model/gradients.h"
#include "model/model.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::model {

struct Setting {
    Shape shape{.hidden = 12,
                .layers = 2,
                .heads = 4,
                .kv_heads = 2,
                .head_dim = 6,
                .intermediate = 20,
                .vocab = 17};
    Numerics numerics{.sequence = 7, .micro_batch = 2, .head_tile = 5, .mlp_tile = 0};
    std::vector<std::string> freeze{};
    bool mask_all = false;
    // Where in its row the document of each token begins; empty: no documents.
    std::vector<int32_t> document_start{};
};

// fp32 weights of a layer, larger than at the start of training so that every term matters.
inline std::vector<float> weights_of(const Setting& s, const Layer& layer) {
    std::vector<float> w(static_cast<size_t>(layer.elements));
    initialise(s.shape, layer, 3, 0, w);
    const float gain = 70 / std::sqrt(static_cast<float>(s.shape.hidden));
    for (const Tensor& t : layer.tensors) {
        for (int64_t i = 0; i < t.count; ++i) {
            float& x = w[static_cast<size_t>(t.offset + i)];
            const auto element = static_cast<uint32_t>(i);
            const float noise =
                0.3f *
                philox_normal({1, Purpose::test}, {0, 0, static_cast<uint32_t>(t.role), element});
            // Norm weights start at one, biases at zero.
            x = t.shape.size() == 1 ? x + noise : x * gain;
        }
    }
    return w;
}

struct Step {
    double loss_sum = 0;
    std::vector<std::vector<float>> gradients{};  // of each layer, the trainable prefix
    uint32_t nonfinite = 0;
    bool operator==(const Step& o) const {
        return loss_sum == o.loss_sum && gradients == o.gradients;
    }
};

constexpr int kGpu = -1, kGpuCudnn = -2;

// threads 0: the reference operations; kGpu: the GPU's, kGpuCudnn: with cuDNN's attention where
// this build has it; null where there is no GPU.
inline std::unique_ptr<ops::Ops> ops_for(int threads, Team& team) {
    std::string why;
    if (threads == kGpu) return ops::make_mirrored_ops(why);
    if (threads == kGpuCudnn) return ops::make_mirrored_ops(why, AttentionKernels::best);
    return threads > 0 ? ops::make_cpu_ops(team) : ops::make_reference_ops();
}

class Runner {
public:
    Runner(Setting setting, int threads)
        : setting_(std::move(setting)),
          team_(std::max(threads, 1)),
          ops_(ops_for(threads, team_)),
          decoder_(setting_.shape, setting_.numerics,
                   layers_of(setting_.shape, setting_.freeze, false), *ops_) {
        const auto count = static_cast<size_t>(setting_.numerics.tokens());
        for (size_t i = 0; i < count; ++i) {
            tokens.push_back(
                static_cast<int32_t>((i * i * 5 + i) % static_cast<size_t>(setting_.shape.vocab)));
            targets.push_back(setting_.mask_all || i % 4 == 2
                                  ? -1
                                  : static_cast<int32_t>(
                                        (i * 11 + 3) % static_cast<size_t>(setting_.shape.vocab)));
        }
        for (const Layer& l : decoder_.layers()) weights.push_back(weights_of(setting_, l));
        set_documents();
    }

    const Decoder& decoder() const { return decoder_; }

    // Every layer's gradients start at `start`.
    Step step(bool first_block_needs_dx = true, float start = 0) {
        const int64_t blocks = setting_.shape.layers;
        const auto bytes = static_cast<size_t>(decoder_.activation_bytes());
        std::vector<std::vector<std::byte>> x(static_cast<size_t>(blocks + 1),
                                              std::vector<std::byte>(bytes));
        std::vector<std::byte> dx(bytes),
            scratch(static_cast<size_t>(decoder_.scratch_bytes()) + 64);
        std::byte* room =
            scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
        std::vector<OfSaved<std::vector<std::byte>>> saved(static_cast<size_t>(blocks));
        struct Deferred {
            std::vector<std::byte> products{};
            std::vector<float> norms{};
        };
        std::vector<Deferred> deferred(static_cast<size_t>(blocks));
        const auto aligned = [](std::vector<std::byte>& of) {
            return of.data() + (64 - reinterpret_cast<uintptr_t>(of.data()) % 64) % 64;
        };
        const auto saved_of = [&](size_t block) {
            SavedMemory memory{};
            for (const Saved what : kAllSaved) {
                if (!saves[model::at(what)]) continue;
                std::vector<std::byte>& own = saved[block][model::at(what)];
                own.resize(static_cast<size_t>(decoder_.saved_bytes(what)) + 64);
                memory[model::at(what)] =
                    own.data() + (64 - reinterpret_cast<uintptr_t>(own.data()) % 64) % 64;
            }
            return memory;
        };
        Step s;
        for (const Layer& l : decoder_.layers()) {
            s.gradients.emplace_back(static_cast<size_t>(l.trainable_elements), start);
        }
        // What is looked up is added to, and adds to few rows.
        if (fresh && !setting_.shape.tie_embeddings) std::ranges::fill(s.gradients[0], 0.0f);
        const auto sums = [&](size_t layer) {
            return ops::Accumulator(
                s.gradients[layer].empty() ? nullptr : s.gradients[layer].data(), fresh);
        };
        std::vector<std::vector<uint16_t>> narrow;
        const auto at = [&](size_t layer) -> const void* { return compute_weights(layer, narrow); };
        const bool tied = setting_.shape.tie_embeddings;
        const Documents documents = this->documents();
        decoder_.embed(tokens.data(), at(0), x[0].data(), room, documents);
        for (int64_t b = 0; b < blocks; ++b) {
            const auto i = static_cast<size_t>(b);
            decoder_.forward(b, at(i + 1), x[i].data(), x[i + 1].data(), &s.nonfinite, room,
                             saved_of(i), documents);
        }
        for (auto& block : saved) {
            for (const Saved what : kAllSaved) {
                if (forgets[model::at(what)])
                    std::ranges::fill(block[model::at(what)], std::byte{});
            }
        }
        const auto last = static_cast<size_t>(blocks + 1);
        float* table_gradient = s.gradients[0].empty() ? nullptr : s.gradients[0].data();
        decoder_.head(at(last), tied ? at(0) : nullptr, x.back().data(), targets.data(), scale,
                      stops_at_head ? nullptr : dx.data(), sums(last), tied ? sums(0) : nullptr,
                      &s.loss_sum, room);
        for (int64_t b = stops_at_head ? -1 : blocks - 1; b >= 0; --b) {
            const auto i = static_cast<size_t>(b);
            const bool needs_dx = b > 0 || first_block_needs_dx;
            if (!defers || s.gradients[i + 1].empty()) {
                decoder_.backward(b, at(i + 1), x[i].data(), dx.data(), needs_dx, sums(i + 1), room,
                                  saved_of(i), documents);
                continue;
            }
            deferred[i].products.resize(static_cast<size_t>(decoder_.deferred_bytes()) + 64);
            deferred[i].norms.resize(static_cast<size_t>(norm_elements(decoder_.layers()[i + 1])));
            decoder_.input_gradients(b, at(i + 1), x[i].data(), dx.data(), needs_dx,
                                     deferred[i].norms.data(), room, saved_of(i), documents,
                                     aligned(deferred[i].products));
        }
        std::ranges::fill(scratch, std::byte{0x55});
        for (size_t i = 0; i < deferred.size(); ++i) {
            if (deferred[i].products.empty()) continue;
            decoder_.weight_gradients(static_cast<int64_t>(i), i > 0 || first_block_needs_dx,
                                      sums(i + 1), room, saved_of(i), aligned(deferred[i].products),
                                      deferred[i].norms.data());
        }
        if (first_block_needs_dx && !stops_at_head && table_gradient != nullptr) {
            decoder_.embed_backward(tokens.data(), dx.data(), table_gradient, room, documents);
        }
        last_x = x.back();
        return s;
    }

    std::vector<int32_t> tokens{}, targets{};
    std::vector<std::vector<float>> weights{};
    std::vector<std::byte> last_x{};
    float scale = 0.1f;
    OfSaved<bool> saves{};       // from forward to backward
    OfSaved<bool> forgets{};     // what was saved is zeros
    bool stops_at_head = false;  // nothing below trains
    bool defers = false;         // blocks' weights' gradients come behind all else
    bool fresh = false;          // gradients count as zeros, whatever they start at

private:
    Documents documents() const {
        if (setting_.document_start.empty()) return {};
        return {.start = setting_.document_start.data(), .end = document_end_.data()};
    }
    // Each ends where the next one begins, or the row.
    void set_documents() {
        const auto& start = setting_.document_start;
        const auto sequence = static_cast<size_t>(setting_.numerics.sequence);
        document_end_.resize(start.size());
        for (size_t t = start.size(); t-- > 0;) {
            const bool last = t % sequence == sequence - 1;
            const bool goes_on = !last && start[t + 1] == start[t];
            document_end_[t] =
                goes_on ? document_end_[t + 1] : static_cast<int32_t>(t % sequence + 1);
        }
    }
    const void* compute_weights(size_t layer, std::vector<std::vector<uint16_t>>& narrow) const {
        const DType compute = setting_.numerics.compute;
        if (compute == DType::f32) return weights[layer].data();
        if (narrow.empty()) {
            for (const auto& w : weights) {
                narrow.emplace_back();
                for (const float x : w)
                    narrow.back().push_back(compute == DType::bf16 ? to_bf16(x) : to_f16(x));
            }
        }
        return narrow[layer].data();
    }

    Setting setting_;
    std::vector<int32_t> document_end_{};
    Team team_;
    std::unique_ptr<ops::Ops> ops_;
    Decoder decoder_;
};

}  // namespace ferry::model
