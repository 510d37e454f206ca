// The step, once, as plain code. It runs at start-up against a recorder; the schedule it leaves is
// replayed every step. Micro-batches go through a layer together, groups of them
// one after another; the optimizer's chunks run beside backward and beside the next forward.
// A pipeline's stage does the same with its layers, and has several groups under way, in the order
// of zero/stage_order.h.
#include "step.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "planner/recording/recorder.h"
#include "zero/stage_order.h"

namespace ferry::train {

using cost::Content;
using cost::Op;
using cost::StageLink;
using model::Saved;
using planner::BufferOf;
using planner::Plan;
using planner::Recorder;
namespace op = cost::op;

using Input = BufferOf<Content::input>;
using InputGradient = BufferOf<Content::input_gradient>;
using Gradient = BufferOf<Content::gradient>;
using TableGradient = BufferOf<Content::table_gradient>;
using Weights = BufferOf<Content::weights>;
using Table = BufferOf<Content::table>;

namespace {

struct Group {
    int64_t first = 0, size = 0;  // micro-batches of the step
    bool is_first = true, is_last = true;
    int64_t slot = 0;           // of the groups under way
    int64_t deferred_slot = 0;  // of those whose weights' gradients are left
    int64_t virtual_stage = 0;  // that it goes through
    bool goes_back_next = true;
};

class Step {
public:
    Step(Recorder& recorder, Previous previous, bool speculative,
         Exchanged what = Exchanged::gradients)
        : r_(recorder),
          plan_(recorder.plan()),
          previous_(previous),
          speculative_(speculative),
          by_momentum_(what != Exchanged::gradients),
          scratch_(recorder.acquire<Content::scratch>()),
          report_(recorder.acquire<Content::report>()),
          slots_(plan_.groups_under_way()),
          under_way_(at(slots_ * stage().virtual_stages())),
          arrived_(at(stage().virtual_stages())),
          norms_(plan_.layers.size()) {
        const size_t visits = plan_.layers.size() * at(plan_.group_size());
        for (UnderWay& group : under_way_) group.saved.resize(visits);
        if (!stage().splits_backward) return;
        deferred_.resize(at(plan_.groups_deferred() + 1));
        for (std::vector<Deferred>& of_group : deferred_) of_group.resize(visits);
    }

    // Of the step before: its speculative updates stand, or go.
    void end_speculation() {
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            if (!plan_.chunks[c].speculative) continue;
            if (previous_ == Previous::committed) r_.commit(static_cast<int64_t>(c));
            if (previous_ == Previous::rolled_back || previous_ == Previous::dropped)
                r_.rollback(static_cast<int64_t>(c));
        }
    }

    void start_report() {
        r_.record<op::Zero>(0, 0, {.what = report_}, {.bytes = plan_.report_bytes()});
    }
    void send_report() { r_.send_report(report_); }

    // Finishes the step before for the layers up to this one, just before its weights are needed.
    // Several ranks finish a layer more: its weights then travel beside the work on this one.
    void finish_updates_to(int64_t layer) {
        const int64_t last = plan_.partition.alone() ? layer : std::min(layer + 1, head());
        while (finished_ < last) finish_updates(++finished_);
    }

    // Finishes the step before for this layer.
    void finish_updates(int64_t layer) {
        if (by_momentum_) {
            if (previous_ == Previous::not_speculative) r_.update_by_momentum(layer);
            if (previous_ == Previous::alone) r_.update_alone(layer);
            return;
        }
        for_chunks(layer, [&](int64_t c, bool speculative) {
            if (previous_ == Previous::not_speculative || previous_ == Previous::rolled_back)
                r_.update_chunk(c, Op::update);
            if (previous_ == Previous::committed && !speculative) r_.update_chunk(c, Op::update);
            // A split master's weight was rolled back with the rest of its version.
            if (previous_ == Previous::dropped && speculative && !plan_.state.split)
                r_.update_chunk(c, Op::recast);
        });
    }

    void share_updates(int64_t layer) {
        if (updates() && stage().has(layer)) r_.share_updates(layer);
        if (layer == 0 && stage().gives_table() && updates())
            give_table(plan_.partition.sharding.weights ? Weights() : r_.fetch_weights(0));
        if (layer == 0 && stage().copies_table()) take_table();
    }

    void begin() {
        if (stage().copies_table()) take_table();
    }

    // The first blocks' inputs, where the stage before makes them.
    void take_inputs(const Group& group) {
        if (embeds(group)) return;
        std::vector<Input>& x = arrived_[at(group.virtual_stage)].emplace_back();
        for (int64_t i = 0; i < group.size; ++i) {
            x.push_back(r_.acquire<Content::input>());
            r_.take_over(StageLink::previous, layers_of(group).first - 1, group.first + i, x.back(),
                         plan_.input_bytes);
        }
    }

    void forward(const Group& group) {
        UnderWay& own = under_way(group);
        load_tokens(group, false);
        if (group.is_first) finish_updates_to(0);
        start_inputs(group);
        for (int64_t layer = first_block(group); layer < end_block(group); ++layer) {
            if (group.is_first) finish_updates_to(layer);
            const Weights weights = first_weights(layer, group);
            for (int64_t i = 0; i < group.size; ++i) {
                const Input& x = own.x[at(i)];
                auto out = r_.acquire<Content::input>();
                SavedOf& saved = own.saved[at(layer * plan_.group_size() + i)];
                if (saves(layer, Saved::attention))
                    saved.attention = r_.acquire<Content::attention>();
                if (saves(layer, Saved::mlp)) saved.mlp = r_.acquire<Content::mlp>();
                if (saves(layer, Saved::projections))
                    saved.projections = r_.acquire<Content::projections>();
                r_.record<op::Forward>(layer, i,
                                       {.weights = weights,
                                        .x = x,
                                        .out = out,
                                        .scratch = scratch_,
                                        .report = report_,
                                        .attention = saved.attention,
                                        .mlp = saved.mlp,
                                        .projections = saved.projections,
                                        .tokens = documents(own, i)});
                r_.save_input(layer - 1, input_of(group, i),
                              std::exchange(own.x[at(i)], std::move(out)));
            }
        }
        if (group.is_first && group.virtual_stage + 1 == stage().virtual_stages()) {
            finish_updates_to(head());
            r_.mark_committed();
        }
        if (has_head(group)) return visit_head(group);
        pass_outputs(group);
    }

    // What the stage's blocks gave goes to the next one.
    void pass_outputs(const Group& group) {
        UnderWay& own = under_way(group);
        for (int64_t i = 0; i < group.size; ++i)
            r_.pass_on(StageLink::next, layers_of(group).end - 1, group.first + i, own.x[at(i)],
                       plan_.input_bytes);
        own.x.clear();
    }

    // And its gradient comes back.
    void take_gradients(const Group& group) {
        const int64_t end = layers_of(group).end;
        if (has_head(group) || !plan_.trains_below(end)) return;
        UnderWay& own = under_way(group);
        for (int64_t i = 0; i < group.size; ++i) {
            own.dx.push_back(r_.acquire<Content::input_gradient>());
            r_.take_over(StageLink::next, end, group.first + i, own.dx.back(), plan_.input_bytes);
        }
    }

    void backward(const Group& group) {
        UnderWay& own = under_way(group);
        const int64_t first = first_block(group);
        for (int64_t layer = end_block(group) - 1; layer >= first; --layer) {
            const bool trains = trainable(layer), below = plan_.trains_below(layer);
            if (!plan_.goes_back(layer)) {
                for (int64_t i = 0; i < group.size; ++i)
                    r_.fetch_input(layer - 1, input_of(group, i));
                continue;
            }
            const bool defers = trains && stage().splits_backward;
            const Weights weights = r_.fetch_weights(layer);
            Gradient gradient =
                trains && !defers ? r_.fetch_gradient(layer, group.is_first) : Gradient();
            if (defers && group.is_first) norms_[at(layer)] = r_.norms_gradient(layer);
            for (int64_t i = 0; i < group.size; ++i) {
                const Input x = r_.fetch_input(layer - 1, input_of(group, i));
                SavedOf saved = std::move(own.saved[at(layer * plan_.group_size() + i)]);
                BufferOf<Content::deferred> deferred;
                if (defers) deferred = r_.acquire<Content::deferred>();
                r_.record<op::Backward>(
                    layer, i,
                    {.weights = weights,
                     .x = x,
                     .dx = own.dx[at(i)],
                     .gradient = defers ? norms_[at(layer)] : gradient,
                     .scratch = scratch_,
                     .attention = saved.attention,
                     .mlp = saved.mlp,
                     .projections = saved.projections,
                     .tokens = documents(own, i),
                     .deferred = deferred},
                    {.flags = flags_of_backward(layer, below, defers,
                                                trains && !defers && adds_first(group, i))});
                saved.projections.release();
                if (defers) deferred_of(group, layer, i) = {std::move(deferred), std::move(saved)};
            }
            if (layer == first) give_gradients(group);
            prefetch_for_backward(layer - 1, group);
            if (trains && !defers) finish_gradient(layer, group, gradient);
            if (defers && plan_.groups_deferred() == 0) add_weight_gradients(layer, group);
        }
        if (embeds(group) && trainable(0)) backward_embedding(group);
        // Of all that this stage passes on the last: the first one takes it last.
        if (stage().copies_table() && group.virtual_stage == 0 && group.is_last)
            give_table_gradient();
        receive_gradient();
        own.dx.clear();
        own.tokens.clear();
    }

    // What a group's backward has left.
    void add_weight_gradients(const Group& group) {
        for (int64_t layer = end_block(group) - 1; layer >= first_block(group); --layer)
            if (trainable(layer)) add_weight_gradients(layer, group);
        receive_gradient();
    }

    void evaluate(int64_t micro_batches) {
        for (int64_t v = 0; v < stage().virtual_stages(); ++v) {
            const Group group{.size = micro_batches, .virtual_stage = v};
            load_tokens(group, true);
            take_inputs(group);
            start_inputs(group);
            evaluate_blocks(group);
            if (has_head(group))
                evaluate_head(group);
            else
                pass_outputs(group);
        }
    }

    int64_t layers() const { return static_cast<int64_t>(plan_.layers.size()); }

private:
    struct SavedOf {
        BufferOf<Content::attention> attention;
        BufferOf<Content::mlp> mlp;
        BufferOf<Content::projections> projections;
    };
    // Of a block and micro-batch whose weights' gradients are left.
    struct Deferred {
        BufferOf<Content::deferred> products;
        SavedOf saved;
    };
    // A group's between its forward and its backward.
    struct UnderWay {
        std::vector<BufferOf<Content::tokens>> tokens{};  // by micro-batch of the group
        std::vector<Input> x{};                           // their block input on the way up
        std::vector<InputGradient> dx{};                  // and its gradient on the way down
        std::vector<SavedOf> saved{};  // of layers that save something: [layer, micro-batch]
    };

    static size_t at(int64_t i) { return static_cast<size_t>(i); }
    static size_t at(Saved what) { return model::at(what); }
    int64_t head() const { return layers() - 1; }
    const zero::Stage& stage() const { return plan_.partition.stage; }
    // Which a group goes through.
    zero::VirtualStage layers_of(const Group& group) const {
        return stage().all() ? zero::VirtualStage{0, layers()}
                             : stage().virtual_stage(group.virtual_stage);
    }
    int64_t first_block(const Group& group) const {
        return std::max<int64_t>(layers_of(group).first, 1);
    }
    int64_t end_block(const Group& group) const { return std::min(layers_of(group).end, head()); }
    bool embeds(const Group& group) const { return layers_of(group).first == 0; }
    bool has_head(const Group& group) const { return layers_of(group).end == layers(); }
    UnderWay& under_way(const Group& group) {
        return under_way_[at(group.virtual_stage * slots_ + group.slot)];
    }
    // Among the inputs that a block keeps.
    int64_t input_of(const Group& group, int64_t i) const {
        return group.slot * plan_.group_size() + i;
    }
    bool trainable(int64_t layer) const { return plan_.layers[at(layer)].trainable_elements > 0; }
    bool saves(int64_t layer, Saved what) const {
        return plan_.layer_plans[at(layer)].saves[at(what)];
    }
    // Whether what adds to an accumulator for this micro-batch finds nothing in it.
    static bool adds_first(const Group& group, int64_t i) { return group.is_first && i == 0; }
    uint8_t flags_of_backward(int64_t layer, bool below, bool defers, bool fresh) const {
        uint8_t flags = below ? cost::kNeedsDx : 0;
        flags |= defers ? cost::kDefers : 0;
        flags |= fresh ? cost::kFresh : 0;
        for (const Saved what : model::kAllSaved)
            flags |= saves(layer, what) ? cost::flag_of(what) : 0;
        return flags;
    }
    Deferred& deferred_of(const Group& group, int64_t layer, int64_t i) {
        return deferred_[at(group.deferred_slot)][at(layer * plan_.group_size() + i)];
    }
    // Whether the step before changes weights.
    bool updates() const {
        return previous_ == Previous::not_speculative || previous_ == Previous::committed ||
               previous_ == Previous::rolled_back || previous_ == Previous::alone;
    }
    // At a group's first visit of the layer.
    Weights first_weights(int64_t layer, const Group& group) {
        return group.is_first && updates()
                   ? r_.fetch_updated_weights(layer)
                   : r_.fetch_weights(
                         layer, group.is_first ? Recorder::Visit::first : Recorder::Visit::any);
    }

    // Where the documents of a micro-batch are: behind its tokens. Empty: it has none.
    using Tokens = planner::Assigned::Operand<Content::tokens, cost::Role::in, true>;
    Tokens documents(const UnderWay& own, int64_t i) const {
        return plan_.documents ? Tokens(own.tokens[at(i)]) : Tokens();
    }

    // Which the head multiplies by. Empty: it has weights of its own for it.
    Table tied_table() { return plan_.tied ? Table(r_.fetch_weights(0)) : Table(); }

    // Prefetch backward's inputs before the gradient is sent: its copy waits
    // for updates, and would hold up what is behind it.
    void prefetch_for_backward(int64_t layer, const Group& group) {
        if (!plan_.goes_back(layer)) return;
        if (group.is_last) r_.prefetch_weights(layer);
        r_.prefetch_input(layer - 1, input_of(group, 0));
    }

    template <class Body>
    void for_chunks(int64_t layer, const Body& body) {
        const planner::LayerPlan& where = plan_.layer_plans[at(layer)];
        for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
            if (plan_.chunks[at(c)].trainable) body(c, plan_.chunks[at(c)].speculative);
        }
    }

    // Blocks ask for them where documents do not see each other.
    void load_tokens(const Group& group, bool evaluation) {
        UnderWay& own = under_way(group);
        own.tokens.clear();
        const bool needed = embeds(group) || has_head(group) || plan_.documents;
        for (int64_t i = 0; needed && i < group.size; ++i)
            own.tokens.push_back(r_.load_tokens(group.first + i, evaluation));
    }

    // The first blocks' inputs: those that have arrived, in the groups' order, or the embedding's.
    void start_inputs(const Group& group) {
        if (embeds(group)) return embed(group);
        auto& arrived = arrived_[at(group.virtual_stage)];
        under_way(group).x = std::move(arrived.front());
        arrived.pop_front();
    }

    void embed(const Group& group) {
        UnderWay& own = under_way(group);
        Weights weights = first_weights(0, group);
        if (group.is_first && stage().gives_table()) give_table(weights);
        const Table table(std::move(weights));
        for (int64_t i = 0; i < group.size; ++i) {
            own.x.push_back(r_.acquire<Content::input>());
            r_.record<op::Embed>(0, i,
                                 {.tokens = own.tokens[at(i)],
                                  .table = table,
                                  .out = own.x.back(),
                                  .scratch = scratch_});
        }
    }

    // The head goes forward and backward in one visit, so the logits of a batch never exist.
    void visit_head(const Group& group) {
        UnderWay& own = under_way(group);
        const Weights weights = first_weights(head(), group);
        const Table table = tied_table();
        const bool trains = trainable(head()), below = plan_.trains_below(head());
        Gradient gradient = trains ? r_.fetch_gradient(head(), group.is_first) : Gradient();
        if (table_trains()) table_gradient_ = r_.fetch_table_gradient(group.is_first);
        const bool adds = trains || table_trains();
        for (int64_t i = 0; i < group.size; ++i) {
            const uint8_t fresh = adds && adds_first(group, i) ? cost::kFresh : 0;
            const Input x = std::move(own.x[at(i)]);
            own.dx.push_back(below ? r_.acquire<Content::input_gradient>() : InputGradient());
            r_.record<op::Head>(
                head(), group.first + i,
                {.weights = weights,
                 .table = table,
                 .x = x,
                 .tokens = own.tokens[at(i)],
                 .dx = own.dx.back(),
                 .gradient = gradient,
                 .table_gradient = table_gradient_,
                 .scratch = scratch_,
                 .report = report_},
                {.flags = static_cast<uint8_t>(fresh | (below ? cost::kNeedsDx : 0))});
        }
        own.x.clear();
        if (group.goes_back_next) prefetch_for_backward(head() - 1, group);
        if (trains) finish_gradient(head(), group, gradient);
        if (!stage().copies_table() || group.is_last) return;
        if (table_trains()) r_.spill_table_gradient(table_gradient_);
        table_gradient_.release();
    }

    void evaluate_blocks(const Group& group) {
        UnderWay& own = under_way(group);
        for (int64_t layer = first_block(group); layer < end_block(group); ++layer) {
            const Weights weights = r_.fetch_weights(layer);
            for (int64_t i = 0; i < group.size; ++i) {
                auto out = r_.acquire<Content::input>();
                r_.record<op::Forward>(layer, 0,
                                       {.weights = weights,
                                        .x = own.x[at(i)],
                                        .out = out,
                                        .scratch = scratch_,
                                        .report = report_,
                                        .tokens = documents(own, i)});
                own.x[at(i)] = std::move(out);
            }
        }
    }
    void evaluate_head(const Group& group) {
        const UnderWay& own = under_way(group);
        const Weights weights = r_.fetch_weights(head());
        const Table table = tied_table();
        for (int64_t i = 0; i < group.size; ++i) {
            r_.record<op::HeadLoss>(head(), i,
                                    {.weights = weights,
                                     .table = table,
                                     .x = own.x[at(i)],
                                     .tokens = own.tokens[at(i)],
                                     .scratch = scratch_,
                                     .report = report_});
        }
    }

    // The gradient of the block inputs that the stage before gave.
    void give_gradients(const Group& group) {
        const zero::VirtualStage of = layers_of(group);
        if (!of.trains_below) return;
        UnderWay& own = under_way(group);
        for (int64_t i = 0; i < group.size; ++i)
            r_.pass_on(StageLink::previous, of.first, group.first + i, own.dx[at(i)],
                       plan_.input_bytes);
    }

    // ---- a tied table, of which the first stage has the state and the last one the head

    bool table_trains() const { return plan_.tied && trainable(0); }
    int64_t table_gradient_bytes() const { return plan_.layers[0].trainable_elements * 4; }
    void give_table(const Weights& weights) {
        if (updates() && table_trains()) r_.give_table(weights);
    }
    void take_table() {
        if (updates() && table_trains()) r_.take_table();
    }
    void give_table_gradient() {
        if (!table_trains()) return;
        r_.pass_on(StageLink::table, 0, 0, table_gradient_, table_gradient_bytes());
        table_gradient_.release();
    }
    void take_table_gradient() {
        table_gradient_ = TableGradient(r_.acquire(planner::Class::edge_gradient));
        r_.take_over(StageLink::table, 0, 0, table_gradient_, table_gradient_bytes());
    }

    void backward_embedding(const Group& group) {
        const UnderWay& own = under_way(group);
        Gradient gradient = r_.fetch_gradient(0, group.is_first);
        for (int64_t i = 0; i < group.size; ++i) {
            r_.record<op::EmbedBackward>(0, i,
                                         {.tokens = own.tokens[at(i)],
                                          .dx = own.dx[at(i)],
                                          .gradient = gradient,
                                          .scratch = scratch_});
        }
        if (stage().gives_table() && group.is_last) take_table_gradient();
        if (plan_.tied && stage().all() && !group.is_last) r_.spill_table_gradient(table_gradient_);
        if (plan_.tied && group.is_last) {
            r_.record<op::Add>(0, 0, {.gradient = gradient, .added = table_gradient_},
                               {.bytes = plan_.layers[0].trainable_elements * 4});
        }
        table_gradient_.release();
        finish_gradient(0, group, gradient);
    }

    void add_weight_gradients(int64_t layer, const Group& group) {
        Gradient gradient = r_.fetch_gradient(layer, group.is_first);
        for (int64_t i = 0; i < group.size; ++i) {
            const Deferred its = std::move(deferred_of(group, layer, i));
            const bool last = group.is_last && i == group.size - 1;
            const Gradient norms = last ? std::move(norms_[at(layer)]) : Gradient();
            r_.record<op::WeightGradients>(
                layer, i,
                {.deferred = its.products,
                 .gradient = gradient,
                 .scratch = scratch_,
                 .attention = its.saved.attention,
                 .mlp = its.saved.mlp,
                 .norms = norms},
                {.flags = flags_of_backward(layer, plan_.trains_below(layer), true,
                                            adds_first(group, i))});
        }
        finish_gradient(layer, group, gradient);
    }

    void finish_gradient(int64_t layer, const Group& group, const Gradient& gradient) {
        if (!group.is_last) return r_.spill_gradient(layer, gradient);
        if (by_momentum_) return r_.keep_gradient(layer, gradient);
        receive_gradient();
        r_.send_gradient(layer, gradient);
        sent_ = layer;
        if (plan_.partition.alone()) receive_gradient();
    }

    // Receives the gradient of the layer sent last. With several ranks that is a layer later: its
    // exchange ran beside this one's backward.
    void receive_gradient() {
        if (sent_ < 0) return;
        r_.receive_gradient();
        // The newest arrival's chunks first: their gradient is still in the cache.
        for_chunks(std::exchange(sent_, -1), [&](int64_t c, bool speculative) {
            if (speculative_ && speculative) r_.update_chunk(c, Op::update_speculative);
        });
    }

    Recorder& r_;
    const Plan& plan_;
    Previous previous_;
    bool speculative_, by_momentum_;
    int64_t finished_ = -1;  // the last layer that the step before has left nothing of
    int64_t sent_ = -1;      // the layer whose gradient is on its way
    BufferOf<Content::scratch> scratch_;
    BufferOf<Content::report> report_;
    TableGradient table_gradient_;
    const int64_t slots_;              // of groups under way in a virtual stage
    std::vector<UnderWay> under_way_;  // [virtual stage, slot]
    // By virtual stage, and groups in their order: inputs that the stage before has given.
    std::vector<std::deque<std::vector<Input>>> arrived_;
    std::vector<std::vector<Deferred>> deferred_{};  // by slot; [layer, micro-batch]
    std::vector<Gradient> norms_;                    // by layer, from the first group to the last
};

}  // namespace

namespace {

// Groups of micro-batches go through the layers one after another; of a pipeline in the order of
// its schedule.
void take_actions(Step& step, const Plan& plan) {
    using zero::Action;
    using enum Action::What;
    const int64_t size = plan.group_size(), deferred = plan.groups_deferred();
    const zero::Stage& stage = plan.partition.stage;
    // A virtual stage keeps inputs of as many groups as are under way in it.
    const std::vector<int64_t> slots = stage.under_way_of_each(plan.groups);
    const std::vector<Action> actions = zero::actions_of(stage, plan.groups);
    const auto is_visit = [](const Action& action) {
        return action.what == forward || action.what == backward;
    };
    for (auto action = actions.begin(); action != actions.end(); ++action) {
        const int64_t g = action->group;
        const auto next = std::find_if(action + 1, actions.end(), is_visit);
        const Group group{.first = g * size,
                          .size = size,
                          .is_first = g == 0,
                          .is_last = g == plan.groups - 1,
                          .slot = g % slots[static_cast<size_t>(action->virtual_stage)],
                          .deferred_slot = g % (deferred + 1),
                          .virtual_stage = action->virtual_stage,
                          .goes_back_next = next != actions.end() &&
                                            *next == Action{backward, action->virtual_stage, g}};
        switch (action->what) {
            case take_inputs:
                step.take_inputs(group);
                break;
            case forward:
                step.forward(group);
                break;
            case take_gradients:
                step.take_gradients(group);
                break;
            case backward:
                step.backward(group);
                break;
            case weight_gradients:
                step.add_weight_gradients(group);
                break;
        }
    }
}

void describe_step(Recorder& recorder, Previous previous, bool speculative,
                   Exchanged what = Exchanged::gradients) {
    {
        Step step(recorder, previous, speculative, what);
        step.start_report();
        step.end_speculation();
        step.begin();
        take_actions(step, recorder.plan());
        step.send_report();
    }
    recorder.mark_outcome();
}

void describe_drain(Recorder& recorder, Previous previous, Exchanged what = Exchanged::gradients) {
    Step step(recorder, previous, false, what);
    step.end_speculation();
    for (int64_t layer = 0; layer < step.layers(); ++layer) {
        step.finish_updates(layer);
        step.share_updates(layer);
    }
    recorder.mark_committed();
}

}  // namespace

std::string name_of_step(Previous previous, bool speculative, Exchanged what) {
    static constexpr const char* kNames[kPrevious] = {"first",
                                                      "after a step without speculation",
                                                      "after a commit",
                                                      "after a rollback",
                                                      "after a dropped step",
                                                      "after a local step"};
    return std::string(kNames[static_cast<size_t>(previous)]) +
           (speculative ? ", speculative" : "") +
           (what != Exchanged::gradients ? ", exchanges momentum" : "");
}

swap::Schedule record_step(const Plan& plan, Previous previous, bool speculative, Exchanged what) {
    Recorder recorder(plan, name_of_step(previous, speculative, what));
    describe_step(recorder, previous, speculative, what);
    return recorder.finish();
}

swap::Schedule record_drain(const Plan& plan, Previous previous, Exchanged what) {
    Recorder recorder(plan, "drain");
    describe_drain(recorder, previous, what);
    return recorder.finish();
}

LaneBytes step_bytes(const Plan& plan, Previous previous, bool speculative, Exchanged what) {
    Recorder recorder(plan, "", Recorder::Keep::bytes);
    describe_step(recorder, previous, speculative, what);
    return recorder.bytes();
}

LaneBytes drain_bytes(const Plan& plan, Previous previous, Exchanged what) {
    Recorder recorder(plan, "", Recorder::Keep::bytes);
    describe_drain(recorder, previous, what);
    return recorder.bytes();
}

swap::Schedule record_evaluation(const Plan& plan, int64_t micro_batches) {
    Recorder recorder(plan, "evaluation");
    {
        Step step(recorder, Previous::none, false);
        step.start_report();
        step.evaluate(micro_batches);
        step.send_report();
    }
    return recorder.finish();
}

}  // namespace ferry::train
