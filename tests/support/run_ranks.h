// The ranks of a whole run: threads of this process, or, where mpirun has started the test program
// as several, those, of which this process is one:
//   FERRY_TEST_DEVICE=cuda mpirun --bind-to none -n 2 test_train --gtest_filter='numbers/*:kinds/*'
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "ferry/device_kind.h"

namespace ferry::comm {

// How many mpirun has started; 0: this process is alone.
int ranks_launched();
// The device that they compute on; alone: the CPU.
DeviceKind device_of_ranks();
// The text of the first of them: a directory that all can use.
std::string as_first_rank_says(const std::string& mine);
// Comes back when all have come.
void await_all_ranks();

// `body` on each rank, with a communicator of its own; where `size` were launched, on this one.
// The ranks that ran here.
using RunBody = std::function<void(std::unique_ptr<Communicator>, Executor&)>;
std::vector<int> on_run_ranks(int size, const RunBody& body);

}  // namespace ferry::comm
