#!/usr/bin/env python3
"""What ferry exports, transformers loads, and finds the same loss: every family, in one file and in shards, as fp32 and
as bf16. Trains each model of tests/golden/hf, exports it, and evaluates the export by both in fp32.

    python3 tests/golden/check_exports.py [build/release/ferry] [--device cuda]

Needs PyTorch and transformers. Exit code 1: a loss differs, or tensors are missing or unknown.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import types

import torch
import transformers

import make_hf_golden as hf
import make_train_golden as golden

ROOT = golden.FOLDER.parents[2]
TOKENS = golden.FOLDER / "tokens.bin"
WAYS = {"fp32": [], "shards": ["--shard-size", "20KB"], "bf16": ["--export-type", "bf16"]}
NEAR = 1e-6  # of the loss: both compute in fp32, in orders of their own


def said(*command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def of_ferry(ferry, directory, device):
    lines = said(ferry, "eval", directory, TOKENS, "--json", "--set", f"batch.sequence={golden.SEQUENCE}",
                 "--set", f"device={device}")
    return next(line["loss"] for line in lines if "loss" in line)


def of_transformers(directory, tokens, mask):
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True)
    if found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"]:
        raise ValueError(f"{directory.name}: {found}")
    model = model.eval()
    loaded = types.SimpleNamespace(initial=None, logits=lambda _, inputs: model(inputs, use_cache=False).logits)
    return hf.evaluation(loaded, tokens, mask)["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ferry", nargs="?", default="build/release/ferry")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    ferry = pathlib.Path(options.ferry).resolve()
    tokens, mask = golden.make_tokens()
    good = True
    print(f"{'':<16} {'ferry':>12} {'transformers':>12} {'apart':>8}")
    for name in hf.MODELS:
        for way, words in WAYS.items():
            with tempfile.TemporaryDirectory(prefix="ferry-export-") as folder:
                directory = pathlib.Path(folder) / f"{name}-{way}"
                said(ferry, "train", hf.FOLDER / f"{name}.json", "--json", "--no-bound", "--set",
                     f"device={options.device}", "--export", directory, *words)
                ours, theirs = of_ferry(ferry, directory, options.device), of_transformers(directory, tokens, mask)
            apart = abs(ours - theirs) / theirs
            good &= apart <= NEAR
            print(f"{name + ', ' + way:<16} {ours:>12.7f} {theirs:>12.7f} {apart:>8.1g}"
                  f"{'' if apart <= NEAR else '   DIFFERS'}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
