// OpenBLAS's kernels, by its names for them. They are chosen once, when the library is loaded at
// the first use: what OPENBLAS_CORETYPE says, else the best for this processor. Each rounds
// differently.
#pragma once

#include <string>
#include <vector>

namespace ferry::ops {

struct BlasCore {
    std::string name{};
    bool runs = false;  // this processor has the instructions of all of its kernels
};

std::string blas_core();             // those that this process runs
std::vector<BlasCore> blas_cores();  // all that OpenBLAS has for x86-64, the widest first
// library_versions() as it is with the kernels of that core.
std::string library_versions_with(const std::string& core);
// Runs these from now on. False: not here, or others are in use (CPU Ops live, or another part of
// the process loaded OpenBLAS). Not from several threads.
bool take_blas_core(const std::string& core);
// Who else than ferry chose those that this process runs; empty: nobody.
std::string blas_chosen_by();
// A note for the user where OpenBLAS's kernels are older than the processor, unless ferry chose
// them or a run is resumed with them; empty: nothing to say.
std::string slow_blas();

}  // namespace ferry::ops
