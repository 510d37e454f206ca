// How many of a GPU's queues a process has. Calls nothing of CUDA, and is built and tested without
// it too.
#pragma once

#include <string>

namespace ferry {

// The variable by which the driver makes them, and as many as ferry's streams want.
inline constexpr const char* kQueuesVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
inline constexpr int kQueues = 32;

// What to warn of where a launcher has set the variable to `given`; null: it has not. Empty where
// these are enough.
std::string warning_of_queues(const char* given);

}  // namespace ferry
