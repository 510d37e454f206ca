"""What the tests of OffloadAdamW and its like share."""

import concurrent.futures

import pytest

torch = pytest.importorskip("torch")
from ferry_offload.torch._worker import Worker  # noqa: E402


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.LayerNorm(96),
                               torch.nn.Linear(96, 32)).to(dtype)


class Data:
    """The same batches for every run."""

    def __init__(self, dtype=torch.float32):
        self.generator, self.dtype = torch.Generator().manual_seed(2), dtype

    def loss(self, model, scale=1.0):
        x = torch.randn(16, 64, generator=self.generator).to(self.dtype)
        return scale * model(x).float().pow(2).mean()


def train(model, optimizer, steps=6, dtype=torch.float32, passes=1, clip=None):
    data = Data(dtype)
    for _ in range(steps):
        for _ in range(passes):
            data.loss(model).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def made_ahead(optimizer):
    """The versions that backward has begun, once they are made."""
    versions = list(optimizer._versions.values())
    for version in versions:
        version.job.result()
    return versions


def weights_of(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


@pytest.fixture(autouse=True)
def nothing_is_taken_back(monkeypatch):
    """What backward began is made, so that every run counts the same. (test_torch_modules.py has it as it comes.)"""
    def made(_, version):
        concurrent.futures.wait([version.job])
        return False

    monkeypatch.setattr(Worker, "take_back", made)


@pytest.fixture
def make(storage):
    """Makes optimizers, and closes them."""
    made = []

    def one(kind, model, **options):
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else model
        made.append(kind(parameters, **options))
        return made[-1]

    yield one
    for optimizer in made:
        optimizer.close()


PLACEMENTS = {
    "host": {}, "in step": {"overlap": False}, "kept": {"keep_grads": True}, "small chunks": {"chunk_elements": 100},
    "nvme": {"host": "120KiB", "chunk_elements": 1024, "nvme": True},
    "nvme in step": {"host": "100KiB", "chunk_elements": 1024, "nvme": True, "overlap": False},
    "all nvme": {"host": "111KiB", "chunk_elements": 1024, "nvme": True},
}


def placed(name, storage):
    options = dict(PLACEMENTS[name])
    if options.get("nvme"):
        options["nvme"] = [storage]
    return options


# Of smaller state, and a budget with which some of it is on NVMe.
FORMATS = {"bf16": ({"moments": "bf16"}, "72KiB"), "int8": ({"moments": "int8"}, "72KiB"),
           "split": ({"master": "split"}, "116KiB"), "split, int8": ({"master": "split", "moments": "int8"}, "92KiB")}
