#!/usr/bin/env python3
"""Compiles src/ops/cuda/attention/sparse_attention.py for one architecture, and types and widths of heads, ahead of time; needs
the wheel `triton` and no GPU.

    compile_triton.py SOURCE FOLDER ARCHITECTURE TYPE_WIDTH...

Writes the images (machine code for 90, PTX for 80, from which drivers make code of their own for every later GPU) and
for each TYPE_WIDTH FOLDER/sparse_ARCHITECTURE_TYPE_WIDTH.cc, a C++ source that holds them and their table,
kSparse_ARCHITECTURE_TYPE_WIDTH of kSparseCount_...
"""
import importlib.util
import os
import pathlib
import sys

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

# Tiles: rows of what a kernel sums for, rows of what it sums over, warps, stages. Measured on an H100; where two are
# named, the second is for layouts whose blocks are smaller than the first's tiles.
HOPPER = {
    64: {"forward": [(128, 128, 4, 2), (64, 64, 4, 3)], "backward_queries": [(64, 64, 4, 3)],
         "backward_keys": [(64, 64, 4, 3)]},
    128: {"forward": [(64, 128, 4, 1), (64, 64, 4, 2)], "backward_queries": [(64, 64, 4, 2)],
          "backward_keys": [(64, 64, 4, 2)]},
    256: {"forward": [(128, 64, 8, 2), (64, 64, 4, 2)], "backward_queries": [(128, 32, 8, 2), (64, 32, 4, 2)],
          "backward_keys": [(64, 64, 8, 2)]},
}
# Not measured. At most 99 KiB of shared memory, which every GPU from 8.0 on has.
ANY = {
    64: {"forward": [(64, 64, 4, 2)], "backward_queries": [(64, 64, 4, 2)], "backward_keys": [(64, 64, 4, 2)]},
    128: {"forward": [(64, 64, 4, 2)], "backward_queries": [(64, 32, 4, 2)], "backward_keys": [(64, 32, 8, 2)]},
    256: {"forward": [(64, 32, 4, 1)], "backward_queries": [(64, 32, 8, 1)], "backward_keys": [(32, 32, 8, 1)]},
}
SHARED_LIMIT = {90: 227 << 10, 80: 99 << 10}
# What kernels of a whole sequence do not have.
PART_SIZES = ("query_first", "queries", "key_first", "keys")
OWN_OPERANDS = {"forward": ("q",), "backward_queries": ("q", "dout"), "backward_keys": ("k", "v")}


def type_of(name, kernel, triton_type, own, step, width, copy_engine, part):
    if name in ("q", "k", "v", "dout"):
        if not copy_engine:
            return f"*{triton_type}"
        box = f"{own},{width}" if name in OWN_OPERANDS[kernel] else f"1,{step},1,{width}"
        return f"tensordesc<{triton_type}[{box}]>"
    if name in ("out", "dq", "dk", "dv"):
        return "*fp32" if part else f"*{triton_type}"
    if name in ("lse", "delta"):
        return "*fp32"
    if name in ("spans", "order", "entries", "low_of", "high_of"):
        return "*i32"
    return "fp32" if name == "scale_log2" else "i32"


def compiled(module, kernel, architecture, triton_type, width, tile, part):
    own, step, warps, stages = tile
    function = getattr(module, kernel)
    copy_engine = architecture >= 90
    constants = {"OWN": own, "STEP": step, "D": width, "TMA": copy_engine, "PART": part}
    if not part:
        constants |= dict.fromkeys(PART_SIZES, 0)
    signature = {name: "constexpr" if name in constants else
                 type_of(name, kernel, triton_type, own, step, width, copy_engine, part)
                 for name in function.arg_names}
    # Rows and heads of 16-bit elements begin at multiples of 16 bytes. What is added up over parts need not.
    anywhere = ("out", "lse", "dq", "dk", "dv", "out_ld", "dq_ld", "dk_ld", "dv_ld") if part else ()
    attributes = {}
    for i, name in enumerate(function.arg_names):
        if name in anywhere:
            continue
        if signature[name].startswith("*") or name.endswith("_ld") or name == "head_dim":
            attributes[(i,)] = [["tt.divisibility", 16 if signature[name].startswith("*") else 8]]
    source = ASTSource(fn=function, constexprs=constants, signature=signature, attrs=attributes)
    found = triton.compile(source, target=GPUTarget("cuda", architecture, 32),
                           options={"num_warps": warps, "num_stages": stages})
    about = found.metadata
    if about.global_scratch_size or about.num_warps != warps or about.shared > SHARED_LIMIT[architecture]:
        sys.exit(f"{kernel} {tile}: {about.shared} B of shared memory, {about.num_warps} warps, "
                 f"{about.global_scratch_size} B of scratch: sparse_attention.cc cannot start it")
    for box in about.tensordesc_meta or []:
        if box["swizzle"] != 3 or box["block_size"][-1] != 64:  # rows of 128 bytes, as sparse_attention.cc makes them
            sys.exit(f"{kernel} {tile}: another layout of shared memory than sparse_attention.cc knows: {box}")
    return found


def write_source(module, architecture, name, width, out):
    images, table = [], []
    tiles = (HOPPER if architecture >= 90 else ANY)[width]
    # Of parts those tiles alone that every layout takes.
    wanted = [(kernel, tile, part) for kernel in tiles for tile in tiles[kernel]
              for part in ((False, True) if tile == tiles[kernel][-1] else (False,))]
    for kernel, tile, part in wanted:
        own, step, warps, _ = tile
        found = compiled(module, kernel, architecture, {"bf16": "bf16", "f16": "fp16"}[name], width, tile, part)
        label = f"{kernel}_{architecture}_{name}_{width}_{own}_{step}" + ("_part" if part else "")
        image = out.with_name(label + (".cubin" if architecture >= 90 else ".ptx"))
        if architecture >= 90:
            image.write_bytes(found.asm["cubin"])
        else:
            image.write_bytes(found.asm["ptx"].encode() + b"\0")
        images.append(f"""asm(".section .rodata\\n.balign 16\\nferry_{label}:\\n.incbin \\"{image}\\"\\n.previous");
extern "C" __attribute__((visibility("hidden"))) const unsigned char ferry_{label}[];
""")
        table.append(f"    {{SparseKernel::{kernel}, {architecture}, DType::{name}, {width}, {own}, {step}, {warps}, "
                     f"{'true' if part else 'false'}, {found.metadata.shared}, \"{found.metadata.name}\", ferry_{label}}},\n")
    out.write_text(f"""// Written by cmake/compile_triton.py with Triton {triton.__version__}.
#include "ops/cuda/attention/sparse_images.h"

{"".join(images)}
namespace ferry::ops::cuda {{
extern const SparseImage kSparse_{architecture}_{name}_{width}[{len(table)}];
extern const int kSparseCount_{architecture}_{name}_{width};
const int kSparseCount_{architecture}_{name}_{width} = {len(table)};
const SparseImage kSparse_{architecture}_{name}_{width}[{len(table)}] = {{
{"".join(table)}}};
}}  // namespace ferry::ops::cuda
""")


def main():
    source, folder, architecture, *heads = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("sparse_attention", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for head in heads:
        name, width = head.split("_")
        out = pathlib.Path(folder, f"sparse_{architecture}_{head}.cc")
        write_source(module, int(architecture), name, int(width), out)


if __name__ == "__main__":
    main()
