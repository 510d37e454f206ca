#!/usr/bin/env python3
"""Writes tests/golden/onebit: 100 steps of 1-bit Adam on two ranks in plain PyTorch, as train_onebit.cc repeats them.

    python3 tests/golden/make_onebit_golden.py [build/release/ferry]

Needs PyTorch and a built ferry, for the initial weights. Model, tokens and their order are make_train_golden.py's, the
warm-up's update is torch.optim.AdamW's. `Onebit.compressed` is algorithm 1 of arXiv 2102.02888, with a scale a block: each
rank's share of the momentum and its error become signs, their sum and the owner's error become signs again, and all ranks
update by those. Bias corrections go on for the first moment and end for the second one, where it stays.

run.json         the run's configuration, as `ferry train` reads it
run.txt          loss and norm of each step in PyTorch's fp64 and fp32, hexadecimal
"""
import json
import pathlib
import sys

import torch

import make_train_golden as train

FOLDER = pathlib.Path(__file__).parent / "onebit"
RANKS, FREEZE, BLOCK, UNIT = 2, 25, 64, 4096
MICRO_BATCHES = 4
CONFIG = train.UNTIED | {
    "batch": train.UNTIED["batch"] | {"micro_batches": MICRO_BATCHES},
    "optimizer": {"method": "onebit_adam", "freeze_step": FREEZE, "lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "zero": {"compress": {"block": BLOCK}},
    "clip_norm": 2.0, "steps": 100, "seed": 5,
}
BLOCK_TENSORS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


def segments(config):
    """Names of what lies together, padded to whole shards: of each layer what decays, and then what does not."""
    layers = [["model.embed_tokens.weight"]]
    for i in range(config["model"]["layers"]):
        layers.append([f"model.layers.{i}.{name}.weight" for name in BLOCK_TENSORS])
    layers.append(["lm_head.weight", "model.norm.weight"])
    for names in layers:
        for norms in (False, True):
            found = [name for name in names if ("norm" in name) == norms]
            if found:
                yield found


class Onebit(train.Trace):
    def step(self, batches):
        count = sum(int((targets >= 0).sum()) for _, targets in batches)
        each, loss, gradients = len(batches) // RANKS, 0.0, []
        for rank in range(RANKS):
            self.optimizer.zero_grad(set_to_none=False)
            for inputs, targets in batches[rank * each:(rank + 1) * each]:
                out = self.logits(self.p, inputs).flatten(0, 1)
                part = torch.nn.functional.cross_entropy(out, targets.flatten(), ignore_index=-1, reduction="sum")
                (part / count).backward()
                loss += part.item()
            gradients.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                              for name, p in self.p.items()})
        self.losses.append(loss / count)
        self.gradient = gradients[0]
        if len(self.losses) <= FREEZE:
            self.exact(gradients)
        else:
            self.compressed(gradients, len(self.losses))

    def exact(self, gradients):
        for name, p in self.p.items():
            p.grad = sum(of_rank[name] for of_rank in gradients)
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.trained, self.config["clip_norm"]).item())
        self.optimizer.step()

    def flat(self, values, names):
        joined = torch.cat([values[name].flatten() for name in names])
        return torch.nn.functional.pad(joined, (0, -len(joined) % (UNIT * RANKS)))

    def begin(self):
        moments = {name: self.optimizer.state[p] for name, p in self.p.items()}
        self.kept = []
        for names in segments(self.config):
            m = self.flat({n: moments[n]["exp_avg"] for n in names}, names)
            v = self.flat({n: moments[n]["exp_avg_sq"] for n in names}, names)
            self.kept.append(dict(names=names, m=m, v=v, owner=torch.zeros_like(m),
                                  error=[torch.zeros_like(m) for _ in range(RANKS)]))

    @staticmethod
    def signs(c):
        scale = c.view(-1, BLOCK).abs().sum(1, keepdim=True) / BLOCK
        return (torch.where(c.view(-1, BLOCK) < 0, -1.0, 1.0) * scale).flatten()

    def compressed(self, gradients, step):
        if step == FREEZE + 1:
            self.begin()
        squares = sum(g.double().pow(2).sum() for of_rank in gradients for g in of_rank.values())
        norm = (RANKS * squares).sqrt().item()
        self.norms.append(norm)
        clip = min(1.0, self.config["clip_norm"] / (norm + 1e-6))
        o = self.config["optimizer"]
        beta1, beta2 = o["betas"]
        with torch.no_grad():
            for kept in self.kept:
                there = kept["v"] != 0
                total = torch.zeros_like(kept["m"])
                for rank in range(RANKS):
                    g = self.flat(gradients[rank], kept["names"]) * clip
                    c = torch.where(there, kept["m"] * (beta1 / RANKS) + g * (1 - beta1) + kept["error"][rank], 0.0)
                    sent = self.signs(c)
                    kept["error"][rank] = torch.where(there, c - sent, 0.0)
                    total += sent
                total = torch.where(there, total + kept["owner"], 0.0)
                merged = self.signs(total)
                kept["owner"] = torch.where(there, total - merged, 0.0)
                kept["m"] = torch.where(there, merged, 0.0)
                root = (kept["v"] / (1 - beta2 ** FREEZE)).sqrt() + 1e-8
                way = kept["m"] / root * (o["lr"] / (1 - beta1 ** step))
                at = 0
                for name in kept["names"]:
                    p = self.p[name]
                    if p.dim() > 1:
                        p.mul_(1 - o["lr"] * o["weight_decay"])
                    p.sub_(way[at:at + p.numel()].view_as(p))
                    at += p.numel()


def main():
    torch.set_num_threads(1)
    ferry = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/release/ferry").resolve())
    FOLDER.mkdir(exist_ok=True)
    train.MICRO_BATCHES = 3  # of which the tokens are
    tokens, mask = train.make_tokens()
    train.MICRO_BATCHES = MICRO_BATCHES
    (FOLDER / "run.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    exact = {key: value for key, value in CONFIG.items() if key not in ("optimizer", "zero")}
    initial = train.initial_weights(ferry, exact)
    text = ""
    for bits, dtype in (("64", torch.float64), ("32", torch.float32)):
        run = Onebit(CONFIG, initial, tokens, mask, dtype)
        text += f"loss{bits} {train.hexadecimal(run.losses)}\nnorm{bits} {train.hexadecimal(run.norms)}\n"
        print(bits, "losses", " ".join(f"{x:.5f}" for x in run.losses[::9]), "norms",
              " ".join(f"{x:.3f}" for x in run.norms[::9]))
    (FOLDER / "run.txt").write_text(text)


if __name__ == "__main__":
    main()
