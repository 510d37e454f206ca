#include "cost/measurements.h"

#include <algorithm>

#include "ferry/error.h"

namespace ferry::cost {

Measurements default_measurements(DeviceKind device) {
    Measurements found{.copy_bytes_per_s = 8e9,
                       .nvme_bytes_per_s = 1.5e9,
                       .nvme_at_once = 1,
                       .storage_of = Of::host,
                       .dram_bytes_per_s = 2e10,
                       .update_overhead_s = 2e-5,
                       .out_of_place = 1.5,
                       .check_bytes_per_s = 1.2e10,
                       .memory_of = Of::host,
                       .device_bytes_per_s = 2e10,
                       .assumed_flops_per_s = 1.5e11};
    if (device != DeviceKind::cuda) return found;
    found.copy_bytes_per_s = 5e10;
    found.nvme_bytes_per_s = 4e9;
    found.dram_bytes_per_s = 1.5e11;
    found.memory_of = Of::rank;
    found.update_overhead_s = 1.2e-4;
    found.out_of_place = 1;
    found.device_bytes_per_s = 2e12;
    found.computes_on_host = false;
    found.assumed_flops_per_s = 6e14;
    return found;
}

Measurements known_or(Measurements known, const Measurements& assumed) {
    const auto fill = [&](auto Measurements::*field) {
        if (known.*field == 0) known.*field = assumed.*field;
    };
    if (known.nvme_bytes_per_s == 0) {
        known.nvme_bytes_per_s = assumed.nvme_bytes_per_s;
        known.storage_of = assumed.storage_of;
        known.dram_per_nvme_byte = assumed.dram_per_nvme_byte;
        known.cores_per_nvme_byte = assumed.cores_per_nvme_byte;
    }
    if (known.dram_bytes_per_s == 0) {
        known.dram_bytes_per_s = assumed.dram_bytes_per_s;
        known.memory_of = assumed.memory_of;
    }
    fill(&Measurements::copy_bytes_per_s);
    fill(&Measurements::nvme_at_once);
    fill(&Measurements::update_overhead_s);
    fill(&Measurements::out_of_place);
    fill(&Measurements::check_bytes_per_s);
    fill(&Measurements::device_bytes_per_s);
    fill(&Measurements::momentum_bytes_per_s);
    fill(&Measurements::device_copy_bytes_per_s);
    // Updates in the device's memory reach nearly as much.
    if (known.device_copy_bytes_per_s == 0)
        known.device_copy_bytes_per_s = known.device_bytes_per_s;
    // A product that was timed says more than a default of kernels that were not: those of a step
    // reach about so much of its rate (0.79 on an H100, blocks of 3,072).
    constexpr double kOfProduct = 0.77;
    if (known.assumed_flops_per_s == 0)
        known.assumed_flops_per_s = known.product_flops_per_s > 0
                                        ? kOfProduct * known.product_flops_per_s
                                        : assumed.assumed_flops_per_s;
    return known;
}

Measurements of_rank(Measurements measured, int ranks_on_host) {
    if (measured.storage_of == Of::host) measured.nvme_bytes_per_s /= ranks_on_host;
    if (measured.memory_of == Of::host) measured.dram_bytes_per_s /= ranks_on_host;
    // The device is the host's memory and processors where those compute.
    if (measured.memory_of == Of::host && measured.computes_on_host) {
        measured.device_bytes_per_s /= ranks_on_host;
        measured.device_copy_bytes_per_s /= ranks_on_host;
        measured.assumed_flops_per_s /= ranks_on_host;
    }
    measured.storage_of = measured.memory_of = Of::rank;
    return measured;
}

double dram_per_copied_byte(const Measurements& measured) {
    return measured.computes_on_host ? 2 : 1;
}

double products_s(const MatrixProducts& products, const Measurements& measured) {
    constexpr double kOfTensorCores = 14;  // an H100's rate in 16 bits, of that in fp32
    if (products.flops == 0) return 0;
    const double rate = measured.product_flops_per_s > 0 ? measured.product_flops_per_s
                                                         : measured.assumed_flops_per_s;
    if (measured.computes_on_host) return products.flops / rate;
    const bool exact = products.type == DType::f32, computes_exact = products.compute == DType::f32;
    const double times = exact == computes_exact ? 1 : exact ? 1 / kOfTensorCores : kOfTensorCores;
    return products.flops / (rate * times) + products.sent_bytes / measured.copy_bytes_per_s;
}

double dram_bytes(double updated, double copied, double stored, const Measurements& measured) {
    return updated + dram_per_copied_byte(measured) * copied + measured.dram_per_nvme_byte * stored;
}

double comm_rate(const Measurements& measured) {
    return measured.comm_bytes_per_s > 0 ? measured.comm_bytes_per_s : measured.copy_bytes_per_s;
}

double comm_seconds(double bytes, int64_t operations, const Measurements& measured) {
    return static_cast<double>(operations) * measured.comm_overhead_s +
           (bytes > 0 ? bytes / comm_rate(measured) : 0);
}

double group_seconds(double bytes, int64_t operations, const GroupRate& rate,
                     const Measurements& measured) {
    if (rate.bytes_per_s == 0) return comm_seconds(bytes, operations, measured);
    return static_cast<double>(operations) * rate.overhead_s + bytes / rate.bytes_per_s;
}

const GroupRate& rate_among(Among ranks, const Measurements& measured) {
    static constexpr GroupRate kAll{};
    switch (ranks) {
        case Among::all:
            return kAll;
        case Among::host:
            return measured.in_host;
        case Among::hosts:
            return measured.across_hosts;
    }
    bug("no such ranks");
}

double comm_seconds(const CommTraffic& traffic, const Measurements& measured) {
    return comm_seconds(traffic.among_all, 0, measured) +
           group_seconds(traffic.in_host, 0, measured.in_host, measured) +
           group_seconds(traffic.across_hosts, 0, measured.across_hosts, measured);
}

double least_comm_seconds(const CommTraffic& traffic, const Measurements& measured) {
    const double inside = group_seconds(traffic.in_host, 0, measured.in_host, measured);
    return std::max(inside, comm_seconds(traffic, measured) - inside);
}

}  // namespace ferry::cost
