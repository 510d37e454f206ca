"""Hugging Face directories in and out, on the tiny models of tests/golden/hf: what is loaded, trained,
exported and loaded again, and how directories that ferry cannot use are refused."""

import array
import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import unittest

from harness import DIVERGED, FERRY, IO, USAGE, FerryTest, start, write_tensors
from ranks import ENVIRONMENT, MPIRUN

MODELS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
TOKENS = MODELS.parent / "train" / "tokens.bin"


def read_tensors(path):
    """Name to (dtype, shape, bytes), of a file or of all in a directory."""
    path = pathlib.Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors = {}
    for file in files:
        raw = file.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        for name, entry in json.loads(raw[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                tensors[name] = (entry["dtype"], entry["shape"], raw[begin:end])
    return tensors


def spoil(model, name, change):
    """Gives the fp32 values of the tensors whose name ends so to `change`, which changes them in place."""
    for file in model.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        length = struct.unpack("<Q", raw[:8])[0]
        for tensor, entry in json.loads(raw[8:8 + length]).items():
            if tensor == "__metadata__" or not tensor.endswith(name):
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            assert entry["dtype"] == "F32", tensor
            values = array.array("f", raw[begin:end])
            change(values)
            raw[begin:end] = values.tobytes()
        file.write_bytes(raw)


def scale(factor):
    def change(values):
        values[:] = array.array("f", (value * factor for value in values))
    return change


def set_first(value):
    def change(values):
        values[0] = value
    return change


class HfTest(FerryTest):
    def config_for(self, path, **changes):
        config = self.config(**{"batch__sequence": 24, "steps": 3, "data__tokens": str(TOKENS), **changes})
        config["model"] = {"path": str(path), "dropout": "ignore", **changes.get("model", {})}
        return config

    def copy_of(self, family):
        """A model that a test may spoil."""
        path = self.path(f"{family}{len(os.listdir(self.dir))}")
        shutil.copytree(MODELS / family, path)
        return pathlib.Path(path)

    @staticmethod
    def change(path, **changes):
        """Of config.json; None removes a key."""
        config = json.loads((path / "config.json").read_text())
        config.update(changes)
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


class RoundTripTest(HfTest):
    def test_a_model_that_does_not_move_is_exported_as_it_was(self):
        for family in FAMILIES:
            with self.subTest(family):
                out = self.path(f"still-{family}")
                run = self.train(self.config_for(MODELS / family, steps=1, optimizer={"lr": 0}), "--export", out)
                self.assert_trained(run)
                self.assertEqual(read_tensors(out), read_tensors(MODELS / family))
                was = json.loads((MODELS / family / "config.json").read_text())
                self.assertEqual(json.loads(pathlib.Path(out, "config.json").read_text()), was)

    def test_what_was_trained_comes_back_bit_for_bit(self):
        for family in FAMILIES:
            with self.subTest(family):
                first, second = self.path(f"first-{family}"), self.path(f"second-{family}")
                weights = self.path(f"weights-{family}")
                moved = self.train(self.config_for(MODELS / family), "--export", first, "--weights-out", weights,
                                   "--shard-size", "10KB")
                self.assert_trained(moved)
                self.assertNotEqual(read_tensors(first), read_tensors(MODELS / family))
                self.assertEqual(read_tensors(first), read_tensors(weights))
                self.assertIn("model.safetensors.index.json", os.listdir(first))
                again = self.train(self.config_for(first, steps=1, optimizer={"lr": 0}), "--export", second)
                self.assert_trained(again)
                self.assertEqual(read_tensors(second), read_tensors(first))

    def test_where_the_state_lies_changes_no_bit(self):
        for family in ("llama", "gpt2"):
            near = self.train(self.config_for(MODELS / family))
            far = self.train(self.config_for(MODELS / family, budgets={
                "host": "1MiB", "nvme": [self.nvme()]}, swap={"state_on_nvme": 1, "chunk_elements": 4096}))
            self.assert_trained(near)
            self.assert_trained(far)
            self.assertEqual(near.numbers(), far.numbers())

    def test_random_weights_depend_on_the_seed_alone(self):
        hashes = set()
        for seed in (1, 1, 2):
            run = self.train(self.config_for(MODELS / "qwen3", seed=seed, model={"load": False}))
            self.assert_trained(run)
            hashes.add(run.hashes[-1])
        self.assertEqual(len(hashes), 2)

    def test_export_in_another_type_and_from_saved_weights(self):
        weights, config = self.path("weights"), self.config_for(MODELS / "qwen2")
        self.assert_trained(self.train(config, "--weights-out", weights))
        out = self.path("narrow")
        name = self.path("narrow.json")
        pathlib.Path(name).write_text(json.dumps(config))
        done = self.ferry("export", name, weights, out, "--export-type", "bf16")
        self.assertEqual(done.code, 0, done.err)
        exported, wide = read_tensors(out), read_tensors(weights)
        self.assertEqual(exported.keys(), wide.keys())
        for tensor, (dtype, shape, data) in exported.items():
            self.assertEqual((dtype, shape, 2 * len(data)), ("BF16", wide[tensor][1], len(wide[tensor][2])))
        self.assertEqual(json.loads(pathlib.Path(out, "config.json").read_text())["dtype"], "bfloat16")
        back = self.path("narrow-again")
        run = self.train(self.config_for(out, steps=1, optimizer={"lr": 0}), "--export", back, "--export-type", "bf16")
        self.assert_trained(run)
        self.assertEqual(read_tensors(back), exported)

    def test_ferrys_own_models_are_exported_as_llamas(self):
        out = self.path("own")
        run = self.train(self.config(steps=2), "--export", out)
        self.assert_trained(run)
        again = self.train({**self.config(steps=1, optimizer={"lr": 0}), "model": {"path": out}},
                           "--export", self.path("own-again"))
        self.assert_trained(again)
        self.assertEqual(read_tensors(out), read_tensors(self.path("own-again")))

    def test_smaller_state_and_muon_export_the_master(self):
        """Of whatever halves it is kept in and wherever they lie; a matrix of 64 by 64 has codes."""
        tight = {"budgets": {"host": "1MiB", "nvme": [self.nvme()]}, "swap": {"state_on_nvme": 1}}
        optimizers = ({"moments": "int8"}, {"moments": "int8", "master": "split"},
                      {"method": "muon"}, {"method": "muon", "moments": "int8", "master": "split"})
        for number, optimizer in enumerate(optimizers):
            with self.subTest(**optimizer):
                kind = {"precision": "fp16" if number < 2 else "bf16", "steps": 2,
                        "optimizer": {"lr": 0.01, **optimizer}}
                exported = []
                for place in ({}, tight):
                    out = self.path(f"state{number}-{len(exported)}")
                    self.assert_trained(self.train(self.config(**kind, **place), "--export", out,
                                                   "--export-type", "fp32"))
                    exported.append(read_tensors(out))
                self.assertEqual(*exported)
                again = self.train({**self.config(steps=1, optimizer={"lr": 0}), "model": {"path": out}},
                                   "--export", self.path(f"state{number}-again"))
                self.assert_trained(again)
                self.assertEqual(read_tensors(self.path(f"state{number}-again")), exported[0])

    def test_the_tokenizer_travels(self):
        model = self.copy_of("llama")
        (model / "tokenizer.json").write_text("{}")
        (model / "notes.txt").write_text("stay")
        self.assert_trained(self.train(self.config_for(model), "--export", self.path("with-tokenizer")))
        self.assertIn("tokenizer.json", os.listdir(self.path("with-tokenizer")))
        self.assertNotIn("notes.txt", os.listdir(self.path("with-tokenizer")))

    def export_while(self, model, change):
        """A run whose model's directory is changed after some of its steps; what it said, and its export."""
        out = self.path(f"export{len(os.listdir(self.dir))}")
        command = self.command(self.config_for(model, steps=100000), "--export", out)
        process = start([FERRY, *command])
        process.stdout.readline()
        change()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, err)
        self.assertEqual(read_tensors(out).keys(), read_tensors(MODELS / "qwen2").keys())
        return err, pathlib.Path(out)

    def test_what_is_exported_is_what_was_trained(self):
        """The model's directory is another's when the run ends, or gone."""
        was = json.loads((MODELS / "qwen2" / "config.json").read_text())
        for name, change in (("edited", lambda model: self.change(model, rope_theta=777, rms_norm_eps=0.5)),
                             ("removed", lambda model: os.remove(model / "config.json")),
                             ("no directory", shutil.rmtree)):
            with self.subTest(name):
                model = self.copy_of("qwen2")
                _, out = self.export_while(model, lambda model=model, change=change: change(model))
                self.assertEqual(json.loads((out / "config.json").read_text()), was)

    def test_a_tokenizer_is_exported_as_it_was_at_the_start(self):
        files = {"tokenizer.json": b'{"a": 1}', "tokenizer.model": b"\0\xff" * 70000,
                 "generation_config.json": b"{}", "chat_template.jinja": b""}
        def edit(file):
            file.write_bytes(b"another's")
        def rename(file):
            file.with_suffix(".new").write_bytes(b"another's")
            os.rename(file.with_suffix(".new"), file)
        def all_of(change, model):
            for name in files:
                change(model / name)
        for change in (edit, rename, os.remove):
            with self.subTest(change=change.__name__):
                model = self.copy_of("qwen2")
                for name, was in files.items():
                    (model / name).write_bytes(was)
                err, out = self.export_while(model, lambda change=change, model=model: all_of(change, model))
                self.assertNotIn("the export has no", err)
                self.assertEqual({name: (out / name).read_bytes() for name in files}, files)

    def test_a_tokenizer_that_cannot_be_written_costs_no_weights(self):
        model = self.copy_of("qwen2")
        (model / "tokenizer.json").write_bytes(b"x" * 30_000_000)
        (model / "vocab.json").write_text("{}")
        out = pathlib.Path(self.path("small-disk"))
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))
        run = self.train(self.config_for(model), "--export", str(out), preexec_fn=limit)
        self.assert_trained(run)
        self.assertIn("the export has no tokenizer.json", run.err)
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors", "vocab.json"])

    def test_a_tokenizer_that_cannot_be_read_is_refused_before_the_run(self):
        model = self.copy_of("qwen2")
        (model / "tokenizer.json").write_bytes(b"")
        os.truncate(model / "tokenizer.json", 300_000_000)
        run = self.train(self.config_for(model), "--export", self.path("no-tokenizer"))
        self.assertEqual(run.code, USAGE, run.err)
        for text in ("belongs into the export", str(model / "tokenizer.json"), "300000000 bytes", "256.00 MiB"):
            self.assertIn(text, run.err)
        self.assertEqual(run.steps, [])
        self.assertFalse(os.path.exists(self.path("no-tokenizer")))

    def test_a_tokenizer_that_is_no_file_is_refused_before_the_run(self):
        def dangling(path):
            os.symlink("../../blobs/gone", path)
        for name, make in (("tokenizer.json", dangling), ("merges.txt", os.mkfifo), ("vocab.json", os.mkdir),
                           ("tokenizer.model", lambda path: os.symlink("/dev/null", path))):
            model = self.copy_of("qwen2")
            make(model / name)
            with self.subTest(name=name):
                run = self.train(self.config_for(model), "--export", self.path("no-tokenizer"))
                self.assertEqual(run.code, USAGE, run.err)
                for text in ("belongs into the export", str(model / name)):
                    self.assertIn(text, run.err)
                self.assertEqual(run.steps, [])
                self.assertFalse(os.path.exists(self.path("no-tokenizer")))

    def test_names_without_the_base_models_prefix(self):
        model = self.copy_of("gpt2")
        file = model / "model.safetensors"
        raw = file.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = raw[8:8 + length].decode().replace('"transformer.', '"').ljust(length).encode()
        file.write_bytes(raw[:8] + header + raw[8 + length:])
        plain = self.train(self.config_for(MODELS / "gpt2"))
        bare = self.train(self.config_for(model))
        self.assert_trained(bare)
        self.assertEqual(bare.numbers(), plain.numbers())


class IdsTest(HfTest):
    """Token files of ids that a tokenizer made."""

    def ids(self, kind, values):
        file = self.path(f"ids{len(os.listdir(self.dir))}")
        pathlib.Path(file).write_bytes(struct.pack(f"<{len(values)}{kind}", *values))
        return file

    def test_they_arrive_as_they_are(self):
        values = [(i * i * 7 + i) % 67 for i in range(400)]
        out = self.path("of-ids.bin")
        runs = []
        for name, kind in (("uint16", "H"), ("uint32", "I")):
            done = self.ferry("data", self.ids(kind, values[:100]), self.ids(kind, values[100:]), "-o", out,
                              "--ids", name, "--vocab", "67", "--json")
            self.assertEqual(done.code, 0, done.err)
            self.assertEqual((done.lines[0]["tokens"], done.lines[0]["vocabulary"]), (400, 67))
            self.assertEqual(list(pathlib.Path(out).read_bytes()[64:]), values)
            runs.append(self.train(self.config_for(MODELS / "llama", data__tokens=out)))
            self.assert_trained(runs[-1])
            self.assertNotIn("vocabulary", runs[-1].err)
        self.assertEqual(runs[0].numbers(), runs[1].numbers())
        wide = self.ferry("data", self.ids("I", [70000, 3, 99999]), "-o", out, "--ids", "uint32", "--vocab", "100000")
        self.assertEqual(wide.code, 0, wide.err)
        self.assertEqual(struct.unpack("<3I", pathlib.Path(out).read_bytes()[64:]), (70000, 3, 99999))

    def test_masks_are_one_byte_an_id(self):
        mask, out = self.path("ids.mask"), self.path("masked-ids.bin")
        pathlib.Path(mask).write_text("0110")
        done = self.ferry("data", self.ids("H", [5, 6, 7, 8]), "-o", out, "--ids", "uint16", "--vocab", "9", "--mask",
                          mask, "--json")
        self.assertEqual(done.code, 0, done.err)
        self.assertEqual(done.lines[0]["masked"], 2)

    def test_the_first_of_a_document_is_no_target(self):
        out, mask = self.path("documents.bin"), self.path("documents.mask")
        pathlib.Path(mask).write_text("0100000")
        files = []
        for name, values in (("one", [5, 6, 7]), ("two", [8]), ("three", [1, 2, 3])):
            files.append(self.path(name))
            pathlib.Path(files[-1]).write_bytes(struct.pack(f"<{len(values)}H", *values))
        for arguments, marks in (((), b""), (("--documents",), b"\1\0\0\1\1\0\0"),
                                 (("--documents", "--mask", mask), b"\1\1\0\1\1\0\0")):
            done = self.ferry("data", *files, "-o", out, "--ids", "uint16", "--vocab", "9", "--json", *arguments)
            self.assertEqual(done.code, 0, done.err)
            self.assertEqual(done.lines[0]["masked"], sum(marks))
            behind = pathlib.Path(out).read_bytes()[64 + 7:]
            self.assertEqual(behind[:len(marks)], marks)
            # Where documents begin lies at the end.
            starts = struct.pack("<3q", 0, 3, 4) if marks else b""
            self.assertEqual(behind[len(marks):].lstrip(b"\0"), starts.lstrip(b"\0"))

    def test_what_is_not_ids(self):
        out, file = self.path("no-ids.bin"), self.ids("H", [1, 2, 70])
        for arguments, said in ((["--ids", "uint16"], "--vocab"), (["--vocab", "67"], "--ids"),
                                (["--ids", "int8", "--vocab", "67"], "--ids"),
                                (["--ids", "uint16", "--vocab", "0"], "--vocab"),
                                (["--ids", "uint32", "--vocab", "67"], "ends inside an id"),
                                (["--ids", "uint16", "--vocab", "67"], "70 at 2")):
            done = self.ferry("data", file, "-o", out, *arguments)
            self.assertEqual(done.code, USAGE, done.err)
            self.assertIn(said, done.err)
            self.assertFalse(os.path.exists(out))

    def test_tokens_of_another_tokenizer_are_refused_unless_insisted_on(self):
        out = self.path("bytes-for-a-model.bin")
        small = self.ids("H", [i % 30 for i in range(400)])
        self.assertEqual(self.ferry("data", small, "-o", out, "--ids", "uint16", "--vocab", "30").code, 0)
        config = self.config_for(MODELS / "llama", data__tokens=out)
        run = self.train(config)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("a vocabulary of 30, where the model's has 67", run.err)
        # A plan says it too, and needs no tokens.
        planned = ("plan", self.command(config)[1], "--no-prediction")
        self.assertEqual(self.ferry(*planned).code, USAGE)
        self.assertNotIn("tokens not checked", self.ferry(*planned, "--set", "data.small_vocabulary=ignore").out)
        absent = self.ferry(*planned, "--set", "data.tokens=not-there.bin")
        self.assertEqual(absent.code, 0, absent.err)
        self.assertIn("tokens not checked: not-there.bin is not there yet", absent.out)
        self.assert_trained(self.train(config, "--set", "data.small_vocabulary=ignore"))
        if not shutil.which("mpirun"):
            return
        ranks = self.train(config, "--set", "data.small_vocabulary=ignore", "--set", "batch.micro_batches=2",
                           through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assert_trained(ranks)
        self.assertEqual(ranks.err.count("a vocabulary of 30"), 1, ranks.err)

    def test_documents_have_positions_of_their_own(self):
        ids = self.ids("H", [i % 60 for i in range(4000)])
        tokens = self.path("documents.bin")
        made = self.ferry("data", ids, "-o", tokens, "--ids", "uint16", "--vocab", "67", "--separator", "59")
        self.assertEqual(made.code, 0, made.err)
        config = self.config_for(MODELS / "qwen3", batch__sequence=120, data__tokens=tokens)
        config["data"]["isolate_documents"] = True
        run = self.train(config)
        self.assert_trained(run)
        self.assertIn("a longer document would reach positions", run.err)
        config["data"]["isolate_documents"] = False
        self.assertEqual(self.train(config).code, USAGE)

    def test_sequences_longer_than_the_models_are_warned_of_once(self):
        run = self.train(self.config_for(MODELS / "llama", batch__sequence=100))
        self.assert_trained(run)
        self.assertEqual(run.err.count("batch.sequence is 100, but the model was made for 96 tokens"), 1, run.err)


class PaddingTokenTest(HfTest):
    """Plain gradient descent: what has no gradient stays, bit for bit."""

    def row_after_a_step(self, family, pad, **changes):
        model = self.copy_of(family)
        self.change(model, pad_token_id=pad)
        out = self.path(f"padded{len(os.listdir(self.dir))}")
        sgd = {"method": "sgd", "lr": 1, "weight_decay": 0}
        self.assert_trained(self.train(self.config_for(model, steps=1, optimizer=sgd, **changes), "--export", out))
        values = read_tensors(out)["model.embed_tokens.weight"]
        row = len(values[2]) // values[1][0]
        return values[2][self.PAD * row:(self.PAD + 1) * row]

    PAD = 1  # often in the text

    def test_its_row_learns_nothing_from_inputs(self):
        was = self.row_after_a_step("llama", self.PAD, freeze=["model.embed_tokens.*"])
        self.assertNotEqual(self.row_after_a_step("llama", None), was)
        self.assertEqual(self.row_after_a_step("llama", self.PAD), was)
        self.assertEqual(self.row_after_a_step("llama", self.PAD, swap={"groups": 2}), was)

    def test_a_tied_row_learns_from_the_head_alone(self):
        was = self.row_after_a_step("qwen2", self.PAD, freeze=["model.embed_tokens.*"])
        head = self.row_after_a_step("qwen2", self.PAD)
        self.assertNotEqual(head, was)
        self.assertNotEqual(head, self.row_after_a_step("qwen2", None))

    def test_it_is_part_of_the_identity(self):
        model = self.copy_of("llama")
        plain = self.train(self.config_for(model))
        self.change(model, pad_token_id=self.PAD)
        self.assertNotEqual(self.train(self.config_for(model)).hashes, plain.hashes)


class EvalTest(HfTest):
    def test_loss_and_perplexity(self):
        for family in FAMILIES:
            with self.subTest(family):
                done = self.ferry("eval", str(MODELS / family), str(TOKENS), "--set", "batch.sequence=72", "--json")
                self.assertEqual(done.code, 0, done.err)
                found = done.lines[-1]
                golden = json.loads((MODELS / f"{family}.eval.json").read_text())
                self.assertEqual(found["targets"], golden["targets"])
                self.assertAlmostEqual(found["loss"] / golden["loss"], 1, delta=1e-6)
                self.assertAlmostEqual(found["perplexity"] / golden["perplexity"], 1, delta=1e-5)

    def test_micro_batches_and_tiers_change_nothing(self):
        losses = set()
        for more in ([], ["--set", "budgets.host=2MiB", "--set", "batch.micro_batch=1"]):
            done = self.ferry("eval", str(MODELS / "llama"), str(TOKENS), "--json", "--set", "batch.sequence=48", *more)
            self.assertEqual(done.code, 0, done.err)
            losses.add(round(done.lines[-1]["loss"], 6))
        self.assertEqual(len(losses), 1)

    def logits_of(self, model, *arguments):
        """Shape and values that `ferry eval --logits` wrote."""
        file = self.path(f"logits{len(os.listdir(self.dir))}")
        done = self.ferry("eval", str(model), str(TOKENS), "--logits", file, *arguments)
        self.assertEqual(done.code, 0, done.err)
        dtype, shape, data = read_tensors(file)["logits"]
        self.assertEqual(dtype, "F32")
        return shape, array.array("f", data)

    def test_logits_are_those_of_transformers(self):
        golden = read_tensors(MODELS / "logits.safetensors")
        variants = json.loads((MODELS / "variants.json").read_text())
        self.assertEqual(set(golden), set(FAMILIES) | set(variants))
        for name, (_, (rows, vocab), data) in golden.items():
            with self.subTest(name):
                model = MODELS / name
                if name in variants:
                    model = self.copy_of(variants[name]["of"])
                    self.change(model, **variants[name]["changes"])
                shape, found = self.logits_of(model, "--set", "batch.sequence=72", "--set", "numerics.head_tile=50")
                self.assertEqual(shape, [1, 72, vocab])
                wanted = array.array("f", data)
                largest, every = max(map(abs, wanted)), 72 // rows
                for row in range(rows):
                    for column in range(vocab):
                        self.assertAlmostEqual(found[row * every * vocab + column], wanted[row * vocab + column],
                                               delta=1e-5 * largest, msg=f"token {row * every}, {column}")

    def test_logits_of_several_sequences(self):
        one = self.logits_of(MODELS / "llama", "--set", "batch.sequence=24")
        shape, found = self.logits_of(MODELS / "llama", "--set", "batch.sequence=24", "--logits-sequences", "5",
                                      "--set", "batch.micro_batch=2")
        self.assertEqual(shape, [5, 24, 67])
        for near, far in zip(one[1], found):
            self.assertAlmostEqual(near, far, delta=1e-5)
        last = found[4 * 24 * 67:]
        self.assertGreater(max(map(abs, last)), 0.1)

    def test_logits_that_cannot_be_had(self):
        model, out = str(MODELS / "llama"), self.path("never")
        for arguments, said in ((["--logits", out, "--logits-sequences", "100000"], ["too many", "100000", "or fewer"]),
                                (["--logits", "/nowhere/at/all"], ["--logits", "/nowhere/at/all"]),
                                (["--logits", str(TOKENS)], ["another kind"])):
            done = self.ferry("eval", model, str(TOKENS), "--set", "batch.sequence=24", *arguments)
            self.assertEqual(done.code, USAGE, done.err)
            for text in said:
                self.assertIn(text, done.err)
        self.assertFalse(os.path.exists(out))

    def test_results_do_not_replace_the_model(self):
        model = self.path("model")
        shutil.copytree(MODELS / "gpt2", model)
        weights = os.path.join(model, "model.safetensors")
        before = pathlib.Path(weights).read_bytes()
        for done in (self.ferry("eval", model, str(TOKENS), "--set", "batch.sequence=24", "--logits", weights),
                     self.train(self.config_for(model), "--weights-out", weights)):
            self.assertEqual(done.code, USAGE, done.err)
            self.assertIn("among the files of the model", done.err)
        self.assertEqual(pathlib.Path(weights).read_bytes(), before)

    def test_a_loss_that_is_not_finite_is_an_error_that_names_the_layer(self):
        logits = self.path("no-logits")
        for family, tensor, change, precision, said in (
                ("qwen3", "model.layers.1.mlp.down_proj.weight", set_first(float("nan")), "fp32", ["block 1, forward"]),
                ("llama", "model.embed_tokens.weight", scale(float("inf")), "bf16", ["block 0, forward"]),
                ("gpt2", "transformer.ln_f.weight", set_first(float("nan")), "fp32", ["the head and loss"]),
                ("qwen3", ".weight", scale(3000), "fp16", ["65,504", "bf16"])):
            with self.subTest(family + tensor):
                model = self.copy_of(family)
                spoil(model, tensor, change)
                done = self.ferry("eval", str(model), str(TOKENS), "--set", "batch.sequence=24", "--set",
                                  f"precision={precision}", "--json", "--logits", logits)
                self.assertEqual(done.code, DIVERGED, done.err)
                for text in ["evaluation is not finite", *said]:
                    self.assertIn(text, done.err)
                self.assertEqual(done.out, "")
                self.assertFalse(os.path.exists(logits))

    def test_held_back_loss_that_is_not_finite_ends_the_training(self):
        model = self.copy_of("llama")
        spoil(model, "model.layers.0.mlp.up_proj.weight", set_first(float("inf")))
        run = self.train(self.config_for(model, data__held_back=0.5, evaluate={"every": 1, "micro_batches": 2},
                                         batch__micro_batch=1))
        self.assertEqual(run.code, DIVERGED, run.err)
        self.assertIn("block 0, forward", run.err)
        self.assertEqual(run.evaluations, [])

    def test_a_run_of_skipped_steps_says_that_it_trained_nothing(self):
        model = self.copy_of("llama")
        for value, said in ((float("inf"), True), (0.5, False)):
            spoil(model, "model.norm.weight", set_first(value))
            run = self.train(self.config_for(model, on_nonfinite="skip"))
            self.assert_trained(run)
            self.assertEqual(run.summary["skipped_steps"], 3 if said else 0)
            self.assertEqual("nothing was trained: every step was skipped" in run.err, said, run.err)

    def test_text_without_a_target(self):
        count = 200
        text, mask = self.path("few.txt"), self.path("few.mask")
        pathlib.Path(text).write_text("a" * count)
        pathlib.Path(mask).write_text("0" * 100 + "1" * 100)
        tokens = self.path("few.bin")
        self.assertEqual(self.ferry("data", text, "-o", tokens, "--mask", mask).code, 0)
        run = self.train(self.config(data__tokens=tokens, data__held_back=0.5, batch__sequence=8,
                                     evaluate={"every": 1, "micro_batches": 2}))
        self.assertEqual(run.code, USAGE, run.err)
        self.assertEqual(run.steps, [])
        self.assertIn("masked", run.err)
        pathlib.Path(mask).write_text("1" * count)
        self.assertEqual(self.ferry("data", text, "-o", tokens, "--mask", mask).code, 0)
        model = self.path("own-for-eval")
        self.assert_trained(self.train(self.config(steps=1), "--export", model))
        done = self.ferry("eval", model, tokens, "--set", "batch.sequence=8")
        self.assertEqual(done.code, USAGE, done.err)
        self.assertIn("every token to evaluate on is masked", done.err)
        self.assertEqual(done.out, "")

    def test_what_cannot_be_evaluated(self):
        for arguments, said in ((["nowhere", str(TOKENS)], "config.json"),
                                ([str(MODELS / "llama"), "nowhere"], "token file"),
                                ([str(MODELS / "llama"), str(TOKENS), "--set", "batch.sequence=100000"],
                                 "shorter than one sequence")):
            done = self.ferry("eval", *arguments)
            self.assertEqual(done.code, USAGE, done.err)
            self.assertIn(said, done.err)


class RefusedTest(HfTest):
    def refused(self, path, code, *said, **changes):
        run = self.train(self.config_for(path, **changes))
        self.assertEqual(run.code, code, run.err)
        for text in said:
            self.assertIn(text, run.err)

    def test_families_and_options(self):
        for change, said in (
                ({"model_type": "mamba"}, ["model_type", "mamba", "llama, mistral, qwen2, qwen3, gpt2"]),
                ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
                ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["short_factor", "3 numbers"]),
                ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, ["axial", "longrope", "yarn"]),
                ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["factor"]),
                ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
                ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
                ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
                ({"hidden_size": None}, ["hidden_size", "missing"]),
                ({"vocab_size": -4}, ["vocab_size", "-4"])):
            model = self.copy_of("llama")
            self.change(model, **change)
            with self.subTest(str(change)):
                self.refused(model, USAGE, "config.json", *said)

    def test_a_deviation_of_zero_is_for_weights_that_are_there(self):
        model = self.copy_of("llama")
        self.change(model, initializer_range=0)
        self.refused(model, USAGE, "initializer_range", "would all be 0", model={"load": False})
        run = self.train(self.config_for(model))
        self.assert_trained(run)
        self.assertEqual(run.numbers(), self.train(self.config_for(MODELS / "llama")).numbers())

    def test_dropout_must_be_ignored_in_so_many_words(self):
        self.refused(MODELS / "gpt2", USAGE, "dropout", "ignore", model={"dropout": "refuse"})

    def test_text_longer_than_learned_positions(self):
        self.refused(MODELS / "gpt2", USAGE, "batch.sequence", "positions", "80", batch__sequence=81)

    def test_text_longer_than_rope_without_scaling(self):
        said = ("batch.sequence", "its RoPE has no scaling", "97", "96", "max_position_embeddings")
        self.refused(MODELS / "qwen3", USAGE, *said, batch__sequence=97)
        self.assert_trained(self.train(self.config_for(MODELS / "qwen3", batch__sequence=96)))
        model = self.copy_of("qwen3")
        proportional = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        self.change(model, rope_parameters=proportional)
        self.refused(model, USAGE, *said, batch__sequence=97)
        # Scaled, or made for longer text after all.
        for changes in ({"rope_parameters": {**proportional, "factor": 2.0}},
                        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
                        {"max_position_embeddings": 97}):
            model = self.copy_of("qwen3")
            self.change(model, **changes)
            run = self.train(self.config_for(model, batch__sequence=97))
            self.assert_trained(run)
            self.assertEqual("was made for 96 tokens" in run.err, "rope_parameters" in changes, run.err)

    def test_the_longest_sequence_ends_with_what_rope_knows(self):
        model = self.copy_of("qwen3")
        self.change(model, max_position_embeddings=2500)
        plan = self.ferry("plan", self.command(self.config_for(model))[1], "--no-prediction", "--longest-sequence")
        self.assertEqual(plan.code, 0, plan.err)
        self.assertIn("longest sequence that fits: 2048 tokens", plan.out)

    def test_weights_of_another_model(self):
        model = self.copy_of("llama")
        self.change(model, intermediate_size=48)
        self.refused(model, USAGE, "shape", "gate_proj", "[40, 24]", "[48, 24]")
        model = self.copy_of("llama")
        self.change(model, num_hidden_layers=3)
        self.refused(model, USAGE, "lack a tensor", "model.layers.2.")
        model = self.copy_of("llama")
        self.change(model, num_hidden_layers=1)
        self.refused(model, USAGE, "does not have", "model.layers.1.")
        model = self.copy_of("qwen3")
        raw = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(raw[:-5])
        self.refused(model, IO, "truncated")

    def test_a_head_beside_tied_embeddings(self):
        model = self.copy_of("qwen2")
        file = model / "model.safetensors"
        tensors = read_tensors(file)
        dtype, shape, values = tensors["model.embed_tokens.weight"]
        plain = self.train(self.config_for(model))
        write_tensors(file, {**tensors, "lm_head.weight": (dtype, shape, values)})
        same = self.train(self.config_for(model))
        self.assert_trained(same)
        self.assertEqual(same.numbers(), plain.numbers())
        last = array.array("f", values)
        last[-1] += 1
        for table, said in (((dtype, shape, last.tobytes()), ["tied", f"element {len(last) - 1} is"]),
                            ((dtype, [shape[0], shape[1] // 2], values[:len(values) // 2]), ["shape"]),
                            (("I16", [5], b"0123456789"), ["shape", "[5]"]),
                            (("I32", shape, values), ["type", "I32"])):
            write_tensors(file, {**tensors, "lm_head.weight": table})
            with self.subTest(said):
                self.refused(model, USAGE, "lm_head.weight", *said)

    def test_a_shape_beside_a_directory(self):
        self.refused(MODELS / "llama", USAGE, "model.hidden", "leave one of them out", model={"hidden": 24})

    def test_an_export_that_fp16_has_no_room_for_leaves_nothing(self):
        model = self.copy_of("qwen3")
        spoil(model, "model.layers.1.mlp.down_proj.weight", set_first(-7e4))
        out, config = self.path("no-room"), self.path("no-room.json")
        pathlib.Path(config).write_text(json.dumps(self.config_for(MODELS / "qwen3")))
        weights = str(model / "model.safetensors")
        for more in ([], ["--shard-size", "4KB"]):
            done = self.ferry("export", config, weights, out, "--export-type", "fp16", *more)
            self.assertEqual(done.code, USAGE, done.err)
            for text in ("model.layers.1.mlp.down_proj.weight", "-70000", "65504", "--export-type"):
                self.assertIn(text, done.err)
            self.assertFalse(os.path.exists(out))
        done = self.ferry("export", config, weights, out, "--export-type", "bf16")
        self.assertEqual(done.code, 0, done.err)

    def test_an_export_that_cannot_be_leaves_no_directory(self):
        out, config = self.path("nothing"), self.path("nothing.json")
        pathlib.Path(config).write_text(json.dumps(self.config_for(MODELS / "qwen3")))
        for weights in (self.path("no-weights"), str(MODELS / "llama")):
            done = self.ferry("export", config, weights, out)
            self.assertEqual(done.code, USAGE, done.err)
            self.assertFalse(os.path.exists(out))
        run = self.train(self.config_for(self.path("no-model")), "--export", out)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertFalse(os.path.exists(out))
        os.mkdir(out)  # the user's own stays
        self.assertEqual(self.ferry("export", config, self.path("no-weights"), out).code, USAGE)
        self.assertTrue(os.path.isdir(out))

    def test_options_of_an_export_ask_for_one(self):
        for option in (["--export-type", "bf16"], ["--shard-size", "1GB"]):
            run = self.train(self.config_for(MODELS / "llama"), *option)
            self.assertEqual(run.code, USAGE, run.err)
            self.assertIn("--export", run.err)
            self.assertEqual(run.steps, [])
        run = self.train(self.config_for(MODELS / "llama"), "--export", self.path("sizeless"), "--shard-size", "0")
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("--shard-size", run.err)

    def test_exports_never_replace_anything(self):
        taken = self.path("taken")
        os.mkdir(taken)
        pathlib.Path(taken, "thesis.txt").write_text("x")
        run = self.train(self.config_for(MODELS / "llama"), "--export", taken)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertEqual(run.steps, [])
        self.assertIn("not empty", run.err)
        self.assertEqual(os.listdir(taken), ["thesis.txt"])


if __name__ == "__main__":
    unittest.main()
