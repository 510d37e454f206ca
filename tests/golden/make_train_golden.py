#!/usr/bin/env python3
"""Writes tests/golden/train: what PyTorch makes of the runs that train_golden.cc repeats with ferry.

    python3 tests/golden/make_train_golden.py [build/release/ferry [NAME...]]

With names only these runs are written, for the tokens that are there.
Needs PyTorch and a built ferry, which writes the token file and each run's initial weights; nothing
else of ferry is used. The block is Hugging Face's Llama written out, the optimizer torch.optim.AdamW,
the clip factor clip_grad_norm_'s, the loss the sum over all real targets of the step / their count.

tokens.bin       masked text of 20 steps, made by `ferry data`
NAME.json        the run's configuration, as `ferry train` reads it
NAME.txt         for each of PyTorch's precisions, the loss and the norm before clipping of each step;
                 for each tensor how far fp32 is from fp64 (the 2-norm of the difference) in the
                 gradient of step 1 and in the weights after some steps. Hexadecimal, not rounded.
NAME.bin         fp32, tensors that train in the order of NAME.txt, for each its gradient of step 1, then
                 for each shown step how far its weights have moved since step 0; from the fp64 run
"""
import fnmatch
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

FOLDER = pathlib.Path(__file__).parent / "train"
STEPS, SEQUENCE, MICRO_BATCH, MICRO_BATCHES, VOCAB = 20, 72, 2, 3, 67

TIED = {
    "model": {"hidden": 40, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 12, "intermediate": 56,
              "vocab": VOCAB, "tie_embeddings": True},
    "data": {"tokens": "tests/golden/train/tokens.bin", "held_back": 0},
    "batch": {"sequence": SEQUENCE, "micro_batch": MICRO_BATCH, "micro_batches": MICRO_BATCHES},
    "optimizer": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.1},
    "numerics": {"head_tile": 50, "mlp_tile": 64},
    "clip_norm": 3.5, "seed": 1, "steps": STEPS, "threads": 1,
}
UNTIED = TIED | {"model": TIED["model"] | {"tie_embeddings": False, "kv_heads": 1}, "clip_norm": 3.3, "seed": 2}
FROZEN = TIED | {"freeze": ["model.embed_tokens.*", "*.0.self_attn.k_proj.*", "*.0.mlp.*",
                            "*.1.input_layernorm.weight"],
                 "model": TIED["model"] | {"tie_embeddings": False}, "clip_norm": 2.8, "seed": 3}
# Nothing below the second block trains, the shared table does not either.
UPPER = TIED | {"freeze": ["model.embed_tokens.*", "model.layers.0.*", "*.1.mlp.up_proj.*",
                           "*.1.self_attn.v_proj.*"],
                "clip_norm": 1.115, "seed": 4}
BF16 = TIED | {"precision": "bf16"}
# Blocks enough for virtual stages.
DEEP = TIED | {"model": {"hidden": 16, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 24, "vocab": VOCAB,
                         "tie_embeddings": True}, "clip_norm": 2.4, "seed": 5}
# The steps after which weights are shown.
RUNS = {"tied": (TIED, (10, 20)), "untied": (UNTIED, (20,)), "frozen": (FROZEN, (20,)),
        "upper": (UPPER, (20,)), "bf16": (BF16, ()), "deep": (DEEP, (20,))}


def make_tokens():
    """Tokens of uneven frequencies, two of them in a pattern; every stretch is masked in its own way. The
    share of the pattern and the seed are such that the norm of `tied` sinks through 3.5."""
    random = torch.Generator().manual_seed(9)
    count = STEPS * MICRO_BATCHES * MICRO_BATCH * SEQUENCE + 1
    common = 1 / torch.arange(1, VOCAB - 2).double() ** 1.3  # the last three tokens never come
    tokens = torch.multinomial(common, count, replacement=True, generator=random)
    pattern = torch.arange(count) ** 2 % 4
    tokens = torch.where(torch.rand(count, generator=random) < 0.457, pattern, tokens)
    share = torch.rand(count // SEQUENCE + 1, generator=random).repeat_interleave(SEQUENCE)[:count]
    mask = torch.rand(count, generator=random) < share * share
    mask[4 * SEQUENCE + 1:5 * SEQUENCE + 1] = True  # one sequence without a target
    return tokens, mask


def write_tokens(ferry, file):
    tokens, mask = make_tokens()
    with tempfile.TemporaryDirectory() as folder:
        text, marks = pathlib.Path(folder) / "text", pathlib.Path(folder) / "mask"
        text.write_bytes(bytes(tokens.tolist()))
        marks.write_bytes(bytes(mask.int().tolist()))
        subprocess.run([ferry, "data", text, "--mask", marks, "-o", file], check=True)
    return tokens, mask


# ---------------------------------------------------------------- what ferry's loader does

def philox(key, counter):
    """Philox4x32-10 (Salmon et al. 2011)."""
    low = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & low, (a >> 32) ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def shuffled(seed, epoch, count, index):
    """src/data/sequence_order.cc: a Feistel network, walked until it is back below the count."""
    half = ((count - 1).bit_length() + 1) // 2
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for turn in range(6):
            noise = philox([seed, 2], [epoch, 0, turn, right])[0]
            left, right = right, left ^ (noise & ((1 << half) - 1))
        index = left << half | right
        if index < count:
            return index


def micro_batches(tokens, mask, seed, step):
    """(inputs, targets) of each micro-batch of a step (from 1); a target of -1 is not real."""
    targets = torch.where(mask, -1, tokens)
    count = (len(tokens) - 1) // SEQUENCE
    for first in range((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES):
        of_run = range(first * MICRO_BATCH, (first + 1) * MICRO_BATCH)
        begins = [shuffled(seed, s // count, count, s % count) * SEQUENCE for s in of_run]
        yield (torch.stack([tokens[b:b + SEQUENCE] for b in begins]),
               torch.stack([targets[b + 1:b + 1 + SEQUENCE] for b in begins]))


# ---------------------------------------------------------------- the model

def rms_norm(x, weight, eps=1e-5):
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, theta=10000.0):
    dim, length = x.shape[-1], x.shape[-2]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype) / dim)
    angle = torch.outer(torch.arange(length, dtype=dtype), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    half = torch.cat((-x[..., dim // 2:], x[..., :dim // 2]), dim=-1)
    return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)


def attention(p, at, n, model):
    batch, length, _ = n.shape
    heads, kv_heads, dim = model["heads"], model["kv_heads"], model["head_dim"]

    def split(name, count):
        return F.linear(n, p[at + name]).view(batch, length, count, dim).transpose(1, 2)

    q, k = rotate(split("q_proj.weight", heads)), rotate(split("k_proj.weight", kv_heads))
    v = split("v_proj.weight", kv_heads)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    future = torch.full((length, length), float("-inf"), dtype=n.dtype).triu(1)
    scores = q @ k.transpose(-1, -2) * dim ** -0.5 + future
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(dim=-1, dtype=wide).to(n.dtype)
    out = (weights @ v).transpose(1, 2).reshape(batch, length, heads * dim)
    return F.linear(out, p[at + "o_proj.weight"])


def logits(p, tokens, model):
    x = F.embedding(tokens, p["model.embed_tokens.weight"])
    for i in range(model["layers"]):
        at = f"model.layers.{i}."
        x = x + attention(p, at + "self_attn.", rms_norm(x, p[at + "input_layernorm.weight"]), model)
        n = rms_norm(x, p[at + "post_attention_layernorm.weight"])
        gate, up = F.linear(n, p[at + "mlp.gate_proj.weight"]), F.linear(n, p[at + "mlp.up_proj.weight"])
        x = x + F.linear(F.silu(gate) * up, p[at + "mlp.down_proj.weight"])
    table = p["model.embed_tokens.weight" if model["tie_embeddings"] else "lm_head.weight"]
    return F.linear(rms_norm(x, p["model.norm.weight"]), table)


# ---------------------------------------------------------------- a run

def initial_weights(ferry, config):
    """What ferry starts from: a step at learning rate 0 moves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "weights"
        (pathlib.Path(folder) / "config").write_text(json.dumps(config | {"precision": "fp32"}))
        still = ["steps=1", "optimizer.lr=0", f"data.tokens={FOLDER / 'tokens.bin'}"]
        subprocess.run([ferry, "train", pathlib.Path(folder) / "config", "--no-bound", "--weights-out", path] +
                       [word for s in still for word in ("--set", s)], check=True, stdout=subprocess.DEVNULL)
        raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    weights = {}
    for name, info in json.loads(raw[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        values = torch.frombuffer(bytearray(raw[begin:end]), dtype=torch.float32)
        weights[name] = values.reshape(info["shape"])
    return weights


class Trace:
    """A run in one precision. `compute` bf16: weights and activations; master weights stay fp32."""

    def __init__(self, config, initial, tokens, mask, dtype, compute=None):
        self.config, self.compute = config, compute
        self.initial = {name: w.to(dtype) for name, w in initial.items()}
        self.p = {name: w.clone().requires_grad_(not frozen(config, name)) for name, w in self.initial.items()}
        o = config["optimizer"]
        trained = [p for p in self.p.values() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for p in trained if p.dim() > 1]},
             {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}],
            lr=o["lr"], betas=o["betas"], eps=1e-8, weight_decay=o["weight_decay"], foreach=False)
        self.trained, self.losses, self.norms, self.weights = trained, [], [], {}
        for step in range(1, config["steps"] + 1):
            self.step(list(micro_batches(tokens, mask, config["seed"], step)))
            self.weights[step] = {n: p.detach().clone() for n, p in self.p.items()}

    def logits(self, p, inputs):
        return logits(p, inputs, self.config["model"])

    def step(self, batches):
        self.optimizer.zero_grad()
        count = sum(int((targets >= 0).sum()) for _, targets in batches)
        loss = 0.0
        for inputs, targets in batches:
            p = {n: w.to(self.compute) for n, w in self.p.items()} if self.compute else self.p
            out = self.logits(p, inputs).flatten(0, 1)
            out = out.float() if self.compute else out
            part = F.cross_entropy(out, targets.flatten(), ignore_index=-1, reduction="sum")
            (part / count).backward()
            loss += part.item()
        self.losses.append(loss / count)
        if not self.norms:
            self.gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                             for n, p in self.p.items()}
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.trained, self.config["clip_norm"]).item())
        self.optimizer.step()


def frozen(config, name):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in config.get("freeze", []))


def hexadecimal(values):
    return " ".join(float(v).hex() for v in values)


def describe(name, exact, single, shown):
    """One tensor's line, and its bytes."""
    apart = [exact.gradient[name] - single.gradient[name].double()]
    apart += [exact.weights[s][name] - single.weights[s][name].double() for s in shown]
    values = [exact.gradient[name]] + [exact.weights[s][name] - exact.initial[name] for s in shown]
    is_frozen = frozen(exact.config, name)
    data = b"" if is_frozen else b"".join(v.float().numpy().tobytes() for v in values)
    return f"tensor {name} {int(is_frozen)} {hexadecimal(d.norm() for d in apart)}\n", data


def write_run(name, ferry, tokens, mask):
    config, shown = RUNS[name]
    (FOLDER / f"{name}.json").write_text(json.dumps(config, indent=2) + "\n")
    initial = initial_weights(ferry, config)
    exact = Trace(config, initial, tokens, mask, torch.float64)
    traces = {"64": exact, "32": Trace(config, initial, tokens, mask, torch.float32)}
    if config.get("precision") == "bf16":
        traces["16"] = Trace(config, initial, tokens, mask, torch.float32, torch.bfloat16)
    text = "".join(f"loss{bits} {hexadecimal(t.losses)}\nnorm{bits} {hexadecimal(t.norms)}\n"
                   for bits, t in traces.items())
    print(name, "norms", " ".join(f"{n:.3f}" for n in exact.norms))
    if shown:
        text += "shown " + " ".join(map(str, shown)) + "\n"
        parts = [describe(tensor, exact, traces["32"], shown) for tensor in initial]
        text += "".join(line for line, _ in parts)
        (FOLDER / f"{name}.bin").write_bytes(b"".join(data for _, data in parts))
    (FOLDER / f"{name}.txt").write_text(text)
    clipped = [norm > config["clip_norm"] for norm in exact.norms]
    if name == "tied" and not (all(clipped[:3]) and not any(clipped[-3:])):
        sys.exit("clipping should bind in the first steps and not in the last")
    if all(clipped) or not any(clipped):
        sys.exit(f"{name}: clipping should bind in some steps")


def main():
    torch.set_num_threads(1)
    ferry = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/release/ferry").resolve())
    FOLDER.mkdir(exist_ok=True)
    names = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        made, there = pathlib.Path(folder) / "tokens.bin", FOLDER / "tokens.bin"
        tokens, mask = write_tokens(ferry, made)
        if names and made.read_bytes() != there.read_bytes():
            sys.exit(f"this PyTorch draws other tokens than those in {there}: write all runs")
        there.write_bytes(made.read_bytes())
    for name in names or RUNS:
        write_run(name, ferry, tokens, mask)


if __name__ == "__main__":
    main()
