// OpenBLAS takes the memory it works in at its first products, a large buffer for each thread that
// multiplies at the same time, and tries for ever where there is none.
#pragma once

namespace ferry::ops {

// Makes OpenBLAS take the buffers of `threads` threads now. Throws does_not_fit where the address
// space has no room for them.
void reserve_blas_buffers(int threads);

}  // namespace ferry::ops
