#!/usr/bin/env python3
"""Draws docs/patterns/*.svg: `ferry plan --pattern-svg` of each pattern in docs/attention.md, so of the lists that kernels read.

    FERRY=build/release/ferry docs/draw_patterns.py"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy

FOLDER = Path(__file__).resolve().parent / "patterns"
sys.path.append(str(FOLDER.parent.parent / "tools"))
from write_layout import write_layout  # noqa: E402

SEQUENCE = 2048  # 32 blocks of 64
MODEL = {"hidden": 64, "layers": 1, "heads": 4, "intermediate": 64}
BLOCKS = SEQUENCE // 64
PATTERNS = {
    "dense": {"pattern": "window", "num_sliding_window_blocks": 2 * BLOCKS},  # there is no list of dense attention
    "window": {"pattern": "window", "num_sliding_window_blocks": 9},
    "fixed": {"pattern": "fixed", "num_local_blocks": 4, "num_global_blocks": 1},
    "fixed_per_head": {"pattern": "fixed", "num_local_blocks": 4, "num_global_blocks": 1,
                       "different_layout_per_head": True, "num_different_global_patterns": 4},
    "bigbird": {"pattern": "bigbird", "num_sliding_window_blocks": 7, "num_global_blocks": 2, "num_random_blocks": 2},
    "longformer": {"pattern": "longformer", "num_sliding_window_blocks": 7, "global_block_indices": [0, 12]},
    "variable": {"pattern": "variable", "local_window_blocks": [2, 4, 8], "global_block_indices": [0],
                 "num_random_blocks": 1},
    "layout": {"pattern": "layout"},
}


def every_fourth():
    """A layout that no pattern has: of the blocks before it a block sees each fourth."""
    rows, columns = numpy.indices((BLOCKS, BLOCKS))
    return (columns <= rows) & ((rows - columns) % 4 == 0)


def draw(ferry, name, attention, folder):
    if name == "layout":
        write_layout(folder / "my.layout", every_fourth(), block=64)
        attention = {**attention, "layout": str(folder / "my.layout")}
    config = {"steps": 1, "seed": 1, "model": MODEL, "attention": attention, "data": {"tokens": "no.bin"},
              "batch": {"sequence": SEQUENCE}}
    (folder / "config.json").write_text(json.dumps(config))
    picture = FOLDER / f"{name}.svg"
    subprocess.run([ferry, "plan", str(folder / "config.json"), "--no-prediction", "--pattern-svg", str(picture)],
                   check=True, stdout=subprocess.DEVNULL)
    if name == "dense":
        picture.write_text(picture.read_text().replace(">window<", ">dense<"))


def main():
    ferry = os.environ.get("FERRY", "build/release/ferry")
    with tempfile.TemporaryDirectory() as folder:
        for name, attention in PATTERNS.items():
            draw(ferry, name, attention, Path(folder))


if __name__ == "__main__":
    main()
