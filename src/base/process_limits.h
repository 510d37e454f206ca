// The limits that the system sets this process, each with its value, as errors name them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ferry/error.h"

namespace ferry {

// "1.00 GiB of address space for the process (ulimit -v)"; empty: no limit.
std::string address_space_limit();
// "256 open files of the process (ulimit -n)", where it has no descriptor left; else empty.
std::string reached_file_limit();
// The limit behind an errno, with its value, where the process has one that gives it: of open
// files, of a file's size, of address space, of threads. Empty: it is something else.
std::string limit_behind(int error);
// Whose fault it is that a file cannot be opened or read: the disk's, that of such a limit, or the
// user's, who named it.
Trouble trouble_of_reading(int error);
// The limits of threads: the user's (ulimit -u) and the least of the process's control groups
// (pids.max). The files are below `root`, which a test may make up.
std::string thread_limits(const std::string& root = "");
// The one error of a thread that could not be started.
[[noreturn]] void refuse_thread(std::string_view where, std::string_view reason);
// Throws it where so many threads cannot be started at the same time: for who hands them to a
// library that does not say so.
void require_threads(int count, std::string_view where);

// The stack of the deepest caller: a tile of a product keeps its widened operands there.
constexpr int64_t kStackBytes = int64_t{3072} * 1024;
// Throws does_not_fit where the calling thread has less stack than kStackBytes.
void require_stack();

}  // namespace ferry
