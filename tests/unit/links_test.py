"""Links between the documents lead somewhere, and so do the names of files in them."""

import re
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def documents():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split() if listed.returncode == 0 else []
    return [ROOT / name for name in names] or [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]


def anchors(text):
    """What a heading is called in a link."""
    return {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines() if line.startswith("#")}


class LinksTest(unittest.TestCase):
    def test_links(self):
        for document in documents():
            text = document.read_text(encoding="utf-8")
            for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
                if re.match(r"[a-z]+:", link):
                    continue
                with self.subTest(document=document.name, link=link):
                    name, _, anchor = link.partition("#")
                    target = (document.parent / name) if name else document
                    self.assertTrue(target.exists())
                    if anchor:
                        self.assertIn(anchor, anchors(target.read_text(encoding="utf-8")))

    def test_files_that_are_named(self):
        """`src/train/step.cc`, whole paths only."""
        for document in documents():
            text = document.read_text(encoding="utf-8")
            for name in set(re.findall(r"`((?:src|aio|swap|pinned_mem|include|tools|tests|bench|examples|docs)/[\w./-]+)`", text)):
                with self.subTest(document=document.name, name=name):
                    path = ROOT / name  # or a file without its ending
                    self.assertTrue(path.exists() or any(path.parent.glob(path.name + ".*")))


if __name__ == "__main__":
    unittest.main()
