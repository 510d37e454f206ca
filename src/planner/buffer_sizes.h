// How large a buffer of each class is for a given model and chunk size.
#pragma once

#include "planner/planner.h"

namespace ferry::planner {

constexpr size_t at(Class c) { return static_cast<size_t>(c); }

struct Workload {
    const std::vector<model::Layer>& layers;
    const model::Numerics& numerics;
    const DeviceNeeds& needs;
    const zero::Partition& partition;
    int64_t chunk_elements = 0;
    int64_t report_bytes = 0;  // of a step
    StateFormat state{};
};

// Bytes in the host arena of the norm leaves and, behind them, the report.
inline int64_t report_room(int64_t leaves, int64_t report_bytes) {
    return round_up(leaves * 4, 8) + report_bytes;
}
// Bytes of one buffer, a multiple of the page.
int64_t buffer_bytes(Class c, const Workload& work);
const char* name_of(Class c);
const char* row_of(Class c);  // of the plan's table, that counts device buffers of this class

}  // namespace ferry::planner
