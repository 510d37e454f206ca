#!/usr/bin/env python3
"""The best ways for many GPUs to share tensors, layers and state, by `ferry plan --layouts`; how far the same arithmetic is
from steps of GPUs that bench/results/ has; and how far plans of runs that fit this machine are from what these take.

The first rows are arithmetic: nothing of that size was run. Beside each stands the step that it is where the arithmetic
errs as it did for the recorded ones, which are of one to four GPUs. Of these GPUs every one has all tensors and layers, so
nothing was held to what ranks of GPUs that share them send. Of CPU ranks that share them bench/results/ has steps over a slow
network (bench/shared_tensors.py): the "divided" rows have these beside the arithmetic with default rates. The spread has both.

The last rows train a small model on CPU ranks in every way that so many ranks can divide tensors and layers: with the keys
that `--layouts` gives for it. They compare a step with the one that `ferry plan` simulates, and with the arithmetic. That
has no rates of this machine, so its steps are scaled to what ranks took that have all tensors and layers: its error is that
of what sharing costs. With fewer cores than ranks these take turns, and the plan says so of no rank: then the ratios are of
little use.

    bench/layouts.py --measured-ranks 2 4 8
"""
import json
import os
import re
import statistics
import subprocess
import sys

import common
import compute
from common import compared, plain
from training import NEVER_CLIPPED, TINY, SideFailed, train, words_of

CONFIG = common.ROOT / "examples/quickstart.json"
SEQUENCE = 2048
# By name: hidden, blocks, heads, and sequences a step. The MLP's width makes 12 hidden^2 of a block.
MODELS = {"13B": (5120, 40, 40, 512), "30B": (7168, 48, 56, 768), "65B": (8192, 80, 64, 1024),
          "175B": (12288, 96, 96, 1536), "530B": (20480, 105, 128, 1920), "1T": (25600, 128, 160, 3072)}
GPUS = {"13B": 64, "30B": 128, "65B": 256, "175B": 1024, "530B": 2240, "1T": 3072}
NETWORKS = ("400Gbit", "10Gbit")


def found_by(options, words, ranks, *more):
    done = subprocess.run([options.ferry, "plan", *words, "--layouts", "--json", "--ranks", str(ranks), *more],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{words[0]} on {ranks} ranks: {done.stderr.strip()}")
    return json.loads(done.stdout)["layouts"]


def best_layouts(options, file, gpu, ranks, *more):
    """What `ferry plan --layouts` says of a configuration on so many GPUs."""
    return found_by(options, [str(file)], ranks, "--gpu", gpu, *more)


def config_in(directory, name, model, batch, **more):
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"steps": 1, "model": model, "data": {"tokens": "none.bin"}, "precision": "bf16", "batch": batch, **more}))
    return file


def layouts(options, directory, name, network):
    """The best of a model on its GPUs, eight a host."""
    hidden, blocks, heads, sequences = MODELS[name]
    model = {"hidden": hidden, "layers": blocks, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
             "intermediate": hidden * 8 // 3 // 256 * 256, "vocab": 51200}
    file = config_in(directory, name, model, {"sequence": SEQUENCE, "micro_batch": 1, "micro_batches": sequences},
                     budgets={"host": "1TiB"})
    return best_layouts(options, file, options.gpu, GPUS[name], "--ranks-per-host", "8", "--network", network)


def schedule_of(layout):
    """Of a pipeline, with its groups of micro-batches."""
    if layout["pipeline"] == 1:
        return ""
    several = f" {layout['virtual_stages']}" if layout["virtual_stages"] > 1 else ""
    return f" in {layout['groups']}, {layout['schedule']}{several}"


def text_of(layout):
    sequence = f" S {layout['sequence']}," if layout["sequence"] > 1 else ""
    return (f"T {layout['tensor']},{sequence} P {layout['pipeline']}, D {layout['replicas']}, ZeRO {layout['zero_stage']}, "
            f"{layout['micro_batches']} x {layout['micro_batch']}{schedule_of(layout)}")


def large(options, directory, ratios):
    """`ratios`: of the steps that it is held to, arithmetic over measured."""
    rows, notes = [], []
    for name in options.models:
        for network in NETWORKS:
            best, *others = layouts(options, directory, name, network)
            seconds = best["seconds"]
            rows.append(plain(f"{name} on {GPUS[name]} {options.gpu}, {network}: a step", seconds, "s",
                              value_low=seconds / max(ratios), value_high=seconds / min(ratios)))
            waits = best["bubble_seconds"] / seconds
            notes.append(f"{name}, {network}: {text_of(best)}, state on the {best['state']}, weights on the {best['weights']}; "
                         f"{best['device_bytes'] / 2**30:.1f} GiB of device memory, bubble {waits:.0%}; a GPU sends "
                         f"{best['in_host_bytes'] / 2**30:.3g} GiB inside its host, {best['across_hosts_bytes'] / 2**30:.3g} GiB to "
                         f"others and copies {best['copied_bytes'] / 2**30:.3g} GiB; then "
                         + "; ".join(f"{text_of(one)} {one['seconds']:.3g} s" for one in others))
    return rows, notes


# ---------------------------------------------------------------- recorded

LLAMA_8B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336,
            "vocab": 128256}


def in_memory(directory, shape):
    """Of bench/compute.py: everything in the GPU's memory."""
    model, sequences, sequence, _ = compute.SHAPES[shape]
    folder = directory / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    return config_in(directory, f"memory-{shape}", {"path": str(folder), "load": False},
                     {"sequence": sequence, "micro_batch": sequences, "micro_batches": 1}, budgets={"host": "100GiB"})


def through_host(directory, sequences, sequence, **optimizer):
    """Of offloaded_8b_h100: most of the state in host memory; all of it here, so that it needs more than the run's 112 GiB."""
    return config_in(directory, f"host-{sequences}", LLAMA_8B,
                     {"sequence": sequence, "micro_batch": 1, "micro_batches": sequences},
                     budgets={"device": "24GiB", "host": "128GiB"}, optimizer=optimizer)


def seconds_in(run, row):
    """Of a row of a run in bench/results/. Rates are of 16,384 tokens a step and GPU."""
    rows = json.loads((common.ROOT / f"bench/results/{run}.json").read_text(encoding="utf-8"))["rows"]
    found = next(one for one in rows if one["name"] == row)
    return found["value"] if found["unit"] == "s" else 16384 / found["value"]


def recorded(options, directory):
    """Steps of ferry on GPUs, and what the arithmetic says of the same layout."""
    three_b = common.ROOT / "examples/3b_gpu.json"
    ranks = ("--set", "budgets.host=180GiB", "--set")
    steps = [(f"{shape}, in memory", "compute_h200", f"{shape}, ferry: a step", 1, in_memory(directory, shape), ())
             for shape in compute.WANTED]
    steps += [
        ("3b, 20 GiB", "step_bound_memory_h100", "memory, never clipped: step beside lower bound", 1, three_b,
         ("--set", "budgets.host=100GiB")),
        ("3b, 20 GiB each, ZeRO 3", "weak_scaling_2", "two GPUs, beside DeepSpeed on two", 2, three_b,
         (*ranks, "batch.micro_batches=2", "--set", "zero.stage=3")),
        ("3b, 20 GiB each, ZeRO 3", "weak_scaling_4", "four GPUs: step beside prediction", 4, three_b,
         (*ranks, "batch.micro_batches=4", "--set", "zero.stage=3")),
        ("8b, 24 GiB, 4 x 1,024", "offloaded_8b_h100", "small: step beside lower bound", 1,
         through_host(directory, 4, 1024), ()),
        ("8b, 24 GiB, 32 x 2,048, smaller state", "offloaded_8b_h100", "large: step beside lower bound", 1,
         through_host(directory, 32, 2048, master="split", moments="bf16"), ())]
    rows = []
    for name, run, row, gpus, file, more in steps:
        gpu = run.rsplit("_", 1)[1] if gpus == 1 else "h200"
        whole = [word for key in ("tensor", "sequence", "pipeline") for word in ("--set", f"parallel.{key}=1")]
        best = best_layouts(options, file, gpu, gpus, *more, *whole)[0]
        rows.append(compared(f"recorded: {name}, {gpus} {gpu}: a step", [seconds_in(run, row)], [best["seconds"]], "s",
                             note=f"by arithmetic {text_of(best)}, state on the {best['state']}"))
    return rows


# ---------------------------------------------------------------- divided

def divided(options):
    """Steps of CPU ranks that share tensors or layers over an emulated network, and what the arithmetic says of the same keys.

    Their machine's rates are not stored: the arithmetic has the defaults of a small machine, which the ranks of a host share."""
    rows = []
    for ranks, here in ((4, 2), (8, 4), (8, 2)):
        run = json.loads((common.ROOT / f"bench/results/layouts_{ranks}_{here}.json").read_text(encoding="utf-8"))
        for row in run["rows"]:
            found = re.fullmatch(r"300 Mbit/s: T (\d+), P (\d+), D \d+(?:, ZeRO 1)?(?:, (\w+))?, a step", row["name"])
            if not found or found[1] == found[2] == "1":
                continue
            schedule = {"parallel.schedule": found[3]} if found[3] else {}
            settings = {"batch.micro_batch": 1, "batch.micro_batches": 2 * ranks, "model.layers": 8, "zero.stage": 1,
                        "budgets.device": "unlimited", "budgets.host": "unlimited", "budgets.nvme": [],
                        "parallel.sequence": 1, "parallel.tensor": int(found[1]), "parallel.pipeline": int(found[2]), **schedule}
            words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]
            best = found_by(options, [str(CONFIG), *words], ranks, "--ranks-per-host", str(here), "--network", "300Mbit")[0]
            rows.append(compared(f"divided: {ranks} CPU ranks, {here} a host, {row['name'].removesuffix(', a step')}: a step",
                                 [row["value"]], [best["seconds"]], "s"))
    return rows


# ---------------------------------------------------------------- measured

def ways(ranks):
    """Replicas alone, ranks that share tensors, stages of layers, and the two together."""
    return [(1, 1), (ranks, 1), (1, ranks)] + ([(2, ranks // 2)] if ranks > 2 and ranks % 2 == 0 else [])


def planned(options, settings, ranks):
    done = subprocess.run([options.ferry, "plan", str(CONFIG), "--json", "--ranks", str(ranks),
                           *words_of(settings, options.settings)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SideFailed(done.stderr.strip())
    return json.loads(done.stdout)["prediction"]["step_seconds"]


def weighed(options, settings, ranks):
    """The best layout of these keys, by arithmetic."""
    return found_by(options, [str(CONFIG), *words_of(settings, options.settings)], ranks)[0]


def with_keys(settings, layout):
    """What the run needs to go by a layout."""
    keys = dict(key.split("=", 1) for key in layout["keys"])
    return {**settings, **{key: int(value) if value.isdigit() else value for key, value in keys.items()}}


def measured(options, directory):
    rows = []
    config = common.config_of(CONFIG)
    # Every stage of the longest pipeline has a block.
    blocks = max([config["model"]["layers"], *options.measured_ranks])
    for ranks in options.measured_ranks:
        launcher = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks))
        sides = {}
        for tensor, pipeline in ways(ranks):
            settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                        "evaluate.every": 0, "evaluate.micro_batches": 0, "budgets.nvme": [],
                        "budgets.device": "unlimited", "budgets.host": "unlimited", **NEVER_CLIPPED,
                        "batch.micro_batches": 4 * ranks, "threads": ranks, "zero.stage": 1, "model.layers": blocks,
                        "parallel.sequence": 1, "parallel.tensor": tensor, "parallel.pipeline": pipeline,
                        **(TINY if options.tiny else {})}
            layout = weighed(options, settings, ranks)

            def one(settings=with_keys(settings, layout), layout=layout, ranks=ranks, launcher=launcher):
                run = train(options, CONFIG, settings, warmup=1, bound=False, launcher=launcher)
                run.plan_seconds, run.arithmetic = planned(options, settings, ranks), layout["seconds"]
                return run
            sides[f"{ranks} ranks, T {tensor}, P {pipeline}"] = one
        found = common.turns(sides, options.rounds, options.seconds)
        alone = found[f"{ranks} ranks, T 1, P 1"]
        scale = statistics.median(run.step_seconds for run in alone) / alone[0].arithmetic
        for name, runs in found.items():
            steps = [run.step_seconds for run in runs]
            rows.append(compared(f"{name}: a step", steps, [run.plan_seconds for run in runs], "s"))
            if runs is not alone:
                rows.append(compared(f"shared: {name}: a step beside the arithmetic", steps,
                                     [run.arithmetic * scale for run in runs], "s"))
    return rows


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--gpu", choices=("a100", "h100", "h200"), default="h100", help="of the large models")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="large ones")
    parser.add_argument("--measured-ranks", type=common.at_least(2), nargs="*", default=[2],
                        help="numbers of CPU ranks to run")
    parser.add_argument("--steps", type=common.at_least(2), default=6, help="of each run")
    options = parser.parse_args()
    with common.scratch() as directory:
        known, shares = recorded(options, directory), divided(options)
        ratios = [row["ratio"] for row in known]
        rows, notes = large(options, directory, ratios + [row["ratio"] for row in shares])
        rows += known + shares + measured(options, directory)
    notes.append(f"the arithmetic was {min(ratios):.2f}x to {max(ratios):.2f}x of {len(ratios)} recorded steps; the spread of a "
                 "large one is what it is where the arithmetic errs as for these or for the divided ones; none was run")
    ratios = [row["ratio"] for row in shares]
    notes.append(f"by the default rates of a small machine it was {min(ratios):.2f}x to {max(ratios):.2f}x of {len(ratios)} recorded steps "
                 "of CPU ranks that share tensors or layers, whose machine's rates it did not have")
    shared = [row["ratio"] for row in rows if row["name"].startswith("shared: ")]
    if shared:
        notes.append(f"of ranks that share tensors or layers the arithmetic was {min(shared):.2f}x to {max(shared):.2f}x of "
                     f"{len(shared)} steps of CPU ranks, scaled to those that share none")
    cores = len(os.sched_getaffinity(0))
    if options.measured_ranks:
        notes.append(f"runs on {cores} cores; the ratio is of the planned step over the measured one")
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()
