#include "stages.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <limits>

#include "base/log.h"
#include "cost/measurements.h"
#include "cost/operation_table.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "model_of.h"

namespace ferry::train {
namespace {

// Seconds that a micro-batch's kernels take in each layer, forward and backward.
class LayerSeconds {
public:
    LayerSeconds(const Config& config, const model::Shape& shape,
                 const std::vector<model::Layer>& whole)
        : whole_(whole),
          numerics_(numerics_of(config, shape)),
          machine_(cost::default_measurements(config.device)),
          attention_flops_(2.0 *
                           static_cast<double>(numerics_.tokens() * numerics_.whole_sequence() *
                                               shape.heads * shape.head_dim)),
          input_bytes_(numerics_.tokens() * shape.hidden * size_of(numerics_.residual)) {}

    double of(size_t layer) const {
        const model::LayerKind kind = whole_[layer].kind;
        double seconds = 0;
        for (const cost::OperationRow& row : cost::operations()) {
            if (row.layer != kind) continue;
            const bool back = row.pass == cost::Pass::backward;
            if (row.pass != cost::Pass::forward && row.pass != cost::Pass::both && !back) continue;
            if (back && kind == model::LayerKind::block && !trains_below(layer + 1)) continue;
            seconds += of(layer, row);
        }
        return seconds;
    }

private:
    bool trains_below(size_t layer) const {
        return std::any_of(whole_.begin(), whole_.begin() + std::ptrdiff_t(layer),
                           [](const model::Layer& l) { return l.trainable_elements > 0; });
    }
    // Multiplying or moving, whichever takes longer.
    double of(size_t layer, const cost::OperationRow& row) const {
        cost::Work work{.layer = &whole_[layer],
                        .flags = trains_below(layer) ? cost::kNeedsDx : uint8_t{0},
                        .tokens = numerics_.tokens(),
                        .tokens_bytes = numerics_.token_numbers() * 4,
                        .input_bytes = input_bytes_,
                        .compute = numerics_.compute,
                        .wire = numerics_.wire};
        const bool tied = whole_.back().find(model::Role::head_table) == nullptr;
        if (tied && row.layer == model::LayerKind::head) work.table = &whole_.front();
        work.saved_flops[model::at(model::Saved::attention)] = attention_flops_;
        const double moved = static_cast<double>(row.bytes(work)) / machine_.dram_bytes_per_s;
        const double flops = row.flops ? row.flops(work) : 0;
        return std::max(moved, flops / machine_.assumed_flops_per_s);
    }

    const std::vector<model::Layer>& whole_;
    const model::Numerics numerics_;
    const cost::Measurements machine_;
    const double attention_flops_;
    const int64_t input_bytes_;
};

// How many of the blocks come before each stage and behind the last one, so that the largest sum of
// a stage is the least; of several such cuts the one whose first stages have fewer blocks.
// `seconds`: of blocks, the first one's with the embedding's and the last one's with the head's.
std::vector<size_t> cut_evenly(const std::vector<double>& seconds, size_t stages) {
    const size_t blocks = seconds.size();
    std::vector<double> before(blocks + 1);
    for (size_t b = 0; b < blocks; ++b) before[b + 1] = before[b] + seconds[b];
    constexpr double kNever = std::numeric_limits<double>::infinity();
    // By stages and blocks: the largest sum of the best cut, and how many its last stage begins at.
    std::vector<std::vector<double>> most(stages + 1, std::vector<double>(blocks + 1, kNever));
    std::vector<std::vector<size_t>> from(stages + 1, std::vector<size_t>(blocks + 1));
    most[0][0] = 0;
    for (size_t s = 1; s <= stages; ++s) {
        for (size_t end = s; end <= blocks; ++end) {
            for (size_t first = s - 1; first < end; ++first) {
                const double sum = std::max(most[s - 1][first], before[end] - before[first]);
                if (sum >= most[s][end]) continue;
                most[s][end] = sum;
                from[s][end] = first;
            }
        }
    }
    std::vector<size_t> cuts(stages + 1);
    cuts[stages] = blocks;
    for (size_t s = stages; s > 0; --s) cuts[s - 1] = from[s][cuts[s]];
    return cuts;
}

}  // namespace

std::vector<zero::Stage> stages_of(const Config& config, const model::Shape& shape,
                                   const std::vector<model::Layer>& whole) {
    const auto stages = static_cast<size_t>(config.parallel.pipeline);
    const size_t blocks = whole.size() - 2;
    if (stages == 1) return {{.end = std::ssize(whole)}};
    if (stages > blocks)
        throw Error(Trouble::usage, {.what = "more stages than the model has blocks",
                                     .where = "parallel.pipeline",
                                     .measured = std::to_string(stages) + " stages",
                                     .limit = std::to_string(blocks) + " blocks",
                                     .remedy = "set it to " + std::to_string(blocks) + " or less"});
    const auto each = static_cast<size_t>(config.parallel.virtual_stages.value_or(1));
    const bool interleaved = config.parallel.schedule == PipelineSchedule::interleaved;
    if (stages * each > blocks)
        throw Error(Trouble::usage,
                    {.what = "more virtual stages than the model has blocks",
                     .where = "parallel.virtual_stages",
                     .measured = fmt::format("{} stages with {} each", stages, each),
                     .limit = std::to_string(blocks) + " blocks",
                     .remedy = interleaved && blocks / stages < 2
                                   ? "set parallel.schedule to auto, 1f1b or zero_bubble with "
                                     "virtual_stages 1, or parallel.pipeline lower"
                                   : fmt::format("set it to {} or less, or parallel.pipeline lower",
                                                 blocks / stages)});
    const LayerSeconds layers(config, shape, whole);
    std::vector<double> seconds(blocks);
    for (size_t b = 0; b < blocks; ++b) seconds[b] = layers.of(b + 1);
    seconds.front() += layers.of(0);
    seconds.back() += layers.of(blocks + 1);
    const std::vector<size_t> cuts = cut_evenly(seconds, stages * each);
    const bool tied = whole.back().find(model::Role::head_table) == nullptr;
    std::vector<zero::VirtualStage> all;
    bool trains_below = false;
    for (size_t k = 0; k < stages * each; ++k) {
        const zero::VirtualStage next{
            .first = k == 0 ? 0 : static_cast<int64_t>(cuts[k] + 1),
            .end = static_cast<int64_t>(cuts[k + 1] + (k + 1 == stages * each ? 2 : 1)),
            .trains_below = trains_below};
        for (int64_t l = next.first; l < next.end; ++l)
            trains_below = trains_below || whole[static_cast<size_t>(l)].trainable_elements > 0;
        all.push_back(next);
    }
    std::vector<zero::Stage> found;
    for (size_t s = 0; s < stages; ++s) {
        const PipelineSchedule schedule = config.parallel.schedule;
        zero::Stage stage{.index = static_cast<int>(s),
                          .count = static_cast<int>(stages),
                          .first = all[s].first,
                          .end = all[s + stages * (each - 1)].end,
                          .trains_below = all[s].trains_below,
                          .tied = tied && (s == 0 || s + 1 == stages),
                          .splits_backward = schedule == PipelineSchedule::zero_bubble,
                          .round_robin = schedule == PipelineSchedule::round_robin};
        for (size_t k = s; each > 1 && k < all.size(); k += stages) stage.several.push_back(all[k]);
        found.push_back(stage);
    }
    return found;
}

void warn_of_gathers(const planner::Plan& plan) {
    const zero::Partition& partition = plan.partition;
    const zero::Stage& stage = partition.stage;
    if (stage.all() || !partition.sharding.weights || plan.groups == 1) return;
    int64_t bytes = 0;
    for (int64_t l = 0; l < std::ssize(plan.layers); ++l) {
        const int64_t visits = plan.goes_back(l) ? 2 : 1;  // of a group
        bytes += visits * plan.groups *
                 zero::gathered_bytes(partition, plan.layers[static_cast<size_t>(l)], plan.compute);
    }
    log_warn(fmt::format(
        "zero.stage 3 with parallel.pipeline {}: each of {} groups of micro-batches gathers its "
        "stage's weights again, {} a step on each rank; set zero.stage to 2 where they fit, or "
        "swap.groups lower",
        stage.count, plan.groups, format_bytes(bytes)));
}

int stage_with(const std::vector<zero::Stage>& stages, int64_t layer) {
    for (const zero::Stage& stage : stages)
        if (stage.has(layer)) return stage.index;
    bug("a layer of no stage");
}

double bubble_of(int64_t groups, int stages, int64_t group_size, int64_t blocks,
                 bool splits_backward, int64_t virtual_stages) {
    // Visits of a block: of a group, and those until the next stage has something to do.
    const auto rounds = static_cast<double>(virtual_stages), size = static_cast<double>(group_size);
    const double each = static_cast<double>(blocks) / rounds, all = each * size,
                 first = (each - 1) * size + 1;
    const int64_t hops = stages - 1;
    double waits = static_cast<double>(hops) * first;
    if (splits_backward) {
        // From stage to stage a forward and a backward of inputs are waited for. Of each further
        // group that is left behind weights' gradients fill one hop, but for its first forward.
        constexpr double kForward = 0.25, kWeights = 0.25;
        const auto filled = static_cast<double>(std::min<int64_t>(hops, groups - 1));
        const double hop = (1 - kWeights) * first;
        waits = filled * std::max(kForward * first, hop - kWeights * all) +
                (static_cast<double>(hops) - filled) * hop;
    }
    // The first stage's next round begins when its first group has gone through all stages.
    const double visits = static_cast<double>(groups) * all;
    waits += (rounds - 1) * std::max(0.0, static_cast<double>(stages) * first - visits);
    return waits / (rounds * visits + waits);
}

std::string text_of(const std::vector<zero::Stage>& stages, int64_t layers) {
    std::string text;
    for (const zero::Stage& stage : stages)
        text += fmt::format("{}{}{}{}", text.empty() ? "" : "; ",
                            stage.is_first() ? "embedding and " : "", blocks_text(stage, layers),
                            stage.is_last() ? " and head" : "");
    return text;
}

std::string blocks_text(const zero::Stage& stage, int64_t layers) {
    std::string text;
    bool one = stage.virtual_stages() == 1;
    for (int64_t v = 0; v < stage.virtual_stages(); ++v) {
        const zero::VirtualStage of = stage.virtual_stage(v);
        const int64_t first = std::max<int64_t>(of.first, 1) - 1,
                      last = std::min(of.end, layers - 1) - 2;
        one = one && first == last;
        text += fmt::format(
            "{}{}", text.empty() ? "" : ", ",
            first == last ? std::to_string(first) : fmt::format("{} to {}", first, last));
    }
    return fmt::format("block{} {}", one ? "" : "s", text);
}

}  // namespace ferry::train
