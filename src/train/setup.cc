#include "setup.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <algorithm>

#include "base/checksum.h"
#include "base/log.h"
#include "bound.h"
#include "ops/ops.h"
#include "outcome.h"
#include "plan_figures.h"

namespace ferry::train {

namespace {

model::Description read_directory(const Config& config) {
    const ModelConfig& m = config.model;
    const std::string path = std::filesystem::path(m.path) / "config.json";
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    if (!file.is_open() || !(text << file.rdbuf())) {
        throw Error(Trouble::usage, {.what = "cannot read the model's configuration",
                                     .where = "model.path: " + path,
                                     .measured = errno ? std::strerror(errno) : "the file is empty",
                                     .remedy = "name the directory of a Hugging Face model"});
    }
    model::Description found = model::read_description(text.str(), path);
    if (found.drops && m.dropout != "ignore") {
        throw Error(Trouble::usage, {.what = "the model asks for dropout, which ferry does not do",
                                     .where = path,
                                     .remedy = "set model.dropout to \"ignore\""});
    }
    if (!m.load && found.shape.initial_deviation == 0) {
        throw Error(Trouble::usage,
                    {.what = "random weights would all be 0",
                     .where = path + ": initializer_range",
                     .measured = "0",
                     .remedy = "set it above 0, or start from the directory's weights"});
    }
    return found;
}

// Longer text than the model was made for is impossible where positions are learned.
void check_positions(const model::Description& found, int64_t sequence) {
    if (found.shape.learned_positions == 0 || sequence <= found.context) return;
    throw Error(Trouble::usage,
                {.what = "the model knows fewer positions than a sequence has",
                 .where = "batch.sequence",
                 .measured = std::to_string(sequence),
                 .limit = std::to_string(found.context),
                 .remedy = "set batch.sequence to " + std::to_string(found.context) + " or less"});
}

}  // namespace

model::Description model_of(const Config& config) {
    const ModelConfig& m = config.model;
    if (!m.path.empty()) {
        model::Description found = read_directory(config);
        check_positions(found, config.batch.sequence);
        return found;
    }
    return {.shape = {.hidden = m.hidden,
                      .layers = m.layers,
                      .heads = m.heads,
                      .kv_heads = m.kv_heads,
                      .head_dim = m.head_dim,
                      .intermediate = m.intermediate,
                      .vocab = m.vocab,
                      .tie_embeddings = m.tie_embeddings,
                      .rope_theta = m.rope_theta,
                      .norm_eps = m.norm_eps},
            .context = config.batch.sequence};
}

void warn_of_text(const Config& config, const model::Description& made,
                  const TokenFileInfo& tokens) {
    if (config.batch.sequence > made.context) {
        log_warn(fmt::format("batch.sequence is {}, but the model was made for {} tokens",
                             config.batch.sequence, made.context));
    }
    // Tables are often padded by some rows, never to twice as many.
    if (config.model.path.empty() || !config.model.load ||
        tokens.vocabulary * 2 > static_cast<uint64_t>(made.shape.vocab))
        return;
    log_warn(
        fmt::format("{} holds tokens of a vocabulary of {}, the model knows {}: they may not be "
                    "its tokenizer's "
                    "(ferry data --ids makes a file of those)",
                    config.data.tokens, tokens.vocabulary, made.shape.vocab));
}

namespace {

aio::BackendKind backend_from(const std::string& name) {
    if (name == "uring") return aio::BackendKind::uring;
    if (name == "posix") return aio::BackendKind::posix;
    return aio::BackendKind::automatic;
}

aio::Leftover leftover_from(const std::string& name) {
    using enum aio::Leftover;
    if (name == "reuse") return reuse;
    if (name == "refuse") return refuse;
    if (name == "remove_any") return remove_any;
    return name == "reuse_any" ? reuse_any : remove;
}

}  // namespace

model::Numerics numerics_of(const Config& config) {
    const DType compute = dtype_from_name(config.precision).value_or(DType::f32);
    return {.sequence = config.batch.sequence,
            .micro_batch = config.batch.micro_batch,
            .head_tile = config.numerics.head_tile,
            .mlp_tile = config.numerics.mlp_tile,
            .compute = compute,
            .residual = dtype_from_name(config.numerics.residual)
                            .value_or(compute == DType::f16 ? DType::f32 : compute),
            .wire = dtype_from_name(config.numerics.wire).value_or(compute)};
}

TokenLoader::Options loader_options(const Config& config, const model::Shape& shape,
                                    const zero::Partition& partition) {
    return {.path = config.data.tokens,
            .sequence = config.batch.sequence,
            .micro_batch = config.batch.micro_batch,
            .micro_batches = config.batch.micro_batches / partition.ranks,
            .model_vocab = shape.vocab,
            .held_back = config.data.held_back,
            .trains = !config.evaluate.only,
            .evaluation_micro_batches = config.evaluate.micro_batches,
            .seed = config.seed,
            .rank = partition.rank,
            .ranks = partition.ranks};
}

namespace {

std::vector<int> cores_of(const Topology& machine) {
    std::vector<int> cores;
    for (const NumaNode& node : machine.nodes)
        cores.insert(cores.end(), node.cores.begin(), node.cores.end());
    return cores;
}

// Where a path's rings run: at the node that its drives hang off, on the cores that are left to I/O
// there, if any are. Empty, and anywhere: there is one node, or none that is nearer.
std::vector<int> cores_near(const std::string& path, const Topology& machine) {
    if (machine.nodes.size() < 2) return {};
    const auto node =
        std::ranges::find(machine.nodes, node_of_path(machine, path), &NumaNode::os_index);
    if (node == machine.nodes.end()) return {};
    std::vector<int> reserved = machine.reserved;
    std::erase_if(reserved, [&](int core) { return std::ranges::count(node->cores, core) == 0; });
    return reserved.empty() ? node->cores : reserved;
}

}  // namespace

aio::VolumeOptions volume_options(const Config& config, const planner::Plan& plan,
                                  const Topology& machine, std::span<std::byte> arena,
                                  uint64_t run_id) {
    aio::VolumeOptions options{.classes = plan.slot_classes,
                               .backend = backend_from(config.io.backend),
                               .block_bytes = config.io.block_bytes,
                               .queue_depth = config.io.queue_depth,
                               .rings = config.io.rings,
                               .direct = config.io.direct,
                               .leftover = leftover_from(config.io.leftovers),
                               .run_id = run_id,
                               .registered = {arena.first(static_cast<size_t>(plan.io_bytes))},
                               .record_bytes = plan.record_bytes};
    for (const NvmePath& path : config.budgets.nvme) {
        const bool unlimited = path.size_bytes == kUnlimited;
        options.paths.push_back({.path = path.path,
                                 .size_bytes = unlimited ? 0 : path.size_bytes,
                                 .endurance_tbw = path.endurance_tbw,
                                 .cores = cores_near(path.path, machine)});
    }
    return options;
}

namespace {

// Threads' stacks, BLAS's buffers, schedules: measured below 16 MiB with two threads.
constexpr int64_t kStillToCome = 32 * kMiB;

// Of what the plan stores, the most that lies on paths that are memory themselves.
int64_t stored_in_memory(const Config& config, const planner::Plan& plan) {
    int64_t bytes = 0;
    for (const NvmePath& path : config.budgets.nvme) {
        if (!is_memory(path.path)) continue;
        log_warn(path.path +
                 " is memory (tmpfs): what is stored there is host memory, beside "
                 "budgets.host");
        bytes += std::min(path.size_bytes, plan.nvme_bytes);
    }
    return std::min(bytes, plan.nvme_bytes);
}

}  // namespace

void check_paths(const Config& config) {
    for (size_t i = 0; i < config.budgets.nvme.size(); ++i) {
        const std::string& path = config.budgets.nvme[i].path;
        std::error_code reason;
        if (std::filesystem::exists(path, reason)) continue;
        throw Error(Trouble::usage, {.what = "a storage path does not exist",
                                     .where = "budgets.nvme[" + std::to_string(i) + "]: " + path,
                                     .measured = reason ? reason.message() : std::strerror(ENOENT),
                                     .remedy = "create the directory, or leave the path out"});
    }
}

planner::Plan within_memory(planner::Plan plan, const Config& config, const Topology& machine,
                            const Device& device) {
    const int64_t on_device = device.kind() == DeviceKind::cpu ? plan.device_bytes : 0;
    const int64_t on_tmpfs = stored_in_memory(config, plan);
    const int64_t bytes = on_device + plan.host_bytes + on_tmpfs;
    // The process is already counted as it is; what it is still to take beside its arenas is not.
    const int64_t left = std::max<int64_t>(machine.memory_left_bytes - kStillToCome, 0);
    if (bytes <= left) return plan;
    throw Error(Trouble::does_not_fit,
                {.what = "this machine has less memory than the budgets allow the run to take",
                 .where = "budgets.device, budgets.host",
                 .measured = format_bytes(on_device) + " for the CPU device, " +
                             format_bytes(plan.host_bytes) + " for the host tier and " +
                             format_bytes(on_tmpfs) + " on tmpfs",
                 .limit = std::to_string(left) + " bytes (" + format_bytes(left) + "): of " +
                          format_bytes(machine.memory_limit_bytes) +
                          " installed or allowed to this container, what is not in use, and " +
                          format_bytes(kStillToCome) + " for threads and libraries",
                 .remedy = "lower budgets.device and budgets.host until their sum fits, with a "
                           "path in budgets.nvme for the rest; or end other processes"});
}

Topology as_left_now(Topology machine) {
    const Topology now = discover_topology();
    // One of several processes has its part of the limit, and the same of what is left.
    const int64_t processes = std::max<int64_t>(
        now.memory_limit_bytes / std::max<int64_t>(machine.memory_limit_bytes, 1), 1);
    machine.memory_left_bytes =
        std::max<int64_t>(now.memory_left_bytes / processes - kStillToCome, 0);
    return machine;
}

Topology machine_for(const Config& config) {
    Topology machine = discover_topology();
    const std::vector<int> cores = cores_of(machine);
    for (const int core : config.reserved_cores) {
        if (std::find(cores.begin(), cores.end(), core) != cores.end()) continue;
        throw Error(Trouble::usage,
                    {.what = "no such core to reserve",
                     .where = "reserved_cores",
                     .measured = std::to_string(core),
                     .limit = fmt::format("this process may run on {}", fmt::join(cores, ", ")),
                     .remedy = "name cores of that list (one processing unit stands for a core)"});
    }
    machine.reserved = config.reserved_cores;
    return machine;
}

void log_machine(const Config& config, const Topology& machine, const Device& device,
                 const Executor& executor) {
    if (executor.simulated()) return;
    std::string text = describe(machine);
    const auto place = [&](const std::string& what, int node) {
        text += "; " + what + (node >= 0 ? " at node " + std::to_string(node) : " at no one node");
        const auto mine = std::ranges::find(machine.nodes, node, &NumaNode::os_index);
        if (node >= 0 && mine == machine.nodes.end()) text += ", where this process has no core";
    };
    if (!machine.attached.empty()) {
        if (!device.pci_address().empty())
            place("its GPU " + device.pci_address(), node_of_device(machine, device.pci_address()));
        for (const NvmePath& path : config.budgets.nvme)
            place(path.path, node_of_path(machine, path.path));
    }
    log_info(text);
}

int threads_for(const Config& config, const Topology& machine, int ranks) {
    if (config.threads > 0) return config.threads;
    const int left = machine.cores() - static_cast<int>(machine.reserved.size());
    // The step and NCCL's own threads start every exchange: where the team took all cores for an
    // update, one took 2 ms instead of 0.2 (decision 17).
    const bool exchanges = ranks > 1 && config.device == "cuda" && machine.reserved.empty();
    return std::max(1, exchanges ? left - std::min(2, left / 4) : left);
}

std::unique_ptr<NodeTeams> make_teams(const Config& config, const Topology& machine,
                                      const Executor& executor, int ranks) {
    if (executor.simulated()) {  // one thread does everything
        Topology one = machine;
        one.nodes.resize(1);
        one.reserved.clear();
        return std::make_unique<NodeTeams>(one, 1);
    }
    auto teams = std::make_unique<NodeTeams>(machine, threads_for(config, machine, ranks));
    for (int i = 0; teams->count() > 1 && i < teams->count(); ++i) {
        log_info(fmt::format("NUMA node {} of {}: {} threads update what lies there", i,
                             teams->count(), teams->team(i).threads()));
    }
    return teams;
}

swap::Parallel parallel_on(NodeTeams& teams) {
    return [&teams](int64_t count, const auto& body) { teams.all().parallel(count, body); };
}

namespace {

ops::AttentionKernels attention_of(const Config& config) {
    return config.numerics.attention == "ferry" ? ops::AttentionKernels::ferry
                                                : ops::AttentionKernels::best;
}

}  // namespace

std::unique_ptr<ops::Ops> ops_on(Device& device, const Config& config, Team& team) {
    if (device.kind() == DeviceKind::cpu) return ops::make_cpu_ops(team);
    return ops::make_cuda_ops(device, attention_of(config));
}

model::OfSaved<std::vector<double>> saved_flops(const model::Decoder& decoder) {
    const model::Shape& shape = decoder.shape();
    const model::Numerics& numerics = decoder.numerics();
    const auto tokens = static_cast<double>(numerics.tokens());
    const auto width = static_cast<double>(shape.heads * shape.head_dim);
    const auto inner = static_cast<double>((shape.gated ? 2 : 1) * shape.intermediate);
    std::vector<double> attention, mlp;
    for (int64_t block = 0; block < shape.layers; ++block) {  // scores and weighted sums
        attention.push_back(4 * tokens * width * keys_seen(shape, numerics.sequence, block));
        mlp.push_back(2 * tokens * inner * static_cast<double>(shape.hidden));
    }
    return {attention, mlp};
}

model::OfSaved<int64_t> saved_bytes(const model::Decoder& decoder) {
    model::OfSaved<int64_t> bytes{};
    for (const model::Saved what : model::kAllKept) bytes[at(what)] = decoder.saved_bytes(what);
    return bytes;
}

int64_t overhead_of(const Device& device) {
    if (device.kind() == DeviceKind::cpu) return 0;
    // The driver loads a kernel's code at its first call; check_device_memory() measures after it.
    constexpr int64_t kCodeBytes = 64 * kMiB;
    return round_up(device.overhead_bytes() + kCodeBytes, kMiB);
}

planner::DeviceNeeds needs_of(const Device& device, const model::Decoder& decoder) {
    return {.activation = decoder.activation_bytes(),
            .scratch = decoder.scratch_bytes(),
            .overhead = overhead_of(device),
            .kept = saved_bytes(decoder),
            .saved_flops = saved_flops(decoder),
            .maps_host = device.kind() == DeviceKind::cuda};
}

Config within(const Config& config, const Device& device) {
    if (device.kind() == DeviceKind::cpu) return config;
    Config possible = config;
    const int64_t most = device.overhead_bytes() + device.free_bytes();
    if (most >= config.budgets.device_bytes) return config;
    possible.budgets.device_bytes = most;
    if (config.budgets.device_bytes != kUnlimited) {
        log_warn("budgets.device is " + format_bytes(config.budgets.device_bytes) +
                 ", but the GPU has no more than " + format_bytes(most) + " for this process");
    }
    return possible;
}

std::string machine_text(const Device& device, const Config& config) {
    if (device.kind() == DeviceKind::cpu) return "device cpu; ops 3; " + ops::library_versions();
    return "device " + device.architecture() + "; ops 4; " +
           ops::cuda_library_versions(attention_of(config));
}

namespace {

// Which list of operations an update is, and so what the state holds; not its constants.
std::string operations_of(const Config& config) {
    const optim::Hyper hyper = hyper_of(config);
    std::string text = config.optimizer.method;
    if (hyper.method == optim::Method::sgd && hyper.momentum > 0)
        text += hyper.nesterov ? " with Nesterov momentum" : " with momentum";
    const StateFormat format = format_of(config);
    if (format.moments > 0 && format.moment_type == DType::bf16)
        text += ", moments bf16 rounded stochastically";
    if (format.split) text += ", split master";
    return text;
}

uint64_t checksum_of(const std::vector<double>& values) {
    return checksum(std::as_bytes(std::span(values)));
}

// What the shape has beside the sizes of a plain Llama.
std::string options_of(const model::Shape& s) {
    std::string text;
    const auto add = [&](bool there, const char* name) { text += there ? name : ""; };
    add(s.layer_norm, " layer-norm");
    add(!s.gated, " gelu");
    add(s.qkv_bias, " qkv-bias");
    add(s.output_bias, " output-bias");
    add(s.mlp_bias, " mlp-bias");
    add(s.head_norms, " head-norms");
    add(s.learned_positions > 0, " learned-positions");
    const model::RopeScaling& r = s.rope_scaling;
    if (r.kind != model::RopeScaling::Kind::none) {
        text += fmt::format(" rope-scaling {}/{}/{}/{}/{}/{}/{}/{}/{}", static_cast<int>(r.kind),
                            r.factor, r.original_positions, r.low_frequency, r.high_frequency,
                            r.beta_fast, r.beta_slow, r.amplitude, r.truncate);
        if (r.rotated < 1) text += fmt::format("/{}", r.rotated);
        if (!r.short_factors.empty())
            text += fmt::format("/{:016x}/{:016x}", checksum_of(r.short_factors),
                                checksum_of(r.long_factors));
    }
    if (s.padding_token >= 0) text += fmt::format(" padding-token {}", s.padding_token);
    if (!s.windows.empty()) text += fmt::format(" windows {}", fmt::join(s.windows, "/"));
    return text;
}

}  // namespace

std::string numerics_text(const Config& config, const model::Shape& s, const std::string& machine,
                          int ranks) {
    const model::Numerics n = numerics_of(config);
    return fmt::format(
        "model {}x{} heads {}/{}x{} mlp {} vocab {} tied {} theta {} eps {}{}; sequence {} "
        "micro-batch {} x {}; "
        "head tile {} mlp tile {}; compute {} residual {} wire {}; ranks {}; "
        "optimizer {}; {}",
        s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.vocab,
        s.tie_embeddings, s.rope_theta, s.norm_eps, options_of(s), n.sequence, n.micro_batch,
        config.batch.micro_batches, n.head_tile, n.mlp_tile, name_of(n.compute),
        name_of(n.residual), name_of(n.wire), ranks, operations_of(config), machine);
}

uint64_t numerics_hash(const Config& config, const model::Shape& shape, const std::string& machine,
                       int ranks) {
    const std::string text = numerics_text(config, shape, machine, ranks);
    return checksum(std::as_bytes(std::span(text)));
}

int64_t device_buffer_bytes(const planner::Plan& plan) {
    int64_t bytes = 0;
    for (const planner::Buffers& b : plan.buffers) {
        if (b.tier == swap::Tier::device) bytes += b.bytes * b.count;
    }
    return bytes;
}

std::string layer_name(const std::vector<model::Layer>& layers, int64_t layer) {
    const model::Layer& l = layers[static_cast<size_t>(layer)];
    switch (l.kind) {
        case model::LayerKind::embedding:
            return "the embedding";
        case model::LayerKind::block:
            return "block " + std::to_string(l.index);
        case model::LayerKind::head:
            return "the head and loss";
    }
    return "?";
}

}  // namespace ferry::train
