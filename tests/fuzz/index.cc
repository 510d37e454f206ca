// The index beside two shards.
#include "checkpoint/checkpoint.h"
#include "fuzz.h"

namespace {

struct Shards : ferry::fuzz::Directory {
    Shards() {
        const ferry::checkpoint::TensorInfo infos[] = {{"a", {2, 2}}, {"b", {2, 2}}};
        const auto zeros = [](size_t, const ferry::checkpoint::Sink& sink) {
            const float values[4] = {};
            sink(values);
        };
        for (size_t i = 0; i < 2; ++i) {
            const std::string name =
                "/model-0000" + std::to_string(i + 1) + "-of-00002.safetensors";
            ferry::checkpoint::write_safetensors(path() + name, {&infos[i], 1}, ferry::DType::f32,
                                                 zeros);
        }
    }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace ferry;
    static const Shards directory;
    directory.put("model.safetensors.index.json", fuzz::text_of(data, size));
    fuzz::refused_or_read([&] { checkpoint::Weights weights(directory.path()); });
    return 0;
}
