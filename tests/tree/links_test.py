"""Links between the documents lead somewhere, and so do the names of files in them and in comments."""

import re
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("hwy", "sys", "linux", "contrib")  # of packages


def documents():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split() if listed.returncode == 0 else []
    return [ROOT / name for name in names] or [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]


def sources():
    folders = ("src", "include", "aio", "pinned_mem", "swap", "tools", "tests", "bench", "examples")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in (".h", ".cc", ".cu", ".py")]


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
        """`src/train/step/step.cc`, whole paths only."""
        for document in documents():
            text = document.read_text(encoding="utf-8")
            for name in set(re.findall(r"`((?:src|aio|swap|pinned_mem|include|tools|tests|bench|examples|docs)/[\w./-]+)`", text)):
                with self.subTest(document=document.name, name=name):
                    path = ROOT / name  # or a file without its ending
                    self.assertTrue(path.exists() or any(path.parent.glob(path.name + ".*")))

    def test_files_that_comments_name(self):
        """// ... src/train/step/step.cc, ops/ops.h: from the root, or as it is included."""
        for source in sources():
            text = source.read_text(encoding="utf-8")
            comments = re.findall(r"(?://|#) (.*)", re.sub(r"^\s*#\s*include.*", "", text, flags=re.M))
            for name in set(re.findall(r"(?<![\w/.<-])([\w-]+(?:/[\w-]+)+\.(?:h|cc|cu|py|md))\b", "\n".join(comments))):
                if name.split("/")[0] in FOREIGN:
                    continue
                with self.subTest(source=str(source.relative_to(ROOT)), name=name):
                    self.assertTrue(any((folder / name).exists()
                                        for folder in (ROOT, ROOT / "src", ROOT / "include", source.parent)))


if __name__ == "__main__":
    unittest.main()
