"""ferry's peers on the workload that a configuration describes: same shape, same tokens, as many a step.

DeepSpeed is there where python3 can import it and torch; LLMQ where its program is named. Neither comes
with ferry.
"""

import importlib.util
import json
import re
import struct
import sys
from array import array
from pathlib import Path

from common import ROOT, SideFailed
from training import Child, Timing

HEADER_BYTES, LLMQ_HEADER_BYTES = 64, 1024


def tokens_of(file):
    """The tokens of a file that `ferry data` wrote, as an array of int32."""
    data = Path(file).read_bytes()
    magic, _, width, _, count, _, _ = struct.unpack("<8sIIQQQQ", data[:48])
    assert magic == b"FERRYTOK", f"{file} is no token file"
    found = array({1: "B", 2: "H", 4: "i"}[width])
    found.frombytes(data[HEADER_BYTES:HEADER_BYTES + width * count])
    return array("i", found)


def workload_of(config, tokens, layers=None):
    """Shape and batch that a configuration asks for, as the peers want them."""
    model, batch = config["model"], config["batch"]
    return {"model": {**model, "layers": layers or model["layers"]}, "batch": dict(batch),
            "optimizer": config["optimizer"], "clip_norm": config["clip_norm"], "tokens": str(tokens)}


def parameters_of(model, layers):
    """Of such a configuration's model with so many layers, llama without biases."""
    hidden, heads = model["hidden"], model["head_dim"] * (model["heads"] + model["kv_heads"])
    block = 2 * hidden * heads + 3 * hidden * model["intermediate"] + 2 * hidden
    tables = 1 if model["tie_embeddings"] else 2
    return layers * block + tables * hidden * model["vocab"] + hidden


def tokens_a_step(workload):
    batch = workload["batch"]
    return batch["sequence"] * batch["micro_batch"] * batch["micro_batches"]


# DeepSpeed

def why_no_deepspeed(options):
    if options.tiny:
        return "DeepSpeed is left out with --tiny"
    missing = [name for name in ("torch", "transformers", "deepspeed") if importlib.util.find_spec(name) is None]
    return f"DeepSpeed is not here: python3 cannot import {', '.join(missing)}" if missing else ""


def deepspeed(workload, steps, directory, offload="cpu", nvme=None, warmup=1, gpus=1):
    """ZeRO-3 with optimizer state on `offload` (cpu or nvme) and weights in host memory; every GPU has the
    workload's batch. The Timing has `bytes_moved` a step besides: what the process of the first GPU read
    from drives and wrote to them."""
    file = directory / "deepspeed.json"
    file.write_text(json.dumps({**workload, "steps": steps, "offload": offload, "nvme": str(nvme or "")}))
    timing = Timing(tokens_a_step(workload) * gpus, warmup=warmup)
    moved = []
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    with Child([sys.executable, *torchrun, str(ROOT / "bench/deepspeed_train.py"), str(file)]) as child:
        for text, at in child.lines():
            if not text.startswith('{"step"'):
                continue  # it logs to standard output too
            line = json.loads(text)
            if not timing.seconds:
                timing.startup_seconds = at - line["seconds"]
            timing.seconds.append(line["seconds"])
            timing.losses.append(line["loss"])
            moved.append(line["bytes_moved"])
        child.end()
        timing.gpu_peak, timing.host_peak = child.gpu_peak, child.host_peak
    timing.bytes_moved = sum(moved[warmup:]) / len(moved[warmup:])
    return timing


# LLMQ

def why_no_llmq(options):
    if options.tiny:
        return "LLMQ is left out with --tiny"
    return "" if options.llmq else "LLMQ is not here: name its program with --llmq"


def llmq_files(workload, directory):
    """Its configuration and token file. The llama flavour launches an empty grid: qwen2 is llama with biases."""
    model = workload["model"]
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 1, "eos_token_id": 2,
        "hidden_size": model["hidden"], "intermediate_size": model["intermediate"], "vocab_size": model["vocab"],
        "num_attention_heads": model["heads"], "num_key_value_heads": model["kv_heads"],
        "num_hidden_layers": model["layers"], "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": model["tie_embeddings"]}))
    tokens = tokens_of(workload["tokens"])
    header = struct.pack("<8s3i", b"BIN.TOK\n", 1, 4, len(tokens)).ljust(LLMQ_HEADER_BYTES, b"\0")
    (directory / "llmq.bin").write_bytes(header + tokens.tobytes())  # beside the tokens that ferry reads


OFFLOADED = ("--offload-master", "--offload-opt-m", "--offload-opt-v", "--recompute-block")


def llmq(program, workload, steps, directory, warmup=1, placed=OFFLOADED):
    """Master weights and moments in pinned host memory, blocks recomputed, or as `placed` says. It is ended after its
    last step: it would go on to evaluate and to save."""
    llmq_files(workload, directory)
    batch, optimizer = workload["batch"], workload["optimizer"]
    log = directory / "log.json"
    command = [program, f"--model={directory}", "--from-scratch", f"--train-file={directory}/llmq.bin",
               f"--eval-file={directory}/llmq.bin", f"--seq-len={batch['sequence']}", "--model-dtype=bf16",
               "--matmul-dtype=bf16", "--gpus=1", f"--steps={steps + 1}", "--eval-every-n-steps=0",
               "--ckpt-interval=0", "--log-gpu-util=0", "--opt-m-dtype=fp32", "--opt-v-dtype=fp32",
               *placed,
               f"--batch-size={batch['micro_batch']}", f"--grad-accumulation={batch['micro_batches']}",
               "--lmhead-chunks=2", f"--lr={optimizer['lr']}", f"--grad-clip={workload['clip_norm']}",
               f"--log-file={log}", f"--out-dir={directory}/out", f"--checkpoint-dir={directory}/checkpoint"]
    timing = Timing(tokens_a_step(workload), warmup=warmup)
    lines = []
    # A line is out at once on a terminal only; stdbuf asks for that here.
    with Child(["stdbuf", "-oL", *command], cwd=directory) as child:
        for text, at in child.lines():
            loss = re.search(r"\[T\] step .* loss +([0-9.]+)", text)
            if loss:
                lines.append((at, float(loss[1])))
            if len(lines) > steps:
                break  # the log has the lines of all steps before
        child.end(kill=True)
        timing.gpu_peak, timing.host_peak = child.gpu_peak, child.host_peak
        said = child.said()
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    timing.seconds = [int(ms) * 1e-3 for ms in re.findall(r'"log": "step".*"duration_ms": (\d+)', text)][:steps]
    if len(timing.seconds) < steps:
        raise SideFailed(f"LLMQ ended after {len(timing.seconds)} of {steps} steps: {said}")
    timing.losses = [loss for _, loss in lines[:steps]]
    timing.startup_seconds = lines[0][0] - timing.seconds[0]
    return timing
