// What a path's file system does with a transfer, found out by a few small ones and not guessed
// from its name. The files' contents at the probed places are lost.
#pragma once

#include <cstdint>
#include <string>

namespace ferry::aio {

// True when reads of what was just written never put the reader to sleep: the bytes are in memory
// and a processor copies them, as on tmpfs or out of the page cache. Counted, not timed, so that a
// busy machine gives the same answer. Writes `bytes` at `offset`.
bool reads_only_copy(int file, int64_t offset, int64_t bytes);

// True when small writes begun during another thread's large write to the same file wait for its
// end, and those to another file do not: then several files serve several writers. Both hold
// `bytes` bytes.
bool writers_take_turns(int one, int other, int64_t bytes);

// Why a write and a read through a polled ring do not work; empty when both do. A polled write may
// succeed where a polled read is refused. `flags`: IORING_SETUP_SQPOLL, IORING_SETUP_IOPOLL.
std::string why_no_polling(int file, int64_t offset, unsigned flags);

}  // namespace ferry::aio
