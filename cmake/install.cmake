# aio as a library of its own: `cmake --install build --component aio`. Elsewhere then
#   find_package(ferry_aio REQUIRED)
#   target_link_libraries(program ferry::aio)
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ferry_aio)
install(TARGETS ferry_base ferry_aio EXPORT ferry_aio COMPONENT aio
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT aio)
install(FILES include/ferry/error.h include/ferry/units.h include/ferry/executor.h include/ferry/streams.h
              include/ferry/aio.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ferry COMPONENT aio)
install(EXPORT ferry_aio NAMESPACE ferry:: FILE ferry_aioTargets.cmake
        DESTINATION ${package_dir} COMPONENT aio)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/ferry_aioConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES cmake/ferry_aioConfig.cmake ${CMAKE_BINARY_DIR}/ferry_aioConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT aio)
