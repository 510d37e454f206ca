// Stands in where the build has no CUDA.
#include "codec.h"
#include "feedback.h"
#include "ferry/error.h"

#ifndef FERRY_CUDA

namespace ferry::zero::cuda {

// Nobody can hold a CUDA device in this build.
bool available() { return false; }
void encode(const Codec&, DType, const void*, int64_t, Part, int64_t, const Several&, void*) {
    bug("built without CUDA");
}
void decode(const Codec&, ConstPart, int64_t, int64_t, DType, void*, const Several&, void*) {
    bug("built without CUDA");
}
void decode_add(const Codec&, ConstPart, int64_t, int64_t, float*, void*) {
    bug("built without CUDA");
}
void sum(const Codec&, const std::byte*, int, int64_t, DType, void*, float*, void*) {
    bug("built without CUDA");
}
void combine(const Codec&, const std::byte*, int, int, int64_t, std::byte*, void*) {
    bug("built without CUDA");
}
void keep(const float*, int, int64_t, int64_t, DType, void*, float*, void*) {
    bug("built without CUDA");
}
Beside::Beside(const Codec&, DType) { bug("built without CUDA"); }
Beside::~Beside() = default;
void Beside::wait() { bug("built without CUDA"); }

}  // namespace ferry::zero::cuda

#endif
