# The packages that the static libraries of aio and base link: liburing, xxHash, and spdlog.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(spdlog)
find_dependency(PkgConfig)
pkg_check_modules(uring REQUIRED QUIET IMPORTED_TARGET liburing)
pkg_check_modules(xxhash REQUIRED QUIET IMPORTED_TARGET libxxhash)
include(${CMAKE_CURRENT_LIST_DIR}/ferry_aioTargets.cmake)
