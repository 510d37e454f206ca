// What a storage path was found to give, and by which settings.
#pragma once

#include <cstdint>
#include <string>

namespace ferry::tools {

// Time from the first submission to the last completion, and CPU time of the whole process.
struct Sample {
    double seconds = 0, cpu_seconds = 0;
    int64_t bytes_read = 0, bytes_written = 0, operations = 0;

    double bytes() const { return static_cast<double>(bytes_read + bytes_written); }
    double gb_per_s() const { return bytes() / seconds * 1e-9; }
    double cpu_s_per_gb() const { return cpu_seconds / bytes() * 1e9; }
    double cpu_us_per_operation() const {
        return cpu_seconds / static_cast<double>(operations) * 1e6;
    }
};

// The settings that a path does best with, and the rates that it then sustains.
struct IoSettings {
    std::string path{}, file_system{}, backend{};
    int64_t block_bytes = 0;
    int queue_depth = 0, rings = 1;
    bool direct = true;  // obtained
    Sample read{}, write{}, mixed{};
};

}  // namespace ferry::tools
