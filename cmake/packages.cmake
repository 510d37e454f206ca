# Everything comes from the distribution; tools/install-packages.sh lists the package names.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(spdlog REQUIRED)
pkg_check_modules(uring REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
if(FERRY_TESTS)
    find_package(GTest REQUIRED)
endif()
if(FERRY_ONLY_AIO)
    return()
endif()
find_package(TBB REQUIRED)
find_package(nlohmann_json 3.10 REQUIRED)
find_package(CLI11 REQUIRED)
pkg_check_modules(hwloc REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)

# OpenBLAS by its full path, as the alternatives system may point libblas elsewhere. The threaded
# build, held to one thread: the distributions' serial build has no locks and may not be called by
# several threads at once (docs/decisions/0007-openblas.md).
find_library(FERRY_OPENBLAS openblas PATH_SUFFIXES openblas-pthread NO_CACHE REQUIRED
             PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread NO_DEFAULT_PATH)
find_path(FERRY_OPENBLAS_INCLUDE openblas_config.h NO_CACHE REQUIRED
          PATHS /usr/include/${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread NO_DEFAULT_PATH)
# It is loaded when it is first used, by this path (src/ops/blas.cc), so nothing is linked.
cmake_path(GET FERRY_OPENBLAS PARENT_PATH FERRY_OPENBLAS_FOLDER)
add_library(PkgConfig::openblas INTERFACE IMPORTED)
set_target_properties(PkgConfig::openblas PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${FERRY_OPENBLAS_INCLUDE}
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")

# Ranks of several processes, where an MPI is found.
find_package(MPI COMPONENTS C QUIET)
option(FERRY_MPI "Train with several ranks over MPI" ${MPI_C_FOUND})
if(FERRY_MPI)
    find_package(MPI COMPONENTS C REQUIRED)
    message(STATUS "ferry: MPI (${MPI_C_LIBRARIES})")
endif()
