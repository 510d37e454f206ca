#include "numerics_record.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "ferry/optim.h"
#include "model_of.h"
#include "ops/blas_kernels.h"
#include "ops/ops.h"
#include "train/setup/from_config.h"

namespace ferry::train {

namespace {

// Which list of operations an update is, and so what the state holds; not its constants.
std::string operations_of(const Config& config) {
    const optim::Hyper hyper = hyper_of(config);
    std::string text(name_of(hyper.method));
    if (hyper.method == optim::Method::sgd && hyper.momentum > 0)
        text += hyper.nesterov ? " with Nesterov momentum" : " with momentum";
    if (hyper.method == optim::Method::muon) {
        const OptimizerConfig& o = config.optimizer;
        text +=
            fmt::format("{} of the blocks' matrices in {} steps by {}/{}/{}{}, adamw of all else",
                        o.nesterov ? " with Nesterov momentum" : "", o.ns_steps,
                        o.ns_coefficients.a, o.ns_coefficients.b, o.ns_coefficients.c,
                        o.ns_products == DType::f32 ? "" : " with products in bf16");
        if (!o.adamw_tensors.empty())
            text += fmt::format(" and of {}", fmt::join(o.adamw_tensors, " "));
    }
    if (config.optimizer.method == optim::Method::onebit_adam)
        text += fmt::format(", momentum as {} after {} updates",
                            text_of(codecs_of(config).momentum), config.optimizer.freeze_step);
    if (config.optimizer.method == optim::Method::zeroone_adam) {
        const OptimizerConfig& o = config.optimizer;
        text += fmt::format(", momentum as {}, variance by {} until {}",
                            text_of(codecs_of(config).momentum), o.var_update_scaler,
                            o.var_freeze_step);
        if (o.local_step_clipper > 1)
            text += fmt::format(", local steps by {} up to {}", o.local_step_scaler,
                                o.local_step_clipper);
    }
    const StateFormat format = format_of(config);
    if (format.moments > 0 && format.moment_type == MomentType::bf16)
        text += ", moments bf16 rounded stochastically";
    if (coded_moments_of(config).coded)
        text += fmt::format(", moments int8 in blocks of {} by fused operations but fp32 of {}",
                            kMomentBlock, fmt::join(config.optimizer.fp32_moments, " "));
    if (format.split)
        text += config.precision == DType::f16 ? ", split master beside fp16" : ", split master";
    return text;
}

uint64_t checksum_of(const std::vector<double>& values) {
    return checksum(std::as_bytes(std::span(values)));
}

// The shape's options beside the sizes of a plain Llama.
std::string options_of(const model::Shape& s) {
    std::string text;
    const auto add = [&](bool there, const char* name) { text += there ? name : ""; };
    add(s.layer_norm, " layer-norm");
    add(!s.gated, " gelu");
    add(s.qkv_bias, " qkv-bias");
    add(s.output_bias, " output-bias");
    add(s.mlp_bias, " mlp-bias");
    add(s.head_norms, " head-norms");
    add(s.learned_positions > 0, " learned-positions");
    const model::RopeScaling& r = s.rope_scaling;
    if (r.kind != model::RopeScaling::Kind::none) {
        text += fmt::format(" rope-scaling {}/{}/{}/{}/{}/{}/{}/{}/{}", static_cast<int>(r.kind),
                            r.factor, r.original_positions, r.low_frequency, r.high_frequency,
                            r.beta_fast, r.beta_slow, r.amplitude, r.truncate);
        if (r.rotated < 1) text += fmt::format("/{}", r.rotated);
        if (!r.short_factors.empty())
            text += fmt::format("/{:016x}/{:016x}", checksum_of(r.short_factors),
                                checksum_of(r.long_factors));
    }
    if (s.padding_token >= 0) text += fmt::format(" padding-token {}", s.padding_token);
    if (!s.windows.empty()) text += fmt::format(" windows {}", fmt::join(s.windows, "/"));
    if (!s.patterns.empty()) text += " pattern " + s.pattern_text;
    return text;
}

}  // namespace

std::string shape_text(const model::Shape& s) {
    return fmt::format("{}x{} heads {}/{}x{} mlp {} vocab {} tied {} theta {} eps {}{}", s.layers,
                       s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.vocab,
                       s.tie_embeddings, s.rope_theta, s.norm_eps, options_of(s));
}

namespace {

std::string cpu_text(const std::string& libraries) { return "ops 3; " + libraries; }
std::string device_text(const Device& device, const std::string& libraries) {
    return "device " + device.architecture() + "; " + libraries;
}

}  // namespace

std::string library_text(const Device& device, const Config& config,
                         const ops::ProductTable* products) {
    if (device.kind() == DeviceKind::cpu) return cpu_text(ops::library_versions());
    return "ops 11; " + ops::cuda_library_versions(config.numerics.attention) +
           (products ? fmt::format(", products {:016x}", products->hash()) : "");
}

std::string machine_text(const Device& device, const Config& config,
                         const ops::ProductTable* products) {
    return device_text(device, library_text(device, config, products));
}

std::string machine_text_with(const Device& cpu, const std::string& blas_core) {
    FERRY_CHECK(cpu.kind() == DeviceKind::cpu);
    return device_text(cpu, cpu_text(ops::library_versions_with(blas_core)));
}

namespace {

std::string text_of(const Config& config, const model::Shape& s, int64_t micro_batches, int ranks,
                    const std::string& operations) {
    const model::Numerics n = numerics_of(without_idle_tiles(config, s), s);
    const zero::Codecs codecs = codecs_of(config);
    std::string coded;  // where no ranks have the same state nothing travels
    const bool travel = ranks > config.parallel.tensor * config.parallel.pipeline;
    if (travel && codecs.gradients.on()) {
        coded += ", gradients " + text_of(codecs.gradients);
        const int of_a_host = config.zero.ranks_per_host;
        if (of_a_host > 1 && of_a_host < ranks)
            coded += fmt::format(" combined in {} hosts of {}", ranks / of_a_host, of_a_host);
    }
    if (travel && codecs.weights.on()) coded += ", weights " + text_of(codecs.weights);
    if (n.parts > 1)
        coded += fmt::format(", sequences over {}{}", n.parts, n.ring ? " in a ring" : "");
    if (config.parallel.pipeline > 1)
        coded += fmt::format(", layers over {}", config.parallel.pipeline);
    const int rounds = config.parallel.virtual_stages.value_or(1);
    if (config.parallel.pipeline > 1 && rounds > 1) coded += fmt::format(" in {} rounds", rounds);
    if (n.slices > 1) coded += fmt::format(", tensors, vocabulary and rows over {}", n.slices);
    return fmt::format(
        "model {}; sequence {} micro-batch {} x {}; head tile {} {} tile {}; compute {} residual "
        "{} wire {}{}; ranks {}{}; optimizer {}",
        shape_text(s), n.whole_sequence(), n.micro_batch, micro_batches, n.head_tile,
        n.mlp_tile > 0 ? "block" : "mlp", n.mlp_tile,  // "mlp" where nothing but it had tiles
        name_of(n.compute), name_of(n.residual), name_of(n.wire),
        n.documents ? ", documents isolated" : "", ranks, coded, operations);
}

}  // namespace

std::string numerics_text(const Config& config, const model::Shape& shape,
                          const std::string& machine, int ranks) {
    return text_of(config, shape,
                   config.batch.micro_batches * config.parallel.sequence * config.parallel.tensor *
                       config.parallel.pipeline / ranks,
                   ranks, operations_of(config)) +
           "; " + machine;
}

std::string model_text(const Config& config, const model::Shape& shape, int ranks) {
    return text_of(config, shape, 1, ranks, operations_of({}));
}

uint64_t numerics_hash(const Config& config, const model::Shape& shape, const std::string& machine,
                       int ranks) {
    const std::string text = numerics_text(config, shape, machine, ranks);
    return checksum(std::as_bytes(std::span(text)));
}

NumericsRecord numerics_record_of(const Config& config, const model::Shape& shape,
                                  const std::string& machine, int ranks) {
    const uint64_t hash = numerics_hash(config, shape, machine, ranks);
    return {hash, fmt::format("{:016x} ({})", hash, numerics_text(config, shape, machine, ranks))};
}

}  // namespace ferry::train
