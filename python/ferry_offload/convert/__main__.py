"""`python3 -m ferry_offload.convert SOURCE OUTPUT`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from ..errors import FerryError, message
from ..sizes import to_bytes
from ..text import one_line
from . import SHARD_BYTES, convert


_ABOUT = """Makes of a checkpoint of DeepSpeed (ZeRO stages 1 to 3, or universal) or of transformers' Trainer a
directory that `ferry ckpt import` reads, with the optimizer's state."""
_AFTER = """Pickles can run code. They are read with torch's weights-only reader, which runs none of theirs; classes
that it does not know become records without methods. --trust-pickles gives that up.

Example: python3 -m ferry_offload.convert out/checkpoint-1000 CONVERTED --shard-size 2GB"""


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        """argparse's own is silent about what it could not write."""
        print(self.format_help(), end="", file=file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python3 -m ferry_offload.convert", description=_ABOUT, epilog=_AFTER,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="directory with DeepSpeed's `latest`, one of its steps, or a Trainer's checkpoint-N")
    parser.add_argument("output", help="directory to write; it must not be there")
    parser.add_argument("--model", metavar="DIR", help="has config.json and the tokenizer, where the source has not")
    parser.add_argument("--tag", help="DeepSpeed's name of a step (default: what `latest` says)")
    parser.add_argument("--names", metavar="FILE", help="JSON list of the parameters' names in the order of optimizer.pt")
    parser.add_argument("--no-moments", action="store_true", help="weights and their fp32 masters alone")
    parser.add_argument("--shard-size", metavar="SIZE", default=str(SHARD_BYTES), help="most bytes of a file (default 5GB)")
    parser.add_argument("--trust-pickles", action="store_true", help="have pickles run what they ask for")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # what was written aside is removed


def _open_standard_streams() -> None:
    """Whoever closed them would find what is printed in the next file that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115


def _run() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        done = convert(options.source, options.output, model=options.model, tag=options.tag, names=options.names,
                       moments=not options.no_moments, trust_pickles=options.trust_pickles,
                       shard_bytes=to_bytes(options.shard_size))
    except FerryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except MemoryError:
        print("error: there is too little memory to convert it", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(done).replace("\x7f", "\\u007f"))
    else:
        rate, output = done["bytes"] / max(done["seconds"], 1e-9) / 1e9, one_line(done["output"])
        print(f"{output}: step {done['global_step']} of {done['format']}, {done['parameters']} parameters in "
              f"{done['weights']}, with {', '.join(done['state']) or 'weights alone'}; {done['bytes'] / 1e9:.2f} GB, {rate:.2f} GB/s\n"
              f"go on: ferry ckpt import CONFIG {output}")
    return 0


def main() -> int:
    _open_standard_streams()
    try:
        try:
            return _run()
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it would fail once more
        print("error: " + message("what ferry printed could not be written", "standard output", error.strerror or str(error), "",
                                  "free space where it goes, or let its reader live longer; what was converted stays"), file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
