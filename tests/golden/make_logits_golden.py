#!/usr/bin/env python3
"""Writes tests/golden/hf/logits.safetensors: the logits of every third token of the first sequence, as transformers'
models compute them in fp64 from the weights in tests/golden/hf, and with the config.json changed as
tests/golden/hf/variants.json says.

    python3 tests/golden/make_logits_golden.py

Needs PyTorch, transformers and safetensors.
"""
import json

import torch
import transformers
from safetensors.torch import save_file

import make_hf_golden as hf
import make_train_golden as golden

EVERY = 3


def model_of(family, changes, dtype):
    said = json.loads((hf.FOLDER / family / "config.json").read_text()) | changes
    config = transformers.AutoConfig.for_model(**said)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf.FOLDER / family, config=config, dtype=dtype,
                                                              attn_implementation="sdpa").eval()
    if dtype == torch.float64:
        hf.make_exact(model)
    return model


def main():
    torch.set_num_threads(1)
    tokens, _ = golden.make_tokens()
    variants = json.loads((hf.FOLDER / "variants.json").read_text())
    cases = {name: (name, {}) for name in hf.MODELS} | {n: (v["of"], v["changes"]) for n, v in variants.items()}
    found = {}
    for name, (family, changes) in cases.items():
        with torch.no_grad():
            exact, single = (model_of(family, changes, dtype)(tokens[None, :golden.SEQUENCE]).logits[0, ::EVERY].double()
                             for dtype in (torch.float64, torch.float32))
        print(f"{name}: fp32 is {((exact - single).abs().max() / exact.abs().max()).item():.2g} of the largest away")
        found[name] = exact.float().contiguous()
    save_file(found, hf.FOLDER / "logits.safetensors")


if __name__ == "__main__":
    main()
