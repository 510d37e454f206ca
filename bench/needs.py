"""What a script needs before it begins. Whatever is missing ends it at once, with a sentence, not minutes later."""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys

from common import output_of
from training import GIB, ControlGroup, words_of


def directory(text):
    """The type of an option that names a directory to write to."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    if not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return text


def add_fio_option(parser):
    parser.add_argument("--without-fio", action="store_true", help="ferry alone, without the rows beside fio")


def fio(options):
    if not options.without_fio and not shutil.which("fio"):
        sys.exit("fio is not here: apt-get install fio, or measure ferry alone with --without-fio")


def packages(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"python3 cannot import {' and '.join(missing)}: pip install {' '.join(missing)}")


def file_system(path):
    """As the kernel names it: tmpfs, ext2/ext3, xfs."""
    return output_of(["stat", "--file-system", "--format=%T", str(path)])


def room(path, size):
    """So many free bytes at the path."""
    left = os.statvfs(path)
    free = left.f_bavail * left.f_frsize
    if free < size:
        sys.exit(f"{path} has {free / GIB:.3g} GiB free; the run writes {size / GIB:.3g} GiB there: "
                 "make room, or name another directory with --path")


def control_group(limit):
    try:
        with ControlGroup(limit):
            pass
    except OSError as error:
        sys.exit(f"no control group can be made here ({error}): run as root where /sys/fs/cgroup can be written to, or "
                 "leave out --cgroup; the host peak is then what was resident")


def gpus(count):
    found = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    if len(found) < count:
        sys.exit(f"{count} GPUs are needed, nvidia-smi names {len(found)}")


def plan(options, config, settings):
    """What `ferry plan` says of the run: its JSON. Ends the script where there is no such device, where the
    budgets are too small, or where the configuration is wrong."""
    done = subprocess.run([options.ferry, "plan", str(config), "--json", "--no-prediction",
                           *words_of(settings, options.settings)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr.strip())
    return json.loads(done.stdout)
