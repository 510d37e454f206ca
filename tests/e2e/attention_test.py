"""What attention sees: patterns of blocks and isolated documents, as a user asks for them. Offloading changes no number of
such a run, and documents packed into rows train as those that have a row each."""

import random
import struct
import unittest
from pathlib import Path

from harness import DOES_NOT_FIT, IO, USAGE, FerryTest

SEQUENCE = 320  # five blocks of 64
PATTERNS = {
    "window": {"pattern": "window", "num_sliding_window_blocks": 3},
    "fixed": {"pattern": "fixed", "block": 32, "num_local_blocks": 4, "different_layout_per_head": True,
              "num_different_global_patterns": 2},
    "bigbird": {"pattern": "bigbird", "num_random_blocks": 1, "different_layout_per_layer": True},
    "longformer": {"pattern": "bslongformer", "num_sliding_window_blocks": 1, "global_block_indices": [0, 2],
                   "layers": [0, 2]},
    "variable": {"pattern": "variable", "block": 16, "attention": "bidirectional", "local_window_blocks": [2, 3],
                 "horizontal_global_attention": True},
}


def layout_bytes(cells, block=64, layers=1, heads=1, rows=None, columns=None):
    """A layout's file of rows of '#' and '.', layout after layout."""
    side = len(cells) // (layers * heads)
    header = struct.pack("<6I", 1, block, layers, heads, side if rows is None else rows,
                         len(cells[0]) if columns is None else columns)
    return b"FERRYLAY" + header + bytes(int(cell == "#") for row in cells for cell in row)


class AttentionTest(FerryTest):
    BATCH = {"sequence": SEQUENCE, "micro_batch": 1, "micro_batches": 2}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with open(cls.path("text.txt"), "rb") as file:
            text = file.read()
        # Sentences, of which most end within a row.
        made = cls.ferry("data", cls.path("text.txt"), "--separator", str(ord("\n")), "-o", cls.path("documents.bin"))
        assert made.code == 0, made.err
        cls.sentences = text.count(b"\n") + (0 if text.endswith(b"\n") else 1)
        cls.made = made.out

    def masked(self, attention=None, **changes):
        return self.config(**{"batch": dict(self.BATCH), "steps": 4, **({"attention": attention} if attention else {}),
                              **changes})

    DOCUMENTS = {"data__isolate_documents": True}

    def documents(self, **changes):
        return {**self.DOCUMENTS, "data__tokens": self.path("documents.bin"), **changes}

    def refused(self, code, words, config, **options):
        run = self.train(config, **options)
        self.assertEqual(run.code, code, run.err)
        for word in words:
            self.assertIn(word, run.err)
        self.assertEqual(run.err.count("ferry: "), 1, run.err)

    # ---------------------------------------------------------------- numbers

    def test_offloading_changes_no_number(self):
        tight = {"budgets__device": "2500KiB", "budgets__host": "400KiB", "budgets__nvme": [self.nvme()],
                 "clip_norm": 1.5}
        cases = [(name, {}) for name in PATTERNS] + [(None, self.documents()), ("fixed", self.documents())]
        found = set()
        for name, changes in cases:
            with self.subTest(pattern=name, documents=bool(changes)):
                attention = PATTERNS.get(name)
                here = self.train(self.masked(attention, clip_norm=1.5, evaluate__micro_batches=1, **changes))
                self.assert_trained(here)
                there = self.train(self.masked(attention, evaluate__micro_batches=1, **{**changes, **tight}))
                self.assert_trained(there)
                self.assertGreater(there.lane("nvme read"), 0)
                self.assertEqual(here.numbers(), there.numbers())
                self.assertEqual([line["evaluation_loss"] for line in here.evaluations],
                                 [line["evaluation_loss"] for line in there.evaluations])
                threads = self.train(self.masked(attention, clip_norm=1.5, threads=2, **changes))
                self.assertEqual(here.numbers(), threads.numbers())
                # Each trains in its own way; short documents lie within a window of "fixed".
                if not (name and changes):
                    self.assertNotIn(here.hashes[0], found)
                found.add(here.hashes[0])

    def test_memory_to_spare_changes_no_number(self):
        """What plans are made by is measured in that memory, which has the lists of blocks already."""
        for name in ("window", "fixed"):
            here = self.train(self.masked(PATTERNS[name]))
            self.assert_trained(here)
            for device in ("64MiB", "1GiB"):
                config = self.command(self.masked(PATTERNS[name], budgets__device=device))[1]
                there = self.ferry("train", config, "--json")  # with its bound, which is measured too
                self.assert_trained(there)
                self.assertEqual(here.numbers(), there.numbers())
        profile = self.ferry("bench", "kernels", "--config", self.command(self.masked(PATTERNS["fixed"]))[1], "--json")
        self.assertEqual(profile.code, 0, profile.err)

    def test_a_pattern_that_has_every_block_changes_no_number(self):
        dense = self.train(self.masked())
        self.assert_trained(dense)
        wide = self.train(self.masked({"pattern": "window", "num_sliding_window_blocks": 999}))
        self.assertEqual(dense.numbers(), wide.numbers())

    def test_saved_attention_and_groups_change_no_number(self):
        changes = self.documents()
        plain = self.train(self.masked(PATTERNS["bigbird"], **changes))
        self.assert_trained(plain)
        for swap in ({"save_attention": 3, "save_mlp": 3, "save_projections": 3}, {"groups": 2}):
            self.assertEqual(self.train(self.masked(PATTERNS["bigbird"], swap=swap, **changes)).numbers(),
                             plain.numbers())

    def test_resumed_runs_go_on_with_the_same_bits(self):
        where = {"checkpoint__dir": self.path("saved"), "checkpoint__every": 2}
        config = self.masked(PATTERNS["fixed"], **self.documents(steps=6))
        whole = self.train(config)
        self.assert_trained(whole)
        short = self.masked(PATTERNS["fixed"], **self.documents(steps=4, schedule__total_steps=6, **where))
        self.assert_trained(self.train(short))
        on = self.masked(PATTERNS["fixed"], **self.documents(steps=6, schedule__total_steps=6, **where))
        resumed = self.train(on, "--resume")
        self.assert_trained(resumed)
        self.assertEqual(resumed.numbers()[1], whole.numbers()[1])
        self.assertEqual(resumed.numbers()[0][-2:], whole.numbers()[0][4:])
        # Another mask is another run.
        for other in (self.masked(PATTERNS["window"], **self.documents(steps=8, schedule__total_steps=6, **where)),
                      self.masked(PATTERNS["fixed"], data__tokens=self.path("documents.bin"), steps=8,
                                  schedule__total_steps=6, **where)):
            self.assertEqual(self.train(other, "--resume").code, USAGE)

    def test_packed_documents_train_as_those_with_a_row_each(self):
        rng = random.Random(11)
        row, rows = 64, 4
        cuts = [sorted(rng.sample(range(4, row - 3), 3)) for _ in range(rows)]
        lengths = [end - begin for cut in cuts for begin, end in zip([0, *cut], [*cut, row])]
        texts = [[rng.choice((rng.randrange(40), 7, 8)) for _ in range(length)] for length in lengths]

        def write(name, tokens):
            with open(self.path(name), "wb") as file:
                file.write(struct.pack(f"<{len(tokens)}H", *tokens))
            return self.path(name)

        ids = ("--ids", "uint16", "--vocab", "40")
        # One more token, as the last target of the last row.
        files = [write(f"document{i}.ids", text) for i, text in enumerate([*texts, [0]])]
        self.assertEqual(self.ferry("data", *files, *ids, "--documents", "-o", self.path("packed.bin")).code, 0)
        padded, mask = [], []
        for text in texts:
            padded += text + [0] * (row - len(text))
            mask += [1] + [0] * (len(text) - 1) + [1] * (row - len(text))
        with open(self.path("padded.mask"), "wb") as file:
            file.write(bytes(mask + [1]))
        done = self.ferry("data", write("padded.ids", [*padded, 0]), *ids, "--mask", self.path("padded.mask"), "-o",
                          self.path("padded.bin"))
        self.assertEqual(done.code, 0, done.err)
        common = {"model__vocab": 40, "data__held_back": 0, "steps": 100, "schedule": {"kind": "constant"},
                  # A calm course: Adam makes a whole update of a gradient near 0, and large steps grow rounding.
                  "optimizer": {"method": "sgd", "lr": 0.005, "momentum": 0.0}, "clip_norm": 1.0}
        packed = self.train(self.config(**common, data__tokens=self.path("packed.bin"), data__isolate_documents=True,
                                        batch={"sequence": row, "micro_batch": 2, "micro_batches": rows // 2}))
        alone = self.train(self.config(**common, data__tokens=self.path("padded.bin"),
                                       batch={"sequence": row, "micro_batch": 2, "micro_batches": len(texts) // 2}))
        self.assert_trained(packed)
        self.assert_trained(alone)
        self.assertEqual(len(packed.steps), 100)
        for one, other in zip(packed.steps, alone.steps):
            self.assertEqual(one["targets"], other["targets"])
            self.assertAlmostEqual(one["loss"] / other["loss"], 1, delta=1e-5, msg=one["step"])
        self.assertLess(packed.steps[-1]["loss"], 0.98 * packed.steps[0]["loss"])
        # Documents that see each other train otherwise.
        mixed = self.train(self.config(**{**common, "steps": 3}, data__tokens=self.path("packed.bin"),
                                       batch={"sequence": row, "micro_batch": 2, "micro_batches": rows // 2}))
        self.assertNotAlmostEqual(mixed.steps[0]["loss"] / alone.steps[0]["loss"], 1, delta=1e-5)

    # ---------------------------------------------------------------- documents

    def test_data_says_how_many_documents_there_are(self):
        self.assertIn(f"{self.sentences} documents", self.made)
        files = [self.path(f"part{i}.txt") for i in range(3)]
        for file in files:
            with open(file, "w", encoding="ascii") as out:
                out.write("some words, and no more\nof them\n")
        run = self.ferry("data", *files, "--documents", "--json", "-o", self.path("three.bin"))
        self.assertEqual((run.lines[0]["documents"], run.lines[0]["masked"]), (3, 3))
        run = self.ferry("data", *files, "--separator", "10", "--json", "-o", self.path("three.bin"))
        self.assertEqual((run.lines[0]["documents"], run.lines[0]["masked"]), (6, 6))
        run = self.ferry("data", *files, "--json", "-o", self.path("three.bin"))
        self.assertEqual((run.lines[0]["documents"], run.lines[0]["masked"]), (0, 0))
        run = self.ferry("data", *files, "--separator", "256", "-o", self.path("three.bin"))
        self.assertEqual(run.code, USAGE)
        self.assertIn("--separator", run.err)

    def test_documents_that_a_file_does_not_know_are_refused(self):
        self.refused(USAGE, ["data.isolate_documents", self.path("tokens.bin"), "version 1", "ferry data --documents"],
                     self.masked(**self.DOCUMENTS))
        plan = self.ferry("plan", self.command(self.masked(**self.DOCUMENTS))[1])
        self.assertEqual(plan.code, USAGE)
        self.assertIn("version 1", plan.err)

    def test_damaged_documents_are_named(self):
        with open(self.path("documents.bin"), "rb") as file:
            data = bytearray(file.read())
        data[-3] ^= 1
        with open(self.path("damaged.bin"), "wb") as file:
            file.write(data)
        self.refused(IO, ["damaged.bin", "checksum"], self.masked(**self.documents(data__tokens=self.path("damaged.bin"))))

    # ---------------------------------------------------------------- patterns

    def test_plan_says_how_much_a_pattern_leaves(self):
        plan = self.ferry("plan", self.command(self.masked(PATTERNS["window"]))[1], "--no-prediction")
        self.assertEqual(plan.code, 0, plan.err)
        # 9 of 15 blocks.
        self.assertIn("attention: window in 3 layers, blocks of 64 tokens", plan.out)
        self.assertIn("60.0 % of its blocks", plan.out)
        plan = self.ferry("plan", self.command(self.masked(PATTERNS["longformer"], **self.documents()))[1],
                          "--no-prediction", "--json")
        self.assertEqual(plan.code, 0, plan.err)
        found = plan.lines[0]["attention"]
        self.assertEqual((found["pattern"], found["layers"], found["layouts"], found["documents_isolated"]),
                         ("longformer", 2, 1, True))
        self.assertLess(found["blocks"], 1)

    def test_plan_says_how_long_a_sequence_fits(self):
        def longest(**changes):
            config = self.masked(PATTERNS["window"], **{"budgets__device": "24MiB", "budgets__host": "24MiB", **changes})
            name = self.command(config)[1]
            plan = self.ferry("plan", name, "--no-prediction", "--longest-sequence", "--json")
            self.assertEqual(plan.code, 0, plan.err)
            found = plan.lines[0]["longest_sequence"]
            self.assertGreater(found, 0)
            fits = [self.ferry("plan", name, "--no-prediction", "--set", f"batch.sequence={tokens}").code
                    for tokens in (found, found + 1024)]
            self.assertEqual(fits, [0, DOES_NOT_FIT])
            text = self.ferry("plan", name, "--no-prediction", "--longest-sequence").out
            self.assertIn(f"longest sequence that fits: {found} tokens", text)
            return found
        self.assertGreater(longest(budgets__device="48MiB"), longest())

    def test_a_sequence_may_be_too_short_as_well(self):
        many = {**PATTERNS["bigbird"], "num_random_blocks": 20}  # 1,280 tokens, more than the least that is tried
        config = self.masked(many, batch__sequence=2048, budgets__device="2GiB", budgets__host="1GiB")
        plan = self.ferry("plan", self.command(config)[1], "--no-prediction", "--longest-sequence", "--json")
        self.assertEqual(plan.code, 0, plan.err)
        self.assertGreaterEqual(plan.lines[0]["longest_sequence"], 2048)

    def test_plan_says_how_long_a_sequence_fits_several_ranks(self):
        found = []
        for ranks in (1, 2, 4):
            config = self.masked(budgets__device="48MiB", parallel__sequence=ranks)
            name = self.command(config)[1]
            plan = self.ferry("plan", name, "--no-prediction", "--longest-sequence", "--json", "--ranks", str(ranks))
            self.assertEqual(plan.code, 0, plan.err)
            found.append(plan.lines[0]["longest_sequence"])
            fits = [self.ferry("plan", name, "--no-prediction", "--ranks", str(ranks), "--set", f"batch.sequence={tokens}")
                    for tokens in (found[-1], found[-1] + 1024)]
            self.assertEqual([plan.code for plan in fits], [0, DOES_NOT_FIT])
            text = self.ferry("plan", name, "--no-prediction", "--longest-sequence", "--ranks", str(ranks)).out
            self.assertIn(f"longest sequence that fits: {found[-1]} tokens", text)
            self.assertEqual(f"over {ranks} ranks each" in text, ranks > 1, text)
        self.assertGreater(found[1], 1.5 * found[0])
        self.assertGreater(found[2], 1.2 * found[1])  # a rank has one of two heads of keys either way

    def test_plan_says_how_long_a_sequence_fits_a_gpu_that_is_not_here(self):
        config = self.masked(PATTERNS["window"], device="cuda", precision="bf16", budgets__device="2GiB")
        machine = Path(__file__).with_name("machine_h100.json")
        plan = self.ferry("plan", self.command(config)[1], "--no-prediction", "--longest-sequence", "--json",
                          "--machine", str(machine))
        self.assertEqual(plan.code, 0, plan.err)
        self.assertGreaterEqual(plan.lines[0]["longest_sequence"], config["batch"]["sequence"] // 1024 * 1024)
        self.assertGreater(plan.lines[0]["longest_sequence"], 0)

    def test_what_is_changed_of_a_setting_is_said(self):
        run = self.train(self.masked(PATTERNS["variable"], steps=1))
        self.assert_trained(run)
        self.assertIn("widened to 64", run.err)
        self.assertIn("cut by the causal mask", run.err)
        run = self.train(self.masked({"pattern": "window", "num_random_blocks": 2}, steps=1))
        self.assertIn("attention.num_random_blocks does nothing with window", run.err)
        narrow = ["#" * (i + 1) + "." * (9 - i) for i in range(10)]
        run = self.train(self.masked(self.layout(layout_bytes(narrow, block=32)), steps=1))
        self.assert_trained(run)
        self.assertEqual(run.err.count("drawn.layout has blocks of 32: widened to 64"), 1, run.err)

    def test_patterns_that_cannot_be_are_refused(self):
        for attention, words in (
                ({"pattern": "window", "num_sliding_window_blocks": 0},
                 ["attention.num_sliding_window_blocks", "the nearest value allowed is 1"]),
                ({"pattern": "bigbird", "num_random_blocks": 6},
                 ["attention.num_random_blocks", "6", "5 blocks of a sequence"]),
                ({"pattern": "fixed", "num_local_blocks": 4, "num_global_blocks": 3},
                 ["attention.num_global_blocks", "divisor"]),
                ({"pattern": "fixed", "num_different_global_patterns": 2},
                 ["attention.num_different_global_patterns", "different_layout_per_head"]),
                ({"pattern": "longformer", "global_block_indices": [1, 2], "global_block_end_indices": [2]},
                 ["attention.global_block_end_indices"]),
                ({"pattern": "window", "block": 48}, ["attention.block", "48", "16, 32, 64 or 128"]),
                ({"pattern": "window", "layers": [3]}, ["attention.layers", "0 to 2"]),
                ({"pattern": "bigbrid"}, ["bigbird"]),
                ({"pattern": "layout"}, ["attention.layout", "write_layout.py"])):
            with self.subTest(attention=attention):
                self.refused(USAGE, words, self.masked(attention))

    # ---------------------------------------------------------------- layouts

    DRAWN = ["#....", "##...", ".##..", "#.##.", ".#.##"]

    def layout(self, data, **more):
        with open(self.path("drawn.layout"), "wb") as file:
            file.write(data)
        return {"pattern": "layout", "layout": self.path("drawn.layout"), **more}

    def test_a_layout_trains_as_the_pattern_that_it_draws(self):
        window = ["#....", "##...", ".##..", "..##.", "...##"]
        drawn = self.train(self.masked(self.layout(layout_bytes(window))))
        self.assert_trained(drawn)
        self.assertEqual(drawn.numbers(), self.train(self.masked(PATTERNS["window"])).numbers())
        heads = self.train(self.masked(self.layout(layout_bytes(window * 4, heads=4))))
        self.assertEqual(drawn.numbers(), heads.numbers())
        layers = self.train(self.masked(self.layout(layout_bytes(window * 3, layers=3))))
        self.assertEqual(drawn.numbers(), layers.numbers())
        self.assertNotEqual(drawn.numbers(), self.train(self.masked(self.layout(layout_bytes(self.DRAWN)))).numbers())

    def test_layouts_that_cannot_be_are_refused(self):
        empty = ["#....", "##...", ".....", "#.##.", ".#.##"]
        blind = ["#....", "#....", ".##..", "#.##.", ".#.##"]
        above = ["#..#.", "##...", ".##..", "#.##.", ".#.##"]
        name = self.path("drawn.layout")
        for data, words in (
                (layout_bytes(self.DRAWN, columns=4)[:-5], [name, "not square", "5 x 4"]),
                (layout_bytes(self.DRAWN[:4]), [name]),
                (layout_bytes([row[:4] for row in self.DRAWN[:4]]), [name, "too small", "256", "320"]),
                (layout_bytes(self.DRAWN * 3, heads=3), [name, "other heads", "1 or 4"]),
                (layout_bytes(self.DRAWN * 2, layers=2), [name, "other layers", "1 or 3"]),
                (layout_bytes(above), [name, "above the diagonal", "head 0, row 0, column 3"]),
                (layout_bytes(empty), ["layer 0, head 0, row 2", "allow_empty_rows"]),
                (layout_bytes(self.DRAWN)[:-1], [name, "not as long as it says"]),
                (layout_bytes(self.DRAWN) + b"\0", [name, "not as long as it says"]),
                (layout_bytes(self.DRAWN)[:-1] + b"\2", [name, "neither 0 nor 1"]),
                (layout_bytes(self.DRAWN, block=50), [name, "50 tokens"]),
                (b"FERRYTOK" + layout_bytes(self.DRAWN)[8:], [name, "FERRYLAY"]),
                (b"", [name])):
            with self.subTest(words=words):
                self.refused(USAGE, words, self.masked(self.layout(data)))
        # Documents that begin there would see nothing.
        self.assert_trained(self.train(self.masked(self.layout(layout_bytes(blind)), steps=1)))
        self.refused(USAGE, ["does not see itself", "row 1"],
                     self.masked(self.layout(layout_bytes(blind)), **self.documents()))

    def test_empty_rows_are_taken_where_they_are_allowed(self):
        empty = ["#....", "##...", ".....", "#.##.", ".#.##"]
        run = self.train(self.masked(self.layout(layout_bytes(empty), allow_empty_rows=True), **self.documents()))
        self.assert_trained(run)
        self.assertLess(run.steps[-1]["loss"], run.steps[0]["loss"])


if __name__ == "__main__":
    unittest.main()
