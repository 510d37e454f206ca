#include "attention_report.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "ferry/error.h"
#include "pattern_picture.h"
#include "tools/output/svg.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

std::string text_of(const std::optional<train::PatternShare>& share, const Config& config) {
    const std::string documents = config.data.isolate_documents ? "documents isolated" : "";
    if (!share) return documents.empty() ? "" : "attention: " + documents + "\n\n";
    const std::string layouts =
        share->layouts > 1 ? fmt::format(", {} layouts a layer", share->layouts) : "";
    return fmt::format(
        "attention: {} in {} layer{}, blocks of {} tokens{}: {:.1f} % of the causal "
        "mask's pairs, {:.1f} % of its blocks{}\n\n",
        share->name, share->layers, share->layers == 1 ? "" : "s", share->block, layouts,
        100 * share->pairs, 100 * share->blocks, documents.empty() ? "" : "; " + documents);
}

nlohmann::json to_json(const std::optional<train::PatternShare>& share, const Config& config) {
    nlohmann::json attention = {{"pattern", "dense"},
                                {"documents_isolated", config.data.isolate_documents}};
    if (!share) return attention;
    attention["pattern"] = share->name;
    attention["block"] = share->block;
    attention["layers"] = share->layers;
    attention["layouts"] = share->layouts;
    attention["pairs"] = share->pairs;
    attention["blocks"] = share->blocks;
    return attention;
}

std::string text_of_longest(int64_t tokens, const Config& config) {
    const int ranks = config.parallel.sequence;
    const std::string batch = fmt::format(
        "{} x {} of them a step{}", config.batch.micro_batches, config.batch.micro_batch,
        ranks > 1 ? fmt::format(", over {} ranks each", ranks) : "");
    if (tokens == 0)
        return fmt::format("longest sequence: none of {} tokens fits, {}\n\n", train::kSequenceUnit,
                           batch);
    return fmt::format("longest sequence that fits: {}{} tokens, {}\n\n", tokens,
                       tokens == train::kSequenceMost ? " or more" : "", batch);
}

void draw_pattern(const std::string& file, const std::optional<train::PatternShare>& share,
                  const Config& config) {
    if (!share) {
        throw Error(Trouble::usage,
                    {.what = "there is no pattern to draw",
                     .where = "--pattern-svg",
                     .measured = "attention.pattern is dense",
                     .remedy = "set attention.pattern, or leave --pattern-svg out"});
    }
    write_picture(
        "--pattern-svg", file,
        pattern_svg(*share->lists, share->name,
                    fmt::format("{} tokens in blocks of {}, {:.1f} % of the causal mask",
                                config.batch.sequence, share->block, 100 * share->blocks)));
}

}  // namespace ferry::tools
