#include "cost/rank_layout.h"

#include <spdlog/fmt/fmt.h>

#include "ferry/error.h"

namespace ferry::cost {

const char* name_of(StateOn tier) {
    switch (tier) {
        case StateOn::device:
            return "device";
        case StateOn::host:
            return "host";
        case StateOn::nvme:
            return "NVMe";
    }
    bug("no such tier");
}

const char* name_of(Order order) {
    switch (order) {
        case Order::one_f_one_b:
            return "1f1b";
        case Order::zero_bubble:
            return "zero_bubble";
        case Order::interleaved:
            return "interleaved";
        case Order::round_robin:
            return "round_robin";
    }
    bug("no such order");
}

double ModelSizes::parameters() const {
    return static_cast<double>(blocks * block.all() + (tied ? 1 : 2) * vocab * hidden +
                               embedding_whole + head_whole);
}

std::string refusal_of_heads(const ModelSizes& m, int64_t tensor) {
    const std::string heads = fmt::format("{} heads over {} of keys", m.heads, m.kv_heads);
    if (tensor > m.heads) return fmt::format("it has {} heads", m.heads);
    const bool shares_keys = tensor > m.kv_heads;
    if (shares_keys && (tensor % m.kv_heads != 0 || m.heads % tensor != 0))
        return heads + " cannot be divided so";
    if (m.has_patterns && !shares_keys && m.kv_heads % tensor != 0)
        return "a pattern's " + heads + " cannot be divided so";
    if (m.intermediate > 0 && tensor > m.intermediate) return "its MLP is not as wide";
    if (tensor > m.vocab) return "it has fewer tokens";
    return {};
}

std::string refusal_of_tensor(const ModelSizes& model, const Cluster& cluster, int64_t tensor) {
    if (cluster.ranks % tensor != 0) return fmt::format("{} ranks", cluster.ranks);
    if (cluster.on_a_host % tensor != 0)
        return fmt::format("a group would span hosts of {}", cluster.on_a_host);
    return refusal_of_heads(model, tensor);
}

}  // namespace ferry::cost
