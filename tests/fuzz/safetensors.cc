// One safetensors file: its header, and a first value of each tensor.
#include "checkpoint/checkpoint.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace ferry;
    static const fuzz::Directory directory;
    const std::string name = directory.put("fuzz.safetensors", fuzz::text_of(data, size));
    fuzz::refused_or_read([&] {
        const checkpoint::Weights weights(name);
        for (const checkpoint::StoredTensor& tensor : weights.tensors()) {
            if (weights.find(tensor.name) == nullptr) std::abort();
            if (!tensor.type || tensor.count() < 1) continue;
            float value[1];
            fuzz::refused_or_read([&] { weights.read(tensor, tensor.count() - 1, value); });
        }
    });
    return 0;
}
