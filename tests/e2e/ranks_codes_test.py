"""Ranks that send gradients, weights or momentum as codes."""

import json
import unittest

from harness import USAGE, in_quick
from ranks import ENVIRONMENT, MPIRUN, Ranks


class CodesTest(Ranks):
    def test_codes_give_the_same_bits_and_are_counted(self):
        """Every stage and tier that shares a codec; what was sent follows from the model."""
        for codec, bits in (("none", 32), ("int8", 8 + 32 / 64), ("int4", 4 + 32 / 64)):
            runs = []
            for stage in in_quick((0, 1, 2, 3), (0, 3)):
                for name, tiers in in_quick((("memory", {}), ("tight", self.tight(2))), [stage // 3]):
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

    def test_what_all_ranks_read_alike_is_warned_of_once(self):
        run = self.ranks(2, self.config(optimizer__method="onebit_adam", optimizer__freeze_step=1, steps=3,
                                        schedule={"warmup_steps": 2}))
        self.assert_trained(run)
        self.assertEqual(run.err.count("the second moment stays before the learning rate is at its peak"), 1, run.err)

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
        for stage, tiers in in_quick(((0, {}), (0, tight), (1, {}), (2, tight), (3, {})), (0, 3, 4)):
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
        for network, measured in (("fast", "fast"), ("40Mbit,200us,4", "hosts of 4, 2 ranks")):
            wrong = over(network, config)
            self.assertEqual(wrong.code, USAGE, wrong.err)
            self.assertIn(f"measured: {measured}", wrong.err)

    def test_planned_bytes_of_both_phases_are_those_measured(self):
        """Steps of gradients, of momentum and local ones, each in its schedule, and what leads over between them."""
        common = {"zero__compress": {"block": 64}}
        after, momentum = "after a step without speculation", ", exchanges momentum"
        onebit = {"steps": 6, "optimizer__method": "onebit_adam", "optimizer__freeze_step": 2, "zero__stage": 2, **common}
        zeroone = {"steps": 8, "optimizer__method": "zeroone_adam", "optimizer__var_freeze_step": 2, "zero__stage": 0,
                   "optimizer__var_update_scaler": 2, "optimizer__local_step_scaler": 1, "optimizer__local_step_clipper": 2,
                   **common}
        exact = ["first", after, "end " + after]
        alone = "after a local step" + momentum
        cases = ((onebit, {"gradients": 2, "momentum": 4},
                  [*exact, "first" + momentum, *3 * [after + momentum], "end " + after + momentum]),
                 # Updates 3, 5 and 7 send signs, 4, 6 and 8 nothing.
                 (zeroone, {"gradients": 2, "momentum": 3, "nothing": 3},
                  [*exact, "first" + momentum, *2 * [after + momentum, alone], after + momentum, "end " + alone]))
        for changes, phases, replayed in cases:
            with self.subTest(method=changes["optimizer__method"]):
                config = self.config(**changes, **{**self.tight(2), "swap__speculate": "off", "budgets__host": "2400KiB"})
                plan = self.ferry("plan", self.command(config)[1], "--json", "--no-prediction", "--ranks", "2")
                self.assertEqual(plan.code, 0, plan.err)
                said = json.loads(plan.out)
                self.assertEqual({one["exchanges"]: one["steps"] for one in said["phases"]}, phases)
                schedules = {one["name"]: one for one in said["schedules"]}
                for one in said["phases"]:
                    like = alone if one["exchanges"] == "nothing" else after + (momentum if one["exchanges"] == "momentum" else "")
                    self.assertEqual(one["bytes"], schedules[like]["bytes"])
                    self.assertIsNone(one["seconds"])
                run = self.ranks(2, config)
                self.assert_trained(run)
                self.assertEqual((run.summary["momentum_steps"], run.summary["local_steps"]),
                                 (phases["momentum"], phases.get("nothing", 0)))
                for lane in ("comm", "h2d", "d2h", "nvme read", "nvme write"):
                    self.assertEqual(sum(schedules[name]["bytes"][lane] for name in replayed), run.lane(lane), lane)

    def test_a_step_of_each_phase_is_predicted(self):
        zeroone = self.config(steps=8, optimizer__method="zeroone_adam", optimizer__var_freeze_step=2, zero__stage=0,
                              optimizer__local_step_scaler=1, optimizer__local_step_clipper=2)
        plan = self.ferry("plan", self.command(zeroone)[1], "--json", "--ranks", "2")
        self.assertEqual(plan.code, 0, plan.err)
        said = json.loads(plan.out)
        seconds = {one["exchanges"]: one["seconds"] for one in said["phases"]}
        self.assertEqual(seconds["gradients"], said["prediction"]["step_seconds"])
        mean = sum(one["steps"] * one["seconds"] for one in said["phases"]) / 8
        self.assertAlmostEqual(said["mean_step_seconds"] / mean, 1)
        self.assertGreater(min(seconds.values()), 0)
        measured = [word for word in self.command(zeroone) if word != "--no-bound"]
        run = self.ferry(*measured, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assert_trained(run)
        for key in ("predicted_seconds", "predicted_momentum_seconds", "predicted_local_seconds"):
            self.assertGreater(run.summary[key], 0, key)
        table = self.ferry(*[word for word in measured if word != "--json"], through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertRegex(table.out, r"predicted by their schedules: [0-9.]+ s with gradients \(2 steps\), [0-9.]+ s with momentum "
                                    r"\(3\), [0-9.]+ s local \(3\); measured step at [0-9.]+x of their mean\n")

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
            {}, {"zero__second_shard": "host"}, {"zero__second_shard": "host", **tight},
            {"zero__second_shard": "host", "batch__micro_batches": 24, "swap__groups": 2}, {"batch__micro_batches": 24})]
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
        for _ in range(4):  # a rank that leaves first must not be taken for lost
            run = self.ranks(3, self.config(zero__ranks_per_host=2, zero__compress={"gradients": "int8"}))
            self.assertEqual(run.code, USAGE, run.err)
            self.assertNotIn("lost rank", run.err)
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


if __name__ == "__main__":
    unittest.main()
