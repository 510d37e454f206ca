"""Results that cannot be written, or would replace something else."""

import os
import resource
import unittest

from harness import IO, USAGE
from refusals import Refusals


class ResultsTest(Refusals):
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


if __name__ == "__main__":
    unittest.main()
