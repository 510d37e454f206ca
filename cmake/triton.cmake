# The images of src/ops/cuda/attention/sparse_attention.py, one source for each architecture, type and width of
# heads; and the list of their tables. Hopper's kernels are machine code, those of every other GPU
# from Ampere on are PTX. One process compiles those of an architecture: Triton starts, and takes the
# sum of its own compiler, but once.
set(kernels ${PROJECT_SOURCE_DIR}/src/ops/cuda/attention/sparse_attention.py)
set(compile ${PROJECT_SOURCE_DIR}/cmake/compile_triton.py)
set(folder ${CMAKE_BINARY_DIR}/triton)
set(declared "")
set(listed "")
foreach(architecture IN ITEMS 90 80)
    set(heads "")
    set(sources "")
    foreach(type IN ITEMS bf16 f16)
        foreach(width IN ITEMS 64 128 256)
            set(name ${architecture}_${type}_${width})
            list(APPEND heads ${type}_${width})
            list(APPEND sources ${folder}/sparse_${name}.cc)
            string(APPEND declared "extern const SparseImage kSparse_${name}[];\nextern const int kSparseCount_${name};\n")
            string(APPEND listed "    std::span(kSparse_${name}, static_cast<size_t>(kSparseCount_${name})),\n")
        endforeach()
    endforeach()
    add_custom_command(OUTPUT ${sources} DEPENDS ${kernels} ${compile}
        COMMAND ${CMAKE_COMMAND} -E env TRITON_CACHE_DIR=${folder}/cache
                ${FERRY_TRITON_PYTHON} ${compile} ${kernels} ${folder} ${architecture} ${heads}
        COMMENT "Compiling sparse_attention.py for sm_${architecture}" VERBATIM)
    target_sources(ferry_ops PRIVATE ${sources})
endforeach()
file(CONFIGURE OUTPUT ${folder}/sparse_images.cc @ONLY CONTENT [[
// Written by cmake/triton.cmake.
#include <vector>

#include "ops/cuda/attention/sparse_images.h"

namespace ferry::ops::cuda {

@declared@
std::span<const std::span<const SparseImage>> sparse_images() {
    static const std::vector<std::span<const SparseImage>> all{
@listed@    };
    return all;
}

}  // namespace ferry::ops::cuda
]])
target_sources(ferry_ops PRIVATE ${folder}/sparse_images.cc)
execute_process(COMMAND ${FERRY_TRITON_PYTHON} -c "from importlib.metadata import version; print(version('triton'))"
                OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set_source_files_properties(src/ops/cuda/attention/sparse_attention.cc src/ops/cuda/attention/no_triton.cc
                            PROPERTIES COMPILE_DEFINITIONS "FERRY_TRITON;FERRY_TRITON_VERSION=\"${version}\"")
