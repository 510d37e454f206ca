#!/usr/bin/env python3
"""Writes tests/golden/optim_int8/*.txt: what torchao's AdamW8bit makes of the same gradients.

    python3 tests/golden/make_int8_golden.py

Needs PyTorch and torchao (made with 2.15.0 and 0.18.0, on a CPU). The update is torchao's own,
run operation by operation: torch.compile would contract some of them.

maps.txt: the shares of the 256 codes, of the map with signs and of the one without.
random.txt, real.txt: a line of options; the codes of exp_avg and exp_avg_sq after the first step, in
hexadecimal, and their blocks' scales; the weights after the last step. Floats are the hexadecimal
digits of their bits. Random gradients follow from integers (`hashed`), which optim_int8.cc repeats:
blocks of very different sizes, one of zeros, outliers at the borders. Real ones are those of a
64 x 64 matrix in a small model of the README's letters, rounded to bf16; they stand in the file,
eight steps of them, and are used in turn.
"""
import pathlib

import numpy as np
import torch
import torchao.optim.adam as adam
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

COUNT, STEPS, BLOCK = 4096, 200, 256
OPTIONS = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/golden/optim_int8"


def hashed(step):
    """COUNT floats in [-1, 1), by integers alone."""
    with np.errstate(over="ignore"):
        x = np.arange(COUNT, dtype=np.uint32) * np.uint32(0x9E3779B1)
        x += np.uint32(step) * np.uint32(0x85EBCA77)
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x2C1B3C6D)
        x ^= x >> np.uint32(12)
        x *= np.uint32(0x297A2D39)
        x ^= x >> np.uint32(15)
    return ((x >> np.uint32(8)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0 ** -23)


def random_gradient(step):
    u = hashed(step)
    g = u * u * u
    block, place = np.arange(COUNT) // BLOCK, np.arange(COUNT) % BLOCK
    g *= np.float32(2.0) ** -(2 * block).astype(np.float32)
    g[(place == 0) | (place == BLOCK - 1)] *= np.float32(64)
    g[block == 3] = 0
    return g


def real_gradients(steps):
    torch.manual_seed(1)
    text = torch.tensor(list((ROOT / "README.md").read_bytes()[:8192]))
    embed, matrix = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 64, bias=False)
    head = torch.nn.Linear(64, 256)
    model = torch.nn.Sequential(embed, matrix, torch.nn.Tanh(), head)
    gradients = []
    for step in range(steps):
        part = text[step * 1024:(step + 1) * 1024]
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(part[:-1]), part[1:]).backward()
        gradients.append(matrix.weight.grad.bfloat16().float().reshape(-1).numpy().copy())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
    return gradients


def bits(values):
    return " ".join(f"{x:08x}" for x in np.asarray(values, dtype=np.float32).view(np.uint32))


def run(gradients):
    p = torch.nn.Parameter(torch.from_numpy(hashed(0) * np.float32(0.05)))
    betas = (OPTIONS["beta1"], OPTIONS["beta2"])
    optimizer = adam.AdamW8bit([p], OPTIONS["lr"], betas, OPTIONS["eps"], OPTIONS["weight_decay"],
                               block_size=BLOCK)
    lines = [" ".join(f"{key} {value}" for key, value in OPTIONS.items()) + f" steps {STEPS}"]
    for step in range(1, STEPS + 1):
        p.grad = torch.from_numpy(gradients(step).copy())
        optimizer.step()
        if step == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[p][name]
                lines.append(f"{name} {state.codes.numpy().tobytes().hex()}")
                lines.append(f"{name}_scales {bits(state.scale.numpy())}")
    lines.append(f"p {bits(p.detach().numpy())}")
    return lines


def main():
    torch.compile = lambda function, **_: function
    FOLDER.mkdir(exist_ok=True)
    maps = [bits(get_qmap_signed()), bits(get_qmap_unsigned())]
    (FOLDER / "maps.txt").write_text("\n".join(maps) + "\n")
    (FOLDER / "random.txt").write_text("\n".join(run(random_gradient)) + "\n")
    real = real_gradients(8)
    lines = run(lambda step: real[(step - 1) % 8])
    lines += [f"g {(g.view(np.uint32) >> 16).astype('>u2').tobytes().hex()}" for g in real]
    (FOLDER / "real.txt").write_text("\n".join(lines) + "\n")


main()
