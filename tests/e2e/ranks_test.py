"""Several ranks, as a user starts them: mpirun -n N ferry train CONFIG."""

import collections
import json
import os
import pathlib
import platform
import random
import re
import shutil
import signal
import subprocess
import time
import unittest

from harness import DOES_NOT_FIT, FERRY, IO, USAGE, FerryTest, start, in_quick

RANK_LOST = 6
MODELS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
MORTAL = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "libmortal_rank.so")
OLD_DRIVER = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "old_driver")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
# Settings that a rank needs where this machine lacks them, or guesses at them slowly.
ENVIRONMENT = {**os.environ, "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
               "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def command_of(process):
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Ranks(FerryTest):
    def config(self, **changes):  # pylint: disable=arguments-differ
        return super().config(**{"batch__micro_batch": 1, "batch__micro_batches": 12, "steps": 4,
                                 "clip_norm": 0.5, "zero__timeout_seconds": 60, **changes})

    def ranks(self, number, config, *arguments):
        return self.train(config, *arguments, through=[*MPIRUN, "-n", str(number)], env=ENVIRONMENT)

    def tight(self, ranks):
        """As little in memory as a rank can do with."""
        return {"budgets__nvme": [self.nvme()], "budgets__host": f"{ranks * 600}KiB",
                "swap__chunk_elements": 8192, "swap__state_on_nvme": 1, "swap__speculate": "all",
                "io__direct": False}

    def assert_left_nothing(self):
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_stages_and_tiers_give_the_same_bits(self):
        for number in in_quick((2, 3), [1]):
            runs = []
            for stage in (0, 1, 2, 3):
                for name, tiers in (("memory", {}), ("tight", self.tight(number)),
                                    ("device", {"swap__state_on_device": 0.6,
                                                "swap__chunk_elements": 8192})):
                    with self.subTest(ranks=number, stage=stage, tiers=name):
                        run = self.ranks(number, self.config(zero__stage=stage, **tiers))
                        self.assert_trained(run)
                        runs.append(run.numbers())
                        self.assertEqual(runs[-1], runs[0])
                        self.assertEqual(run.summary["ranks"], number)
                        self.assertGreater(run.lane("comm"), 0)
                        self.assertEqual(run.lane("nvme read") > 0, name == "tight")
                        on_device, in_host = (run.bytes_of(tier, "optimizer state") for tier in ("device", "host"))
                        # Replicated state is updated by all ranks, from what the host has gathered.
                        self.assertEqual(on_device > 0, name == "device" and stage > 0)
                        self.assertEqual(in_host > 0, name != "tight")  # device: what is left
                        self.assert_left_nothing()

    def test_all_ranks_skip_a_step_whose_gradient_overflows(self):
        """One token a sequence and hardly an epsilon: fp16 overflows until the loss scale has fallen."""
        steep = {"precision": "fp16", "batch__sequence": 1, "batch__micro_batches": 2, "steps": 12,
                 "model__norm_eps": 1e-30, "clip_norm": 1e6}
        runs = []
        for stage in in_quick((0, 1, 2, 3), (0, 3)):
            for tiers in ({}, self.tight(2), {"swap__state_on_device": 0.6}):
                with self.subTest(stage=stage, tiers=tiers):
                    run = self.ranks(2, self.config(zero__stage=stage, **steep, **tiers))
                    self.assert_trained(run)
                    runs.append(run.numbers())
                    self.assertEqual(runs[-1][1], runs[0][1])
                    self.assertEqual([step["skipped"] for step in run.steps],
                                     [step["skipped"] for step in runs[0][0]])
        skipped = [step["skipped"] for step in runs[0][0]]
        self.assertIn(True, skipped)
        self.assertIn(False, skipped)

    def test_codes_give_the_same_bits_and_are_counted(self):
        """Every stage and tier that shares a codec; what was sent follows from the model."""
        for codec, bits in (("none", 32), ("int8", 8 + 32 / 64), ("int4", 4 + 32 / 64)):
            runs = []
            for stage in in_quick((0, 1, 2, 3), (0, 3)):
                for name, tiers in (("memory", {}), ("tight", self.tight(2))):
                    with self.subTest(codec=codec, stage=stage, tiers=name):
                        run = self.ranks(2, self.config(
                            zero__stage=stage, zero__compress={"gradients": codec, "block": 64}, **tiers))
                        self.assert_trained(run)
                        runs.append(run.numbers())
                        self.assertEqual(runs[-1], runs[0])
                        sent = {one["collective"]: one for one in run.summary["collectives"]}
                        gradients = sent.pop("exchange gradients")
                        self.assertEqual(gradients["sent_bytes"] * 32, gradients["raw_bytes"] * bits)
                        for other in sent.values():
                            self.assertEqual(other["sent_bytes"], other["raw_bytes"])
                        everything = sum(one["sent_bytes"] for name, one in sent.items() if name != "agree")
                        self.assertEqual(run.lane("comm"), everything + gradients["sent_bytes"])
                        self.assert_left_nothing()

    def test_signs_of_momentum_give_the_same_bits_and_are_counted(self):
        """1-bit Adam, at every stage and tier: a bit an element and a scale a block, there and back."""
        onebit = {"optimizer__method": "onebit_adam", "optimizer__freeze_step": 2, "steps": 6,
                  "zero__compress": {"block": 64}}
        runs = []
        tight = {**self.tight(2), "budgets__host": "1800KiB", "swap__state_on_nvme": 1}  # momentum passes too
        for stage in in_quick((0, 1, 2, 3), (0, 3)):
            for name, tiers in (("memory", {}), ("tight", tight)):
                with self.subTest(stage=stage, tiers=name):
                    run = self.ranks(2, self.config(zero__stage=stage, **onebit, **tiers))
                    self.assert_trained(run)
                    runs.append(run.numbers())
                    self.assertEqual(runs[-1], runs[0])
                    sent = {one["collective"]: one for one in run.summary["collectives"]}
                    for name in ("exchange momentum", "gather momentum"):
                        self.assertEqual(sent[name]["sent_bytes"] * 32, sent[name]["raw_bytes"] * (1 + 32 / 64))
                        # Four steps as signs, two of gradients.
                        self.assertEqual(sent[name]["raw_bytes"], 2 * sent["exchange gradients"]["raw_bytes"])
                    self.assert_left_nothing()
        exact = self.ranks(2, self.config(steps=6))
        self.assertNotEqual(runs[0], exact.numbers())

    def test_zeroone_adam_sends_what_its_intervals_say(self):
        """Of 12 updates 1, 2, 3, 5 and 7 take gradients in full; the others send signs, or nothing at local steps."""
        zeroone = {"optimizer__method": "zeroone_adam", "optimizer__var_freeze_step": 7, "optimizer__var_update_scaler": 2,
                   "steps": 12, "zero__compress": {"block": 64}}
        tight = {**self.tight(2), "budgets__host": "1800KiB", "swap__state_on_nvme": 1}
        runs = []
        for stage, tiers in ((0, {}), (0, tight), (1, {}), (2, tight), (3, {})):
            with self.subTest(stage=stage, tight=bool(tiers)):
                run = self.ranks(2, self.config(zero__stage=stage, **zeroone, **tiers))
                self.assert_trained(run)
                runs.append(run.numbers())
                self.assertEqual(runs[-1], runs[0])
                sent = {one["collective"]: one for one in run.summary["collectives"]}
                for name in ("exchange momentum", "gather momentum"):
                    self.assertEqual(sent[name]["sent_bytes"] * 32, sent[name]["raw_bytes"] * (1 + 32 / 64))
                    self.assertEqual(5 * sent[name]["raw_bytes"], 7 * sent["exchange gradients"]["raw_bytes"])
                # Before updates 4, 6 and 8, in fp32 as the gradients of the five others: this rank's shard.
                moments = sent.get("gather moments", {"sent_bytes": 0})["sent_bytes"]
                self.assertEqual(5 * moments, 3 * sent["exchange gradients"]["sent_bytes"] if stage > 0 else 0)
                self.assert_left_nothing()
        local = {**zeroone, "optimizer__var_freeze_step": 3, "optimizer__local_step_scaler": 1,
                 "optimizer__local_step_clipper": 4}
        for tiers in ({}, {**tight, "budgets__host": "2400KiB"}):
            run = self.ranks(2, self.config(zero__stage=0, **local, **tiers))
            self.assert_trained(run)
            runs.append(run.numbers())
            sent = {one["collective"]: one for one in run.summary["collectives"]}
            # Updates 4, 5 and 9 send signs, 1 to 3 gradients; the last is of no exchange, and is said to be.
            self.assertEqual(sent["exchange momentum"]["raw_bytes"], sent["exchange gradients"]["raw_bytes"])
            self.assertIn("a local step unless some are skipped: exports will have", run.err)
        self.assertEqual(runs[-1], runs[-2])
        self.assertNotEqual(runs[-1], runs[0])

    def test_an_emulated_network(self):
        """Ranks wait for bytes as if a network were that slow, and compute the same."""
        def over(network, config):
            return self.train(config, through=[*MPIRUN, "-n", "2"], env={**ENVIRONMENT, "FERRY_EMULATED_NETWORK": network})
        config = self.config(zero__stage=1, steps=3)
        plain, slow = self.ranks(2, config), over("40Mbit,200us", config)
        self.assert_trained(slow)
        self.assertEqual(slow.numbers(), plain.numbers())
        self.assertIn("a network is emulated, every rank a host: 40 Mbit/s and a delay of 200 us", slow.err)
        for one in slow.steps[1:]:
            self.assertGreater(one["seconds"], slow.lane("comm") / len(slow.steps) * 8 / 40e6)
        wrong = over("fast", config)
        self.assertEqual(wrong.code, USAGE, wrong.err)
        self.assertIn("measured: fast", wrong.err)

    def test_all_ranks_skip_a_step_of_momentum_whose_gradient_overflows(self):
        steep = {"precision": "fp16", "batch__sequence": 1, "batch__micro_batches": 2, "steps": 16,
                 "model__norm_eps": 1e-30, "clip_norm": 1e6, "optimizer__lr": 1e-6}
        onebit = {"optimizer__method": "onebit_adam", "optimizer__freeze_step": 1}
        tight = {**self.tight(2), "budgets__host": "1800KiB", "swap__state_on_nvme": 1}
        runs = [self.ranks(2, self.config(**onebit, **steep, **tiers)) for tiers in ({}, tight)]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.hashes, runs[0].hashes)
        skipped = [step["skipped"] for step in runs[0].steps]
        self.assertEqual(skipped, [step["skipped"] for step in runs[1].steps])
        first = skipped.index(False)  # the only update that is exact
        self.assertIn(True, skipped[first + 1:])
        self.assertIn(False, skipped[first + 1:])

    def test_weights_that_travel_as_codes(self):
        compressed = {"gradients": "int4", "weights": "int8", "block": 256}
        runs = [self.ranks(3, self.config(zero__compress=compressed, **tiers))
                for tiers in ({}, self.tight(3), {"swap__state_on_device": 1}, {"swap__groups": 2})]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}
        self.assertNotIn("gather weights", sent)
        weights = sent["gather weight codes"]
        self.assertEqual(weights["sent_bytes"] * 32, weights["raw_bytes"] * (8 + 32 / 256))
        self.assertNotEqual(runs[0].numbers(), self.ranks(3, self.config()).numbers())
        evaluated = self.ranks(3, self.config(zero__compress=compressed, evaluate__micro_batches=3, evaluate__every=1))
        self.assert_trained(evaluated)
        # What evaluations gather is not the steps'.
        self.assertEqual(evaluated.summary["collectives"], runs[0].summary["collectives"])

    def test_ranks_of_a_host_combine_gradients_and_keep_weights(self):
        """Four ranks on hosts of two: what crosses between hosts, and what stays inside; every tier has the same bits."""
        compressed = {"gradients": "int4", "weights": "int8", "block": 64}
        hosts = {"zero__ranks_per_host": 2, "zero__compress": compressed}
        tight = {**self.tight(4), "budgets__host": "3200KiB"}
        runs = [self.ranks(4, self.config(**hosts, **more)) for more in (
            {}, {"zero__secondary_shard": "node"}, {"zero__secondary_shard": "node", **tight},
            {"zero__secondary_shard": "node", "batch__micro_batches": 24, "swap__groups": 2}, {"batch__micro_batches": 24})]
        for run in runs:
            self.assert_trained(run)
        for run in runs[1:3]:
            self.assertEqual(run.numbers(), runs[0].numbers())
        self.assertEqual(runs[3].numbers(), runs[4].numbers())
        self.assertGreater(runs[1].bytes_of("host", "second shards of weights"), 0)
        self.assertGreater(runs[2].lane("nvme write"), 0)
        without, kept = ({one["collective"]: one for one in run.summary["collectives"]} for run in runs[:2])
        across, inside = kept["exchange gradients"], kept["exchange gradients in host"]
        self.assertEqual(inside["sent_bytes"], 2 * across["sent_bytes"])
        self.assertEqual(across["sent_bytes"] * 32, across["raw_bytes"] * (4 + 32 / 64))
        flat = self.ranks(4, self.config(zero__compress=compressed))
        self.assertNotEqual(flat.numbers(), runs[0].numbers())  # gradients are rounded twice
        flat = {one["collective"]: one for one in flat.summary["collectives"]}
        self.assertEqual(flat["exchange gradients"]["sent_bytes"], 3 * across["sent_bytes"])
        self.assertNotIn("exchange gradients in host", flat)
        self.assertEqual(without["gather weight codes"], flat["gather weight codes"])
        here = kept["gather weight codes in host"]
        self.assertEqual(here["sent_bytes"] * 32, here["raw_bytes"] * (8 + 32 / 64))
        # All layers once from everywhere; the blocks once more, from the host.
        blocks = 3 * here["sent_bytes"] // 2
        self.assertEqual(kept["gather weight codes"]["sent_bytes"], without["gather weight codes"]["sent_bytes"] - blocks)

    def test_hosts_that_cannot_be_are_refused(self):
        run = self.ranks(3, self.config(zero__ranks_per_host=2, zero__compress={"gradients": "int8"}))
        self.assertEqual(run.code, USAGE, run.err)
        for word in ("zero.ranks_per_host", "share a host", "groups of 2, 3 ranks", "start 4 ranks"):
            self.assertIn(word, run.err)
        idle = self.ranks(2, self.config(zero__ranks_per_host=2))
        self.assert_trained(idle)
        self.assertIn("zero.ranks_per_host does nothing", idle.err)

    def test_the_table_of_what_was_sent(self):
        command = [word for word in self.command(self.config(
            zero__compress={"gradients": "int8"}, steps=2)) if word != "--json"]
        table = self.ferry(*command, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertEqual(table.code, 0, table.err)
        self.assertRegex(table.out, r"\n  collective +calls/step +raw bytes/step +sent/step +ratio\n")
        self.assertRegex(table.out, r"\n  exchange gradients .* 0\.254\n")
        self.assertIn("gradients travel as int8 in blocks of 256, weights as fp32\n", table.out)
        alone = self.ferry(*command)
        self.assertNotIn("collective", alone.out)
        self.assertIn("zero.compress does nothing: no two ranks have the same state", alone.err)
        self.assertNotIn("zero.compress", table.err)

    def test_all_ranks_skip_a_step_whose_coded_gradient_overflows(self):
        steep = {"precision": "fp16", "batch__sequence": 1, "batch__micro_batches": 2, "steps": 12,
                 "model__norm_eps": 1e-30, "clip_norm": 1e6}
        for compressed in ({"gradients": "int8"}, {"gradients": "int4", "weights": "int8"}):
            runs = [self.ranks(2, self.config(zero__compress=compressed, **steep, **tiers))
                    for tiers in ({}, self.tight(2))]
            for run in runs:
                self.assert_trained(run)
                self.assertEqual(run.hashes, runs[0].hashes)
            skipped = [step["skipped"] for step in runs[0].steps]
            self.assertEqual(skipped, [step["skipped"] for step in runs[1].steps])
            self.assertIn(True, skipped)
            self.assertIn(False, skipped)

    def test_what_no_kernel_ran_beside_is_told(self):
        one, two = self.train(self.config()), self.ranks(2, self.config())
        self.assertEqual(one.summary["exposed_comm_seconds"], 0)
        comm = next(lane for lane in two.summary["lanes"] if lane["lane"] == "comm")
        self.assertGreater(comm["exposed_seconds"], 0)  # the outcome, if nothing else
        self.assertLessEqual(comm["exposed_seconds"], comm["busy_seconds"])
        self.assertAlmostEqual(two.summary["exposed_comm_seconds"],
                               comm["exposed_seconds"] / two.summary["steps"])
        for run in (one, two):
            compute = next(lane for lane in run.summary["lanes"] if lane["lane"] == "compute")
            self.assertEqual(compute["exposed_seconds"], 0)
        command = [word for word in self.command(self.config()) if word != "--json"]
        table = self.ferry(*command, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertRegex(table.out, r"lane .* exposed s/step")
        self.assertRegex(table.out, r"\n  comm  ")

    def test_each_rank_labels_its_log_lines(self):
        run = self.ranks(2, self.config(steps=1))
        self.assert_trained(run)
        said = [line for line in run.err.splitlines() if "planned by" in line]
        self.assertEqual(sorted(line.split(" info ")[1].split(":")[0] for line in said),
                         ["rank 0", "rank 1"], run.err)
        self.assertNotIn("rank", self.train(self.config(steps=1)).err)

    def test_ranks_that_are_bound_share_the_hosts_memory(self):
        """As mpirun binds them where it is not told otherwise; and all to one core, which is less than
        their part of any host."""
        def said(*through):
            run = self.train(self.config(steps=1), through=through, env=ENVIRONMENT)
            self.assert_trained(run)
            return run.err, re.findall(r"memory limit ([0-9.]+) (\w+),", run.err)
        text, ((whole, unit),) = said()
        cores = sum(map(int, re.findall(r"(\d+) cores, ", text)))  # not their threads
        if cores < 2:
            self.skipTest("one core")
        mpirun = MPIRUN[:-2]
        for name, through, warned in (
                ("unbound", [*MPIRUN, "-n", "2"], False),
                # With two cores that is a rank's part of them; with more, the quota says whether.
                ("core", [*mpirun, "--bind-to", "core", "-n", "2"], False if cores == 2 else None),
                ("one core", [*MPIRUN, "-n", "2", "taskset", "-c", str(min(os.sched_getaffinity(0)))], True)):
            with self.subTest(bound=name):
                text, limits = said(*through)
                self.assertEqual(len(limits), 2, text)
                for limit in limits:
                    self.assertEqual(limit[1], unit)
                    self.assertAlmostEqual(float(limit[0]), float(whole) / 2, delta=0.02)
                if warned is not None:
                    self.assertEqual("start them with mpirun --bind-to none" in text, warned, text)

    def test_cores_are_reserved_before_ranks_share_the_others(self):
        said = self.train(self.config(reserved_cores=[65535])).err
        cores = [int(core) for core in re.search(r"may run on ([0-9, ]+)", said)[1].split(", ")]
        if len(cores) < 2:
            self.skipTest("one core")
        for core in cores[:2]:  # whichever rank's it would be
            with self.subTest(core=core):
                self.assert_trained(self.ranks(2, self.config(steps=1, threads="auto", reserved_cores=[core])))
        run = self.ranks(2, self.config(reserved_cores=cores))
        self.assertNotEqual(run.code, 0)
        self.assertIn("every core is reserved", run.err)

    def test_more_ranks_follow_one(self):
        one = self.train(self.config())
        self.assert_trained(one)
        for number in (2, 4):
            several = self.ranks(number, self.config())
            self.assert_trained(several)
            self.assertEqual(len(several.steps), 4)  # the first rank alone prints
            self.assertEqual(len(several.hashes), 1)
            self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-12)
            for mine, theirs in zip(several.steps, one.steps):
                self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
                self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"], delta=1e-4)
                self.assertEqual(mine["tokens"], theirs["tokens"])
                self.assertEqual(mine["targets"], theirs["targets"])

    def test_ranks_that_share_sequences_follow_one(self):
        """Every family: windows, learned positions, norms and biases of heads; some ranks have fewer heads."""
        for number, shared, family, order in (
                (2, 2, "llama", "auto"), (4, 2, "mistral", "heads"), (2, 2, "qwen2", "auto"), (3, 3, "qwen3", "heads"),
                (4, 4, "gpt2", "heads"), (2, 2, "gpt2", "auto"), (3, 3, "llama", "ring"), (4, 2, "mistral", "ring"),
                (4, 4, "qwen2", "ring"), (3, 3, "qwen3", "auto"), (4, 4, "gpt2", "ring"), (2, 2, "gpt2", "ring")):
            with self.subTest(ranks=number, shared=shared, family=family, order=order):
                changes = {"parallel__sequence_order": order, "model": {"path": str(MODELS / family), "dropout": "ignore"}, "steps": 3,
                           "data__tokens": str(MODELS.parent / "train" / "tokens.bin"), "batch__sequence": 24,
                           "batch__micro_batch": 2, "batch__micro_batches": 4, "evaluate__micro_batches": 2,
                           "data__held_back": 0.2}
                if number == 3:
                    changes["batch__micro_batches"] = 3
                one = self.train(self.config(**changes))
                several = self.ranks(number, self.config(parallel__sequence=shared, **changes))
                self.assert_trained(one)
                self.assert_trained(several)
                self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-6)
                for mine, theirs in zip(several.steps, one.steps):
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-4 * theirs["gradient_norm"])
                    self.assertEqual((mine["tokens"], mine["targets"]), (theirs["tokens"], theirs["targets"]))
                for here, there in zip(several.evaluations, one.evaluations):
                    self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-5)

    def test_what_ranks_of_a_sequence_send_is_counted_and_changes_no_bit(self):
        shared = {"parallel__sequence": 2, "batch__sequence": 32}
        runs = [self.ranks(2, self.config(**shared, **tiers))
                for tiers in ({}, {}, self.tight(2), {"swap__groups": 3}, {"swap__save_attention": 1})]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}["exchange heads"]
        # A micro-batch passes each block forward, with two exchanges, and backward, with four.
        self.assertEqual(sent["calls"], 6 * runs[0].summary["steps"] * 12 * self.config()["model"]["layers"])
        self.assertEqual(sent["sent_bytes"], sent["raw_bytes"])
        apart = self.ranks(2, self.config(batch__sequence=32))
        self.assertNotIn("exchange heads", [one["collective"] for one in apart.summary["collectives"]])

    def test_a_ring_is_taken_where_ranks_do_not_divide_heads(self):
        """Two heads of keys on three and four ranks: heads by name, a ring by itself, and the same losses."""
        for number in (3, 4):
            changes = {"batch__sequence": 36, "batch__micro_batches": 12, "model__heads": 4, "model__kv_heads": 2,
                       "model__head_dim": 16, "steps": 3}
            one = self.train(self.config(**changes))
            shared = {**changes, "parallel__sequence": number}
            ring = [self.ranks(number, self.config(**shared, **more))
                    for more in ({}, {"parallel__sequence_order": "ring"}, {"zero__stage": 0}, self.tight(number))]
            heads = self.ranks(number, self.config(**shared, parallel__sequence_order="heads"))
            for run in (one, *ring, heads):
                self.assert_trained(run)
            for run in ring:
                self.assertEqual(run.numbers(), ring[0].numbers())
            for run in (ring[0], heads):
                for mine, theirs in zip(run.steps, one.steps):
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
            sent = {call["collective"]: call for call in ring[0].summary["collectives"]}
            self.assertNotIn("exchange heads", sent)
            self.assertIn("exchange heads", [call["collective"] for call in heads.summary["collectives"]])
            # There and back, in each step of the circle: forward, again in backward, and backward's own.
            calls = 6 * (number // 2) * 12 * ring[0].summary["steps"] * self.config()["model"]["layers"]
            self.assertEqual(sent["shift heads"]["calls"], calls)
            # Where all blocks save attention's results, backward does not go round for them again.
            saved = self.ranks(number, self.config(**shared, swap__save_attention=8))
            self.assert_trained(saved)
            self.assertEqual(saved.numbers(), ring[0].numbers())
            sent = {one["collective"]: one for one in saved.summary["collectives"]}
            self.assertEqual(sent["shift heads"]["calls"], calls * 2 // 3)

    def test_ranks_that_cannot_share_sequences_are_refused(self):
        for number, changes, words in (
                (3, {"parallel__sequence": 2}, ("parallel.sequence", "groups of 2, 3 ranks", "start 4 ranks")),
                (1, {"parallel__sequence": 2}, ("parallel.sequence", "groups of 2, 1 rank", "start 2 ranks")),
                (2, {"parallel__sequence": 2, "batch__sequence": 25}, ("equal parts", "set batch.sequence to 26")),
                (2, {"parallel__sequence": 0}, ("parallel.sequence", "at least 1, at most 4096")),
                (2, {"parallel__sequence": 2, "parallel__sequence_order": "zigzag"}, ("sequence_order", "ring")),
                (2, {"parallel__sequence": 2, "parallel__sequence_order": "ring", "device": "cuda", "precision": "fp32"},
                 ("parallel.sequence_order", "in 16 bits alone", "precision is fp32")),
                (4, {"parallel__sequence": 2, "batch__micro_batches": 3},
                 ("batch.micro_batches", "3 micro-batches, 4 ranks in groups of 2", "set batch.micro_batches to 4"))):
            with self.subTest(ranks=number, **changes):
                config = self.config(**changes)
                run = self.ranks(number, config) if number > 1 else self.train(config)
                self.assertEqual(run.code, USAGE, run.err)
                for word in words:
                    self.assertIn(word, run.err)

    def test_ranks_that_share_tensors_follow_one(self):
        """Norms and biases of heads, fused and input-major matrices, ZeRO beside; some ranks hold the same heads."""
        for number, shared, family, stage in ((2, 2, "qwen3", 1), (4, 4, "gpt2", 0), (4, 2, "qwen2", 3)):
            with self.subTest(ranks=number, shared=shared, family=family):
                changes = {"model": {"path": str(MODELS / family), "dropout": "ignore"}, "steps": 3,
                           "data__tokens": str(MODELS.parent / "train" / "tokens.bin"), "batch__sequence": 24,
                           "batch__micro_batch": 2, "batch__micro_batches": 4, "evaluate__micro_batches": 2,
                           "data__held_back": 0.2, "zero__stage": stage}
                exports = [self.path(f"{name}-{family}") for name in ("one", "several")]
                weights = [self.path(f"{name}-{family}.safetensors") for name in ("one", "several")]
                one = self.train(self.config(**changes), "--export", exports[0], "--weights-out", weights[0])
                several = self.ranks(number, self.config(parallel__tensor=shared, **changes), "--export", exports[1],
                                     "--weights-out", weights[1])
                self.assert_trained(one)
                self.assert_trained(several)
                self.assertEqual(*map(os.path.getsize, weights))  # whole tensors
                self.assertEqual(several.summary["ranks"], number)
                self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-6)
                for mine, theirs in zip(several.steps, one.steps):
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-4 * theirs["gradient_norm"])
                    self.assertEqual((mine["tokens"], mine["targets"]), (theirs["tokens"], theirs["targets"]))
                for here, there in zip(several.evaluations, one.evaluations):
                    self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-5)
                sizes = [os.path.getsize(pathlib.Path(export) / "model.safetensors") for export in exports]
                self.assertEqual(sizes[0], sizes[1])

    def test_what_ranks_of_a_tensor_send_is_planned_and_changes_no_bit(self):
        shared = {"parallel__tensor": 2, "model__kv_heads": 1}
        runs = [self.ranks(2, self.config(**shared, **tiers))
                for tiers in ({}, {}, self.tight(2), {"swap__groups": 3}, {"swap__save_attention": 1})]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}
        self.assertEqual(sorted(sent), ["agree", "exchange sums", "gather sums"])
        plan = self.ferry("plan", self.command(self.config(**shared))[1], "--ranks", "2", "--no-prediction", "--json")
        planned, steps = plan.lines[0]["kernel_exchanges"], runs[0].summary["steps"]
        self.assertEqual(planned["calls"] * steps, sent["exchange sums"]["calls"] + sent["gather sums"]["calls"])
        self.assertEqual(planned["bytes"] * steps, sent["exchange sums"]["sent_bytes"] + sent["gather sums"]["sent_bytes"])
        for tier in ("device", "host"):
            self.assertEqual(runs[0].bytes_of(tier, "optimizer state"),
                             sum(one["bytes"] for one in plan.lines[0]["tiers"]
                                 if one["tier"] == tier and one["what"] == "optimizer state"))

    def test_checkpoints_of_ranks_that_share_tensors_go_on_with_another_number(self):
        """Bits of the same ranks are kept; others follow on, and so does one."""
        changes = {"parallel__tensor": 2, "model__heads": 4, "model__kv_heads": 4, "precision": "bf16", "steps": 4}
        whole = self.ranks(2, self.config(**changes))
        self.assert_trained(whole)
        there = self.path("saved")
        saving = {**changes, "checkpoint__dir": there, "checkpoint__every": 2, "checkpoint__keep": {"last": 9}}
        self.assert_trained(self.ranks(2, self.config(**saving)))
        for number, tensor in ((2, 2), (4, 4), (1, 1)):
            with self.subTest(ranks=number):
                config = self.config(**{**changes, "parallel__tensor": tensor})
                resume = ("--resume", os.path.join(there, "step-00000002"))
                run = self.ranks(number, config, *resume) if number > 1 else self.train(config, *resume)
                self.assert_trained(run)
                if number == 2:
                    self.assertEqual(run.hashes[-1], whole.hashes[-1])
                for mine, theirs in zip(run.steps, whole.steps[1:]):  # the first is the one that was saved
                    self.assertEqual(mine["step"], theirs["step"])
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=0 if number == 2 else 2e-2)

    def test_ranks_that_cannot_share_tensors_are_refused(self):
        heads = {"model__heads": 4, "model__kv_heads": 2}
        for number, changes, words in (
                (3, {"parallel__tensor": 2}, ("parallel.tensor", "groups of 2, 3 ranks", "start 4 ranks")),
                (1, {"parallel__tensor": 2}, ("parallel.tensor", "groups of 2, 1 rank", "start 2 ranks")),
                (3, {"parallel__tensor": 3, **heads}, ("parallel.tensor", "divide the heads", "set parallel.tensor to 2")),
                (2, {"parallel__tensor": 0}, ("parallel.tensor", "at least 1, at most 4096")),
                (2, {"parallel__tensor": 2, "optimizer__method": "muon"}, ("optimizer.method", "whole matrices")),
                (2, {"parallel__tensor": 2, "checkpoint__durable_steps": True, "budgets__nvme": [self.nvme()]},
                 ("checkpoint.durable_steps", "slices of tensors"))):
            with self.subTest(ranks=number, **changes):
                config = self.config(**changes)
                run = self.ranks(number, config) if number > 1 else self.train(config)
                self.assertEqual(run.code, USAGE, run.err)
                for word in words:
                    self.assertIn(word, run.err)

    def test_stages_of_a_pipeline_follow_one(self):
        """Learned positions, tied tables and biases; some with ZeRO beside. Weights are those of one rank, bit by bit."""
        for number, stages, family, stage in ((2, 2, "qwen3", 1), (4, 2, "gpt2", 1), (2, 2, "qwen2", 3)):
            with self.subTest(ranks=number, stages=stages, family=family):
                changes = {"model": {"path": str(MODELS / family), "dropout": "ignore"}, "steps": 3, "clip_norm": 0,
                           "data__tokens": str(MODELS.parent / "train" / "tokens.bin"), "batch__sequence": 24,
                           "batch__micro_batch": 2, "batch__micro_batches": 4, "evaluate__micro_batches": 2,
                           "data__held_back": 0.2, "zero__stage": stage}
                exports = [self.path(f"{name}-{family}") for name in ("one", "several")]
                one = (self.train(self.config(**changes), "--export", exports[0]) if number == stages else
                       self.ranks(number // stages, self.config(**changes), "--export", exports[0]))
                several = self.ranks(number, self.config(parallel__pipeline=stages, **changes), "--export", exports[1])
                self.assert_trained(one)
                self.assert_trained(several)
                self.assertEqual(several.summary["ranks"], number)
                self.assertIn(f"{stages} stages: embedding and block", several.err)
                for mine, theirs in zip(several.steps, one.steps):
                    for key in ("loss", "tokens", "targets"):
                        self.assertEqual(mine[key], theirs[key])
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-12 * theirs["gradient_norm"])
                for here, there in zip(several.evaluations, one.evaluations):
                    self.assertEqual(here["evaluation_loss"], there["evaluation_loss"])
                files = [pathlib.Path(export) / "model.safetensors" for export in exports]
                self.assertEqual(*(file.read_bytes() for file in files))

    def test_what_stages_pass_is_counted_and_changes_no_bit(self):
        staged = {"parallel__pipeline": 2, "model__layers": 3, "zero__stage": 1}
        tight = {**self.tight(4), "budgets__host": "8MiB"}
        runs = [self.ranks(4, self.config(**staged, **tiers))
                for tiers in ({}, {}, tight, {"swap__groups": 3}, {"swap__save_attention": 1})]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}
        # What the first rank passes on: block inputs of its half of the micro-batches.
        config = self.config()
        calls = 6 * runs[0].summary["steps"]
        self.assertEqual(sent["pass on"]["calls"], calls)
        tokens = config["batch"]["micro_batch"] * config["batch"]["sequence"]
        self.assertEqual(sent["pass on"]["sent_bytes"], calls * tokens * config["model"]["hidden"] * 4)

    def test_pipelines_that_cannot_be_are_refused_and_short_ones_are_warned_of(self):
        for number, changes, words in (
                (3, {"parallel__pipeline": 2}, ("parallel.pipeline", "groups of 2, 3 ranks", "start 4 ranks")),
                (1, {"parallel__pipeline": 2}, ("parallel.pipeline", "groups of 2, 1 rank", "start 2 ranks")),
                (3, {"parallel__pipeline": 3, "model__layers": 2}, ("3 stages", "2 blocks", "set it to 2 or less")),
                (2, {"parallel__pipeline": 0}, ("parallel.pipeline", "at least 1, at most 4096")),
                (4, {"parallel__pipeline": 2, "zero__stage": 3}, ("zero.stage", "set zero.stage to 2 or less")),
                (4, {"parallel__pipeline": 2, "batch__micro_batches": 3},
                 ("batch.micro_batches", "3 micro-batches, 4 ranks in groups of 2", "set batch.micro_batches to 4")),
                (2, {"parallel__pipeline": 2, "checkpoint__durable_steps": True, "budgets__nvme": [self.nvme()]},
                 ("checkpoint.durable_steps", "steps of a pipeline"))):
            with self.subTest(ranks=number, **changes):
                config = self.config(**changes)
                run = self.ranks(number, config) if number > 1 else self.train(config)
                self.assertEqual(run.code, USAGE, run.err)
                for word in words:
                    self.assertIn(word, run.err)
        config = self.config(parallel__pipeline=2, batch__micro_batches=1, steps=1)
        run = self.ranks(2, config)
        self.assert_trained(run)
        self.assertIn("1 group of micro-batches for 2 stages: each stage waits 50 % of a step", run.err)
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--no-prediction")
        self.assertEqual(planned.code, 0, planned.err)
        self.assertIn("1 group of 1 micro-batch for 2 stages: each stage waits 50 % of a step", planned.err)
        self.assertIn("a pipeline of 2 stages of 1 rank", planned.out)

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
                (4, {"parallel__pipeline": 2, "zero__stage": 3}, ("zero.stage", "set zero.stage to 2 or less"))):
            with self.subTest(ranks=ranks, **changes):
                planned = self.ferry("plan", self.command(self.config(**changes))[1], "--ranks", str(ranks))
                self.assertEqual(planned.code, USAGE, planned.err)
                self.assertEqual(planned.out, "")
                for word in words:
                    self.assertIn(word, planned.err)

    def test_the_plan_of_a_pipeline_is_that_of_training(self):
        tight = {**self.tight(4), "budgets__host": "8MiB"}
        config = self.config(parallel__pipeline=2, model__layers=5, zero__stage=1, **tight)
        run = self.ranks(4, config)
        self.assert_trained(run)
        picture = self.path("step.svg")
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "4", "--json", "--svg", picture)
        self.assertEqual(planned.code, 0, planned.err)
        plan = json.loads(planned.out)
        drawn = pathlib.Path(picture).read_text()
        for row in ("0 compute", "0 comm", "1 compute", "1 comm", "take over"):
            self.assertIn(row, drawn)
        for key in ("device_bytes", "host_bytes", "nvme_bytes", "groups", "chunk_elements"):
            self.assertEqual(plan[key], run.summary[key], key)
        stages, steps = plan["pipeline"]["stages"], run.summary["steps"]
        self.assertEqual(sum(stage["blocks"] for stage in stages), 5)
        sent = {one["collective"]: one for one in run.summary["collectives"]}
        self.assertEqual(sent["pass on"]["sent_bytes"], steps * stages[0]["to_next_bytes"])
        for stage in stages:
            self.assertGreater(stage["compute_seconds"], 0)
            self.assertTrue(0 < stage["waits"] < 1)

    def test_checkpoints_of_a_pipeline_go_on_with_other_stages(self):
        """The same ranks a stage keep every bit; also from one rank's, and to one."""
        changes = {"model__layers": 4, "precision": "bf16", "steps": 4, "clip_norm": 0}
        whole = self.train(self.config(**changes))
        self.assert_trained(whole)
        there = self.path("saved")
        saving = {**changes, "parallel__pipeline": 2, "checkpoint__dir": there, "checkpoint__every": 2,
                  "checkpoint__keep": {"last": 9}}
        self.assert_trained(self.ranks(2, self.config(**saving)))
        for stages in (1, 2, 3):
            with self.subTest(stages=stages):
                config = self.config(**{**changes, "parallel__pipeline": stages})
                resume = ("--resume", os.path.join(there, "step-00000002"))
                run = self.ranks(stages, config, *resume) if stages > 1 else self.train(config, *resume)
                self.assert_trained(run)
                for mine, theirs in zip(run.steps, whole.steps[1:]):  # the first is the one that was saved
                    self.assertEqual((mine["step"], mine["loss"]), (theirs["step"], theirs["loss"]))
        out = self.path("exported")
        exported = self.ferry("ckpt", "export", os.path.join(there, "step-00000004"), out)
        self.assertEqual(exported.code, 0, exported.err)

    def test_evaluation_and_weights_come_from_all_ranks(self):
        changes = {"evaluate__micro_batches": 5, "steps": 2}
        first = self.path("first.safetensors")
        one = self.train(self.config(optimizer__lr=0, **changes), "--weights-out", first)
        self.assert_trained(one)
        for stage in (0, 1, 3):
            mine = self.path(f"stage{stage}.safetensors")
            run = self.ranks(3, self.config(optimizer__lr=0, zero__stage=stage, **changes),
                             "--weights-out", mine)
            self.assert_trained(run)
            self.assertEqual(len(run.evaluations), len(one.evaluations))
            for here, there in zip(run.evaluations, one.evaluations):
                self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-12)
            with open(first, "rb") as a, open(mine, "rb") as b:
                self.assertEqual(a.read(), b.read())

    def test_weights_that_cannot_be_written_cost_nothing_else(self):
        small = self.path("small")
        os.mkdir(small)
        mounted = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                   'mount -t tmpfs -o size=8k ferry-test "$1"; shift; exec "$@"', "sh", small]
        if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
            self.skipTest("cannot mount tmpfs here")
        for stage in (0, 3):
            with self.subTest(stage=stage):
                exported, trace = self.path(f"exported{stage}"), self.path(f"trace{stage}.json")
                run = self.train(self.config(zero__stage=stage), "--weights-out", os.path.join(small, "w.st"),
                                 "--export", exported, "--trace", trace,
                                 through=[*mounted, *MPIRUN, "-n", "2"], env=ENVIRONMENT)
                self.assertEqual(run.code, IO, run.err)
                self.assertIn("No space left", run.err)
                self.assertNotIn("lost rank 0: it ended without", run.err)
                self.assertIn("model.safetensors", os.listdir(exported))
                self.assertTrue(os.path.exists(trace))
                self.assertIsNotNone(run.summary)
                self.assertEqual(len(run.hashes), 1)

    def test_an_export_that_cannot_be_written_costs_nothing_else(self):
        small = self.path("small-export")
        os.mkdir(small)
        # Room for the first shard: the second one fails in the midst of what the ranks give.
        mounted = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                   'mount -t tmpfs -o size=160k ferry-test "$1"; shift; exec "$@"', "sh", small]
        if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
            self.skipTest("cannot mount tmpfs here")
        for stage in (0, 3):
            with self.subTest(stage=stage):
                weights, trace = self.path(f"beside{stage}.safetensors"), self.path(f"beside{stage}.json")
                run = self.train(self.config(zero__stage=stage), "--export", os.path.join(small, "model"),
                                 "--shard-size", "100KB", "--weights-out", weights, "--trace", trace,
                                 through=[*mounted, *MPIRUN, "-n", "2"], env=ENVIRONMENT)
                self.assertEqual(run.code, IO, run.err)
                for text in ("No space left", "model-00002", "checkpoint.durable_steps"):
                    self.assertIn(text, run.err)
                self.assertNotIn("lost rank 0: it ended without", run.err)
                self.assertTrue(os.path.exists(weights))
                self.assertTrue(os.path.exists(trace))
                self.assertIsNotNone(run.summary)
                self.assertEqual(len(run.hashes), 1)

    # ------------------------------------------------------------ durable steps

    def killed_ranks(self, number, config, *arguments, steps, which=None, seconds=0.0):
        """Starts a run, and kills all of its ranks so many seconds after so many steps, or one of them. With ("apart", rank)
        all are killed a while after that one was stopped: the others may have come a durable step further."""
        words = self.command(config, *arguments)
        process = start([*MPIRUN, "-n", str(number), FERRY, *words], env=ENVIRONMENT)
        out = ""
        while out.count('"loss"') < steps:
            line = process.stdout.readline()
            self.assertTrue(line, "it ended before: " + process.stderr.read() if not line else "")
            out += line
        time.sleep(seconds)
        if isinstance(which, tuple):
            os.kill(self.ranks_of(words[1])[which[1]], signal.SIGSTOP)
            time.sleep(0.3)
        if which is None or isinstance(which, tuple):
            self.kill_all_ranks()
        else:
            os.kill(self.ranks_of(words[1])[which], signal.SIGKILL)
        rest, _ = process.communicate(timeout=120)
        self.assertNotEqual(process.returncode, 0)
        return [json.loads(line) for line in (out + rest).rpartition("\n")[0].splitlines() if '"loss"' in line]

    def empty_drive(self):
        """Of durable steps alone: what a run keeps there refuses the next one."""
        shutil.rmtree(self.path("durable"), ignore_errors=True)
        os.mkdir(self.path("durable"))

    def test_durable_steps_survive_kills(self):
        rng = random.Random(7)
        runs = ((2, (None, 1, ("apart", 0), 0, ("apart", 1)), {"zero__stage": 3}),
                (2, (0, None), {"zero__stage": 0, "precision": "bf16", "optimizer__master": "split"}),
                # A rank's weights of the others' shards come from their owners' state again.
                (2, (None, ("apart", 1), 0), {"zero__stage": 1, "freeze": ["model.layers.1.*"], "precision": "bf16"}),
                (3, (2, ("apart", 0), None), {"zero__stage": 2, "precision": "bf16", "optimizer__master": "split"}),
                (4, (3, ("apart", 2), None), {"zero__stage": 3, "precision": "fp16"}))
        for number, kills, changes in in_quick(runs, (1, 2)):
            with self.subTest(ranks=number, **changes):
                whole = self.ranks(number, self.config(steps=16, **changes))
                self.assert_trained(whole)
                losses = {line["step"]: line["loss"] for line in whole.steps}
                self.empty_drive()
                config = self.config(steps=16, checkpoint__durable_steps=True, budgets__nvme=[self.nvme(name="durable")],
                                     budgets__host=f"{number * 600}KiB", swap__chunk_elements=8192, **changes)
                for turn, which in enumerate(kills):
                    resume = ["--resume"] if turn > 0 else []
                    for line in self.killed_ranks(number, config, *resume, steps=3, which=which,
                                                  seconds=rng.uniform(0, 0.05)):
                        self.assertEqual(line["loss"], losses[line["step"]], line)
                run = self.ranks(number, config, "--resume")
                self.assert_trained(run)
                self.assertEqual(run.hashes, whole.hashes)
                for line in run.steps:
                    self.assertEqual(line["loss"], losses[line["step"]], line)

    def test_durable_steps_of_ranks_are_found(self):
        """By the name of their path, and by what they were kept in."""
        self.empty_drive()
        config = self.config(steps=8, zero__stage=3, checkpoint__durable_steps=True, budgets__nvme=[self.nvme(name="durable")],
                             budgets__host="1200KiB", swap__chunk_elements=8192, swap__speculate="all")
        self.killed_ranks(2, config, steps=3)
        drive = config["budgets"]["nvme"][0]["path"]
        refused = self.ranks(2, {**config, "optimizer": {**config["optimizer"], "moments": "bf16"}}, "--resume", drive)
        self.assertEqual(refused.code, USAGE, refused.err)
        for text in ("its state is kept in other formats", "the run has optimizer.moments = fp32"):
            self.assertIn(text, refused.err)
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            has_two = " avx512vl " in file.read()  # sets of kernels, of which ferry takes the newer by itself
        other = {"OPENBLAS_CORETYPE": "Haswell"} if has_two and "OPENBLAS_CORETYPE" not in os.environ else {}
        run = self.train(config, "--resume", drive, through=[*MPIRUN, "-n", "2"], env={**ENVIRONMENT, **other})
        self.assert_trained(run)
        self.assertEqual("goes on with them" in run.err, bool(other), run.err)
        self.assertEqual(run.err.count('swap.speculate = "all" does nothing'), 1, run.err)
        self.assertIn("resumed after step", run.err)

    def test_a_rank_that_lost_a_slot_takes_the_others_back(self):
        """Blocks of one rank's state are damaged. All ranks go on from a step that is whole everywhere, or none does; frozen
        weights, which lie in slots of their own, come from the model again."""
        self.empty_drive()
        changes = {"zero__stage": 3, "freeze": ["model.layers.1.*"], "precision": "bf16", "optimizer__master": "split"}
        whole = self.ranks(2, self.config(steps=16, **changes))
        config = self.config(steps=16, checkpoint__durable_steps=True, budgets__nvme=[self.nvme(name="durable")],
                             budgets__host="1200KiB", swap__chunk_elements=8192, **changes)
        self.killed_ranks(2, config, steps=4, which=("apart", 0))
        drive, kept = self.path("durable"), self.path("durable-kept")
        os.rename(drive, kept)
        slots = os.path.join("rank-1", "ferry.slots0")
        size, block = os.path.getsize(os.path.join(kept, slots)), 1 << 12
        ends = collections.Counter()
        for part in range(12):
            shutil.rmtree(drive, ignore_errors=True)
            shutil.copytree(kept, drive)
            with open(os.path.join(drive, slots), "r+b") as file:
                file.seek(size * part // 12 // block * block)
                file.write(b"\xa5" * block)
            run = self.ranks(2, config, "--resume")
            if run.code == 0:
                self.assertEqual(run.hashes, whole.hashes)
                ends["older" if "cannot be used" in run.err else "newest"] += 1
            else:
                self.assertEqual(run.code, IO, run.err)
                self.assertIn(os.path.join("rank-1", "ferry.slots0"), run.err)
                ends["refused"] += 1
        self.assertGreater(ends["older"] + ends["refused"], 0, ends)  # which of them, the moment of the kill decides

    def test_what_a_run_of_more_ranks_left_is_told(self):
        config = self.config(budgets__nvme=[self.nvme(name="shared")], swap__state_on_nvme=1, io__direct=False)
        left = self.path("shared/rank-7")
        os.makedirs(left)
        with open(os.path.join(left, "ferry.slots0"), "wb") as file:
            file.truncate(3 << 20)
        os.makedirs(self.path("shared/rank-of-somebody"))
        for run in (self.ranks(2, config), self.train(config)):
            self.assertEqual(run.code, 0, run.err)
            told = re.findall("(/rank-.*) holds (.*) of a run of more ranks", run.err)
            self.assertEqual(told, [("/rank-7", "3.00 MiB")], run.err)
        self.assertEqual(sorted(os.listdir(self.path("shared"))), ["rank-7", "rank-of-somebody"])

    def test_a_step_that_the_ranks_cannot_share(self):
        run = self.ranks(2, self.config(batch__micro_batches=3))
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("batch.micro_batches", run.err)
        self.assertIn("3 micro-batches, 2 ranks", run.err)
        self.assertIn("rank 0", run.err)

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
                for rank in (0, 1):  # says so
                    self.assertIn(f"where:    rank {rank}: {key} on rank 1\n", run.stderr)

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
            self.assertEqual(run.stderr.count(said), 2, run.stderr)

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

    def two_with(self, first, second):
        """Of two ranks, each by its own command line."""
        return subprocess.run([*MPIRUN, "--enable-recovery", "-n", "1", *first, ":", "-n", "1", *second],
                              capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)

    def test_what_ends_one_outside_the_engine_is_told(self):
        command = [FERRY, *self.command(self.config(steps=100000)), "--weights-out", self.path("nowhere/weights")]
        run = self.two_with(command, command)
        self.assertIn("ferry: lost rank 0: it ended with an error: nothing can be written there", run.stderr)

    def test_ranks_end_with_an_mpirun_that_is_killed(self):
        config = self.config(steps=1000000)
        run = subprocess.Popen([*MPIRUN, "-n", "2", FERRY, *self.command(config)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
        while '"loss"' not in run.stdout.readline():
            self.assertIsNone(run.poll(), "it ended before")
        run.kill()
        run.wait()
        run.stdout.close()
        for _ in range(300):
            left = [entry for entry in os.listdir("/proc") if entry.isdigit() and self.path("").encode() in command_of(entry)]
            if not left:
                return
            time.sleep(0.1)
        for entry in left:
            os.kill(int(entry), signal.SIGKILL)
        self.fail(f"{len(left)} ranks went on for 30 s")

    def test_a_full_standard_output_ends_no_rank(self):
        weights = self.path("unread.safetensors")
        command = [FERRY, *self.command(self.config(steps=3)), "--weights-out", weights]
        run = self.two_with(["sh", "-c", 'exec "$@" >/dev/full', "sh", *command], command)
        self.assertIn("what ferry printed could not be written", run.stderr)
        self.assertNotIn("lost rank", run.stderr)
        self.assertTrue(os.path.exists(weights), run.stderr)

    @unittest.skipUnless(platform.machine() == "x86_64", "there are kernels to choose from on x86-64 only")
    def test_older_kernels_are_said_once(self):
        run = self.train(self.config(), through=[*MPIRUN, "-n", "3"], env={**ENVIRONMENT, "OPENBLAS_CORETYPE": "Nehalem"})
        self.assert_trained(run)
        self.assertEqual(run.err.count("for an older processor than this one"), 1, run.err)

    def start(self, number, config, *arguments):
        command = self.command(config, *arguments)
        process = start([*MPIRUN, "-n", str(number), FERRY, *command], env=ENVIRONMENT)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        line = process.stdout.readline()  # a step has ended: all ranks are at work
        self.assertIn('"loss"', line)
        return process, self.ranks_of(command[1])

    def assert_end_soon(self, ranks):
        deadline = time.monotonic() + 30
        while any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()):
            self.assertLess(time.monotonic(), deadline, "a rank goes on alone")
            time.sleep(0.05)

    def test_an_export_whose_directory_goes_is_written_beside_it(self):
        for stage in (0, 3):
            with self.subTest(stage=stage):
                above = self.path(f"above{stage}")
                out = os.path.join(above, "model")
                os.makedirs(out)
                config = self.config(steps=100000, zero__stage=stage, batch__micro_batches=2)
                process, _ = self.start(2, config, "--export", out)
                shutil.rmtree(above)
                process.send_signal(signal.SIGUSR1)
                printed, err = process.communicate(timeout=60)
                self.assertEqual(process.returncode, IO, err)
                for text in ('"summary"', "state_hash"):
                    self.assertIn(text, printed)
                self.assertIn("the export's directory was removed", err)
                self.assertNotIn("end with this process", err)
                saved = re.search(r"the whole export is in (\S+\.\w{6}): move it", err)[1]
                self.assertEqual(os.path.dirname(saved), self.dir)  # above is gone too
                self.assertEqual(sorted(os.listdir(saved)), ["config.json", "model.safetensors"])
                self.assertFalse(os.path.exists(above))

    def test_an_interrupt_of_one_rank_ends_all_after_the_same_step(self):
        process, ranks = self.start(2, self.config(steps=100000))
        os.kill(ranks[1], signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn('"interrupted":true', out)
        self.assertIn("state_hash", out)

    def test_an_interrupt_that_mpirun_passes_on_ends_all_after_their_step(self):
        process, _ = self.start(2, self.config(steps=100000, batch__micro_batches=2))
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn('"interrupted":true', out)
        self.assertIn("state_hash", out)

    def test_an_interrupt_that_mpirun_ends_its_ranks_by_is_no_failure_of_theirs(self):
        """It reads no more of what they print, and kills those whose output waits for it."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=sign):
                process, ranks = self.start(2, self.config(steps=100000, batch__micro_batches=2))
                process.send_signal(sign)
                _, err = process.communicate(timeout=60)
                self.assertNotIn("ferry: ", err)
                self.assert_end_soon(ranks)

    def test_a_killed_rank_ends_the_run_and_leaves_nothing(self):
        for stage in (1, 3):
            with self.subTest(stage=stage):
                process, ranks = self.start(3, self.config(steps=100000, zero__stage=stage,
                                                           **self.tight(3)))
                os.kill(ranks[1], signal.SIGKILL)
                _, err = process.communicate(timeout=90)
                self.assertNotEqual(process.returncode, 0, err)
                self.assert_end_soon(ranks)
                # The next run finds what the dead one left, says so, and goes its way.
                again = self.ranks(3, self.config(zero__stage=stage, **self.tight(3)))
                self.assert_trained(again)
                left = os.path.join(self.path("nvme"), "rank-1", "ferry.volume")
                self.assertRegex(again.err, rf"was killed and left {left}: not consistent, "
                                            r"state of step \d+ lost")
                self.assert_left_nothing()

    def test_one_that_never_begins_ends_the_others(self):
        command = self.command(self.config(zero__timeout_seconds=3))
        start = time.monotonic()
        run = subprocess.run([*MPIRUN, "-n", "1", FERRY, *command, ":", "-n", "1", "sleep", "60"],
                             capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
        self.assertLess(time.monotonic() - start, 50)
        self.assertEqual(run.returncode, RANK_LOST, run.stderr)
        for text in ("ferry: lost a rank: not all of them came", "where:    rank 0: MPI_Init", "waited 3.0 s for 2 ranks",
                     "zero.timeout_seconds", "do:       "):
            self.assertIn(text, run.stderr)

    @unittest.skipUnless(os.path.isdir(OLD_DRIVER), "built without CUDA")
    def test_a_driver_that_no_rank_can_use_is_every_ranks_error(self):
        libraries = f"{OLD_DRIVER}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = {**ENVIRONMENT, "LD_LIBRARY_PATH": libraries}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        run = self.train(self.config(device="cuda"), through=[*MPIRUN, "-n", "3"], env=environment)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("driver is too old", run.err)
        self.assertNotIn("fewer GPUs than ranks", run.err)

    # ------------------------------------------------------------ a rank that is killed

    def mortal(self, command, ranks=3, **environment):
        """Rank 1, of 3 unless said, ends as the environment says. Each rank's exit code and last words; mpirun is
        told to leave the others alone, so that they end by themselves."""
        where = self.path("mortal")
        shutil.rmtree(where, ignore_errors=True)
        os.mkdir(where)
        rank = '"$@" 2>"$WHERE/$OMPI_COMM_WORLD_RANK"; echo $? >"$WHERE/$OMPI_COMM_WORLD_RANK.code"'
        sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        subprocess.run(
            [*MPIRUN, "--enable-recovery", "-x", f"LD_PRELOAD={MORTAL}", "-n", str(ranks), "sh", "-c", rank, "sh",
             FERRY, *command], capture_output=True, text=True, timeout=120, check=False,
            # Everything that a rank has sent has arrived; only the operation that it dies at is missing. With a limit of
            # 512 KiB Open MPI 4.1 leaves shared memory for TCP, where it may turn for ever on a
            # connection that broke.
            env={**ENVIRONMENT, "OMPI_MCA_btl_vader_eager_limit": str(1 << 17), "WHERE": where,
                 "FERRY_TEST_MORTAL": "1", "ASAN_OPTIONS": sanitizer, **environment})
        said, codes = {}, {}
        for name in range(ranks):
            with open(os.path.join(where, str(name)), encoding="utf-8") as file:
                said[name] = file.read()
            with open(os.path.join(where, f"{name}.code"), encoding="ascii") as file:
                codes[name] = int(file.read())
        return said, codes

    def assert_ended(self, said, codes, *texts):
        """The others say so, have ended, and have taken their files with them."""
        self.assertEqual(codes, {0: RANK_LOST, 1: 128 + signal.SIGKILL, 2: RANK_LOST}, said)
        for rank in (0, 2):
            for text in (*texts, f"rank {rank}: "):
                self.assertIn(text, said[rank])
        self.assertLessEqual(set(os.listdir(self.path("nvme"))), {"rank-1"})

    @staticmethod
    def phases(sizes, stage):
        """Messages at which rank 1 begins an operation, by their bytes, and what it is."""
        def begins(size):
            return [i + 1 for i in range(0, len(sizes), 2) if sizes[i] == size]
        outcomes, evaluations = begins(32), begins(24)
        first_step = begins(1)[0] + 2  # behind the question whether anybody wants to stop
        yield 1, "all-gather of the facts"
        yield begins(24)[0], "all-gather of the cores"
        yield begins(max(size for size in sizes if size % 4096))[0], "all-gather of the facts"
        yield first_step, ("all-gather of the weights of layer 0, step 1" if stage == 3 else
                           "exchange of the gradient of layer 4, step 1")
        yield outcomes[0] - 2, "exchange of the gradient of layer 0, step 1"
        yield outcomes[0], "all-gather of the outcome, step 1"
        yield evaluations[-1], "all-gather of the evaluation"
        yield outcomes[-1], "all-gather of the outcome, step 2"
        yield begins(8)[-1], "all-gather of the state hash"

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_killed_in_any_phase_is_named(self):
        for stage in in_quick((1, 3), [1]):
            config = self.config(zero__stage=stage, steps=2, evaluate__micro_batches=3,
                                 evaluate__every=1, **self.tight(3))
            command = self.command(config)
            messages = self.path(f"messages-{stage}")
            said, codes = self.mortal(command, FERRY_TEST_MESSAGES=messages)
            self.assertEqual(codes, {0: 0, 1: 0, 2: 0}, said)
            with open(messages, encoding="ascii") as file:
                sizes = [int(line) for line in file]
            for message, operation in self.phases(sizes, stage):
                with self.subTest(stage=stage, operation=operation):
                    said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(message))
                    self.assert_ended(said, codes, "lost rank 1: its process has ended", operation)
            again = self.ranks(3, config)
            self.assert_trained(again)
            self.assert_left_nothing()

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_that_shares_tensors_is_named_with_its_group(self):
        config = self.config(parallel__tensor=3, model__heads=6, model__kv_heads=3, model__head_dim=8, steps=1,
                             **self.tight(3))
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        messages = self.path("messages-tensors")
        said, codes = self.mortal(command, FERRY_TEST_MESSAGES=messages)
        self.assertEqual(codes, {0: 0, 1: 0, 2: 0}, said)
        with open(messages, encoding="ascii") as file:
            sizes = [int(line) for line in file]
        part = 11 * 64 * 4  # bytes of a third of 32 tokens' rows
        said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(sizes.index(part) + 1))
        self.assert_ended(said, codes, "lost rank 1: its process has ended", "exchange of the sums of layer 1, step 1",
                          "among ranks 0, 1, 2")

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_killed_in_either_level_of_an_exchange_is_named(self):
        """Its neighbour on the host waits for it in the first level, the one that stands alike on the other host in the second."""
        config = self.config(zero__ranks_per_host=2, zero__compress={"gradients": "int8", "block": 64}, steps=1,
                             **{**self.tight(4), "swap__chunk_elements": 4096})
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        messages = self.path("messages-hosts")
        said, codes = self.mortal(command, 4, FERRY_TEST_MESSAGES=messages)
        self.assertEqual(codes, {0: 0, 1: 0, 2: 0, 3: 0}, said)
        with open(messages, encoding="ascii") as file:
            sizes = [int(line) for line in file]
        part = 4096 + 4096 // 64 * 4  # bytes of a chunk as codes
        for size, neighbour, operation in ((2 * part, 0, "exchange of the gradient in the host of layer"),
                                           (part, 3, "exchange of the gradient of layer")):
            with self.subTest(operation=operation):
                said, codes = self.mortal(command, 4, FERRY_TEST_DIES_AT=str(sizes.index(size) + 1))
                self.assertEqual(codes, {0: RANK_LOST, 1: 128 + signal.SIGKILL, 2: RANK_LOST, 3: RANK_LOST}, said)
                for rank in (0, 2, 3):
                    self.assertIn("lost rank 1: its process has ended", said[rank])
                self.assertIn(operation, said[neighbour])

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_of_a_pipeline_is_named_when_it_is_killed(self):
        """The middle one of three, when it passes on the first block input."""
        config = self.config(parallel__pipeline=3, model__layers=3, steps=1,
                             **{**self.tight(3), "budgets__host": "6MiB"})
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        messages = self.path("messages-stages")
        said, codes = self.mortal(command, FERRY_TEST_MESSAGES=messages)
        self.assertEqual(codes, {0: 0, 1: 0, 2: 0}, said)
        with open(messages, encoding="ascii") as file:
            sizes = [int(line) for line in file]
        passed = config["batch"]["micro_batch"] * config["batch"]["sequence"] * config["model"]["hidden"] * 4
        said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(sizes.index(passed) + 1))
        self.assert_ended(said, codes, "lost rank 1: its process has ended", "pass of the block input")

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_killed_before_the_ranks_have_met(self):
        command = self.command(self.config(zero__timeout_seconds=8))
        said, codes = self.mortal(command, FERRY_TEST_DIES_AT="0")
        self.assert_ended(said, codes, "not all ranks came to the start", "start-up")


if __name__ == "__main__":
    unittest.main()
