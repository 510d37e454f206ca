#!/usr/bin/env bash
# The GPU kernels' tests under compute-sanitizer, in sizes that it gets through in minutes: every operation,
# products and attention, cuDNN's included, and the optimizer's updates.
#
#   tools/sanitize-gpu.sh [BUILD_DIR] [TOOL...]    default: build/release, memcheck racecheck initcheck
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=${1:-build/release}
shift || true
tools=("$@")
[[ $# -gt 0 ]] || tools=(memcheck racecheck initcheck)
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
# Without the model's own sizes: they say nothing more of an address, and take most of the time.
filter='*Ops*/cuda_*:CudaOps.*:*CudnnAttention.is_near_the_oracle*:*CudnnTiles.are_near_the_oracle*:*CudaBlocks.rows_that_see_nothing*:*CudaBlocks.wide_heads*'
filter+=':-*gemm_of_a_model_s_sizes*:*norm_backward_of_many_rows*'

# Only ferry's kernels are judged. The tools take the asynchronous copies of cuDNN's kernels for races,
# and what its reductions read of its workspace for uninitialised. A kernel that is not checked for
# races costs nothing; what it wrote counts as uninitialised if initcheck did not see it.
options_of() { [[ $1 != racecheck ]] || echo "--kernel-name kernel_substring=ferry"; }
reports_by_kernel() {
    sed -nE 's/^=+ +(.* access |and .* access )?at (.*)\+0x[0-9a-f]+( in .*)?$/\2/p' "$1" | sort | uniq -c | sort -rn
}

failed=0
for tool in "${tools[@]}"; do
    start=$SECONDS outcome=clean
    log=$(mktemp)
    for program in "test_ops --gtest_filter=$filter" "test_optim --gtest_filter=CudaSmall.*"; do
        rc=0
        part=$(mktemp)
        # shellcheck disable=SC2046,SC2086
        "$sanitizer" --tool "$tool" $(options_of "$tool") --error-exitcode 99 --print-limit 0 \
            --show-backtrace no "$build"/$program > "$part" 2>&1 || rc=$?
        cat "$part" >> "$log"
        if [[ $rc -ne 0 ]] && { [[ $tool != initcheck || $rc -ne 99 ]] || reports_by_kernel "$part" | grep 'ferry::' > /dev/null; }; then
            outcome=FAILED failed=1
            tail -n 15 "$part" >&2
        fi
        rm -f "$part"
    done
    reports=$(reports_by_kernel "$log")
    [[ -z $reports ]] || { echo "$tool's reports by kernel:"; echo "$reports"; } >&2
    passed=$(grep -c '^\[       OK \]' "$log" || true)
    skipped=$(grep -cE '^\[  SKIPPED \].*\(' "$log" || true)
    printf '%-10s %-7s %4d tests, %d skipped, %d s\n' "$tool" "$outcome" "$passed" "$skipped" \
        $((SECONDS - start))
    rm -f "$log"
done
exit $failed
