// Parts of options that several calls have.
#pragma once

#include <vector>

#include "ferry/aio.h"
#include "ferry/device_kind.h"
#include "ferry/dtype.h"
#include "ferry/pinned_mem.h"
#include "structs.h"

namespace ferry::capi {

std::vector<aio::PathOptions> paths_of(const ferry_path* paths, size_t count);
aio::BackendKind backend_of(int32_t backend);
DeviceKind device_kind_of(const char* name, int32_t kind);
DType type_of(const char* name, int32_t type);
// The program's own memory; the system's for NULL.
pinned_mem::Allocator allocator_of(const ferry_allocator* given);
// A thread a core for 0.
int threads_of(int32_t threads);

}  // namespace ferry::capi
