#!/usr/bin/env python3
"""The longest sequence of an 8 B model under 40 GiB of a GPU: ferry's, beside transformers with DeepSpeed's ZeRO-3 offload.

ferry's side is what `ferry plan --longest-sequence` says under the budgets. The other side trains a step at several
lengths with few layers, since the state of all of them does not fit the host's memory: the memory that PyTorch's tensors
take at most is a constant and, a token, a part and another for each layer (a checkpointed block input). The longest
sequence is where all layers would meet the cap; neither the CUDA context nor fragments of the allocator count, so it is
rather too long. Gradient checkpointing, SDPA, transformers' own loss.

    bench/longest_sequence.py --machine machine.json
    bench/longest_sequence.py --layers 2 6 --lengths 4096 8192 16384 --json FILE
"""
import json
import subprocess
import sys

import common
import peers
from common import judged, plain
from training import GIB

SHAPE = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336,
         "vocab": 128256, "tie_embeddings": False}
OPTIMIZER = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
TARGET = 10


def peaks(lengths, layers):
    """In a process of its own: the most bytes of tensors in a step of each length, while they fit."""
    import os
    import torch
    import deepspeed
    import deepspeed_train

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "29512"}.items():
        os.environ.setdefault(name, value)
    workload = {"model": {**SHAPE, "layers": layers}, "batch": {"sequence": max(lengths), "micro_batch": 1,
                                                                 "micro_batches": 1},
                "optimizer": OPTIMIZER, "clip_norm": 1.0, "offload": "cpu"}
    config = deepspeed_train.settings(workload)
    deepspeed.init_distributed()
    model = deepspeed_train.model_of(workload, config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for length in [min(lengths), *sorted(lengths)]:  # the first takes what later ones find there
        tokens = torch.randint(SHAPE["vocab"], (1, length), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        try:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        except torch.cuda.OutOfMemoryError:
            break
        torch.cuda.synchronize()
        print(json.dumps({"layers": layers, "tokens": length, "bytes": torch.cuda.max_memory_allocated()}), flush=True)


def measured(options):
    """Points of (layers, tokens, bytes), the warm-up of each process left out."""
    found = []
    for layers in options.layers:
        done = subprocess.run([sys.executable, __file__, "--one", str(layers), "--ferry", options.ferry, "--lengths",
                               *map(str, options.lengths)], capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"layers"')]
        if len(lines) < 3:
            sys.exit(f"{layers} layers: too few lengths fit: {done.stderr[-2000:]}")
        found += [(line["layers"], line["tokens"], line["bytes"]) for line in lines[1:]]
    return found


def longest(points, layers, cap):
    """By the least squares of bytes = constant + tokens (a + b layers)."""
    import numpy

    rows = numpy.array([[1, tokens, tokens * of] for of, tokens, _ in points], dtype=float)
    constant, token, of_layer = numpy.linalg.lstsq(rows, numpy.array([p[2] for p in points], dtype=float), rcond=None)[0]
    return (cap - constant) / (token + layers * of_layer), token + layers * of_layer


def ferrys(options, directory):
    tokens = directory / "tokens.bin"
    raw = directory / "ids.bin"
    raw.write_bytes(b"".join(int(i % 251).to_bytes(4, "little") for i in range(1 << 19)))
    common.output_of([options.ferry, "data", str(raw), "--ids", "uint32", "--vocab", str(SHAPE["vocab"]), "-o", str(tokens)])
    config = {"steps": 1, "device": "cuda", "precision": "bf16", "model": SHAPE, "data": {"tokens": str(tokens)},
              "batch": {"sequence": 32768, "micro_batch": 1, "micro_batches": 1},
              "optimizer": {**OPTIMIZER, "master": "split", "moments": "bf16"},
              "budgets": {"device": f"{options.device_gib}GiB", "host": f"{options.host_gib}GiB"}}
    file = directory / "longest.json"
    file.write_text(json.dumps(config))
    machine = ["--machine", options.machine] if options.machine else []
    plan = common.output_of([options.ferry, "plan", str(file), "--no-prediction", "--longest-sequence", "--json", *machine])
    if not plan:
        sys.exit(f"ferry plan does not say it: {options.ferry} plan {file} --longest-sequence")
    return json.loads(plan.splitlines()[0])["longest_sequence"]


def main():
    parser = common.parser_of(__doc__)
    parser.add_argument("--machine", help="file of measurements for ferry plan, where this machine has no GPU")
    parser.add_argument("--layers", type=common.at_least(1), nargs=2, default=[2, 6], help="of the other side's runs")
    parser.add_argument("--lengths", type=common.at_least(128), nargs="+", default=[4096, 8192, 16384], help="tokens")
    parser.add_argument("--device-gib", type=common.at_least(1), default=40, help="of the GPU")
    parser.add_argument("--host-gib", type=common.at_least(1), default=112, help="of the host, for ferry")
    parser.add_argument("--one", type=common.at_least(1), help="layers: only this many, in this process")
    options = parser.parse_args()
    if options.one:
        return peaks(options.lengths, options.one)
    with common.scratch() as directory:
        ours = ferrys(options, directory)
    why_not = peers.why_no_deepspeed(options)
    if why_not:
        return common.report(options, [plain("ferry: longest sequence", ours, "tokens")], [why_not])
    theirs, each = longest(measured(options), SHAPE["layers"], options.device_gib * GIB)
    common.report(options, [judged("8 B: longest sequence beside transformers + DeepSpeed ZeRO-3 offload", ours, "tokens",
                                   theirs, [ours / theirs], TARGET),
                            plain("transformers + DeepSpeed: a token, all layers", each / 1024, "KiB")],
                  [f"DeepSpeed's by runs of {options.layers[0]} and {options.layers[1]} layers"])


if __name__ == "__main__":
    main()
