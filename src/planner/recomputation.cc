#include <algorithm>
#include <functional>
#include <limits>

#include "placement.h"
#include "step_seconds.h"

namespace ferry::planner {

int64_t blocks_asked_to_keep(const Config& config, model::Kept what) {
    return what == model::Kept::attention ? config.swap.keep_attention : config.swap.keep_mlp;
}

namespace {

// By what a byte of it saves, and of alike ones those of the last blocks that backward visits:
// theirs is kept for the shortest time.
std::vector<KeptResult> results_by_gain(const Workload& work, const MachineFigures& machine) {
    std::vector<KeptResult> results;
    bool trains = false;
    for (size_t l = 0; l < work.layers.size(); ++l) {
        trains = trains || work.layers[l].trainable_elements > 0;
        if (!trains || work.layers[l].kind != model::LayerKind::block) continue;
        for (const model::Kept what : model::kAllKept) {
            if (work.needs.kept[at(what)] > 0) results.push_back({l, what});
        }
    }
    std::ranges::reverse(results);
    std::ranges::stable_sort(results, std::greater(), [&](const KeptResult& result) {
        return seconds_of(result, work, machine) /
               static_cast<double>(buffer_bytes(class_of(result.what), work));
    });
    return results;
}

// What the configuration asks for, then what it leaves to the planner.
struct Choice {
    std::vector<KeptResult> results{};
    size_t asked = 0;  // of the first ones
};
Choice choice_of(const Config& config, const std::vector<KeptResult>& results) {
    Choice found;
    model::OfKept<int64_t> blocks{};
    for (const KeptResult& result : results) {
        if (blocks[at(result.what)]++ < blocks_asked_to_keep(config, result.what))
            found.results.push_back(result);
    }
    found.asked = found.results.size();
    std::ranges::copy_if(results, std::back_inserter(found.results), [&](const KeptResult& result) {
        return blocks_asked_to_keep(config, result.what) < 0;
    });
    return found;
}

constexpr double kNever = std::numeric_limits<double>::infinity();

// How many of the results a step keeps, in how many groups (0: the fewest that fit), and its
// seconds.
struct Way {
    size_t kept = 0;
    int64_t groups = 0;
    double seconds = kNever;
};

class Search {
public:
    Search(const Config& config, const Workload& work, const std::vector<Chunk>& chunks,
           const std::vector<Park>& parks, const MachineFigures& machine)
        : config_(config),
          work_(work),
          chunks_(chunks),
          parks_(parks),
          machine_(machine),
          choice_(choice_of(config, results_by_gain(work, machine))) {}

    Placement find() const {
        const Placement least = placement_of({choice_.asked});
        if (config_.budgets.device_bytes == kUnlimited) return least;  // what is to spare?
        Way best = shortest(0);
        // A further group sends weights and gradients once more, and needs less for each block.
        // What ranks would exchange for it is not in the sums.
        const int64_t micro_batches = config_.batch.micro_batches;
        const bool may_divide = config_.swap.groups == 0 && work_.partition.alone();
        for (int64_t groups = least.groups + 1; may_divide && groups <= micro_batches; ++groups) {
            if (micro_batches % groups != 0) continue;
            const Way way = shortest(groups);
            if (way.seconds < best.seconds * (1 - kWorthDividing)) best = way;
        }
        return best.seconds == kNever ? least : placement_of(best);
    }

private:
    // The sums know of no link that waits for another; a step in more groups has more such.
    static constexpr double kWorthDividing = 0.02;

    Placement placement_of(const Way& way) const {
        Config config = config_;
        if (way.groups > 0) config.swap.groups = way.groups;
        return place(config, work_, chunks_, parks_, machine_,
                     std::span(choice_.results).first(way.kept));
    }

    double seconds_of_way(const Way& way) const {
        try {
            const Placement placement = placement_of(way);
            int64_t kept = 0;
            for (const auto& of_layers : placement.kept)
                kept += std::ranges::count(of_layers, true);
            if (kept == static_cast<int64_t>(way.kept))
                return step_seconds(config_, work_, chunks_, parks_, placement, machine_);
        } catch (const Error& error) {
            if (error.trouble() != Trouble::does_not_fit) throw;
        }
        return kNever;
    }

    // The less is computed, the more travels. All counts are tried: a chunk that no longer fits
    // makes steps in what travels, and so lesser minima.
    Way shortest(int64_t groups) const {
        Way best;
        for (size_t kept = choice_.asked; kept <= choice_.results.size(); ++kept) {
            Way way{kept, groups};
            way.seconds = seconds_of_way(way);
            if (way.seconds == kNever) break;
            if (way.seconds < best.seconds) best = way;
        }
        return best;
    }

    const Config& config_;
    const Workload& work_;
    const std::vector<Chunk>& chunks_;
    const std::vector<Park>& parks_;
    const MachineFigures& machine_;
    const Choice choice_;
};

}  // namespace

Placement place_for_speed(const Config& config, const Workload& work,
                          const std::vector<Chunk>& chunks, const std::vector<Park>& parks,
                          const MachineFigures& machine) {
    return Search(config, work, chunks, parks, machine).find();
}

}  // namespace ferry::planner
