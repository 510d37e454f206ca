// One rank's part of a run's configuration, and of a host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/comm.h"
#include "ferry/config.h"
#include "model/model.h"
#include "planner/request.h"
#include "topology/topology.h"
#include "zero/zero.h"

namespace ferry::train {

// A rank among those of the run and among those of its host.
struct World {
    int rank = 0, ranks = 1, local_ranks = 1;
    int sequence = 1;  // ranks that share each sequence
    int tensor = 1;    // neighbours that share each block's tensors
    int pipeline = 1;  // stages that share the layers: so many runs of neighbours, in their order
    // Neighbours that exchange among themselves first what others need as well; 1: none do.
    int host_ranks = 1;
    // A stage's ranks. Those that share tensors have the same tokens, and each a slice of the
    // weights. Of ranks with the same slice, neighbours share sequences: they have the same
    // micro-batches, and each a part of them.
    int of_a_stage() const { return ranks / pipeline; }
    int stage() const { return rank / of_a_stage(); }
    int within() const { return rank % of_a_stage(); }
    int replicas() const { return of_a_stage() / tensor / sequence; }
    int replica() const { return within() / tensor / sequence; }
    int part() const { return within() / tensor % sequence; }
    model::Slicing slicing() const { return {tensor, rank % tensor}; }
    // Among the ranks that have the same slice of the same layers, which share state and gradients.
    int sharers() const { return of_a_stage() / tensor; }
    int sharer() const { return within() / tensor; }
    // Others have the same, or none.
    bool counts_tokens() const { return rank % tensor == 0 && stage() == pipeline - 1; }
    // The ranks of a group that this rank is in: that share its tensors, its sequences, its slice.
    std::vector<int> with_tensors() const;
    std::vector<int> with_sequences() const;
    std::vector<int> with_slice() const;
    // The rank that stands in that stage where this one does in its own.
    int at_stage(int other) const { return other * of_a_stage() + within(); }
};
// Of a rank of so many. Throws usage where they cannot be cut into the configuration's groups.
World world_of(const Config& config, int rank, int ranks, int local_ranks);

// A rank's part of the work, and of what the ranks of a host share. The rest of the configuration
// is the same for all.
struct RankShare {
    int64_t micro_batches = 1;             // of a step
    int64_t evaluation_micro_batches = 0;  // of an evaluation
    BudgetConfig budgets{};
    std::optional<int> threads{};  // as asked for; none: one for each core
};
// Throws usage where ranks or micro-batches cannot be divided.
RankShare share_of(const Config& config, const World& world);
// The same of what a plan of the whole run is asked for. Throws usage as well.
planner::PlanRequest of_rank(planner::PlanRequest request, const World& world);
// Where nothing says how many groups a stage of a pipeline takes. Each micro-batch is then a group,
// as bubbles are shortest so. In round robin all are one group, which goes through a virtual stage
// whole.
planner::PlanRequest in_groups(planner::PlanRequest request, const zero::Stage& stage);
// Where the configuration asks for speculation that ranks do not do.
void warn_of_speculation(const Config& config, const World& world);
// Where second shards or levels of coded gradients are asked for and all ranks are one host: nobody
// has any. For plans, too.
void warn_of_one_host(const Config& config, const World& world);
// The rank whose directory this could be, by its name below a path of the configuration. None: it
// is no rank's.
std::optional<int> rank_of(const std::string& directory);

// Directories of this rank's own below the paths of the configuration, as its share names them;
// removed at the end.
class RankDirectories {
public:
    RankDirectories(const Config& config, const RankShare& share, const World& world);
    ~RankDirectories();
    RankDirectories(const RankDirectories&) = delete;
    RankDirectories& operator=(const RankDirectories&) = delete;

private:
    std::vector<std::string> made_;
};

// The cores and the memory of this rank. `ranks` is null where there is only one. Ranks of a host
// that may run on the same cores share them in equal parts. They go in the order of the nodes that
// their GPUs (`gpu`: PCI address, or empty) hang off. Ranks that were bound to different cores keep
// those. All ranks of a host share its memory and its quota. Warns where ranks were bound to less
// than their part of the host's cores.
Topology machine_of_rank(Topology machine, std::string_view gpu, comm::Communicator* ranks,
                         Executor& executor);

}  // namespace ferry::train
