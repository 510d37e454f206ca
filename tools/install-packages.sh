#!/usr/bin/env bash
# Installs what ferry needs from the distribution (Debian 12, Ubuntu 24.04), after saying what.
# Does nothing, and needs no network, when all of it is there.
#
#   tools/install-packages.sh [build] [text] [check] [fuzz] [python]     default: all
set -euo pipefail

# Packages that compile and link ferry and its unit tests.
build="g++ cmake ninja-build pkg-config python3 liburing-dev libhwloc-dev libtbb-dev libspdlog-dev
       libgtest-dev libgmock-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libhwy-dev
       libopenblas-pthread-dev libopenmpi-dev openmpi-bin"
# Plain English text for the quick start: about 2.5 MB of quotations.
text="fortunes fortunes-min"
# The fuzz targets need clang, which brings libFuzzer (tools/fuzz.sh).
fuzz="clang-16 libclang-rt-16-dev"
# tools/test.sh needs these besides. The version is part of the name: another clang-format lays the
# same code out differently, and clang-tidy needs 16 for std::source_location.
check="clang-format-14 clang-tidy-16 ccache git doxygen"
# The Python package is built and tested with these. Its build tools and its tests' packages come from
# the Python package index, into build/python.
python="python3-dev python3-venv"
wheels="nanobind==3.1.0 scikit-build-core==1.1.2 numpy pytest pdoc"

fail() {
    echo "install-packages: $*" >&2
    exit 1
}

wanted=""
for group in "${@:-all}"; do
    case "$group" in
        build) wanted+=" $build" ;;
        text) wanted+=" $text" ;;
        check) wanted+=" $check" ;;
        fuzz) wanted+=" $fuzz" ;;
        python) wanted+=" $python" ;;
        all) wanted+=" $build $text $check $fuzz $python" ;;
        *) fail "unknown group \"$group\": build, text, check, fuzz, python" ;;
    esac
done
command -v dpkg-query > /dev/null ||
    fail "this is neither Debian nor Ubuntu; install the equivalents of:" $wanted

# cuDNN's attention is compiled against headers that only the Python package index has. Without them
# the GPU runs ferry's own.
frontend=nvidia-cudnn-frontend==1.32.0
install_frontend() {
    command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || return 0
    python3 -m pip --version > /dev/null 2>&1 || return 0
    python3 -m pip show -q "${frontend%%=*}" 2> /dev/null && return 0
    echo "install-packages: will install for python3, by pip: $frontend"
    python3 -m pip install -q --no-deps --break-system-packages --root-user-action=ignore "$frontend" ||
        echo "install-packages: no $frontend; GPUs will run ferry's own attention" >&2
}
case "${*:-all}" in *build* | all) install_frontend ;; esac

# Without it the tests of the Python package are skipped.
install_wheels() {
    local venv
    venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/build/python
    [ "$(cat "$venv/wheels.txt" 2> /dev/null)" = "$wheels" ] && return 0
    echo "install-packages: will install into $venv, by pip: $wheels"
    # shellcheck disable=SC2086
    python3 -m venv --clear "$venv" && "$venv/bin/python" -m pip install -q --disable-pip-version-check $wheels &&
        echo "$wheels" > "$venv/wheels.txt" ||
        echo "install-packages: no Python package will be built and tested" >&2
}
# Attention over blocks and documents is compiled for GPUs by Triton, which needs none. Without it a
# GPU refuses both.
triton=triton==3.6.0
install_triton() {
    local venv
    venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/build/python
    command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || return 0
    [ "$("$venv/bin/python" -c 'import triton; print("triton==" + triton.__version__)' 2> /dev/null)" = "$triton" ] && return 0
    echo "install-packages: will install into $venv, by pip: $triton"
    { [ -x "$venv/bin/python" ] || python3 -m venv "$venv"; } &&
        "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "$triton" ||
        echo "install-packages: no $triton; GPUs will refuse attention over blocks and documents" >&2
}
install_rest() {
    case "${*:-all}" in *python* | all) install_wheels ;; esac
    case "${*:-all}" in *build* | all) install_triton ;; esac
}

missing=()
for package in $wanted; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    install_rest "$@"
    echo "install-packages: all packages are installed"
    exit 0
fi

echo "install-packages: will install, with what they depend on: ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo > /dev/null ||
        fail "not root and no sudo; as root, run: apt-get install ${missing[*]}"
    as_root=(sudo)
fi
# A server of another source that cannot be reached need not matter: the installation will tell.
"${as_root[@]}" apt-get update -q ||
    echo "install-packages: not every package list could be fetched; trying with what is there" >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${missing[@]}" ||
    fail "could not install: ${missing[*]}"
install_rest "$@"
