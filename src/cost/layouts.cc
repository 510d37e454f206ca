#include "cost/layouts.h"

#include <algorithm>
#include <tuple>

namespace ferry::cost {
namespace {

template <class Body>
void for_divisors(int64_t of, int64_t most, const Body& body) {
    for (int64_t d = 1; d <= std::min(of, most); ++d)
        if (of % d == 0) body(d);
}

class Search {
public:
    Search(const ModelSizes& model, const Cluster& cluster, const FixedLayout& fixed)
        : m_(model), c_(cluster), fixed_(fixed) {}

    FoundLayouts find(size_t most) {
        // A group that the user has chosen may span hosts; it is priced so.
        const int64_t widest = fixed_.tensor ? c_.ranks : c_.on_a_host;
        for_choices(fixed_.tensor, c_.ranks, widest, [&](int64_t tensor) {
            if (!may_slice(tensor)) return;
            const int64_t left = c_.ranks / tensor;
            for_choices(fixed_.sequence, left, left, [&](int64_t sequence) {
                if (!may_share_sequences(tensor, sequence)) return;
                for_choices(fixed_.pipeline, left / sequence, m_.blocks, [&](int64_t pipeline) {
                    const int64_t replicas = left / sequence / pipeline;
                    if (m_.sequences % replicas != 0) return;
                    find_of({.tensor = tensor,
                             .sequence = sequence,
                             .pipeline = pipeline,
                             .replicas = replicas});
                });
            });
        });
        // Of equally fast ones the simpler.
        std::ranges::sort(found_.best, {}, [](const Layout& l) {
            return std::tuple(l.seconds, l.pipeline, l.tensor, l.sequence);
        });
        if (found_.best.size() > most) found_.best.resize(most);
        if (found_.set_aside && found_.best.front().seconds <= found_.set_aside->seconds)
            found_.set_aside.reset();
        return std::move(found_);
    }

private:
    // The chosen one, where it divides `of`; else each divisor.
    template <class Body>
    static void for_choices(const std::optional<int64_t>& chosen, int64_t of, int64_t most,
                            const Body& body) {
        for_divisors(of, most, [&](int64_t d) {
            if (!chosen || d == *chosen) body(d);
        });
    }
    bool may_slice(int64_t tensor) const {
        if (fixed_.tensor) return refusal_of_heads(m_, tensor).empty();
        return refusal_of_tensor(m_, c_, tensor).empty();
    }
    bool may_share_sequences(int64_t tensor, int64_t sequence) const {
        if (sequence == 1) return true;
        return m_.sequence % sequence == 0 && m_.kv_heads % (tensor * sequence) == 0;
    }

    // The best of one way to divide the ranks.
    void find_of(Layout layout) {
        if (layout.pipeline == 1 && fixed_.needs_stages()) return;
        fastest_ = fastest_of_whole_state_ = {};
        const int64_t each = m_.sequences / layout.replicas;
        for_divisors(each, kMostSequences, [&](int64_t micro_batch) {
            layout.micro_batch = micro_batch;
            layout.micro_batches = each / micro_batch;
            if (layout.pipeline == 1) return weigh_tiers(layout);
            for (const Order order : fixed_.orders) {
                layout.order = order;
                layout.virtual_stages = 1;
                weigh_virtual_stages(layout);
            }
        });
        const Layout& whole = fastest_of_whole_state_;
        const bool others = fastest_.seconds > 0;
        if (whole.seconds > 0 && (!others || kArithmeticErrs * whole.seconds < fastest_.seconds))
            return found_.best.push_back(whole);
        if (!others) return;
        found_.best.push_back(fastest_);
        std::optional<Layout>& aside = found_.set_aside;
        if (whole.seconds > 0 && (!aside || whole.seconds < aside->seconds)) aside = whole;
    }

    // Several virtual stages have as many blocks each.
    void weigh_virtual_stages(Layout layout) {
        const bool interleaved = layout.order == Order::interleaved,
                   robin = layout.order == Order::round_robin;
        if (!interleaved && !robin) {
            if (fixed_.virtual_stages.value_or(1) == 1) weigh_groups(layout);
            return;
        }
        if (m_.blocks % layout.pipeline != 0) return;
        const int64_t of_a_stage = m_.blocks / layout.pipeline;
        for_choices(fixed_.virtual_stages, of_a_stage, of_a_stage, [&](int64_t count) {
            layout.virtual_stages = count;
            if (robin || count > 1) weigh_groups(layout);
        });
    }
    void weigh_groups(Layout layout) {
        const auto weigh = [&](int64_t size) {
            layout.groups = layout.micro_batches / size;
            // Sets of interleaved groups are as many as there are stages.
            if (layout.order == Order::interleaved && layout.groups < layout.pipeline) return;
            weigh_tiers(layout);
        };
        for_divisors(layout.micro_batches, kMostOfAGroup, weigh);
        if (layout.micro_batches > kMostOfAGroup) weigh(layout.micro_batches);
    }
    // Ranks that share nothing out are alike at every stage.
    bool differs(const Layout& layout, int64_t stage) const {
        return stage == 1 || layout.replicas * layout.sequence > 1;
    }
    void weigh_tiers(Layout layout) {
        if (fixed_.zero_stage) return weigh_stage(layout, *fixed_.zero_stage);
        for (const int64_t stage : {1, 3, 0})
            if (differs(layout, stage)) weigh_stage(layout, stage);
    }
    void weigh_stage(Layout layout, int64_t stage) {
        layout.zero_stage = stage;
        for (const StateOn state : kStateOn) {
            // Sums come back to the hosts of all.
            if (stage == 0 && state == StateOn::device && differs(layout, stage)) continue;
            layout.state = state;
            for (const bool stay : {true, false}) {
                if (!stay && state == StateOn::device) continue;
                layout.weights_stay = stay;
                keep(weigh(m_, c_, layout));
            }
        }
    }
    void keep(const Weighed& weighed) {
        ++found_.weighed;
        const bool whole = weighed.layout.zero_stage == 0 && !fixed_.zero_stage;
        Layout& fastest = whole ? fastest_of_whole_state_ : fastest_;
        if (weighed.fits && (fastest.seconds == 0 || weighed.layout.seconds < fastest.seconds))
            fastest = weighed.layout;
    }

    const ModelSizes& m_;
    const Cluster& c_;
    const FixedLayout& fixed_;
    Layout fastest_{}, fastest_of_whole_state_{};  // of stages above 0, or as chosen; of stage 0
    FoundLayouts found_{};
};

}  // namespace

bool FixedLayout::needs_stages() const {
    if (pipeline == 1) return false;
    return virtual_stages.value_or(1) > 1 ||
           std::ranges::find(orders, Order::one_f_one_b) == orders.end();
}

AtBound at_bound(const Layout& of) {
    const int64_t sequences = of.micro_batches * of.micro_batch,
                  size = of.micro_batches / of.groups;
    // Whether `of` has a divisor in (`above`, `most`], but for itself.
    const auto divides = [](int64_t number, int64_t above, int64_t most) {
        for (int64_t d = above + 1; d <= std::min(most, number / 2); ++d)
            if (number % d == 0) return true;
        return false;
    };
    AtBound found;
    found.sequences = sequences > kMostSequences && of.micro_batch <= kMostSequences &&
                      !divides(sequences, of.micro_batch, kMostSequences);
    found.group = of.pipeline > 1 && size < of.micro_batches &&
                  !divides(of.micro_batches, size, kMostOfAGroup) &&
                  divides(of.micro_batches, kMostOfAGroup, of.micro_batches);
    return found;
}

FoundLayouts best_layouts(const ModelSizes& model, const Cluster& cluster, size_t most,
                          const FixedLayout& fixed) {
    return Search(model, cluster, fixed).find(most);
}

}  // namespace ferry::cost
