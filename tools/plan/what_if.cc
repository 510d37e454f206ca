#include "what_if.h"

#include <algorithm>
#include <tuple>

#include "ferry/error.h"
#include "ferry/units.h"
#include "train/setup/from_config.h"

namespace ferry::tools {
namespace {

constexpr double kMore = 1.1;  // a speed, 10 % higher

class Asker {
public:
    Asker(const Config& config, const train::Predictor& predictor, const planner::Plan& plan,
          const cost::Measurements& measurements)
        : request_(train::request_of(config)),
          may_split_(may_split(config)),
          may_code_(may_code(config)),
          predictor_(predictor),
          plan_(plan),
          measurements_(measurements) {}

    std::vector<WhatIf> ask() {
        more_memory("+1 GiB of device memory", &BudgetConfig::device_bytes);
        more_memory("+1 GiB of host memory", &BudgetConfig::host_bytes);
        using cost::Measurements;
        if (plan_.nvme_bytes > 0) faster("+10 % NVMe bandwidth", &Measurements::nvme_bytes_per_s);
        faster("+10 % memory bandwidth", &Measurements::dram_bytes_per_s);
        faster("+10 % copy bandwidth", &Measurements::copy_bytes_per_s);
        if (!plan_.partition.decides_alone()) faster_exchanges();
        faster_kernels();
        more_cores();
        never_clipped();
        smaller_state();
        return std::move(answers_);
    }

private:
    void answer(std::string change, const planner::PlanRequest& request, const planner::Plan& plan,
                const cost::Measurements& measurements) {
        const train::Prediction prediction = predictor_.predict(request, plan, measurements);
        answers_.push_back({std::move(change), prediction.step_seconds});
    }

    void more_memory(std::string change, int64_t BudgetConfig::*budget) {
        if (request_.budgets.*budget == kUnlimited) return;
        planner::PlanRequest request = request_;
        request.budgets.*budget += kGiB;
        answer(std::move(change), request, predictor_.plan(request), measurements_);
    }
    void faster(std::string change, double cost::Measurements::*speed) {
        cost::Measurements measurements = measurements_;
        measurements.*speed *= kMore;
        answer(std::move(change), request_, plan_, measurements);
    }
    // Of every group of ranks, however near.
    void faster_exchanges() {
        using cost::Measurements;
        cost::Measurements measurements = measurements_;
        measurements.comm_bytes_per_s = kMore * cost::comm_rate(measurements);
        for (const auto group :
             {&Measurements::with_sequence, &Measurements::with_slices, &Measurements::in_host,
              &Measurements::across_hosts, &Measurements::between_stages})
            (measurements.*group).bytes_per_s *= kMore;
        answer("+10 % bandwidth between ranks", request_, plan_, measurements);
    }
    static void scale(cost::KernelTimes& kernels, double factor) {
        for (auto& [kind, seconds] : kernels.seconds) seconds *= factor;
        for (double& seconds : kernels.saved_s) seconds *= factor;
    }
    void faster_kernels() {
        cost::Measurements measurements = measurements_;
        scale(measurements.kernels, 1 / kMore);
        answer("+10 % compute", request_, plan_, measurements);
    }
    // Kernels on the host take all cores and share out well; the update is bound by memory.
    void more_cores() {
        cost::Measurements measurements = measurements_;
        const auto cores = static_cast<double>(measurements.threads++);
        if (measurements.computes_on_host) scale(measurements.kernels, cores / (cores + 1));
        answer("+1 core", request_, plan_, measurements);
    }

    // Where a plan made for steps whose speculative updates are committed alone saves something
    // else.
    void never_clipped() {
        if (!plan_.speculative || request_.swap.expect_clipped) return;
        planner::PlanRequest request = request_;
        request.swap.expect_clipped = 0;
        const planner::Plan plan = predictor_.plan(request);
        const auto what = [](const planner::Plan& of) {
            return std::tuple(
                of.groups, of.blocks_saving_inputs(), of.blocks_saving(model::Saved::attention),
                of.blocks_saving(model::Saved::mlp), of.blocks_saving(model::Saved::projections));
        };
        if (what(plan) != what(plan_) && predictor_.covers(plan, measurements_.kernels))
            answer("swap.expect_clipped=0", request, plan, measurements_);
    }

    static bool in_memory(const std::vector<planner::Plan>& stages) {
        return std::ranges::all_of(stages, [](const auto& of) { return of.nvme_bytes == 0; });
    }
    // None: that cannot be planned, such as codes where optimizer.fp32_moments matches nothing.
    std::vector<planner::Plan> plans_of(const planner::PlanRequest& request) const {
        try {
            return predictor_.plans(request);
        } catch (const Error&) {
            return {};
        }
    }
    // Formats of the state that take less of a disk, or none of it. What was asked to be there
    // stays.
    void smaller_state() {
        if (request_.durable || request_.swap.state_on_nvme) return;
        if (in_memory(predictor_.plans(request_))) return;
        const StateFormat now = request_.state;
        const auto ask = [&](std::string change, MomentType moments, bool split) {
            StateFormat smaller = now;
            if (now.moments > 0) smaller.moment_type = moments;
            smaller.split = split;
            if (smaller.element_bytes() >= now.element_bytes()) return;
            planner::PlanRequest request = request_;
            request.state = smaller;
            const std::vector<planner::Plan> stages = plans_of(request);
            if (stages.empty() || !predictor_.covers(stages.front(), measurements_.kernels)) return;
            answer(std::move(change), request, stages.front(), measurements_);
            answers_.back().all_in_memory = in_memory(stages);
        };
        const bool split = may_split_ && !now.split;
        if (split) ask("optimizer.master=split", now.moment_type, true);
        ask("optimizer.moments=bf16", MomentType::bf16, now.split);
        if (may_code_) ask("optimizer.moments=int8", MomentType::int8, now.split);
        if (may_code_ && split) ask("moments=int8 and master=split", MomentType::int8, true);
    }

    const planner::PlanRequest request_;
    const bool may_split_, may_code_;
    const train::Predictor& predictor_;
    const planner::Plan& plan_;
    const cost::Measurements& measurements_;
    std::vector<WhatIf> answers_{};
};

}  // namespace

bool may_split(const Config& config) {
    return config.precision != DType::f32 && config.optimizer.local_step_clipper == 1;
}
bool may_code(const Config& config) {
    return config.parallel.tensor == 1 || config.checkpoint.dir.empty();
}

std::vector<WhatIf> what_if(const Config& config, const train::Predictor& predictor,
                            const planner::Plan& plan, const cost::Measurements& measurements) {
    return Asker(config, predictor, plan, measurements).ask();
}

}  // namespace ferry::tools
