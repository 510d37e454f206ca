#!/usr/bin/env python3
"""The GPU's own work: five models with everything in its memory, beside transformers eager and compiled.

Same shape, same number of random tokens, random weights. ferry keeps master weights and moments in fp32 where the
GPU holds them; transformers has bf16 weights, fused AdamW on them, SDPA, and checkpointing only where a step does
not fit without. Its models are built and compiled ahead, side by side; what is measured then runs alone. Model FLOPs
count no recomputation and the causal half of attention; MFU is their rate over that of one bf16 product of 8,192
cubed, measured by ferry in the same run.

    bench/compute.py                                  all of them
    bench/compute.py --shapes 1b 0.5b --peers eager   some
    bench/compute.py --profile                        and what the kernels of each side take, by their kind
    bench/compute.py --llmq PROGRAM                   and the 3 B with four micro-batches, beside LLMQ on the GPU
    bench/compute.py --shapes 3b --only-large-step    the 3 B with four micro-batches alone: 65,536 tokens a step

With the 3 B among --shapes, its step of 65,536 tokens is measured too: ferry alone where LLMQ is not named.
"""
import array
import contextlib
import functools
import importlib.util
import json
import os
import queue
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time

import common
import peers as others
from common import SideFailed, compared, judged, plain
from training import GIB, NEVER_CLIPPED, GpuWatch, Timing, train

CHILD = common.ROOT / "bench/transformers_train.py"
PEERS = ("eager", "compiled")
ALL_PEERS = (*PEERS, "layers")  # compiled one by one: minutes less, where the whole takes too long
BESIDE = 1.10  # of the best of transformers
BESIDE_LLMQ = 1.0
BESIDE_LLMQ_SHAPE, MICRO_BATCHES = "3b", 4


def llama(hidden, layers, heads, kv_heads, head, inner, vocab, kind="llama", **more):
    name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return {"architectures": [name], "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head,
            "intermediate_size": inner, "vocab_size": vocab, "tie_word_embeddings": True, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 32768, "bos_token_id": 1,
            "eos_token_id": 2, "torch_dtype": "bfloat16", **more}


# By name: config.json, sequences and tokens of a step, the MFU wanted.
SHAPES = {
    "3b": (llama(3072, 28, 24, 8, 128, 8192, 32000), 8, 2048, 0.70),
    "1b": (llama(2048, 16, 32, 8, 64, 8192, 128256), 8, 4096, 0.55),
    "4b": (llama(2560, 36, 32, 8, 128, 9728, 151936, "qwen3"), 2, 8192, 0.62),
    "4b-2k": (llama(2560, 36, 32, 8, 128, 9728, 151936, "qwen3"), 8, 2048, 0.70),
    "0.5b": (llama(896, 24, 14, 2, 64, 4864, 151936, "qwen2"), 8, 2048, 0.55),
    "gpt2-xl": ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1600, "n_layer": 48,
                 "n_head": 25, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257, "n_inner": None,
                 "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                 "attn_pdrop": 0.0, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
                 "torch_dtype": "bfloat16"}, 16, 1024, 0.55)}
WANTED = ("3b", "1b", "4b", "0.5b", "gpt2-xl")  # of the table; 4b-2k for its MFU alone
TINY = {name: ({**config, **({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512} if "n_embd" in config else
                             {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160, "vocab_size": 512})},
               2, 64, mfu) for name, (config, _, _, mfu) in SHAPES.items()}


def flops_a_token(config, sequence):
    """Forward and backward: products of the blocks and the head, and the scores that a token sees on average."""
    if config["model_type"] == "gpt2":
        hidden, layers = config["n_embd"], config["n_layer"]
        width, block = hidden, 12 * hidden * hidden
    else:
        hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        width, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        block = 2 * hidden * (width + keys) + 3 * hidden * config["intermediate_size"]
    return 6 * (layers * block + hidden * config["vocab_size"]) + 6 * layers * width * (sequence + 1)


class Shape:
    """A model, its batch, and the files that all sides read."""

    def __init__(self, options, name, directory, micro_batches=1):
        self.name, self.options, self.micro_batches = name, options, micro_batches
        self.model, self.sequences, self.sequence, self.mfu = (TINY if options.tiny else SHAPES)[name]
        if micro_batches > 1:
            self.name = f"{name}, {micro_batches} micro-batches"
        self.directory = directory / f"{name}-{micro_batches}"
        self.directory.mkdir()
        (self.directory / "config.json").write_text(json.dumps(self.model))
        self.config = self.directory / "ferry.json"
        self.config.write_text(json.dumps({
            "model": {"path": str(self.directory), "load": False}, "data": {"tokens": self._tokens()},
            "batch": {"sequence": self.sequence, "micro_batch": self.sequences,
                      "micro_batches": micro_batches},
            "precision": "bf16", "device": "cpu" if options.tiny else "cuda", "steps": options.steps,
            "optimizer": {"weight_decay": 0.1, "betas": [0.9, 0.95]}, "budgets": {"host": options.host}}))
        self.peers = None  # transformers' process

    def _tokens(self):
        count = self.tokens * (self.options.steps + 2) * 2
        draw = random.Random(1)
        ids = array.array("I", (draw.randrange(self.model["vocab_size"]) for _ in range(count)))
        (self.directory / "ids.bin").write_bytes(ids.tobytes())
        tokens = str(self.directory / "tokens.bin")
        subprocess.run([self.options.ferry, "data", str(self.directory / "ids.bin"), "-o", tokens, "--ids", "uint32",
                        "--vocab", str(self.model["vocab_size"])], check=True, stdout=subprocess.DEVNULL)
        return tokens

    @property
    def tokens(self):
        return self.sequences * self.sequence * self.micro_batches

    def flops(self):
        return self.tokens * flops_a_token(self.model, self.sequence)

    def llmq(self):
        """LLMQ with nothing in the host's memory."""
        model = self.model
        workload = {"model": {"hidden": model["hidden_size"], "layers": model["num_hidden_layers"],
                              "heads": model["num_attention_heads"], "kv_heads": model["num_key_value_heads"],
                              "intermediate": model["intermediate_size"], "vocab": model["vocab_size"],
                              "tie_embeddings": model["tie_word_embeddings"]},
                    "batch": {"sequence": self.sequence, "micro_batch": self.sequences,
                              "micro_batches": self.micro_batches},
                    "optimizer": {"lr": 1e-5}, "clip_norm": 1e6, "tokens": str(self.directory / "tokens.bin")}
        directory = self.directory / "llmq"
        directory.mkdir(exist_ok=True)
        return others.llmq(self.options.llmq, workload, self.options.steps, directory, warmup=self.options.warmup,
                           placed=self.options.llmq_options)

    def ferry(self):
        return train(self.options, self.config, NEVER_CLIPPED, warmup=self.options.warmup, bound=False)


class Peers:
    """transformers' process of one shape: it begins to build and compile its model at once; run() then has it train."""

    def __init__(self, shape, sides, gate, threads):
        self.shape, self.checkpointed, self._failures = shape, {}, {}  # by side; of the compiler
        self.kernels = {}  # by side: a step's seconds by kind, of the last round
        self._lines = queue.Queue()
        workload = shape.directory / "peer.json"
        workload.write_text(json.dumps({"model": str(shape.directory), "sequences": shape.sequences, "gate": str(gate),
                                        "sequence": shape.sequence, "steps": shape.options.steps, "sides": sides,
                                        "profile": shape.options.profile,
                                        "device": "cpu" if shape.options.tiny else "cuda"}))
        self._said = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen([sys.executable, str(CHILD), str(workload)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self._said, text=True,
                                        env={"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for text in self.process.stdout:
            if text.startswith("{"):
                self._lines.put(json.loads(text))
        self._lines.put(None)

    def _line(self, until):
        """The next line of its output. `until`: of time.monotonic()."""
        try:
            line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            self.end()
            raise SideFailed(f"{self.shape.name}: transformers took too long") from None
        if line is None:
            self._lines.put(None)  # for whoever asks next
            self._said.seek(0)
            raise SideFailed(f"{self.shape.name}: transformers ended: {self._said.read()[-2000:].strip()}")
        return line

    def wait_until_ready(self, until):
        line = self._line(until)
        self._failures = line["failures"]
        print(f"{self.shape.name}: transformers is ready after {line['ready']:.0f} s {self._failures or ''}",
              file=sys.stderr, flush=True)

    def run(self, side):
        if side in self._failures:
            raise SideFailed(f"{self.shape.name}: torch.compile: {self._failures[side]}")
        timing = Timing(self.shape.tokens, warmup=self.shape.options.warmup)
        until = time.monotonic() + self.shape.options.side_seconds
        with GpuWatch() as watch:
            if self.process.poll() is None:
                print(side, file=self.process.stdin, flush=True)
            while "end" not in (line := self._line(until)):
                timing.seconds.append(line["seconds"])
                print(f"{side}: step {line['step']}: {line['seconds']:.3g} s", file=sys.stderr, flush=True)
        self.checkpointed[side], self.kernels[side] = line["checkpointing"], line["kernels"]
        timing.gpu_peak = watch.peak
        return timing

    def end(self):
        self.process.kill()
        self.process.wait()


@functools.cache
def bench_kernels(shape):
    """The rows of `ferry bench kernels` by their names, measured once a shape."""
    done = subprocess.run([shape.options.ferry, "bench", "kernels", "--config", str(shape.config), "--rounds", "1",
                           "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


def peak_of(shape):
    """FLOPs a second of one large product."""
    return bench_kernels(shape)["peak: a large product"]["value"] * 1e12


# What torch's profiler sees as transformers' kernels, by what `ferry bench kernels` calls its own.
KINDS = {"products": "products", "attention": "attention", "rows and everything else": "rows",
         "updates of the state": "updates"}


def profile_rows(shape):
    """A step's kernels by their kind: ferry's by `ferry bench kernels`, transformers' by torch's profiler."""
    measured, rows = bench_kernels(shape), []
    for ours, theirs in KINDS.items():
        row = measured.get(f"total: {ours}")
        if row is None:
            continue
        seconds = row["value"] * 1e-3
        rows.append(plain(f"{shape.name}, ferry: {ours}", seconds, "s"))
        rows += [compared(f"{shape.name}: {ours}, beside {peer}", [seconds], [kernels[theirs]], "s")
                 for peer, kernels in (shape.peers.kernels if shape.peers else {}).items() if kernels.get(theirs)]
    return rows


def why_no_peers(options):
    if options.tiny and options.peers is None:
        return "transformers is left out with --tiny"
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"transformers is not here: python3 cannot import {', '.join(missing)}" if missing else ""


def rows_of(shape, runs, peak):
    rows = []
    for name, of_side in runs.items():
        rates = [run.tokens_per_second for run in of_side]
        mfus = [shape.flops() / run.step_seconds / peak for run in of_side]
        note = "with checkpointing" if shape.peers and shape.peers.checkpointed.get(name) else ""
        rows.append(plain(f"{shape.name}, {name}: a step", [run.step_seconds for run in of_side], "s", note=note))
        rows.append(judged(f"{shape.name}, {name}: tokens a second, MFU", sum(rates) / len(rates), "1/s", None, mfus,
                           shape.mfu if name == "ferry" else None))
        if all(run.gpu_peak for run in of_side):
            rows.append(plain(f"{shape.name}, {name}: GPU peak", [run.gpu_peak / GIB for run in of_side], "GiB"))
    peers = [name for name in runs if name != "ferry"]
    if "ferry" not in runs or not peers:
        return rows
    ours = [run.step_seconds for run in runs["ferry"]]
    for peer in peers:
        rows.append(compared(f"{shape.name}: a step, beside {peer}", ours, [run.step_seconds for run in runs[peer]], "s"))
    best = [min(runs[peer][i].step_seconds for peer in peers) for i in range(len(ours))]
    rows.append(compared(f"{shape.name}: a step, beside the best", ours, best, "s", BESIDE))
    return rows


def main():
    parser = common.parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(WANTED), help="models of the table")
    parser.add_argument("--peers", nargs="*", choices=ALL_PEERS,
                        help="beside ferry; default: eager and compiled. layers: each of them compiled, in place of the whole model")
    parser.add_argument("--profile", action="store_true", help="what a step's kernels take, by their kind")
    parser.add_argument("--steps", type=common.at_least(2), default=10, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(1), default=4, help="first steps left out")
    parser.add_argument("--host", default="96GiB", help="ferry's host budget, where the GPU does not hold everything")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="for ferry's side: override a key of the configuration")
    parser.add_argument("--llmq", metavar="PROGRAM", type=common.program,
                        help="LLMQ's `train`; without it LLMQ is left out")
    parser.add_argument("--llmq-options", type=shlex.split, default=["--recompute-block"],
                        help="what it saves and offloads; default: --llmq-options=--recompute-block, all on the GPU")
    parser.add_argument("--only-large-step", action="store_true",
                        help="the 3 B with four micro-batches, and no other shape")
    parser.add_argument("--side-seconds", type=float, default=600,
                        help="at most of a side of transformers, and of compiling")
    options = parser.parse_args()
    common.check_steps(parser, options)
    if options.only_large_step and not options.llmq and BESIDE_LLMQ_SHAPE not in options.shapes:
        parser.error(f"--only-large-step: {BESIDE_LLMQ_SHAPE} is not among --shapes")
    why = why_no_peers(options)
    peers = [] if why else list(PEERS) if options.peers is None else options.peers
    with common.scratch() as directory, contextlib.ExitStack() as processes:
        shapes = [] if options.only_large_step else [Shape(options, name, directory) for name in options.shapes]
        large = large_step(options, directory)
        start_peers(shapes, peers, directory / "gate", processes)
        peak = peak_of((shapes + large)[0])
        rows = []
        for shape in shapes:
            sides = {"ferry": shape.ferry}
            if shape.peers:
                sides.update({peer: lambda peer=peer, of=shape: of.peers.run(peer) for peer in peers})
            rows += rows_of(shape, common.turns(sides, options.rounds, options.seconds), peak)
            if options.profile:
                rows += profile_rows(shape)
            if shape.peers:
                shape.peers.end()
        for shape in large:
            rows += rows_of_large_step(shape, peak)
    if not rows:
        sys.exit("nothing could be measured")
    rows.append(plain("one large product in bf16", peak * 1e-12, "TFLOP/s"))
    common.report(options, rows, ["ferry: fp32 master weights and moments; transformers: bf16 weights and moments",
                                  *([why] if why else [])])


def large_step(options, directory):
    """The shape of 65,536 tokens a step, where its model is asked for."""
    if not options.llmq and BESIDE_LLMQ_SHAPE not in options.shapes:
        return []
    return [Shape(options, BESIDE_LLMQ_SHAPE, directory, MICRO_BATCHES)]


def rows_of_large_step(shape, peak):
    """Of ferry, and beside LLMQ where it is named."""
    options = shape.options
    sides = {"ferry": shape.ferry, **({"LLMQ": shape.llmq} if options.llmq else {})}
    runs = common.turns(sides, options.rounds, options.seconds)
    rows = rows_of(shape, {name: of for name, of in runs.items() if name == "ferry"}, peak)
    if {"ferry", "LLMQ"} <= set(runs):
        rates = {side: [run.tokens_per_second for run in of_side] for side, of_side in runs.items()}
        rows.append(compared(f"{shape.name}: tokens a second, beside LLMQ", rates["ferry"], rates["LLMQ"], "1/s",
                             BESIDE_LLMQ, less_is_better=False))
    return rows


def start_peers(shapes, peers, gate, processes):
    """All at once; nothing is measured before each is ready or has failed."""
    if not peers or not shapes:
        return
    threads = max(1, (os.cpu_count() or 1) // len(shapes))
    for shape in shapes:
        shape.peers = Peers(shape, peers, gate, threads)
        processes.callback(shape.peers.end)
    until = time.monotonic() + shapes[0].options.side_seconds
    for shape in shapes:
        try:
            shape.peers.wait_until_ready(until)
        except SideFailed as failure:
            print(failure, file=sys.stderr)
            shape.peers = None


if __name__ == "__main__":
    main()
