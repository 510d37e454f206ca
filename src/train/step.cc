// The step, once, as plain code. It runs at start-up against a recorder; the schedule it leaves is
// replayed every step. Micro-batches go through a layer together, groups of them
// one after another; the optimizer's chunks run beside backward and beside the next forward.
#include "step.h"

#include <algorithm>
#include <utility>

#include "planner/recorder.h"

namespace ferry::train {

using cost::Content;
using cost::Op;
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
          saved_(plan_.layers.size() * at(plan_.group_size())) {}

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
        if (updates()) r_.share_updates(layer);
    }

    void forward(const Group& group) {
        load_tokens(group, false);
        if (group.is_first) finish_updates_to(0);
        embed(group);
        for (int64_t layer = 1; layer < head(); ++layer) {
            if (group.is_first) finish_updates_to(layer);
            const Weights weights = first_weights(layer, group);
            for (int64_t i = 0; i < group.size; ++i) {
                const Input& x = x_[at(i)];
                auto out = r_.acquire<Content::input>();
                SavedOf& saved = saved_[at(layer * plan_.group_size() + i)];
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
                                        .tokens = documents(i)});
                r_.save_input(layer - 1, i, std::exchange(x_[at(i)], std::move(out)));
            }
        }
        if (!group.is_first) return;
        finish_updates_to(head());
        r_.mark_committed();
    }

    // The head goes forward and backward in one visit, so the logits of a batch never exist.
    void visit_head(const Group& group) {
        const Weights weights = first_weights(head(), group);
        const Table table = tied_table();
        const bool trains = trainable(head()), table_trains = plan_.tied && trainable(0);
        Gradient gradient = trains ? r_.fetch_gradient(head(), group.is_first) : Gradient();
        if (table_trains) table_gradient_ = r_.fetch_table_gradient(group.is_first);
        for (int64_t i = 0; i < group.size; ++i) {
            const Input x = std::move(x_[at(i)]);
            dx_.push_back(r_.acquire<Content::input_gradient>());
            r_.record<op::Head>(head(), group.first + i,
                                {.weights = weights,
                                 .table = table,
                                 .x = x,
                                 .tokens = tokens_[at(i)],
                                 .dx = dx_.back(),
                                 .gradient = gradient,
                                 .table_gradient = table_gradient_,
                                 .scratch = scratch_,
                                 .report = report_});
        }
        x_.clear();
        prefetch_for_backward(head() - 1, group);
        if (trains) finish_gradient(head(), group, gradient);
    }

    void backward(const Group& group) {
        for (int64_t layer = head() - 1; layer >= 1; --layer) {
            const bool trains = trainable(layer), below = plan_.trains_below(layer);
            if (!plan_.goes_back(layer)) {
                for (int64_t i = 0; i < group.size; ++i) r_.fetch_input(layer - 1, i);
                continue;
            }
            const Weights weights = r_.fetch_weights(layer);
            Gradient gradient = trains ? r_.fetch_gradient(layer, group.is_first) : Gradient();
            for (int64_t i = 0; i < group.size; ++i) {
                const Input x = r_.fetch_input(layer - 1, i);
                SavedOf saved = std::move(saved_[at(layer * plan_.group_size() + i)]);
                r_.record<op::Backward>(layer, i,
                                        {.weights = weights,
                                         .x = x,
                                         .dx = dx_[at(i)],
                                         .gradient = gradient,
                                         .scratch = scratch_,
                                         .attention = saved.attention,
                                         .mlp = saved.mlp,
                                         .projections = saved.projections,
                                         .tokens = documents(i)},
                                        {.flags = flags_of_backward(layer, below)});
            }
            prefetch_for_backward(layer - 1, group);
            if (trains) finish_gradient(layer, group, gradient);
        }
        if (trainable(0)) backward_embedding(group);
        receive_gradient();
        dx_.clear();
        tokens_.clear();
    }

    void evaluate(int64_t micro_batches) {
        const Group group{.size = micro_batches};
        load_tokens(group, true);
        embed(group);
        for (int64_t layer = 1; layer < head(); ++layer) {
            const Weights weights = r_.fetch_weights(layer);
            for (int64_t i = 0; i < group.size; ++i) {
                auto out = r_.acquire<Content::input>();
                r_.record<op::Forward>(layer, 0,
                                       {.weights = weights,
                                        .x = x_[at(i)],
                                        .out = out,
                                        .scratch = scratch_,
                                        .report = report_,
                                        .tokens = documents(i)});
                x_[at(i)] = std::move(out);
            }
        }
        const Weights weights = r_.fetch_weights(head());
        const Table table = tied_table();
        for (int64_t i = 0; i < group.size; ++i) {
            r_.record<op::HeadLoss>(head(), i,
                                    {.weights = weights,
                                     .table = table,
                                     .x = x_[at(i)],
                                     .tokens = tokens_[at(i)],
                                     .scratch = scratch_,
                                     .report = report_});
        }
    }

    int64_t layers() const { return static_cast<int64_t>(plan_.layers.size()); }

private:
    static size_t at(int64_t i) { return static_cast<size_t>(i); }
    static size_t at(Saved what) { return model::at(what); }
    int64_t head() const { return layers() - 1; }
    bool trainable(int64_t layer) const { return plan_.layers[at(layer)].trainable_elements > 0; }
    bool saves(int64_t layer, Saved what) const {
        return plan_.layer_plans[at(layer)].saves[at(what)];
    }
    uint8_t flags_of_backward(int64_t layer, bool below) const {
        uint8_t flags = below ? cost::kNeedsDx : 0;
        for (const Saved what : model::kAllSaved)
            flags |= saves(layer, what) ? cost::flag_of(what) : 0;
        return flags;
    }
    // Whether the step before changes weights.
    bool updates() const {
        return previous_ == Previous::not_speculative || previous_ == Previous::committed ||
               previous_ == Previous::rolled_back || previous_ == Previous::alone;
    }
    // At a group's first visit of the layer.
    Weights first_weights(int64_t layer, const Group& group) {
        return group.is_first && updates() ? r_.fetch_updated_weights(layer)
                                           : r_.fetch_weights(layer);
    }

    // Where the documents of a micro-batch are: behind its tokens. Empty: it has none.
    using Tokens = planner::Assigned::Operand<Content::tokens, cost::Role::in, true>;
    Tokens documents(int64_t i) const {
        return plan_.documents ? Tokens(tokens_[at(i)]) : Tokens();
    }

    // Which the head multiplies by. Empty: it has weights of its own for it.
    Table tied_table() { return plan_.tied ? Table(r_.fetch_weights(0)) : Table(); }

    // Prefetch backward's inputs before the gradient is sent: its copy waits
    // for updates, and would hold up what is behind it.
    void prefetch_for_backward(int64_t layer, const Group& group) {
        if (!plan_.goes_back(layer)) return;
        if (group.is_last) r_.prefetch_weights(layer);
        r_.prefetch_input(layer - 1, 0);
    }

    template <class Body>
    void for_chunks(int64_t layer, const Body& body) {
        const planner::LayerPlan& where = plan_.layer_plans[at(layer)];
        for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
            if (plan_.chunks[at(c)].trainable) body(c, plan_.chunks[at(c)].speculative);
        }
    }

    void load_tokens(const Group& group, bool evaluation) {
        tokens_.clear();
        for (int64_t i = 0; i < group.size; ++i)
            tokens_.push_back(r_.load_tokens(group.first + i, evaluation));
    }

    void embed(const Group& group) {
        const Table table(first_weights(0, group));
        x_.clear();
        for (int64_t i = 0; i < group.size; ++i) {
            x_.push_back(r_.acquire<Content::input>());
            r_.record<op::Embed>(0, i,
                                 {.tokens = tokens_[at(i)], .table = table, .out = x_.back()});
        }
    }

    void backward_embedding(const Group& group) {
        Gradient gradient = r_.fetch_gradient(0, group.is_first);
        for (int64_t i = 0; i < group.size; ++i) {
            r_.record<op::EmbedBackward>(0, i,
                                         {.tokens = tokens_[at(i)],
                                          .dx = dx_[at(i)],
                                          .gradient = gradient,
                                          .scratch = scratch_});
        }
        if (plan_.tied && !group.is_last) r_.spill_table_gradient(table_gradient_);
        if (plan_.tied && group.is_last) {
            r_.record<op::Add>(0, 0, {.gradient = gradient, .added = table_gradient_},
                               {.bytes = plan_.layers[0].trainable_elements * 4});
        }
        table_gradient_.release();
        finish_gradient(0, group, gradient);
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
    std::vector<BufferOf<Content::tokens>> tokens_;  // by micro-batch of the group
    std::vector<Input> x_;                           // their block input on the way up
    std::vector<InputGradient> dx_;                  // and its gradient on the way down
    struct SavedOf {
        BufferOf<Content::attention> attention;
        BufferOf<Content::mlp> mlp;
        BufferOf<Content::projections> projections;
    };
    // The layers that save something: [layer, micro-batch of the group].
    std::vector<SavedOf> saved_;
};

}  // namespace

namespace {

void describe_step(Recorder& recorder, Previous previous, bool speculative,
                   Exchanged what = Exchanged::gradients) {
    {
        Step step(recorder, previous, speculative, what);
        step.start_report();
        step.end_speculation();
        const int64_t groups = recorder.plan().groups, size = recorder.plan().group_size();
        for (int64_t g = 0; g < groups; ++g) {
            const Group group{g * size, size, g == 0, g == groups - 1};
            step.forward(group);
            step.visit_head(group);
            step.backward(group);
        }
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

std::string name_of_step(Previous previous, bool speculative) {
    static constexpr const char* kNames[kPrevious] = {"first",
                                                      "after a step without speculation",
                                                      "after a commit",
                                                      "after a rollback",
                                                      "after a dropped step",
                                                      "after a local step"};
    return std::string(kNames[static_cast<size_t>(previous)]) +
           (speculative ? ", speculative" : "");
}

swap::Schedule record_step(const Plan& plan, Previous previous, bool speculative, Exchanged what) {
    const char* momentum = what != Exchanged::gradients ? ", exchanges momentum" : "";
    Recorder recorder(plan, name_of_step(previous, speculative) + momentum);
    describe_step(recorder, previous, speculative, what);
    return recorder.finish();
}

swap::Schedule record_drain(const Plan& plan, Previous previous, Exchanged what) {
    Recorder recorder(plan, "drain");
    describe_drain(recorder, previous, what);
    return recorder.finish();
}

LaneBytes step_bytes(const Plan& plan, Previous previous, bool speculative) {
    Recorder recorder(plan, "", Recorder::Keep::bytes);
    describe_step(recorder, previous, speculative);
    return recorder.bytes();
}

LaneBytes drain_bytes(const Plan& plan, Previous previous) {
    Recorder recorder(plan, "", Recorder::Keep::bytes);
    describe_drain(recorder, previous);
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
