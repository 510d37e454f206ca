// Placement: which bytes live on which tier. Greedy, in the order of bytes moved per byte kept.
#include <algorithm>

#include "budget.h"
#include "chunks.h"
#include "ferry/planner.h"

namespace ferry::planner {

using swap::Object;
using swap::ObjectId;
using swap::Tier;

bool Plan::trains_below(int64_t layer) const {
    return std::any_of(layers.begin(), layers.begin() + layer,
                       [](const model::Layer& l) { return l.trainable_elements > 0; });
}

namespace {

constexpr int64_t kPage = 4096;
constexpr size_t at(Class c) { return static_cast<size_t>(c); }

// How many buffers of each class: what a step cannot do without, and what keeps the lanes busy.
struct Depths {
    int64_t weights = 1, gradients = 1, wire = 1, spare_activations = 0, pieces = 1;
};
constexpr Depths kLean{};
constexpr Depths kBusy{.weights = 2, .gradients = 2, .wire = 4, .spare_activations = 1, .pieces = 4};

class Planner {
public:
    Planner(const Config& config, std::vector<model::Layer> layers, const model::Numerics& numerics,
            int64_t activation_bytes, int64_t scratch_bytes, int64_t chunk_elements)
        : config_(config), device_(Tier::device, config.budgets.device_bytes),
          host_(Tier::host, config.budgets.host_bytes), nvme_(Tier::nvme, nvme_limit(config)),
          activation_bytes_(round_up(activation_bytes, kPage)), scratch_bytes_(scratch_bytes),
          token_bytes_(round_up(numerics.tokens() * 2 * 4, kPage)) {
        plan_.micro_batches = config.batch.micro_batches;
        plan_.tied = config.model.tie_embeddings;
        plan_.verify = config.swap.verify;
        plan_.compute = numerics.compute;
        plan_.wire = numerics.wire;
        plan_.layers = std::move(layers);
        plan_.layer_plans.resize(plan_.layers.size());
        plan_.chunk_elements = chunk_elements;
        plan_.chunks = cut_chunks(plan_.layers, plan_.chunk_elements, plan_.layer_plans);
        for (const Chunk& chunk : plan_.chunks) {
            if (chunk.trainable) plan_.leaves += chunk.count / kLeafElements;
        }
    }

    Plan make() {
        refuse_nothing_to_train();
        choose_groups();
        place_on_device();
        place_in_host();
        place_objects();
        lay_out();
        return std::move(plan_);
    }

private:
    static int64_t nvme_limit(const Config& config) {
        int64_t total = 0;
        for (const NvmePath& path : config.budgets.nvme) {
            total = path.size_bytes == kUnlimited || total == kUnlimited ? kUnlimited
                                                                         : total + path.size_bytes;
        }
        return total;
    }
    bool has_nvme() const { return !config_.budgets.nvme.empty(); }
    bool multiple_groups() const { return plan_.groups > 1; }

    void refuse_nothing_to_train() const {
        if (plan_.leaves > 0) return;
        throw Error(Trouble::usage, {.what = "every tensor is frozen: there is nothing to train",
                                     .where = "freeze",
                                     .remedy = "remove a pattern from \"freeze\""});
    }

    // ---- device

    int64_t layer_bytes(model::LayerKind kind_or_edge, bool weights) const {
        int64_t largest = 0;
        for (const model::Layer& layer : plan_.layers) {
            if ((layer.kind == model::LayerKind::block) != (kind_or_edge == model::LayerKind::block)) continue;
            const int64_t bytes =
                weights ? layer.elements * size_of(plan_.compute) : layer.trainable_elements * 4;
            largest = std::max(largest, round_up(bytes, kPage));
        }
        return largest;
    }

    struct DeviceNeed {
        std::array<int64_t, kClasses> counts{};
        int64_t bytes = 0;
    };
    // `kept`: block inputs of a group that stay on the device until backward.
    DeviceNeed device_need(const Depths& depth, int64_t groups, int64_t kept) const {
        const int64_t group = plan_.micro_batches / groups;
        DeviceNeed need;
        need.counts[at(Class::block_weights)] = depth.weights;
        need.counts[at(Class::edge_weights)] = plan_.tied ? 2 : 1;
        need.counts[at(Class::block_gradient)] = depth.gradients;
        need.counts[at(Class::edge_gradient)] = plan_.tied ? 3 : 1;
        need.counts[at(Class::wire)] = depth.wire;
        need.counts[at(Class::activation)] = group + 1 + depth.spare_activations + kept;
        need.counts[at(Class::tokens)] = group;
        need.counts[at(Class::scratch)] = 1;
        for (size_t c = 0; c < kClasses; ++c) need.bytes += need.counts[c] * class_bytes(static_cast<Class>(c));
        return need;
    }

    int64_t class_bytes(Class c) const {
        const int64_t elements = plan_.chunk_elements;
        switch (c) {
            case Class::block_weights: return layer_bytes(model::LayerKind::block, true);
            case Class::edge_weights: return layer_bytes(model::LayerKind::head, true);
            case Class::block_gradient: return layer_bytes(model::LayerKind::block, false);
            case Class::edge_gradient: return layer_bytes(model::LayerKind::head, false);
            case Class::wire:
                return round_up(elements * size_of(plan_.wire) + elements / kLeafElements * 4, kPage);
            case Class::activation: return activation_bytes_;
            case Class::tokens:
            case Class::host_tokens: return token_bytes_;
            case Class::scratch: return round_up(scratch_bytes_, kPage);
            case Class::stage: return elements * 12;
            case Class::weight_piece: return elements * size_of(plan_.compute);
            case Class::gradient_piece: return elements * size_of(plan_.wire);
            case Class::input_piece: return activation_bytes_;
            case Class::park_piece: return elements * 4;
        }
        bug("unknown buffer class");
    }

    int64_t block_count() const { return static_cast<int64_t>(plan_.layers.size()) - 2; }

    void choose_groups() {
        const int64_t m = plan_.micro_batches;
        for (int64_t groups = std::max<int64_t>(config_.swap.groups, 1); groups <= m; ++groups) {
            if (m % groups != 0) continue;
            plan_.groups = groups;
            if (device_need(kLean, groups, 0).bytes <= device_.limit()) return;
            if (config_.swap.groups > 0) break;
        }
        const int64_t smallest = device_need(kLean, plan_.groups, 0).bytes;
        throw Error(
            Trouble::does_not_fit,
            {.what = "the device budget is too small for one layer and its work",
             .where = "budgets.device",
             .measured = format_bytes(smallest) + " needed (" + std::to_string(smallest) + " bytes)",
             .limit = format_bytes(device_.limit()) + ", " +
                      format_bytes(smallest - device_.limit()) + " missing",
             .remedy = "set budgets.device to \"" + std::to_string(smallest) +
                       "\" or more, or lower batch.micro_batch, batch.sequence, numerics.head_tile or "
                       "swap.chunk_elements"});
    }

    void place_on_device() {
        Depths depth = kLean;
        const auto fits = [&](const Depths& d, int64_t kept) {
            return device_need(d, plan_.groups, kept).bytes <= device_.limit();
        };
        const auto deepen = [&](int64_t Depths::*field) {
            Depths deeper = depth;
            deeper.*field = kBusy.*field;
            if (fits(deeper, 0)) depth = deeper;
        };
        deepen(&Depths::weights);
        deepen(&Depths::wire);
        deepen(&Depths::spare_activations);
        deepen(&Depths::gradients);

        const int64_t inputs = block_count() * plan_.group_size();
        int64_t kept = 0;
        if (device_.limit() == kUnlimited) {
            kept = inputs;
        } else {
            const int64_t left = device_.limit() - device_need(depth, plan_.groups, 0).bytes;
            kept = std::min(inputs, left / activation_bytes_);
        }
        kept_inputs_ = kept;
        const DeviceNeed need = device_need(depth, plan_.groups, kept);
        for (size_t c = 0; c < kClasses; ++c) {
            if (need.counts[c] == 0) continue;
            plan_.buffers[c].count = need.counts[c];
            device_.need(device_row(static_cast<Class>(c)), need.counts[c] * class_bytes(static_cast<Class>(c)));
        }
        // Embedding first, then layers 0, 1, 2, ...: needed first, and their gradients arrive last.
        for (size_t l = 0; l < plan_.layers.size(); ++l) {
            const int64_t bytes = round_up(plan_.layers[l].elements * size_of(plan_.compute), kPage);
            if (!device_.take("resident weights", bytes)) break;
            plan_.layer_plans[l].resident = true;
        }
    }

    static std::string device_row(Class c) {
        switch (c) {
            case Class::block_weights:
            case Class::edge_weights: return "weights in flight";
            case Class::block_gradient:
            case Class::edge_gradient: return "gradient accumulators";
            case Class::activation: return "block inputs";
            case Class::scratch: return "scratch of the kernels";
            default: return "tokens and gradients on their way";
        }
    }

    // ---- host

    bool small(const Chunk& chunk) const { return chunk.count * 8 <= plan_.chunk_elements; }

    void place_in_host() {
        host_.need("norm leaves", round_up(plan_.leaves * 4, kPage));
        set_host_class(Class::host_tokens, "token batches", std::min<int64_t>(2, plan_.group_size()));
        set_host_class(Class::stage, "buffers towards NVMe", 1);
        set_host_class(Class::weight_piece, "buffers towards NVMe", 1);
        if (has_nvme()) {
            set_host_class(Class::gradient_piece, "buffers towards NVMe", 1);
            if (kept_inputs_ < block_count() * plan_.group_size()) {
                set_host_class(Class::input_piece, "buffers towards NVMe", 1);
            }
            if (multiple_groups()) set_host_class(Class::park_piece, "buffers towards NVMe", 1);
            for (const Class c : {Class::stage, Class::weight_piece, Class::gradient_piece,
                                  Class::input_piece, Class::park_piece}) {
                // A quarter of the budget at most: memory that holds state saves more than a deeper queue.
                deepen_host_class(c, host_.limit() / 4);
            }
        }
        choose_homes();
        if (host_.exceeded()) refuse_host();
        if (!has_nvme()) deepen_host_class(Class::weight_piece, host_.limit());  // all state is in
    }

    void set_host_class(Class c, const std::string& what, int64_t count) {
        plan_.buffers[at(c)].count = count;
        host_.need(what, count * class_bytes(c));
    }

    void deepen_host_class(Class c, int64_t spent_max) {
        int64_t& count = plan_.buffers[at(c)].count;
        while (count > 0 && count < kBusy.pieces && host_.spent() < spent_max &&
               host_.take("buffers towards NVMe", class_bytes(c))) {
            ++count;
        }
    }

    // Host memory goes where it saves most traffic per byte: weights (read twice, written once),
    // accumulators and gradients, block inputs, then optimizer state.
    void choose_homes() {
        weight_home_.assign(plan_.chunks.size(), Tier::nvme);
        state_home_ = gradient_home_ = park_home_ = weight_home_;
        input_home_.assign(static_cast<size_t>(block_count() * plan_.group_size()), Tier::nvme);
        const auto claim = [&](Tier& home, const char* what, int64_t bytes) {
            const bool wanted = !has_nvme() || host_.take(what, bytes);
            if (!has_nvme()) host_.need(what, bytes);
            if (wanted) home = Tier::host;
        };
        const auto each = [&](const auto& body) {
            for (size_t c = 0; c < plan_.chunks.size(); ++c) body(c, plan_.chunks[c]);
        };
        each([&](size_t c, const Chunk& chunk) {
            if (chunk.trainable && small(chunk) && !forced_to_nvme()) {
                claim(state_home_[c], "optimizer state", host_state_bytes(chunk));
            }
        });
        each([&](size_t c, const Chunk& chunk) {
            if (plan_.layer_plans[static_cast<size_t>(chunk.layer)].resident) {
                weight_home_[c] = Tier::device;
            } else {
                claim(weight_home_[c], "weights", chunk.count * size_of(plan_.compute));
            }
        });
        if (multiple_groups()) {
            each([&](size_t c, const Chunk& chunk) {
                if (!chunk.trainable) return;
                const int64_t copies = plan_.tied && chunk.layer == 0 ? 2 : 1;
                claim(park_home_[c], "gradient accumulators", copies * chunk.count * 4);
            });
        }
        each([&](size_t c, const Chunk& chunk) {
            if (chunk.trainable) claim(gradient_home_[c], "gradients", chunk.count * size_of(plan_.wire));
        });
        for (size_t i = 0; i < input_home_.size(); ++i) {
            // The last blocks' inputs are needed again first: they keep the device's buffers.
            if (static_cast<int64_t>(input_home_.size() - i) <= kept_inputs_) {
                input_home_[i] = Tier::device;
            } else {
                claim(input_home_[i], "block inputs", activation_bytes_);
            }
        }
        place_states();
    }

    bool forced_to_nvme() const { return config_.swap.state_on_nvme >= 0 && has_nvme(); }

    // State in memory is updated in place; only when every chunk must bet does it get a second slot.
    bool all_bet() const { return config_.swap.bets == "all"; }
    int64_t host_state_bytes(const Chunk& chunk) const {
        return all_bet() ? 2 * class_bytes(Class::stage) : 3 * chunk.state_part_bytes();
    }

    void place_states() {
        int64_t trainable = 0, stored = 0;
        for (const Chunk& chunk : plan_.chunks) trainable += chunk.trainable ? chunk.count : 0;
        const double fraction = forced_to_nvme() ? config_.swap.state_on_nvme : 0;
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            const Chunk& chunk = plan_.chunks[c];
            if (!chunk.trainable || state_home_[c] == Tier::host) continue;
            const int64_t bytes = host_state_bytes(chunk);
            if (static_cast<double>(stored) < fraction * static_cast<double>(trainable)) {
                stored += chunk.count;
            } else if (!has_nvme()) {
                host_.need("optimizer state", bytes);
                state_home_[c] = Tier::host;
            } else if (host_.take("optimizer state", bytes)) {
                state_home_[c] = Tier::host;
            }
        }
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            Chunk& chunk = plan_.chunks[c];
            const bool some = config_.swap.bets == "auto" && state_home_[c] == Tier::nvme && c % 2 == 0;
            chunk.bets = chunk.trainable && (all_bet() || some);
        }
    }

    void refuse_host() const {
        const int64_t smallest = host_.spent();
        throw Error(
            Trouble::does_not_fit,
            {.what = has_nvme() ? "the host budget is too small even with all state on NVMe"
                                : "the model's state does not fit into the host budget",
             .where = "budgets.host",
             .measured = format_bytes(smallest) + " needed (" + std::to_string(smallest) + " bytes)",
             .limit = format_bytes(host_.limit()) + ", " + format_bytes(smallest - host_.limit()) + " missing",
             .remedy = "set budgets.host to \"" + std::to_string(smallest) + "\" or more" +
                       (has_nvme() ? ", or lower swap.chunk_elements" : ", or add a path to budgets.nvme")});
    }

    // ---- objects and addresses

    ObjectId add_object(Tier home, int64_t bytes, const char* slot_class, bool versioned, int64_t slot_bytes) {
        Object object{.home = home, .bytes = bytes, .versioned = versioned};
        if (home == Tier::nvme) object.slot_class = count_slot(slot_class, slot_bytes);
        plan_.objects.push_back(object);
        return static_cast<ObjectId>(plan_.objects.size() - 1);
    }

    int count_slot(const std::string& name, int64_t slot_bytes) {
        auto& classes = plan_.slot_classes;
        auto found = std::find_if(classes.begin(), classes.end(), [&](const auto& c) { return c.name == name; });
        if (found == classes.end()) {
            classes.push_back({name, slot_bytes, 0});
            found = classes.end() - 1;
        }
        ++found->slots;
        return static_cast<int>(found - classes.begin());
    }

    void place_objects() {
        const int64_t elements = plan_.chunk_elements;
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            Chunk& chunk = plan_.chunks[c];
            const int64_t weight_bytes = chunk.count * size_of(plan_.compute);
            chunk.weight = add_object(weight_home_[c], weight_bytes, "weights", false, elements * size_of(plan_.compute));
            if (!chunk.trainable) continue;
            const bool versioned = state_home_[c] == Tier::nvme || chunk.bets;
            chunk.state = add_object(state_home_[c], 3 * chunk.state_part_bytes(), "state", versioned, elements * 12);
            if (chunk.bets && state_home_[c] == Tier::nvme) count_slot("state", elements * 12);
            plan_.betting = plan_.betting || chunk.bets;
            chunk.gradient = add_object(gradient_home_[c], chunk.count * size_of(plan_.wire), "gradients", false,
                                        elements * size_of(plan_.wire));
            if (multiple_groups()) {
                chunk.park = add_object(park_home_[c], chunk.count * 4, "accumulators", false, elements * 4);
                if (plan_.tied && chunk.layer == 0) {
                    chunk.park_table = add_object(park_home_[c], chunk.count * 4, "accumulators", false, elements * 4);
                }
            }
        }
        for (const Tier home : input_home_) {
            plan_.inputs.push_back(home == Tier::device
                                       ? swap::kNoObject
                                       : add_object(home, activation_bytes_, "block inputs", false, activation_bytes_));
        }
        // A settled update writes a fresh slot before it frees the old one.
        for (aio::SlotClass& c : plan_.slot_classes) {
            if (c.name == "state") c.slots += plan_.buffers[at(Class::stage)].count;
            nvme_.need(c.name, c.slots * c.slot_bytes);
        }
        if (!nvme_.exceeded()) return;
        throw Error(Trouble::does_not_fit,
                    {.what = "the NVMe budget is too small",
                     .where = "budgets.nvme",
                     .measured = format_bytes(nvme_.spent()) + " needed (" + std::to_string(nvme_.spent()) + " bytes)",
                     .limit = format_bytes(nvme_.limit()) + " over all paths, " +
                              format_bytes(nvme_.spent() - nvme_.limit()) + " missing",
                     .remedy = "raise the sizes in budgets.nvme to \"" + std::to_string(nvme_.spent()) +
                               "\" in all, add a path, or raise budgets.host"});
    }

    void lay_out() {
        int64_t device = 0, host = 0;
        plan_.resources = static_cast<uint32_t>(plan_.objects.size());
        static constexpr const char* kNames[] = {"block weights", "edge weights", "block gradient", "edge gradient",
                                                 "wire", "activation", "tokens", "scratch", "state stage",
                                                 "weight piece", "gradient piece", "input piece", "park piece",
                                                 "host tokens"};
        for (size_t c = 0; c < kClasses; ++c) {
            Buffers& b = plan_.buffers[c];
            b.name = kNames[c];
            b.tier = c < at(Class::stage) ? Tier::device : Tier::host;
            b.bytes = class_bytes(static_cast<Class>(c));
            int64_t& end = b.tier == Tier::device ? device : host;
            b.offset = end;
            end += b.bytes * b.count;
            b.first_resource = plan_.resources;
            plan_.resources += static_cast<uint32_t>(b.count);
        }
        plan_.io_bytes = host;
        plan_.leaves_offset = host;
        plan_.leaves_resource = plan_.resources++;
        host += round_up(plan_.leaves * 4, kPage);
        lay_out_homes(device, host);
        FERRY_CHECK(device == device_.spent(), "the device arena is what the budget says");
        plan_.device_bytes = device;
        plan_.host_bytes = host;
        plan_.nvme_bytes = nvme_.spent();
        for (const Budget* budget : {&device_, &host_, &nvme_}) {
            plan_.rows.insert(plan_.rows.end(), budget->rows().begin(), budget->rows().end());
        }
    }

    void lay_out_homes(int64_t& device, int64_t& host) {
        for (size_t l = 0; l < plan_.layers.size(); ++l) {
            LayerPlan& layer = plan_.layer_plans[l];
            if (!layer.resident) continue;
            layer.device_offset = device;
            for (const Chunk& chunk : plan_.chunks_of(static_cast<int64_t>(l))) {
                plan_.objects[chunk.weight].offset = device + chunk.first * size_of(plan_.compute);
            }
            device += round_up(plan_.layers[l].elements * size_of(plan_.compute), kPage);
        }
        for (Object& object : plan_.objects) {
            if (object.home != Tier::host || object.versioned) continue;
            object.offset = host;
            host += round_up(object.bytes, kPage);
        }
        plan_.host_slots = {.offset = host, .slot_bytes = plan_.chunk_elements * 12, .slots = 0};
        for (const Object& object : plan_.objects) {
            if (object.home == Tier::host && object.versioned) plan_.host_slots.slots += 2;
        }
        host += plan_.host_slots.slots * plan_.host_slots.slot_bytes;
        FERRY_CHECK(host == host_.spent(), "the host arena is what the budget says");
    }

    const Config& config_;
    Plan plan_;
    Budget device_, host_, nvme_;
    int64_t activation_bytes_, scratch_bytes_, token_bytes_;
    int64_t kept_inputs_ = 0;
    std::vector<Tier> weight_home_, state_home_, gradient_home_, park_home_, input_home_;
};

}  // namespace

Plan make_plan(const Config& config, std::vector<model::Layer> layers, const model::Numerics& numerics,
               int64_t activation_bytes, int64_t scratch_bytes) {
    const bool automatic = config.swap.chunk_elements == 0;
    int64_t elements = automatic ? choose_chunk_elements(layers, config.budgets.host_bytes)
                                 : config.swap.chunk_elements;
    for (;; elements /= 2) {
        try {
            return Planner(config, layers, numerics, activation_bytes, scratch_bytes, elements).make();
        } catch (const Error& error) {
            // Smaller chunks pass through smaller buffers: refuse only what the smallest cannot do.
            const bool smaller = automatic && elements > kLeafElements;
            if (!smaller || error.trouble() != Trouble::does_not_fit) throw;
        }
    }
}

}  // namespace ferry::planner
