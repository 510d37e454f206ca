"""OffloadAdamW on two ranks: FSDP2 and DDP, over gloo on the CPU. Skipped where torch is not installed."""

import json
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
import ferry_offload as ferry  # noqa: E402
from ferry_offload.torch import OffloadAdamW  # noqa: E402

PROGRAM = """
import contextlib, json, os, sys, torch, torch.distributed as dist
from ferry_offload.torch import OffloadAdamW

rank, way, storage = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
dist.init_process_group("gloo", rank=rank, world_size=2)

def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(33, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))

def shard(module):
    if way.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in (module[0], module[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    return torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view="views" in way)

def train(module, optimizer, clip=None):
    generator = torch.Generator().manual_seed(7 + rank)
    for _ in range(4):
        for left in reversed(range(passes)):
            with contextlib.nullcontext() if left == 0 else module.no_sync():
                module(torch.randn(8, 33, generator=generator)).pow(2).mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])

passes = 3 if "passes" in way else 1
options = {"overlap": not way.endswith("step"), "accumulation_steps": passes}
if way.startswith("fsdp") and rank == 1:
    options |= {"host": "64KiB", "nvme": [storage], "chunk_elements": 256}
mine = shard(model())
norm = 1e3 if way.startswith("ddp") else 0.2  # nothing is clipped, so that updates made ahead are committed
optimizer = OffloadAdamW(mine.parameters(), lr=1e-2, max_norm=norm, **options)
found = train(mine, optimizer)
reference = shard(model())
expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), clip=norm)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
if way.startswith("fsdp"):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    state = get_optimizer_state_dict(mine, optimizer)["state"]["0.weight"]
    assert tuple(state["exp_avg"].full_tensor().shape) == (256, 33)
print(json.dumps(vars(optimizer.stats)), flush=True)
optimizer.close()
os._exit(0)  # of the ranks one may have left before the other
"""


def run(way, storage, port):
    ranks = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(PROGRAM), str(rank), way, str(storage), str(port)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        ends = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, ends):
        assert rank.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


@pytest.fixture
def port():
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("way", ["fsdp", "fsdp in step"])
def test_fsdp_shards(way, storage, port):
    reports = run(way, storage, port)
    assert reports[1]["nvme_bytes"] > 0 and reports[0]["norm"] == reports[1]["norm"]


@pytest.mark.parametrize("way", ["ddp", "ddp passes", "ddp views passes", "ddp in step"])
def test_ddp(way, storage, port):
    """Updates made ahead are of the ranks' mean, which is there when backward ends."""
    for report in run(way, storage, port):
        ahead = 0 if way == "ddp in step" else report["updates_committed"] + report["updates_in_step"]
        assert report["steps"] == 4 and report["updates_rolled_back"] == 0 and (report["updates_committed"] > 0) == (ahead > 0)


def test_shards_of_the_first_fsdp_are_refused(port):
    """Each rank would clip by a norm of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        sharded = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        with pytest.raises(ferry.UsageError, match="fully_shard"):
            OffloadAdamW(sharded.parameters(), max_norm=1.0)
    finally:
        torch.distributed.destroy_process_group()
