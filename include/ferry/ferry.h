// ferry for programs in C, and in any language that can call C: libferry.so. docs/embedding.md
// leads through it, examples/embed.c is a program.
//
// Handles are tickets, not addresses: what is closed, of another kind or never was one is an error
// (FERRY_BAD_HANDLE). A handle that was not closed when the process ends leaves its files behind;
// the next program that opens the path removes them. After fork() the child has no handles.
//
// Threads: any thread may call. Calls on one handle wait for each other, but those on a team run at
// the same time. A call that waits for storage keeps its handle that long.
//
// Structures begin with their size, by which a library and a program of different versions
// understand each other: FERRY_INIT(x) sets it and clears the rest. A 0 or NULL is the default.
// A structure that a call fills in has its size set as well.
//
// Errors: a status, and a text for ferry_last_error(). A failed call leaves what it was to fill in
// as it was. No exception leaves the library, and it writes to no stream unless asked to
// (ferry_log_to_stderr). Text is UTF-8; what is passed in is copied, and what is passed out is the
// library's, valid as long as its function says.
//
// Callbacks: called within a call of the program's, or on a thread of ferry's own where that is
// said. They must not throw. A call with the handle whose call they are within is refused with
// FERRY_BUSY, on whichever thread they run, and so is every call from within the log's. The handle
// stays usable. Two threads that call with each other's handle from callbacks, or a callback that
// waits for a thread which calls with its handle, wait for ever: ferry cannot see that.
//
// Bugs in ferry. Found on the calling thread, the call returns FERRY_INTERNAL and its handle is
// poisoned. All later calls return FERRY_POISONED; its close alone works, and leaves memory and
// files as they are. Found on a thread of ferry's own, or where it cleans up after itself, the
// process ends by abort(), with the text on the log first. The other end of a process is a library
// between ranks that never returns: ferry_on_stuck().
// NOLINTBEGIN: it is C.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define FERRY_API __attribute__((visibility("default")))
#else
#define FERRY_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FERRY_INIT(object) \
    (memset(&(object), 0, sizeof(object)), (void)((object).size = sizeof(object)))

// ---------------------------------------------------------------- status and version

typedef int32_t ferry_status;
enum {
    FERRY_OK = 0,
    FERRY_INTERNAL = 1,      // a bug in ferry; the handle is poisoned
    FERRY_USAGE = 2,         // an argument, a configuration or the order of calls
    FERRY_DOES_NOT_FIT = 3,  // a budget is too small for what was asked
    FERRY_IO = 4,            // storage failed, or bytes came back wrong
    FERRY_DIVERGED = 5,      // NaN or Inf in loss or gradient
    FERRY_RANK_LOST = 6,     // another rank ended, or did not take part in time
    FERRY_BAD_HANDLE = 7,    // NULL, closed, of another kind, or of the process before fork()
    FERRY_POISONED = 8,      // a bug was found in an earlier call on this handle
    FERRY_NO_MEMORY = 9,     // the library found no memory; nothing happened
    FERRY_AGAIN = 10,        // not now: nothing has finished, or no room; no error text
    FERRY_CANCELLED = 11,    // of a transfer: it was cancelled before it began
    FERRY_BUSY = 12          // a callback's call that would wait for the callback. Version 5
};

// "0.1.0". Never fails; the text is constant.
FERRY_API const char* ferry_version(void);
// Grows by one whenever a function, a field or a status is added. What there is stays: 6.
FERRY_API int32_t ferry_abi_version(void);
// "usage", "io", ...; "unknown" for what is no status. The text is constant.
FERRY_API const char* ferry_status_name(ferry_status status);
// Why the last call that failed on this thread did: what, where, the measured value, the limit and
// what to do, one a line. Valid until the next call that fails on this thread; never NULL.
FERRY_API const char* ferry_last_error(void);

// ---------------------------------------------------------------- log

enum { FERRY_LOG_DEBUG = 0, FERRY_LOG_INFO = 1, FERRY_LOG_WARN = 2, FERRY_LOG_BUG = 3 };
// `text` is one message without a newline at its end, valid during the call. Called on any thread,
// also one of ferry's own, one call at a time. It must not throw or wait. Calls of ferry that
// return a status are FERRY_BUSY there, and lines of the log that it causes are lost.
typedef void (*ferry_log_callback)(void* context, int32_t level, const char* text);
// From now on lines of this level and above go to `callback`; NULL: nowhere, as at the start. No
// call of the one before is under way any more when this returns. USAGE: no such level.
FERRY_API ferry_status ferry_log_to(ferry_log_callback callback, void* context, int32_t level);
// The same, to standard error.
FERRY_API ferry_status ferry_log_to_stderr(int32_t level);

// ---------------------------------------------------------------- memory and progress

// Host memory of the program's own, in place of the system's: pinned memory, a store's and an
// engine's. Version 4.
typedef struct ferry_allocator {
    size_t size;
    void* context;
    // `bytes` at a multiple of `alignment` (2 MiB), writable, of whatever contents, not
    // page-locked: ferry clears and locks them. NULL: there is no memory (DOES_NOT_FIT). Within a
    // call that says that it takes memory.
    void* (*allocate)(void* context, int64_t bytes, int64_t alignment);
    // Each of them once, at the latest within the call that ends the handle; also after a call that
    // failed. NULL: the program takes it back by itself. After FERRY_INTERNAL the memory is ferry's
    // until the process ends.
    void (*release)(void* context, void* memory, int64_t bytes);
} ferry_allocator;

// How a long call gets on: so many bytes of so many of a stage, whose name is valid during the
// call. At most ten times a second and at the end of each stage, one call at a time, on any thread.
// Version 4.
typedef void (*ferry_progress_callback)(void* context, const char* stage, int64_t bytes,
                                        int64_t of);

// ---------------------------------------------------------------- aio: slots of files

typedef struct ferry_aio ferry_aio;

// An element of an array whose elements all have the size that the first one states.
typedef struct ferry_path {
    size_t size;
    const char* path;      // a directory; with raw_device a block device
    int64_t size_bytes;    // at most this much of it; 0: what is needed
    double bytes_per_s;    // sustained; 0: measured, where there are several paths
    double endurance_tbw;  // terabytes that the drive is rated for; 0: unknown
    int32_t raw_device;    // 1: what the device holds may be destroyed
} ferry_path;

typedef struct ferry_slot_class {
    size_t size;
    const char* name;    // for messages; NULL: "slots"
    int64_t slot_bytes;  // rounded up to the alignment
    int64_t slots;       // over all paths
} ferry_slot_class;

enum { FERRY_BACKEND_AUTO = 0, FERRY_BACKEND_URING = 1, FERRY_BACKEND_POSIX = 2 };

typedef struct ferry_aio_options {
    size_t size;
    const ferry_path* paths;
    size_t path_count;
    const ferry_slot_class* classes;
    size_t class_count;
    int64_t block_bytes;     // a transfer at most; 0: 1 MiB
    int32_t backend;         // FERRY_BACKEND_*
    int32_t queue_depth;     // transfers in flight, a ring; 0: 32
    int32_t operations_max;  // submitted and not yet polled; 0: 256
    int32_t rings;           // a path; 0: 1
    int32_t buffered;        // 1: through the page cache, no O_DIRECT
    int32_t no_layout;       // 1: slots are not filled at open, the first writes cost more
} ferry_aio_options;

// Opens, and lays the slots out: it writes all of them once, unless no_layout. Waits for that.
// Files of an ended process at these paths are removed. USAGE, DOES_NOT_FIT, IO.
FERRY_API ferry_status ferry_aio_open(const ferry_aio_options* options, ferry_aio** aio);
// Cancels what has not begun, waits for the rest, removes the files. Buffers of transfers are
// ferry's until it returns.
FERRY_API ferry_status ferry_aio_close(ferry_aio* aio);
// Buffers, offsets and byte counts are multiples of it: at least 4096.
FERRY_API ferry_status ferry_aio_alignment(ferry_aio* aio, int64_t* bytes);
FERRY_API ferry_status ferry_aio_slot_bytes(ferry_aio* aio, int32_t slot_class, int64_t* bytes);
// A free slot of a class, by its index in options.classes; its contents are undefined. AGAIN: none
// is free.
FERRY_API ferry_status ferry_aio_allocate(ferry_aio* aio, int32_t slot_class, uint32_t* slot);
// USAGE: it is not allocated, or a transfer of it has not been polled.
FERRY_API ferry_status ferry_aio_free(ferry_aio* aio, uint32_t slot);

enum { FERRY_NORMAL = 0, FERRY_URGENT = 1, FERRY_BACKGROUND = 2 };
// Submits a transfer of bytes [offset, offset + bytes) of a slot, and returns without waiting. The
// buffer is ferry's until the transfer was polled. Transfers that touch the same bytes, one of them
// writing, run in the order of submission; nothing else is ordered. `tag` comes back with it.
// AGAIN: operations_max are under way, poll first.
FERRY_API ferry_status ferry_aio_read(ferry_aio* aio, uint32_t slot, int64_t offset, void* buffer,
                                      int64_t bytes, int32_t priority, uint64_t tag);
FERRY_API ferry_status ferry_aio_write(ferry_aio* aio, uint32_t slot, int64_t offset,
                                       const void* buffer, int64_t bytes, int32_t priority,
                                       uint64_t tag);

typedef struct ferry_completion {
    size_t size;
    uint64_t tag;
    int64_t bytes;   // moved: all of them with FERRY_OK
    double seconds;  // from submission to the last byte
    uint32_t slot;
    ferry_status status;  // FERRY_OK, FERRY_IO (ferry_last_error() says why) or FERRY_CANCELLED
    int32_t error;        // errno, with FERRY_IO
    int32_t reserved;
} ferry_completion;

// The next transfer that has ended, whichever way. AGAIN: none has.
FERRY_API ferry_status ferry_aio_poll(ferry_aio* aio, ferry_completion* completion);
// The same, waiting for one that long; below 0: without end. AGAIN: the time is over, or nothing is
// under way.
FERRY_API ferry_status ferry_aio_wait(ferry_aio* aio, int64_t timeout_ms,
                                      ferry_completion* completion);
// For poll(2), select or epoll, beside descriptors of the program's: readable when transfers may
// have ended, until a poll has found none (AGAIN). It ends with the handle, which reads it: poll
// and wait for it, and dup it at most. IO: there is none to be had. Version 5.
FERRY_API ferry_status ferry_aio_descriptor(ferry_aio* aio, int32_t* descriptor);
// Transfers that have not begun end as FERRY_CANCELLED. All of them are still to be polled.
FERRY_API ferry_status ferry_aio_cancel(ferry_aio* aio);
FERRY_API ferry_status ferry_aio_in_flight(ferry_aio* aio, int32_t* transfers);
// Waits until all that was written and polled is on stable storage. IO, for that file for good.
FERRY_API ferry_status ferry_aio_flush(ferry_aio* aio);

typedef struct ferry_path_stats {
    size_t size;
    int64_t bytes_read, bytes_written;  // by transfers of the caller
    int64_t bytes_overhead;             // written besides: layout, headers, what was repeated
    int64_t reads, writes, retries, errors;
    double read_bytes_per_s, write_bytes_per_s;  // sustained estimate
    double endurance_used;                       // fraction of endurance_tbw; 0: unknown
} ferry_path_stats;
// `path`: the n-th of options.paths.
FERRY_API ferry_status ferry_aio_stats(ferry_aio* aio, size_t path, ferry_path_stats* stats);

// ---------------------------------------------------------------- files of the caller's

// Any regular file or block device, at any offset, from any memory. What lies at multiples of 4096,
// in memory and in the file, goes around the page cache; the rest through it. Version 2.
typedef struct ferry_files ferry_files;

typedef struct ferry_files_options {
    size_t size;
    int64_t block_bytes;     // a transfer at most; 0: 1 MiB
    int32_t backend;         // FERRY_BACKEND_*
    int32_t queue_depth;     // transfers in flight; 0: 32
    int32_t operations_max;  // submitted and not yet polled; 0: 256
    int32_t files_max;       // open at a time; 0: 1024
    int32_t buffered;        // 1: all through the page cache
    int32_t reserved;
} ferry_files_options;

// Opens no file yet. USAGE, IO.
FERRY_API ferry_status ferry_files_create(const ferry_files_options* options, ferry_files** files);
// Cancels what has not begun, waits for the rest, closes the files, which stay. Buffers of
// transfers are ferry's until it returns.
FERRY_API ferry_status ferry_files_destroy(ferry_files* files);

enum { FERRY_FILE_READ = 0, FERRY_FILE_WRITE = 1 };
// FERRY_FILE_WRITE may read too: it creates the file where there is none (mode 0600), and cuts
// nothing off. IO; USAGE: it is neither file nor device, or files_max are open.
FERRY_API ferry_status ferry_files_open(ferry_files* files, const char* path, int32_t use,
                                        uint32_t* file);
// A file that the caller has open. It is duplicated: the caller's stays the caller's to close.
FERRY_API ferry_status ferry_files_open_descriptor(ferry_files* files, int32_t descriptor,
                                                   uint32_t* file);
// USAGE: it is not open, or a transfer of it has not been polled.
FERRY_API ferry_status ferry_files_close(ferry_files* files, uint32_t file);
FERRY_API ferry_status ferry_files_size(ferry_files* files, uint32_t file, int64_t* bytes);
// Submits a transfer of bytes [offset, offset + bytes) of a file, and returns without waiting. The
// buffer is ferry's until the transfer was polled. Of two transfers that touch the same bytes of a
// file, one of them writing, the first submitted runs first. Nothing else is ordered, nor are two
// numbers of one file. AGAIN: operations_max are under way. IO: the file is shorter than what is
// read. USAGE: it was opened for reading and is written.
FERRY_API ferry_status ferry_files_read(ferry_files* files, uint32_t file, int64_t offset,
                                        void* buffer, int64_t bytes, int32_t priority,
                                        uint64_t tag);
FERRY_API ferry_status ferry_files_write(ferry_files* files, uint32_t file, int64_t offset,
                                         const void* buffer, int64_t bytes, int32_t priority,
                                         uint64_t tag);
// As ferry_aio_wait; `slot` is the file. 0: as ferry_aio_poll.
FERRY_API ferry_status ferry_files_wait(ferry_files* files, int64_t timeout_ms,
                                        ferry_completion* completion);
// As ferry_aio_descriptor. Version 5.
FERRY_API ferry_status ferry_files_descriptor(ferry_files* files, int32_t* descriptor);
// Transfers that have not begun end as FERRY_CANCELLED. All are still to be polled.
FERRY_API ferry_status ferry_files_cancel(ferry_files* files);
// Waits until all that was written and polled of the file is on stable storage. IO.
FERRY_API ferry_status ferry_files_flush(ferry_files* files, uint32_t file);

// ---------------------------------------------------------------- pinned memory

typedef struct ferry_pool ferry_pool;
enum { FERRY_DEVICE_CPU = 0, FERRY_DEVICE_CUDA = 1 };

typedef struct ferry_pool_options {
    size_t size;
    int64_t budget_bytes;  // the most that may be reserved in all
    int32_t threads;       // that touch pages; 0: a thread a core
    int32_t lock_for;  // FERRY_DEVICE_CUDA: page-locked for the GPU; FERRY_DEVICE_CPU: not locked
    int32_t gpu;       // number among the visible GPUs, for FERRY_DEVICE_CUDA
    const ferry_allocator* allocator;  // NULL: the system's. Version 4
} ferry_pool_options;

// With FERRY_DEVICE_CUDA this opens the GPU's context. USAGE, DOES_NOT_FIT.
FERRY_API ferry_status ferry_pool_create(const ferry_pool_options* options, ferry_pool** pool);
// All of its memory ends with it: nothing may use it any more.
FERRY_API ferry_status ferry_pool_destroy(ferry_pool* pool);
// Zeroed memory on huge pages where there are any, aligned to 2 MiB, every page touched, until the
// pool is destroyed. `name` is for messages. DOES_NOT_FIT: budget, machine or page locks.
FERRY_API ferry_status ferry_pool_reserve(ferry_pool* pool, const char* name, int64_t bytes,
                                          void** memory);
// Nothing is reserved from now on: a later ferry_pool_reserve is refused with USAGE.
FERRY_API ferry_status ferry_pool_seal(ferry_pool* pool);
FERRY_API ferry_status ferry_pool_reserved_bytes(ferry_pool* pool, int64_t* bytes);

// ---------------------------------------------------------------- the tiered store

// Objects of any sizes, at home in host memory or on NVMe. Those on NVMe are in one of a fixed
// number of buffers while they are leased, and stay there until the buffer is needed.
typedef struct ferry_store ferry_store;

typedef struct ferry_store_options {
    size_t size;
    const ferry_path* paths;  // NVMe; none: all objects are at home in host memory
    size_t path_count;
    int64_t host_bytes;     // host memory that the store takes at most, buffers included
    int64_t buffers;        // 0: as many as host_bytes has room for, at most one an object
    int64_t spare_buffers;  // buffers kept free ahead of need; 0: a quarter
    int32_t threads;        // that hash and touch pages; 0: a thread a core
    int32_t lock_for;       // FERRY_DEVICE_CUDA: buffers and objects are page-locked for the GPU
    int32_t gpu;
    int32_t backend;                   // FERRY_BACKEND_*
    int32_t queue_depth;               // 0: 32
    int32_t no_verify;                 // 1: what is read is not held against its checksum
    const ferry_allocator* allocator;  // NULL: the system's. Version 4
} ferry_store_options;

enum { FERRY_HOST = 0, FERRY_NVME = 1 };
enum {
    FERRY_READ = 0,      // several at a time; the bytes are not to be changed
    FERRY_WRITE = 1,     // alone; the bytes are as they were
    FERRY_OVERWRITE = 2  // alone; the bytes are anything, all of them are to be written
};

// Takes nothing yet. USAGE.
FERRY_API ferry_status ferry_store_create(const ferry_store_options* options, ferry_store** store);
// An object of so many bytes, until ferry_store_open: objects are numbered from 0. USAGE.
FERRY_API ferry_status ferry_store_register(ferry_store* store, int64_t bytes, int32_t home,
                                            uint32_t* object);
// Takes the memory and the files for what was registered. Waits for their layout. Afterwards only
// errors allocate. DOES_NOT_FIT, with the budget that would do; IO. After an error it may be called
// again. Objects in host memory are zero, those on NVMe are to be overwritten first.
FERRY_API ferry_status ferry_store_open(ferry_store* store);
// Waits for what is under way, and removes the files: objects end with their store. USAGE: a lease
// was not released.
FERRY_API ferry_status ferry_store_destroy(ferry_store* store);
// The same although leases are held, for a process that is about to end: their bytes stay readable
// and writable until it has ended, and so does the store's memory. Version 6.
FERRY_API ferry_status ferry_store_abandon(ferry_store* store);
// A lease of an object: `bytes` (all of the object, aligned to 64, on NVMe to 4096) are the
// caller's until it is released, on any thread. Waits for storage where they are not there yet.
//   IO            the read failed, or its bytes are wrong: nothing is leased, another acquire reads
//                 again. Or an earlier write of this object failed: until overwritten or reverted
//   USAGE         no such object; leased, and one of both leases does not read; never written
//   DOES_NOT_FIT  every buffer is held by a lease
FERRY_API ferry_status ferry_store_acquire(ferry_store* store, uint32_t object, int32_t access,
                                           uint64_t* lease, void** bytes);
// Never waits for storage. What its write runs into is heard from flush, check and the object's
// next acquire. USAGE: it is no lease, or was released before.
FERRY_API ferry_status ferry_store_release(ferry_store* store, uint64_t lease);
// A hint: reads what is likely to be leased soon, the first first, as far as there is room. Never
// waits.
FERRY_API ferry_status ferry_store_prefetch(ferry_store* store, const uint32_t* objects,
                                            size_t count);
// Writes all that was changed, but for what is leased for writing, and waits for it. IO.
FERRY_API ferry_status ferry_store_flush(ferry_store* store);
// IO: the first failed write that was neither overwritten nor reverted. Never waits.
FERRY_API ferry_status ferry_store_check(ferry_store* store);
// After a failed write: the object has the contents before again. USAGE: there are none, or it is
// leased.
FERRY_API ferry_status ferry_store_revert(ferry_store* store, uint32_t object);

typedef struct ferry_store_stats {
    size_t size;
    int64_t acquired;       // leases
    int64_t hits;           // acquisitions without I/O and without a wait
    int64_t reads, writes;  // begun, of whole objects
    int64_t leased;         // now
    int64_t buffers;        // that there are
    int64_t host_bytes;     // taken
    int64_t nvme_bytes;     // what the slots take
} ferry_store_stats;
FERRY_API ferry_status ferry_store_get_stats(ferry_store* store, ferry_store_stats* stats);

// ---------------------------------------------------------------- optimizers on arrays

// The arithmetic of include/ferry/optim.h and docs/numerics.md: the same bits with any thread
// count, length and alignment, and on a GPU.

// Threads for the calls below. Several calls may use one team at a time.
typedef struct ferry_team ferry_team;
// 0 threads: a thread a core. USAGE: below 0 or above 4096.
FERRY_API ferry_status ferry_team_create(int32_t threads, ferry_team** team);
FERRY_API ferry_status ferry_team_destroy(ferry_team* team);

enum { FERRY_ADAMW = 0, FERRY_ADAM = 1, FERRY_SGD = 2, FERRY_LION = 3, FERRY_ADAGRAD = 4 };
enum { FERRY_F32 = 0, FERRY_BF16 = 1, FERRY_F16 = 2 };
// A third type of moments, beside FERRY_F32 and FERRY_BF16: codes in moment blocks of 256, each
// with a scale, as torchao's AdamW8bit has them (optim.h).
enum { FERRY_INT8 = 3 };

// Every field counts as it stands: a beta of 0 is one. ferry_hyper_default fills it.
typedef struct ferry_hyper {
    size_t size;
    double lr, beta1, beta2, eps, weight_decay;
    double momentum;             // sgd
    double initial_accumulator;  // adagrad
    int32_t method;              // FERRY_ADAMW, ...
    int32_t nesterov;            // sgd: 0 or 1
    uint32_t seed;               // of stochastic rounding, for moments in bf16
    uint32_t reserved;
} ferry_hyper;
// lr 1e-3, betas 0.9 and 0.999 (Lion: 0.99), eps 1e-8 (Adagrad: 1e-10), everything else 0. `hyper`
// has its size set.
FERRY_API ferry_status ferry_hyper_default(int32_t method, ferry_hyper* hyper);
// How many moments the method keeps: 2 (m and v), 1 (m) or 0; and what m starts as.
FERRY_API ferry_status ferry_optim_moments(const ferry_hyper* hyper, int32_t* moments,
                                           float* initial_m);

// FERRY_INT8: the 256 shares of its block's scale that codes stand for, in rising order. `moment`
// is 0 for m, 1 for v. A moment is share * scale.
FERRY_API ferry_status ferry_optim_moment_shares(int32_t method, int32_t moment, float* shares);

// One run of `count` elements. What is written is the same array as its own input (p and p_in, in
// place) or overlaps none of the others. In the caller's
// memory on the CPU, device memory or pinned host memory for the calls on a stream.
typedef struct ferry_update {
    size_t size;
    int64_t count;
    const void* gradient;  // gradient_type
    const float* p_in;     // NULL: p
    const void* m_in;      // moment_type; NULL: m
    const void* v_in;      // moment_type; NULL: v
    float* p;              // master weights; NULL with a split master
    void* m;               // moment_type; NULL where the method keeps none
    void* v;
    void* weight;  // weight_type, the rounded p; NULL: not written
    const uint16_t*
        weight_in;  // split master, in place of p: bf16 or fp16 weight and low halves; NULL: weight
    const uint16_t* low_in;  // NULL: low
    uint16_t* low;
    int64_t element;  // where the first element lies in its layer; bf16 moments: 32 n, int8: 256 n
    uint32_t layer;   // both decide the random bits of stochastic rounding
    int32_t gradient_type;    // FERRY_F32, FERRY_BF16 or FERRY_F16
    int32_t moment_type;      // FERRY_F32, FERRY_BF16 or FERRY_INT8
    int32_t weight_type;      // FERRY_F32, FERRY_BF16 or FERRY_F16
    const float* m_scale_in;  // FERRY_INT8: a scale a block of 256; NULL: m_scale
    const float* v_scale_in;  // NULL: v_scale
    float* m_scale;
    float* v_scale;
} ferry_update;

// The `step`-th update (from 1) of a run of elements; the gradient counts gradient_scale times:
// clip factor / loss scale. `team` NULL: on this thread alone. A gradient that is not finite is no
// error: it makes p and moments NaN (leaf norms find it before). USAGE: hyper, step or arrays.
FERRY_API ferry_status ferry_optim_update(ferry_team* team, const ferry_hyper* hyper, int64_t step,
                                          double gradient_scale, const ferry_update* update);
// The same on the current device, enqueued on a stream (a cudaStream_t; NULL: the default one).
// Never waits. USAGE: also where this library or this machine has no CUDA.
FERRY_API ferry_status ferry_optim_update_cuda(const ferry_hyper* hyper, int64_t step,
                                               double gradient_scale, const ferry_update* update,
                                               void* stream);
// weight = rounded p: `count` elements of weight_type, which do not overlap p.
FERRY_API ferry_status ferry_optim_recast(const float* p, int64_t count, int32_t weight_type,
                                          void* weight);
FERRY_API ferry_status ferry_optim_recast_cuda(const float* p, int64_t count, int32_t weight_type,
                                               void* weight, void* stream);
// The sums of squares of runs of 4,096 elements: `leaves` has (count + 4095) / 4096 floats. A leaf
// with a gradient that is not finite is not finite.
FERRY_API ferry_status ferry_optim_leaf_norms(ferry_team* team, const void* gradient, int32_t type,
                                              int64_t count, float* leaves);
FERRY_API ferry_status ferry_optim_leaf_norms_cuda(const void* gradient, int32_t type,
                                                   int64_t count, float* leaves, void* stream);
// `sum` += all leaves, in order, in double: over several arrays the square of their common norm.
FERRY_API ferry_status ferry_optim_add_leaves(const float* leaves, int64_t count, double* sum);
// min(1, max_norm / (norm + 1e-6)); 1 for a max_norm of 0 or less; 0 for an infinite norm, NaN for
// a NaN.
FERRY_API double ferry_optim_clip_factor(double norm, double max_norm);

// ---------------------------------------------------------------- the engine

typedef struct ferry_engine ferry_engine;

// Fills a batch, of a step from 1 on or with 0 of an evaluation: [sequences, sequence] tokens, and
// targets, the tokens to be predicted; -1: none. Returns how many sequences it has written: fewer
// than asked for, or below 0, is an error of the call that it is within. Of several ranks each is
// asked for all sequences and gives the same. Called by ferry_engine_step and
// ferry_engine_evaluate, on their thread, before anything of theirs is done. Version 4.
typedef int64_t (*ferry_load_callback)(void* context, int64_t step, int64_t sequences,
                                       int64_t sequence, int32_t* tokens, int32_t* targets);

typedef struct ferry_engine_options {
    size_t size;
    const char* config_json;       // the text of a configuration (docs/configuration.md), or
    const char* config_file;       // the path of one; exactly one of both
    const char* const* overrides;  // "key.path=value", as `ferry train --set`
    size_t override_count;
    int32_t resume;  // 1: goes on after the last durable step of the run that was interrupted
    int32_t reserved;
    const char* checkpoint;  // goes on after this one's step (DIR/step-00000100); NULL: none
    // Version 4 from here on. 1: batches come from ferry_engine_feed. That or `load`: data.tokens
    // is not looked at, and data.isolate_documents is refused.
    int32_t fed;
    int32_t gpu;               // number among the visible GPUs
    ferry_load_callback load;  // NULL: batches are fed, or the token file's
    void* load_context;
    ferry_progress_callback progress;  // of creation, checkpoints and exports
    void* progress_context;
    const ferry_allocator* allocator;  // of state, staging and checkpoints; NULL: the system's
    // 128 bytes of ncclGetUniqueId, the same on all ranks: this process is one of `ranks`, on the
    // GPU `gpu`, and every rank makes the same calls with this handle. Nothing in the process has
    // used CUDA before. NULL: the run is this process.
    const void* nccl_unique_id;
    int32_t rank, ranks;
} ferry_engine_options;

// Plans, reserves everything, fills the state over the tiers. USAGE, DOES_NOT_FIT, IO. One process,
// also under mpirun, or a rank of those with the same NCCL unique id. What `options` points to is
// copied; the contexts and callbacks are used until the engine is destroyed.
FERRY_API ferry_status ferry_engine_create(const ferry_engine_options* options,
                                           ferry_engine** engine);
FERRY_API ferry_status ferry_engine_destroy(ferry_engine* engine);

// What a step takes, or with `evaluation` 1 an evaluation: so many sequences of so many tokens.
// Version 4.
FERRY_API ferry_status ferry_engine_batch_shape(ferry_engine* engine, int32_t evaluation,
                                                int64_t* sequences, int64_t* sequence);

typedef struct ferry_batch {
    size_t size;
    const int32_t* tokens;   // [sequences, sequence], row by row
    const int32_t* targets;  // as many; -1: nothing is to be predicted there
    int64_t sequences, sequence;
    int32_t evaluation;  // 1: for ferry_engine_evaluate, until another is fed
    int32_t reserved;
} ferry_batch;
// Copies the batch of the next step, in place of one that was fed and not used. A step takes the
// batch with it; without one it is USAGE, and so is a token outside the vocabulary. The engine is
// then as it was: feed, and take the step again. USAGE: another shape, or an engine that is not
// fed. Version 4.
FERRY_API ferry_status ferry_engine_feed(ferry_engine* engine, const ferry_batch* batch);

typedef struct ferry_step_report {
    size_t size;
    int64_t step;  // from 1
    double loss;   // mean over the step's real targets, natural logarithm
    double gradient_norm, clip_factor, lr, loss_scale;
    double seconds;
    int64_t targets, tokens;
    int32_t skipped;      // 1: no real target, or not finite and the configuration skips that
    int32_t speculative;  // 1: updates began before the clip factor was known
    int32_t committed;    // 1: they stood
    int32_t reserved;
} ferry_step_report;
// One optimizer step of the configuration's batch; `report` may be NULL. IO, DIVERGED; RANK_LOST:
// of several ranks. USAGE: a batch that could not be had, and the step was not taken; of several
// ranks the run is over.
FERRY_API ferry_status ferry_engine_step(ferry_engine* engine, ferry_step_report* report);
// The number of the last step; of a resumed run at first that of its last durable one.
FERRY_API ferry_status ferry_engine_last_step(ferry_engine* engine, int64_t* step);

typedef struct ferry_evaluation {
    size_t size;
    double loss;  // mean over the real targets, natural logarithm; NaN where there is none
    int64_t targets;
} ferry_evaluation;
// Over the held-back micro-batches that the configuration asks for, or those that are fed; training
// goes on with the same bits. IO, DIVERGED; USAGE as ferry_engine_step.
FERRY_API ferry_status ferry_engine_evaluate(ferry_engine* engine, ferry_evaluation* evaluation);
// XXH3 over all weights and moments, the one that `ferry train` prints.
FERRY_API ferry_status ferry_engine_state_hash(ferry_engine* engine, uint64_t* hash);

// Writes the whole state as a checkpoint of the last step, DIRECTORY/step-00000100, from which
// ferry_engine_create and `ferry train --resume` go on with the same bits. The directory is made
// where there is none; a checkpoint of that step before is replaced. The engine goes on. Of several
// ranks the first one writes, into its directory, and all get its error at once. USAGE, IO.
FERRY_API ferry_status ferry_engine_save(ferry_engine* engine, const char* directory);

enum { FERRY_TYPE_OF_RUN = -1 };
// Writes the model as transformers saves one, into a directory that is new or empty. `type`:
// FERRY_F32, ... or FERRY_TYPE_OF_RUN, that of compute. The engine goes on. Of several ranks the
// first one writes, and all get its error at once. USAGE, IO.
FERRY_API ferry_status ferry_engine_export(ferry_engine* engine, const char* directory,
                                           int32_t type);

typedef struct ferry_run_report {
    size_t size;
    int64_t steps, tokens;
    double seconds;  // in steps, evaluation left out
    int64_t steps_committed, steps_rolled_back, clipped_steps, skipped_steps;
    int64_t device_bytes, host_bytes, nvme_bytes;  // that the run took
    int64_t nvme_bytes_read, nvme_bytes_written;
} ferry_run_report;
// Reports the steps so far; waits for the end of the last one.
FERRY_API ferry_status ferry_engine_report(ferry_engine* engine, ferry_run_report* report);

// Called on a thread of ferry's when NCCL (or MPI) has not returned long after its time is over:
// `text` says which rank and what of. Without a callback the process ends with FERRY_RANK_LOST as
// its exit code, for nothing else can end that call. With one, the call stays where it is, and so
// does whoever waits for it, until the program ends. From within the callback every engine is
// FERRY_BUSY. Version 4.
typedef void (*ferry_stuck_callback)(void* context, const char* text);
// From now on; NULL: as at the start. No call of the one before is under way any more when this
// returns. From within the callback it is for the next such call.
FERRY_API ferry_status ferry_on_stuck(ferry_stuck_callback callback, void* context);

#ifdef __cplusplus
}
#endif
// NOLINTEND
