// How a path's file system treats a transfer: found out by a few small ones, not guessed from its
// name. The files' contents at the probed places are lost.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace ferry::aio {

// How to transfer, and how much was written by it.
struct Probe {
    int64_t alignment = 4096;
    int64_t bytes_written = 0;
};

// True when reads of what was just written ask no device for anything and never put the reader to
// sleep. The bytes are then in memory and a processor copies them, as on tmpfs or out of the page
// cache. Both are counted, not timed. Sleeps alone are not enough: on a busy machine a device may
// be done before the reader, pushed aside, would have slept. They tell where the kernel knows of no
// device, as on a network's file system. Writes `bytes` at `offset`.
bool reads_only_copy(Probe& probe, int file, int64_t offset, int64_t bytes);

// True when small writes begun during another thread's large write to the same file wait for its
// end, and those to another file do not. Several files then serve several writers. Both hold
// `bytes` bytes, each of which is written at most kLargeWritesMax times.
constexpr int kLargeWritesMax = 24;
bool writers_take_turns(Probe& probe, int one, int other, int64_t bytes);

// Why a write and a read through a polled ring do not work; empty when both do. A polled write may
// succeed where a polled read is refused. `flags`: IORING_SETUP_SQPOLL, IORING_SETUP_IOPOLL.
std::string why_no_polling(Probe& probe, int file, int64_t offset, unsigned flags);

// Findings about a file system or device. They are kept as long as the process lives, so that the
// next volume there need not write again.
struct Findings {
    std::mutex measuring{};  // held by who reads or finds the rest: one volume measures for all
    std::optional<bool> only_copies{}, writers_take_turns{};
    std::optional<double> bytes_per_s{};
};
// That of an open file's, or nothing yet; used with or without O_DIRECT.
Findings& findings_of(int file, bool direct);
void forget_findings();  // another process's start, for tests

}  // namespace ferry::aio
