"""Writes inputs that are too large to commit: large_seeds.py DIRECTORY makes DIRECTORY/<target>/<name>."""

import json
import os
import struct
import sys

DEEP = 200_000  # of brackets: far beyond what a recursive reader's stack holds
MANY = 80_000   # tensors


def safetensors(header):
    return struct.pack("<Q", len(header)) + header


def many_tensors():
    header = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(MANY)}
    return safetensors(json.dumps(header).encode())


def main():
    deep_list, deep_object = b"[" * DEEP, b'{"a":' * DEEP
    closed = deep_list + b"]" * DEEP
    seeds = {target: {"deep-list": deep_list, "deep-object": deep_object, "deep-closed": closed,
                      "deep-in-key": b'{"model": ' + closed + b"}"}
             for target in ("config", "model", "machine", "index", "manifest")}
    seeds["model"]["deep-torch-dtype"] = b'{"model_type": "llama", "torch_dtype": ' + closed + b"}"
    seeds["machine"]["deep-kernels"] = b'{"ferry_machine": 1, "kernels": ' + closed + b"}"
    seeds["index"]["many-tensors"] = json.dumps(
        {"weight_map": {f"t{i}": "model-00001-of-00002.safetensors" for i in range(MANY)}}).encode()
    seeds["safetensors"] = {"deep-list": safetensors(deep_list), "deep-object": safetensors(deep_object),
                            "deep-closed": safetensors(closed), "many-tensors": many_tensors()}
    for target, files in seeds.items():
        os.makedirs(os.path.join(sys.argv[1], target), exist_ok=True)
        for name, contents in files.items():
            with open(os.path.join(sys.argv[1], target, name), "wb") as file:
                file.write(contents)


if __name__ == "__main__":
    main()
