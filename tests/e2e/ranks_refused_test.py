"""Ranks that do not belong together, or cannot do what they are asked."""

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import unittest

from harness import DOES_NOT_FIT, FERRY, USAGE
from ranks import ENVIRONMENT, MPIRUN, RANK_LOST, Ranks

MODELS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
OLD_DRIVER = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "old_driver")


class RefusedTest(Ranks):
    def test_a_step_that_the_ranks_cannot_share(self):
        run = self.ranks(2, self.config(batch__micro_batches=3))
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("batch.micro_batches", run.err)
        self.assertIn("3 micro-batches, 2 ranks", run.err)
        self.assertIn("rank 0", run.err)

    def test_what_all_ranks_are_refused_by_the_first_one_says_alone(self):
        """Before the ranks meet, where they agree, and where each finds it by itself."""
        for changes, words in (({"parallel__pipeline": 3}, ("parallel.pipeline", "groups of 3, 4 ranks")),
                               ({"parallel__pipeline": 0}, ("parallel.pipeline",)),
                               ({"model__heads": 3}, ("model.heads",)),
                               ({"data__tokens": self.path("nowhere.bin")}, ("nowhere.bin",)),
                               ({"zero__stage": 7}, ("zero.stage",))):
            with self.subTest(**changes):
                run = self.ranks(4, self.config(**changes))
                self.assertEqual(run.code, USAGE, run.err)
                said = [line for line in run.err.splitlines() if line.startswith("ferry: ")]
                self.assertEqual(len(said), 1, run.err)
                self.assertEqual(run.err.count("where:    rank 0: "), 1, run.err)
                for word in words:
                    self.assertIn(word, run.err)
        run = self.ranks(4, self.config(budgets__host="8KiB"))
        self.assertEqual(run.code, DOES_NOT_FIT, run.err)
        self.assertEqual(run.err.count("ferry: "), 1, run.err)

    def test_what_one_rank_is_refused_alone_it_says_itself(self):
        """Where its trace would go there is a directory. The first rank ends by the news of it."""
        trace = self.path("of-one-rank.json")
        os.mkdir(trace + ".1")
        run = self.ranks(3, self.config(steps=2), "--trace", trace)
        self.assertIn(run.code, (USAGE, RANK_LOST), run.err)
        self.assertEqual(len(re.findall("where:    rank 1: .*of-one-rank.json.1", run.err)), 1, run.err)
        self.assertIn("ferry: lost rank 1: it ended with an error", run.err)

    def test_the_others_speak_where_the_first_rank_does_not(self):
        """It is another program: it sleeps, or it dies and mpirun ends the others."""
        command = [FERRY, *self.command(self.config(zero__stage=7))]
        for first in (["sleep", "60"], ["sh", "-c", "sleep 4; kill -KILL $$"]):
            with self.subTest(first=first):
                run = subprocess.run([*MPIRUN, "-n", "1", *first, ":", "-n", "1", *command],
                                     capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
                self.assertNotEqual(run.returncode, 0)
                self.assertEqual(run.stderr.count("ferry: "), 1, run.stderr)
                self.assertIn("zero.stage", run.stderr)

    def test_the_budget_that_is_named_works(self):
        def needed(run, key):
            self.assertEqual(run.code, DOES_NOT_FIT, run.err)
            return int(re.search(key + r" to (\d+)", run.err).group(1))
        least = needed(self.ranks(2, self.config(budgets__host="8KiB")), "budgets.host")
        self.assert_trained(self.ranks(2, self.config(budgets__host=least)))
        needed(self.ranks(2, self.config(budgets__host=least - 2)), "budgets.host")
        tight = {**self.tight(2), "budgets__host": "2MiB"}
        small = {**tight, "budgets__nvme": [self.nvme("1MiB")]}
        least = needed(self.ranks(2, self.config(**small)), "budgets.nvme")
        self.assert_trained(self.ranks(2, self.config(**{**tight, "budgets__nvme": [self.nvme(least)]})))

    def test_ranks_that_were_not_started_alike(self):
        first = self.command(self.config())
        for changes, key in (({"optimizer__lr": 0.004}, "optimizer.lr"), ({"seed": 8}, "seed"),
                             ({"zero__stage": 1}, "zero.stage"),
                             ({"zero__compress": {"gradients": "int8"}}, "zero.compress.gradients"),
                             ({"zero__ranks_per_host": 2}, "zero.ranks_per_host")):
            with self.subTest(key=key):
                other = self.command(self.config(**changes))
                run = subprocess.run(
                    [*MPIRUN, "-n", "1", FERRY, *first, ":", "-n", "1", FERRY, *other],
                    capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
                self.assertEqual(run.returncode, USAGE, run.stderr)
                self.assertIn(f"where:    rank 0: {key} on rank 1\n", run.stderr)
                self.assertEqual(run.stderr.count("ferry: "), 1, run.stderr)  # of both

    @unittest.skipUnless(platform.machine() == "x86_64", "there are kernels to choose from on x86-64 only")
    def test_ranks_whose_processors_have_other_kernels(self):
        command = self.command(self.config(steps=2))
        run = subprocess.run(
            [*MPIRUN, "-n", "1", "-x", "OPENBLAS_CORETYPE=Nehalem", FERRY, *command,
             ":", "-n", "1", "-x", "OPENBLAS_CORETYPE=Haswell", FERRY, *command],
            capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
        self.assertEqual(run.returncode, USAGE, run.stderr)
        for said in ("OpenBLAS's kernels on rank 1\n", 'rank 0 has "Nehalem", rank 1 "Haswell"',
                     "OPENBLAS_CORETYPE=NAME"):
            self.assertEqual(run.stderr.count(said), 1, run.stderr)

    def test_ranks_that_were_given_other_options(self):
        command = self.command(self.config(), "--no-bound")
        without = [word for word in command if word != "--no-bound"]
        for first, other, key in ((command, without, "--no-bound"), (without, command, "--no-bound"),
                                  (command, [*command, "--weights-out", self.path("w")], "--weights-out"),
                                  ([*command, "--export", self.path("export")], command, "--export"),
                                  (command, [*command, "--machine", self.path("m.json")], "--machine"),
                                  (command, [*command, "--resume"], "--resume"),
                                  (command, [*command, "--set", "device=cuda"], "device"),
                                  (command, ["eval", self.path("model"), self.path("tokens.bin")], "the command")):
            with self.subTest(first=first, other=other):
                run = subprocess.run(
                    [*MPIRUN, "-n", "1", FERRY, *first, ":", "-n", "1", FERRY, *other],
                    capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
                self.assertEqual(run.returncode, USAGE, run.stderr)
                self.assertIn(f"{key} on rank 1\n", run.stderr)
                self.assertFalse(os.path.exists(self.path("export")))

    def test_ranks_whose_model_directories_differ(self):
        """Each below a directory of its own, as on hosts of their own."""
        for host in ("a", "b"):
            shutil.copytree(MODELS / "llama", self.path(f"{host}/model"))
        tokens, ids = self.path("of-ids.bin"), self.path("ids")
        with open(ids, "wb") as file:
            file.write(b"".join((i % 60).to_bytes(2, "little") for i in range(2000)))
        done = self.ferry("data", ids, "-o", tokens, "--ids", "uint16", "--vocab", "67")
        self.assertEqual(done.code, 0, done.err)

        def of_model(load):
            return self.command(self.config(model={"path": "model", "load": load}, batch__sequence=8,
                                            data__tokens=tokens, steps=1))

        def run(command):
            sides = [["-n", "1", "-wdir", self.path(host), FERRY, *command] for host in ("a", "b")]
            return subprocess.run([*MPIRUN, *sides[0], ":", *sides[1]], capture_output=True, text=True,
                                  timeout=120, check=False, env=ENVIRONMENT)
        alike = run(of_model(True))
        self.assertEqual(alike.returncode, 0, alike.stderr)
        weights = self.path("b/model/model-00003-of-00003.safetensors")
        with open(weights, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 0x40]))
        refused = run(of_model(True))
        self.assertEqual(refused.returncode, USAGE, refused.stderr)
        self.assertIn("the weights to start from on rank 1", refused.stderr)
        with open(self.path("b/model/config.json"), encoding="utf-8") as file:
            description = json.load(file)
        description["initializer_range"] = 0.5
        with open(self.path("b/model/config.json"), "w", encoding="utf-8") as file:
            json.dump(description, file)
        refused = run(of_model(False))
        self.assertEqual(refused.returncode, USAGE, refused.stderr)
        self.assertIn("random, of standard deviation 0.5", refused.stderr)

    def test_ranks_of_another_build(self):
        other = self.path("ferry-of-tomorrow")
        shutil.copy(FERRY, other)
        with open(other, "ab") as file:
            file.write(b"a difference")
        command = self.command(self.config())
        run = subprocess.run(
            [*MPIRUN, "-n", "1", FERRY, *command, ":", "-n", "1", other, *command],
            capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
        self.assertEqual(run.returncode, USAGE, run.stderr)
        self.assertIn("the program on rank 1", run.stderr)

    @unittest.skipUnless(platform.machine() == "x86_64", "there are kernels to choose from on x86-64 only")
    def test_older_kernels_are_said_once(self):
        run = self.train(self.config(), through=[*MPIRUN, "-n", "3"], env={**ENVIRONMENT, "OPENBLAS_CORETYPE": "Nehalem"})
        self.assert_trained(run)
        self.assertEqual(run.err.count("for an older processor than this one"), 1, run.err)

    @unittest.skipUnless(os.path.isdir(OLD_DRIVER), "built without CUDA")
    def test_a_driver_that_no_rank_can_use_is_every_ranks_error(self):
        libraries = f"{OLD_DRIVER}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = {**ENVIRONMENT, "LD_LIBRARY_PATH": libraries}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        run = self.train(self.config(device="cuda"), through=[*MPIRUN, "-n", "3"], env=environment)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("driver is too old", run.err)
        self.assertNotIn("fewer GPUs than ranks", run.err)

    def test_groups_that_cannot_be_planned_are_refused(self):
        """As `train` refuses them, before anything is measured."""
        heads = {"model__heads": 4, "model__kv_heads": 2}
        for ranks, changes, words in (
                (3, {"parallel__pipeline": 2}, ("parallel.pipeline", "groups of 2, 3 ranks", "start 4 ranks")),
                (4, {"parallel__pipeline": 3}, ("parallel.pipeline", "groups of 3, 4 ranks")),
                (6, {"parallel__tensor": 4}, ("parallel.tensor", "groups of 4, 6 ranks")),
                (8, {"parallel__tensor": 8, **heads}, ("more ranks share a block's tensors than it has heads",
                                                       "set parallel.tensor to 4")),
                (3, {"parallel__pipeline": 3, "model__layers": 2}, ("3 stages", "2 blocks", "set it to 2 or less")),
                (6, {"parallel__pipeline": 2, "parallel__tensor": 2}, ("groups of 4, 6 ranks", "start 8 ranks")),
                (16, {"parallel__pipeline": 2, "parallel__tensor": 8, **heads},
                 ("parallel.tensor", "set parallel.tensor to 4"))):
            with self.subTest(ranks=ranks, **changes):
                planned = self.ferry("plan", self.command(self.config(**changes))[1], "--ranks", str(ranks))
                self.assertEqual(planned.code, USAGE, planned.err)
                self.assertEqual(planned.out, "")
                for word in words:
                    self.assertIn(word, planned.err)


if __name__ == "__main__":
    unittest.main()
