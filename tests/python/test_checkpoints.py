"""What docs/checkpoints.md has people type: three lines read any tensor of a checkpoint.

Skipped where safetensors is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

import ferry_offload  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FERRY = os.environ.get("FERRY") or str(Path(ferry_offload.__file__).parent / "bin/ferry")
MODEL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "vocab": 512}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokens = folder / "tokens.bin"
    subprocess.run([FERRY, "data", ROOT / "docs/checkpoints.md", "-o", tokens], check=True, stdout=subprocess.DEVNULL)
    config = {"model": MODEL, "data": {"tokens": str(tokens), "held_back": 0}, "steps": 2, "precision": "bf16",
              "batch": {"sequence": 32, "micro_batch": 1, "micro_batches": 1}, "checkpoint": {"dir": str(folder / "saved")}}
    (folder / "my.json").write_text(json.dumps(config))
    subprocess.run([FERRY, "train", folder / "my.json", "--json", "--no-bound"], check=True, stdout=subprocess.DEVNULL)
    return folder / "saved/step-00000002"


def in_file(path, name):
    """A tensor's type, shape and bytes, by the format alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8:8 + length])[name]
    begin, end = entry["data_offsets"]
    return entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + end]


def test_three_lines_read_any_tensor(checkpoint):
    lines = re.search(r"```python\n(from safetensors.*?)```", (ROOT / "docs/checkpoints.md").read_text(), re.DOTALL).group(1)
    assert len(lines.splitlines()) == 3
    if importlib.util.find_spec("torch") is None:
        lines = lines.replace('"pt"', '"np"')
    for file, suffix in (("exp_avg", ".exp_avg"), ("exp_avg_sq", ".exp_avg_sq"), ("master", ".master")):
        said = lines.replace("/data/run7/step-00001500/exp_avg.", f"{checkpoint}/{file}.").replace(".exp_avg\"", f"{suffix}\"")
        found = {}
        exec(said, found)  # pylint: disable=exec-used
        moment = found["moment"]
        moment = moment.numpy() if hasattr(moment, "numpy") else moment
        name = f"model.layers.0.mlp.up_proj.weight{suffix}"
        assert ("F32", list(moment.shape), moment.tobytes()) == in_file(checkpoint / f"{file}.safetensors", name)
