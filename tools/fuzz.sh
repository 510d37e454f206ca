#!/usr/bin/env bash
# Gives the readers of files that others write (tests/fuzz) inputs that a fuzzer makes of the seeds
# in tests/fuzz/corpus. Ends at the first crash, leak or hang, and keeps its input.
#
#   tools/fuzz.sh [--runs N | --seconds N] [target...]     default: 100000 runs of each target
#
# Targets are the names of tests/fuzz/*.cc. What a campaign found is kept in build/fuzz/corpus and
# goes on from there; build/fuzz/findings has the inputs that failed: build/fuzz/fuzz_TARGET FILE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

limit=-runs=100000
targets=()
while [ $# -gt 0 ]; do
    case "$1" in
        --runs) limit=-runs=${2:?--runs wants a number}; shift ;;
        --seconds) limit=-max_total_time=${2:?--seconds wants a number}; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) usage >&2; exit 2 ;;
        *) targets+=("$1") ;;
    esac
    shift
done
if [ ${#targets[@]} -eq 0 ]; then
    for source in tests/fuzz/*.cc; do targets+=("$(basename "$source" .cc)"); done
fi

cmake --preset fuzz > /dev/null
cmake --build --preset fuzz > build/fuzz.log 2>&1 || {
    grep -vE '^\[[0-9]+/[0-9]+\]' build/fuzz.log | tail -n 100 >&2
    exit 1
}
findings=build/fuzz/findings
mkdir -p "$findings"
python3 tests/fuzz/large_seeds.py build/fuzz/large

# fuzz TARGET
fuzz() {
    local target=$1
    local found=build/fuzz/corpus/$target log=build/fuzz/$target.log
    local seeds=("tests/fuzz/corpus/$target")
    mkdir -p "$found" "build/fuzz/large/$target"
    # Large files once: as seeds they would make every input slow.
    local large=("build/fuzz/large/$target"/*)
    : > "$log"
    if [ -e "${large[0]}" ]; then
        build/fuzz/fuzz_"$target" -timeout=60 -artifact_prefix="$findings/$target-" "${large[@]}" >> "$log" 2>&1
    fi
    local dictionary=()
    case $target in config | model | machine | index | manifest | checkpoint) dictionary=(-dict=tests/fuzz/json.dict) ;; esac
    build/fuzz/fuzz_"$target" "$limit" -seed=1 -timeout=10 -max_len=8192 -print_final_stats=1 \
        -artifact_prefix="$findings/$target-" "${dictionary[@]}" "$found" "${seeds[@]}" >> "$log" 2>&1
}

# One target a core at a time: each is one thread.
report() {
    local target=$1
    if wait "$2"; then
        echo "fuzz: $target, $limit"
        grep -E "stat::(number_of_executed_units|average_exec_per_sec)" "build/fuzz/$target.log"
    else
        tail -n 60 "build/fuzz/$target.log" >&2
        echo "fuzz: $target failed; the input is in $findings" >&2
        failed=true
    fi
}
failed=false
running=()
for target in "${targets[@]}"; do
    if [ ${#running[@]} -ge "$(nproc)" ]; then
        report ${running[0]}
        running=("${running[@]:1}")
        $failed && break
    fi
    fuzz "$target" &
    running+=("$target $!")
done
for one in "${running[@]}"; do report $one; done
if $failed; then exit 1; fi
