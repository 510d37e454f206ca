// Parts of options that several calls have.
#pragma once

#include <vector>

#include "ferry/aio.h"
#include "ferry/device_kind.h"
#include "ferry/dtype.h"
#include "structs.h"

namespace ferry::capi {

std::vector<aio::PathOptions> paths_of(const ferry_path* paths, size_t count);
aio::BackendKind backend_of(int32_t backend);
DeviceKind device_kind_of(const char* name, int32_t kind);
DType type_of(const char* name, int32_t type);
// A thread a core for 0.
int threads_of(int32_t threads);

}  // namespace ferry::capi
