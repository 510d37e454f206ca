"""What offloading optimizers refuse, and what they leave behind."""

import copy
import gc
import math
import pickle
import subprocess
import sys
import textwrap
import time

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from offload import (  # noqa: E402,F401: some are fixtures
    Data, make, make_model, nothing_is_taken_back, placed, train, weights_of)

from ferry_offload.torch import OffloadAdamW, OffloadSGD  # noqa: E402


def parameter(*shape, **options):
    return torch.nn.Parameter(torch.ones(*shape, **options))


@pytest.mark.parametrize(("refused", "says"), [
    (lambda: OffloadAdamW([parameter(3, dtype=torch.float64)]), "float64"),
    (lambda: OffloadAdamW([{"params": [parameter(3)], "amsgrad": True}]), "amsgrad"),
    (lambda: OffloadAdamW([parameter(3)], accumulation_steps=0), "accumulation_steps"),
    (lambda: OffloadAdamW([parameter(3)], accumulation_steps=1.5), "accumulation_steps.*\n.*1.5"),
    (lambda: OffloadAdamW([parameter(3)], chunk_elements=-1), "chunk_elements"),
    (lambda: OffloadAdamW([parameter(3)], threads=-1), "threads"),
    (lambda: OffloadAdamW([parameter(3)], max_norm=-1.0), "max_norm"),
    (lambda: OffloadAdamW([parameter(3)], max_norm=math.nan), "max_norm"),
    (lambda: OffloadAdamW([parameter(3)], max_norm="1"), "max_norm"),
    (lambda: OffloadAdamW([parameter(3)], lr=-1.0), "lr"),
    (lambda: OffloadAdamW([{"params": [parameter(3)], "lr": math.nan}]), "lr"),
    (lambda: OffloadAdamW([parameter(3)], betas=(0.9, 1.0)), "beta2"),
    (lambda: OffloadSGD([parameter(3)], momentum=-0.1), "momentum"),
    (lambda: OffloadAdamW([parameter(3)], host=-1), "size"),
    (lambda: OffloadAdamW([parameter(3)], gpu_state=-1), "size"),
    (lambda: OffloadAdamW([parameter(3)], host="a lot"), "a lot"),
    (lambda: OffloadAdamW([parameter(3)], moments="fp16"), "fp16"),
    (lambda: OffloadAdamW([parameter(3)], master="half"), "half"),
    (lambda: OffloadAdamW([parameter(3)], master="split"), "bfloat16"),
    (lambda: OffloadAdamW([parameter(3, device="meta")]), "meta"),
    (lambda: OffloadAdamW([torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))]), "share memory"),
    (lambda: OffloadAdamW([parameter(100_000)], host="1MB"), "does not fit|no room"),
    (lambda: OffloadAdamW([parameter(100_000)], host="300KB"), "no room"),
    (lambda: OffloadAdamW([]), "empty parameter list"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_no_optimizer_is_made_of(refused, says):
    with pytest.raises((ferry.FerryError, ValueError), match=says):
        refused()


def test_a_wrong_constant_costs_no_state(make):
    model, data = make_model(), Data()
    optimizer = make(OffloadAdamW, model, lr=1e-2)
    for wrong in (False, True):
        data.loss(model).backward()
        if wrong:
            before = weights_of(model)
            optimizer.param_groups[0]["lr"] = -1.0
            with pytest.raises(ferry.UsageError, match="lr"):
                optimizer.step()
            assert torch.equal(before, weights_of(model))
            optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        optimizer.zero_grad()
    other = make_model()
    reference, data = torch.optim.AdamW(other.parameters(), lr=1e-2), Data()
    for _ in range(2):
        data.loss(other).backward()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(weights_of(model), weights_of(other), rtol=1e-5, atol=1e-6)
    with pytest.raises(ferry.UsageError, match="beta1"):
        optimizer.add_param_group({"params": [parameter(3)], "betas": (1.0, 0.9)})
    assert len(optimizer.param_groups) == 1
    data.loss(model).backward()
    optimizer.step()


def test_what_a_closed_optimizer_refuses(make):
    model = make_model()
    optimizer = make(OffloadAdamW, model)
    state = optimizer.state_dict()
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(state),
                 lambda: optimizer.add_param_group({"params": [parameter(3)]})):
        with pytest.raises(ferry.ClosedError, match="closed"):
            call()
    Data().loss(model).backward()  # its hooks are gone
    assert torch.isfinite(next(model.parameters()).grad[0]).all()


def test_no_copy_of_it_is_made(make):
    optimizer = make(OffloadAdamW, make_model())
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ferry.UsageError, match="state_dict"):
            copied(optimizer)


@pytest.mark.parametrize("steps", [-1.0, math.nan, math.inf, 1.5])
def test_a_number_of_steps_that_is_none(make, steps):
    model, data = make_model(), Data()
    optimizer = make(OffloadAdamW, model)
    train(model, optimizer, steps=1)
    state = optimizer.state_dict()
    wrong = copy.deepcopy(state)
    wrong["state"][1]["step"] = torch.tensor(steps)
    with pytest.raises(ferry.UsageError, match="parameter 1"):
        optimizer.load_state_dict(wrong)
    assert torch.equal(optimizer.state_dict()["state"][1]["exp_avg"], state["state"][1]["exp_avg"])
    data.loss(model).backward()
    optimizer.step()


def test_one_directory_is_one(storage):
    optimizer = OffloadAdamW([parameter(100_000)], nvme=str(storage), host="1500KB", chunk_elements=8192)
    assert optimizer.stats.nvme_bytes > 0 and list(storage.iterdir())
    optimizer.close()


def test_sparse_gradients_and_moved_parameters(make):
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = make(OffloadAdamW, table)
    with pytest.raises(ferry.UsageError, match="sparse"):
        table(torch.tensor([1])).sum().backward()
    model = make_model()
    optimizer = make(OffloadAdamW, model)
    model.to(torch.bfloat16)
    with pytest.raises(ferry.UsageError, match="moved or cast"):
        optimizer.step()
    one = torch.nn.Linear(4, 4)
    optimizer = make(OffloadAdamW, one)
    one.weight.data = torch.zeros(2, 4)
    with pytest.raises(ferry.UsageError, match="another size"):
        optimizer.step()


def test_nothing_is_left_when_it_goes(storage):
    model = make_model()
    optimizer = OffloadAdamW(model.parameters(), **placed("nvme", storage))
    train(model, optimizer, steps=1)
    Data().loss(model).backward()
    assert list(storage.iterdir())
    del optimizer
    deadline = time.monotonic() + 30
    while list(storage.iterdir()):  # updates that are under way end first
        gc.collect()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    Data().loss(model).backward()  # its hooks do nothing


def test_the_end_of_the_interpreter_with_updates_under_way(storage):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import sys, torch
        from ferry_offload.torch import OffloadAdamW
        model = torch.nn.Linear(512, 512)
        optimizer = OffloadAdamW(model.parameters(), host="2MiB", nvme=[sys.argv[1]], chunk_elements=8192)
        for _ in range(2):
            model(torch.ones(2, 512)).sum().backward()
        print(optimizer.stats.nvme_bytes > 0)
    """), str(storage)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_group_that_does_not_fit_leaves_the_optimizer_as_it_was(make):
    model = make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2, host="4MiB")
    late = torch.nn.Parameter(torch.zeros(4 << 20))
    with pytest.raises(ferry.DoesNotFitError):
        optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == 1
    Data().loss(model).backward()
    optimizer.step()
    with pytest.raises(ferry.DoesNotFitError):
        optimizer.add_param_group({"params": [late]})


def test_a_child_of_fork_is_refused(tmp_path):
    """It has no thread that updates, and must not wait for one."""
    code = """
        import os, sys, torch
        import ferry_offload as ferry
        from ferry_offload.torch import OffloadAdamW
        model = torch.nn.Linear(8, 8)
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                optimizer.state_dict()
            except ferry.ClosedError as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False).returncode == 7
