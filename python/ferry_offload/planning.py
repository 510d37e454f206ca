"""`ferry plan`: where everything would go and what a step would take, without training."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import error_of

_STATUS = {1: "internal", 2: "usage", 3: "does not fit", 4: "io", 5: "diverged", 6: "rank lost"}


def program() -> str:
    """The path of the `ferry` program of this wheel."""
    return str(Path(__file__).with_name("bin") / "ferry")


def plan(config: dict[str, Any] | str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plan of a configuration (docs/configuration.md), given as a dict or a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = config
        if isinstance(config, dict):
            path = os.path.join(folder, "config.json")
            Path(path).write_text(json.dumps(config))
        sets = [word for override in overrides for word in ("--set", override)]
        done = subprocess.run([program(), "plan", os.fspath(path), "--json", *sets], capture_output=True, text=True, check=False)
    if done.returncode:
        raise error_of(done.returncode, _STATUS.get(done.returncode, "internal"), done.stderr.strip())
    return json.loads(done.stdout)
