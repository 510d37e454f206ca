# CUDA is used where its compiler is found. Sanitized builds go without: their host code is the
# same, and the sanitizers know nothing of the CUDA runtime's memory.
find_program(FERRY_NVCC nvcc HINTS ${CUDAToolkit_ROOT}/bin $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
set(cuda_default OFF)
if(FERRY_NVCC AND NOT FERRY_SANITIZE)
    set(cuda_default ON)
endif()
option(FERRY_CUDA "Build the CUDA kernels" ${cuda_default})
# Machine code for the GPU that is here; else for Hopper, and code from which the driver of any GPU from Ampere on
# makes its own at the first start.
set(architectures_default "80-virtual;90-real")
find_program(FERRY_NVIDIA_SMI nvidia-smi)
if(FERRY_NVIDIA_SMI)
    execute_process(COMMAND ${FERRY_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE capabilities RESULT_VARIABLE no_gpu ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
    if(NOT no_gpu AND capabilities)
        list(REMOVE_DUPLICATES capabilities)
        string(REPLACE "." "" architectures_default "${capabilities}")
    endif()
endif()
set(FERRY_CUDA_ARCHITECTURES "${architectures_default}" CACHE STRING
    "GPU architectures to compile for, such as 80;86;89;90;100;120, and 70 with CUDA 12")

if(FERRY_CUDA)
    if(FERRY_NVCC AND NOT CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_COMPILER ${FERRY_NVCC})
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${FERRY_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    # CMake 3.25 does not know that nvcc 13 has C++20.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)

    # cuDNN's attention needs cuDNN 9 and the headers of cudnn-frontend, which the Python package
    # index has (nvidia-cudnn-frontend).
    find_package(Python3 COMPONENTS Interpreter)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c "import site; print(';'.join(site.getsitepackages() + [site.getusersitepackages()]))"
                    OUTPUT_VARIABLE python_packages OUTPUT_STRIP_TRAILING_WHITESPACE)
    find_path(FERRY_CUDNN_FRONTEND cudnn_frontend.h PATHS ${python_packages} PATH_SUFFIXES include)
    find_path(FERRY_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_LIBRARY_ROOT}/include)
    find_library(FERRY_CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}
                 PATH_SUFFIXES lib lib64)
    if(FERRY_CUDNN_FRONTEND AND FERRY_CUDNN_INCLUDE AND FERRY_CUDNN_LIBRARY)
        set(cudnn_default ON)
    endif()
    option(FERRY_CUDNN "Use cuDNN's attention on GPUs" ${cudnn_default})
    message(STATUS "ferry: cuDNN's attention ${FERRY_CUDNN} (cudnn_frontend.h: ${FERRY_CUDNN_FRONTEND})")

    # Attention over lists of blocks is written in Triton, whose compiler is a wheel of the Python
    # package index (tools/install-packages.sh puts it into build/python) and needs no GPU.
    set(triton_default OFF)
    foreach(python IN ITEMS ${PROJECT_SOURCE_DIR}/build/python/bin/python ${Python3_EXECUTABLE})
        if(NOT FERRY_TRITON_PYTHON AND EXISTS ${python} AND CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
            execute_process(COMMAND ${python} -c "import triton" RESULT_VARIABLE no_triton OUTPUT_QUIET ERROR_QUIET)
            if(NOT no_triton)
                set(FERRY_TRITON_PYTHON ${python} CACHE FILEPATH "A Python that has the wheel triton")
            endif()
        endif()
    endforeach()
    if(FERRY_TRITON_PYTHON)
        set(triton_default ON)
    endif()
    option(FERRY_TRITON "Compile attention over lists of blocks for GPUs" ${triton_default})
    message(STATUS "ferry: Triton ${FERRY_TRITON} (${FERRY_TRITON_PYTHON})")

    # Ranks of several GPUs.
    find_path(FERRY_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_LIBRARY_ROOT}/include)
    find_library(FERRY_NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}
                 PATH_SUFFIXES lib lib64)
    if(FERRY_NCCL_INCLUDE AND FERRY_NCCL_LIBRARY)
        set(nccl_default ON)
    endif()
    option(FERRY_NCCL "Train on several GPUs over NCCL" ${nccl_default})
    message(STATUS "ferry: NCCL ${FERRY_NCCL} (${FERRY_NCCL_LIBRARY})")
endif()

# The warnings of the C++ sources; correct division, square root and denormals everywhere.
set(FERRY_CUDA_OPTIONS -prec-div=true -prec-sqrt=true -ftz=false
    --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Wshadow,-ffp-contract=off)
# Kernels with the CPU's bits (docs/numerics.md) must not contract a product and a sum.
set(FERRY_CUDA_EXACT src/optim/cuda/update.cu src/optim/cuda/coded.cu src/optim/cuda/norms.cu src/ops/cuda/rows/round.cu
    src/zero/cuda/encode.cu src/zero/cuda/decode.cu src/zero/cuda/sums.cu src/zero/cuda/feedback.cu)
set_source_files_properties(${FERRY_CUDA_EXACT} PROPERTIES COMPILE_OPTIONS -fmad=false)
if(FERRY_WERROR)
    list(APPEND FERRY_CUDA_OPTIONS -Werror=all-warnings -Xcompiler=-Werror)
endif()
