// A configuration file.
#include "ferry/config.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const ferry::fuzz::Directory quiet;
    ferry::fuzz::refused_or_read([&] {
        const ferry::Config config =
            ferry::parse_config(ferry::fuzz::text_of(data, size), "fuzz.json", {});
        ferry::describe_values(config);
        ferry::describe_training(config);
    });
    return 0;
}
