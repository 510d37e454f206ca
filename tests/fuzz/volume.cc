// The header of a volume beside its one slot file, in its two copies: as they are, and with the
// checksum that the first or each should have, by which whoever writes one gets it believed.
#include <algorithm>
#include <cstring>

#include "aio/published_run.h"
#include "ferry/aio.h"
#include "fuzz.h"
#include "header.h"

namespace {

using namespace ferry;

constexpr uint64_t kRun = 7;

void open_header(const std::string& name, aio::Leftover leftover) {
    fuzz::refused_or_read([&] {
        aio::HeaderFile file(name, false);
        aio::Header found;
        file.find_leftover(leftover, kRun, found);
    });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const fuzz::Directory directory;
    static const auto executor = make_thread_executor();
    // As eight slots and two copies of the record are laid out.
    static const std::string slot_file =
        directory.put("ferry.slots0", std::string(48 * kKiB, '\0'));
    const std::string_view text = fuzz::text_of(data, size);
    for (const int sealed : {0, 1, 2}) {
        aio::Header copies[2]{};
        std::memcpy(static_cast<void*>(copies), data, std::min(size, sizeof copies));
        for (int i = 0; i < sealed; ++i) copies[i].sum = aio::sum_of(copies[i]);
        const std::string_view whole(reinterpret_cast<const char*>(copies), sizeof copies);
        // One that ends after the first copy is what a kill between the two leaves.
        const std::string name = directory.put(
            "ferry.volume", sealed == 0   ? text
                            : sealed == 1 ? whole.substr(0, std::max(size, sizeof(aio::Header)))
                                          : whole);
        aio::published_run({.path = directory.path()});
        for (const auto leftover : {aio::Leftover::remove, aio::Leftover::reuse_any})
            if (std::filesystem::exists(name)) open_header(name, leftover);
        if (!std::filesystem::exists(name)) continue;
        fuzz::refused_or_read([&] {
            const auto volume =
                aio::Volume::open({.paths = {{.path = directory.path(), .size_bytes = kMiB}},
                                   .classes = {{.name = "slots", .slot_bytes = 4096, .slots = 8}},
                                   .backend = aio::BackendKind::posix,
                                   .leftover = aio::Leftover::resume,
                                   .run_id = kRun,
                                   .record_bytes = 4096},
                                  *executor);
            for (size_t n = 0; n < 2; ++n) volume->found_record(n);
        });
    }
    return 0;
}
