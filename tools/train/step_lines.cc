#include "step_lines.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "ops/blas_kernels.h"
#include "run_table.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"

namespace ferry::tools {
namespace {

// Empty: the step was not skipped.
std::string why_skipped(const train::StepReport& report, const Config& config) {
    if (!report.skipped) return {};
    if (report.targets == 0) return "no real target";
    if (config.precision == DType::f16)
        return fmt::format("gradients overflowed at loss scale {}", report.loss_scale);
    return fmt::format("loss {:.4g}, gradient norm {:.4g}: not finite", report.loss,
                       report.gradient_norm);
}

}  // namespace

nlohmann::json to_json(const train::StepReport& report, const Config& config,
                       const Yardsticks& by) {
    const bool computed = report.targets > 0;
    const auto where = [](bool there, const auto& value) {
        return there ? nlohmann::json(value) : nlohmann::json();
    };
    const double mfu = computed ? mfu_of(by.model_flops / report.seconds, by.gemm_flops_per_s) : 0;
    const auto known = [](double value) {
        return value > 0 ? nlohmann::json(value) : nlohmann::json();
    };
    return {{"step", report.step},
            {"loss", where(computed, report.loss)},
            {"gradient_norm", where(computed, report.gradient_norm)},
            {"clip_factor", where(!report.skipped, report.clip_factor)},
            {"lr", report.lr},
            {"loss_scale", where(computed, report.loss_scale)},
            {"targets", report.targets},
            {"tokens", report.tokens},
            {"skipped", report.skipped},
            {"why_skipped", where(report.skipped, why_skipped(report, config))},
            {"speculative", report.speculative},
            {"committed", report.committed},
            {"seconds", report.seconds},
            {"tokens_per_second", static_cast<double>(report.tokens) / report.seconds},
            {"mfu", known(mfu)},
            {"bound_ratio", known(by.bound_seconds / report.seconds)}};
}

void print_step(const train::StepReport& report, const Config& config) {
    const int64_t steps = config.steps;
    if (report.skipped) {
        print("step {:>5}/{}  skipped: {}\n", report.step, steps, why_skipped(report, config));
        return;
    }
    print("step {:>5}/{}  loss {:.6f}  norm {:.4f}  lr {:.3e}  {:>7.0f} tokens/s{}{}\n",
          report.step, steps, report.loss, report.gradient_norm, report.lr,
          static_cast<double>(report.tokens) / report.seconds,
          report.clip_factor < 1 ? fmt::format("  clipped to {:.4f}", report.clip_factor) : "",
          report.speculative ? (report.committed ? "  committed" : "  rolled back") : "");
}

void print_evaluation(int64_t step, const train::Evaluation& found, const Config& config,
                      bool json) {
    if (json) {
        const nlohmann::json line{
            {"step", step}, {"evaluation_loss", found.loss}, {"perplexity", found.perplexity()}};
        print("{}", json_line(line));
    } else {
        print("step {:>5}/{}  held-back loss {:.6f}, perplexity {:.4g}\n", step, config.steps,
              found.loss, found.perplexity());
    }
}

void print_hash(int64_t step, const std::string& hash, const Config& config, bool json) {
    if (json) {
        nlohmann::json line{{"step", step}, {"state_hash", hash}};
        if (config.device == DeviceKind::cpu) line["kernels"] = ops::blas_core();
        print("{}", json_line(line));
    } else {
        print("step {:>5}/{}  state hash {}{}\n", step, config.steps, hash,
              config.device == DeviceKind::cpu
                  ? fmt::format(" with OpenBLAS's {} kernels (others round differently)",
                                ops::blas_core())
                  : "");
    }
}

}  // namespace ferry::tools
