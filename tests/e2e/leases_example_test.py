"""examples/leases.cc as whoever embeds ferry would write it: it ends well, and leaves nothing behind."""

import os
import subprocess
import tempfile
import unittest

PROGRAM = os.path.join(os.environ.get("FERRY_BUILD_DIR", "build/release"), "example_leases")


@unittest.skipUnless(os.environ.get("FERRY"), "a build of aio alone")
class LeasesExample(unittest.TestCase):
    def test_every_layer_is_what_it_was_made(self):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            done = subprocess.run([PROGRAM, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("every layer is what it was made", done.stdout)
            self.assertEqual(os.listdir(folder), [])

    def test_a_directory_that_is_not_there(self):
        done = subprocess.run([PROGRAM, "/var/tmp/no/such/directory"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("/var/tmp/no/such/directory", done.stderr)


if __name__ == "__main__":
    unittest.main()
