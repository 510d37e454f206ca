"""What others wrote as JSON: the configuration, machine files, models, the index of their shards."""

import json
import os
import resource
import subprocess
import unittest

from harness import FERRY, USAGE
from refusals import Refusals


class JsonTest(Refusals):
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


if __name__ == "__main__":
    unittest.main()
