"""examples/embed_torch.py and stream_torch.py as they stand. Skipped where torch, transformers or accelerate is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "accelerate"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "embed_torch.py"


def test_a_trainer_with_ferrys_optimizer(storage, tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE, storage, tmp_path / "out"], capture_output=True, text=True, timeout=300,
                          check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "the loss fell" in done.stdout and "nvme_bytes=0" not in done.stdout and "updates_committed=0" not in done.stdout
    assert (tmp_path / "out" / "checkpoint-20" / "optimizer.pt").exists()


def test_it_is_a_change_of_a_dozen_lines():
    assert 5 < sum(line.rstrip().endswith("# ferry") or "# ferry clips" in line for line in EXAMPLE.read_text().splitlines()) <= 12


def test_a_decoder_that_is_streamed(storage):
    done = subprocess.run([sys.executable, EXAMPLES / "stream_torch.py", storage], capture_output=True, text=True, timeout=300,
                          check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "the loss fell" in done.stdout and "deviations=0" in done.stdout and "to_nvme=0" not in done.stdout
