#!/usr/bin/env bash
# Installs what is missing, builds ferry and tests it as far as this machine can.
#
#   tools/test.sh                every test and every case of it, formatting and clang-tidy; sanitizers are apart
#   tools/test.sh --quick        the same without clang-tidy and the reference, and of long lists of
#                                cases one of each kind
#   tools/test.sh --sanitizers   the address, undefined and thread sanitizers, and the fuzz targets
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

quick=false sanitizers=false
case "${1:-}" in
    "") ;;
    --quick) quick=true ;;
    --sanitizers) sanitizers=true ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

say() { echo "== [$((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))] $*"; }

# A test run says nothing about the accelerators, disks or privileges it has not got; this does.
say "machine: $(nproc) cores, $(awk '/MemTotal/{printf "%.0f GiB", $2 / 1048576}' /proc/meminfo), \
kernel $(uname -r), user $(id -un)"
packages=(build text check python)
$sanitizers && packages+=(fuzz)
tools/install-packages.sh "${packages[@]}"

# Two more than there are cores: many a test waits for a drive, a time-out or other processes. The scripts take a core for
# half of their time.
jobs=$(($(nproc) + 2))
# build PRESET [TARGET...], test PRESET [ctest option...]
build() {
    local preset=$1
    shift
    say "$preset: build"
    cmake --preset "$preset" > /dev/null
    cmake --build --preset "$preset" ${1:+--target "$@"} > "build/$preset.log" 2>&1 || {
        grep -vE '^\[[0-9]+/[0-9]+\]' "build/$preset.log" | tail -n 100 >&2
        return 1
    }
}
run_tests() {
    local preset=$1
    shift
    say "$preset: tests"
    ctest --preset "$preset" --no-tests=error --output-on-failure -j "$jobs" "$@" | awk '
        /( Passed|[*]Skipped) +[0-9.]+ sec$/ || /^ +Start +[0-9]+: / { next }
        /^The following tests did not run:$/ { next }
        /\(Skipped\)$/ { if (tolower($0) ~ /cuda|gpu/) ++gpu; else print; next }
        { print }
        END { if (gpu) print gpu " tests were skipped for want of a GPU" }'
}

if ! $sanitizers; then
    build release
    if $quick; then export FERRY_QUICK_TESTS=1; fi
    run_tests release
    if $quick; then
        say "formatting"
        tools/format.sh --check
    else
        say "formatting and clang-tidy"
        tools/format.sh --check --tidy
        say "reference of the headers and of the Python package"
        PYTHONPATH=build/release/python/site tools/reference.sh build/reference
    fi
    say "done"
    exit 0
fi

# These run tests several times slower. So the scripts, which run whole trainings, are left out, and of
# long lists of cases one of each kind is taken.
export FERRY_QUICK_TESTS=1 FERRY_SIM_SEEDS=20 FERRY_SIM_STRIDE=211
build asan-ubsan
run_tests asan-ubsan --label-exclude '^script$'

say "fuzz targets, twenty seconds each, one a core at a time"
tools/fuzz.sh --seconds 20

# Threads meet in these modules. Numbers of a run beside PyTorch's, and all bit patterns of a kernel,
# take minutes each under it and say nothing of threads. The sanitizer wants its shadow memory at
# fixed addresses, which kernels with much address randomisation take; containers may forbid to turn
# that off.
fixed_addresses=(setarch "$(uname -m)" -R)
if "${fixed_addresses[@]}" true 2> /dev/null; then
    export -f build run_tests say
    export jobs
    SECONDS=$SECONDS "${fixed_addresses[@]}" bash -euo pipefail -c '
        build tsan test_base test_topology test_device test_comm test_pinned_mem test_aio test_swap \
            test_optim test_train test_capi
        run_tests tsan --label-regex "^(base|topology|device|comm|pinned_mem|aio|swap|optim|train|capi)\$" \
            --exclude-regex "^golden/|Targets\.random_bit_patterns"'
else
    say "tsan: left out, this container does not allow fixed addresses (setarch -R)"
fi
say "done"
