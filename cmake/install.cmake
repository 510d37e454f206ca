# The files of `cmake --install`. A program elsewhere then has
#   find_package(ferry REQUIRED)              # or ferry_aio: `cmake --install build --component aio`
#   target_link_libraries(program ferry::swap ferry::optim)
# docs/embedding.md has the targets, and the same by pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake)
set(aio_headers error.h units.h executor.h streams.h aio_kinds.h aio.h user_files.h)

# ferry_package(NAME CONFIG COMPONENT): its targets, and what finds their dependencies.
function(ferry_package name config component)
    install(EXPORT ${name} NAMESPACE ferry:: FILE ${name}Targets.cmake
            DESTINATION ${package_dir}/${name} COMPONENT ${component})
    write_basic_package_version_file(${CMAKE_BINARY_DIR}/${name}ConfigVersion.cmake
                                     COMPATIBILITY SameMinorVersion)
    install(FILES ${config} ${CMAKE_BINARY_DIR}/${name}ConfigVersion.cmake
            DESTINATION ${package_dir}/${name} COMPONENT ${component})
endfunction()

# Appends the modules that MODULE links, itself first, each before what it needs.
function(ferry_modules_below module result)
    set(found ${${result}})
    list(REMOVE_ITEM found ${module})
    list(APPEND found ${module})
    get_target_property(links ferry_${module} LINK_LIBRARIES)
    foreach(link IN LISTS links)
        if(link MATCHES "^ferry_(.+)$")
            ferry_modules_below(${CMAKE_MATCH_1} found)
        endif()
    endforeach()
    set(${result} ${found} PARENT_SCOPE)
endfunction()

# The name of a CMake package in a .pc file; none where all of it is in headers.
set(pc_names "PkgConfig::uring=liburing;PkgConfig::xxhash=libxxhash;PkgConfig::hwloc=hwloc;PkgConfig::hwy=libhwy;\
spdlog::spdlog=spdlog;TBB::tbb=tbb")

# ferry_configure_pc(NAME DESCRIPTION PACKAGES LIBRARY...)
function(ferry_configure_pc name description packages)
    list(JOIN packages " " packages)
    list(JOIN ARGN " " libraries)
    string(REGEX REPLACE "[^/]+" ".." pc_up "${CMAKE_INSTALL_LIBDIR}")
    configure_file(cmake/ferry.pc.in ${CMAKE_BINARY_DIR}/${name}.pc @ONLY)
endfunction()

# ferry_pc(NAME MODULE COMPONENT): NAME.pc, for the static library of a module and those below it.
# They are static only, so that a program needs no --static to have all of them.
function(ferry_pc name module component)
    set(below)
    set(packages)
    set(system -lpthread)
    ferry_modules_below(${module} below)
    list(TRANSFORM below PREPEND -lferry_ OUTPUT_VARIABLE libraries)
    foreach(one IN LISTS below)
        get_target_property(links ferry_${one} LINK_LIBRARIES)
        foreach(link IN LISTS links)
            if(link MATCHES "^CUDA::(cudart_static|cublasLt|nvrtc)$")
                list(APPEND system -L${CUDAToolkit_LIBRARY_DIR} -l${CMAKE_MATCH_1} -ldl -lrt)
            elseif(link STREQUAL "MPI::MPI_C")
                list(APPEND system ${MPI_C_LIBRARIES})
            elseif(link STREQUAL "CUDA::cuda_driver")
                list(APPEND system ${CUDA_cuda_driver_LIBRARY})
            elseif(IS_ABSOLUTE "${link}")
                list(APPEND system ${link})
            else()
                foreach(pair IN LISTS pc_names)
                    string(REPLACE "=" ";" pair ${pair})
                    list(GET pair 0 target)
                    list(GET pair 1 package)
                    if(link STREQUAL target)
                        list(APPEND packages ${package})
                    endif()
                endforeach()
            endif()
        endforeach()
    endforeach()
    list(REMOVE_DUPLICATES packages)
    list(REMOVE_DUPLICATES system)
    ferry_configure_pc(${name} "ferry: ${module} and the modules below it, static, for C++" "${packages}"
                       ${libraries} ${system} -lstdc++)
    install(FILES ${CMAKE_BINARY_DIR}/${name}.pc
            DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT ${component})
endfunction()

# ---------------------------------------------------------------- aio, also alone

install(TARGETS ferry_base ferry_aio EXPORT ferry_aio COMPONENT aio
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT aio)
list(TRANSFORM aio_headers PREPEND include/ferry/ OUTPUT_VARIABLE aio_header_files)
install(FILES ${aio_header_files} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ferry COMPONENT aio)
ferry_package(ferry_aio cmake/ferry_aioConfig.cmake aio)
ferry_pc(ferry-aio aio aio)
if(FERRY_ONLY_AIO)
    return()
endif()

# ---------------------------------------------------------------- everything

get_property(modules GLOBAL PROPERTY FERRY_MODULES)
list(REMOVE_ITEM modules base aio capi)  # the other package's; in libferry.so
list(TRANSFORM modules PREPEND ferry_)
set_target_properties(ferry_train PROPERTIES EXPORT_NAME engine)
add_library(ferry::engine ALIAS ferry_train)
install(TARGETS ${modules} ferry ferry_c EXPORT ferry
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ferry
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ferry
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT ferry)
install(DIRECTORY include/ferry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT ferry)
configure_file(cmake/ferryConfig.cmake.in ${CMAKE_BINARY_DIR}/ferryConfig.cmake @ONLY)
ferry_package(ferry ${CMAKE_BINARY_DIR}/ferryConfig.cmake ferry)
ferry_pc(ferry-pinned-mem pinned_mem ferry)
ferry_pc(ferry-swap swap ferry)
ferry_pc(ferry-optim optim ferry)
ferry_pc(ferry-engine train ferry)
ferry_configure_pc(ferry "ferry's C ABI, shared" "" -lferry)
install(FILES ${CMAKE_BINARY_DIR}/ferry.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT ferry)
