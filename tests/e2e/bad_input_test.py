"""Every bad input ends with one clear error: what, where, the measured value, the limit, what to do;
and with the exit code of its kind."""

import json
import os
import platform
import pty
import re
import resource
import subprocess
import threading
import unittest

from harness import DIVERGED, DOES_NOT_FIT, FERRY, IO, USAGE, FerryTest

OLD_DRIVER = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "old_driver")


class BadInputTest(FerryTest):
    def assert_refused(self, run, code, *said):
        self.assertEqual(run.code, code, run.err)
        self.assertEqual(run.steps, [])
        for text in said:
            self.assertIn(text, run.err)
        # Log lines may come before it (they begin with the time); the error is one, and the last.
        lines = run.err.splitlines()
        errors = [i for i, line in enumerate(lines) if line.startswith("ferry: ")]
        self.assertEqual(len(errors), 1, run.err)
        self.assertTrue(all(line.startswith("  ") for line in lines[errors[0] + 1:]), run.err)
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def refused(self, code, said, *arguments, **changes):
        run = self.train(self.config(**changes), *arguments)
        self.assert_refused(run, code, *said)
        return run


class ConfigurationTest(BadInputTest):
    def test_unknown_keys_name_the_nearest(self):
        self.refused(USAGE, ["unknown key \"batch.sequense\"", "config", "batch.sequence"],
                     batch__sequense=32)
        self.refused(USAGE, ["unknown key \"optimiser\"", "optimizer"], optimiser={"lr": 1})
        self.refused(USAGE, ["unknown key \"swap.chunks\"", "--set"], "--set", "swap.chunks=4096")
        self.refused(USAGE, ["unknown key", "budgets.nvme[0].sise", "size"],
                     budgets__nvme=[{"path": self.path("nvme"), "sise": 1}])

    def test_wrong_types_and_ranges(self):
        self.refused(USAGE, ["wrong type", "model.hidden", "text \"wide\""], model__hidden="wide")
        self.refused(USAGE, ["wrong type", "model", "array"], model=[])
        self.refused(USAGE, ["steps", "number 2.5"], steps=2.5)
        self.refused(USAGE, ["steps", "-3", "the nearest value allowed is 1"], steps=-3)
        self.refused(USAGE, ["precision", "fp32, bf16", "did you mean \"bf16\""], precision="bf61")
        self.refused(USAGE, ["budgets.host", "10 apples"], budgets__host="10 apples")
        self.refused(USAGE, ["io.block_bytes", "5000", "8192"], io__block_bytes=5000)
        self.refused(USAGE, ["swap.chunk_elements", "5000", "8192"], swap__chunk_elements=5000)
        self.refused(USAGE, ["swap.groups", "groups 3, micro_batches 4", "set groups 2"], swap__groups=3)
        self.refused(USAGE, ["swap.state_on_nvme", "budgets.nvme"], swap__state_on_nvme=0.5)
        self.refused(USAGE, ["optimizer.adjust_lr", "Muon's alone", "method adamw"], optimizer__adjust_lr="original")
        self.refused(USAGE, ["optimizer.adamw_tensors[0]", "matches no tensor"],
                     optimizer__method="muon", optimizer__adamw_tensors=["*no_such*"])
        self.refused(USAGE, ["muon has no matrix", "freeze"], optimizer__method="muon", freeze=["*proj*"])
        muon = self.command(self.config(optimizer__method="muon", batch__micro_batches=16))[1]
        self.assertEqual(self.ferry("plan", muon, "--ranks", "4").code, 0)
        self.assert_refused(self.ferry("plan", muon, "--ranks", "16"), USAGE, "matrices whole", "16 ranks: 73 %", "fewer ranks")
        self.refused(USAGE, ["weight of 16 bits", "bf16 or fp16"], optimizer__master="split", precision="fp32")
        self.refused(USAGE, ["freeze", "model.layer.*"], freeze=["model.layer.*"])
        self.refused(USAGE, ["freeze", "nothing to train"], freeze=["*"])

    def test_which_moments_are_coded_is_said(self):
        """q, o and the MLP's matrices of three blocks, and the head: k and v have 2,048 elements."""
        run = self.train(self.config(steps=1, optimizer__moments="int8"))
        self.assert_trained(run)
        self.assertIn("int8 moments: 16 tensors with 133120 parameters; fp32 moments: 14 with 29120", run.err)
        nothing = self.train(self.config(steps=1, optimizer__moments="int8", optimizer__fp32_moments=["*"]))
        self.assert_trained(nothing)
        self.assertIn("optimizer.moments int8 does nothing", nothing.err)
        for silent in ("bf16", "fp32"):
            self.assertNotIn("int8 moments", self.train(self.config(steps=1, optimizer__moments=silent)).err)

    def test_heads_that_do_not_divide(self):
        self.refused(USAGE, ["model.heads", "hidden 64, heads 7", "set heads 8"], model__heads=7)
        self.refused(USAGE, ["model.kv_heads", "heads 4, kv_heads 3", "set kv_heads"],
                     model__kv_heads=3)
        self.refused(USAGE, ["model.kv_heads", "set kv_heads 4"], model__kv_heads=12)
        self.refused(USAGE, ["model.head_dim", "head_dim 1", "even"], model__heads=64)

    def test_a_gpu_where_there_is_none_or_too_small_a_part_of_one(self):
        run = self.train(self.config(device="cuda", budgets__device="100MiB"))
        if run.code == DOES_NOT_FIT:  # there is a GPU: its context alone is larger
            self.assert_refused(run, DOES_NOT_FIT, "budgets.device", "missing")
        else:
            self.assert_refused(run, USAGE, "where:    device", "choose device cpu")
        self.refused(USAGE, ["numerics.residual", "bf16 compute"], precision="fp16",
                     numerics__residual="bf16")
        self.refused(USAGE, ["numerics.wire", "loss scaling"], precision="bf16",
                     numerics__wire="fp16")

    @unittest.skipUnless(os.path.isdir(OLD_DRIVER), "built without CUDA")
    def test_a_driver_that_is_too_old(self):
        libraries = f"{OLD_DRIVER}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        run = self.train(self.config(device="cuda"), env={**os.environ, "LD_LIBRARY_PATH": libraries})
        self.assert_refused(run, USAGE, "driver is too old", "knows CUDA 11.4", "built with CUDA 1",
                            "update the driver")

    @unittest.skipUnless(platform.machine() == "x86_64", "OpenBLAS's kernels are named for x86-64")
    def test_kernels_that_this_processor_has_no_instructions_for(self):
        with open("/proc/cpuinfo", encoding="ascii") as file:
            flags = re.search(r"^flags\s*: (.*)$", file.read(), re.M)[1].split()
        tried = 0
        for core, flag in (("Bulldozer", "fma4"), ("bulldozer", "fma4"), ("Opteron", "3dnow"), ("SkylakeX", "avx512f")):
            if flag in flags:
                continue
            run = self.train(self.config(steps=1), env={**os.environ, "OPENBLAS_CORETYPE": core})
            self.assert_refused(run, USAGE, "no instructions for", "OPENBLAS_CORETYPE", "unset it")
            tried += 1
        self.assertGreater(tried, 0)

    @unittest.skipUnless(platform.machine() == "x86_64", "OpenBLAS's kernels are named for x86-64")
    def test_kernels_that_openblas_does_not_have(self):
        for core in ("bogus", "Haswel", "SkylakeX ", "\x1b[2J"):
            run = self.train(self.config(steps=1), env={**os.environ, "OPENBLAS_CORETYPE": core})
            shown = core.replace("\x1b", "\\x1b")
            self.assert_refused(run, USAGE, "OpenBLAS has no kernels of this name", "OPENBLAS_CORETYPE", shown,
                                "Prescott", "unset it")
        for core in ("", "prescott", "PRESCOTT"):
            run = self.train(self.config(steps=1), env={**os.environ, "OPENBLAS_CORETYPE": core})
            self.assert_trained(run)
            self.assertNotIn("OPENBLAS_CORETYPE is", run.err)

    def test_numbers_that_openblas_does_not_read(self):
        for name, value, said in (("OPENBLAS_VERBOSE", "yes", 1), ("OPENBLAS_VERBOSE", "1", 0),
                                  ("OPENBLAS_BLOCK_FACTOR", "12x", 1), ("OPENBLAS_THREAD_TIMEOUT", "-3", 1),
                                  ("OPENBLAS_THREAD_TIMEOUT", "", 0), ("OPENBLAS_NUM_THREADS", "many", 0)):
            with self.subTest(f"{name}={value}"):
                run = self.train(self.config(steps=1), env={**os.environ, name: value})
                self.assert_trained(run)
                self.assertEqual(run.err.count(f"{name} is \"{value}\""), said, run.err)

    def test_broken_files_and_command_lines(self):
        broken = self.path("broken.json")
        with open(broken, "w", encoding="utf-8") as file:
            file.write('{"steps": 3,\n "model": {"hidden" 64}}')
        self.assert_refused(self.ferry("train", broken), USAGE, "not valid JSON", "line 2")
        absent = self.path("absent.json")
        self.assert_refused(self.ferry("train", absent), USAGE, absent, "No such file")
        for arguments in ([], ["train"], ["fly"], ["train", broken, "--fast"],
                          ["train", broken, "--set"]):
            run = self.ferry(*arguments)
            self.assertEqual(run.code, USAGE, run.err)
            self.assertIn("--help", run.err + run.out)
            self.assertTrue(run.err.startswith("ferry: "), run.err)

    def test_names_steer_no_terminal(self):
        """Of files on the command line, and of those that other files name."""
        evil = "c\x1b]0;pwn\x07\u009b2J.json"
        model = self.path("model-of-evil")
        os.mkdir(model)
        with open(os.path.join(model, "config.json"), "w", encoding="utf-8") as file:
            json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
                       "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
                       "tie_word_embeddings": False, "max_position_embeddings": 64}, file)
        with open(os.path.join(model, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {"model.norm.weight": "\x1b[2Jb.safetensors"}}, file)
        printed = "c\x1b[2J\u009b\x7f.bin"  # by who succeeds
        drive = self.path("drive\x1b[2J\u009b\x7f\nforged: line")
        os.mkdir(drive)
        steered = self.config(data__tokens=self.path(printed), budgets__host="300KiB",
                              budgets__nvme=[{"path": drive, "size": "64MiB"}])
        config = self.command(steered)[1]
        hosts = self.path("evil-hosts")
        with open(hosts, "w", encoding="ascii") as file:
            file.write("localhost slots=1\n")
        commands = [["plan", config, "--no-prediction"], ["data", self.path("text.txt"), "-o", self.path(printed)],
                    ["data", self.path("text.txt"), "-o", self.path(printed), "--json"],
                    ["plan", config, "--no-prediction"], ["plan", config, "--json"], ["train", config, "--no-bound"],
                    ["bench", "io", drive, "--size", "64MiB", "--seconds", "0.01", "--modes", "read"],
                    ["launch", config, "--hostfile", hosts, "--dry-run", "--", "--weights-out", self.path(printed)]]
        for command in commands:
            run = self.ferry(*command)
            self.assertEqual(run.code, 0, run.err)
            for text in (run.out, run.err):
                for byte in ("\x1b", "\x7f", "\u009b", "\nforged"):
                    self.assertNotIn(byte, text, command)
        self.assertEqual(subprocess.run(["bash", "-c", "printf '%s\\n' " + run.out.strip()], capture_output=True,
                                        text=True, check=True).stdout.splitlines()[-1], self.path(printed))
        for run, shown in ((self.ferry("train", self.path(evil)), "c\\x1b]0;pwn\\x07\\xc2\\x9b2J.json"),
                           (self.ferry("data", self.path(evil), "-o", self.path("new.bin")), "\\x1b]0;"),
                           (self.train(self.config(model={"path": model})), "\\x1b[2Jb.safetensors")):
            self.assertNotEqual(run.code, 0)
            self.assertIn(shown, run.err)
            for byte in ("\x1b", "\x07", "\u009b"):
                self.assertNotIn(byte, run.err)


class JsonTest(BadInputTest):
    """What others wrote as JSON: the configuration, machine files, models, the index of their shards."""
    DEEP = "[" * 2_000_000

    def written(self, name, text):
        with open(self.path(name), "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        return self.path(name)

    def bounded(self, *arguments, **options):
        """Runs where gigabytes are not to be had, and time is not either."""
        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        run = self.ferry(*arguments, preexec_fn=limit, **options)
        self.assertLess(len(run.err), 5000)
        self.assertNotIn("json.exception", run.err)
        return run

    def machine(self, text):
        config = self.command(self.config(steps=1))[1]
        return self.bounded("train", config, "--machine", self.written("machine.json", text))

    def model(self, **files):
        path = self.path(f"model{len(os.listdir(self.dir))}")
        os.mkdir(path)
        for name, text in files.items():
            self.written(os.path.join(path, name.replace("__", ".")), text)
        return self.train(self.config(model={"path": path}, steps=1))

    def test_nested_deep(self):
        config = self.written("deep.json", '{"steps": 1,\n "more": ' + self.DEEP)
        self.assert_refused(self.bounded("train", config), USAGE, "nested too deep", "deep.json: line 2",
                            "64 levels")
        run = self.machine('{"ferry_machine": 1, "kernels": ' + self.DEEP)
        self.assert_refused(run, USAGE, "nested too deep", "machine.json: line 1")
        for key in ("type", "rope_scaling", "layers", "torch_dtype", "anything"):
            run = self.model(config__json='{"model_type": "llama", "%s": %s' % (key, self.DEEP))
            self.assert_refused(run, USAGE, "nested too deep", "config.json: line 1")
        self.refused(USAGE, ["nested too deep", "--set budgets.nvme"], "--set", "budgets.nvme=" + self.DEEP[:50000])

    def test_only_regular_files_of_some_size(self):
        config = self.command(self.config(steps=1))[1]
        for command in (["train", "/dev/zero"], ["plan", "/dev/zero"], ["train", config, "--machine", "/dev/zero"],
                        ["launch", config, "--hostfile", "/dev/zero"]):
            self.assert_refused(self.bounded(*command), USAGE, "/dev/zero", "no regular file")
        hosts, fifo = self.written("one_host", "localhost slots=1\n"), self.path("config.fifo")
        os.mkfifo(fifo)
        for endless in ("/dev/zero", fifo):
            self.assert_refused(self.bounded("launch", endless, "--hostfile", hosts), USAGE, endless, "no regular file")
        large = self.path("large.json")
        with open(large, "wb") as file:
            file.truncate(10 << 30)  # which holds nothing
        self.assert_refused(self.bounded("train", large), USAGE, "large.json", "16.00 MiB")

    def test_texts_that_are_none(self):
        config = self.written("bytes.json", b'{"steps": 1,\n "device": "\xff"}')
        self.assert_refused(self.bounded("train", config), USAGE, "bytes.json: line 2, column 13", "\\xff")
        config = self.written("nul.json", b'{"steps": 1}\0{"seed": 2}')
        self.assert_refused(self.bounded("train", config), USAGE, "nul.json: line 1, column 13", "NUL byte")
        self.refused(USAGE, ["NUL character", "config"], data__tokens=self.path("tokens.bin") + "\0.other")
        self.refused(USAGE, ["NUL character"], budgets__nvme=[self.path("nvme") + "\0/other"])
        self.assert_refused(self.machine(b'{"ferry_machine": 1, "paths": [{"path": "\xff"}]}'), USAGE,
                            "machine.json: line 1", "\\xff")
        self.assert_refused(self.machine('{"ferry_machine": 1e999}'), USAGE, "machine.json: line 1", "1e999")
        self.assert_refused(self.model(config__json='{"hidden_size": 1e999}'), USAGE, "config.json: line 1", "1e999")
        hosts = self.written("hosts", b"localhost\0evil slots=1\n")
        config = self.command(self.config(steps=1))[1]
        self.assert_refused(self.bounded("launch", config, "--hostfile", hosts), USAGE, "hosts, line 1, column 10")

    def test_words_of_the_command_line_that_are_no_utf8(self):
        config = os.fsencode(self.command(self.config(steps=1))[1])
        for words in ([b"train", config, b"--set", b"steps=\xff"], [b"train", config, b"--set", b"precision=\xff"],
                      [b"train", config, b"--set", b"\xff=1"], [b"train", config, b"--\xff"],
                      [b"eval", b"/no/such/\xff", config], [b"plan", b"\xff"]):
            run = subprocess.run([os.fsencode(FERRY), *words], capture_output=True, check=False)
            self.assertEqual(run.returncode, USAGE, run.stderr)
            self.assertNotIn(b"json.exception", run.stderr)
        output = os.path.join(os.fsencode(self.dir), b"\xff.bin")
        run = subprocess.run([FERRY, "data", self.path("text.txt"), "--json", "-o", output], capture_output=True,
                             check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(json.loads(run.stdout)["tokens"], 40000)

    def test_keys_given_twice(self):
        for text, place in (('{"steps": 1,\n"steps": 2}', "twice.json: line 2"),
                            ('{"model": {"hidden": 8}, "model.hidden": 9}', "twice.json")):
            run = self.bounded("train", self.written("twice.json", text))
            self.assert_refused(run, USAGE, "given twice", place)
        self.refused(USAGE, ["\"layers\" is given twice", "--set model"], "--set",
                     'model={"layers": 1, "layers": 2}')
        for broken in ('model={"layers": 1', 'freeze=["a",]', "optimizer.betas=[0.9,NaN]"):
            run = self.refused(USAGE, ["--set " + broken.split("=")[0]], "--set", broken)
            self.assertNotIn("wrong type of value", run.err)
        for twice in (["seed=1", "seed=2"], ["model.layers=1", 'model={"layers": 1}'],
                      ["budgets.device=1GiB", "budgets.device=2GiB"]):
            self.refused(USAGE, ["is given twice", "--set " + twice[1]], "--set", twice[0], "--set", twice[1])
        self.assert_refused(self.machine('{"ferry_machine": 1, "ferry_machine": 1}'), USAGE, "given twice",
                            "machine.json: line 1")

    def test_what_is_quoted_is_cut(self):
        much = "x" * (8 << 20)
        for text in ('{"steps": "%s"}' % much, '{"%s": 1}' % much, '{"steps": 1 %s' % much,
                     '{"budgets": {"host": "%s"}}' % much, '{"precision": "%s"}' % much,
                     '{"freeze": 1, "data": {"tokens": ["%s"]}}' % much):
            run = self.bounded("train", self.written("long.json", text))
            self.assertEqual(run.code, USAGE)
        self.assertEqual(self.bounded("train", self.written("path.json", json.dumps(
            self.config(data__tokens="/" + much)))).code, USAGE)
        self.assertEqual(self.machine('{"ferry_machine": 1, "paths": "%s"}' % much).code, USAGE)

    def test_many_tensors_of_another_model(self):
        tensors = {f"model.layers.{i}.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
                   for i in range(80000)}
        header = json.dumps(tensors).encode()
        weights = len(header).to_bytes(8, "little") + header + bytes(4 * len(tensors))
        described = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                     "intermediate_size": 160, "vocab_size": 256, "max_position_embeddings": 256}
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        run = self.model(config__json=json.dumps(described), model__safetensors=weights)
        self.assert_refused(run, USAGE, "lack a tensor", "12 tensors missing")
        # It took 26 and takes 0.3: processor time, which a busy machine stretches little.
        self.assertLess(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 1)


class CommandLineTest(BadInputTest):
    def said(self, *words, code=USAGE):
        run = self.ferry(*words)
        self.assertEqual(run.code, code, run.err)
        return run.err

    def test_the_nearest_command_and_option_are_named(self):
        config = self.command(self.config(steps=1))[1]
        for words, near in ((["trian", config], "train"), (["plna"], "plan"), (["bench", "swpa", "x"], "swap"),
                            (["train", config, "--weight-out", "x"], "--weights-out"),
                            (["train", config, "--machin=x"], "--machine"),
                            (["bench", "io", self.path("nvme"), "--block", "4KiB"], "--blocks"),
                            (["plan", config, "--no-predicton"], "--no-prediction")):
            err = self.said(*words)
            self.assertIn(f'did you mean "{near}"?', err)
            self.assertIn("--help", err)
        self.assertIn('did you mean "--path", before io?', self.said("bench", "io", "--pth", self.dir))
        for words in (("xyzzy-xyzzy",), ("ckpt", "xyzzy-xyzzy")):
            said = self.said(*words)
            self.assertNotIn("did you mean", said)
            self.assertIn('"xyzzy-xyzzy" is none', said)

    def test_several_keys_behind_one_set(self):
        config = self.command(self.config())[1]
        command = ["--json", "--no-bound", "--set", "steps=2", "seed=9", "optimizer.lr=0.005"]
        first = self.ferry("train", config, *command)
        self.assert_trained(first)
        self.assertEqual(len(first.steps), 2)
        self.assertEqual(first.steps[-1]["lr"], self.ferry("train", *command, config).steps[-1]["lr"])
        # A file whose name is like a key's value is a file.
        odd = self.path("lr=0.5.json")
        os.rename(config, odd)
        self.assertEqual(self.ferry("train", *command, odd).numbers(), first.numbers())
        self.assertIn("KEY=VALUE ...", self.ferry("train", "--help").out)

    def test_nothing_is_no_name(self):
        config = self.command(self.config(steps=1))[1]
        for option in ("--export", "--weights-out", "--trace", "--machine", "--gpu-memory", "--export-type"):
            self.assertIn(option, self.said("train", config, option, ""))
        self.assertIn("--svg", self.said("plan", config, "--svg", ""))
        self.assertIn("--output", self.said("data", self.path("text.txt"), "-o", ""))
        self.assertIn("config", self.said("train", ""))
        self.assertIn("data", self.said("eval", self.dir, ""))
        self.assertIn("--save", self.said("bench", "--all", "--save", ""))


class DoesNotFitTest(BadInputTest):
    def assert_smallest(self, key, **changes):
        """The error names the missing bytes and the smallest budget; that one works, and one byte
        less does not."""
        name = key.replace("__", ".")
        run = self.train(self.config(**{**changes, key: 1000}))
        self.assert_refused(run, DOES_NOT_FIT, f"where:    {name}", "missing", "limit:    1000 B")
        smallest = int(re.search(f'set {name} to ([0-9]+) or more', run.err).group(1))
        self.assertIn(f"({smallest} bytes)", run.err)
        less = self.train(self.config(**{**changes, key: smallest - 1}))
        self.assert_refused(less, DOES_NOT_FIT, "1 B (1 bytes) missing")
        works = self.train(self.config(**{**changes, key: smallest}))
        self.assert_trained(works)
        used = works.summary["device_bytes" if "device" in key else "host_bytes"]
        self.assertLessEqual(used, smallest)
        return smallest

    def test_device_budget(self):
        self.assert_smallest("budgets__device", steps=2)
        tied = {"model__tie_embeddings": True, "precision": "bf16"}
        self.assert_smallest("budgets__device", steps=2, swap__groups=2, **tied)
        self.assert_smallest("budgets__device", steps=2, swap__chunk_elements=32768,
                             budgets__nvme=[self.nvme()], budgets__host="1MiB")

    def test_host_budget(self):
        nvme = {"budgets__nvme": [self.nvme()]}
        in_memory = self.assert_smallest("budgets__host", steps=2)
        self.assert_smallest("budgets__host", steps=2, model__hidden=128, model__intermediate=512)
        self.assert_smallest("budgets__host", steps=2, swap__speculate="all", swap__chunk_elements=8192)
        three_tiers = self.assert_smallest("budgets__host", steps=2, budgets__device="1300KiB", **nvme)
        self.assertLess(three_tiers * 10, in_memory)
        self.assert_smallest("budgets__host", steps=2, swap__groups=4, precision="bf16",
                             swap__chunk_elements=16384, **nvme)

    def test_nvme_budget(self):
        small = {"budgets__host": "200KiB", "steps": 2}
        run = self.refused(DOES_NOT_FIT, ["the NVMe budget is too small", "missing"], **small,
                           budgets__nvme=[self.nvme("1MiB")])
        smallest = int(re.search(r'to ([0-9]+) in all', run.err).group(1))
        self.refused(DOES_NOT_FIT, ["1 B missing"], **small, budgets__nvme=[self.nvme(smallest - 1)])
        self.assert_trained(self.train(self.config(**small, budgets__nvme=[self.nvme(smallest)])))
        run = self.train(self.config(**small, budgets__nvme=[self.path("nvme")]))  # without limit
        self.assert_trained(run)

    def test_two_paths_that_only_fit_together(self):
        half = [self.nvme("2500KiB"), self.nvme("2500KiB", "nvme2")]
        small = {"budgets__host": "200KiB", "steps": 2}
        self.refused(DOES_NOT_FIT, ["NVMe budget"], **small, budgets__nvme=half[:1])
        self.assert_trained(self.train(self.config(**small, budgets__nvme=half)))

    def test_nvme_budget_over_two_paths(self):
        small = {"budgets__host": "200KiB", "steps": 2}

        def paths(first, second):
            return [self.nvme(first), self.nvme(second, "nvme2")]
        run = self.refused(DOES_NOT_FIT, ["NVMe budget"], **small,
                           budgets__nvme=paths("100KiB", "100KiB"))
        enough = int(re.search(r'to ([0-9]+) in all', run.err).group(1))
        for part in (enough // 2, enough // 3 + 1, 1234567):
            run = self.train(self.config(**small, budgets__nvme=paths(part, enough - part)))
            self.assert_trained(run)

    def test_more_than_the_machine_has(self):
        self.refused(DOES_NOT_FIT, ["less memory than the budgets allow", "budgets.host",
                                    "budgets.nvme"],
                     model__hidden=65536, model__intermediate=262144, model__layers=32, steps=2,
                     swap__chunk_elements=1048576)

    def test_address_space(self):
        for threads in (1, 16):
            refused = 0
            for mib in range(256, 16384, 96):
                def limit(mib=mib):
                    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
                # One that never ends is an error of the test: ferry() has a time limit.
                run = self.train(self.config(steps=2, threads=threads), preexec_fn=limit)
                if run.code == 0:
                    break
                # Below that the loader, or what libraries do before the program, has no room.
                if run.code == DOES_NOT_FIT:
                    self.assert_refused(run, DOES_NOT_FIT, "do:")
                    refused += 1
                else:
                    self.assertEqual(refused, 0, run.err)
            self.assertEqual(run.code, 0)
            self.assertGreater(refused, 0)
            self.assertIn("OpenBLAS", self.refused_by_address_space(mib - 96, threads))

    def refused_by_address_space(self, mib, threads):
        """The last error that speaks of a limit with its value, going down from what is enough."""
        for less in range(mib, 0, -48):
            def limit(less=less):
                resource.setrlimit(resource.RLIMIT_AS, (less << 20, less << 20))
            run = self.train(self.config(steps=2, threads=threads), preexec_fn=limit)
            if "buffers that OpenBLAS" in run.err:
                self.assert_refused(run, DOES_NOT_FIT, "ulimit -v", f"{less / 1024:.2f} GiB")
                return run.err
        return ""

    def test_too_few_open_files_for_openblas(self):
        said = []
        for most in range(3, 10):
            def limit(most=most):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            run = self.train(self.config(steps=2), preexec_fn=limit)
            if "OpenBLAS cannot be loaded" in run.err:
                self.assert_refused(run, DOES_NOT_FIT, f"limit:    {most} open files of the process (ulimit -n)",
                                    "raise that limit")
                said.append(most)
        self.assertNotEqual(said, [])

    def test_a_small_stack(self):
        for kib in (128, 256, 512, 1024, 2048):
            def limit(kib=kib):
                resource.setrlimit(resource.RLIMIT_STACK, (kib << 10, resource.RLIM_INFINITY))
            run = self.train(self.config(steps=2, precision="bf16"), preexec_fn=limit)
            said = f"{kib}.00 KiB" if kib < 1024 else f"{kib // 1024}.00 MiB"
            self.assert_refused(run, DOES_NOT_FIT, "the stack is too small", "ulimit -s", said)

    def test_an_unlimited_stack(self):
        # New threads then have 2 MiB, which a tile of narrow numbers exceeds.
        def limit():
            resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.assert_trained(self.train(self.config(steps=2, precision="bf16", threads=2), preexec_fn=limit))

    def as_nobody(self, most, **changes):
        """Trains as a user who may have so many threads and processes."""
        return self.train(self.config(steps=2, **changes), **self.nobody(most))

    def nobody(self, most):
        """How to run as that user."""
        options, nobody = {}, 65534
        if os.geteuid() == 0:
            os.chmod(self.dir, 0o755)
            options = {"user": nobody, "group": nobody, "extra_groups": []}
            if subprocess.run([FERRY, "--version"], capture_output=True, check=False, **options).returncode:
                self.skipTest("another user cannot run the program here")

        def limit():
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        return {"preexec_fn": limit, **options}

    def test_threads_that_cannot_be_started(self):
        for most in range(1, 40):
            run = self.as_nobody(most, threads=2)
            if run.code == 0:
                break
            self.assert_refused(run, DOES_NOT_FIT, "thread", f"{most} processes and threads of the user (ulimit -u)")
        self.assertEqual(run.code, 0, run.err)
        self.assertGreater(most, 1)

    def test_too_few_threads_leave_nothing_behind(self):
        """However far a start comes: it names the limit, and the next one is not in its way."""
        path = self.path("nobodys-nvme")
        os.mkdir(path)
        os.chmod(path, 0o777)
        for most in range(1, 60):
            run = self.as_nobody(most, budgets__host="300KiB", budgets__nvme=[{"path": path, "size": "64MiB"}])
            self.assertEqual(os.listdir(path), [], most)
            if run.code == 0:
                break
            self.assert_refused(run, DOES_NOT_FIT, f"{most} processes and threads of the user (ulimit -u)")
        self.assertEqual(run.code, 0, run.err)

    def test_benches_name_what_bounds_them(self):
        drive = self.path("bench-drive")
        os.mkdir(drive)
        os.chmod(drive, 0o777)
        io = ["bench", "io", drive, "--size", "64MiB", "--seconds", "0.01"]
        adam = ["bench", "adam", "--millions", "0.01", "--pairs", "1", "--threads", "2"]
        for words in (adam, io):
            for most in range(1, 60):
                run = self.ferry(*words, **self.nobody(most))
                self.assertEqual(os.listdir(drive), [], most)
                if run.code == 0:
                    break
                self.assertEqual(run.code, DOES_NOT_FIT, run.err)
                self.assertIn(f"{most} processes and threads of the user (ulimit -u)", run.err)
            self.assertEqual(run.code, 0, run.err)

    def test_too_few_open_files(self):
        """Of commands that read and write some; below that the loader opens no library."""
        drive, model = self.path("few-drive"), self.path("few-model")
        os.mkdir(drive)
        self.assert_trained(self.train(self.config(steps=1), "--export", model, "--weights-out", self.path("few.safetensors")))
        commands = [["data", self.path("text.txt"), "-o", self.path("few.bin")],
                    ["eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32"],
                    ["export", self.command(self.config(steps=1))[1], self.path("few.safetensors"), self.path("few-export")],
                    ["bench", "io", drive, "--size", "64MiB", "--seconds", "0.01"]]
        for words in commands:
            named = 0
            for most in range(3, 60):
                def limit(most=most):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                run = self.ferry(*words, preexec_fn=limit)
                self.assertEqual(os.listdir(drive), [], (most, run.err))
                if run.code == 0:
                    break
                if not run.err.startswith("ferry: ") and "\nferry: " not in run.err:
                    continue  # the loader's words
                self.assertEqual(run.code, DOES_NOT_FIT, run.err)
                self.assertIn(f"{most} open files of the process (ulimit -n)", run.err)
                self.assertIn("raise", run.err)
                named += 1
            self.assertEqual(run.code, 0, run.err)
            self.assertGreater(named, 0, words)

    def test_files_larger_than_the_process_may_write(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        config = self.config(steps=2)
        for words in (["data", self.path("text.txt"), "-o", self.path("large.bin")],
                      *([*self.command(config), option, self.path("large" + option)]
                        for option in ("--weights-out", "--export", "--trace"))):
            run = self.ferry(*words, preexec_fn=limit)
            self.assertEqual(run.code, IO, run.err)
            self.assertIn("limit:    4096 bytes in a file of the process's (ulimit -f)", run.err)
            self.assertNotIn("free more", run.err)

    def test_address_space_of_benches(self):
        """The limit stands in the error with its value, wherever memory ends."""
        words = ["bench", "adam", "--millions", "64", "--pairs", "1", "--threads", "1"]
        named = 0
        for mib in range(512, 16384, 192):
            def limit(mib=mib):
                resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
            run = self.ferry(*words, preexec_fn=limit)
            if run.code == 0:
                break
            if run.err.startswith("ferry: "):  # else the loader's words
                self.assertEqual(run.code, DOES_NOT_FIT, run.err)
                self.assertIn("of address space for the process (ulimit -v)", run.err)
                named += 1
        self.assertEqual(run.code, 0, run.err)
        self.assertGreater(named, 0)

    def test_threads_beyond_the_control_group(self):
        group = f"/sys/fs/cgroup/pids/ferry-test-{os.getpid()}"
        try:
            os.mkdir(group)
        except OSError as error:
            self.skipTest(f"no control group can be made: {error}")
        self.addCleanup(os.rmdir, group)

        def enter():
            with open(f"{group}/pids.max", "w", encoding="ascii") as file:
                file.write("2")
            with open(f"{group}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        run = self.train(self.config(steps=2), preexec_fn=enter)
        self.assert_refused(run, DOES_NOT_FIT, "thread", "2 processes and threads of the control group (pids.max)")


class NvmePathTest(BadInputTest):
    SMALL = {"budgets__host": "200KiB", "steps": 2}

    def on_path(self, path, size="16MiB", **options):
        config = self.config(**self.SMALL, budgets__nvme=[{"path": path, "size": size}])
        return self.train(config, **options)

    def on_mount(self, kind, mount_options, size="16MiB"):
        """Trains on a file system that only this one process sees."""
        path = self.path(f"mount-{kind}")
        os.makedirs(path, exist_ok=True)
        inside = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                  'mount -t "$1" -o "$2" ferry-test "$3"; shift 3; exec "$@"', "sh",
                  kind, mount_options, path]
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            self.skipTest(f"cannot mount {kind} here")
        config = self.config(**self.SMALL, budgets__nvme=[{"path": path, "size": size}])
        return self.ferry(*self.command(config), through=inside)

    def test_missing(self):
        absent = self.path("absent")
        self.assert_refused(self.on_path(absent), USAGE, absent, "No such file", "create")
        self.assertFalse(os.path.exists(absent))

    def test_a_file(self):
        self.assert_refused(self.on_path(self.path("text.txt")), USAGE, "text.txt",
                            "not a directory", "give a directory")

    def test_missing_and_not_needed(self):
        absent = self.path("absent")
        run = self.train(self.config(steps=1, budgets__nvme=[absent]))
        self.assert_refused(run, USAGE, absent, "does not exist", "budgets.nvme[0]")

    def test_read_only(self):
        self.assert_refused(self.on_mount("tmpfs", "ro"), USAGE, "mount-tmpfs", "Read-only")

    def test_full(self):
        self.assert_refused(self.on_mount("tmpfs", "size=3m"), DOES_NOT_FIT, "mount-tmpfs",
                            "too little free space", "bytes free",
                            "16777216 bytes asked for", "free some space")
        run = self.on_mount("tmpfs", "size=3m", size="unlimited")
        self.assert_refused(run, DOES_NOT_FIT, "mount-tmpfs", "missing", "bytes needed")

    def peak_kib(self, *words):
        """The exit code, what was said, and the most memory that was taken."""
        with open(self.path("said"), "w+", encoding="utf-8") as said:
            process = subprocess.Popen([FERRY, *words], stdout=subprocess.DEVNULL, stderr=said)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            return process.returncode, said.read(), usage.ru_maxrss

    def test_full_is_said_before_memory_is_taken(self):
        large = {"model__hidden": 512, "model__intermediate": 2048, "model__layers": 12, "steps": 1,
                 "swap__state_on_nvme": 1}
        enough = self.config(**large, budgets__nvme=[self.nvme("1TiB")])
        run = self.ferry("plan", self.command(enough)[1], "--json", "--no-prediction")
        self.assertEqual(run.code, 0, run.err)
        planned = run.lines[0]["device_bytes"] + run.lines[0]["host_bytes"]
        self.assertGreater(planned, 256 << 20)
        _, _, planning = self.peak_kib("plan", self.command(enough)[1], "--json", "--no-prediction")
        full = self.command(self.config(**large, budgets__nvme=[self.nvme("900TiB")]))
        code, said, peak = self.peak_kib(*full)
        self.assertEqual(code, DOES_NOT_FIT, said)
        self.assertIn("too little free space", said)
        self.assertLess(peak, planning + planned // 1024 // 4)

    def test_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        run = self.on_path(self.path("nvme"), preexec_fn=limit)
        self.assert_refused(run, DOES_NOT_FIT, "ferry.slots0", "2097152 bytes (RLIMIT_FSIZE)", "ulimit")

    def test_without_direct_io(self):
        run = self.on_mount("ramfs", "mode=700", size="unlimited")
        self.assertIn("O_DIRECT is refused", run.err)
        if "0 bytes given" in run.err:
            self.skipTest("ramfs counts no free space, and is refused for it")
        self.assert_trained(run)

    def test_a_file_of_somebody_else(self):
        other = self.path("other")
        os.mkdir(other)
        for name in ("ferry.volume", "ferry.slots0"):
            with open(os.path.join(other, name), "w", encoding="ascii") as file:
                file.write("my thesis")
            self.assert_refused(self.on_path(other), USAGE, name, "not ferry's")
            with open(os.path.join(other, name), encoding="ascii") as file:
                self.assertEqual(file.read(), "my thesis")
            self.assertEqual(os.listdir(other), [name])
            os.remove(os.path.join(other, name))


class DataTest(BadInputTest):
    def with_tokens(self, contents):
        path = self.path("bad.bin")
        with open(path, "wb") as file:
            file.write(contents)
        return self.train(self.config(data__tokens=path))

    def tokens(self):
        with open(self.path("tokens.bin"), "rb") as file:
            return file.read()

    def test_missing_or_something_else(self):
        self.refused(USAGE, ["absent.bin", "No such file", "ferry data"],
                     data__tokens=self.path("absent.bin"))
        self.refused(USAGE, ["not a token file", "text.txt", "ferry data"],
                     data__tokens=self.path("text.txt"))
        self.refused(USAGE, ["not a token file", "not a regular file"], data__tokens=self.dir)
        self.assert_refused(self.with_tokens(b""), USAGE, "bad.bin", "0 bytes", "header")

    def test_truncated(self):
        whole = self.tokens()
        self.assert_refused(self.with_tokens(whole[:-1]), IO, "truncated", "bad.bin",
                            f"{len(whole) - 65} bytes after the header", "40000 tokens")
        self.assert_refused(self.with_tokens(whole[:70]), IO, "truncated")
        self.assert_refused(self.with_tokens(whole[:50]), USAGE, "50 bytes", "header of 64 bytes")
        self.assert_refused(self.with_tokens(whole + b"x"), IO, "longer than it says")

    def test_corrupt(self):
        flipped = bytearray(self.tokens())
        flipped[1000] ^= 1
        self.assert_refused(self.with_tokens(bytes(flipped)), IO, "damaged", "checksum", "bad.bin")

    def test_tokens_outside_the_vocabulary(self):
        run = self.refused(USAGE, ["a token outside the vocabulary", "tokens.bin, token ",
                                   "below model.vocab, 110", "raise model.vocab"], model__vocab=110)
        measured = int(re.search("measured: ([0-9]+)", run.err).group(1))
        self.assertGreaterEqual(measured, 110)

    def test_too_short(self):
        self.refused(USAGE, ["tokens.bin"], batch__sequence=100000)

    def test_a_plan_refuses_what_a_run_would(self):
        for changes in ({"batch__sequence": 50000}, {"data__held_back": 0.999999}, {"evaluate__micro_batches": 10000},
                        {"reserved_cores": [65000]}, {"reserved_cores": sorted(os.sched_getaffinity(0))}):
            words = self.command(self.config(**changes))
            train, plan = self.ferry(*words), self.ferry("plan", words[1], "--no-prediction")
            self.assert_refused(train, USAGE)
            self.assert_refused(plan, USAGE)
            self.assertEqual(plan.err.splitlines()[-5:], train.err.splitlines()[-5:])

    def test_less_held_back_than_evaluated(self):
        run = self.refused(USAGE, ["evaluate.micro_batches", "10000 asked for", "held back"],
                           evaluate__micro_batches=10000)
        most = int(re.search("set evaluate.micro_batches to ([0-9]+)", run.err).group(1))
        self.assert_trained(self.train(self.config(steps=1, evaluate__micro_batches=most)))

    def test_json_is_no_text(self):
        lines = '{"messages": [{"role": "user", "content": "hi"}]}\n' * 3
        for name, text in (("chat.jsonl", lines), ("chat.txt", lines), ("chat.JSON", "[\n  1, 2]"),
                           ("pretty", '\n{\n  "text": "hello"\n}\n'), ("list", '[{"a": {"b": [1]}}]'),
                           ("headed.txt", "a first plain line\n" + lines), ("empty.txt", "plain\n" + "{}\n" * 3),
                           ("lists.txt", "plain\n" + '[{"a": 1}, 2]\n\n' * 3), ("n.json", "42"),
                           ("t.jsonl", "\n true \n"), ("long.txt", "plain\n" + '{"text": "%s"}' % ("x" * 2000000)),
                           ("prose.json", "no JSON at all"), ("true.JSONL", "true or not?"), ("five.json5", "{a: 'b'}"),
                           ("packed.jsonl.gz", "packed"), ("packed.json.zst", "packed"), ("packed.ndjson.xz", "packed"),
                           ("late.jsonl", "\n" * 1100000 + lines), ("late.txt", " \n" * 600000 + lines), ("sequence.txt", "\x1e" + "\x1e".join([lines] * 3)),
                           ("words.txt", '["a", "b"]\n' * 3), ("nested.txt", "[[1, 2], [3]]\n" * 3),
                           ("tall.txt", '[\n"a",\n"b"\n]\n'),
                           ("few.txt", "a\nb\nc\n" + json.dumps({"text": "much of it"}))):
            with open(self.path(name), "w", encoding="ascii") as file:
                file.write(text)
            run = self.ferry("data", self.path("text.txt"), self.path(name), "-o", self.path("json.bin"))
            self.assertNotEqual(run.code, 0, name)
            self.assert_refused(run, USAGE, "the file is JSON", name, "--raw", "--ids")
            self.assertFalse(os.path.exists(self.path("json.bin")))
            run = self.ferry("data", self.path(name), "-o", self.path("json.bin"), "--raw")
            self.assertEqual(run.code, 0, run.err)
            os.remove(self.path("json.bin"))
        for name, text in (("prose.txt", "[1] See {\"the\" notes}. {a: 1}"), ("code.py", "{'a': 1}\n"),
                           ("prose.md", "no JSON at all"), ("set.c", "{ \"a\", \"b\" };"), ("n.txt", "42\n" * 9),
                           ("dict.txt", "{'text': 'hi'}\n" * 9), ("tabs.tsv", 'a\t{"text": "hi"}\n' * 9),
                           ("true.txt", "true or not?"), ("quotes.txt", '"Yes."\n"No."\n'), ("refs.txt", "[1]\n[2]\n"),
                           ("code.c", "int f() {\n{\n}\n}\n" * 9),
                           ("readme.md", 'Write this in a file.\n\n{"steps": 1}\n\nThen start it, and wait for the end.\n')):
            with open(self.path(name), "w", encoding="ascii") as file:
                file.write(text)
            run = self.ferry("data", self.path(name), "-o", self.path("prose.bin"))
            self.assertEqual(run.code, 0, (name, run.err))

    def test_a_text_that_changes_while_it_is_read(self):
        with open(self.path("long.txt"), "wb") as file:
            file.write(b"words and more\n" * 10_000_000)
            file.flush()
            ended = threading.Event()

            def write():
                while not ended.wait(0.002):
                    file.write(b".")
                    file.flush()
            writer = threading.Thread(target=write)
            writer.start()
            run = self.ferry("data", self.path("long.txt"), "-o", self.path("long.bin"))
            ended.set()
            writer.join()
        self.assert_refused(run, IO, "changed while it was read", self.path("long.txt"), "as it was at first")
        self.assertFalse(os.path.exists(self.path("long.bin")))
        os.remove(self.path("long.txt"))

    def test_json_of_a_pipe_and_behind_marks(self):
        line = '{"text": "hi"}\n'
        for name, written in (("pipe", line.encode()), ("marked.jsonl", b"\xef\xbb\xbf" + line.encode()),
                              ("little.jsonl", b"\xff\xfe" + line.encode("utf-16-le")),
                              ("big.txt", b"\xfe\xff" + line.encode("utf-16-be")),
                              ("unmarked.txt", line.encode("utf-16-le")), ("unmarked-big.txt", line.encode("utf-16-be")),
                              ("wide.txt", line.encode("utf-32")), ("wide-big.txt", b"\0\0\xfe\xff" + line.encode("utf-32-be")),
                              ("chinese.txt", '{"text": "\u4e22\u5f00"}\n'.encode("utf-16-le")),
                              ("blanks.txt", b" \n" * 40000 + line.encode())):
            source = self.path(name)
            if name == "pipe":
                os.mkfifo(source)
                with subprocess.Popen(["sh", "-c", "printf '%s' \"$1\" > \"$2\"", "sh", line, source]):
                    run = self.ferry("data", source, "-o", self.path("json.bin"))
            else:
                with open(source, "wb") as file:
                    file.write(written)
                run = self.ferry("data", source, "-o", self.path("json.bin"))
            self.assert_refused(run, USAGE, "the file is JSON", name)
            self.assertFalse(os.path.exists(self.path("json.bin")))

    def test_a_pipe_gives_all_its_bytes(self):
        pipe = self.path("text.pipe")
        os.mkfifo(pipe)
        with subprocess.Popen(["cp", self.path("text.txt"), pipe]):
            run = self.ferry("data", pipe, "-o", self.path("piped.bin"))
        self.assertEqual(run.code, 0, run.err)
        with open(self.path("piped.bin"), "rb") as file:
            self.assertEqual(file.read(), self.tokens())

    def test_a_mask_that_never_ends(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
        output = self.path("masked.bin")
        run = self.ferry("data", self.path("text.txt"), "--mask", "/dev/zero", "-o", output, preexec_fn=limit)
        self.assert_refused(run, USAGE, "/dev/zero", "no regular file")
        self.assertFalse(os.path.exists(output))

    def test_a_device_is_no_text(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
        output = self.path("device.bin")
        with open("/dev/zero", "rb") as zeros:
            for name in ("/dev/zero", "/dev/urandom", "/dev/null", "/dev/stdin"):
                for ids in ([], ["--ids", "uint16", "--vocab", "65536"]):
                    run = self.ferry("data", self.path("text.txt"), name, *ids, "-o", output, preexec_fn=limit, stdin=zeros)
                    self.assert_refused(run, USAGE, "a device", name)
                    self.assertFalse(os.path.exists(output))

    def test_standard_input_is_read_from_pipes_files_and_terminals(self):
        output = self.path("stdin.bin")
        with open(self.path("text.txt"), "rb") as file:
            text = file.read()
        for source in ("pipe", "file"):
            with open(self.path("text.txt"), "rb") as file:
                given = {"stdin": file} if source == "file" else {"input": text.decode()}
                run = self.ferry("data", "/dev/stdin", "-o", output, **given)
            self.assertEqual(run.code, 0, (source, run.err))
            with open(output, "rb") as file:
                self.assertEqual(file.read(), self.tokens())
        ours, terminal = pty.openpty()
        os.write(ours, b"typed\n\x04")
        run = self.ferry("data", "/dev/stdin", "-o", output, stdin=terminal)
        os.close(ours)
        os.close(terminal)
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("6 tokens", run.out)

    def test_a_pipe_that_nobody_writes_to(self):
        os.mkfifo(self.path("fifo"))
        self.refused(USAGE, ["fifo", "not a regular file"], data__tokens=self.path("fifo"))

    def test_data_keeps_what_is_there(self):
        run = self.ferry("data", self.path("tokens.bin"), "-o", self.path("text.txt"))
        self.assert_refused(run, USAGE, "text.txt", "no token file")
        for output in ("tokens.bin", "other.bin"):
            run = self.ferry("data", self.path("tokens.bin"), "-o", self.path(output))
            self.assert_refused(run, USAGE, "tokens.bin")
        run = self.ferry("data", self.path("text.txt"), "-o", self.path("no/such/new.bin"))
        self.assert_refused(run, USAGE, "no/such/new.bin", "directory")
        run = self.ferry("data", self.path("absent.txt"), "-o", self.path("new.bin"))
        self.assert_refused(run, USAGE, "absent.txt", "No such file")
        self.assertFalse(os.path.exists(self.path("new.bin")))


class WeightsOutTest(BadInputTest):
    def out(self, path, *arguments, **options):
        return self.train(self.config(steps=2), "--weights-out", path, *arguments, **options)

    def test_refused_before_the_training(self):
        for path in ("/no/such/directory/w.safetensors", self.path("nvme"),
                     self.path("text.txt/w.safetensors")):
            self.assert_refused(self.out(path), USAGE, "--weights-out " + path)

    def test_a_failed_write_keeps_what_is_there(self):
        kept = self.path("kept.safetensors")
        whole = self.out(kept)
        self.assert_trained(whole)
        size = os.path.getsize(kept)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        run = self.out(kept, preexec_fn=limit)
        self.assertEqual(run.code, IO, run.err)
        self.assertIn("kept.safetensors", run.err)
        self.assertEqual(run.numbers(), whole.numbers(), "summary and hash are said in any case")
        self.assertEqual(run.summary["steps"], 2)
        self.assertEqual(os.path.getsize(kept), size)
        self.assertFalse([name for name in os.listdir(self.dir) if name.endswith(".part")])

    def test_results_do_not_replace_each_other(self):
        one, link = self.path("one"), self.path("link")
        os.symlink(self.dir, link)
        for other in (one, os.path.join(link, "one")):
            run = self.out(one, "--trace", other)
            self.assert_refused(run, USAGE, "--trace", "one file")
        export = self.path("exported")
        for option in ("--trace", "--weights-out"):
            os.mkdir(export)
            run = self.train(self.config(steps=2), "--export", export, option, os.path.join(export, "config.json"))
            self.assert_refused(run, USAGE, option, "exported")
            os.rmdir(export)

    def test_standard_output_is_full(self):
        config = self.command(self.config(steps=2))[1]
        # Longer than what stdio writes at a time: the failure comes while it is printed.
        deep = self.command(self.config(steps=9999))[1]
        model, weights = self.path("full-model"), self.path("full.safetensors")
        self.assert_trained(self.train(self.config(steps=1), "--export", model, "--weights-out", weights))
        hosts = self.path("full-hosts")
        with open(hosts, "w", encoding="ascii") as file:
            file.write("localhost slots=1\n")
        commands = [["--help"], ["--version"], *([name, "--help"] for name in ("train", "plan", "data", "bench")),
                    ["train", config, "--json"], ["train", config], ["plan", config], ["plan", config, "--json"],
                    ["plan", deep, "--json", "--schedule", "--no-prediction"],
                    ["data", self.path("text.txt"), "-o", self.path("full.bin")],
                    ["data", self.path("text.txt"), "-o", self.path("full.bin"), "--json"],
                    ["eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32"],
                    ["launch", config, "--hostfile", hosts, "--dry-run"], ["bench", "adam", "--millions", "0.01", "--pairs", "1", "--threads", "1"]]
        for command in commands:
            with self.subTest(command=command), open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([FERRY, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
                                      timeout=120)
                self.assertEqual(done.returncode, IO, done.stderr)
                # CLI11 flushes a version itself, and drops the reason.
                reason = "an earlier part" if command == ["--version"] else "No space left"
                for text in ("what ferry printed could not be written", "standard output", reason):
                    self.assertIn(text, done.stderr)

    def test_a_standard_output_that_does_not_wait(self):
        """A pipe that is full and does not block is no lack of threads."""
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        deep = self.command(self.config(steps=9999))[1]
        done = subprocess.run([FERRY, "plan", deep, "--json", "--schedule", "--no-prediction"], stdout=theirs,
                              stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        os.close(ours)
        os.close(theirs)
        self.assertEqual(done.returncode, IO, done.stderr)
        self.assertIn("what ferry printed could not be written", done.stderr)

    def test_the_reader_goes_away(self):
        command = [FERRY, *self.command(self.config(**NvmePathTest.SMALL,
                                                    budgets__nvme=[self.nvme()]))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as run:
            run.stdout.readline()
            run.stdout.close()
            said = run.stderr.read()
        self.assertEqual(run.returncode, IO, said)
        self.assertIn("Broken pipe", said)
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_results_do_not_depend_on_standard_output(self):
        """Weights, export, trace and durable state are those of a run whose output is read."""
        def outputs(kind):
            names = [self.path(f"{kind}.{name}") for name in ("safetensors", "exported", "trace")]
            return names, ["--weights-out", names[0], "--export", names[1], "--trace", names[2]]

        config = self.config(steps=60, evaluate__every=4, evaluate__micro_batches=1, hash_every="step")
        names, options = outputs("read")
        self.assert_trained(self.train(config, *options))
        with open(names[0], "rb") as file:
            whole = file.read()
        for kind in ("gone", "full", "text"):
            with self.subTest(kind=kind):
                names, options = outputs(kind)
                words = [FERRY, *self.command(config, *options)]
                if kind == "text":
                    words.remove("--json")
                said = self.unread(words, kind)
                with open(names[0], "rb") as file:
                    self.assertEqual(file.read(), whole)
                self.assertIn("model.safetensors", os.listdir(names[1]))
                with open(names[2], encoding="utf-8") as file:
                    self.assertTrue(json.load(file)["traceEvents"])
                self.assertEqual(said.count("nothing more is printed; the work goes on"), 1, said)

    def test_durable_state_does_not_depend_on_standard_output(self):
        volume = self.path("unread-nvme")
        os.mkdir(volume)
        config = self.config(steps=12, budgets__host="300KiB", checkpoint__durable_steps=True,
                             schedule__kind="constant", schedule__warmup_steps=0,
                             budgets__nvme=[{"path": volume, "size": "64MiB"}])
        self.unread([FERRY, *self.command(config)], "gone")
        config["steps"] = 14
        resumed = self.train(config, "--resume")
        self.assert_trained(resumed)
        self.assertEqual([step["step"] for step in resumed.steps][-2:], [13, 14])

    def unread(self, words, kind):
        """What the run says on standard error: of its output nobody reads more than a line."""
        full = open("/dev/full", "w", encoding="utf-8") if kind != "gone" else None
        with subprocess.Popen(words, stdout=full or subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            if full:
                full.close()
            else:
                run.stdout.readline()
                run.stdout.close()
            said = run.stderr.read()
        self.assertEqual(run.returncode, IO, said)
        self.assertIn("what ferry printed could not be written", said)
        self.assertIn("Broken pipe" if kind == "gone" else "No space left", said)
        return said

    def test_replaces_nothing_but_weights(self):
        for name in ("tokens.bin", "text.txt"):
            before = os.path.getsize(self.path(name))
            for option in ("--weights-out", "--trace"):
                run = self.train(self.config(steps=1), option, self.path(name))
                self.assert_refused(run, USAGE, option, name, "another kind")
            self.assertEqual(os.path.getsize(self.path(name)), before)
        trace = self.path("trace.json")
        for _ in range(2):
            self.assert_trained(self.train(self.config(steps=1), "--trace", trace))


class DivergedTest(BadInputTest):
    # The second update is large enough for the third step's numbers to overflow.
    BLOWN = {"optimizer__lr": 1e6, "optimizer__weight_decay": 1e6, "steps": 20,
             "schedule__warmup_steps": 0}
    PLACES = ({}, {"budgets__host": "200KiB", "swap__speculate": "all"})

    def places(self):
        for place in self.PLACES:
            nvme = {"budgets__nvme": [self.nvme()]} if "budgets__host" in place else {}
            yield {**place, **nvme}

    def test_stops_with_step_layer_and_last_good_step(self):
        messages = []
        for place in self.places():
            run = self.train(self.config(**self.BLOWN, **place))
            self.assertEqual(run.code, DIVERGED, run.err)
            good = len(run.steps)
            self.assertGreater(good, 0)
            message = run.err[run.err.index("ferry: "):]
            self.assertRegex(message, f"where:    step {good + 1}, (block|the head|the embedding)")
            self.assertIn(f"the last good step is {good}", message)
            self.assertRegex(message, "measured: loss .*nan|measured: loss .*inf")
            self.assertIn("optimizer.lr", message)
            self.assertIn("on_nonfinite", message)
            self.assertEqual(os.listdir(self.path("nvme")), [])
            messages.append(message)
        self.assertEqual(messages[0], messages[1])

    def test_skips_by_configuration(self):
        runs = [self.train(self.config(**self.BLOWN, on_nonfinite="skip", **place))
                for place in self.places()]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(len(run.steps), 20)
            skipped = [step["skipped"] for step in run.steps]
            self.assertGreater(sum(skipped), 0)
            self.assertEqual(run.summary["skipped_steps"], sum(skipped))
        self.assertEqual(runs[0].numbers(), runs[1].numbers())

    def test_skips_for_ever_are_an_error(self):
        run = self.train(self.config(**{**self.BLOWN, "steps": 60}, on_nonfinite="skip"))
        self.assertEqual(run.code, DIVERGED, run.err)
        self.assertIn("20 steps in a row were skipped", run.err)
        self.assertTrue(all(step["skipped"] for step in run.steps[-19:]))
        good = max(step["step"] for step in run.steps if not step["skipped"])
        self.assertIn(f"the last good step is {good}", run.err)

    def test_a_skipped_step_changes_nothing_but_the_data(self):
        run = self.train(self.config(**self.BLOWN, on_nonfinite="skip", hash_every="step"))
        first = next(i for i, step in enumerate(run.steps) if step["skipped"])
        self.assertEqual(len(set(run.hashes[first - 1:])), 1)
        self.assertEqual(len(set(run.hashes[:first])), first)


if __name__ == "__main__":
    unittest.main()
