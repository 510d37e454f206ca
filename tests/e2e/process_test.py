"""The program as a process: what it prints, how it ends, what it leaves behind, what memory it takes."""

import json
import os
import platform
import re
import resource
import signal
import subprocess
import threading
import time
import unittest

from harness import FERRY, IO, USAGE, FerryTest, start

MIB = 1 << 20


class OutputTest(FerryTest):
    def test_one_json_object_a_step(self):
        run = self.train(self.config(evaluate__every=4, evaluate__micro_batches=1, steps=6))
        self.assert_trained(run)
        self.assertFalse([line for line in run.lines if "text" in line])
        self.assertEqual([step["step"] for step in run.steps], [1, 2, 3, 4, 5, 6])
        self.assertEqual([line["step"] for line in run.evaluations], [0, 4, 6])
        self.assertEqual(run.summary["steps"], 6)
        self.assertEqual(run.summary["tokens"], 6 * 256)
        self.assertFalse(run.summary["interrupted"])
        self.assertRegex(run.hashes[-1], "^[0-9a-f]{16}$")

    def test_a_trace_has_every_ring_of_a_path(self):
        trace = self.path("rings.json")
        config = self.config(steps=3, budgets__host="300KiB", budgets__nvme=[self.nvme()], io__rings=2)
        self.assert_trained(self.train(config, "--trace", trace))
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
                if event["name"] == "thread_name"}
        rings = {key: name for key, name in rows.items() if name.startswith(self.path("nvme") + ": ")}
        self.assertEqual(sorted(rings.values()), sorted(f"{self.path('nvme')}: {way}, ring {ring}"
                                                        for way in ("read", "write") for ring in (0, 1)))
        for key, name in rings.items():
            slices = sorted((event["ts"], event["dur"]) for event in events
                            if event["ph"] == "X" and (event["pid"], event["tid"]) == key)
            self.assertTrue(slices, name)
            for (begin, length), (after, _) in zip(slices, slices[1:]):
                self.assertLessEqual(begin + length, after + 0.002, name)

    def test_set_overrides_the_file(self):
        config = self.config()
        run = self.train(config, "--set", "steps=2", "--set", "optimizer.lr=0.5", "--set",
                         "budgets.host=32MiB", "--set", "schedule.kind=constant",
                         "--set", 'optimizer.betas=[0.8,0.9]', "--set", "schedule.warmup_steps=0")
        self.assert_trained(run)
        self.assertEqual([step["lr"] for step in run.steps], [0.5, 0.5])

    def test_gpu_memory_is_short_for_a_key(self):
        # An invalid size is refused under the key's own name, before anybody looks for a GPU.
        run = self.train(self.config(device="cuda"), "--gpu-memory", "much")
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("--set budgets.device=much: budgets.device", run.err)

    def test_gpu_memory_is_of_a_gpu(self):
        config = self.command(self.config(steps=2))[1]
        for command in ("train", "plan"):
            run = self.ferry(command, config, "--gpu-memory", "8MiB")
            self.assertEqual(run.code, USAGE, run.err)
            for text in ("--gpu-memory 8MiB", "device cpu", "--set budgets.device=8MiB"):
                self.assertIn(text, run.err)
        run = self.ferry("plan", config, "--no-prediction", "--set", "budgets.device=8MiB")
        self.assertEqual(run.code, 0, run.err)

    def test_a_skipped_step_is_still_json(self):
        run = self.train(self.config(on_nonfinite="skip", optimizer__lr=1e6,
                                     optimizer__weight_decay=1e6, schedule__warmup_steps=0))
        self.assert_trained(run)
        self.assertFalse([line for line in run.lines if "text" in line])

    def without_targets(self):
        """A text whose middle is masked, so that some steps have no target."""
        text, mask, tokens = (self.path(name) for name in ("holes.txt", "holes.mask", "holes.bin"))
        with open(text, "w", encoding="ascii") as file:
            file.write("abcdefgh" * 512)
        with open(mask, "w", encoding="ascii") as file:
            file.write("0" * 1024 + "1" * 3072)
        made = self.ferry("data", text, "-o", tokens, "--mask", mask)
        self.assertEqual(made.code, 0, made.err)
        return {"data__tokens": tokens, "data__held_back": 0, "batch__micro_batches": 1, "steps": 20}

    def test_a_step_without_targets_has_no_numbers_and_says_why(self):
        for precision in ("fp32", "fp16"):
            config = self.config(**self.without_targets(), precision=precision)
            run = self.train(config)
            self.assert_trained(run)
            empty = [step for step in run.steps if step["targets"] == 0]
            self.assertGreater(len(empty), 0)
            self.assertLess(len(empty), len(run.steps))
            for step in empty:
                self.assertTrue(step["skipped"])
                self.assertEqual(step["why_skipped"], "no real target")
                for key in ("loss", "gradient_norm", "clip_factor", "loss_scale"):
                    self.assertIsNone(step[key], step)
            for step in run.steps:
                if step["targets"] > 0:
                    self.assertIsNone(step["why_skipped"])
                    self.assertGreater(step["gradient_norm"], 0)
                    self.assertEqual(step["loss_scale"], 65536 if precision == "fp16" else 1)
            words = [word for word in self.command(config) if word != "--json"]
            self.assertIn("skipped: no real target", self.ferry(*words).out)

    def test_skipped_steps_leave_the_learning_rate_high_and_the_summary_says_so(self):
        holes = self.without_targets()
        run = self.train(self.config(**holes))
        self.assert_trained(run)
        self.assertEqual(run.summary["lr"], run.steps[-1]["lr"])
        self.assertGreater(run.summary["lr"], 1.5 * run.summary["scheduled_lr"])
        words = [word for word in self.command(self.config(**holes)) if word != "--json"]
        self.assertIn("skipped steps do not move the schedule on", self.ferry(*words).out)
        whole = self.train(self.config())
        self.assertEqual(whole.summary["lr"], whole.summary["scheduled_lr"])
        words = [word for word in self.command(self.config()) if word != "--json"]
        self.assertNotIn("do not move the schedule", self.ferry(*words).out)

    def test_an_eps_that_is_raised_is_said(self):
        for method, least in (("adamw", 2**-50 / 0.05**0.5), ("adagrad", 2**-50)):
            for eps, said in ((least / 2, True), (0, True), (least * 1.01, False)):
                run = self.train(self.config(optimizer__method=method, optimizer__eps=eps,
                                             optimizer__betas=[0.9, 0.95], steps=2))
                self.assert_trained(run)
                self.assertEqual("but the update uses" in run.err, said, run.err)
                if said:
                    self.assertIn("optimizer.eps", run.err)
        self.assertNotIn("but the update uses", self.train(self.config(optimizer__method="sgd", optimizer__eps=0,
                                                                       steps=2)).err)

    def test_the_hash_names_the_kernels_that_rounded(self):
        cores = []
        if platform.machine() != "x86_64":
            self.skipTest("there are kernels to choose from on x86-64 only")
        for named in ("Haswell", "Nehalem", None):
            env = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
            if named:
                env["OPENBLAS_CORETYPE"] = named
            run = self.train(self.config(steps=2), env=env)
            self.assert_trained(run)
            cores.append(next(line["kernels"] for line in run.lines if "state_hash" in line))
            words = [word for word in self.command(self.config(steps=2)) if word != "--json"]
            self.assertIn(f"with OpenBLAS's {cores[-1]} kernels", self.ferry(*words, env=env).out)
            if named != "Haswell":  # which may be what the processor has best
                self.assertEqual(run.err.count("for an older processor than this one"), 1 if named else 0, run.err)
        self.assertEqual(cores[1], "Nehalem")
        self.assertNotIn(cores[2], ("Nehalem", "Prescott"))

    def test_the_trace_shows_what_each_path_did(self):
        trace = self.path("path-rows.json")
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()], steps=2)
        run = self.train(config, "--trace", trace)
        self.assert_trained(run)
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
                if event["name"] == "thread_name"}
        for direction in ("read", "write"):
            name = f"{self.path('nvme')}: {direction}"
            self.assertIn(name, rows.values())
            slices = sorted((event["ts"], event["dur"], event["args"]["bytes"])
                            for event in events
                            if event["ph"] == "X" and rows[event["pid"], event["tid"]] == name)
            self.assertGreater(len(slices), 2)
            self.assertGreater(sum(size for _, _, size in slices), 0)
            for (begin, length, _), (after, _, _) in zip(slices, slices[1:]):
                self.assertLessEqual(begin + length, after + 0.01)  # microseconds

    def test_what_is_measured_before_and_after_is_not_in_the_trace(self):
        trace = self.path("measured.json")
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()], steps=3)
        command = [word for word in self.command(config, "--trace", trace) if word != "--no-bound"]
        run = self.ferry(*command)
        self.assert_trained(run)
        self.assertGreater(run.summary["bound_seconds"], 0)
        with open(trace, encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event["ph"] in "MX"]
        groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
                and groups[event["pid"]] == "measured"}
        moved = dict.fromkeys(rows.values(), 0)
        for event in events:
            if event["ph"] == "X" and groups[event["pid"]] == "measured":
                moved[rows[event["tid"]]] += event["args"].get("bytes", 0)
        links = {link["lane"]: link["bytes"] for link in run.summary["lanes"]}
        for lane in ("nvme read", "nvme write"):
            self.assertGreater(links[lane], 0)
            self.assertEqual(moved[lane], links[lane], lane)

    def test_every_slice_of_the_trace_says_what_it_moved(self):
        trace = self.path("slices.json")
        config = self.config(budgets__host="200KiB", budgets__device="1400KiB", swap__groups=2,
                             budgets__nvme=[self.nvme()], steps=6, evaluate__every=2,
                             evaluate__micro_batches=1)
        run = self.train(config, "--trace", trace)
        self.assert_trained(run)
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        groups = {event["pid"]: event["args"]["name"] for event in events
                  if event["name"] == "process_name"}
        measured = [event for event in events
                    if event["ph"] == "X" and groups[event["pid"]] == "measured"]
        names = {event["name"] for event in measured}
        self.assertLessEqual({"forward", "backward", "update", "embed", "head and loss", "read",
                              "write", "copy", "verify", "seal", "commit"}, names)
        for event in measured:
            if event["name"] not in ("commit", "rollback"):
                self.assertGreater(event["args"].get("bytes", 0), 1, event)
            if event["name"] in ("read", "write", "verify", "seal", "update", "commit"):
                self.assertIn("layer", event["args"], event)
        stored = [event["args"] for event in measured if event["name"] in ("read", "write")]
        self.assertGreater(len({args["layer"] for args in stored}), 2)
        self.assertGreater(len({args["item"] for args in stored if "item" in args}), 2)
        # The slices of the team's threads lie within its lane's, and move the same bytes. Of two
        # tasks at once the later one's begins on the lane where the earlier one's ends.
        threads = [event for event in events
                   if event["ph"] == "X" and groups[event["pid"]] == "team's threads"]
        updates = [event for event in measured if event["name"] == "update"]
        moved = [sum(event["args"]["bytes"] for event in all_of if event["name"] == "update")
                 for all_of in (threads, updates)]
        self.assertAlmostEqual(moved[0] / moved[1], 1, delta=0.001)
        rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
                if event["name"] == "thread_name"}
        runs = []  # of slices without a gap
        for task in sorted((task for task in measured if rows[task["pid"], task["tid"]] == "team"),
                           key=lambda task: task["ts"]):
            begin, end = task["ts"], task["ts"] + task["dur"]
            if runs and begin <= runs[-1][1] + 0.01:
                runs[-1][1] = max(end, runs[-1][1])
            else:
                runs.append([begin, end])
        for event in threads:
            self.assertTrue(any(begin <= event["ts"] + 0.01 and event["ts"] + event["dur"] <= end + 0.01
                                for begin, end in runs), event)
        of_row = {}
        for event in sorted(threads, key=lambda event: event["ts"]):
            self.assertGreaterEqual(event["ts"] + 0.01, of_row.get(event["tid"], 0), event)
            of_row[event["tid"]] = event["ts"] + event["dur"]
        # As printed; what goes before the first step is none of them.
        self.assertEqual({event["args"]["step"] for event in measured if event["name"] == "backward"},
                         {step["step"] for step in run.steps})
        self.assertLessEqual({event["args"]["step"] for event in measured}, set(range(7)))

    def test_the_table(self):
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()], steps=3)
        command = [word for word in self.command(config) if word not in ("--json", "--no-bound")]
        run = self.ferry(*command)
        self.assertEqual(run.code, 0, run.err)
        for text in ("parameters", "budget", "200.00 KiB", "step     3/3", "loss", "tokens/s",
                     "s a step", "nvme read", "nvme write", "h2d", "d2h", "reserved", "peak", "speculative updates:",
                     "lower bound of a step", "predicted by its schedule", "state hash", self.path("nvme")):
            self.assertIn(text, run.out)
        as_json = self.train(config)
        self.assertIn(as_json.hashes[0], run.out)

    def test_it_says_what_it_stands_on(self):
        def lock():
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (3 * MIB, 3 * MIB))
        run = self.train(self.config(steps=1), preexec_fn=lock)
        self.assert_trained(run)
        self.assertRegex(run.err, r"[0-9]+ cores, .* memory limit .*, .* of it left; "
                                  r"locked memory up to 3\.00 MiB")

    def test_help(self):
        whole = self.ferry("--help")
        self.assertEqual((whole.code, whole.err), (0, ""))
        for command in ("train", "data"):
            self.assertIn(command, whole.out)
            self.assertEqual(self.ferry(command, "--help").code, 0)
        train = self.ferry("train", "--help").out
        for text in ("--set", "--json", "--weights-out", "Ctrl-C", "Exit codes", "2 configuration",
                     "3 does not fit", "4 I/O", "5 loss or gradient"):
            self.assertIn(text, train)
        self.assertEqual(self.ferry("--version").code, 0)


class EndTest(FerryTest):
    """A run that would go on for long, ended in several ways."""

    def start(self, **changes):
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()], steps=1000000,
                             evaluate__micro_batches=1, **changes)
        process = start([FERRY, *self.command(config)])
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def wait_for_steps(self, process, count):
        lines = []
        while len(lines) < count:
            line = process.stdout.readline()
            self.assertTrue(line, "the run ended: " + process.stderr.read() if not line else "")
            if "loss" in json.loads(line):
                lines.append(json.loads(line))
        return lines

    def assert_interrupted(self, process, steps):
        out, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 0, err)
        lines = [json.loads(line) for line in out.splitlines()]
        steps += [line for line in lines if "loss" in line]
        summary = next(line["summary"] for line in lines if "summary" in line)
        self.assertTrue(summary["interrupted"])
        self.assertEqual(summary["steps"], len(steps))
        self.assertEqual(steps[-1]["step"], len(steps))
        self.assertEqual(os.listdir(self.path("nvme")), [])
        return next(line["state_hash"] for line in lines if "state_hash" in line), len(steps)

    def test_ctrl_c_ends_after_the_step(self):
        for name in (signal.SIGINT, signal.SIGTERM):
            process = self.start()
            steps = self.wait_for_steps(process, 2)
            process.send_signal(name)
            state_hash, count = self.assert_interrupted(process, steps)
            # The state is that of a run of so many steps: nothing was cut short.
            same = self.config(steps=count, schedule__total_steps=1000000)
            self.assertEqual(self.train(same).hashes, [state_hash])

    def test_a_second_ctrl_c_kills(self):
        long_step = {"batch__sequence": 256, "batch__micro_batch": 8, "batch__micro_batches": 512}
        process = self.start(**long_step)
        self.assertIn("evaluation_loss", process.stdout.readline())
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        self.assertIsNone(process.poll(), "the first one waits for the end of the step")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)
        self.assertEqual(process.returncode, -signal.SIGINT)
        self.assertEqual(out, "")
        other = {"budgets__host": "200KiB", "budgets__nvme": [self.nvme()]}
        refused = self.train(self.config(**other))
        self.assertEqual(refused.code, USAGE, refused.err)
        self.assertIn("files of another run, which was killed, are left here", refused.err)
        self.assert_trained(self.train(self.config(io__leftovers="remove_any", **other)))

    def test_after_a_kill_the_next_run_works(self):
        process = self.start()
        self.wait_for_steps(process, 1)
        process.kill()
        process.communicate(timeout=30)
        self.assertNotEqual(os.listdir(self.path("nvme")), [])
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()])
        run = self.train(config)
        self.assert_trained(run)
        self.assertIn("was killed and left", run.err)
        self.assertEqual(os.listdir(self.path("nvme")), [])
        again = self.train(config)
        self.assertNotIn("removing", again.err)
        self.assertEqual(run.numbers(), again.numbers())

    def test_two_runs_at_one_path(self):
        first = self.start()
        steps = self.wait_for_steps(first, 1)
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()])
        second = self.train(config)
        self.assertEqual(second.code, USAGE, second.err)
        self.assertIn("in use by another ferry", second.err)
        self.assertIn(f"process {first.pid}", second.err)
        self.assertIn(self.path("nvme"), second.err)
        steps += self.wait_for_steps(first, 2)  # the first one did not notice
        first.send_signal(signal.SIGINT)
        self.assert_interrupted(first, steps)
        self.assert_trained(self.train(config))

    def damage(self, process, change, **changes):
        """Changes the stored bytes under a run until it ends; what it said, and what is left."""
        def keep_changing():
            while process.returncode is None:
                try:
                    with open(os.path.join(self.path("nvme"), "ferry.slots0"), "r+b") as file:
                        change(file)
                except FileNotFoundError:
                    return  # the run has ended and tidied up
                time.sleep(0.01)

        changer = threading.Thread(target=keep_changing)
        changer.start()
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
            changer.join()
        self.assertEqual(process.returncode, IO, err)
        self.assertNotIn("summary", out)
        step = re.search("the last good step is ([0-9]+)", err)
        self.assertTrue(step, err)
        self.assertIn(f"in step {int(step[1]) + 1}", err)
        # The space is given back; what was there is still known.
        self.assertEqual(os.listdir(self.path("nvme")), ["ferry.volume"])
        config = self.config(budgets__host="200KiB", budgets__nvme=[self.nvme()], steps=3,
                             evaluate__micro_batches=1, **changes)
        resumed = self.train(config, "--resume")
        self.assertEqual(resumed.code, USAGE, resumed.err)
        self.assertIn(f"not consistent, state of step {step[1]} lost", resumed.err)
        again = self.train(config)
        self.assert_trained(again)
        self.assertIn("ended with an error", again.err)
        self.assertEqual(os.listdir(self.path("nvme")), [])
        return err

    def test_corrupt_bytes_stop_the_run(self):
        def flip(file):
            size = os.fstat(file.fileno()).st_size
            for at in range(0, size, 4096):
                file.seek(at)
                file.write(b"rot")

        for changes in ({}, {"precision": "bf16", "io__backend": "posix", "swap__groups": 2}):
            changes["budgets__device"] = "1400KiB"
            process = self.start(**changes)
            self.wait_for_steps(process, 1)
            err = self.damage(process, flip, **changes)
            self.assertIn("bytes read back from NVMe are not those written", err)
            self.assertRegex(err, re.escape(self.path("nvme")) +
                             r"/ferry.slots0 at \d+, piece \d+ of 256 KiB, of layer \d+")
            self.assertIn("checksum", err)

    def test_a_truncated_volume_stops_the_run(self):
        process = self.start()
        self.wait_for_steps(process, 1)
        err = self.damage(process, lambda file: file.truncate(0))
        self.assertIn("ferry.slots0", err)


class MemoryTest(FerryTest):
    # Threads' stacks, BLAS's buffers, schedules, the token file; measured below 16 MiB.
    OVERHEAD = 32 * MIB

    def peak(self, *arguments):
        """Largest resident size of one run of the program, in bytes."""
        with open(self.path("out.txt"), "w", encoding="utf-8") as out:
            process = subprocess.Popen([FERRY, *arguments], stdout=out, stderr=out)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        with open(self.path("out.txt"), encoding="utf-8") as out:
            text = out.read()
        self.assertEqual(process.returncode, 0, text)
        return usage.ru_maxrss * 1024, text

    def skip_where_sanitized(self):
        with open(FERRY, "rb") as program:
            if any(name in program.read() for name in (b"__asan_init", b"__tsan_init")):
                self.skipTest("a sanitizer needs memory of its own")

    def test_the_bound_is_measured_within_the_budgets(self):
        """Of a run whose plan fills budgets.host, with memory on the machine for more."""
        self.skip_where_sanitized()
        big = {"model": {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1536, "vocab": 256},
               "steps": 3, "batch__micro_batches": 1, "threads": 2}  # it is about memory
        in_memory = self.config(**big, budgets__device="400MiB")
        plan = json.loads(self.ferry("plan", self.command(in_memory)[1], "--json", "--no-prediction").out)
        in_memory["budgets"]["host"] = f"{plan['host_bytes'] // MIB + 1}MiB"
        stored = self.config(**big, budgets__device="400MiB", budgets__host="64MiB",
                             budgets__nvme=[self.nvme("2GiB")])
        for name, config in (("all in memory", in_memory), ("most on NVMe", stored)):
            with self.subTest(name):
                command = self.command(config)
                unmeasured, text = self.peak(*command)
                hashes = re.findall(r'"state_hash": ?"\w+"', text)
                self.assertEqual(len(hashes), 1, text)
                measured, text = self.peak(*[word for word in command if word != "--no-bound"])
                self.assertGreater(json.loads(text[text.index('{"summary"'):].splitlines()[0])
                                   ["summary"]["bound_seconds"], 0)
                self.assertLess(measured, unmeasured + self.OVERHEAD)
                self.assertEqual(re.findall(r'"state_hash": ?"\w+"', text), hashes)

    def test_within_the_budgets(self):
        self.skip_where_sanitized()
        big = {"model": {"hidden": 384, "layers": 8, "heads": 6, "intermediate": 1024, "vocab": 256},
               "steps": 3, "clip_norm": 1.0, "batch__micro_batches": 2, "threads": 2}
        config = self.config(**big, budgets__device="96MiB", budgets__host="80MiB",
                             budgets__nvme=[self.nvme("1GiB")])
        empty, _ = self.peak("--version")
        peak, text = self.peak(*self.command(config))
        summary = json.loads(text[text.index('{"summary"'):].splitlines()[0])["summary"]
        self.assertLessEqual(summary["device_bytes"], 96 * MIB)
        self.assertLessEqual(summary["host_bytes"], 80 * MIB)
        self.assertGreater(summary["nvme_bytes"], 170 * MIB)  # most of the state is elsewhere
        reserved = summary["reserved"]
        for tier in ("device", "host", "nvme"):  # headers of files lie beside the volume's slots
            planned = sum(row["bytes"] for row in summary["tiers"]
                          if row["tier"] == tier and not row["what"].startswith("headers"))
            self.assertEqual(reserved[f"{tier}_bytes"], planned, tier)
        self.assertLessEqual(reserved["nvme_peak_bytes"], reserved["nvme_bytes"])
        planned = summary["device_bytes"] + summary["host_bytes"]
        self.assertLess(peak, planned + empty + self.OVERHEAD,
                        f"peak {peak}, planned {planned}, empty process {empty}")


if __name__ == "__main__":
    unittest.main()
