#!/usr/bin/env python3
"""How far optimizer state packs without loss, how fast, and what that would do to a step that waits for its drive.

    bench/pack_state.py CHECKPOINT [--megabytes 64] [--drive 1.5 3] [--json FILE]

CHECKPOINT is a directory that `ferry train` saved (checkpoint.dir). Of m, v and the fp32 master, of each as it is kept, the
bytes of a number are taken apart into planes, as codecs for floats do; the first plane holds sign and exponent. Printed are
the entropy of each plane (what any coder of single bytes can reach) and, for zstd at level 1 and LZ4 on one core, the packed
share and the rates, by the thread's own time. A plane that a codec does not make smaller is stored as it is.

The last rows are of a step that waits for its drive: bytes read and written at the drive's rate, with and without packing.
One core packs as fast as measured here; `--cores` of them are left for it beside what a step does already.

Needs numpy, and libzstd and liblz4 of the system.
"""
import ctypes
import ctypes.util
import json
import struct
import sys
import time
from pathlib import Path

import common
import needs

DTYPES = {"F32": "<u4", "BF16": "<u2", "U8": "<u1"}
KINDS = {"master": "master", "exp_avg": "m", "exp_avg_sq": "v"}


def arrays_of(directory):
    """All numbers of each kind of state, as unsigned integers."""
    import numpy as np

    found = {}
    for file in sorted(Path(directory).rglob("*.safetensors")):
        kind = KINDS.get(file.name.split("-")[0].removesuffix(".safetensors"))
        if kind is None:
            continue
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, about in json.loads(data[8:8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = about["data_offsets"]
            part = np.frombuffer(data[8 + size + begin:8 + size + end], dtype=DTYPES[about["dtype"]])
            found.setdefault(f"{kind} in {about['dtype']}", []).append(part)
    return {kind: np.concatenate(parts) for kind, parts in found.items()}


class Zstd:
    name = "zstd level 1"

    def __init__(self):
        self.lib = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
        for function in ("ZSTD_compressBound", "ZSTD_compress", "ZSTD_decompress"):
            getattr(self.lib, function).restype = ctypes.c_size_t

    def room(self, size):
        return self.lib.ZSTD_compressBound(ctypes.c_size_t(size))

    def pack(self, out, data):
        return self.lib.ZSTD_compress(out, ctypes.c_size_t(len(out)), data, ctypes.c_size_t(len(data)), 1)

    def unpack(self, out, data, size):
        return self.lib.ZSTD_decompress(out, ctypes.c_size_t(len(out)), data, ctypes.c_size_t(size))


class Lz4:
    name = "LZ4"

    def __init__(self):
        self.lib = ctypes.CDLL(ctypes.util.find_library("lz4") or "liblz4.so.1")

    def room(self, size):
        return self.lib.LZ4_compressBound(size)

    def pack(self, out, data):
        return self.lib.LZ4_compress_default(data, out, len(data), len(out))

    def unpack(self, out, data, size):
        return self.lib.LZ4_decompress_safe(data, out, size, len(out))


def entropy(plane):
    import numpy as np

    share = np.bincount(plane, minlength=256) / len(plane)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def planes_of(values):
    """The bytes of the numbers, the highest first; of floats sign and exponent go to a plane of their own."""
    import numpy as np

    width = values.dtype.itemsize
    if width > 1:  # the exponent's eight bits together: the sign goes to the end
        bits = 8 * width
        values = (values << np.uint32(1) if width == 4 else values << np.uint16(1)) | (values >> values.dtype.type(bits - 1))
    raw = values.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(raw[:, width - 1 - i]) for i in range(width)]


def best_of(work, times=3):
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        result = work()
        best = min(best, time.thread_time() - start)
    return result, best


def through(codec, planes):
    """Packed share of all planes, and bytes of state a second and core, packing and unpacking."""
    before = sum(len(plane) for plane in planes)
    after, pack_s, unpack_s = 0, 0.0, 0.0
    for plane in planes:
        data = plane.tobytes()
        out, back = ctypes.create_string_buffer(codec.room(len(data))), ctypes.create_string_buffer(len(data))
        size, seconds = best_of(lambda data=data, out=out: codec.pack(out, data))
        if size >= 0.98 * len(data):  # a codec that looks at a sample first spends next to nothing on it
            after += len(data)
            continue
        pack_s += seconds
        after += size
        unpack_s += best_of(lambda out=out, back=back, size=size: codec.unpack(back, out, size))[1]
        assert back.raw == data
    return after / before, before / pack_s if pack_s else None, before / unpack_s if unpack_s else None


def rows_of_step(share, pack, unpack, drives, cores):
    """Of a byte of state read and a byte written: seconds by the drive, and by packing, whichever is longer."""
    for drive in drives:
        plain = 2 / (drive * 1e9)
        packed = max(2 * share / (drive * 1e9), (1 / pack + 1 / unpack) / cores)
        yield common.compared(f"step that waits for a drive of {drive:g} GB/s, packed by {cores:g} cores", [packed * 1e9],
                              [plain * 1e9], "s/GB", target=1 / 0.9)


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("checkpoint", help="a directory that `ferry train` saved")
    parser.add_argument("--megabytes", type=common.at_least(1), default=64, help="of each kind, at most")
    parser.add_argument("--drive", type=float, nargs="+", default=[1.5, 3], help="GB/s, reading and writing together")
    parser.add_argument("--cores", type=float, nargs="+", default=[1, 4], help="that a step leaves for packing")
    options = parser.parse_args()
    needs.packages("numpy")
    rows, total, of_codec = [], 0, {codec.name: [0.0, 0.0, 0.0] for codec in (Zstd, Lz4)}
    for kind, values in arrays_of(options.checkpoint).items():
        values = values[:options.megabytes * 1000000 // values.dtype.itemsize]
        planes = planes_of(values)
        found = [entropy(plane) for plane in planes]
        rows.append(common.plain(f"{kind}: entropy of its bytes, of all bits", sum(found) / (8 * len(found)), "share",
                                 note=" ".join(f"{bits:.2f}" for bits in found) + " bits, exponent first"))
        total += values.nbytes
        for codec in (Zstd(), Lz4()):
            share, pack, unpack = through(codec, planes)
            sums = of_codec[codec.name]
            sums[0] += share * values.nbytes
            sums[1] += values.nbytes / pack if pack else 0
            sums[2] += values.nbytes / unpack if unpack else 0
            rates = f"packs {pack / 1e9:.2f}, unpacks {unpack / 1e9:.2f} GB/s of state a core" if pack else "stored as it is"
            rows.append(common.plain(f"{kind}: packed by {codec.name}", share, "share", note=rates))
    for name, (size, pack_s, unpack_s) in of_codec.items():
        rows.append(common.plain(f"all: packed by {name}", size / total, "share"))
        for cores in options.cores if pack_s else []:
            rows += [{**row, "name": f"{name}: {row['name']}"}
                     for row in rows_of_step(size / total, total / pack_s, total / unpack_s, options.drive, cores)]
    common.report(options, rows)


if __name__ == "__main__":
    main()
