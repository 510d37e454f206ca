#!/usr/bin/env bash
# The GPU kernels' tests under compute-sanitizer, in sizes that it gets through in minutes: every operation,
# products and attention, cuDNN's included.
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
filter='*Ops*/cuda_*:CudaOps.*:*CudnnAttention.is_near_the_oracle*'
filter+=':-*gemm_of_a_model_s_sizes*'

failed=0
for tool in "${tools[@]}"; do
    start=$SECONDS
    log=$(mktemp)
    if "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 0 --show-backtrace no \
        "$build/test_ops" --gtest_filter="$filter" > "$log" 2>&1; then
        verdict=clean
    else
        verdict=FAILED failed=1
        tail -n 15 "$log" >&2
        echo "reports by kernel:" >&2
        grep -oE '(^=+ +|access )at [^+]*\+0x' "$log" | sed -E 's/^.*at //; s/\+0x$//' | sort | uniq -c | sort -rn >&2
    fi
    passed=$(grep -c '^\[       OK \]' "$log" || true)
    skipped=$(grep -cE '^\[  SKIPPED \].*\(' "$log" || true)
    printf '%-10s %-7s %4d tests, %d skipped, %d s\n' "$tool" "$verdict" "$passed" "$skipped" \
        $((SECONDS - start))
    rm -f "$log"
done
exit $failed
