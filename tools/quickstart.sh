#!/usr/bin/env bash
# From a fresh clone to a trained language model: installs what is missing, builds ferry, makes a
# token file of real text, trains examples/quickstart.json through three tiers, prints the result.
#
#   tools/quickstart.sh [OPTION of `ferry train`]...     such as --set steps=20, --json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac

# Progress goes to standard error: --json leaves standard output to the program.
say() { echo "== $*" >&2; }

tools/install-packages.sh build text >&2

say "building build/release/ferry"
log=$(cmake --preset release 2>&1) || {
    echo "$log" >&2
    exit 1
}
cmake --build --preset release --target ferry >&2

# The files of the packages, not of the folder: other fortunes would make another text. The names
# with a suffix are indices and links.
say "preparing the text"
mapfile -t texts < <(dpkg-query -L fortunes fortunes-min |
    grep -E '^/usr/share/games/fortunes/[^./]+$' | LC_ALL=C sort)
mkdir -p build/quickstart/nvme
build/release/ferry data "${texts[@]}" -o build/quickstart/tokens.bin >&2

say "training examples/quickstart.json"
exec build/release/ferry train examples/quickstart.json "$@"
