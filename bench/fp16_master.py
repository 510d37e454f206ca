#!/usr/bin/env python3
"""What an fp16 weight and 16 bits beside it can restore of an fp32 master weight.

    bench/fp16_master.py CHECKPOINT [--json FILE]

CHECKPOINT is a directory that `ferry train` saved. Three ways are tried on its master weights:

low bits       the low 16 bits of p, as `optimizer.master: split` keeps them beside a bf16 weight
fp16 residual  p - w, rounded to fp16
scaled         p - w as a whole number of 2^(e - 25), e the exponent of w and at least -14

The last is exact wherever |p| is 2^-16 or more: w is within half a unit of its last place, 2^(e - 11), so the number is at
most 2^14, and all bits of p count. Below, p is a fixed-point number with steps of 2^-39.

Needs numpy.
"""
import common
import needs
import pack_state


def restored(p, w):
    """By each way, in fp32."""
    import numpy as np

    wide = w.astype(np.float32)
    residual = p - wide  # exact: both are multiples of p's last place
    exponent = np.maximum(np.where(wide == 0, -14, np.frexp(wide)[1] - 1), -14)
    unit = np.ldexp(np.float32(1), exponent - 25)
    whole = np.rint(residual / unit).astype(np.int16)
    bits, of_weight = p.view(np.uint32), wide.view(np.uint32)
    low = (of_weight & np.uint32(0xFFFF0000)) | (bits & np.uint32(0xFFFF))
    return {"low bits": low.view(np.float32), "fp16 residual": wide + residual.astype(np.float16).astype(np.float32),
            "scaled": wide + whole.astype(np.float32) * unit}


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("checkpoint", help="a directory that `ferry train` saved")
    options = parser.parse_args()
    needs.packages("numpy")
    import numpy as np

    p = pack_state.arrays_of(options.checkpoint)["master in F32"].view(np.float32)
    rows = [common.plain("master weights below 2^-16", float((np.abs(p) < 2.0 ** -16).mean()), "share", note=f"{len(p)} weights")]
    for name, found in restored(p, p.astype(np.float16)).items():
        wrong = found.view(np.uint32) != p.view(np.uint32)
        apart = np.abs(found.astype(np.float64) - p)
        rows.append(common.plain(f"{name}: weights not restored exactly", float(wrong.mean()), "share",
                                 note=f"at most {apart.max():.2e} apart"))
    common.report(options, rows)


if __name__ == "__main__":
    main()
