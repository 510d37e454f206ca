"""PTX of the project's kernels, by the commands that build them."""

import json
import os
import shlex
import subprocess
from pathlib import Path

COMMANDS = Path(os.environ.get("FERRY_BUILD_DIR", "build/release")) / "compile_commands.json"


def kernel_files():
    """Every .cu file of this build; none where CUDA is not built."""
    entries = json.loads(COMMANDS.read_text())
    return sorted({e["file"] for e in entries if e["file"].endswith(".cu")})


def ptx_of(name, without=(), flags=(), architecture="90"):
    """PTX of a .cu file by its own build command, less some flags and with others; None where CUDA
    is not built."""
    entries = [e for e in json.loads(COMMANDS.read_text()) if e["file"].endswith(name)]
    if not entries:
        return None
    words = shlex.split(entries[0]["command"])
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("-o", "-MF", "-MT"):
            skip = True
        elif word not in ("-c", "-MD", *without) and "code=" not in word:
            kept.append(word)
    command = [*kept, *flags, f"-arch=compute_{architecture}", "-ptx", "-o", "-"]
    return subprocess.run(command, cwd=entries[0]["directory"], check=True, timeout=600,
                          capture_output=True, text=True).stdout
