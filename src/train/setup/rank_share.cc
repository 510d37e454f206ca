#include "rank_share.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <numeric>
#include <optional>
#include <utility>

#include "base/checksum.h"
#include "base/log.h"
#include "volume_options.h"

namespace ferry::train {
namespace {

constexpr std::string_view kRankDirectory = "rank-";  // and its number

int64_t share_of(int64_t bytes, int parts) { return bytes == kUnlimited ? bytes : bytes / parts; }

void check_batch(int64_t all, std::optional<int64_t> groups, const World& world) {
    const int ranks = world.replicas(), each = world.ranks / ranks;
    if (all % ranks != 0) {
        throw Error(Trouble::usage,
                    {.what = "the micro-batches of a step cannot be divided among the ranks",
                     .where = "batch.micro_batches",
                     .measured = fmt::format("{} micro-batches, {} ranks{}", all, world.ranks,
                                             each > 1 ? fmt::format(" in groups of {}", each) : ""),
                     .remedy = fmt::format("set batch.micro_batches to {}, or start a number of "
                                           "ranks that divides it",
                                           round_up(all, ranks))});
    }
    if (groups && all / ranks % *groups != 0) {
        throw Error(Trouble::usage,
                    {.what = "a rank's micro-batches are not divisible by the groups",
                     .where = "swap.groups",
                     .measured = fmt::format("{} groups, {} micro-batches on each of {} ranks",
                                             *groups, all / ranks, ranks),
                     .remedy = "set groups to a divisor of them, or \"auto\""});
    }
}

// Launchers bind ranks to a core or a socket unless told otherwise. `sharing`: ranks that see the
// same cores as this one.
void warn_of_binding(const Topology& machine, int sharing, const comm::Communicator& ranks) {
    int64_t seen = 0;
    for (const NumaNode& node : machine.nodes) seen += std::ssize(node.cores);
    const double each = static_cast<double>(seen) / sharing;
    double usable = machine.host_cores;
    if (machine.cpu_quota > 0) usable = std::min(usable, machine.cpu_quota);
    if (each * ranks.local_size() >= usable) return;
    log_warn(fmt::format(
        "what started this rank has bound it{} to {} of this host's {} cores, which {} ranks could "
        "share: start them with mpirun --bind-to none, or srun --cpu-bind=none",
        sharing > 1 ? fmt::format(" and {} more", sharing - 1) : "", seen, machine.host_cores,
        ranks.local_size()));
}

BudgetConfig budgets_of_rank(BudgetConfig budgets, const World& world) {
    budgets.host_bytes = share_of(budgets.host_bytes, world.local_ranks);
    for (NvmePath& path : budgets.nvme) {
        path.path += fmt::format("/{}{}", kRankDirectory, world.rank);
        path.size_bytes = share_of(path.size_bytes, world.local_ranks);
    }
    return budgets;
}

}  // namespace

namespace {

// `product`: of the sizes of all groups, of which the ranks must be a multiple.
void require_groups(const std::string& key, const char* of, int size, int ranks, int product) {
    if (ranks % size == 0) return;
    throw Error(
        Trouble::usage,
        {.what = fmt::format("the ranks cannot be cut into groups that share {}", of),
         .where = key,
         .measured = fmt::format("groups of {}, {} rank{}", size, ranks, ranks == 1 ? "" : "s"),
         .limit = "a divisor of the ranks",
         .remedy = fmt::format("start {} ranks, or set {} to {}", round_up(ranks, product), key,
                               std::gcd(ranks, size))});
}

// Groups within groups: of such sizes in all.
void require_product(const std::string& keys, const char* of, int size, int ranks, int product) {
    if (ranks % size == 0) return;
    throw Error(Trouble::usage,
                {.what = fmt::format("the ranks cannot be cut into groups that share {}", of),
                 .where = keys,
                 .measured = fmt::format("groups of {}, {} ranks", size, ranks),
                 .limit = "a divisor of the ranks",
                 .remedy = fmt::format("start {} ranks, or choose them so that their product "
                                       "divides {}",
                                       round_up(ranks, product), ranks)});
}

}  // namespace

World world_of(const Config& config, int rank, int ranks, int local_ranks) {
    const ParallelConfig& p = config.parallel;
    const int product = p.pipeline * p.tensor * p.sequence;
    require_groups("parallel.tensor", "tensors", p.tensor, ranks, product);
    if (p.tensor == 1) require_groups("parallel.sequence", "sequences", p.sequence, ranks, product);
    require_product("parallel.tensor, parallel.sequence", "tensors and sequences",
                    p.tensor * p.sequence, ranks, product);
    require_groups("parallel.pipeline", "layers", p.pipeline, ranks, product);
    require_product("parallel.pipeline, parallel.tensor, parallel.sequence",
                    "layers, tensors and sequences", product, ranks, product);
    const int of_a_host = config.zero.ranks_per_host;
    const bool hosts = of_a_host > 1 && of_a_host < ranks;
    if (ranks > 1) require_groups("zero.ranks_per_host", "a host", of_a_host, ranks, of_a_host);
    return {rank, ranks, local_ranks, p.sequence, p.tensor, p.pipeline, hosts ? of_a_host : 1};
}

std::vector<int> World::with_tensors() const { return comm::run_of(rank, tensor); }

std::vector<int> World::with_slice() const {
    std::vector<int> members = comm::across_runs(within(), tensor, of_a_stage());
    for (int& member : members) member += stage() * of_a_stage();
    return members;
}

std::vector<int> World::with_sequences() const {
    std::vector<int> members = comm::run_of(sharer(), sequence);
    for (int& member : members) member = stage() * of_a_stage() + member * tensor + rank % tensor;
    return members;
}

planner::PlanRequest of_rank(planner::PlanRequest request, const World& world) {
    if (world.ranks == 1) return request;
    check_batch(request.micro_batches, request.swap.groups, world);
    request.micro_batches /= world.replicas();
    request.budgets = budgets_of_rank(std::move(request.budgets), world);
    request.sharers = world.local_ranks;
    // It would write before all ranks have the durable step before.
    if (request.durable) request.swap.speculate = Speculate::off;
    return request;
}

planner::PlanRequest in_groups(planner::PlanRequest request, const zero::Stage& stage) {
    if (stage.count > 1 && !request.swap.groups)
        request.swap.groups = stage.round_robin ? 1 : request.micro_batches;
    return request;
}

RankShare share_of(const Config& config, const World& world) {
    RankShare all{.micro_batches = config.batch.micro_batches,
                  .evaluation_micro_batches = config.evaluate.micro_batches,
                  .budgets = config.budgets,
                  .threads = config.threads};
    if (world.ranks == 1) return all;
    check_batch(config.batch.micro_batches, config.swap.groups, world);
    all.micro_batches /= world.replicas();
    all.evaluation_micro_batches = ceil_div(all.evaluation_micro_batches, world.replicas());
    all.budgets = budgets_of_rank(std::move(all.budgets), world);
    if (all.threads) all.threads = std::max(1, *all.threads / world.local_ranks);
    return all;
}

void warn_of_speculation(const Config& config, const World& world) {
    if (world.ranks == 1 || !config.checkpoint.durable_steps ||
        config.swap.speculate != Speculate::all)
        return;
    log_warn(
        "swap.speculate = \"all\" does nothing here: with checkpoint.durable_steps several ranks "
        "make no speculative updates");
}

void warn_of_one_host(const Config& config, const World& world) {
    const int each = config.zero.ranks_per_host;
    const bool keeps = config.zero.second_shard != SecondShard::none;
    const bool codes = config.zero.compress.gradients != CodecKind::none;
    if (each == 1 || world.ranks == 1 || each < world.ranks || !(keeps || codes)) return;
    log_warn(fmt::format(
        "zero.{} nothing here: by zero.ranks_per_host {} all {} ranks are one host, which {}; set "
        "ranks_per_host to the ranks of each of several hosts, or leave {} out",
        keeps ? "second_shard does" : "ranks_per_host does", each, world.ranks,
        keeps && codes ? "gathers its weights within it anyway and adds gradients in one level"
        : keeps        ? "gathers its weights within it anyway"
                       : "adds gradients in one level",
        keeps ? "both" : "it"));
}

std::optional<int> rank_of(const std::string& directory) {
    const std::string name = std::filesystem::path(directory).filename();
    if (!name.starts_with(kRankDirectory)) return {};
    int rank = -1;
    const char* end = name.data() + name.size();
    const auto read = std::from_chars(name.data() + kRankDirectory.size(), end, rank);
    return read.ptr == end && rank >= 0 ? std::optional(rank) : std::nullopt;
}

namespace {

// Nobody of this run will look there, so it is said.
void warn_of_more_ranks(const Config& config, const World& world) {
    if (world.rank % world.local_ranks != 0) return;  // one rank of a host does
    for (const NvmePath& path : config.budgets.nvme) {
        std::error_code reason;
        for (const auto& entry : std::filesystem::directory_iterator(path.path, reason)) {
            const std::optional<int> rank = rank_of(entry.path());
            if (!rank || (world.ranks > 1 && *rank < world.ranks)) continue;
            int64_t bytes = 0;
            for (const auto& file : std::filesystem::directory_iterator(entry.path(), reason)) {
                const std::uintmax_t size = file.file_size(reason);
                bytes += reason ? 0 : static_cast<int64_t>(size);
            }
            log_warn(fmt::format("{} holds {} of a run of more ranks: if that has ended, remove it",
                                 entry.path().string(), format_bytes(bytes)));
        }
    }
}

}  // namespace

RankDirectories::RankDirectories(const Config& config, const RankShare& share, const World& world) {
    warn_of_more_ranks(config, world);
    if (world.ranks == 1) return;
    check_paths(config.budgets.nvme);
    for (const NvmePath& path : share.budgets.nvme) {
        std::error_code reason;
        std::filesystem::create_directory(path.path, reason);
        if (reason) {
            const bool in_the_way = reason == std::errc::file_exists;
            throw Error(Trouble::usage,
                        {.what = "a rank cannot make its directory",
                         .where = path.path,
                         .measured = in_the_way ? "a file is in its place" : reason.message(),
                         .remedy = in_the_way ? "move that file away"
                                              : "make the directory above it writable"});
        }
        made_.push_back(path.path);
    }
}

RankDirectories::~RankDirectories() {
    // One that is not empty holds what a killed run left: the next one finds it there.
    for (const std::string& path : made_) ::rmdir(path.c_str());
}

Topology machine_of_rank(Topology machine, std::string_view gpu, comm::Communicator* ranks,
                         Executor& executor) {
    if (!ranks) return machine;
    uint64_t cores = 0;
    for (const NumaNode& node : machine.nodes) {
        const std::array<uint64_t, 2> pair{cores, checksum(std::as_bytes(std::span(node.cores)))};
        cores = checksum(std::as_bytes(std::span(pair)));
    }
    // Parts of the cores follow the nodes, and so do the ranks that take them.
    const auto nearest =
        std::ranges::find(machine.nodes, node_of_device(machine, gpu), &NumaNode::os_index);
    const comm::PartOfAlike part =
        comm::part_among_alike(*ranks, executor, cores, {.of = "cores"},
                               static_cast<int>(nearest - machine.nodes.begin()));
    if (part.index == 0) warn_of_binding(machine, part.of, *ranks);  // for all that are bound so
    return with_part_of_limits(with_part_of_cores(std::move(machine), part.index, part.of),
                               ranks->local_size());
}

}  // namespace ferry::train
