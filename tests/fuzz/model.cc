// The config.json of a model directory.
#include "fuzz.h"
#include "model/huggingface.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const ferry::fuzz::Directory quiet;
    const std::string_view text = ferry::fuzz::text_of(data, size);
    ferry::fuzz::refused_or_read([&] { ferry::model::read_description(text, "config.json"); });
    // An export changes what was read before.
    ferry::fuzz::refused_or_read([&] {
        ferry::model::read_description(text, "config.json");
        ferry::model::with_type(text, "config.json", ferry::DType::bf16);
    });
    return 0;
}
