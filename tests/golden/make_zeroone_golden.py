#!/usr/bin/env python3
"""Writes tests/golden/zeroone: 100 steps of 0/1 Adam on two ranks in plain PyTorch, as train_zeroone.cc repeats them.

    python3 tests/golden/make_zeroone_golden.py [build/release/ferry]

Needs PyTorch and a built ferry, for the initial weights. Model, tokens and their order are make_train_golden.py's, signs
and their errors make_onebit_golden.py's. `Zeroone.step` is algorithm 1 of arXiv 2202.06009. Each rank has weights and
momentum of its own; `moved` is its buffer u. At a step of T_u ranks exchange u over their number, with errors, and the
weights of the last exchange move by what came back. A step of T_v takes in the gradient of all ranks in full, which
makes the momentum exact: no signs go with it. Decoupled decay and bias correction, which the algorithm leaves out,
are AdamW's: decay acts on the weights of the last exchange, and the second moment's correction counts its changes.

run.json         a run with local steps, as `ferry train` reads it
sharded.json     one without, which every stage takes
run.txt, sharded.txt   loss and norm of each step in PyTorch's fp64 and fp32, hexadecimal
"""
import json
import pathlib
import sys

import torch

import make_onebit_golden as onebit
import make_train_golden as train

FOLDER = pathlib.Path(__file__).parent / "zeroone"
RANKS, BLOCK = onebit.RANKS, onebit.BLOCK
ZEROONE = {"method": "zeroone_adam", "var_freeze_step": 40, "var_update_scaler": 8, "lr": 1e-3, "betas": [0.9, 0.99],
           "weight_decay": 0.1}
SHARDED = onebit.CONFIG | {"optimizer": ZEROONE, "seed": 6,
                           "schedule": {"kind": "linear", "warmup_steps": 8, "final_fraction": 0.1}}
RUN = SHARDED | {"optimizer": ZEROONE | {"local_step_scaler": 14, "local_step_clipper": 4},
                 "zero": {"stage": 0, "compress": {"block": BLOCK}}}


def changes_of_variance(o):
    """T_v: k_(j+1) - k_j = 2^floor(j / kappa), from step 1."""
    found, at, j = [], 1, 0
    while at <= o["var_freeze_step"]:
        found.append(at)
        at += 2 ** (j // o["var_update_scaler"])
        j += 1
    return found


def exchanges(o, steps):
    """T_u: after var_freeze_step the distance doubles every local_step_scaler steps."""
    found, apart, since, of_apart = [], 1, 0, 0
    for step in range(1, steps + 1):
        if step <= o["var_freeze_step"]:
            found.append(step)
            continue
        since, of_apart = since + 1, of_apart + 1
        grows = apart < o.get("local_step_clipper", 1) and of_apart == o["local_step_scaler"]
        if since == apart or grows:
            found.append(step)
            since = 0
        if grows:
            apart, of_apart = min(2 * apart, o["local_step_clipper"]), 0
    return found


class Zeroone(onebit.Onebit):
    def __init__(self, config, initial, tokens, mask, dtype):
        self.dtype = dtype
        self.changes = changes_of_variance(config["optimizer"])
        self.exchanges = exchanges(config["optimizer"], config["steps"])
        self.kept = None
        super().__init__(config, initial, tokens, mask, dtype)

    def begin(self):
        """Of each run of tensors: what all ranks have, and what each has."""
        self.kept = []
        for names in onebit.segments(self.config):
            x = self.flat({name: p.detach() for name, p in self.p.items()}, names)
            zeros = [torch.zeros_like(x) for _ in range(2 * RANKS + 3)]
            self.kept.append(dict(names=names, x=x, m=zeros[0], v=zeros[1], owner=zeros[2], error=zeros[3:3 + RANKS],
                                  moved=zeros[3 + RANKS:], alone=[zeros[0].clone() for _ in range(RANKS)],
                                  decays="norm" not in names[0]))
        self.weights_of = [{n: p.detach().clone().requires_grad_() for n, p in self.p.items()} for _ in range(RANKS)]
        self.rates, self.decay, self.counted = 0.0, 1.0, 0

    def rate(self, step):
        s, o = self.config["schedule"], self.config["optimizer"]
        if step <= s["warmup_steps"]:
            return o["lr"] * step / s["warmup_steps"]
        done, length = step - 1, self.config["steps"] - s["warmup_steps"]
        share = 1 - (self.config["steps"] - done) / length
        return o["lr"] * (1 + (s["final_fraction"] - 1) * share)

    def set_weights(self, rank, kept, values):
        at = 0
        for name in kept["names"]:
            p = self.weights_of[rank][name]
            with torch.no_grad():
                p.copy_(values[at:at + p.numel()].view_as(p))
            at += p.numel()

    def step(self, batches):
        if self.kept is None:
            self.begin()
        count = sum(int((targets >= 0).sum()) for _, targets in batches)
        each, loss, gradients = len(batches) // RANKS, 0.0, []
        for rank in range(RANKS):
            p = self.weights_of[rank]
            for w in p.values():
                w.grad = None
            for inputs, targets in batches[rank * each:(rank + 1) * each]:
                out = self.logits(p, inputs).flatten(0, 1)
                part = torch.nn.functional.cross_entropy(out, targets.flatten(), ignore_index=-1, reduction="sum")
                (part / count).backward()
                loss += part.item()
            gradients.append({n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in p.items()})
        self.losses.append(loss / count)
        self.gradient = gradients[0]
        with torch.no_grad():
            self.update(gradients, len(self.losses))

    def update(self, gradients, step):
        o = self.config["optimizer"]
        (beta1, beta2), in_full = o["betas"], step in self.changes
        if in_full:
            norm = sum((sum(g[n] for g in gradients)).double().pow(2).sum() for n in gradients[0]).sqrt().item()
        else:
            squares = sum(g.double().pow(2).sum() for of_rank in gradients for g in of_rank.values())
            norm = (RANKS * squares).sqrt().item()
        self.norms.append(norm)
        clip = min(1.0, self.config["clip_norm"] / (norm + 1e-6))
        self.counted += in_full
        rate = self.rate(step) / (1 - beta1 ** step)
        self.rates, self.decay = self.rates + rate, self.decay * (1 - self.rate(step) * o["weight_decay"])
        exchanged = in_full or step in self.exchanges
        for kept in self.kept:
            g = [self.flat(of_rank, kept["names"]) * clip for of_rank in gradients]
            if in_full:
                self.take_in(kept, sum(g), beta1, beta2)
            there = kept["v"] != 0
            root = (kept["v"] / (1 - beta2 ** self.counted)).sqrt() + 1e-8
            if not in_full:
                self.move(kept, g, beta1, rate, there)
                if exchanged:
                    self.exchange(kept, there)
            decay = self.decay if kept["decays"] else 1.0
            if exchanged:
                kept["x"] = kept["x"] * decay - kept["m"] * self.rates / root
            for rank in range(RANKS):
                alone = kept["x"] * decay - RANKS * kept["moved"][rank] / root
                self.set_weights(rank, kept, kept["x"] if exchanged else alone)
        if exchanged:
            self.rates, self.decay = 0.0, 1.0
            for kept in self.kept:
                kept["moved"] = [torch.zeros_like(u) for u in kept["moved"]]

    @staticmethod
    def take_in(kept, g, beta1, beta2):
        kept["m"] = kept["m"] * beta1 + g * (1 - beta1)
        kept["v"] = kept["v"] * beta2 + g * g * (1 - beta2)
        kept["alone"] = [kept["m"]] * RANKS

    @staticmethod
    def move(kept, g, beta1, rate, there):
        kept["alone"] = [torch.where(there, m * beta1 + RANKS * of_rank * (1 - beta1), 0.0)
                         for m, of_rank in zip(kept["alone"], g)]
        kept["moved"] = [u + m * rate / RANKS for u, m in zip(kept["moved"], kept["alone"])]

    def exchange(self, kept, there):
        total = torch.zeros_like(kept["x"])
        for rank in range(RANKS):
            c = torch.where(there, kept["moved"][rank] + kept["error"][rank], 0.0)
            sent = self.signs(c)
            kept["error"][rank] = torch.where(there, c - sent, 0.0)
            total = total + sent
        total = torch.where(there, total + kept["owner"], 0.0)
        merged = self.signs(total)
        kept["owner"] = torch.where(there, total - merged, 0.0)
        kept["m"] = torch.where(there, merged / self.rates, 0.0)
        kept["alone"] = [kept["m"]] * RANKS


def main():
    torch.set_num_threads(1)
    ferry = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/release/ferry").resolve())
    FOLDER.mkdir(exist_ok=True)
    train.MICRO_BATCHES = 3  # of which the tokens are
    tokens, mask = train.make_tokens()
    train.MICRO_BATCHES = onebit.MICRO_BATCHES
    for name, config in (("run", RUN), ("sharded", SHARDED)):
        (FOLDER / f"{name}.json").write_text(json.dumps(config, indent=2) + "\n")
        exact = {key: value for key, value in config.items() if key not in ("optimizer", "zero", "schedule")}
        initial = train.initial_weights(ferry, exact)
        text = ""
        for bits, dtype in (("64", torch.float64), ("32", torch.float32)):
            run = Zeroone(config, initial, tokens, mask, dtype)
            text += f"loss{bits} {train.hexadecimal(run.losses)}\nnorm{bits} {train.hexadecimal(run.norms)}\n"
            print(name, bits, "losses", " ".join(f"{x:.5f}" for x in run.losses[::9]), "norms",
                  " ".join(f"{x:.3f}" for x in run.norms[::9]))
        (FOLDER / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
