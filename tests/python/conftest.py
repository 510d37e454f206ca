"""What the tests of the Python package share. They run against an installed wheel: tests/e2e/python_test.py."""

import contextlib

import pytest

# A libferry.so that was built with NCCL brings the system's, and torch wants its own: the first one loaded counts.
# (A wheel that builds ferry has none.)
with contextlib.suppress(ImportError):
    import torch  # noqa: F401


@pytest.fixture
def storage(tmp_path_factory):
    """A directory for NVMe. Nothing may be left in it."""
    folder = tmp_path_factory.mktemp("nvme")
    yield folder
    assert list(folder.iterdir()) == []
