// The kernels of sparse_attention.py as cmake/compile_triton.py leaves them in the build.
#pragma once

#include <cstdint>
#include <span>

#include "ferry/dtype.h"

namespace ferry::ops::cuda {

enum class SparseKernel : uint8_t { forward, backward_queries, backward_keys };

struct SparseImage {
    SparseKernel kernel;
    int architecture;  // 90: machine code; 80: PTX, for every GPU from there on
    DType type;
    int width;      // elements of a head; narrower heads are padded
    int own, step;  // rows of a tile that it sums for, and of one that it sums over
    int warps;
    bool part;  // of some queries and some keys of a sequence, whose sums it leaves in fp32
    int shared_bytes;
    const char* name;
    const unsigned char* code;
};

// Of all widths, types and architectures.
std::span<const std::span<const SparseImage>> sparse_images();

}  // namespace ferry::ops::cuda
