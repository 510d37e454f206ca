// From the configuration to what the modules below want to be told.
#pragma once

#include <memory>
#include <string>

#include "data/tokens.h"
#include "ferry/aio.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "model/huggingface.h"
#include "model/model.h"
#include "ops/ops.h"
#include "planner/planner.h"
#include "topology/topology.h"

namespace ferry::train {

// The model's shape and context, from the configuration's own keys or its Hugging Face directory.
model::Description model_of(const Config& config);
model::Numerics numerics_of(const Config& config);
// `config` is the run's. The loader gives one rank's share of its micro-batches.
TokenLoader::Options loader_options(const Config& config, const model::Shape& shape,
                                    const zero::Partition& partition = {});
// Where sequences are longer than those that the model was made for, and where the tokens can
// hardly be those of its own tokenizer.
void warn_of_text(const Config& config, const model::Description& made,
                  const TokenFileInfo& tokens);
aio::VolumeOptions volume_options(const Config& config, const planner::Plan& plan,
                                  const Topology& machine, std::span<std::byte> arena,
                                  uint64_t run_id);
// Refuses a plan that takes more memory than the machine or cgroup has left: the kernel would kill
// the run later.
planner::Plan within_memory(planner::Plan plan, const Config& config, const Topology& machine,
                            const Device& device);
// The machine with what is left of its memory by now, beside what the run still needs: for
// what is taken for a while and given back.
Topology as_left_now(Topology machine);
// Also the paths that this plan does not need: the next one may.
void check_paths(const Config& config);
// As many as asked for, or one for each core that is not reserved, less those that a rank of
// several GPUs leaves to its exchanges.
int threads_for(const Config& config, const Topology& machine, int ranks);
// What this process may run on. Throws usage when a reserved core is none of it.
Topology machine_for(const Config& config);
// A line of what this process found to stand on: nodes, limits, and where of several nodes its GPU
// and its storage paths are. Nothing in virtual time.
void log_machine(const Config& config, const Topology& machine, const Device& device,
                 const Executor& executor);
// The threads that compute, on the cores of the machine that are not reserved.
// `config` and `machine` are one rank's.
std::unique_ptr<NodeTeams> make_teams(const Config& config, const Topology& machine,
                                      const Executor& executor, int ranks);
// The store hashes on all of them.
swap::Parallel parallel_on(NodeTeams& teams);

// Everything that fixes a number (docs/numerics.md), as text, and its hash: the run's identity.
// `machine`: what the device adds, see machine_text.
// `config` is of one of the ranks.
std::string numerics_text(const Config& config, const model::Shape& shape,
                          const std::string& machine, int ranks);
uint64_t numerics_hash(const Config& config, const model::Shape& shape, const std::string& machine,
                       int ranks);
std::string machine_text(const Device& device, const Config& config);

std::unique_ptr<ops::Ops> ops_on(Device& device, const Config& config, Team& team);
// Operations that give each block's results that can be kept, of a micro-batch: of attention with
// the keys that a query sees.
model::OfSaved<std::vector<double>> saved_flops(const model::Decoder& decoder);
model::OfSaved<int64_t> saved_bytes(const model::Decoder& decoder);
// What this process will hold on a GPU beside its arena: as measured now, with room for kernels
// that are loaded at their first call. 0 on the CPU device.
int64_t overhead_of(const Device& device);
// What the planner must know of them.
planner::DeviceNeeds needs_of(const Device& device, const model::Decoder& decoder);
// The configuration with the device budget that this device can give.
Config within(const Config& config, const Device& device);

// Of the buffers alone: without resident weights, and without what the process holds beside them.
int64_t device_buffer_bytes(const planner::Plan& plan);

std::string layer_name(const std::vector<model::Layer>& layers, int64_t layer);

}  // namespace ferry::train
