// The machine file: measurements of this machine, as JSON, for `ferry plan` and `ferry train`.
// docs/machine.md has its keys.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cost/drives.h"
#include "cost/measurements.h"
#include "io_settings.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

constexpr int kMachineFormat = 1;

// ---------------------------------------------------------------- writing

// Before a measurement: throws usage where the file could not be written afterwards, or is there
// and is no machine file of a format that is understood.
void check_machine_file(const std::string& file);

// The measured settings of these paths, as the file has them.
nlohmann::json settings_json(const std::vector<IoSettings>& paths);

// Replaces the measurements of these paths, keeps everything else that the file holds, unknown keys
// too. The old file stays until the new one is whole. Throws io.
void save_paths(const std::string& file, const std::vector<IoSettings>& paths);

// The kernels, ranks and device that measurements are of.
struct MeasurementsOf {
    cost::KernelsOf kernels{};  // with device and threads
    train::RankCount count{};
    // Ranks that compute on the host's processors meanwhile, each with as many threads.
    int at_once = 1;
    ParallelConfig groups{};   // of these ranks
    int ranks_per_host = 1;    // zero.ranks_per_host; 1: hosts are none of their business
    std::string by{};          // comm::Communicator::kind() of several ranks
    int64_t device_bytes = 0;  // device memory that a process can have
    planner::DeviceNeeds needs{};
};
// The same for everything but storage and ranks. No kernels: those of the file stay.
void save_measurements(const std::string& file, const MeasurementsOf& what,
                       const cost::Measurements& measured);

// The rates of exchanges between the ranks, and within their groups as far as they are known.
void save_comm(const std::string& file, const MeasurementsOf& what,
               const cost::Measurements& measured);
// "2 ranks, 2 on a host, by nccl"; "4 ranks, 4 on a host, tensors over 2, by nccl".
std::string text_of_ranks(const MeasurementsOf& what);

// ---------------------------------------------------------------- reading

class MachineFile {
public:
    // Throws usage, naming the key, for a file that is not there, is no machine file or is of a
    // newer format, and for an entry whose number is missing or not positive.
    static MachineFile read(const std::string& file);

    const std::string& name() const noexcept { return name_; }
    // Nothing where the file has none for that. `at_once` is 0 where an older file does not say it.
    std::optional<cost::Path> path(const std::string& path) const;
    // All else, 0 where the file has nothing for that.
    cost::Measurements measurements(const MeasurementsOf& what) const;
    // The GPU that was measured with this model, else the first one; nothing where there is none.
    std::optional<train::AbsentDevice> gpu(const cost::KernelsOf& model) const;

private:
    std::string name_{};
    nlohmann::json content_{};
};

}  // namespace ferry::tools
