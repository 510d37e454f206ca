#include "what_if.h"

#include <tuple>

#include "ferry/units.h"
#include "train/from_config.h"

namespace ferry::tools {
namespace {

constexpr double kMore = 1.1;  // of a speed

class Asker {
public:
    Asker(const Config& config, const train::Forecaster& forecaster, const planner::Plan& plan,
          const cost::Measurements& figures)
        : request_(train::request_of(config)),
          forecaster_(forecaster),
          plan_(plan),
          figures_(figures) {}

    std::vector<WhatIf> ask() {
        more_memory("+1 GiB of device memory", &BudgetConfig::device_bytes);
        more_memory("+1 GiB of host memory", &BudgetConfig::host_bytes);
        using cost::Measurements;
        if (plan_.nvme_bytes > 0) faster("+10 % NVMe bandwidth", &Measurements::nvme_bytes_per_s);
        faster("+10 % memory bandwidth", &Measurements::dram_bytes_per_s);
        faster("+10 % copy bandwidth", &Measurements::copy_bytes_per_s);
        if (!plan_.partition.alone())
            faster("+10 % bandwidth between ranks", &Measurements::comm_bytes_per_s);
        faster_kernels();
        more_cores();
        never_clipped();
        return std::move(answers_);
    }

private:
    void answer(std::string change, const planner::PlanRequest& request, const planner::Plan& plan,
                const cost::Measurements& figures) {
        const train::Forecast forecast = forecaster_.forecast(request, plan, figures);
        answers_.push_back({std::move(change), forecast.timeline.step_seconds});
    }

    void more_memory(std::string change, int64_t BudgetConfig::*budget) {
        if (request_.budgets.*budget == kUnlimited) return;
        planner::PlanRequest request = request_;
        request.budgets.*budget += kGiB;
        answer(std::move(change), request, forecaster_.plan(request), figures_);
    }
    void faster(std::string change, double cost::Measurements::*speed) {
        cost::Measurements figures = figures_;
        figures.*speed *= kMore;
        answer(std::move(change), request_, plan_, figures);
    }
    static void scale(cost::KernelTimes& kernels, double factor) {
        for (auto& [kind, seconds] : kernels.seconds) seconds *= factor;
        for (double& seconds : kernels.saved_s) seconds *= factor;
    }
    void faster_kernels() {
        cost::Measurements figures = figures_;
        scale(figures.kernels, 1 / kMore);
        answer("+10 % compute", request_, plan_, figures);
    }
    // Kernels on the host take all cores and share out well; the update is bound by memory.
    void more_cores() {
        cost::Measurements figures = figures_;
        const auto cores = static_cast<double>(figures.threads++);
        if (figures.computes_on_host) scale(figures.kernels, cores / (cores + 1));
        answer("+1 core", request_, plan_, figures);
    }

    // Where a plan made for steps whose speculative updates are committed alone keeps something
    // else.
    void never_clipped() {
        if (!plan_.speculative || request_.swap.expect_clipped) return;
        planner::PlanRequest request = request_;
        request.swap.expect_clipped = 0;
        const planner::Plan plan = forecaster_.plan(request);
        const auto what = [](const planner::Plan& of) {
            return std::tuple(of.groups, of.blocks_saving_inputs(),
                              of.blocks_saving(model::Saved::attention),
                              of.blocks_saving(model::Saved::mlp));
        };
        if (what(plan) != what(plan_) && forecaster_.covers(plan, figures_.kernels))
            answer("swap.expect_clipped=0", request, plan, figures_);
    }

    const planner::PlanRequest request_;
    const train::Forecaster& forecaster_;
    const planner::Plan& plan_;
    const cost::Measurements& figures_;
    std::vector<WhatIf> answers_{};
};

}  // namespace

std::vector<WhatIf> what_if(const Config& config, const train::Forecaster& forecaster,
                            const planner::Plan& plan, const cost::Measurements& figures) {
    return Asker(config, forecaster, plan, figures).ask();
}

}  // namespace ferry::tools
