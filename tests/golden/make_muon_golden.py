#!/usr/bin/env python3
"""Writes tests/golden/muon/*.txt: 50 steps of Muon in plain PyTorch, of one matrix, for the same gradients.

    python3 tests/golden/make_muon_golden.py

Needs PyTorch (made with 2.15.0, on a CPU). `steps` writes out what torch.optim.Muon does, in a precision of one's choice;
torch's own rounds to bf16 inside Newton-Schulz. Gradients follow from integers (`hashed`), which train_muon.cc repeats: what
is common to all steps, and noise.

Each file: a line of options; then for steps 1, 10 and 50 "p", the weights of the fp64 run, as the hexadecimal digits of their
bits in fp32; and "apart", how far from them (2-norm of the difference over that of the way since step 0) the weights are of
the fp32 run and of torch.optim.Muon.
"""
import math
import pathlib

import numpy as np
import torch

STEPS, SHOWN, EPS = 50, (1, 10, 50), 1e-7
FOLDER = pathlib.Path(__file__).parent / "muon"
JORDAN = (3.4445, -4.7750, 2.0315)
CASES = {
    "wide": dict(rows=24, cols=40, lr=0.02, momentum=0.95, nesterov=1, weight_decay=0.1, adjust_lr="original"),
    "tall": dict(rows=40, cols=24, lr=0.02, momentum=0.95, nesterov=1, weight_decay=0.0, adjust_lr="original"),
    "square": dict(rows=32, cols=32, lr=1e-3, momentum=0.9, nesterov=0, weight_decay=0.1, adjust_lr="match_rms_adamw"),
    "unclamped": dict(rows=17, cols=33, lr=0.01, momentum=0.95, nesterov=1, weight_decay=0.01,
                      adjust_lr="spectral_unclamped"),
}


def hashed(step, count):
    """So many floats in [-1, 1), by integers alone."""
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
        x += np.uint32(step) * np.uint32(0x85EBCA77)
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x2C1B3C6D)
        x ^= x >> np.uint32(12)
        x *= np.uint32(0x297A2D39)
        x ^= x >> np.uint32(15)
    return ((x >> np.uint32(8)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0 ** -23)


def gradient(step, case):
    count = case["rows"] * case["cols"]
    return torch.from_numpy(hashed(1000, count) * np.float32(0.5) + hashed(step, count)).reshape(case["rows"], case["cols"])


def first(case):
    return torch.from_numpy(hashed(0, case["rows"] * case["cols"]) * np.float32(0.125)).reshape(case["rows"], case["cols"])


def orthogonalised(u):
    a, b, c = JORDAN
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / x.norm().clamp(min=EPS)
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def factor(case):
    rows, cols = case["rows"], case["cols"]
    return {"original": math.sqrt(max(1, rows / cols)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
            "spectral_unclamped": math.sqrt(rows / cols)}[case["adjust_lr"]]


def steps(case, dtype):
    """The weights after each shown step."""
    p, m, found = first(case).to(dtype), torch.zeros(case["rows"], case["cols"], dtype=dtype), {}
    lr, beta = case["lr"], case["momentum"]
    for step in range(1, STEPS + 1):
        g = gradient(step, case).to(dtype)
        m = m * beta + g * (1 - beta)
        o = orthogonalised(m * beta + g * (1 - beta) if case["nesterov"] else m)
        p = p * (1 - lr * case["weight_decay"]) - o * (lr * factor(case))
        if step in SHOWN:
            found[step] = p.double()
    return found


def torch_steps(case):
    p, found = torch.nn.Parameter(first(case)), {}
    muon = torch.optim.Muon([p], lr=case["lr"], weight_decay=case["weight_decay"], momentum=case["momentum"],
                            nesterov=bool(case["nesterov"]), adjust_lr_fn=case["adjust_lr"])
    for step in range(1, STEPS + 1):
        p.grad = gradient(step, case)
        muon.step()
        if step in SHOWN:
            found[step] = p.detach().double()
    return found


def main():
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        exact, single, theirs = steps(case, torch.float64), steps(case, torch.float32), torch_steps(case)
        lines = [" ".join(f"{key} {value}" for key, value in case.items())]
        for step in SHOWN:
            way = (exact[step] - first(case).double()).norm()
            apart = [float((other[step] - exact[step]).norm() / way) for other in (single, theirs)]
            print(f"{name:10} step {step:2}: fp32 {apart[0]:.2e}, torch.optim.Muon {apart[1]:.2e}")
            bits = exact[step].float().numpy().reshape(-1).view(np.uint32)
            lines += [f"p {step} " + " ".join(f"{x:08x}" for x in bits), f"apart {step} {apart[0]:.6e} {apart[1]:.6e}"]
        (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
