// Structures that begin with their size: the caller's may be older or newer than the library's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "status.h"

namespace ferry::capi {

// The size of a structure's first version. A structure that has grown since says so here.
template <class T>
constexpr size_t kFirstSize = sizeof(T);
template <>
inline constexpr size_t kFirstSize<ferry_pool_options> = offsetof(ferry_pool_options, allocator);
template <>
inline constexpr size_t kFirstSize<ferry_store_options> = offsetof(ferry_store_options, allocator);
template <>
inline constexpr size_t kFirstSize<ferry_engine_options> = offsetof(ferry_engine_options, fed);

template <class T>
void check_size(const char* name, const T* given) {
    constexpr size_t kMost = 64 << 10;  // more is no size
    check_given(name, given);
    if (given->size >= kFirstSize<T> && given->size <= kMost) return;
    refuse_argument(std::string(name) + "->size is wrong", std::to_string(given->size) + " bytes",
                    std::to_string(sizeof(T)) + " (FERRY_INIT sets it)");
}

// Copies a structure that the caller passes in. Fields that this library does not know must be 0.
template <class T>
T taken(const char* name, const T* given) {
    check_size(name, given);
    T mine{};
    memcpy(&mine, given, std::min(given->size, sizeof mine));
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (size_t i = sizeof mine; i < given->size; ++i) {
        if (bytes[i] != 0)
            refuse_argument(std::string(name) + " has a field set that this library does not know",
                            "byte " + std::to_string(i), std::to_string(sizeof mine) + " bytes");
    }
    return mine;
}

// Copies a structure to the caller, as much as there is room for. check_size() came first.
template <class T>
void give(T* to, T mine) {
    mine.size = to->size;
    memcpy(to, &mine, std::min(to->size, sizeof mine));
}

// The n-th of an array whose first element states the size of all.
template <class T>
T element(const char* name, const T* first, size_t n) {
    check_size(name, first);
    return taken(
        name, reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) + n * first->size));
}

}  // namespace ferry::capi
