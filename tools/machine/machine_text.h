// This machine, as reports and machine files name it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace ferry::tools {

// {"processor", "cores", "memory_bytes", "kernel", "date"}
nlohmann::json machine_json();
// "AMD EPYC, 2 cores, Linux 6.1, 2026-11-21"
std::string machine_text();

}  // namespace ferry::tools
