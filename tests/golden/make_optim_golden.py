#!/usr/bin/env python3
"""Writes tests/golden/optim/*.txt: torch.optim's weights in fp32 and fp64 for the same gradients.

    python3 tests/golden/make_optim_golden.py

Needs PyTorch. Lion is not in torch.optim: its own few lines here follow algorithm 2 of Chen et al.
2023 (arXiv:2302.06675). Each file: one line of options, then "p0", the weights; "g", the gradients of
each step; after steps 1, 5 and 20 "p32" and "p64", torch's weights in both precisions. Floats are
written as C99 hexadecimal, so that nothing is rounded.
"""
import pathlib

import torch

COUNT, STEPS, SHOWN = 33, 20, (1, 5, 20)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (m * beta1 + p.grad * (1 - beta1)).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * group["lr"])
                m.mul_(beta2).add_(p.grad * (1 - beta2))


CASES = {
    "adamw": ("adamw", dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)),
    "adamw_plain": ("adamw", dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)),
    "adam_l2": ("adam", dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)),
    "sgd": ("sgd", dict(lr=0.05, weight_decay=0.01)),
    "sgd_momentum": ("sgd", dict(lr=0.05, momentum=0.9, weight_decay=0.01)),
    "sgd_nesterov": ("sgd", dict(lr=0.05, momentum=0.9, nesterov=1, weight_decay=0.01)),
    "lion": ("lion", dict(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)),
    "adagrad": ("adagrad", dict(lr=0.05, eps=1e-10, weight_decay=0.01, initial_accumulator=0.1)),
}


def optimizer(method, o, parameter):
    betas = (o.get("beta1", 0.9), o.get("beta2", 0.999))
    decay = o.get("weight_decay", 0)
    if method == "adamw":
        return torch.optim.AdamW([parameter], o["lr"], betas, o["eps"], decay, foreach=False)
    if method == "adam":
        return torch.optim.Adam([parameter], o["lr"], betas, o["eps"], decay, foreach=False)
    if method == "sgd":
        return torch.optim.SGD([parameter], o["lr"], o.get("momentum", 0), weight_decay=decay,
                               nesterov=bool(o.get("nesterov", 0)), foreach=False)
    if method == "lion":
        return Lion([parameter], o["lr"], betas, decay)
    return torch.optim.Adagrad([parameter], o["lr"], weight_decay=decay, eps=o["eps"],
                               initial_accumulator_value=o["initial_accumulator"], foreach=False)


def run(method, options, p0, gradients, dtype):
    parameter = torch.nn.Parameter(p0.to(dtype, copy=True))
    optim = optimizer(method, options, parameter)
    shown = {}
    for step, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.to(dtype)
        optim.step()
        if step in SHOWN:
            shown[step] = parameter.detach().clone()
    return shown


def hexadecimal(value):
    mantissa, exponent = float(value).hex().split("p")
    return mantissa.rstrip("0").rstrip(".") + "p" + exponent


def line(name, values):
    return name + " " + " ".join(hexadecimal(v) for v in values) + "\n"


def main():
    folder = pathlib.Path(__file__).parent / "optim"
    folder.mkdir(exist_ok=True)
    for number, (name, (method, options)) in enumerate(CASES.items()):
        random = torch.Generator().manual_seed(number)
        p0 = torch.randn(COUNT, generator=random) * 0.02
        # Gradients of several magnitudes, as layers have them; the last element never gets one.
        size = torch.logspace(-6, 1, COUNT)
        gradients = [torch.randn(COUNT, generator=random) * size for _ in range(STEPS)]
        for gradient in gradients:
            gradient[-1] = 0
        text = "options method=" + method
        text += "".join(f" {key}={value}" for key, value in options.items()) + "\n"
        text += line("p0", p0) + "".join(line("g", gradient) for gradient in gradients)
        single = run(method, options, p0, gradients, torch.float32)
        double = run(method, options, p0, gradients, torch.float64)
        for step in SHOWN:
            text += line(f"p32 {step}", single[step]) + line(f"p64 {step}", double[step])
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
