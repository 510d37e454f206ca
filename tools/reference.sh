#!/usr/bin/env bash
# Writes the reference of the C and C++ headers (Doxygen) and of the Python package (pdoc) as HTML. A
# warning of either is an error.
#
#   tools/reference.sh DIR        DIR/c and DIR/python
#
# PYTHON, by default build/python/bin/python, has pdoc; with PYTHONPATH it finds ferry_offload. Where
# it has torch too, ferry_offload.torch and ferry_offload.deepspeed are written.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{ cat tools/Doxyfile; echo "OUTPUT_DIRECTORY = $out"; echo "HTML_OUTPUT = c"; } | doxygen -

# A module that cannot be read is a warning of pdoc's.
"${PYTHON:-build/python/bin/python}" -W error - "$out/python" << 'END'
import contextlib
import importlib.util
import pathlib
import sys
import warnings

has_torch = importlib.util.find_spec("torch") is not None
if has_torch:
    with warnings.catch_warnings():  # torch's own
        warnings.simplefilter("ignore")
        import torch  # noqa: F401

import pdoc

more = ["ferry_offload.torch", "ferry_offload.deepspeed"] if has_torch else []
pdoc.pdoc("ferry_offload", *more, output_directory=pathlib.Path(sys.argv[1]))
END
echo "reference: $out/c/index.html, $out/python/index.html"
