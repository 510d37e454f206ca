#!/usr/bin/env python3
"""A step of AdamW on 16-bit parameters that lie on the CPU, beside torch's fused AdamW and DeepSpeedCPUAdam.

Gradients are bf16 and scaled, as torch.amp.GradScaler leaves them. A step divides by the scale, looks for what is not finite,
updates fp32 masters and rounds to bf16. ferry's OffloadAdamW does all of it in step(). Around the others stands what their
users write: gradients widened to the masters', GradScaler's unscaling, and a cast. A process a side, a round and a thread
count; the median of the calls counts.

    bench/cpu_parameters.py                     128 Mi parameters, on one thread and on all
    bench/cpu_parameters.py --threads 1 8 16

Needs torch and the package of python/ (docs/embedding.md); with DeepSpeed its DeepSpeedCPUAdam is a side. No model is
trained, so there is no configuration and neither --set nor --tokens.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

import common

TARGET = 1.5
TENSORS = 16
SCALE = 1024.0
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
SIDES = {"ferry": {}, "ferry, split master and int8": {"master": "split", "moments": "int8"}, "torch": None, "DeepSpeed": None}


class OfFerry:
    def __init__(self, torch, parameters, threads, options):
        from ferry_offload.torch import OffloadAdamW
        self.adamw = OffloadAdamW(parameters, overlap=False, threads=threads, **HYPER, **options)
        self.adamw.grad_scale = torch.tensor(SCALE)  # what GradScaler.step() hands over

    def step(self):
        self.adamw.step()


class OnMasters:
    """fp32 masters in `made(masters)`, whose step(scale) ends with new masters."""

    def __init__(self, torch, parameters, made):
        self.torch, self.parameters = torch, parameters
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.gradients = [master.grad for master in self.masters]
        self.update = made(self.masters, self.gradients)

    def step(self):
        self.torch._foreach_copy_(self.gradients, [p.grad for p in self.parameters])
        self.update()
        self.torch._foreach_copy_([p.data for p in self.parameters], [m.data for m in self.masters])


def torchs(torch):
    """Its fused update divides by the scale itself, once GradScaler has looked for infinities."""
    def made(masters, gradients):
        adamw = torch.optim.AdamW(masters, fused=True, **HYPER)
        scale, one = torch.tensor(SCALE), torch.tensor(1.0)

        def update():
            found = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)
            adamw.grad_scale, adamw.found_inf = scale, found
            adamw.step()

        return update

    return made


def deepspeeds(torch):
    def made(masters, gradients):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        adamw, inverse = DeepSpeedCPUAdam(masters, **HYPER), torch.tensor(1 / SCALE)

        def update():
            found = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
            if not found:
                adamw.step()

        return update

    return made


def child(work):
    import torch
    torch.set_num_threads(work["threads"])
    generator = torch.Generator().manual_seed(1)
    count = (work["millions"] << 20) // TENSORS
    parameters = [torch.nn.Parameter(torch.randn(count, generator=generator).bfloat16()) for _ in range(TENSORS)]
    for p in parameters:
        p.grad = (SCALE * 1e-3 * torch.randn(count, generator=generator)).bfloat16()
    side = work["side"]
    if side.startswith("ferry"):
        optimizer = OfFerry(torch, parameters, work["threads"], SIDES[side])
    else:
        optimizer = OnMasters(torch, parameters, (torchs if side == "torch" else deepspeeds)(torch))
    seconds = []
    for _ in range(1 + work["calls"]):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"ns": statistics.median(seconds[1:]) / (count * TENSORS) * 1e9}))


def measure(options, side, threads):
    work = {"side": side, "threads": threads, "millions": options.millions, "calls": options.calls}
    ran = subprocess.run([sys.executable, __file__, "--child", json.dumps(work)], capture_output=True, text=True, check=False,
                         env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    if ran.returncode != 0:
        raise common.SideFailed(ran.stderr.strip()[-2000:])
    return json.loads(ran.stdout.splitlines()[-1])["ns"]


def rows_of(found, threads):
    rows = []
    for ours in (side for side in found if side.startswith("ferry")):
        for theirs in (side for side in found if not side.startswith("ferry")):
            target = TARGET if ours == "ferry" else None
            rows.append(common.compared(f"{ours}, beside {theirs}, {threads} threads", found[ours], found[theirs], "ns/param",
                                        target, threads=threads))
    return rows


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(json.loads(sys.argv[2]))
    parser = common.parser_of(__doc__)
    parser.set_defaults(ferry=None)  # it is not run
    parser.add_argument("--millions", type=common.at_least(1), default=128, help="elements, in units of 2^20")
    parser.add_argument("--threads", type=common.at_least(1), nargs="+", default=[1, os.cpu_count()], help="each of these counts")
    parser.add_argument("--calls", type=common.at_least(1), default=7, help="calls a turn; its figure is their median")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.millions, options.threads, options.calls = 1, [1], 1
    missing = [name for name in ("torch", "ferry_offload") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"python3 cannot import {' and '.join(missing)}: docs/embedding.md says how to install them")
    names = [name for name in SIDES if name != "DeepSpeed" or importlib.util.find_spec("deepspeed")]
    rows = []
    for threads in options.threads:
        sides = {name: lambda name=name, threads=threads: measure(options, name, threads) for name in names}
        rows += rows_of(common.turns(sides, options.rounds, options.seconds), threads)
    if not rows:
        sys.exit("nothing could be measured")
    common.report(options, rows, [] if "DeepSpeed" in names else ["DeepSpeed is not installed"])


if __name__ == "__main__":
    main()
