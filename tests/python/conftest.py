"""What the tests of the Python package share. They run against an installed wheel: tests/e2e/python_test.py."""

import pytest


@pytest.fixture
def storage(tmp_path_factory):
    """A directory for NVMe. Nothing may be left in it."""
    folder = tmp_path_factory.mktemp("nvme")
    yield folder
    assert list(folder.iterdir()) == []
