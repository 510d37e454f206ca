// The machine file: measured figures of this machine, as JSON, for `ferry plan` and `ferry train`.
// docs/machine.md has its keys.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/bench/bench_io.h"
#include "train/forecast.h"

namespace ferry::tools {

constexpr int kMachineFormat = 1;

// ---------------------------------------------------------------- writing

// Before a measurement: throws usage where the file could not be written afterwards, or is there
// and is no machine file of a format that is understood.
void check_machine_file(const std::string& file);

// What the file says of each path.
nlohmann::json settings_json(const std::vector<IoSettings>& paths);

// Replaces the figures of these paths, keeps everything else that the file holds, unknown keys too.
// The old file stays until the new one is whole. Throws io.
void save_paths(const std::string& file, const std::vector<IoSettings>& paths);

// What was measured for, and with.
struct FiguresOf {
    std::string device{};   // its architecture: "cpu", "cuda sm_90"
    std::string kernels{};  // train::Forecaster::kernels_text
    std::string ranks{};    // how many share what, as ranks_text() says it; empty: one alone
    int threads = 1;
    int64_t device_bytes = 0;  // of the device, for a process
    planner::DeviceNeeds needs{};
};
// The same for everything but storage. No kernels: those of the file stay.
void save_figures(const std::string& file, const FiguresOf& what, const train::Figures& figures);

// What ranks give each other.
struct CommFigures {
    double bytes_per_s = 0;  // that reach a rank from the others
    double overhead_s = 0;   // of an operation, however small
};
// "2 ranks, 2 on a host, by nccl". `by`: comm::Communicator::kind().
std::string ranks_text(const train::RankCount& count, std::string_view by);
void save_comm(const std::string& file, const std::string& ranks, const CommFigures& figures);

// ---------------------------------------------------------------- reading

// What the file knows of a path, as far as planning goes.
struct PathFigures {
    double mixed_bytes_per_s = 0;
    bool in_memory = false;     // tmpfs
    double cores_per_byte = 0;  // seconds of one, of reads and writes mixed
};

class MachineFile {
public:
    // Throws usage, naming the key, for a file that is not there, is no machine file or is of a
    // newer format, and for an entry whose figure is missing or no positive number.
    static MachineFile read(const std::string& file);

    const std::string& name() const noexcept { return name_; }
    // Nothing where the file has none for that.
    std::optional<PathFigures> path(const std::string& path) const;
    // Links but storage; with as many threads.
    std::optional<train::Machine> machine(const FiguresOf& what) const;
    std::optional<CommFigures> comm(const FiguresOf& what) const;
    std::optional<train::KernelTimes> kernels(const FiguresOf& what) const;
    // The GPU that was measured with this model, else the first one; nothing where there is none.
    // `model_text` as the forecaster's.
    std::optional<train::AbsentDevice> gpu(const std::string& model_text) const;

private:
    std::string name_{};
    nlohmann::json content_{};
};

}  // namespace ferry::tools
