#!/usr/bin/env python3
"""How fast a large Hugging Face directory is loaded, and how much host memory that takes beside the plan's.

Writes a directory of random bf16 weights in shards (by default the shape of a 3 B qwen2), has `ferry eval` and
`ferry train` load it, and reads the bytes a second from what ferry logs and the memory from /proc. The limit is
8 GiB beyond the plan and what an empty run on the same device holds, and no more than a quarter of the weights,
as a loader that held all of a small model would keep to the 8 GiB.

    bench/load_model.py --dir DIR [--device cuda] [--budget 20GiB] [--host 48GiB] [--layers 36] [--json FILE] [--keep]

Needs numpy and a built ferry, and room for the weights in DIR. Exit code 1: over the limit. Each way is loaded once
with the files out of the page cache, as far as the system lets go of them, and once more: there are no --rounds and
no --seconds, no --tiny but for --layers and --vocab, and no --set.
"""
import argparse
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import common
import needs
from common import compared, plain

TINY = common.ROOT / "tests" / "golden" / "hf" / "llama"
SHAPE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 36,
         "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936,
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
         "hidden_act": "silu", "initializer_range": 0.02, "dtype": "bfloat16"}
GIB = 1 << 30
LIMIT = 8 * GIB
SHARD = 5_000_000_000


def tensors_of(shape):
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    key = head * shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, outputs in (("q", hidden), ("k", key), ("v", key)):
            yield f"{at}self_attn.{name}_proj.weight", (outputs, hidden)
            yield f"{at}self_attn.{name}_proj.bias", (outputs,)
        yield f"{at}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}mlp.up_proj.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def bytes_of(extent):
    return 2 * math.prod(extent)


def shards_of(tensors):
    shard, size = [], 0
    for tensor in tensors:
        if shard and size + bytes_of(tensor[1]) > SHARD:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += bytes_of(tensor[1])
    yield shard


def write_tensor(file, name, extent, noise):
    count = math.prod(extent)
    if name.endswith("norm.weight"):
        return file.write(b"\x80\x3f" * count)  # ones
    for begin in range(0, count, len(noise)):
        file.write(noise[:min(len(noise), count - begin)].tobytes())
    return None


def write_model(directory, shape):
    """Weights of the family's deviation, the same 64 MiB of noise again and again."""
    import numpy as np

    directory.mkdir(parents=True)
    wide = np.random.default_rng(1).normal(0, shape["initializer_range"], 1 << 25).astype(np.float32)
    noise = (wide.view(np.uint32) >> 16).astype(np.uint16)
    shards, files = list(shards_of(tensors_of(shape))), {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for tensor, extent in shard:
            header[tensor] = {"dtype": "BF16", "shape": extent, "data_offsets": [at, at + bytes_of(extent)]}
            at += bytes_of(extent)
            files[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor, extent in shard:
                write_tensor(file, tensor, extent, noise)
            file.flush()
            os.fsync(file.fileno())
    total = sum(bytes_of(extent) for _, extent in tensors_of(shape))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    (directory / "config.json").write_text(json.dumps(shape, indent=2))
    return total


def forget(directory):
    """Takes the files out of the page cache, where the system does as it is asked."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory_of(pid):
    """Bytes of a process that are no file's pages."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(n) for n in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", status, re.M))


def run(command):
    """What ferry printed and logged, and the most memory that it held."""
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=log)
        most = 0
        while process.poll() is None:
            most = max(most, memory_of(process.pid))
            time.sleep(0.02)
        out.seek(0)
        log.seek(0)
        text = log.read()
        if process.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: exit code {process.returncode}\n{text}")
        return [json.loads(line) for line in out.read().splitlines()], text, most


def plan_of(lines):
    """Bytes of the plan's tiers, wherever the lines have them."""
    for line in reversed(lines):
        line = line.get("summary", line)
        if "host_bytes" in line:
            return line["host_bytes"], line["device_bytes"]
    sys.exit("ferry said nothing of its plan")


def measure(command, device, baseline):
    lines, log, most = run(command)
    host, on_device = plan_of(lines)
    planned = host + (on_device if device == "cpu" else 0)
    beyond = most - planned - baseline
    loaded = re.search(r"to their tiers in ([\d.]+) s, ([\d.]+) GB/s", log)
    found = {"planned": planned, "peak": most, "beyond": beyond, "allowed": planned + baseline}
    if loaded:
        found |= {"seconds": float(loaded[1]), "gb_per_s": float(loaded[2])}
    return found


def rows_of(name, found, limit):
    rows = []
    if "seconds" in found:
        rows += [plain(f"{name}: loaded in", found["seconds"], "s"),
                 plain(f"{name}: loaded at", found["gb_per_s"], "GB/s")]
    return [*rows, compared(f"{name}: host peak beside plan, empty run and limit", [found["peak"] / GIB],
                            [(found["allowed"] + limit) / GIB], "GiB", 1,
                            note=f"{found['planned'] / GIB:.4g} GiB planned, {found['beyond'] / GIB:.3f} beyond")]


def commands(ferry, model, tokens, settings, sequence, folder):
    words = [word for s in settings for word in ("--set", s)]
    config = folder / f"train-{model.name}.json"
    config.write_text(json.dumps({
        "model": {"path": str(model)}, "steps": 2,
        "data": {"tokens": str(tokens), "held_back": 0, "small_vocabulary": "ignore"},
        "batch": {"sequence": sequence, "micro_batch": 1, "micro_batches": 1}, "evaluate": {"micro_batches": 0},
        "optimizer": {"lr": 1e-5}}))
    return {"eval": [ferry, "eval", model, tokens, "--json", "--set", f"batch.sequence={sequence}",
                     "--set", "data.small_vocabulary=ignore", *words],
            "train": [ferry, "train", config, "--json", "--no-bound", *words]}


def options_of():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.HelpFormatter)
    parser.add_argument("--ferry", type=common.program, default=str(common.ROOT / "build/release/ferry"),
                        help="the built program")
    parser.add_argument("--dir", required=True, type=needs.directory, help="a directory on the drive to load from")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--budget", default="20GiB", help="budgets.device")
    parser.add_argument("--host", default="unlimited", help="budgets.host")
    parser.add_argument("--layers", type=common.at_least(1), default=SHAPE["num_hidden_layers"], help="of the model")
    parser.add_argument("--vocab", type=common.at_least(1), default=SHAPE["vocab_size"], help="tokens that it knows")
    parser.add_argument("--sequence", type=common.at_least(1), default=512, help="tokens of a sequence")
    common.add_json_option(parser)
    parser.add_argument("--keep", action="store_true", help="leave the weights there, and use those that are there")
    return parser.parse_args()


def measure_all(options, model):
    """What each way gave, from the drive and again."""
    settings = [f"device={options.device}", "precision=bf16", f"budgets.host={options.host}"]
    found = {}
    with common.scratch() as folder:
        (folder / "text").write_bytes(bytes(i * i % 61 for i in range(4 * options.sequence + 1)))
        tokens = folder / "tokens.bin"
        subprocess.run([options.ferry, "data", folder / "text", "-o", tokens], check=True, stdout=subprocess.DEVNULL)
        tiny = commands(options.ferry, TINY, tokens, settings, 64, folder)
        large = commands(options.ferry, model, tokens, settings + [f"budgets.device={options.budget}"],
                         options.sequence, folder)
        for name, command in large.items():
            baseline = measure(tiny[name], options.device, 0)["beyond"]
            forget(model)
            for when in ("from the drive", "again"):
                found[f"{name}, {when}"] = measure(command, options.device, baseline)
    return found


def main():
    options = options_of()
    needs.packages("numpy")
    shape = SHAPE | {"num_hidden_layers": options.layers, "vocab_size": options.vocab}
    model = pathlib.Path(options.dir) / f"random-{options.layers}x{options.vocab}"
    tensors = list(tensors_of(shape))
    total = sum(bytes_of(extent) for _, extent in tensors)
    if not model.exists():
        needs.room(options.dir, total)
        write_model(model, shape)
    found = measure_all(options, model)
    if not options.keep:
        shutil.rmtree(model)
    limit = min(LIMIT, total // 4)
    common.report(options, [row for name, one in found.items() for row in rows_of(name, one, limit)],
                  [f"{total / 1e9:.2f} GB of bf16 weights, {len(tensors)} tensors, device {options.device}; "
                   f"limit beyond the plan {limit / GIB:.2f} GiB"])
    return 0 if all(one["beyond"] <= limit for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
