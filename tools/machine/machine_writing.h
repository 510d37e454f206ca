// Writes the machine file: measurements of this machine, as `ferry bench --save` makes them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "io_settings.h"
#include "measurements_of.h"

namespace ferry::tools {

// Before a measurement: throws usage where the file could not be written afterwards, or is there
// and is no machine file of a format that is understood.
void check_machine_file(const std::string& file);

// The measured settings of these paths, as the file has them.
nlohmann::json settings_json(const std::vector<IoSettings>& paths);

// Replaces the measurements of these paths, keeps everything else that the file holds, unknown keys
// too. The old file stays until the new one is whole. Throws io.
void save_paths(const std::string& file, const std::vector<IoSettings>& paths);

// The same for everything but storage and ranks. No kernels: those of the file stay.
void save_measurements(const std::string& file, const MeasurementsOf& what,
                       const cost::Measurements& measured);

// The rates of exchanges between the ranks, and within their groups as far as they are known.
void save_comm(const std::string& file, const MeasurementsOf& what,
               const cost::Measurements& measured);

}  // namespace ferry::tools
