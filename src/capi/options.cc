#include "options.h"

#include <algorithm>
#include <thread>

namespace ferry::capi {

std::vector<aio::PathOptions> paths_of(const ferry_path* paths, size_t count) {
    check_range("path_count", static_cast<int64_t>(std::min<size_t>(count, 1 << 20)), 0, 1024);
    std::vector<aio::PathOptions> found;
    for (size_t i = 0; i < count; ++i) {
        const ferry_path path = element("paths", paths, i);
        check_given("paths->path", path.path);
        check_choice("paths->raw_device", path.raw_device, 1);
        found.push_back({.path = path.path,
                         .size_bytes = path.size_bytes,
                         .raw_device = path.raw_device == 1,
                         .endurance_tbw = path.endurance_tbw,
                         .bytes_per_s = path.bytes_per_s});
    }
    return found;
}

aio::BackendKind backend_of(int32_t backend) {
    check_choice("backend", backend, FERRY_BACKEND_POSIX);
    return static_cast<aio::BackendKind>(backend);
}

DeviceKind device_kind_of(const char* name, int32_t kind) {
    check_choice(name, kind, FERRY_DEVICE_CUDA);
    return static_cast<DeviceKind>(kind);
}

DType type_of(const char* name, int32_t type) {
    check_choice(name, type, FERRY_F16);
    return static_cast<DType>(type);
}

pinned_mem::Allocator allocator_of(const ferry_allocator* given) {
    if (!given) return {};
    const ferry_allocator mine = taken("allocator", given);
    if (!mine.allocate) refuse_argument("allocator->allocate is NULL", "NULL", "a function");
    pinned_mem::Allocator made;
    made.allocate = [mine](int64_t bytes, int64_t alignment) {
        return mine.allocate(mine.context, bytes, alignment);
    };
    if (mine.release)
        made.release = [mine](void* memory, int64_t bytes) {
            mine.release(mine.context, memory, bytes);
        };
    return made;
}

int threads_of(int32_t threads) {
    check_range("threads", threads, 0, 4096);
    return threads > 0 ? threads
                       : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace ferry::capi
