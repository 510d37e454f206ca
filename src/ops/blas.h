// The OpenBLAS of this process. It is loaded when the first product needs it, not with the program:
// it reads its environment, chooses its kernels, and starts its threads while it is loaded.
#pragma once

#include <cblas.h>

#include <string>

namespace ferry::ops {

using Sgemm = decltype(&cblas_sgemm);

struct Blas {
    Sgemm sgemm = nullptr;
    std::string config{};  // version and kernels, as the numerics record names them
    std::string core{};    // the kernels alone
    // What OpenBLAS would say as `config` if it ran the kernels of another core. It names them
    // within a text of its own.
    std::string config_with(const std::string& other) const;
    // OpenBLAS's own function: takes one of the buffers that products work in. Null: this build
    // hides it.
    void* (*take_buffer)(int) = nullptr;
    void (*give_buffer)(void*) = nullptr;
};

// Loads OpenBLAS where that was not done. Throws usage where it is not there, does_not_fit where
// the process may not map it.
const Blas& blas();

// Keeps the kernels as they are while it lives.
class BlasUse {
public:
    BlasUse();
    ~BlasUse();
    Sgemm sgemm() const { return sgemm_; }
    BlasUse(const BlasUse&) = delete;
    BlasUse& operator=(const BlasUse&) = delete;

private:
    Sgemm sgemm_;
};

}  // namespace ferry::ops
