#!/usr/bin/env python3
"""Draws docs/patterns/*.svg: `ferry plan --pattern-svg` of each pattern in docs/attention.md, so of the lists that kernels read.

    FERRY=build/release/ferry docs/draw_patterns.py"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "patterns"
SEQUENCE = 2048  # 32 blocks of 64
MODEL = {"hidden": 64, "layers": 1, "heads": 4, "intermediate": 64}
PATTERNS = {
    "window": {"pattern": "window", "num_sliding_window_blocks": 9},
    "fixed": {"pattern": "fixed", "num_local_blocks": 4, "num_global_blocks": 1},
    "fixed_per_head": {"pattern": "fixed", "num_local_blocks": 4, "num_global_blocks": 1,
                       "different_layout_per_head": True, "num_different_global_patterns": 4},
    "bigbird": {"pattern": "bigbird", "num_sliding_window_blocks": 7, "num_global_blocks": 2, "num_random_blocks": 2},
    "longformer": {"pattern": "longformer", "num_sliding_window_blocks": 7, "global_block_indices": [0, 12]},
    "variable": {"pattern": "variable", "local_window_blocks": [2, 4, 8], "global_block_indices": [0],
                 "num_random_blocks": 1},
}


def main():
    ferry = os.environ.get("FERRY", "build/release/ferry")
    for name, attention in PATTERNS.items():
        config = {"steps": 1, "seed": 1, "model": MODEL, "attention": attention, "data": {"tokens": "no.bin"},
                  "batch": {"sequence": SEQUENCE}}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            subprocess.run([ferry, "plan", file.name, "--no-prediction", "--pattern-svg", str(FOLDER / f"{name}.svg")],
                           check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
