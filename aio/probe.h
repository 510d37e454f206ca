// What a path's file system does with a transfer, found out by a few small ones and not guessed
// from its name. The files' contents at the probed places are lost.
#pragma once

#include <cstdint>
#include <string>

#include "ferry/base.h"

namespace ferry::aio {

// Transfers smaller than this are copied sooner than handed over.
constexpr int64_t kWorthAWorker = 256 * kKiB;
// Whether large transfers are markedly faster when each is given to a worker of the kernel's
// (IOSQE_ASYNC), as on tmpfs, where one thread would otherwise copy every byte. Writes and reads
// `bytes` at `offset`. Neither without io_uring.
struct Workers {
    bool reads = false, writes = false;
};
Workers workers_pay(int file, int64_t offset, int64_t bytes);

// True when small writes begun during another thread's large write to the same file wait for its
// end, and those to another file do not: then several files serve several writers. Both hold
// `bytes` bytes.
bool writers_take_turns(int one, int other, int64_t bytes);

// Why a write and a read through a polled ring do not work; empty when both do. A polled write may
// succeed where a polled read is refused. `flags`: IORING_SETUP_SQPOLL, IORING_SETUP_IOPOLL.
std::string why_no_polling(int file, int64_t offset, unsigned flags);

}  // namespace ferry::aio
