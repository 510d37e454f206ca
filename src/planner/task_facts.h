// What a task says of itself beyond what it does: for traces and for counting.
#pragma once

#include <vector>

#include "planner/planner.h"
#include "swap/schedule.h"

namespace ferry::planner {

// Whose an object is: a layer, and its chunk or micro-batch (-1: an accumulator's piece).
struct Owner {
    int32_t layer = -1, item = -1;
};
std::vector<Owner> owners_of_objects(const Plan& plan);

// What a kernel reads and writes of its operands: scratch, report, and what ranks agree on apart.
// Of a table the rows that occur, taken to be as large as the block input they make.
int64_t touched_bytes(const Plan& plan, const swap::Task& task);

}  // namespace ferry::planner
