// A machine file, and what planning asks it.
#include "tools/machine/machine_file.h"

#include <nlohmann/json.hpp>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace ferry;
    static const fuzz::Directory directory;
    const std::string name = directory.put("machine.json", fuzz::text_of(data, size));
    fuzz::refused_or_read([&] {
        const tools::MachineFile file = tools::MachineFile::read(name);
        fuzz::refused_or_read([&] { file.path("/mnt/nvme"); });
        for (const char* const device : {"cpu", "cuda sm_90"}) {
            const tools::MeasurementsOf what{.kernels = {.model = "model",
                                                         .compute = "bf16",
                                                         .device = device,
                                                         .libraries = "libraries",
                                                         .threads = 2},
                                             .count = {.ranks = 2, .on_a_host = 2},
                                             .groups = {.tensor = 2},
                                             .ranks_per_host = 2,
                                             .by = "nccl"};
            fuzz::refused_or_read([&] { file.measurements(what); });
        }
        fuzz::refused_or_read([&] { file.gpu({.model = "model", .compute = "bf16"}); });
    });
    return 0;
}
