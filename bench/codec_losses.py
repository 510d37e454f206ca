#!/usr/bin/env python3
"""The held-back loss that ranks reach with each codec, beside uncoded runs of other seeds.

The quick-start model on ferry's own texts, over several ranks of this machine. A seed fixes weights and order. A
codec's run has the first seed; its loss is asked to lie within the spread of the uncoded seeds, or below. Bytes of a
whole run are what a rank sends of gradients, momentum and moments, beside gradients in bf16, there and back; the runs
have zero.stage 0 and numerics.wire bf16.

    bench/codec_losses.py --ranks 4 --seeds 5
    bench/codec_losses.py --ranks 4 --steps 480 --sweep --at-once 4

--sweep tries settings of 1-bit and 0/1 Adam in place of the codecs, in blocks of 256 and 13 % of the steps exact unless
they say otherwise. Each has --sweep-seeds seeds; the mean of their losses is what counts then. --at-once runs share the processors out, a core a rank where there are as many. The seeds are
the rounds: --rounds does nothing. After --seconds no run is begun: settings whose runs are missing have no row.
"""
import os
import shutil
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import common
from common import SideFailed, compared, judged, plain
from slow_network import CODECS, ONEBIT
from training import TINY, train
from weak_scaling import mpirun

CONFIG = common.ROOT / "examples/quickstart.json"
OF_UPDATES = ("exchange gradients", "gather gradients", "exchange momentum", "gather momentum", "gather moments")
WHOLE_RUN = 5.0  # times fewer bytes than gradients in bf16


def onebit(freeze_step, block, **more):
    return {"optimizer.method": "onebit_adam", "optimizer.freeze_step": freeze_step, "zero.compress.block": block, **more}


def zeroone(freeze_step, scaler, block, **more):
    return {"optimizer.method": "zeroone_adam", "optimizer.var_freeze_step": freeze_step,
            "optimizer.var_update_scaler": scaler, "zero.compress.block": block, **more}


def sweep(steps):
    """Settings by name. Shares are of the steps."""
    exact = int(0.13 * steps)
    found = {f"{ONEBIT}": onebit(exact, 256)}
    for name, more in (("lr 0.0007", {"optimizer.lr": 7e-4}), ("lr 0.0015", {"optimizer.lr": 1.5e-3}),
                       ("beta2 0.99", {"optimizer.betas": [0.9, 0.99]}), ("beta1 0.95", {"optimizer.betas": [0.95, 0.95]})):
        found[f"{ONEBIT}, {name}"] = onebit(exact, 256, **more)
    for block in (64, 2048):
        found[f"{ONEBIT}, blocks of {block}"] = onebit(exact, block)
    found[f"{ONEBIT}, 20% exact"] = onebit(steps // 5, 256)
    for share in (50, 90):
        found[f"0/1 Adam, variance until {share}%"] = zeroone(share * steps // 100, 8, 256)
    for apart in (2, 4):
        found[f"0/1 Adam, variance until 50%, then up to {apart} steps apart"] = zeroone(
            steps // 2, 8, 256, **{"optimizer.local_step_scaler": steps // 8, "optimizer.local_step_clipper": apart})
    return found


def codecs(steps):
    found = {name: {f"zero.compress.{key}": value for key, value in codec.items()}
             for name, codec in CODECS.items() if codec}
    for codec in found.values():
        codec["zero.stage"] = 3 if "zero.compress.weights" in codec else 0
    found[ONEBIT] = onebit(steps // 5, 256)
    return found


class Seats:
    """Processors for so many runs at once."""

    def __init__(self, at_once):
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // at_once
        self._free = [cores[i * each:(i + 1) * each] for i in range(at_once)] if each > 0 else [[]] * at_once
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self._own = getattr(self, "_own", {})
            self._own[threading.get_ident()] = seat = self._free.pop()
        return ["taskset", "-c", ",".join(map(str, seat))] if seat and shutil.which("taskset") else []

    def __exit__(self, *_):
        with self._lock:
            self._free.append(self._own.pop(threading.get_ident()))


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--ranks", type=common.at_least(2), default=4)
    parser.add_argument("--seeds", type=common.at_least(2), default=5, help="of the uncoded runs")
    parser.add_argument("--steps", type=common.at_least(2), default=160)
    parser.add_argument("--micro-batch", type=common.at_least(1), default=4, help="sequences of a rank and step")
    parser.add_argument("--sweep", action="store_true", help="settings of 1-bit and 0/1 Adam instead of the codecs")
    parser.add_argument("--sweep-seeds", type=common.at_least(1), default=1, help="of each setting")
    parser.add_argument("--at-once", type=common.at_least(1), default=1, help="runs at the same time")
    options = parser.parse_args()
    with common.scratch() as directory:
        config = common.config_of(CONFIG)
        held_back = options.ranks * max(1, 16 // options.micro_batch)
        settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                    "evaluate.every": options.steps, "evaluate.micro_batches": held_back, "budgets.nvme": [],
                    "budgets.device": "unlimited", "budgets.host": "unlimited", "threads": options.ranks,
                    "schedule.total_steps": options.steps, "schedule.warmup_steps": options.steps // 8,
                    "numerics.wire": "bf16", "zero.stage": 0, **(TINY if options.tiny else {}),
                    "batch.micro_batch": options.micro_batch, "batch.micro_batches": options.ranks}
        tried = sweep(options.steps) if options.sweep else codecs(options.steps)
        runs = {("uncoded", seed): {} for seed in range(1, options.seeds + 1)}
        for seed in range(1, (options.sweep_seeds if options.sweep else 1) + 1):
            runs.update({(name, seed): its for name, its in tried.items()})
        done = all_of(runs, settings, options)
    report(options, tried, done)


def all_of(runs, settings, options):
    """By name and seed, those that were run: the loss, and what a rank sent."""
    seats, start = Seats(options.at_once), time.monotonic()

    def one(key):
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            return None
        name, seed = key
        with seats as words:
            try:
                found = train(options, CONFIG, {**settings, "seed": seed, **runs[key]}, bound=False,
                              launcher=[*words, *mpirun(options.ranks)])
            except SideFailed as failure:
                print(f"{name}, seed {seed}: {failure}", file=sys.stderr)
                return None
        sent = sum(of["sent_bytes"] for of in found.summary["collectives"] if of["collective"] in OF_UPDATES)
        return found.evaluations[-1]["evaluation_loss"], sent

    with ThreadPoolExecutor(options.at_once) as pool:
        return {key: found for key, found in zip(runs, pool.map(one, runs)) if found}


def report(options, tried, done):
    seeds = {seed: found for (name, seed), found in done.items() if name == "uncoded"}
    if len(seeds) < 2:
        sys.exit("fewer than two uncoded runs could be measured")
    losses, bytes_uncoded = [loss for loss, _ in seeds.values()], next(iter(seeds.values()))[1]
    rows = [plain(f"uncoded, {len(seeds)} seeds", losses, "nats")]
    worst, whole_run = max(losses), []
    for name in tried:
        its = [(seed, found) for (other, seed), found in done.items() if other == name]
        if not its:
            continue
        loss = statistics.mean(found[0] for _, found in its)
        spread = {} if len(its) == 1 else {"value_low": min(f[0] for _, f in its), "value_high": max(f[0] for _, f in its)}
        rows.append({**judged(f"{name}, beside the worst uncoded seed", loss, "nats", worst, [worst / loss], 1.0), **spread})
        if len(its) == 1 and its[0][0] in seeds:
            rows.append(compared(f"{name}, beside the same seed", [loss], [seeds[its[0][0]][0]], "nats"))
        sent = its[0][1][1]
        target = WHOLE_RUN if options.sweep else None
        whole_run.append(judged(f"{name}, sent in the whole run, beside gradients in bf16", sent, "B", bytes_uncoded,
                                [bytes_uncoded / sent], target))
    common.report(options, rows + whole_run,
                  [f"{options.ranks} ranks, {options.steps} steps, losses uncoded: "
                   + ", ".join(f"{value:.4f}" for value in losses)])


if __name__ == "__main__":
    sys.exit(main())
