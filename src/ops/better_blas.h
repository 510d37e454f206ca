// What slow_blas() (slow_paths.h) goes by.
#pragma once

#include <string>

namespace ferry::ops {

// The OPENBLAS_CORETYPE that this processor deserves, where OpenBLAS chose a lesser one by itself
// or by the environment: it is read when the library is loaded. Empty where all is well.
std::string better_blas_core();

}  // namespace ferry::ops
