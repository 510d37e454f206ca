#include "resumed_formats.h"

#include <string>

#include "aio/published_run.h"
#include "ferry/error.h"
#include "train/setup/numerics_record.h"

namespace ferry::train {

namespace {

std::string text_of(const OptimizerConfig& o) {
    return "optimizer.moments = " + std::string(name_of(o.moments)) +
           ", optimizer.master = " + (o.master == MasterFormat::split ? "split" : "fp32");
}

}  // namespace

void require_recorded_formats(const Config& config, std::span<const NvmePath> paths,
                              const model::Shape& shape, const std::string& machine, int ranks) {
    if (paths.empty()) return;
    const NvmePath& path = paths.front();
    const uint64_t run = aio::published_run({.path = path.path});
    if (run == 0 || numerics_hash(config, shape, machine, ranks) == run) return;
    Config other = config;
    for (const MomentType moments : {MomentType::f32, MomentType::bf16, MomentType::int8}) {
        for (const MasterFormat master : {MasterFormat::fp32, MasterFormat::split}) {
            other.optimizer.moments = moments;
            other.optimizer.master = master;
            if (numerics_hash(other, shape, machine, ranks) != run) continue;
            throw Error(Trouble::usage,
                        {.what = "the run cannot be resumed: its state is kept in other formats",
                         .where = path.path,
                         .measured = text_of(config.optimizer),
                         .limit = "the run has " + text_of(other.optimizer),
                         .remedy = "resume with the formats it was started with"});
        }
    }
}

}  // namespace ferry::train
