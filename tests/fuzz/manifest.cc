// The manifest of a checkpoint. Its own checksum is made right, so that what stands in it is read.
#include "checkpoint/manifest.h"

#include <cstdio>
#include <span>

#include "base/checksum.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace ferry;
    std::string text(fuzz::text_of(data, size));
    const std::string before = "\"checksum\": \"";
    const size_t at = text.rfind(before);
    if (at != std::string::npos && at + before.size() + 16 <= text.size()) {
        const size_t digits = at + before.size();
        char right[17];
        std::snprintf(right, sizeof right, "%016llx",
                      static_cast<unsigned long long>(
                          checksum(std::as_bytes(std::span(text).first(digits)))));
        text.replace(digits, 16, right);
    }
    fuzz::refused_or_read([&] {
        const checkpoint::Manifest manifest = checkpoint::read_manifest(text, "fuzz");
        checkpoint::read_manifest(checkpoint::write_manifest(manifest), "written again");
    });
    return 0;
}
