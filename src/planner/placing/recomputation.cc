#include "recomputation.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <span>

#include "place.h"
#include "speculation.h"
#include "step_seconds.h"

namespace ferry::planner {

namespace {

// By what a byte of it saves, and of alike ones those of the last blocks that backward visits:
// theirs are saved for the shortest time.
std::vector<SavedActivation> activations_by_gain(const PlanRequest& request, const Workload& work,
                                                 const cost::Measurements& machine) {
    // A machine file of before this kind of activation knows the seconds of others alone.
    const model::OfSaved<double>& timed = machine.kernels.saved_s;
    const bool any_timed = std::ranges::any_of(timed, [](double seconds) { return seconds > 0; });
    std::vector<SavedActivation> activations;
    bool trains = work.partition.stage.trains_below;
    for (size_t l = 0; l < work.layers.size(); ++l) {
        trains = trains || work.layers[l].trainable_elements > 0 ||
                 work.partition.stage.trains_before(static_cast<int64_t>(l));
        if (!trains || work.layers[l].kind != model::LayerKind::block) continue;
        if (!work.partition.stage.has(static_cast<int64_t>(l))) continue;
        for (const model::Saved what : model::kAllSaved) {
            const bool known =
                timed[at(what)] > 0 || !any_timed || blocks_asked_to_save(request, what);
            if (work.needs.saved[at(what)] > 0 && known) activations.push_back({l, what});
        }
    }
    std::ranges::reverse(activations);
    std::ranges::stable_sort(activations, std::greater(), [&](const SavedActivation& activation) {
        return seconds_of(activation, work, machine) /
               static_cast<double>(buffer_bytes(class_of(activation.what), work));
    });
    return activations;
}

// A choice of the configuration, or one that it leaves to the planner.
struct Choice {
    std::vector<SavedActivation> activations{};
    size_t asked = 0;  // how many of the first ones the configuration asks for
};
Choice choice_of(const PlanRequest& request, const std::vector<SavedActivation>& activations) {
    Choice found;
    model::OfSaved<int64_t> blocks{};
    for (const SavedActivation& activation : activations) {
        if (blocks[at(activation.what)]++ <
            blocks_asked_to_save(request, activation.what).value_or(0))
            found.activations.push_back(activation);
    }
    found.asked = found.activations.size();
    std::ranges::copy_if(activations, std::back_inserter(found.activations),
                         [&](const SavedActivation& activation) {
                             return !blocks_asked_to_save(request, activation.what);
                         });
    return found;
}

// In how many groups a step runs, of how many blocks it saves the inputs at most, and how many
// activations.
struct Candidate {
    int64_t groups = 1, inputs = 0;
    size_t activations = 0;
    StepSeconds seconds{};
};

// All candidates, and the best of them.
class Search {
public:
    Search(const PlanRequest& request, const Workload& work, const std::vector<Chunk>& chunks,
           const std::vector<AccumulatorSpill>& spills, const cost::Measurements& machine)
        : request_(request),
          work_(work),
          chunks_(chunks),
          spills_(spills),
          machine_(machine),
          choice_(choice_of(request, activations_by_gain(request, work, machine))) {}

    Placement find() {
        const std::vector<int64_t> inputs = inputs_to_try();
        std::vector<Groups> fitting = fitting_groups(inputs.front());
        if (fitting.empty() && lacks_host()) fitting = yielding_groups(inputs.front());
        if (fitting.empty() && refusal_) throw DoesNotFit(*refusal_);
        // For NVMe the layout says to the byte what is missing.
        const Groups plainest = fitting.empty() ? least_stored_ : fitting.front();
        if (fitting.empty() || request_.budgets.device_bytes == kUnlimited)  // none to spare
            return placement_of(in_groups(plainest), inputs.front(), choice_.asked);
        for (const Groups groups : fitting) {
            for (const int64_t count : inputs) try_activations(in_groups(groups), count);
        }
        const Candidate& best = best_candidate();
        return placement_of(in_groups(best.groups), best.inputs, best.activations);
    }

private:
    // A run that is clipped at every step speculates in vain: it must not be slower for what
    // speculation would gain. And the sums know of no link that waits for another, of which more
    // groups have more, and inputs that travel some.
    static constexpr double kMayLose = 1.01, kPerGroups = 1.02, kPerInputs = 1.01;

    // None: the fewest that fit.
    using Groups = std::optional<int64_t>;
    PlanRequest in_groups(Groups groups) const {
        PlanRequest request = request_;
        request.swap.groups = groups;
        return request;
    }
    Placement placement_of(const PlanRequest& request, int64_t inputs, size_t activations) const {
        return place(request, work_, chunks_, spills_, machine_,
                     {inputs, std::span(choice_.activations).first(activations)}, yielded_);
    }

    // Numbers of blocks to try, the most first. Copies of inputs that leave run beside a GPU's
    // kernels; the processors would make them themselves. Never all blocks: the last inputs would
    // come back as soon as they have left.
    std::vector<int64_t> inputs_to_try() const {
        const int64_t blocks = std::ssize(work_.layers) - 2;
        if (const auto asked = request_.swap.save_inputs) return {std::min(*asked, blocks)};
        std::vector<int64_t> counts{blocks};
        for (const int64_t eighths : {6, 4, 2, 1}) {
            const int64_t count = blocks * eighths / 8;
            if (!machine_.computes_on_host && count < counts.back()) counts.push_back(count);
        }
        return counts;
    }

    // The fewest first. A further group sends weights and gradients once more, and needs less for
    // each block. What ranks would exchange for it is not in the sums: theirs are the fewest that
    // fit.
    std::vector<Groups> groups_to_try() const {
        if (request_.swap.groups || !work_.partition.decides_alone()) return {request_.swap.groups};
        const std::vector<int64_t> counts = group_counts(request_.micro_batches);
        return {counts.begin(), counts.end()};
    }

    std::vector<Groups> fitting_groups(int64_t inputs) {
        std::vector<Groups> fitting;
        for (const Groups groups : groups_to_try()) {
            if (fits(in_groups(groups), inputs)) fitting.push_back(groups);
        }
        return fitting;
    }

    // The same where the device yields as little as is enough. Most asked are steps for which all
    // is not enough, and these are refused at once.
    std::vector<Groups> yielding_groups(int64_t inputs) {
        yielded_ = kMostYielded;
        std::vector<Groups> fitting = fitting_groups(inputs);
        if (fitting.empty()) return fitting;
        for (yielded_ = 1; yielded_ < kMostYielded; ++yielded_) {
            std::vector<Groups> sooner = fitting_groups(inputs);
            if (!sooner.empty()) return sooner;
        }
        return fitting;
    }

    // Whether the device could hold what the host cannot. With NVMe the host lacks nothing that
    // could be there. Ranks all have as many buffers, whoever of them lacks memory.
    bool lacks_host() const {
        return refusal_ && refusal_->tier() == swap::Tier::host && request_.budgets.nvme.empty() &&
               work_.partition.decides_alone();
    }

    // Whether a step can do without any memory to spare; records what the one that needs least
    // lacks.
    bool fits(const PlanRequest& request, int64_t inputs) {
        try {
            const Placement placement = placement_of(request, inputs, choice_.asked);
            const int64_t missing = missing_on_paths(request, work_, chunks_, spills_, placement);
            if (missing > 0 && (least_missing_ == 0 || missing < least_missing_)) {
                least_missing_ = missing;
                least_stored_ = placement.groups;
            }
            return missing == 0;
        } catch (const DoesNotFit& refusal) {
            const auto device = [](const DoesNotFit& of) {
                return of.tier() == swap::Tier::device;
            };
            // In so many groups the device has room, so the host is what lacks some.
            const bool further = refusal_ && device(*refusal_) && !device(refusal);
            const bool less = refusal_ && device(*refusal_) == device(refusal) &&
                              refusal.smallest() < refusal_->smallest();
            if (!refusal_ || further || less) refusal_.emplace(refusal);
            return false;
        }
    }

    // The less is computed, the more travels. A chunk that no longer fits makes the sum jump, so
    // there are lesser minima. Many counts are tried, and then all of those around the best.
    void try_activations(const PlanRequest& request, int64_t inputs) {
        constexpr size_t kCounts = 24;
        const size_t first = choice_.asked, end = choice_.activations.size() + 1;
        const size_t stride = std::max<size_t>(1, (end - first) / kCounts),
                     begun = candidates_.size();
        for (size_t activations = first; activations < end; activations += stride) {
            if (!try_saving(request, inputs, activations)) break;
        }
        if (stride == 1 || candidates_.size() == begun) return;
        const auto expected = [this](const Candidate& candidate) {
            return candidate.seconds.expected(request_);
        };
        const size_t around =
            std::ranges::min_element(std::span(candidates_).subspan(begun), {}, expected)
                ->activations;
        for (size_t activations = std::max(around, first + stride) - stride + 1;
             activations < std::min(around + stride, end); ++activations) {
            if (activations != around && !try_saving(request, inputs, activations)) return;
        }
    }

    bool try_saving(const PlanRequest& request, int64_t inputs, size_t activations) {
        try {
            const Placement placement = placement_of(request, inputs, activations);
            int64_t blocks = 0;
            for (const auto& of_layers : placement.saved)
                blocks += std::ranges::count(of_layers, true);
            if (blocks < static_cast<int64_t>(activations)) return false;
            if (missing_on_paths(request, work_, chunks_, spills_, placement) > 0) return false;
            candidates_.push_back(
                {placement.groups, inputs, activations,
                 step_seconds(request, work_, chunks_, spills_, placement, machine_)});
            return true;
        } catch (const DoesNotFit&) {
            return false;
        }
    }

    const Candidate& best_candidate() const {
        const Candidate& plainest = candidates_.front();
        const auto costs = [&](const Candidate& candidate, double seconds) {
            return seconds * (candidate.groups > plainest.groups ? kPerGroups : 1) *
                   (candidate.inputs < plainest.inputs ? kPerInputs : 1);
        };
        double least_not_speculative = std::numeric_limits<double>::infinity();
        for (const Candidate& candidate : candidates_)
            least_not_speculative = std::min(least_not_speculative,
                                             costs(candidate, candidate.seconds.not_speculative));
        const bool said = expected_clipped(request_).has_value();
        const Candidate* best = nullptr;
        for (const Candidate& candidate : candidates_) {
            if (!said && candidate.seconds.not_speculative > least_not_speculative * kMayLose)
                continue;
            const auto cost = [&](const Candidate& of) {
                return costs(of, of.seconds.expected(request_));
            };
            if (best == nullptr || cost(candidate) < cost(*best)) best = &candidate;
        }
        return *best;
    }

    const PlanRequest& request_;
    const Workload& work_;
    const std::vector<Chunk>& chunks_;
    const std::vector<AccumulatorSpill>& spills_;
    const cost::Measurements& machine_;
    const Choice choice_;
    std::optional<DoesNotFit> refusal_{};
    size_t yielded_ = 0;         // of the device's buffers: only where nothing fits otherwise
    int64_t least_missing_ = 0;  // on NVMe
    Groups least_stored_{};      // in so many groups
    std::vector<Candidate> candidates_{};
};

}  // namespace

Placement place_for_speed(const PlanRequest& request, const Workload& work,
                          const std::vector<Chunk>& chunks,
                          const std::vector<AccumulatorSpill>& spills,
                          const cost::Measurements& machine) {
    return Search(request, work, chunks, spills, machine).find();
}

}  // namespace ferry::planner
