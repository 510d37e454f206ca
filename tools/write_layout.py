#!/usr/bin/env python3
"""Writes a layout of attention for attention.pattern "layout" from a NumPy array (docs/attention.md).

    tools/write_layout.py blocks.npy -o my.layout --block 64

The array is [blocks, blocks], [heads, blocks, blocks] or [layers, heads, blocks, blocks]: not zero where a block of queries (the
row) sees a block of keys (the column). What is above the diagonal is refused: no token sees a later one."""

import argparse
import os
import struct
import sys
import tempfile

import numpy

MAGIC, VERSION = b"FERRYLAY", 1
BLOCKS = (16, 32, 64, 128)


def layout_bytes(layout, block):
    """The file's bytes. Raises ValueError where ferry would refuse them."""
    layout = numpy.asarray(layout)
    if not 2 <= layout.ndim <= 4:
        raise ValueError(f"the array has {layout.ndim} dimensions, not 2 to 4")
    layout = layout.reshape((1,) * (4 - layout.ndim) + layout.shape) != 0
    rows, columns = layout.shape[2:]
    if rows != columns or layout.size == 0:
        raise ValueError(f"the layout is not square: {rows} x {columns} blocks")
    if block not in BLOCKS:
        raise ValueError(f"a block of {block} tokens: it must be one of {', '.join(map(str, BLOCKS))}")
    above = numpy.argwhere(numpy.triu(layout, 1))
    if len(above):
        place = ", ".join(f"{name} {at}" for name, at in zip(("layer", "head", "row", "column"), above[0]))
        raise ValueError(f"a block above the diagonal: {place}; cut the array with numpy.tril")
    return MAGIC + struct.pack("<6I", VERSION, block, *layout.shape) + layout.astype(numpy.uint8).tobytes()


def write_layout(path, layout, block=64):
    """Aside, and renamed. Only a layout is replaced."""
    data = layout_bytes(layout, block)
    if os.path.lexists(path):
        if not os.path.isfile(path):
            raise ValueError(f"{path} is no regular file")
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) not in (MAGIC, b""):
                raise ValueError(f"{path} exists and is no layout; remove it, or choose another name after -o")
        path = os.path.realpath(path)
    draft, name = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".part", dir=os.path.dirname(path) or ".")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            os.fchmod(draft, 0o644)
            file.flush()
            os.fsync(draft)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("array", help="a file of numpy.save")
    parser.add_argument("-o", "--output", required=True, help="the layout to write")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block: 16, 32, 64 or 128")
    options = parser.parse_args()
    try:
        write_layout(options.output, numpy.load(options.array), options.block)
    except (OSError, ValueError) as error:
        sys.exit(f"write_layout: {error}")


if __name__ == "__main__":
    main()
