#include "resumed_kernels.h"

#include <cstdlib>
#include <optional>
#include <string>

#include "aio/published_run.h"
#include "base/log.h"
#include "ferry/error.h"
#include "ops/blas_kernels.h"
#include "train/setup/numerics_record.h"

namespace ferry::train {

namespace {

[[noreturn]] void refuse_others(const std::string& path, const std::string& core,
                                const ops::BlasCore& recorded) {
    const std::string chosen_by = ops::blas_chosen_by();
    const char* const preloaded = std::getenv("LD_PRELOAD");
    const std::string preload = preloaded == nullptr || *preloaded == '\0'
                                    ? ""
                                    : " (LD_PRELOAD is " + std::string(preloaded) + ")";
    const std::string name_it = "with OPENBLAS_CORETYPE=" + recorded.name;
    throw Error(
        Trouble::usage,
        {.what = "the run cannot be resumed: it was started with OpenBLAS's " + recorded.name +
                 " kernels, which this " +
                 (recorded.runs ? "process cannot take" : "processor has no instructions for"),
         .where = path,
         .measured = core + " kernels" + (chosen_by.empty() ? "" : ": " + chosen_by) + preload,
         .limit = recorded.name + " kernels: others round differently",
         .remedy = recorded.runs
                       ? "start it where nothing loads OpenBLAS before ferry does, or " + name_it
                       : "go on on a processor like the one that it was started on; if it was "
                         "this one, " +
                             name_it});
}

// None: those that are taken already, or none whose record this is.
std::optional<ops::BlasCore> kernels_of(uint64_t numerics, const Config& config,
                                        const model::Shape& shape, const Device& device,
                                        int ranks) {
    if (device.kind() != DeviceKind::cpu) return {};
    const auto is_of = [&](const std::string& core) {
        return numerics_hash(config, shape, machine_text_with(device, core), ranks) == numerics;
    };
    if (is_of(ops::blas_core())) return {};
    for (const ops::BlasCore& other : ops::blas_cores())
        if (is_of(other.name)) return other;
    return {};
}

void log_taken(const std::string& core, const std::string& taken) {
    log_info("the run was started with OpenBLAS's " + taken +
             " kernels and goes on with them, not with " + core + ", for the same bits");
}

}  // namespace

void take_recorded_kernels(const Config& config, std::span<const NvmePath> paths,
                           const model::Shape& shape, const Device& device, int ranks) {
    if (device.kind() != DeviceKind::cpu || paths.empty()) return;
    const NvmePath& path = paths.front();
    const uint64_t run = aio::published_run({.path = path.path});
    if (run == 0) return;
    const std::string core = ops::blas_core();
    const auto other = kernels_of(run, config, shape, device, ranks);
    if (!other) return;
    if (!ops::take_blas_core(other->name)) refuse_others(path.path, core, *other);
    log_taken(core, other->name);
}

void take_kernels_of(uint64_t numerics, const Config& config, const model::Shape& shape,
                     const Device& device, int ranks) {
    const std::string core = ops::blas_core();
    const auto other = kernels_of(numerics, config, shape, device, ranks);
    if (other && other->runs && ops::take_blas_core(other->name)) log_taken(core, other->name);
}

}  // namespace ferry::train
