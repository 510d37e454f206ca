"""The script that writes a layout of attention from a NumPy array, and what it refuses."""

import os
import resource
import struct
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy
except ImportError:
    numpy = None

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))


@unittest.skipUnless(numpy, "no NumPy here")
class WriteLayoutTest(unittest.TestCase):
    def setUp(self):
        import write_layout
        self.script = write_layout

    def test_an_array_of_any_type_becomes_bytes_after_a_header(self):
        window = numpy.tril(numpy.ones((3, 3))) - numpy.tril(numpy.ones((3, 3)), -2)
        for array in (window, window.astype(bool), window.astype(numpy.int64).tolist(), -2 * window):
            data = self.script.layout_bytes(array, 128)
            self.assertEqual(data[:8], b"FERRYLAY")
            self.assertEqual(struct.unpack("<6I", data[8:32]), (1, 128, 1, 1, 3, 3))
            self.assertEqual(data[32:], bytes([1, 0, 0, 1, 1, 0, 0, 1, 1]))
        with tempfile.TemporaryDirectory() as folder:
            name = os.path.join(folder, "w.layout")
            self.script.write_layout(name, numpy.stack([window] * 2))
            with open(name, "rb") as file:
                self.assertEqual(struct.unpack("<6I", file.read()[8:32]), (1, 64, 1, 2, 3, 3))

    def test_what_ferry_refuses_is_not_written(self):
        whole = numpy.ones((2, 2))
        for array, block, words in ((whole, 64, "above the diagonal: layer 0, head 0, row 0, column 1"),
                                    (numpy.zeros((2, 3)), 64, "2 x 3"), (numpy.tril(whole), 48, "block of 48"),
                                    (numpy.ones(3), 64, "1 dimensions"), (numpy.zeros((0, 0)), 64, "0 x 0")):
            with self.assertRaisesRegex(ValueError, words):
                self.script.layout_bytes(array, block)

    def test_only_a_layout_is_replaced(self):
        small, large = numpy.ones((1, 1)), numpy.tril(numpy.ones((500, 500)))
        with tempfile.TemporaryDirectory() as folder:
            name, notes, link = (os.path.join(folder, one) for one in ("w.layout", "notes.npy", "link"))
            Path(notes).write_text("mine", encoding="ascii")
            os.symlink("w.layout", link)
            for one in (name, name, link):
                self.script.write_layout(one, small)
            self.assertTrue(os.path.islink(link))
            for one, words in ((notes, "no layout"), (folder, "no regular file"), ("/dev/null", "no regular file")):
                with self.assertRaisesRegex(ValueError, words):
                    self.script.write_layout(one, small)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
            try:
                with self.assertRaisesRegex(OSError, "too large"):
                    self.script.write_layout(name, large)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            self.assertEqual(Path(name).stat().st_size, 33)
            self.assertEqual(Path(notes).read_text(encoding="ascii"), "mine")
            self.assertEqual(sorted(os.listdir(folder)), ["link", "notes.npy", "w.layout"])


if __name__ == "__main__":
    unittest.main()
