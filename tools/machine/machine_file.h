// The machine file: measurements of this machine, as JSON, for `ferry plan` and `ferry train`.
// docs/machine.md has its keys.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cost/drives.h"
#include "cost/measurements.h"
#include "measurements_of.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

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
