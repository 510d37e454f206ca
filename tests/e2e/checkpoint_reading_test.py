"""Whatever reads a checkpoint proves it: damage is named by training, evaluation and export alike, and the tool says what is
there."""

import contextlib
import json
import os
import pathlib
import pty
import shutil
import signal
import struct
import subprocess
import unittest

from checkpoints import STEPS, Saving, xxh3
from harness import FERRY, IO, USAGE

BAD_SECTOR = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "libbad_sector.so")


class ReadingTest(Saving):
    def test_a_checkpoint_of_version_1(self):
        """Its arrays and files were summed whole: all of it is proved first."""
        whole = self.whole(precision="bf16")
        self.ok(self.killed(self.saving(precision="bf16", checkpoint__every=4), steps=8, signal_=signal.SIGTERM))
        path = pathlib.Path(self.dir_, self.steps()[-1])
        file = path / "manifest.json"
        manifest = json.loads(file.read_text(encoding="utf-8"))
        manifest["version"] = 1
        for shard in manifest["shards"]:
            data = (path / shard["file"]).read_bytes()
            shard["checksum"], at = xxh3(data), len(data) - sum(array["bytes"] for array in shard["arrays"])
            for array in shard["arrays"]:
                del array["stripes"]
                array["checksum"], at = xxh3(data[at:at + array["bytes"]]), at + array["bytes"]
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        body = text[:-16 - len('"\n}\n')]
        file.write_text(f'{body}{xxh3(body.encode())}"\n}}\n', encoding="utf-8")
        self.ok(self.ferry("ckpt", "verify", path))
        words = self.command(self.saving(precision="bf16", checkpoint__every=4), "--resume", path)
        name = os.path.join(path, "exp_avg.safetensors")
        self.flip(name, os.path.getsize(name) - 5)
        self.refused(IO, ["exp_avg.safetensors"], *words)
        self.flip(name, os.path.getsize(name) - 5)
        self.assertEqual(self.ok(self.ferry(*words)).hashes, whole.hashes)

    def test_damage_is_named(self):
        config = self.saving(precision="bf16", checkpoint__keep={"last": 3})
        self.ok(self.train(config))
        newest, before = self.step(12), self.step(10)
        words = self.command(config, "--resume", "latest")
        self.ok(self.ferry("ckpt", "verify", self.dir_))
        for name in sorted(os.listdir(newest)):
            path = os.path.join(newest, name)
            size = os.path.getsize(path)
            at, tensor = size // 2, ""
            if name.endswith(".safetensors"):
                entries, data = self.header(path)
                tensor, entry = sorted((k, v) for k, v in entries.items() if k != "__metadata__")[5]
                at = data + entry["data_offsets"][0] + 5
            with self.subTest(name):
                self.flip(path, at)
                found = self.ferry("ckpt", "verify", newest, "--json")
                self.assertEqual(found.code, IO)
                self.assertIn(f"{name}" + (f": {tensor}" if tensor else ""), found.lines[0]["faults"][0])
                self.refused(IO, [name, tensor, f"--resume {before}"], *words)
                self.flip(path, at)
                with open(path, "rb") as file:
                    contents = file.read()
                os.truncate(path, size - 3)
                self.refused(IO, [name, f"--resume {before}"], *words)
                if name != "manifest.json":
                    os.remove(path)
                    self.refused(IO, [name, "missing", f"--resume {before}"], *words)
                with open(path, "wb") as file:
                    file.write(contents)
        self.ok(self.ferry("ckpt", "verify", self.dir_))

    def test_what_may_not_be_read_is_no_damage(self):
        """Neither a right that is missing nor a limit of the process says anything about the bytes."""
        self.ok(self.train(self.saving(precision="bf16")))
        there = self.step(STEPS)
        through = ()
        if os.geteuid() == 0:  # root without what makes it read everything
            through = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
            if not shutil.which(through[0]) or subprocess.run([*through, "true"], check=False).returncode:
                self.skipTest("root cannot give up its rights here")
        for name in ("manifest.json", "model.safetensors", "exp_avg.safetensors", "config.json"):
            path = os.path.join(there, name)
            os.chmod(path, 0)
            with self.subTest(name):
                for words in (("verify", there), ("verify", self.dir_), ("diff", self.step(10), there)):
                    run = self.refused(USAGE, [path, "Permission denied"], "ckpt", *words, through=through)
                    self.assertNotIn("damaged", run.out + run.err)
            os.chmod(path, 0o644)
        os.chmod(there, 0)
        run = self.refused(USAGE, [there, "Permission denied"], "ckpt", "verify", there, through=through)
        self.assertNotIn("damaged", run.out + run.err)
        os.chmod(there, 0o755)
        self.ok(self.ferry("ckpt", "verify", self.dir_, through=through))

    def test_a_model_is_proved_too(self):
        """Where `model.path` names a checkpoint, no wrong byte is trained on, evaluated or exported."""
        config = self.saving(precision="bf16")
        self.ok(self.train(config))
        there = self.step(STEPS)
        weights, manifest = os.path.join(there, "model.safetensors"), pathlib.Path(there, "manifest.json")
        entries, data = self.header(weights)
        tensor, entry = sorted((k, v) for k, v in entries.items() if k != "__metadata__")[3]
        tuning = self.run_config(steps=2, precision="bf16", model={"path": there})
        training = self.command(tuning)
        evaluating = ("eval", there, self.path("tokens.bin"), "--set", "batch.sequence=32", "--set", "precision=bf16")
        exporting = ("export", training[1], weights, self.path(f"{self.name}-exported"))
        self.ok(self.ferry(*training))
        value = data + entry["data_offsets"][0] + 6
        for path, at, named in ((weights, value, tensor), (str(manifest), 40, "manifest.json")):
            with self.subTest(path):
                self.flip(path, at)
                for words in (training, evaluating, exporting):
                    self.refused(IO, [path, named], *words)
                self.refused(IO, [path, named], *training, through=self.mpi(2))
                self.flip(path, at)
        with self.subTest("another file of the same length"):
            whole = pathlib.Path(weights).read_bytes()
            one, other = sorted(k for k in entries if k.endswith("layernorm.weight"))[:2]
            self.assertEqual(entries[one]["shape"], entries[other]["shape"])
            swapped = {**entries, one: entries[other], other: entries[one]}
            header = json.dumps(swapped, separators=(",", ":")).encode().ljust(data - 8)
            self.assertEqual(len(header), data - 8)
            pathlib.Path(weights).write_bytes(whole[:8] + header + whole[data:])
            for words in (training, evaluating, exporting):
                self.refused(IO, [weights, "its header", "manifest.json"], *words)
            pathlib.Path(weights).write_bytes(whole)
        description = pathlib.Path(there, "config.json")
        text = description.read_text(encoding="utf-8")
        changed = text.replace('"hidden_act": "silu"', '"hidden_act" : "silu"')
        self.assertNotEqual(changed, text)
        for wrong in (changed, text[:214], "", text.replace("hidden_size", "hidden_sizf")):
            description.write_text(wrong, encoding="utf-8")
            for words in (training, evaluating):
                self.refused(IO, [str(description), "manifest.json"], *words)
        description.write_text(text, encoding="utf-8")
        self.flip(os.path.join(there, "exp_avg.safetensors"), 5000)  # no part of the model
        self.ok(self.ferry(*training))
        # A change that was meant, and a manifest of another program.
        self.flip(weights, value)
        moved = self.path(f"{self.name}-moved")
        shutil.copytree(there, moved)
        for text in (None, "{}", '{"name": "a model of another program"}'):
            os.remove(os.path.join(moved, "manifest.json"))
            if text is None:
                self.ok(self.ferry("eval", moved, *evaluating[2:]))
            pathlib.Path(moved, "manifest.json").write_text(text or "[]", encoding="utf-8")
            self.ok(self.ferry("eval", moved, *evaluating[2:]))

    def test_an_export_checks_what_it_copies(self):
        self.ok(self.train(self.saving(precision="bf16")))
        there, out = self.step(STEPS), self.path(f"{self.name}-out")
        for name, type_ in (("model", "bf16"), ("master", "fp32")):
            path = os.path.join(there, f"{name}.safetensors")
            entries, data = self.header(path)
            tensor, entry = sorted((k, v) for k, v in entries.items() if k != "__metadata__")[3]
            at = data + entry["data_offsets"][0] + 6
            self.flip(path, at)
            self.refused(IO, [path, tensor, "ferry ckpt verify"], "ckpt", "export", there, out, "--export-type", type_)
            self.assertFalse(os.path.exists(out))
            self.flip(path, at)
        description = os.path.join(there, "config.json")
        self.flip(description, 40)
        self.refused(IO, [description], "ckpt", "export", there, out)
        self.flip(description, 40)
        self.flip(os.path.join(there, "exp_avg.safetensors"), 5000)  # not copied
        self.ok(self.ferry("ckpt", "export", there, out))

    def test_what_is_no_whole_checkpoint(self):
        config = self.saving()
        self.ok(self.train(config))
        manifest = pathlib.Path(self.step(12), "manifest.json")
        text = manifest.read_text(encoding="utf-8")
        self.newer(manifest)
        for path in (self.step(12), self.dir_):
            run = self.refused(USAGE, ["version 2"], "ckpt", "verify", path)
            self.assertNotIn("damaged", run.out + run.err)
            self.assertNotIn("ckpt rm", run.err)
        # One wrong digit is damage, and so is what is no file.
        resuming = self.command(config, "--resume", "latest")
        whole = f"--resume {self.step(10)}"
        manifest.write_text(text.replace('"version": 2', '"version": 3'), encoding="utf-8")
        self.refused(IO, ["damaged", whole], *resuming)
        manifest.unlink()
        for make, undo in ((lambda: None, lambda: None), (manifest.mkdir, manifest.rmdir),
                           (lambda: os.mkfifo(manifest), manifest.unlink)):
            make()
            for words in (("ckpt", "verify", self.step(12)), ("ckpt", "verify", self.dir_),
                          ("ckpt", "export", self.dir_, self.path(f"{self.name}-exported"))):
                self.refused(IO, [], *words)
            self.refused(IO, [self.step(12), whole], *resuming)
            # The remedy is one that works.
            run = self.ferry("ckpt", "verify", self.step(12))
            if os.path.lexists(manifest):
                self.assertIn(f"remove {self.step(12)} by hand", run.err)
                self.refused(USAGE, ["manifest.json"], "ckpt", "rm", self.step(12))
            else:
                self.assertIn("ckpt rm removes", run.err)
            # A new run is offered what is whole.
            self.refused(USAGE, ["cannot be read", whole], *self.command(config))
            undo()
        empty = self.path(f"{self.name}-empty/step-00000001")
        os.makedirs(empty)
        self.refused(USAGE, ["manifest"], "ckpt", "verify", empty)
        manifest.write_text(text, encoding="utf-8")
        shard = pathlib.Path(self.step(12), "exp_avg.safetensors")
        shard.unlink()
        os.mkfifo(shard)
        run = self.ferry("ckpt", "verify", self.step(12))
        self.assertEqual(run.code, IO)
        self.assertIn("no regular file", run.out)

    def append(self, path, name, dtype, shape, data):
        """One more array in exp_avg.safetensors, of at most a stripe, and in the manifest."""
        file = pathlib.Path(path, "exp_avg.safetensors")
        entries, at = self.header(file)
        old = file.read_bytes()[at:]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(old), len(old) + len(data)]}
        header = json.dumps(entries).encode()
        before = struct.pack("<Q", len(header)) + header
        file.write_bytes(before + old + data)
        stripe = xxh3(data) if data else ""

        def change(manifest):
            shard = next(one for one in manifest["shards"] if one["file"] == file.name)
            shard.update(bytes=len(before + old + data), checksum=xxh3(before))
            shard["arrays"].append({"name": name, "bytes": len(data), "stripes": stripe,
                                    "checksum": xxh3(bytes.fromhex(stripe)[::-1])})
        self.forge(path, change)

    def test_sizes_that_are_not_the_headers(self):
        """A manifest with other sizes than its shards is damage, whoever reads it."""
        source = self.path(f"{self.name}-source")
        config = self.saving(precision="bf16", checkpoint__dir=source)
        self.ok(self.train(config))
        there, text = self.step(12, source), pathlib.Path(self.step(12, source), "manifest.json").read_text(encoding="utf-8")

        def swap(manifest, file):
            arrays = next(one for one in manifest["shards"] if one["file"] == file)["arrays"]
            other = next(one for one in arrays if one["bytes"] != arrays[0]["bytes"])
            arrays[0]["name"], other["name"] = other["name"], arrays[0]["name"]

        out = self.path(f"{self.name}-exported")
        for file in ("model.safetensors", "exp_avg.safetensors"):
            self.forge(there, lambda manifest, file=file: swap(manifest, file))
            for words in (("ckpt", "diff", there, there), ("ckpt", "export", there, out), ("ckpt", "inspect", there),
                          ["ckpt", "import", self.command(self.saving(precision="bf16"))[1], there],
                          self.command(config, "--resume", "latest")):
                with self.subTest(file=file, words=words[:2]):
                    self.refused(IO, [file, "elsewhere in its shard"], *words)
            run = self.ferry("ckpt", "verify", there)
            self.assertEqual(run.code, IO)
            self.assertIn("elsewhere in its shard", run.out)
            pathlib.Path(there, "manifest.json").write_text(text, encoding="utf-8")

    def test_arrays_of_odd_types_are_compared(self):
        self.ok(self.train(self.saving()))
        one = self.step(12)
        other = self.path(f"{self.name}-other")
        shutil.copytree(one, other)
        for path, last in ((one, b"\1"), (other, b"\2")):
            self.append(path, "none", "F32", [0], b"")
            self.append(path, "odd", "FOO", [1], bytes(1 << 20))
            self.append(path, "vast", "FOO", [1 << 61, 1 << 61], bytes(64) + last)
            self.append(path, "longs", "I64", [2], bytes(15) + last)
        self.ok(self.ferry("ckpt", "verify", one))
        self.assertIn("equal", self.ok(self.ferry("ckpt", "diff", one, one)).out)
        run = self.ferry("ckpt", "diff", one, other)
        self.assertEqual(run.code, IO)
        self.assertEqual(run.out.splitlines(), ["longs: 1 of 2 elements differ", "vast: 1 of 65 bytes differ"])

    def test_a_checkpoint_under_another_steps_name(self):
        config = self.saving()
        self.ok(self.train(config))
        there, other = self.step(12), self.step(99)
        os.rename(there, other)
        for words in (self.command(config, "--resume", "latest"), ("ckpt", "inspect", other + "/")):
            self.refused(USAGE, ["is of step 12", "step 99", f"mv {other} {there}"], *words)
        run = self.ferry("ckpt", "verify", self.dir_)
        self.assertEqual(run.code, IO)
        self.assertIn("is of step 12", run.out)
        self.assertIn(f"{self.step(10)}: whole", run.out)
        self.assertNotIn("ckpt rm", run.err)
        self.assertIn("another step", self.ok(self.ferry("ckpt", "ls", self.dir_)).out)
        lines = self.ok(self.ferry("ckpt", "ls", self.dir_, "--json")).lines
        self.assertEqual(["error" in line for line in lines], [False, True])
        os.rename(other, there)
        self.ok(self.ferry("ckpt", "verify", self.dir_))

    def test_drafts_of_a_killed_export_are_no_model(self):
        self.ok(self.train(self.saving()))
        there = self.path(f"{self.name}-exported")
        os.makedirs(there)
        pathlib.Path(there, "model.safetensors.154afaa8dc478d6b.part").write_text("half", encoding="utf-8")
        self.ok(self.ferry("ckpt", "export", self.dir_, there))
        self.assertEqual(sorted(os.listdir(there)), ["config.json", "model.safetensors"])

    @unittest.skipUnless(os.path.exists(BAD_SECTOR), "built without what is preloaded")
    def test_what_takes_long_says_how_far_it_is(self):
        """On a terminal: bytes, rate and time left, on a line that is wiped in the end."""
        self.ok(self.train(self.saving(checkpoint__every=6)))
        env = {**os.environ, "LD_PRELOAD": BAD_SECTOR, "FERRY_TEST_READ_TAKES": "0.1",
               "FERRY_TEST_BAD_FILE": os.path.join(self.step(STEPS), "exp_avg.safetensors")}
        ours, terminal = pty.openpty()
        with subprocess.Popen([FERRY, "ckpt", "verify", self.step(STEPS)], stdout=subprocess.DEVNULL, stderr=terminal,
                              env=env) as process:
            os.close(terminal)
            text = b""
            with open(ours, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # EIO: its end
                while part := shown.read(4096):
                    text += part
        self.assertEqual(process.returncode, 0, text)
        self.assertRegex(text.decode(), r"verify .*: [0-9.]+ \w*B of [0-9.]+ \w*B \(\d+ %\), [0-9.]+ GB/s, .* left")
        self.assertTrue(text.endswith(b"\r\x1b[K"), text[-40:])

    def test_tool(self):
        self.ok(self.train(self.saving(precision="bf16"), "--weights-out", self.path("w.safetensors")))
        there = self.step(STEPS)
        listed = self.ok(self.ferry("ckpt", "ls", self.dir_, "--json")).lines
        self.assertEqual([line["step"] for line in listed], [10, 12])
        self.assertTrue(listed[-1]["finished"])
        self.assertIn(there, self.ok(self.ferry("ckpt", "ls", self.dir_)).out)
        inspected = self.ok(self.ferry("ckpt", "inspect", there, "--json")).lines[0]
        kinds = {a["name"].replace("model.norm.weight", ""): a["dtype"] for a in inspected["arrays"]
                 if a["name"].startswith("model.norm.weight")}
        self.assertEqual(kinds, {"": "BF16", ".master": "F32", ".exp_avg": "F32", ".exp_avg_sq": "F32"})
        self.assertEqual(inspected["tokens"], STEPS * 4 * 2 * 32)
        found = self.ferry("ckpt", "diff", self.step(10), there, "--json")
        self.assertEqual(found.code, IO)
        self.assertFalse(found.lines[0]["equal"])
        with open("/dev/full", "w", encoding="utf-8") as full:
            lost = subprocess.run([FERRY, "ckpt", "diff", self.step(10), there], stdout=full, text=True,
                                  stderr=subprocess.PIPE, check=False)
        self.assertEqual(lost.returncode, IO)
        self.assertRegex(lost.stderr, r"(?s)standard output.*the checkpoints differ")
        for end in ("/", "/.", "//"):
            self.ok(self.ferry("ckpt", "inspect", there + end))
        # The master of the checkpoint is the weight that the run wrote; any dtype comes from it.
        self.ok(self.ferry("ckpt", "export", there, self.path("out32"), "--export-type", "fp32"))
        mine, at = self.header(self.path("out32/model.safetensors"))
        theirs, there_at = self.header(self.path("w.safetensors"))
        with open(self.path("out32/model.safetensors"), "rb") as one, open(self.path("w.safetensors"), "rb") as other:
            for name, entry in theirs.items():
                if name == "__metadata__":
                    continue
                self.assertEqual(mine[name]["shape"], entry["shape"])
                begin, end = mine[name]["data_offsets"]
                one.seek(at + begin)
                other.seek(there_at + entry["data_offsets"][0])
                self.assertEqual(one.read(end - begin), other.read(end - begin), name)
        self.ok(self.ferry("ckpt", "export", self.dir_, self.path("out16"), "--shard-size", "100kB"))
        self.assertIn("model.safetensors.index.json", os.listdir(self.path("out16")))
        # The export and the checkpoint itself are models to start from.
        for model in (self.path("out16"), there):
            self.ok(self.ferry("eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32",
                               "--set", "precision=bf16"))
        self.refused(USAGE, ["--all"], "ckpt", "rm", self.dir_)
        self.ok(self.ferry("ckpt", "rm", self.step(10)))
        own = os.path.join(self.step(11), "thesis.txt")
        os.makedirs(os.path.dirname(own))
        pathlib.Path(own).write_text("mine", encoding="utf-8")
        os.symlink("/etc", self.step(9))
        for _ in range(2):
            self.refused(USAGE, ["no checkpoint"], "ckpt", "rm", self.dir_, "--all")
            self.assertTrue(os.path.exists(own) and os.path.exists(self.step(12)))
            if os.path.islink(self.step(9)):
                os.unlink(self.step(9))
        shutil.rmtree(os.path.dirname(own))
        self.ok(self.ferry("ckpt", "rm", self.dir_, "--all", "--json"))
        self.assertEqual(self.steps(), [])
        self.assertEqual(self.refused(USAGE, ["no checkpoint is there"], "ckpt", "ls", self.dir_).out, "")


if __name__ == "__main__":
    unittest.main()
