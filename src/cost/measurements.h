// The speeds of a machine: its links and its kernels, each measured alone. Planner, simulator and
// bound go by them, and the machine file holds them field by field. They never change a number of a
// run.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cost/kernel_times.h"
#include "cost/traffic.h"
#include "ferry/device_kind.h"
#include "ferry/dtype.h"

namespace ferry::cost {

// The things that kernels' times depend on, field by field.
struct KernelsOf {
    std::string model{};      // shapes, micro-batch and numerics, in words that are never parsed
    std::string compute{};    // "bf16"
    std::string device{};     // its architecture: "cpu", "cuda sm_90"
    std::string libraries{};  // and the operations' own versions
    int threads = 1;
    bool under_load = false;  // at the clock that a GPU holds under the step's own load
    bool operator==(const KernelsOf&) const = default;
    bool on_host() const { return device == kHost; }
    static constexpr std::string_view kHost = "cpu";  // the architecture that is no GPU's
};

// Whose measurements they are: all that a host has, or the part that one of its ranks has.
enum class Of : uint8_t { host, rank };

// Among ranks that share sequences, tensors or layers; 0: as among the others.
struct GroupRate {
    double bytes_per_s = 0, overhead_s = 0;
};

// 0: not known.
struct Measurements {
    double copy_bytes_per_s = 0;    // host <-> device, one direction
    double nvme_bytes_per_s = 0;    // reads and writes mixed, all paths
    int64_t nvme_at_once = 0;       // chunks read, and as many written, that this rate takes
    double dram_per_nvme_byte = 1;  // DRAM traffic that a byte from or to storage costs
    // Seconds of a core for the same, checks left out: much where processors copy it (tmpfs).
    double cores_per_nvme_byte = 0;
    Of storage_of = Of::host;            // nvme_bytes_per_s
    double dram_bytes_per_s = 0;         // as the optimizer's update reaches alone
    double update_overhead_s = 0;        // each update's, however small: its threads have to meet
    double out_of_place = 0;             // seconds of an update to a fresh slot, of one in place
    double check_bytes_per_s = 0;        // one thread's rate
    int threads = 1;                     // threads of the team
    Of memory_of = Of::host;             // dram_bytes_per_s
    double momentum_bytes_per_s = 0;     // of what codes momentum; 0: as updates
    double device_bytes_per_s = 0;       // updates that the device makes in its memory
    double device_copy_bytes_per_s = 0;  // a copy within it, reads and writes counted
    bool computes_on_host = true;        // kernels and copies take the team's cores
    double comm_bytes_per_s = 0;         // that reach a rank from the others; 0: as copies do
    double comm_overhead_s = 0;          // each exchange's between ranks, however small
    // The same for exchanges of blocks' kernels, whose groups may be nearer. Then for what the
    // ranks of a host exchange among themselves first, and for what then crosses between hosts
    // alone.
    GroupRate with_sequence{}, with_slices{}, in_host{}, across_hosts{};
    GroupRate between_stages{};      // of a pipeline
    double product_flops_per_s = 0;  // the best that a large product reaches
    KernelTimes kernels{};

    // The rate of products whose kernels nobody has timed.
    double assumed_flops_per_s = 0;
};

// Assumed measurements: a small machine, which is the host's, or a GPU's part of a server. That is
// an H100 or its like, and 16 cores with their memory. Drives are a host's in both. docs/machine.md
// has both sets.
Measurements default_measurements(DeviceKind device);

// The known measurements, and the assumed ones where nothing is known.
Measurements known_or(Measurements known, const Measurements& assumed);

// Each rank's part: the ranks of a host share the drives, and the memory that updates stream
// through. Measurements of one rank stay as they are.
Measurements of_rank(Measurements measured, int ranks_on_host);

// Products of Muon's update at the rate that is measured or assumed of the model's, and on a GPU at
// so many times that as the other type's.
double products_s(const MatrixProducts& products, const Measurements& measured);

// Bytes of host memory moved for each byte that is copied between host and device. Where the
// processors are the device, both ends lie in host memory.
double dram_per_copied_byte(const Measurements& measured);
// Bytes that host memory reads and writes for updates, copies and storage.
double dram_bytes(double updated, double copied, double stored, const Measurements& measured);

// Bytes a second that reach a rank from the others.
double comm_rate(const Measurements& measured);
// Seconds of so many operations that bring these bytes.
double comm_seconds(double bytes, int64_t operations, const Measurements& measured);
// The same among the ranks of a group.
double group_seconds(double bytes, int64_t operations, const GroupRate& rate,
                     const Measurements& measured);
const GroupRate& rate_among(Among ranks, const Measurements& measured);  // 0: as among all
// Seconds of a step's exchanges, without their overheads. The first: one after the other. The
// second is the least: a host's ranks exchange beside all that crosses between hosts.
double comm_seconds(const CommTraffic& traffic, const Measurements& measured);
double least_comm_seconds(const CommTraffic& traffic, const Measurements& measured);

}  // namespace ferry::cost
