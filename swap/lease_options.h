// Checks a leased store's options and fills them in.
#pragma once

#include <string>

#include "ferry/lease.h"

namespace ferry::swap {

inline bool on_nvme(const LeasedObject& object) { return object.home == Home::nvme; }
inline std::string object_name(ObjectId id) { return "object " + std::to_string(id); }

// Fills in what was left to the store, and throws usage or does_not_fit where it could not keep
// what it promises.
void complete(LeasedStoreOptions& options, aio::Volume* volume);

}  // namespace ferry::swap
