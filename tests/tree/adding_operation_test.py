"""Holds docs/adding-an-operation.md to the sources: what it quotes stands there, line by line."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/adding-an-operation.md"


def quotes(page):
    """(file, code) of each section whose title names a file."""
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        file = re.search(r"`([^`]+)`", section.splitlines()[0])
        found += [(file.group(1), code) for code in re.findall(r"```cpp\n(.*?)```", section, re.DOTALL)]
    return found


class Page(unittest.TestCase):
    def test_what_it_quotes_stands_in_the_file_that_it_names(self):
        all_quotes = quotes(PAGE.read_text())
        self.assertEqual(len(all_quotes), 5)
        for file, code in all_quotes:
            with self.subTest(file):
                self.assertIn(code, (ROOT / file).read_text())

    def test_the_files_that_it_lists_are_there(self):
        listed = re.findall(r"^\| `(src/[^`]+)`", PAGE.read_text(), re.MULTILINE)
        self.assertEqual(len(listed), 5)
        for file in listed:
            self.assertTrue((ROOT / file).exists(), file)

    def test_no_other_file_names_an_operation(self):
        """But those of which the page says why."""
        excepted = re.search(r"^Some code names one operation.*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL).group()
        own = re.compile(r"src/cost/(operations\.h|operands\.h|operation_table\.cc)|src/planner/recording/recorder.*|"
                         r"src/train/(step/step\.cc|kernels/.*|run/rank_lane\..*)")
        name = re.compile(r"\bOp::(?!end\b)[a-z]\w*|\bop::(?!run\b|fields\b|kOperands\b)[A-Za-z]\w*<|using enum cost::Op\b")
        found = {str(file.relative_to(ROOT)) for folder in ("src", "tools") for file in sorted((ROOT / folder).rglob("*"))
                 if file.suffix in (".h", ".cc", ".cu") and name.search(file.read_text())}
        self.assertEqual({file for file in found if not own.fullmatch(file)}, set(re.findall(r"`(src/[^`]+)`", excepted)))

    def test_a_quote_is_found_with_its_file(self):
        self.assertEqual(quotes("# t\n## 1. It: `a.cc`\ntext\n```cpp\nint x;\n```\n"), [("a.cc", "int x;\n")])


if __name__ == "__main__":
    sys.exit(unittest.main())
