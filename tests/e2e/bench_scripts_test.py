"""The scripts in bench/ on a model of seconds, on the CPU: that they run, and what they print. Never how fast."""

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree
from pathlib import Path

from harness import FERRY, QUICK, FerryTest, in_quick

BENCH = Path(__file__).resolve().parents[2] / "bench"
FIO = shutil.which("fio")
sys.path.insert(0, str(BENCH))
import default_plan  # noqa: E402
import needs  # noqa: E402
import slow_network  # noqa: E402
import training  # noqa: E402


class ScriptsTest(FerryTest):
    def run_of(self, name, *words, **options):
        """Runs a script, tiny, one round, with its JSON in the directory; as it ended."""
        return subprocess.run([sys.executable, str(BENCH / f"{name}.py"), "--ferry", FERRY, "--tiny", "--rounds", "1",
                               "--json", self.path(f"{name}.json"), *words], capture_output=True, text=True,
                              timeout=300, check=False, **options)

    def script(self, name, *words):
        """Its rows by name, and its notes."""
        file = Path(self.path(f"{name}.json"))
        done = self.run_of(name, *words)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.rows_in(file, done.stdout)

    def rows_in(self, file, table):
        found = json.loads(file.read_text())
        self.assertLessEqual({"machine", "command", "rows"}, set(found))
        for row in found["rows"]:
            self.assertLessEqual({"name", "value", "unit", "reference", "ratio"}, set(row))
            self.assertIn(row["name"], table)
            if row["ratio"] is not None:
                self.assertGreater(row["ratio"], 0, row)
        return {row["name"]: row for row in found["rows"]}, found["notes"]

    def drive(self):
        return ("--path", self.path("nvme"))

    def beside_fio(self):
        """A drive, and fio beside it where it is installed."""
        return (*self.drive(), *([] if FIO else ["--without-fio"]))

    def case(self):
        """What the directory stands for, by its file system."""
        return "tmpfs" if needs.file_system(self.path("nvme")) == "tmpfs" else "disk"

    def refused(self, name, *words, **options):
        """What a script says that ends before it has run anything."""
        done = self.run_of(name, *words, **options)
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stdout, "")
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotIn("step 1", done.stderr)
        return done.stderr

    def test_compute(self):
        rows, notes = self.script("compute", "--shapes", "1b", "gpt2-xl", "--steps", "5")
        for shape in ("1b", "gpt2-xl"):
            self.assertGreater(rows[f"{shape}, ferry: a step"]["value"], 0)
            self.assertIn(rows[f"{shape}, ferry: tokens a second, MFU"]["outcome"], ("met", "missed", "open"))
        self.assertGreater(rows["one large product in bf16"]["value"], 0)
        self.assertIn("transformers is left out with --tiny", notes)

    def test_compute_of_the_large_step_alone(self):
        rows, _ = self.script("compute", "--only-large-step", "--steps", "5")
        self.assertGreater(rows["3b, 4 micro-batches, ferry: a step"]["value"], 0)
        self.assertEqual(set(rows), {"3b, 4 micro-batches, ferry: a step", "one large product in bf16",
                                     "3b, 4 micro-batches, ferry: tokens a second, MFU"})
        self.assertIn("--only-large-step: 3b is not among --shapes",
                      self.refused("compute", "--only-large-step", "--shapes", "1b"))

    def test_attention(self):
        rows, notes = self.script("attention", "--calls", "2")
        for shape in ("1 x 256, 4/1 heads of 64", "2 x 96, 3/3 heads of 128"):
            for name in ("forward", "backward"):
                self.assertGreater(rows[f"{shape}: {name}"]["value"], 0)
                self.assertIn("TFLOP/s", rows[f"{shape}: {name}"]["note"])
        self.assertIn("torch is left out with --tiny", notes)

    def test_widths(self):
        rows, _ = self.script("widths", "--lacking", "4", "1")
        for name in ("hidden 60: forward, block: norm forward, 80 x 60, bf16",
                     "hidden 63: head and loss, head: product nn, 80 x 63 x 512, bf16",
                     "intermediate 159: forward, block: product nt, 80 x 318 x 64, bf16",
                     "vocab 511: head and loss, head: cross entropy, 80 x 511, fp32"):
            self.assertGreater(rows[name]["reference"], 0)

    def test_sparse_attention(self):
        rows, notes = self.script("sparse_attention", "--calls", "2")
        for density in (2, 4):
            row = rows[f"512 tokens, 2/1 heads of 64, 1/{density} of the blocks: rate beside ferry's dense"]
            self.assertGreater(row["value"], 0)
            self.assertIn(row["outcome"], ("met", "missed", "open"))
        self.assertIn("torch is left out with --tiny", notes)

    def test_three_tiers(self):
        rows, notes = self.script("three_tiers", "--steps", "3")
        self.assertGreater(rows["NVMe read a step"]["value"], 0)
        self.assertIn("state hash", notes[0])

    def test_durable_steps(self):
        rows, notes = self.script("three_tiers", "--durable", "--steps", "3")
        self.assertIn("step, durable steps beside state on NVMe", rows)
        self.assertIn("state hash", notes[0])

    def test_step_bound_in_memory(self):
        traces = Path(self.path("new/traces"))
        rows, notes = self.script("step_bound", "--steps", "6", "--traces", str(traces))
        for variant in ("never clipped", "never clipped, as expected", "clipped", "clipped, speculation off"):
            self.assertIn(f"memory, {variant}: step beside lower bound", rows)
            predicted = rows[f"memory, {variant}: step beside prediction"]
            self.assertEqual((predicted["target"], predicted["target_high"]), (0.9, 1.1))
            self.assertAlmostEqual(predicted["ratio"], predicted["reference"] / predicted["value"])
            self.assertEqual(predicted["outcome"], "met" if 0.9 <= predicted["ratio"] <= 1.1 else "missed")
        self.assertIn("3 of 3 clipped", rows["memory, clipped: step beside lower bound"]["note"])
        self.assertIn("0 of 3 clipped", rows["memory, never clipped: step beside lower bound"]["note"])
        self.assertIn("memory, clipped: beside speculation off", rows)
        self.assertTrue(any(note.startswith("clipped: compute") for note in notes), notes)
        names = [f"memory_{variant}_1" for variant in ("clipped", "clipped_speculation_off", "never_clipped", "never_clipped_as_expected")]
        self.assertEqual(sorted(path.name for path in traces.iterdir()),
                         sorted(name + end for name in names for end in (".json.gz", ".svg")))
        for name in names:
            drawn = xml.etree.ElementTree.parse(traces / f"{name}.svg").getroot()
            texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
            self.assertIn("0 s", texts)
            for row in ("compute", "team"):
                at = texts.index(row)
                self.assertRegex(" ".join(texts[at + 1:at + 3]), "% measured .*% planned")
            self.assertTrue(any(text.startswith("forward") for text in texts), texts)
            with gzip.open(traces / f"{name}.json.gz") as packed:
                self.assertIn("traceEvents", json.load(packed))

    def test_step_bound_on_a_drive(self):
        case = self.case()
        rows, _ = self.script("step_bound", "--case", case, *self.beside_fio(), "--steps", "6")
        variant = f"{case}, never clipped"
        self.assertIn("speculative updates: 3 of 3 committed", rows[f"{variant}: step beside lower bound"]["note"])
        self.assertEqual(f"{variant}: step beside its bytes at fio's mixed bandwidth" in rows, bool(FIO))
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_what_is_missing_is_said_at_once(self):
        case = self.case()
        for script in ("step_bound", "nvme_step", "startup", "fits", "three_tiers"):
            self.assertIn("/none is no directory", self.refused(script, "--path", "/none"))
        said = self.refused("step_bound", "--case", {"tmpfs": "disk", "disk": "tmpfs"}[case], *self.drive())
        self.assertIn(f"{self.path('nvme')} is on", said)
        for script in ("nvme_step", "startup"):
            said = self.refused(script, *self.drive(), env={**os.environ, "PATH": "/none"})
            self.assertIn("fio is not here", said)
        self.assertIn("all state fits into memory", self.refused("step_bound", "--case", case, *self.drive(), "--host",
                                                                 "1GiB", "--without-fio"))
        # No GPU: the program's own words, before anything is trained.
        no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        for script in ("step_bound", "beside_peers"):
            self.assertIn("device", self.refused(script, "--set", "device=cuda", env=no_gpu))
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_wrong_arguments_are_said_at_once(self):
        whole = "is no whole number of at least"
        for script in ("adam_deepspeed", "attention", "beside_peers", "compute", "default_plan", "fits", "nvme_step", "offloaded_8b", "sparse_attention", "startup", "step_bound", "three_tiers",
                       "weak_scaling"):
            for rounds in in_quick(("0", "-1"), [0]):
                self.assertIn(f"--rounds: {rounds} {whole} 1", self.refused(script, "--rounds", rounds))
            self.assertIn("/nope is no directory", self.refused(script, "--json", "/nope/x.json"))
        for script, option in (("adam_deepspeed", "millions"), ("adam_deepspeed", "threads"), ("adam_deepspeed", "calls"), ("attention", "calls"), ("attention", "tokens"), ("sparse_attention", "calls"),
                               ("beside_peers", "micro-batches"), ("nvme_step", "layers"), ("step_bound", "layers"),
                               ("three_tiers", "steps"), ("weak_scaling", "ranks")):
            self.assertIn(f"--{option}: 0 {whole} 1", self.refused(script, f"--{option}", "0"))
        for script in ("beside_peers", "default_plan", "nvme_step", "offloaded_8b", "step_bound", "weak_scaling"):
            self.assertIn("more than --warmup", self.refused(script, "--steps", "3", "--warmup", "3"))
        for script in ("beside_peers", "nvme_step", "weak_scaling"):  # of which the first is left out
            self.assertIn(f"--peer-steps: 1 {whole} 2", self.refused(script, "--peer-steps", "1"))
        config = str(BENCH.parent / "examples/solar_10b.json")
        self.assertIn("nope.json: No such file", self.refused("fits", "nope.json"))
        self.assertIn("two configurations of one name", self.refused("fits", config, config))

    def test_what_needs_packages_says_so_but_helps_without(self):
        """`-S`: without any installed package."""
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for script, words, packages in (("load_model", ["--dir", self.dir], "numpy"),
                                        ("loss_curves", [], "torch and transformers")):
            command = [sys.executable, "-S", str(BENCH / f"{script}.py")]
            done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False, env=bare)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            done = subprocess.run([*command, "--ferry", FERRY, *words], capture_output=True, text=True, check=False, env=bare)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, f"^python3 cannot import {packages}: .*\n$")
            done = subprocess.run([*command, "--ferry", FERRY, *words, "--json", "/nope/x.json"], capture_output=True,
                                  text=True, check=False, env=bare)
            self.assertIn("/nope is no directory", done.stderr)

    def test_default_plan(self):
        """Every plan of the configuration gives the same numbers, and the best of them stands beside the default."""
        rows, notes = self.script("default_plan", "--steps", "5", "--set", "batch.micro_batches=2", "--set",
                                  "swap.groups=auto")
        beside, = (row for name, row in rows.items() if name.startswith("default: a step, beside the best: "))
        self.assertEqual(beside["target"], 0.95)
        for choice in ("no speculative updates", "attention saved", "MLP saved", "projections saved", "block inputs leave", "chunks of a quarter",
                       "2 groups"):
            self.assertGreater(rows[f"{choice}: a step"]["value"], 0)
        self.assertTrue(any(note.endswith("runs have one state hash") for note in notes), notes)

    def test_default_plan_tries_the_choices_named(self):
        rows, _ = self.script("default_plan", "--steps", "5", "--choices", "attention saved", "block inputs stay")
        tried = {name.removesuffix(": a step") for name in rows if name.endswith(": a step")}
        self.assertLessEqual({"attention saved", "block inputs stay"}, tried)
        self.assertLessEqual(tried, {"attention saved", "block inputs stay", "what helped, together"})
        said = self.refused("default_plan", "--choices", "attention kept")
        self.assertIn("no choice 'attention kept' here; there are ", said)
        self.assertIn("'attention saved'", said)

    def test_default_plan_refuses_plans_that_change_numbers(self):
        tries = default_plan.Tries(None, {})
        tries.hashes = {"default": "1", "MLP saved": "2"}
        with self.assertRaisesRegex(SystemExit, "the plan changed a run's numbers: .*MLP saved"):
            tries.check()

    def test_beside_peers(self):
        rows, notes = self.script("beside_peers", "--micro-batches", "4", "--steps", "5")
        self.assertEqual(rows["ferry, clipped: compute busy"]["target"], 0.95)
        self.assertIn("ferry, never clipped, as expected: step beside prediction", rows)
        self.assertEqual(notes, ["LLMQ is left out with --tiny", "DeepSpeed is left out with --tiny"])

    def test_offloaded_8b(self):
        rows, _ = self.script("offloaded_8b", "--steps", "5", "--cases", "large", "small", "mistral")
        self.assertEqual(rows["large: tokens a second"]["reference"], 11500)
        self.assertEqual(rows["large: MFU"]["reference"], 0.66)
        for case in ("large", "small", "mistral"):
            self.assertGreater(rows[f"{case}: a step"]["value"], 0)
            self.assertGreater(rows[f"{case}: step beside bound at peaks"]["ratio"], 0)
            self.assertEqual(rows[f"{case}: step beside prediction"]["target_high"], 1.1)

    def test_nvme_step(self):
        rows, notes = self.script("nvme_step", *self.beside_fio())
        self.assertGreater(rows["ferry: moved a step, read and written"]["value"], 0)
        self.assertIn("ferry: step beside prediction", rows)
        self.assertEqual(notes[0], "3 layers, host budget 1GiB")

    def test_nvme_step_with_the_peers_memory(self):
        rows, _ = self.script("nvme_step", "--case", "memory", *self.drive(), "--without-fio")
        self.assertNotIn("ferry: moved a step, read and written", rows)
        self.assertIn("ferry: host peak", rows)

    def test_fits(self):
        configs = [str(BENCH.parent / "examples" / name) for name in
                   ("solar_10b.json", "llama2_13b.json", "qwen14b.json", "qwen14b_split.json", "qwen14b_long.json")]
        rows, notes = self.script("fits", *configs, *self.drive(), "--steps", "16")
        self.assertEqual(notes, [])
        for config in configs:
            self.assertEqual(rows[f"{Path(config).stem}: steps trained"]["outcome"], "met")
            self.assertEqual(rows[f"{Path(config).stem}: last loss beside first"]["outcome"], "met")

    def test_fits_under_a_control_group(self):
        group = training.ControlGroup(512 << 20)
        try:
            with group:
                pass
        except OSError:
            self.assertIn("no control group", self.refused("fits", *self.drive(), "--cgroup", "512MiB"))
            return
        rows, _ = self.script("fits", *self.drive(), "--steps", "16", "--cgroup", "512MiB", "--predict")
        self.assertLess(rows["solar_10b: host peak beside budget and 1 GiB"]["value"], 0.5)
        self.assertIn("solar_10b: step beside prediction", rows)
        done = self.run_of("fits", *self.drive(), "--cgroup", "16MiB")
        self.assertEqual(done.returncode, 1)
        self.assertIn("solar_10b: ", done.stderr)

    def test_fits_says_a_wrong_size(self):
        self.assertIn("'100GB' is no size", self.refused("fits", *self.drive(), "--cgroup", "100GB"))

    def test_startup(self):
        rows, _ = self.script("startup", *self.beside_fio())
        self.assertGreater(rows["planned on NVMe"]["value"], 0)
        self.assertGreater(rows["start-up"]["value"], 0)
        for when in ("the first time", "again"):
            self.assertGreater(rows[f"touching as much memory, {when}"]["value"], 0)
        self.assertEqual("start-up beside fio writing its bytes" in rows, bool(FIO))

    def test_adam_deepspeed(self):
        """Without DeepSpeed ferry is measured alone; --theirs, which `ferry bench adam` asks for, needs no ferry."""
        blind = {**os.environ, "PYTHONPATH": self.dir}
        os.makedirs(self.path("deepspeed"), exist_ok=True)
        Path(self.path("deepspeed/__init__.py")).write_text("raise ImportError('hidden')\n")
        done = self.run_of("adam_deepspeed", env=blind)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows, notes = self.rows_in(Path(self.path("adam_deepspeed.json")), done.stdout)
        self.assertIsNone(rows["unscale, AdamW and cast, 1 threads"]["ratio"])
        self.assertEqual(notes, ["DeepSpeed cannot be imported (hidden)"])
        done = subprocess.run([sys.executable, str(BENCH / "adam_deepspeed.py"), "--ferry", FERRY, "--threads", "5000"],
                              capture_output=True, text=True, timeout=300, check=False, env=blind)
        self.assertEqual(done.returncode, 2)  # ferry's, which has said why
        self.assertIn("5000", done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        alone = Path(self.path("elsewhere/bench"))
        alone.mkdir(parents=True)
        for name in ("adam_deepspeed.py", "common.py"):
            shutil.copy(BENCH / name, alone)
        theirs = subprocess.run([sys.executable, str(alone / "adam_deepspeed.py"), "--theirs"], capture_output=True,
                                text=True, check=True, env=blind)
        self.assertEqual(json.loads(theirs.stdout), {"missing": "DeepSpeed cannot be imported (hidden)"})

    @unittest.skipUnless(importlib.util.find_spec("numpy"), "numpy is not installed")
    def test_load_model(self):
        file = Path(self.path("load_model.json"))
        done = subprocess.run([sys.executable, str(BENCH / "load_model.py"), "--ferry", FERRY, "--dir", self.path("nvme"),
                               "--layers", "1", "--vocab", "500", "--sequence", "64", "--json", str(file)],
                              capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        rows, _ = self.rows_in(file, done.stdout)
        for variant in ("eval, from the drive", "eval, again", "train, from the drive", "train, again"):
            self.assertEqual(rows[f"{variant}: host peak beside plan, empty run and limit"]["outcome"], "met")
            self.assertGreater(rows[f"{variant}: loaded in"]["value"], 0)
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_checkpoint(self):
        rows, notes = self.script("checkpoint", *self.beside_fio(), "--layers", "2", "--steps", "6", "--every", "2")
        for name in ("checkpoint: written", "resumed: first step"):
            self.assertGreater(rows[name]["value"], 0)
        for what in ("waited", "slowed"):
            self.assertTrue(any(name.startswith(f"checkpoint: training {what}") for name in rows), rows)
        self.assertIn("checkpoint.memory auto; export with all memory", notes[0])

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_weak_scaling(self):
        rows, _ = self.script("weak_scaling", "--ranks", "1", "--steps", "5")
        self.assertGreater(rows["1 ranks: share of bound beside one GPU's"]["ratio"], 0)

    def check_slow_network(self, rows):
        for codec, factor in (("int8 gradients", 1.5), ("int4 gradients", 1.6), ("int4 gradients, int8 weights", 5)):
            self.assertGreater(rows[f"200 Mbit/s: {codec}, a step"]["value"], 0)
            self.assertGreater(rows[f"200 Mbit/s: {codec}, predicted"]["reference"], 0)
            self.assertGreater(rows[f"200 Mbit/s: {codec}, sent by a rank a step"]["ratio"], factor - 0.5)
        self.assertGreater(rows["200 Mbit/s: 1-bit Adam, a step"]["value"], 0)
        momentum = rows["200 Mbit/s: 1-bit Adam, momentum beside gradients, sent by a rank a step"]
        self.assertGreater(momentum["ratio"], 5)

    @unittest.skipIf(QUICK, "the quick run has the network that ferry emulates")
    def test_slow_network(self):
        """Hosts in namespaces: what went over the wire is known, how fast is not."""
        words = ("slow_network", "--emulate", "namespaces")
        reason = slow_network.why_not()
        if reason:
            self.assertIn(reason, self.refused(*words))
            self.skipTest(reason)
        rows, notes = self.script(*words, "--mbit", "200", "--steps", "3")
        self.check_slow_network(rows)
        self.assertIn("no delay", notes[0])
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        self.assertNotIn(f"ferry{os.getpid()}h", left)

    @unittest.skipIf(QUICK, "the quick run has the network that ferry emulates")
    def test_shared_tensors(self):
        """Ranks of one host that share tensors, or that are a stage, send less to the other: the interface counts it."""
        reason = slow_network.why_not()
        if reason:
            self.skipTest(reason)
        rows, _ = self.script("shared_tensors", "--emulate", "namespaces", "--mbit", "200", "--steps", "2", "--sides", "2,1",
                              "1,2", "--zero", "1", "3")
        for name, factor in (("T 2, P 1, D 2, ZeRO 3", 1.2), ("T 2, P 1, D 2, ZeRO 1", 1.3), ("T 1, P 2, D 2, ZeRO 1", 1.3)):
            self.assertGreater(rows[f"200 Mbit/s: {name}, a step"]["value"], 0)
            self.assertGreater(rows[f"200 Mbit/s: {name}, left the first host"]["ratio"], factor)

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_shared_tensors_over_a_network_that_ferry_emulates(self):
        """Each way to share has its plan beside it, and hosts that are stages send the least."""
        ways = in_quick({"2,1": "T 2, P 1, D 2, ZeRO 1", "1,2": "T 1, P 2, D 2, ZeRO 1"}, ["1,2"])
        rows, notes = self.script("shared_tensors", "--emulate", "throttle", "--delay", "50", "--mbit", "50", "--steps", "2",
                                  "--sides", *ways)
        self.assertIn("2 hosts of 2 ranks", notes[0])
        for name in ways.values():
            self.assertGreater(rows[f"50 Mbit/s: {name}, a step"]["ratio"], 0)
            self.assertGreater(rows[f"50 Mbit/s: {name}, planned"]["reference"], 0)
            self.assertEqual(rows[f"50 Mbit/s: {name}, the first rank's memory"]["ratio"], 1)
            self.assertLess(rows[f"50 Mbit/s: {name}, sent by a rank a step"]["value"],
                            rows["50 Mbit/s: ZeRO 3 alone, sent by a rank a step"]["value"])
        self.assertIn(rows["50 Mbit/s: the best, a step"]["note"], ways.values())

    @unittest.skipIf(QUICK, "the quick run has hosts of one")
    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_slow_network_between_hosts_of_two(self):
        """What the ranks of a host exchange among themselves first does not cross."""
        rows, notes = self.script("slow_network", "--emulate", "throttle", "--ranks", "4", "--ranks-per-host", "2",
                                  "--mbit", "200", "--steps", "3")
        self.assertIn("4 ranks, 2 a host", notes[0])
        between = {name: rows[f"200 Mbit/s: {name}, sent between hosts by a rank a step"]["ratio"]
                   for name in ("int4 gradients, int8 weights", "ZeRO++")}
        self.assertGreater(between["ZeRO++"], 1.2 * between["int4 gradients, int8 weights"])
        self.assertGreater(rows["200 Mbit/s: ZeRO++, predicted"]["reference"], 0)

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_layouts(self):
        """Large models by arithmetic, small ones run and planned."""
        rows, notes = self.script("layouts", "--models", "13B", "1T", "--steps", "3")
        for model in ("13B on 64", "1T on 3072"):
            fast, slow = (rows[f"{model} h100, {network}: a step"]["value"] for network in ("400Gbit", "10Gbit"))
            self.assertLess(fast, slow)
        known = [row["ratio"] for name, row in rows.items() if name.startswith("recorded: ")]
        self.assertEqual(len(known), 10)
        known += [row["ratio"] for name, row in rows.items() if name.startswith("divided: ")]
        large = rows["1T on 3072 h100, 400Gbit: a step"]
        self.assertAlmostEqual(large["value_low"] * max(known), large["value"], places=6)
        self.assertAlmostEqual(large["value_high"] * min(known), large["value"], places=6)
        for way in ("T 1, P 1", "T 2, P 1", "T 1, P 2"):
            self.assertGreater(rows[f"2 ranks, {way}: a step"]["ratio"], 0)
            self.assertEqual(f"shared: 2 ranks, {way}: a step beside the arithmetic" in rows, way != "T 1, P 1")
        self.assertIn("bubble", notes[0])

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_bubbles(self):
        """Every stage is traced, and beside each schedule's step stand theory and plan."""
        picture = self.path("step.svg")
        rows, notes = self.script("bubbles", "--stages", "2", "--steps", "3", "--picture", picture)
        with open(picture, encoding="utf-8") as file:
            drawn = file.read()
        for text in ("2 stages, zero bubble", "rank 1", "weight gradients", "% measured", "% planned"):
            self.assertIn(text, drawn)
        for schedule in ("1f1b", "zero_bubble"):
            for beside in ("theory", "its plan"):
                self.assertGreater(rows[f"2 stages, {schedule}: a step beside {beside}"]["ratio"], 0)
            for kernel in ("forward", "backward"):
                self.assertGreater(rows[f"2 stages, {schedule}: {kernel} of all ranks beside its plan"]["ratio"], 0)
            waits = rows[f"2 stages, {schedule}: the stage that waits most"]["value"]
            self.assertTrue(0 < waits < 100, waits)
        self.assertGreater(rows["2 stages, zero_bubble: a step beside 1f1b's"]["ratio"], 0)
        self.assertIn("8 micro-batches", notes[0])

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_slow_network_that_ferry_emulates(self):
        """No step is faster than the rate lets it be, and the delay is each exchange's."""
        picture = self.path("step.svg")
        rows, notes = self.script("slow_network", "--emulate", "throttle", "--delay", "300", "--mbit", "200",
                                  "--steps", "3", "--picture", picture)
        self.check_slow_network(rows)
        self.assertIn("a delay of 300 us", notes[0])
        self.assertLess(rows["200 Mbit/s: between two ranks"]["value"], 220)
        self.assertGreater(rows["200 Mbit/s: an exchange of nothing"]["value"], 0)  # where a line through sizes begins
        gradients = rows["200 Mbit/s: 1-bit Adam, momentum beside gradients, sent by a rank a step"]["reference"]
        self.assertGreater(rows["200 Mbit/s: uncoded, a step"]["value"], 0.9 * gradients * 8 / 200e6)
        with open(picture, encoding="utf-8") as file:
            self.assertEqual(file.read().count("<polyline"), 5)

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_local_steps_over_a_slow_network(self):
        """At stage 0 ranks go on alone between exchanges, which are four steps apart once the run is steady."""
        rows, _ = self.script("slow_network", "--emulate", "throttle", "--delay", "50", "--mbit", "200", "--steps", "3",
                              "--stage", "0")
        sent = {name: rows[f"200 Mbit/s: {name}, momentum beside gradients, sent by a rank a step"]["value"]
                for name in ("1-bit Adam", "0/1 Adam")}
        self.assertLess(sent["0/1 Adam"], 0.6 * sent["1-bit Adam"])
        self.assertGreater(rows["200 Mbit/s: 0/1 Adam, a step"]["ratio"], 0)
        self.assertGreater(rows["200 Mbit/s: 0/1 Adam, predicted"]["reference"], 0)


if __name__ == "__main__":
    unittest.main()
