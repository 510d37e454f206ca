# ferry_compile_options(TARGET): warnings, errors of them where they are asked for, sanitizers.
function(ferry_compile_options target)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wnon-virtual-dtor;-ffp-contract=off;-fno-semantic-interposition>"
                           $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FERRY_WERROR}>>:-Werror>
                           "$<$<COMPILE_LANGUAGE:CUDA>:${FERRY_CUDA_OPTIONS}>")
    if(FERRY_SANITIZE)
        target_compile_options(${target} PRIVATE -fsanitize=${FERRY_SANITIZE} -fno-omit-frame-pointer -g1)
        target_link_options(${target} PRIVATE -fsanitize=${FERRY_SANITIZE})
    endif()
endfunction()

# ferry_module(NAME DIR [DEPENDS module...] [USES package...] [CUDA_USES package...]): from all of DIR
# and the rooms in it, the folders that part a large module by subject; DIR/cuda and its rooms only with CUDA.
function(ferry_module name dir)
    cmake_parse_arguments(M "" "" "DEPENDS;USES;CUDA_USES" ${ARGN})
    file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${dir}/*.cc
         ${PROJECT_SOURCE_DIR}/${dir}/*/*.cc)
    list(FILTER sources EXCLUDE REGEX "/cuda/")
    if(NOT sources OR (FERRY_ONLY_AIO AND NOT name MATCHES "^(base|aio)$"))
        return()
    endif()
    if(FERRY_CUDA)
        file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${dir}/*.cu
             ${PROJECT_SOURCE_DIR}/${dir}/cuda/*.cu ${PROJECT_SOURCE_DIR}/${dir}/cuda/*.cc
             ${PROJECT_SOURCE_DIR}/${dir}/cuda/*/*.cu ${PROJECT_SOURCE_DIR}/${dir}/cuda/*/*.cc)
        list(APPEND sources ${cuda_sources})
    endif()
    add_library(ferry_${name} STATIC ${sources})
    add_library(ferry::${name} ALIAS ferry_${name})
    # The headers that an embedder calls, then the contracts between modules.
    target_include_directories(ferry_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                               $<INSTALL_INTERFACE:include>
                               $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
                               $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
    target_compile_features(ferry_${name} PUBLIC cxx_std_20)
    # Also into shared objects: a Python extension, a plugin.
    set_target_properties(ferry_${name} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
    set_property(GLOBAL APPEND PROPERTY FERRY_MODULES ${name})
    set_property(GLOBAL PROPERTY FERRY_DIR_${name} ${dir})
    list(TRANSFORM M_DEPENDS PREPEND ferry_)
    # Headers alone are nothing to whoever links the library.
    list(TRANSFORM M_USES REPLACE "^(nlohmann_json::nlohmann_json|PkgConfig::openblas)$" "$<BUILD_INTERFACE:\\1>")
    target_link_libraries(ferry_${name} PUBLIC ${M_DEPENDS} PRIVATE ${M_USES})
    if(FERRY_CUDA AND cuda_sources)
        target_compile_definitions(ferry_${name} PRIVATE FERRY_CUDA)
        target_link_libraries(ferry_${name} PRIVATE CUDA::cudart_static ${M_CUDA_USES})
    endif()
    ferry_compile_options(ferry_${name})
endfunction()

# ferry_late_libraries(TARGET): a program that loads NVIDIA's libraries at their first call. The loader takes four
# fifths of a short run's start for them, and nothing on the CPU needs one.
function(ferry_late_libraries target)
    if(FERRY_CUDA AND TARGET ferry_capi)
        target_sources(${target} PRIVATE $<FILTER:$<TARGET_OBJECTS:ferry_capi>,INCLUDE,late_libraries>)
        target_link_options(${target} PRIVATE -Wl,--as-needed)
    endif()
endfunction()

# ferry_program(NAME DIR [DEPENDS module...] [USES package...] [SOURCES file...]): from all of DIR
# and the folders in it unless SOURCES names files.
function(ferry_program name dir)
    cmake_parse_arguments(M "" "" "DEPENDS;USES;SOURCES" ${ARGN})
    set(sources ${M_SOURCES})
    if(NOT sources)
        file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${dir}/*.cc
             ${PROJECT_SOURCE_DIR}/${dir}/*/*.cc)
    endif()
    add_executable(${name} ${sources})
    list(TRANSFORM M_DEPENDS PREPEND ferry_)
    target_link_libraries(${name} PRIVATE ${M_DEPENDS} ${M_USES})
    ferry_compile_options(${name})
endfunction()

# One test program per module, test_<module>, from tests/<kind>/<module>_*.cc; ctest labels are the
# modules. A module's tests may include the headers beside its sources. Python tests
# (tests/<kind>/*_test.py) are one ctest each.
function(ferry_tests)
    include(GoogleTest)
    get_property(modules GLOBAL PROPERTY FERRY_MODULES)
    # Shared by tests above aio and comm: a simulated disk, simulated ranks.
    if(TARGET ferry_aio)
        file(GLOB support CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/support/*.cc)
        if(FERRY_ONLY_AIO)
            list(FILTER support EXCLUDE REGEX _ranks)
        endif()
        add_library(ferry_test_support STATIC ${support})
        target_include_directories(ferry_test_support PUBLIC ${PROJECT_SOURCE_DIR})
        target_link_libraries(ferry_test_support PUBLIC ferry_aio $<TARGET_NAME_IF_EXISTS:ferry_comm>)
        ferry_compile_options(ferry_test_support)
    endif()
    foreach(module IN LISTS modules)
        file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/unit/${module}_*.cc
             ${PROJECT_SOURCE_DIR}/tests/contract/${module}_*.cc
             ${PROJECT_SOURCE_DIR}/tests/sim/${module}_*.cc
             ${PROJECT_SOURCE_DIR}/tests/golden/${module}_*.cc)
        if(sources)
            get_property(dir GLOBAL PROPERTY FERRY_DIR_${module})
            add_executable(test_${module} ${sources})
            target_link_libraries(test_${module} PRIVATE ferry_${module} GTest::gtest GTest::gmock GTest::gtest_main)
            if(module MATCHES "^(aio|comm|swap|zero|data|checkpoint|train)$")
                target_link_libraries(test_${module} PRIVATE ferry_test_support)
            endif()
            if(module STREQUAL zero)  # base/simd_dispatch.h
                target_link_libraries(test_zero PRIVATE PkgConfig::hwy)
            endif()
            target_include_directories(test_${module} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/${dir})
            # Only where it is asked for: every other object is the same in each checkout, for ccache.
            foreach(source IN LISTS sources)
                file(STRINGS ${source} asks REGEX "FERRY_SOURCE_DIR" LIMIT_COUNT 1)
                if(asks)
                    set_source_files_properties(${source} PROPERTIES
                        COMPILE_DEFINITIONS FERRY_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
                endif()
            endforeach()
            if(FERRY_CUDA)
                target_compile_definitions(test_${module} PRIVATE FERRY_CUDA)
                target_link_libraries(test_${module} PRIVATE CUDA::cudart_static)
            endif()
            if(module MATCHES "^(comm|train)$" AND FERRY_NCCL)
                target_compile_definitions(test_${module} PRIVATE FERRY_NCCL)
                target_include_directories(test_${module} SYSTEM PRIVATE ${FERRY_NCCL_INCLUDE})
                target_link_libraries(test_${module} PRIVATE ${FERRY_NCCL_LIBRARY})
            endif()
            ferry_compile_options(test_${module})
            if(module MATCHES "^(ops|model|comm|train|capi)$")
                ferry_late_libraries(test_${module})
            endif()
            target_compile_options(test_${module} PRIVATE $<$<CONFIG:Release>:-O1>)  # a third less to compile than with -O3
            gtest_discover_tests(test_${module} NO_PRETTY_VALUES TEST_FILTER "-Launched/*" DISCOVERY_TIMEOUT 60
                                 PROPERTIES LABELS ${module} TIMEOUT 600)
        endif()
    endforeach()
    # mpirun removes the directory of all its user's runs when it ends, and one that begins meanwhile fails. So every test
    # has its own. Scripts make theirs themselves.
    set(mpi_directory TMPDIR=${CMAKE_BINARY_DIR}/mpi)
    # Tests named Launched/* run on every rank that a launcher starts.
    if(FERRY_MPI AND TARGET test_comm)
        foreach(ranks RANGE 1 4)
            add_test(NAME comm_mpi_${ranks} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe
                     --bind-to none -n ${ranks} $<TARGET_FILE:test_comm> --gtest_filter=Launched/*Mpi)
            # Open MPI leaves memory behind in modules that it has unloaded.
            set_tests_properties(comm_mpi_${ranks} PROPERTIES LABELS comm TIMEOUT 300 PROCESSORS 2
                                 ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0;${mpi_directory}/comm_mpi_${ranks}")
        endforeach()
    endif()
    # Whole runs, on the ranks that a launcher starts (tests/support/run_ranks.h).
    if(FERRY_MPI AND TARGET test_train)
        # Of ranks that send momentum: three kinds by two ranks, and one, which saves and goes on, by more.
        set(momentum_2 ":kinds/OfOnebitAdam.*/0:kinds/OfZerooneAdam.Local*/0")
        foreach(ranks RANGE 2 4)
            add_test(NAME train_mpi_${ranks} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe
                     --bind-to none -n ${ranks} $<TARGET_FILE:test_train>
                     --gtest_filter=Ranks.AllSkip*:Ranks.GiveTheSameBitsAgain:numbers/*:shared/Sequences.FollowTheRunOfOne/*:golden/TorchRanks*:kinds/SavedMomentum.*/2${momentum_${ranks}})
            # Without a cost they would begin when all else has ended, since they want two of ctest's places, and run alone.
            set_tests_properties(train_mpi_${ranks} PROPERTIES LABELS script TIMEOUT 300 PROCESSORS 2 COST 100
                                 ENVIRONMENT ${mpi_directory}/train_mpi_${ranks})
        endforeach()
    endif()
    # ranks_ended_test.py preloads this into ranks.
    if(FERRY_MPI AND NOT FERRY_ONLY_AIO)
        add_library(mortal_rank MODULE ${PROJECT_SOURCE_DIR}/tests/e2e/mortal_rank.cc)
        target_compile_definitions(mortal_rank PRIVATE OMPI_SKIP_MPICXX)
        target_link_libraries(mortal_rank PRIVATE MPI::MPI_C)
        ferry_compile_options(mortal_rank)
    endif()
    # files_test.py preloads this.
    if(NOT FERRY_ONLY_AIO)
        add_library(bad_sector MODULE ${PROJECT_SOURCE_DIR}/tests/e2e/bad_sector.cc)
        target_link_libraries(bad_sector PRIVATE ${CMAKE_DL_LIBS})
        ferry_compile_options(bad_sector)
    endif()
    # libraries_refused_test.py puts this before the driver's library.
    if(FERRY_CUDA AND NOT FERRY_ONLY_AIO)
        add_library(old_driver SHARED ${PROJECT_SOURCE_DIR}/tests/e2e/old_driver.cc)
        set_target_properties(old_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1
                              LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/old_driver)
    endif()
    find_package(Python3 COMPONENTS Interpreter REQUIRED)
    file(GLOB scripts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/*/*_test.py)
    foreach(script IN LISTS scripts)
        get_filename_component(name ${script} NAME_WE)
        add_test(NAME ${name} COMMAND ${Python3_EXECUTABLE} ${script})
        # A script takes up to minutes, so all of them begin before the seconds of single tests.
        set_tests_properties(${name} PROPERTIES LABELS script TIMEOUT 1200 COST 100
            ENVIRONMENT "FERRY=$<IF:$<TARGET_EXISTS:ferry>,${CMAKE_BINARY_DIR}/ferry,>;FERRY_BUILD_DIR=${CMAKE_BINARY_DIR}")
    endforeach()
endfunction()

# fuzz_<name> for each tests/fuzz/<name>.cc, and `fuzz`: all of them. tools/fuzz.sh runs them. Only the
# readers are linked, so that nothing else need be built.
function(ferry_fuzz_targets)
    add_custom_target(fuzz)
    set(of_config config)
    set(of_model model)
    set(of_machine planner)
    set(of_safetensors checkpoint)
    set(of_index checkpoint)
    set(of_manifest checkpoint)
    set(of_checkpoint checkpoint)
    set(of_tokens data)
    set(of_volume aio)
    set(beside_machine tools/machine/machine_file.cc tools/machine/machine_entries.cc
        tools/machine/machine_gpu.cc tools/machine/measurements_of.cc tools/machine/machine_text.cc
        tools/machine/io_site.cc tools/output/writable.cc tools/bench/bench_rows.cc)
    file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*.cc)
    foreach(source IN LISTS sources)
        get_filename_component(name ${source} NAME_WE)
        ferry_program(fuzz_${name} tests/fuzz DEPENDS ${of_${name}} SOURCES ${source} ${beside_${name}})
        target_include_directories(fuzz_${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/aio)
        target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
        add_dependencies(fuzz fuzz_${name})
    endforeach()
    target_link_libraries(fuzz_machine PRIVATE ferry_topology ferry_aio nlohmann_json::nlohmann_json spdlog::spdlog)
endfunction()
