"""The call surface of DeepSpeed's async_io and CPU Adam, and a training with ferry's operators in place of its own.
Skipped where torch is not installed; the training, where DeepSpeed is not."""

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from ferry_offload import deepspeed as ds  # noqa: E402


@pytest.fixture
def handle():
    return ds.aio_handle()


def noise(count, seed=0, dtype=torch.uint8):
    made = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return made if dtype == torch.uint8 else made.to(dtype)


# ---------------------------------------------------------------- files

def test_defaults_are_deepspeeds():
    handle = ds.aio_handle()
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 20, 128, 1)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    other = ds.aio_handle(4096, 4, True, True, 2)
    assert (other.get_block_size(), other.get_queue_depth(), other.get_intra_op_parallelism()) == (4096, 4, 2)
    assert (other.get_single_submit(), other.get_overlap_events()) == (True, True)
    with pytest.raises(ferry.UsageError, match="queue_depth"):
        ds.aio_handle(queue_depth=0)


@pytest.mark.parametrize("offset", [0, 4096, 5000])
@pytest.mark.parametrize("count", [1, 4096, 100_001])
@pytest.mark.parametrize("locked", [True, False])
def test_what_is_written_is_read(handle, tmp_path, offset, count, locked):
    path = str(tmp_path / "a")
    buffer = handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8)) if locked else torch.empty(count, dtype=torch.uint8)
    buffer.copy_(noise(count))
    assert handle.sync_pwrite(buffer, path, offset) == 1
    assert (tmp_path / "a").read_bytes() == bytes(offset) + noise(count).numpy().tobytes()
    buffer.zero_()
    assert handle.sync_pread(buffer, path, offset) == 1
    assert torch.equal(buffer, noise(count))
    assert handle.free_cpu_locked_tensor(buffer) is locked


def test_wait_counts_what_ended(handle, tmp_path):
    tensors = [noise(10_000 + i, seed=i) for i in range(20)]
    for i, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, str(tmp_path / "a"), 16_384 * i) == 0
    assert handle.wait() == 20 and handle.wait() == 0
    again = [torch.zeros_like(tensor) for tensor in tensors]
    for i, tensor in enumerate(again[:-1]):
        assert handle.async_pread(tensor, str(tmp_path / "a"), file_offset=16_384 * i) == 0
    assert handle.sync_pread(again[-1], str(tmp_path / "a"), 16_384 * 19) == 20
    assert all(torch.equal(a, b) for a, b in zip(tensors, again))


def test_each_way_to_call(handle, tmp_path):
    path, tensor = str(tmp_path / "a"), noise(9000)
    assert handle.write(tensor, path, True) == 0
    back = torch.zeros_like(tensor)
    assert handle.read(back, path, True) == 0 and torch.equal(back, tensor)
    assert handle.read(back[:1000], path, False, 8000) == 0 and torch.equal(back[:1000], tensor[8000:])
    assert handle.pwrite(tensor, path, True, False) == 1
    assert handle.pwrite(tensor, path, False, True, 9000) == 0 and handle.wait() == 1
    assert handle.pread(back, path, False, False, 9000) == 1 and torch.equal(back, tensor)
    assert handle.pread(back, path, True, **{"async": True}, file_offset=9000) == 0 and handle.wait() == 1
    with pytest.raises(TypeError, match="async"):
        handle.pread(back, path, True)
    assert ds.aio_write(tensor, path, 4096, 4, False, False, True) == 0
    with pytest.raises(ferry.UsageError, match="as large as the file"):
        ds.aio_read(back, path, 4096, 4, False, False, True)
    os.truncate(path, 9000)
    assert ds.aio_read(back.zero_(), path, 4096, 4, False, False, True) == 0 and torch.equal(back, tensor)
    assert ds.deepspeed_memcpy(back, tensor + 1) == 0 and torch.equal(back, tensor + 1)


def test_a_file_that_is_open(handle, tmp_path):
    with open(tmp_path / "a", "wb") as file:
        assert handle.async_pwrite(noise(5000), file.fileno(), 4096) == 0
        assert handle.async_pwrite(noise(4096, 1), fd=file.fileno()) == 0
        assert handle.wait() == 2
    assert (tmp_path / "a").read_bytes() == noise(4096, 1).numpy().tobytes() + noise(5000).numpy().tobytes()


def test_tensors_with_gaps_of_other_types_and_empty_ones(handle, tmp_path):
    path = str(tmp_path / "a")
    matrix = noise(600, dtype=torch.bfloat16).view(20, 30)
    handle.sync_pwrite(matrix.t(), path)
    back = torch.zeros(20, 30, dtype=torch.bfloat16)
    handle.sync_pread(back.t(), path)
    assert torch.equal(back, matrix)
    scalar = torch.tensor(2.5)
    handle.sync_pwrite(scalar, path)
    other = torch.tensor(0.0)
    handle.sync_pread(other, path)
    assert other == 2.5
    assert handle.sync_pread(torch.empty(0), path) == 1


def test_pinned_tensors_are_known_to_every_handle(handle):
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (1000,) and tensor.data_ptr() % 4096 == 0 and not tensor.any()
    assert ds.aio_handle().is_pinned(tensor[10:]) and not handle.is_pinned(torch.empty(3))
    pins = ds.pin_handle()
    assert pins.free_cpu_locked_tensor_by_ptr(tensor.data_ptr()) and not handle.free_cpu_locked_tensor(tensor)
    tensor.fill_(1)  # its memory lives as long as it does


def test_errors_are_exceptions(handle, tmp_path):
    buffer = torch.empty(4096, dtype=torch.uint8)
    with pytest.raises(ferry.StorageError, match="No such file"):
        handle.async_pread(buffer, str(tmp_path / "none"))
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(ferry.StorageError, match="shorter") as caught:
        handle.sync_pread(buffer, str(tmp_path / "short"))
    assert caught.value.measured == "4 bytes"
    with pytest.raises(ferry.FerryError):
        handle.sync_pwrite(buffer, str(tmp_path))
    assert handle.wait() == 0


# ---------------------------------------------------------------- Adam

def adam_steps(mode, dtype=torch.float32, state=torch.float32, correction=True, steps=5):
    p, m, v = noise(5000, 1).to(dtype) / 256, torch.zeros(5000, dtype=state), torch.zeros(5000, dtype=state)
    ds.create_adam(7, adamw_mode=mode)
    for step in range(1, steps + 1):
        g = (torch.randn(5000, generator=torch.Generator().manual_seed(step)) / 8).to(dtype)
        assert ds.adam_update(7, step, 1e-2, 0.9, 0.99, 1e-8, 0.1, correction, p, g, m, v) == 0
    ds.destroy_adam(7)
    return p, m, v


@pytest.mark.parametrize("mode", [True, False], ids=["adamw", "adam"])
def test_adam_is_torchs(mode):
    p = torch.nn.Parameter(noise(5000, 1).float() / 256)
    reference = (torch.optim.AdamW if mode else torch.optim.Adam)([p], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 6):
        p.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)) / 8
        reference.step()
    found = adam_steps(mode)
    torch.testing.assert_close(found[0], p.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], reference.state[p]["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[2], reference.state[p]["exp_avg_sq"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", ["fp32", "the same"])
def test_sixteen_bits_are_widened_and_rounded(monkeypatch, dtype, state):
    monkeypatch.setattr(ds, "_ELEMENTS", 1000)
    exact = adam_steps(True)
    found = adam_steps(True, dtype, torch.float32 if state == "fp32" else dtype)
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].float(), exact[0], rtol=2e-2, atol=2e-2)
    assert not torch.equal(found[0].float(), noise(5000, 1).to(dtype).float() / 256)


def test_without_the_correction_of_bias():
    p, m, v = adam_steps(True, correction=False, steps=1)
    g = torch.randn(5000, generator=torch.Generator().manual_seed(1)) / 8
    expected = noise(5000, 1).float() / 256 * (1 - 1e-2 * 0.1) - 1e-2 * (0.1 * g) / ((0.01 * g * g).sqrt() + 1e-8)
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)


def test_tensors_with_gaps_are_updated_where_they_are():
    whole = [torch.ones(6, 8).t() for _ in range(4)]
    parts = [torch.ones(8, 6) for _ in range(4)]
    ds.create_adam(8)
    for p, g, m, v in (whole, parts):
        ds.adam_update(8, 1, 1e-2, 0.9, 0.99, 1e-8, 0.0, True, p, g, m, v)
    ds.destroy_adam(8)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts)) and parts[0][0, 0] != 1


def test_a_step_is_rolled_back():
    p, m, v = adam_steps(True, steps=4)
    before = [one.clone() for one in (p, m, v)]
    g = torch.randn(5000, generator=torch.Generator().manual_seed(5)) / 8
    ds.create_adam(9)
    arguments = (9, 5, 1e-2, 0.9, 0.99, 1e-8, 0.1, True, p, g, m, v)
    ds.adam_update(*arguments)
    assert not torch.allclose(p, before[0], atol=1e-4)
    assert ds.adam_rollback(*arguments) == 0
    for one, other in zip((p, m, v), before):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    ds.destroy_adam(9)
    with pytest.raises(ferry.UsageError, match="no such Adam"):
        ds.adam_update(*arguments)


# ---------------------------------------------------------------- in place of DeepSpeed's

TRAINING = """
import json, os, sys
import torch
way, storage = sys.argv[1], sys.argv[2]
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3], RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
import deepspeed
if way == "nvme":
    import ferry_offload.deepspeed
    print(ferry_offload.deepspeed.install())
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) for _ in range(3)))
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 1100000}  # 1 MiB at least is swapped
if way == "nvme":
    zero |= {"offload_optimizer": {"device": "nvme", "nvme_path": storage, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True},
             "offload_param": {"device": "nvme", "nvme_path": storage, "buffer_count": 5, "buffer_size": 1100000}}
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": zero, "bf16": {"enabled": True},
          "zero_allow_untested_optimizer": True, "gradient_clipping": 0.5,
          "aio": {"block_size": 65536, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}}
if way == "nvme":
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    optimizer = None
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config)
generator = torch.Generator().manual_seed(2)
losses = []
for _ in range(6):
    x = torch.randn(8, 1024, generator=generator).to(torch.bfloat16)
    loss = engine(x).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
swapped = sum(len(files) for _, _, files in os.walk(storage))
print(json.dumps({"losses": losses, "files": swapped, "of": type(getattr(engine.optimizer, "optimizer", None)).__name__}))
sys.stdout.flush()
os._exit(0)
"""


def deepspeed_training(way, storage):
    import json
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(TRAINING), way, str(storage), str(port)],
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed")
def test_a_deepspeed_training_with_ferrys_operators(tmp_path):
    out, report = deepspeed_training("nvme", tmp_path)
    assert "['AsyncIOBuilder', 'CPUAdamBuilder'" in out
    assert report["of"] == "DeepSpeedCPUAdam" and report["files"] > 0
    expected = deepspeed_training("memory", tmp_path)[1]
    assert report["losses"][0] == expected["losses"][0]
    torch.testing.assert_close(torch.tensor(report["losses"]), torch.tensor(expected["losses"]), rtol=2e-2, atol=1e-3)
    assert report["losses"][-1] < report["losses"][0]


def test_the_call_surface_is_that_of_deepspeeds_sources():
    """Every function, and every argument by its name."""
    found = importlib.util.find_spec("deepspeed")
    sources = pathlib.Path(found.submodule_search_locations[0], "ops/csrc") if found else None
    if sources is None or not (sources / "aio/py_lib/py_ds_aio.cpp").exists():
        pytest.skip("no sources of DeepSpeed")
    checked = 0
    for path, module, owner in (("aio/py_lib/py_ds_aio.cpp", "AsyncIOBuilder", ds.aio_handle),
                                ("pin_memory/py_ds_pin_memory.cpp", "PinMemoryBuilder", ds.pin_handle),
                                ("adam/cpu_adam.cpp", "CPUAdamBuilder", None)):
        if not (sources / path).exists():
            continue  # of an older DeepSpeed
        text = (sources / path).read_text()
        for name in re.findall(r'\bm\.def\(\s*"(\w+)"', text):
            if not name.startswith("zenflow_"):
                assert callable(getattr(ds._OPERATORS[module], name)), name
                checked += 1
        for name, body in re.findall(r'(?<!\bm)\.def\(\s*"(\w+)"(.*?)(?=\.def\(|\Z)', text, re.DOTALL):
            parameters = inspect.signature(getattr(owner, name)).parameters
            takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
            for argument in re.findall(r'"(\w+)"_a', body):
                assert takes_any or argument in parameters, (name, argument)
            checked += 1
    assert checked > 25


def test_what_ferry_has_not_is_said():
    with pytest.raises(AttributeError, match="no zenflow_adam_create(?s:.*)uninstall"):
        ds._OPERATORS["CPUAdamBuilder"].zenflow_adam_create


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed")
def test_deepspeeds_own_come_back(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops import op_builder
    builder = op_builder.CPUAdamBuilder
    before = dict(vars(builder))
    assert ds.install() == ds.install()
    assert builder().load().adam_update is ds.adam_update and builder().is_compatible()
    assert op_builder.AsyncIOBuilder().load().aio_handle is ds.aio_handle

    class Derived(builder):
        def load(self, verbose=False):
            return "its own"

    assert Derived().load() == "its own"
    ds.uninstall()
    assert dict(vars(builder)) == before
