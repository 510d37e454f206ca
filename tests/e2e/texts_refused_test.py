"""Texts that `ferry data` takes for text, and those that it refuses."""

import json
import os
import pty
import resource
import subprocess
import threading
import unittest

from harness import IO, USAGE
from refusals import Refusals


class TextsTest(Refusals):
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


if __name__ == "__main__":
    unittest.main()
