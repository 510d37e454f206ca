"""Offloading never changes a number: the loss lines and the hash of all weights and moments are those
of the run that has memory without limit, for every placement, portion, order and thread count."""

import os
import shutil
import tempfile
import unittest

from harness import USAGE, FerryTest, in_quick

TWICE = {"swap__speculate": "all"}
ON_DEVICE = {"swap__state_on_device": 1}  # as much as fits there
KEEP_NOTHING = {"swap__save_attention": 0, "swap__save_mlp": 0, "swap__save_projections": 0}  # for backward
URING, POSIX = {"io__backend": "uring"}, {"io__backend": "posix"}


def speculation_both_ways(test, run):
    test.assertGreater(run.summary["steps_committed"], 0)
    test.assertGreater(run.summary["steps_rolled_back"], 0)


def no_speculation(test, run):
    test.assertEqual(run.summary["steps_committed"] + run.summary["steps_rolled_back"], 0)


def in_groups(count):
    def check(test, run):
        test.assertEqual(run.summary["groups"], count)
        test.assertEqual(run.bytes_of("nvme", "accumulators") > 0, count > 1)
    return check


def in_chunks(count):
    return lambda test, run: test.assertEqual(run.summary["chunk_elements"], count)


def said(text):
    return lambda test, run: test.assertIn(text, run.err)


def state_on(*tiers):
    def check(test, run):
        state = {"nvme": run.bytes_of("nvme", "state"),
                 "host": run.bytes_of("host", "optimizer state"),
                 "device": run.bytes_of("device", "optimizer state")}
        test.assertEqual([tier for tier in state if state[tier] > 0], list(tiers))
    return check


def stored(*names):
    def check(test, run):
        for name in names:
            test.assertGreater(run.bytes_of("nvme", name), 0, name)
    return check


def matrices_stored(test, run):
    """Muon's, in slots of their shapes' sizes."""
    shapes = [row["what"] for row in run.summary["tiers"]
              if row["tier"] == "nvme" and row["what"].startswith("state of ")]
    test.assertGreater(len(shapes), 1, run.summary["tiers"])


def inputs_on(*tiers):
    def check(test, run):
        inputs = {tier: run.bytes_of(tier, "block inputs") for tier in ("host", "nvme")}
        test.assertEqual([tier for tier in inputs if inputs[tier] > 0], list(tiers))
    return check


def unchecked(test, run):
    test.assertEqual(run.lane("check"), 0)
    test.assertGreater(run.lane("nvme read"), 0)


def resident(test, run):
    test.assertGreater(run.bytes_of("device", "resident weights"), 0)


def part_on_device(part):
    """Of the state, to within a chunk or two; the rest in host memory."""
    def check(test, run):
        device, host = (run.bytes_of(tier, "optimizer state") for tier in ("device", "host"))
        test.assertAlmostEqual(device / (device + host), part, delta=0.06)
    return check


def keeps(attention=0, mlp=0, projections=0):
    """Of three blocks; the others' is computed again."""
    def check(test, run):
        for blocks, key, row in ((attention, "attention_saved", "attention saved for backward"),
                                 (mlp, "mlp_saved", "MLPs' products saved for backward"),
                                 (projections, "projections_saved", "attention's products saved for backward")):
            test.assertEqual(run.summary[key], blocks)
            test.assertEqual(run.bytes_of("device", row) > 0, blocks > 0)
    return check


def one_input_saved(test, run):
    keeps(mlp=3)(test, run)
    inputs_on("host")(test, run)
    test.assertEqual(run.summary["inputs_saved"], 1)


def on_both_paths(test, run):
    test.assertEqual(len(run.summary["paths"]), 2)
    for path in run.summary["paths"]:
        test.assertGreater(min(path["bytes_read"], path["bytes_written"]), 0)


TWO_NODES = {"HWLOC_SYNTHETIC": "pack:2 [numa] core:1 pu:1", "HWLOC_THISSYSTEM": "1"}


class IdentityTest(FerryTest):
    # Device and host hold about one layer's work; everything has to travel.
    TIGHT = {"budgets__device": "1300KiB", "budgets__host": "130KiB"}
    # Some steps exceed it, others do not: see the losses of speculative updates below.
    CLIP = {"clip_norm": 2.1, "evaluate__every": 3, "evaluate__micro_batches": 2}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Files in memory, where there are such: quicker, and another file system.
        shared = "/dev/shm"
        cls.memory = tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None)
        cls.addClassCleanup(shutil.rmtree, cls.memory)

    def reference(self, family):
        run = self.train(self.config(**family))
        self.assert_trained(run)
        self.assertEqual(run.lane("nvme read") + run.lane("nvme write"), 0)
        self.assertEqual([step["step"] for step in run.steps], list(range(1, 9)))
        self.assertLess(run.steps[-1]["loss"], run.steps[0]["loss"])
        self.assertGreater(run.summary["clipped_steps"], 0)
        self.assertLess(run.summary["clipped_steps"], 8)
        self.assertEqual(len(run.hashes), 1)
        return run

    def tight(self, family, changes):
        changes = {"budgets__nvme": [self.nvme()], **self.TIGHT, **changes}
        return self.train(self.config(**{**family, **changes}))

    def has_uring(self):
        run = self.tight({"steps": 1}, URING)
        return "io_uring cannot be used" not in run.err

    def assert_same(self, run, reference):
        self.assert_trained(run)
        self.assertEqual(run.numbers(), reference.numbers())
        self.assertEqual([e["evaluation_loss"] for e in run.evaluations],
                         [e["evaluation_loss"] for e in reference.evaluations])

    def assert_everything_travels(self, run):
        for lane in ("h2d", "d2h", "nvme read", "nvme write"):
            self.assertGreater(run.lane(lane), 0, lane)
        for what in ("weights", "state", "gradients", "block inputs"):
            self.assertGreater(run.bytes_of("nvme", what), 0, what)
        self.assertLessEqual(run.summary["device_bytes"], 1300 * 1024)
        self.assertLessEqual(run.summary["host_bytes"], 130 * 1024)

    def test_one_family_in_every_way(self):
        reference = self.reference(self.CLIP)
        two_paths = [self.nvme("4MiB"), self.nvme("4MiB", "nvme2")]
        roomy = {"budgets__host": "4MiB", "budgets__device": "4MiB"}
        in_memory = {"budgets__host": "unlimited", "budgets__device": "unlimited",
                     "budgets__nvme": []}
        variations = {
            "three tiers": ({}, self.__class__.assert_everything_travels),
            "io_uring": (URING, said("uring")) if self.has_uring() else None,
            "POSIX threads": (POSIX, said("posix")),
            "one operation of one page at a time":
                ({"io__queue_depth": 1, "io__block_bytes": 4096}, said("depth 1, blocks of 4.00 KiB")),
            "few small operations": ({"io__queue_depth": 3, "io__block_bytes": "16KiB", **POSIX}, None),
            "three rings": ({"io__rings": 3}, said("3 ring(s) of depth 32")),
            "page cache": ({"io__direct": False}, None),
            "two paths": ({"budgets__nvme": two_paths}, on_both_paths),
            "one group": ({"swap__groups": 1, "budgets__device": "1400KiB"}, in_groups(1)),
            "two groups": ({"swap__groups": 2}, in_groups(2)),
            "a group a micro-batch": ({"swap__groups": 4}, in_groups(4)),
            "chunks of 8,192": ({"swap__chunk_elements": 8192, "budgets__host": "200KiB"},
                                in_chunks(8192)),
            "odd chunks": ({"swap__chunk_elements": 12288, "budgets__host": "300KiB"},
                           in_chunks(12288)),
            "two threads": ({"threads": 2}, None),
            "no speculation": ({"swap__speculate": "off"}, no_speculation),
            "every step speculative": ({"swap__speculate": "all"}, speculation_both_ways),
            "some updates speculative": ({"swap__speculate": "auto"}, speculation_both_ways),
            "every step speculative in memory":
                ({**TWICE, "budgets__host": "8MiB", "swap__state_on_nvme": 0}, speculation_both_ways),
            "every step speculative without NVMe":
                ({**TWICE, "budgets__host": "unlimited", "budgets__nvme": []}, speculation_both_ways),
            "speculative updates in groups on two threads":
                ({**TWICE, "swap__groups": 4, "threads": 2}, speculation_both_ways),
            "block inputs in memory": ({"budgets__host": "3MiB"}, inputs_on("host")),
            "block inputs in memory and on NVMe":
                ({"budgets__host": "1930KiB", "swap__groups": 1, "budgets__device": "1400KiB"},
                 inputs_on("host", "nvme")),
            "state in memory": ({**roomy, "swap__state_on_nvme": 0}, state_on("host")),
            "a third of the state on NVMe": ({**roomy, "swap__state_on_nvme": 0.3}, state_on("nvme", "host")),
            "all state on NVMe": ({**roomy, "swap__state_on_nvme": 1}, state_on("nvme")),
            "unchecked": ({"swap__verify": False}, unchecked),
            "resident layers": ({"budgets__device": "2MiB"}, resident),
            "device without limit": ({"budgets__device": "unlimited"}, resident),
            "all state on the device": ({**in_memory, **ON_DEVICE}, state_on("device")),
            "host without limit": ({"budgets__host": "unlimited", "budgets__nvme": []}, None),
            **{f"{part} of the state on the device":
                   ({**in_memory, "swap__state_on_device": part, "swap__chunk_elements": 8192},
                    part_on_device(part))
               for part in (0.1, 0.3, 0.5, 0.7, 0.9)},
            "state on the device beside speculative updates in memory":
                ({**TWICE, **in_memory, "swap__state_on_device": 0.5}, speculation_both_ways),
            "nothing saved for backward":
                ({**KEEP_NOTHING, "budgets__device": "2MiB"}, keeps()),
            "attention of two blocks saved":
                ({**KEEP_NOTHING, "swap__save_attention": 2, "budgets__device": "1500KiB"},
                 keeps(attention=2)),
            "MLPs' products of two blocks saved":
                ({**KEEP_NOTHING, "swap__save_mlp": 2, "budgets__device": "2MiB"}, keeps(mlp=2)),
            "attention's products of two blocks saved":
                ({**KEEP_NOTHING, "swap__save_projections": 2, "budgets__device": "2MiB"}, keeps(projections=2)),
            "everything saved in memory":
                ({**in_memory, "swap__save_attention": 99, "swap__save_mlp": 99, "swap__save_projections": 99},
                 keeps(3, 3, 3)),
            "everything saved in groups on two threads":
                ({**TWICE, "swap__save_attention": 3, "swap__save_mlp": 3, "swap__save_projections": 3,
                  "swap__groups": 2, "threads": 2, "budgets__device": "3MiB"}, keeps(3, 3, 3)),
            "something saved beside state on the device":
                ({**in_memory, **ON_DEVICE, "swap__save_attention": 1, "swap__save_mlp": 2},
                 keeps(1, 2)),
            "block inputs in host memory":
                ({**in_memory, "swap__save_inputs": 0}, inputs_on("host")),
            "one block's input saved beside all MLPs' products":
                ({**TWICE, **in_memory, "swap__save_inputs": 1, "swap__save_mlp": 99}, one_input_saved),
            "state on every tier":
                ({**ON_DEVICE, "budgets__device": "2MiB", "budgets__host": "2800KiB",
                  "swap__chunk_elements": 8192}, state_on("nvme", "host", "device")),
            "state on every tier, speculative updates, groups, two threads":
                ({**TWICE, **ON_DEVICE, "budgets__device": "2500KiB", "budgets__host": "600KiB",
                  "swap__groups": 2, "threads": 2}, speculation_both_ways),
        }
        few = ("three tiers", "io_uring", "POSIX threads", "two paths", "two groups", "chunks of 8,192", "two threads",
               "every step speculative", "some updates speculative", "block inputs in memory and on NVMe", "state in memory",
               "all state on NVMe", "0.5 of the state on the device", "MLPs' products of two blocks saved",
               "block inputs in host memory", "state on every tier, speculative updates, groups, two threads")
        for name, variation in in_quick(variations, few).items():
            if variation is None:
                continue
            with self.subTest(name):
                changes, check = variation
                run = self.tight(self.CLIP, changes)
                self.assert_same(run, reference)
                if check:
                    check(self, run)

    def test_other_families(self):
        families = {
            "tied": {"model__tie_embeddings": True},
            "bf16": {"precision": "bf16"},
            "bf16, tied": {"precision": "bf16", "model__tie_embeddings": True},
            "bf16, wide residual and wire":
                {"precision": "bf16", "numerics__residual": "fp32", "numerics__wire": "fp32"},
            "bf16 moments": {"optimizer__moments": "bf16"},
            "int8 moments": {"optimizer__moments": "int8"},
            "int8 moments, tied, all that can be":
                {"optimizer__moments": "int8", "optimizer__fp32_moments": [],
                 "model__tie_embeddings": True},
            "split master": {"precision": "bf16", "optimizer__master": "split"},
            "split master, bf16 moments, tied":
                {"precision": "bf16", "optimizer__master": "split", "optimizer__moments": "bf16",
                 "model__tie_embeddings": True},
            "split master beside fp16, int8 moments":
                {"precision": "fp16", "optimizer__master": "split", "optimizer__moments": "int8"},
            "split master, frozen parts":
                {"precision": "bf16", "optimizer__master": "split",
                 "freeze": ["*mlp*", "*q_proj*", "*norm*"], "clip_norm": 1.95},
            "frozen embedding and block":
                {"freeze": ["model.embed_tokens.*", "model.layers.0.*"], "clip_norm": 1.9},
            "tied and frozen": {"model__tie_embeddings": True, "freeze": ["model.embed_tokens.*"],
                                "clip_norm": 0.5},
            "frozen parts of blocks": {"freeze": ["*mlp*", "*q_proj*", "*norm*"], "clip_norm": 1.95},
            "tiles": {"numerics__head_tile": 24, "numerics__mlp_tile": 16},
        }
        ways = ({}, {"swap__groups": 4, **TWICE}, {"swap__groups": 2, "threads": 2, **POSIX},
                {"budgets__host": "unlimited", **TWICE, "budgets__nvme": []},
                {"budgets__host": "250KiB", "swap__chunk_elements": 8192},
                {"budgets__device": "2500KiB", **TWICE, **ON_DEVICE},
                {"budgets__device": "1800KiB", "swap__save_attention": 99, "swap__groups": 2},
                {"budgets__device": "3MiB", "swap__save_attention": 2, "swap__save_mlp": 99,
                 "swap__groups": 2})
        few = ("bf16, tied", "int8 moments", "split master, frozen parts", "frozen embedding and block", "tiles")
        for place, (name, family) in enumerate(in_quick(families, few).items()):
            family = {**self.CLIP, "budgets__device": "1500KiB", **family}
            in_memory = {key: family[key] for key in family if key != "budgets__device"}
            with self.subTest(name):
                reference = self.reference(in_memory)
                for changes in in_quick(ways, range(place % 3, len(ways), 3)):  # the families share them out
                    with self.subTest(name, **changes):
                        nvme = {"budgets__nvme": [{"path": self.memory, "size": "16MiB"}]}
                        run = self.tight({}, {**nvme, **family, **changes})
                        self.assert_same(run, reference)

    def test_muon(self):
        """A matrix is one chunk in every placement; the rest is cut as ever."""
        kinds = {
            "fp32": {"optimizer__ns_steps": 4},
            "bf16, int8 momentum, frozen parts":
                {"precision": "bf16", "optimizer__moments": "int8", "freeze": ["*q_proj*", "*norm*"]},
            "split master, tied":
                {"precision": "bf16", "optimizer__master": "split", "model__tie_embeddings": True,
                 "clip_norm": 3},
        }
        room = {"budgets__device": "1700KiB", "budgets__host": "1MiB", "swap__state_on_nvme": 1}
        ways = {
            "three tiers": ({}, matrices_stored),
            "every step speculative": (TWICE, speculation_both_ways),
            "groups, two threads, posix": ({**TWICE, **POSIX, "swap__groups": 4, "threads": 2}, None),
            "speculative in memory":
                ({**TWICE, "budgets__host": "unlimited", "budgets__nvme": [], "swap__state_on_nvme": "auto"},
                 speculation_both_ways),
            "chunks of 8,192": ({"swap__chunk_elements": 8192}, None),
            "part of it on the device":
                ({**ON_DEVICE, "budgets__device": "unlimited", "budgets__nvme": [], "budgets__host": "unlimited",
                  "swap__state_on_nvme": "auto"}, state_on("host", "device")),
        }
        for name, kind in in_quick(kinds, ["bf16, int8 momentum, frozen parts"]).items():
            kind = {"optimizer__method": "muon", **self.CLIP, **kind}
            reference = self.reference(kind)
            self.assertIn("muon updates the matrices of the blocks", reference.err)
            for way, (changes, check) in ways.items():
                with self.subTest(name, way=way):
                    run = self.tight(kind, {**room, **changes})
                    self.assert_same(run, reference)
                    if check:
                        check(self, run)

    def test_small_state_in_every_way(self):
        """The formats that change what a version is: the weight of a split master belongs to it."""
        small = {**self.CLIP, "precision": "bf16",
                 "optimizer__master": "split", "optimizer__moments": "bf16"}
        reference = self.reference(small)
        roomy = {"budgets__host": "4MiB", "budgets__device": "4MiB"}
        in_memory = {"budgets__host": "unlimited", "budgets__device": "unlimited",
                     "budgets__nvme": []}
        variations = {
            "three tiers": ({}, stored("weights", "state", "gradients")),
            "no speculation": ({"swap__speculate": "off"}, no_speculation),
            "every step speculative": (TWICE, speculation_both_ways),
            "some updates speculative": ({"swap__speculate": "auto"}, speculation_both_ways),
            "every step speculative in memory":
                ({**TWICE, "budgets__host": "8MiB", "swap__state_on_nvme": 0}, speculation_both_ways),
            "every step speculative, weights in memory, state on NVMe":
                ({**TWICE, "budgets__host": "8MiB", "swap__state_on_nvme": 1}, speculation_both_ways),
            "speculative updates beside resident layers": ({**TWICE, "budgets__device": "2500KiB"}, resident),
            "every step speculative without NVMe":
                ({**TWICE, "budgets__host": "unlimited", "budgets__nvme": []}, speculation_both_ways),
            "speculative updates in groups on two threads":
                ({**TWICE, "swap__groups": 4, "threads": 2}, speculation_both_ways),
            "chunks of 8,192": ({"swap__chunk_elements": 8192, "budgets__host": "200KiB"},
                                in_chunks(8192)),
            "a third of the state on NVMe": ({**roomy, "swap__state_on_nvme": 0.3},
                                             state_on("nvme", "host")),
            "unchecked": ({"swap__verify": False}, unchecked),
            "device without limit": ({"budgets__device": "unlimited"}, resident),
            "all state on the device": ({**in_memory, **ON_DEVICE}, state_on("device")),
            "host without limit": ({"budgets__host": "unlimited", "budgets__nvme": []}, None),
            "half of the state on the device": ({**in_memory, "swap__state_on_device": 0.5},
                                                state_on("host", "device")),
            "state on the device beside speculative updates in memory":
                ({**TWICE, **ON_DEVICE, "budgets__device": "2MiB", "budgets__host": "unlimited",
                  "budgets__nvme": []}, speculation_both_ways),
            "state on every tier":
                ({**TWICE, **ON_DEVICE, "budgets__device": "2MiB", "budgets__host": "600KiB"},
                 speculation_both_ways),
        }
        few = ("three tiers", "every step speculative", "every step speculative, weights in memory, state on NVMe",
               "chunks of 8,192", "all state on the device", "state on every tier")
        for name, (changes, check) in in_quick(variations, few).items():
            with self.subTest(name):
                run = self.tight(small, changes)
                self.assert_same(run, reference)
                if check:
                    check(self, run)

    def test_every_optimizer(self):
        optimizers = ({"method": "adam", "lr": 0.003}, {"method": "sgd", "lr": 0.3},
                      {"method": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
                      {"method": "lion", "lr": 0.001, "weight_decay": 0.1},
                      {"method": "adagrad", "lr": 0.02, "initial_accumulator": 0.1})
        for optimizer in optimizers:
            with self.subTest(**optimizer):
                reference = self.train(self.config(optimizer=optimizer))
                self.assert_trained(reference)
                self.assertLess(reference.steps[-1]["loss"], reference.steps[0]["loss"])
                run = self.tight({"optimizer": optimizer}, {"swap__state_on_nvme": 1})
                self.assert_same(run, reference)
                self.assertGreater(run.bytes_of("nvme", "state"), 0)
                run = self.tight({"optimizer": optimizer},
                                 {**ON_DEVICE, "budgets__device": "2MiB"})
                self.assert_same(run, reference)
                self.assertGreater(run.bytes_of("device", "optimizer state"), 0)

    def test_numa_nodes_and_reserved_cores(self):
        if len(os.sched_getaffinity(0)) < 2:
            self.skipTest("one core")
        reference = self.reference(self.CLIP)
        tight = {**self.CLIP, **self.TIGHT, "budgets__nvme": [self.nvme()], "threads": 2}
        run = self.train(self.config(**tight), env={**os.environ, **TWO_NODES})
        self.assert_same(run, reference)
        self.assertIn("NUMA node 1 of 2", run.err)
        core = max(os.sched_getaffinity(0))
        run = self.train(self.config(**tight, reserved_cores=[core]))
        self.assert_same(run, reference)
        self.assertNotIn("NUMA node", run.err)
        run = self.train(self.config(**tight, reserved_cores=[9999]))
        self.assertEqual(run.code, USAGE)
        self.assertIn("reserved_cores", run.err)

    def test_families_differ(self):
        """The hash sees what it should: no two of these runs are the same."""
        families = ({}, {"seed": 8}, {"precision": "bf16"}, {"model__tie_embeddings": True},
                    {"optimizer__lr": 0.00301}, {"steps": 7, "schedule__total_steps": 8},
                    {"freeze": ["*norm*"]}, {"numerics__wire": "bf16"},
                    {"optimizer__moments": "bf16"}, {"optimizer__moments": "bf16", "seed": 8},
                    {"optimizer__moments": "int8"},
                    {"optimizer__method": "muon"},
                    {"optimizer__method": "muon", "optimizer__adamw_lr": 0.001},
                    {"optimizer__method": "muon", "optimizer__adjust_lr": "match_rms_adamw"},
                    {"optimizer__method": "muon", "optimizer__nesterov": False},
                    {"optimizer__moments": "int8", "optimizer__fp32_moments": ["*q_proj*", "*embed*"]})
        hashes = [self.train(self.config(**family)).hashes[0] for family in families]
        self.assertEqual(len(set(hashes)), len(families), hashes)

    def test_evaluation_does_not_touch_training(self):
        quiet = {"clip_norm": 2.1, "swap__speculate": "all"}
        reference = self.tight(quiet, {})
        self.assert_trained(reference)
        self.assertEqual(reference.evaluations, [])
        for every in (1, 3, 0):
            run = self.tight(quiet, {"evaluate__every": every, "evaluate__micro_batches": 3})
            self.assert_trained(run)
            self.assertEqual(run.numbers(), reference.numbers())
            self.assertEqual(len(run.evaluations), {1: 9, 3: 4, 0: 2}[every])

    def test_the_hash_of_every_step(self):
        """Taking the hash waits for the outcome and drains; the last one is that of a run that never stopped."""
        plain = self.tight(self.CLIP, TWICE)
        each = self.tight(self.CLIP, {**TWICE, "hash_every": "step"})
        memory = self.train(self.config(**self.CLIP, hash_every="step"))
        self.assertEqual(len(each.hashes), 8)
        self.assertEqual(each.hashes[-1:], plain.hashes)
        self.assertEqual(each.hashes, memory.hashes)


if __name__ == "__main__":
    unittest.main()
