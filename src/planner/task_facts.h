// Details of a task for traces, beyond its operation.
#pragma once

#include <vector>

#include "planner/planner.h"
#include "swap/schedule.h"

namespace ferry::planner {

// What an object belongs to: a layer, and its chunk or micro-batch. -1: it is a part of an
// accumulator.
struct Owner {
    int32_t layer = -1, item = -1;
};
std::vector<Owner> owners_of_objects(const Plan& plan);

}  // namespace ferry::planner
