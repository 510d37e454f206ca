"""`ferry ckpt import`: checkpoints whose settings change, and directories of another program."""

import json
import os
import pathlib
import shutil
import struct
import unittest

from checkpoints import BF16, MIXED, NVME, RAM, SGD, STEPS, Saving
from harness import IO, USAGE, write_tensors


class ImportTest(Saving):
    """ferry ckpt import: of checkpoints whose settings change, and of a directory of safetensors."""

    AT = 6  # the step that is imported

    def source(self, **state):
        """A checkpoint in the middle of a run that comes to its end."""
        there = self.path(f"{self.name}-source")
        shutil.rmtree(there, ignore_errors=True)
        config = self.run_config(steps=self.AT, schedule__total_steps=STEPS, checkpoint__dir=there, **state)
        self.ok(self.train(config))
        return self.step(self.AT, there)

    def plain(self, source, *without, step=AT):
        """The same as another program would leave it: no manifest, a trainer's state."""
        there = self.path(f"{self.name}-plain")
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(source, there)
        for name in ("manifest.json", *without):
            os.remove(os.path.join(there, name))
        if step is not None:
            with open(os.path.join(there, "trainer_state.json"), "w", encoding="utf-8") as file:
                json.dump({"global_step": step, "log_history": []}, file)
        return there

    def importing(self, config, source, *words):
        _, name, *_ = self.command(config)
        return ["ckpt", "import", name, source, *words]

    def imported(self, config, source, *words):
        run = self.ok(self.ferry(*self.importing(config, source, "--json", *words)))
        return run.lines[0]["checkpoint"]

    def change(self, path, change):
        tensors = self.tensors(path)
        change(tensors)
        write_tensors(path, tensors)

    def arrays(self, step):
        """Of a checkpoint, all of its files."""
        return {name: array for file in sorted(os.listdir(step)) if file.endswith(".safetensors")
                for name, array in self.tensors(os.path.join(step, file)).items()}

    # ------------------------------------------------------------ the same bits

    def test_under_its_own_configuration(self):
        for placement, state in ((RAM, {}), (NVME, BF16), (MIXED, {"precision": "bf16", "optimizer__master": "split",
                                                                  "optimizer__moments": "bf16"}),
                                 (RAM, {**SGD, **BF16}), (RAM, {"optimizer__method": "lion", "model__tie_embeddings": True}),
                                 (NVME, {"optimizer__moments": "int8", **BF16}), (RAM, {"precision": "fp16"}),
                                 (MIXED, {"freeze": ["model.layers.1.*"], **BF16})):
            with self.subTest(placement=placement, **state):
                whole = self.whole(**state)
                source = self.source(**state)
                config = self.saving(placement, **state)
                there = self.imported(config, source)
                self.assertEqual(there, self.step(self.AT))
                self.ok(self.ferry("ckpt", "verify", there))
                self.assertEqual(self.arrays(there), self.arrays(source))
                resumed = self.ok(self.train(config, "--resume", "latest"))
                self.assertEqual(resumed.hashes, whole.hashes)
                self.assertEqual(resumed.steps[0]["step"], self.AT + 1)
                shutil.rmtree(self.dir_)

    def test_another_programs_directory(self):
        """Without a manifest, its moments in several files, some tensors without the base model's prefix."""
        whole, source = self.whole(**BF16), self.source(**BF16)
        there = self.plain(source)
        for kind in ("exp_avg", "master"):
            path = os.path.join(there, f"{kind}.safetensors")
            tensors = list(self.tensors(path).items())
            half = len(tensors) // 2
            for number, part in enumerate((tensors[:half], tensors[half:]), start=1):
                bare = {name.removeprefix("model."): array for name, array in part}
                write_tensors(os.path.join(there, f"{kind}-{number:05}-of-00002.safetensors"), bare)
            os.remove(path)
        config = self.saving(**BF16)
        self.assertEqual(self.arrays(self.imported(config, there)), self.arrays(source))
        listed = self.ok(self.ferry("ckpt", "ls", self.dir_, "--json")).lines[0]
        self.assertEqual((listed["step"], listed["loss"]), (self.AT, None))
        self.assertEqual(self.ok(self.train(config, "--resume", "latest")).hashes, whole.hashes)

    def test_another_learning_rate(self):
        source = self.source()
        config = self.saving(optimizer__lr=0.001)
        self.refused(USAGE, ["another configuration"], *self.command(config, "--resume", source))
        there = self.imported(config, source)
        self.assertEqual(self.arrays(there), self.arrays(source))
        resumed = self.ok(self.train(config, "--resume", "latest"))
        other = self.whole()
        lr = {step["step"]: step["lr"] for step in other.steps}
        for step in resumed.steps:
            self.assertAlmostEqual(step["lr"], lr[step["step"]] / 3, places=9)
        self.assertNotEqual(resumed.hashes, other.hashes)

    def test_another_optimizer(self):
        """Adam's moments are AdamW's. Others mean something else, and SGD without momentum has none."""
        source = self.source(**BF16)
        for method in ({"optimizer__method": "lion"}, SGD, {"optimizer__method": "adagrad", "optimizer__betas": None}):
            self.refused(USAGE, ["another optimizer's", "adamw", method["optimizer__method"], "--step 0"],
                         *self.importing(self.saving(**BF16, **method), source))
        for method in ({"optimizer__method": "adam"}, {**SGD, "optimizer__momentum": 0}):
            config = self.saving(**BF16, **method)
            self.imported(config, source)
            self.assertEqual(self.ok(self.train(config, "--resume", "latest")).steps[0]["step"], self.AT + 1)
            shutil.rmtree(self.dir_)

    def test_moments_of_another_type(self):
        source = self.source(**BF16)
        before = self.arrays(source)
        rounded = lambda bits: (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff
        after = self.arrays(self.imported(self.saving(optimizer__moments="bf16", **BF16), source))
        for name, (dtype, shape, values) in before.items():
            if not name.endswith((".exp_avg", ".exp_avg_sq")):
                self.assertEqual(after[name], (dtype, shape, values))
                continue
            self.assertEqual(after[name][:2], ("BF16", shape))
            count = len(values) // 4
            self.assertEqual(list(struct.unpack(f"<{count}H", after[name][2])),
                             [rounded(bits) for bits in struct.unpack(f"<{count}I", values)], name)
        shutil.rmtree(self.dir_)
        config = self.saving(optimizer__moments="int8", **BF16)
        after = self.arrays(self.imported(config, source))
        coded = [name for name, array in after.items() if array[0] == "U8"]
        self.assertTrue(coded)
        for name in coded:
            values = struct.unpack(f"<{len(before[name][2]) // 4}f", before[name][2])
            largest = [max(map(abs, values[at:at + 256])) for at in range(0, len(values), 256)]
            scales = after[name.replace(".exp_avg", ".exp_avg_scales") if name.endswith(".exp_avg")
                           else name.replace(".exp_avg_sq", ".exp_avg_sq_scales")][2]
            self.assertEqual(list(struct.unpack(f"<{len(scales) // 4}f", scales)), largest, name)
        self.ok(self.train(config, "--resume", "latest"))

    def test_without_moments(self):
        """Weights alone, of an export: moments begin at zero, and the master is the weight."""
        source = self.source(**BF16)
        self.ok(self.ferry("ckpt", "export", source, self.path(f"{self.name}-tuned"), "--export-type", "fp32"))
        config = self.saving(**BF16)
        there = self.imported(config, self.path(f"{self.name}-tuned"), "--step", "0")
        self.assertEqual(there, self.step(0))
        before, after = self.arrays(source), self.arrays(there)
        for name, (_, _, values) in after.items():
            if name.endswith((".exp_avg", ".exp_avg_sq")):
                self.assertEqual(values, bytes(len(values)), name)
            else:
                self.assertEqual(after[name], before[name], name)
        self.assertEqual(self.ok(self.train(config, "--resume", "latest")).steps[0]["step"], 1)

    def test_without_moments_in_the_middle(self):
        """The schedule goes on, and bias correction begins: the first update is Adam's first, one learning rate an element."""
        source = self.source()
        there = self.plain(source, "exp_avg.safetensors", "exp_avg_sq.safetensors")
        free = {"clip_norm": 0, "optimizer__weight_decay": 0, "optimizer__betas": [0.9, 0.999]}
        config = self.saving(checkpoint__every=1, checkpoint__keep={"last": 20}, **free)
        self.imported(config, there)
        said = self.ok(self.ferry("ckpt", "inspect", self.step(self.AT), "--json")).lines[0]
        self.assertEqual((said["updates"], said["moment_updates"]), (self.AT, 0))
        self.assertIn(f"{self.AT} updates (0 of moments)", self.ok(self.ferry("ckpt", "inspect", self.step(self.AT))).out)
        whole = self.ok(self.train(config, "--resume", "latest"))
        lr = whole.steps[0]["lr"]
        schedule = self.ok(self.train(self.run_config(**free)))
        self.assertEqual([step["lr"] for step in whole.steps], [step["lr"] for step in schedule.steps[self.AT:]])
        before, after = self.arrays(self.step(self.AT)), self.arrays(self.step(self.AT + 1))
        for name in [name for name in before if name.endswith("_proj.weight")]:
            was, now = (struct.unpack(f"<{len(one[name][2]) // 4}f", one[name][2]) for one in (before, after))
            moved = sorted(abs(a - b) for a, b in zip(was, now))
            self.assertLessEqual(moved[-1], lr * 1.01, name)
            self.assertGreater(moved[len(moved) // 2], lr * 0.98, name)
        # Both counts outlive a kill, of a checkpoint and of durable steps.
        for placement, words in ((RAM, {}), (NVME, {"checkpoint__durable_steps": True})):
            shutil.rmtree(self.dir_)
            config = self.saving(placement, **free, **words)
            self.imported(config, there)
            self.killed(config, "--resume", "latest", steps=3)
            last = self.ok(self.train(config, *(("--resume",) if words else self.latest())))
            self.assertEqual(last.hashes, whole.hashes)

    def test_another_step_leaves_moments_as_they_are(self):
        there = self.imported(self.saving(), self.source(), "--step", "3")
        said = self.ok(self.ferry("ckpt", "inspect", there, "--json")).lines[0]
        self.assertEqual((said["step"], said["updates"], said["moment_updates"]), (3, 3, self.AT))

    def test_int8_moments(self):
        """Codes stay codes, and become numbers where the run keeps those."""
        source = self.source(optimizer__moments="int8", **BF16)
        before = self.arrays(source)
        shares = {}
        for name, first in ((".exp_avg", 1), (".exp_avg_sq", 2)):
            above = [10.0 ** (decade - 6) * (0.1 + 0.9 * (2 * i + 1) / (2 * (first << decade)))
                     for decade in range(7) for i in range(first << decade)]
            shares[name] = ([-share for share in reversed(above)] if first == 1 else []) + [0, *above, 1]
        after = self.arrays(self.imported(self.saving(**BF16), self.plain(source)))
        coded = [name for name, array in before.items() if array[0] == "U8"]
        self.assertTrue(coded)
        for name in coded:
            self.assertEqual(after[name][:2], ("F32", before[name][1]))
            scales = before[name.replace(".exp_avg_sq", ".exp_avg_sq_scales") if name.endswith("_sq") else name + "_scales"][2]
            scales = struct.unpack(f"<{len(scales) // 4}f", scales)
            values = struct.unpack(f"<{len(before[name][2])}f", after[name][2])
            for i, (code, value) in enumerate(zip(before[name][2], values)):
                wanted = shares[name[name.rindex("."):]][code] * scales[i // 256]
                self.assertLessEqual(abs(value - wanted), 3e-7 * abs(wanted), (name, i))
        # Of one tensor numbers, of the others codes: all are codes again.
        shutil.rmtree(self.dir_)
        there = self.plain(source)
        name = next(name for name in coded if name.endswith(".exp_avg"))
        self.change(os.path.join(there, "exp_avg.safetensors"), lambda tensors: tensors.update({name: after[name]}))
        self.change(os.path.join(there, "exp_avg_scales.safetensors"), lambda tensors: tensors.pop(name + "_scales"))
        again = self.arrays(self.imported(self.saving(optimizer__moments="int8", **BF16), there))
        for other in before:
            if other not in (name, name + "_scales"):
                self.assertEqual(again[other], before[other], other)
        self.assertEqual(again[name][:2], before[name][:2])

    def test_a_loss_scale(self):
        fp16 = {"precision": "fp16"}
        source = self.source(**fp16)
        config = self.saving(optimizer__lr=0.001, **fp16)
        said = self.ok(self.ferry("ckpt", "inspect", self.imported(config, source), "--json")).lines[0]
        self.assertEqual(said["loss_scale"], {"value": 65536, "good": self.AT, "skipped": 0})
        shutil.rmtree(self.dir_)
        there = self.plain(source)
        state = {"global_step": self.AT, "loss_scale": 1024}
        pathlib.Path(there, "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
        self.imported(config, there)
        self.assertEqual({step["loss_scale"] for step in self.ok(self.train(config, "--resume", "latest")).steps}, {1024})
        # Another type has none.
        shutil.rmtree(self.dir_)
        self.imported(self.saving(**BF16), source)
        self.assertEqual({s["loss_scale"] for s in self.ok(self.train(self.saving(**BF16), "--resume", "latest")).steps}, {1})
        for wrong in (0.5, 3, -2, "high", 0):
            pathlib.Path(there, "trainer_state.json").write_text(json.dumps({**state, "loss_scale": wrong}), encoding="utf-8")
            self.refused(USAGE, ["power of two", "loss_scale"], *self.importing(config, there))

    # ------------------------------------------------------------ refused

    def test_bad_state(self):
        source = self.source(**BF16)
        name = "model.layers.1.mlp.up_proj.weight"

        def to(path, change):
            return lambda there: self.change(os.path.join(there, path), change)

        def renamed(tensors):
            tensors["model.layers.9.mlp.up_proj.weight.exp_avg"] = tensors.pop(name + ".exp_avg")

        def transposed(tensors):
            dtype, shape, values = tensors[name + ".exp_avg_sq"]
            tensors[name + ".exp_avg_sq"] = (dtype, shape[::-1], values)

        def master_transposed(tensors):
            dtype, shape, values = tensors[name + ".master"]
            tensors[name + ".master"] = (dtype, shape[::-1], values)

        def twice(there):
            shutil.copy(os.path.join(there, "exp_avg.safetensors"), os.path.join(there, "exp_avg_too.safetensors"))

        def shorter(there):
            path = os.path.join(there, "exp_avg.safetensors")
            os.truncate(path, os.path.getsize(path) - 100)

        def of_integers(tensors):
            dtype, shape, values = tensors[name + ".exp_avg"]
            tensors[name + ".exp_avg"] = ("I32", shape, values)

        for change, code, texts in (
                (to("exp_avg.safetensors", lambda t: t.pop(name + ".exp_avg")), USAGE,
                 ["lacks an array", name + ".exp_avg", "missing"]),
                (lambda there: os.remove(os.path.join(there, "exp_avg_sq.safetensors")), USAGE, ["lacks an array", ".exp_avg_sq"]),
                (to("master.safetensors", lambda t: t.pop(name + ".master")), USAGE, ["lacks an array", name + ".master"]),
                (to("exp_avg.safetensors", renamed), USAGE, ["a tensor that the model does not have", "layers.9"]),
                (to("exp_avg_sq.safetensors", transposed), USAGE, ["another shape", name, "[64, 160]", "[160, 64]"]),
                (to("master.safetensors", master_transposed), USAGE, ["another shape", name, "[64, 160]", "[160, 64]"]),
                (to("exp_avg.safetensors", of_integers), USAGE, ["of a type that is not read", name, "I32"]),
                (twice, USAGE, ["in two files"]),
                (shorter, IO, ["exp_avg.safetensors"])):
            for precision in ("bf16", "fp32"):
                with self.subTest(texts=texts, precision=precision):
                    shutil.rmtree(self.dir_, ignore_errors=True)
                    there = self.plain(source)
                    change(there)
                    self.refused(code, texts, *self.importing(self.saving(precision=precision), there))
                    self.assertEqual([step for step in self.steps() if step.startswith("step")], [])
        there = self.plain(source)
        self.ok(self.ferry(*self.importing(self.saving(**BF16), there)))

    def test_which_step(self):
        source = self.source(**BF16)
        config = self.saving(**BF16)
        there = self.plain(source, step=None)
        self.refused(USAGE, ["not known which step", "--step"], *self.importing(config, there))
        self.refused(USAGE, ["beyond the run's last", "step 13", "steps 12"], *self.importing(config, there, "--step", "13"))
        run = self.refused(USAGE, ["--step", "0 to 1000000000000000"], *self.importing(config, there, "--step", "-1"))
        self.assertLess(len(run.err), 400)
        for text, said in (('{"global_step": -3}', "whole number"), ('{"global_step": "7"}', "whole number"), ("[6]", "no object"),
                           ("{", "trainer_state.json")):
            pathlib.Path(there, "trainer_state.json").write_text(text, encoding="utf-8")
            self.refused(USAGE, [said], *self.importing(config, there))
        pathlib.Path(there, "trainer_state.json").write_text('{"global_step": 6, "optimizer_step": 5}', encoding="utf-8")
        said = self.ok(self.ferry(*self.importing(config, there, "--json"))).lines[0]
        self.assertEqual((said["step"], said["updates"]), (6, 5))

    def test_what_is_not_imported(self):
        source = self.source(**BF16)
        config = self.saving(**BF16)
        for pickle, made in (("optimizer.pt", pathlib.Path.touch), ("global_step6", pathlib.Path.mkdir),
                             ("mp_rank_00_model_states.pt", pathlib.Path.touch)):
            there = self.plain(source)
            made(pathlib.Path(there, pickle))
            self.refused(USAGE, ["pickles", pickle, "python3 -m ferry_offload.convert", there], *self.importing(config, there))
        self.refused(USAGE, ["no such directory"], *self.importing(config, self.path("nowhere")))
        self.refused(USAGE, ["no place for the checkpoint", "checkpoint.dir"], *self.importing(self.run_config(**BF16), source))
        self.flip(os.path.join(source, "exp_avg.safetensors"), os.path.getsize(os.path.join(source, "exp_avg.safetensors")) - 9)
        self.refused(IO, ["exp_avg.safetensors"], *self.importing(config, source))
        self.assertEqual([step for step in self.steps() if step.startswith("step")], [])

    def test_into_a_directory_of_another_run(self):
        source = self.source(**BF16)
        config = self.saving(**BF16)
        self.killed(config, steps=5)
        # What the kill left unpublished, the next program in the directory takes away.
        before = [step for step in self.steps() if not step.endswith(".part")]
        self.refused(USAGE, ["did not come to its end", self.dir_], *self.importing(config, source))
        self.assertEqual(self.steps(), before)

    def test_codes_that_say_nothing(self):
        source = self.source(optimizer__moments="int8", **BF16)
        there = self.plain(source, "exp_avg_scales.safetensors")
        self.refused(USAGE, ["codes of moments have no scales", ".exp_avg_scales"], *self.importing(self.saving(**BF16), there))
        there = self.plain(source)
        path = os.path.join(there, "exp_avg_scales.safetensors")
        name = sorted(self.tensors(path))[0]
        self.change(path, lambda tensors: tensors.update({name: ("F32", [1], tensors[name][2][:4])}))
        self.refused(USAGE, ["another shape", name], *self.importing(self.saving(**BF16), there))


if __name__ == "__main__":
    unittest.main()
