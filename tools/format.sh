#!/usr/bin/env bash
# Formats the C++ sources, or checks them.
#
#   tools/format.sh [--check] [--tidy] [--changed | FILE...]
#
#   --check     change nothing; fail where clang-format would
#   --tidy      then clang-tidy (tools/tidy.py); needs build/release, built
#   --changed   only what differs from the last commit; default: every file
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "format: $*" >&2
    exit 1
}

check=false tidy=false changed=false
files=()
for argument in "$@"; do
    case "$argument" in
        --check) check=true ;;
        --tidy) tidy=true ;;
        --changed) changed=true ;;
        -*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
        *) files+=("$argument") ;;
    esac
done

roots=(include src aio pinned_mem swap python tools tests bench examples)
every_file() {
    local here=()
    for root in "${roots[@]}"; do [ -d "$root" ] && here+=("$root"); done
    find "${here[@]}" -name '*.cc' -o -name '*.h' -o -name '*.cu' | LC_ALL=C sort
}
changed_files() {
    { git diff --name-only --diff-filter=d HEAD && git ls-files --others --exclude-standard; } |
        sort -u > build/changed.txt
    every_file | grep -Fxf build/changed.txt || true
}
if $changed; then
    mkdir -p build
    mapfile -t files < <(changed_files)
elif [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(every_file)
fi
[ ${#files[@]} -gt 0 ] || { echo "format: no files"; exit 0; }

if $check; then
    clang-format-14 --dry-run --Werror "${files[@]}" || fail "run tools/format.sh"
else
    clang-format-14 -i "${files[@]}"
fi
echo "format: ${#files[@]} files"
$tidy || exit 0

# Headers are checked through the sources that include them. Tests and benchmarks are left out: with
# GoogleTest's headers each takes as long as three others.
commands=build/release/compile_commands.json
[ -f "$commands" ] || fail "no $commands: run cmake --preset release"
mapfile -t sources < <(for file in "${files[@]}"; do
    # Kernels for nvcc come with options that clang does not know.
    [[ "$file" = tests/* || "$file" = bench/* || "$file" = *.cu ]] && continue
    grep -qF "$PWD/$file\"" "$commands" && echo "$file"
done || true)
[ ${#sources[@]} -gt 0 ] || { echo "tidy: no sources"; exit 0; }
tools/tidy.py "${sources[@]}"
