"""States of offloading optimizers: saved, loaded, torch's, and refused ones."""

import copy

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from offload import (  # noqa: E402,F401: some are fixtures
    Data, FORMATS, made_ahead, make, make_model, nothing_is_taken_back, placed, train, weights_of)

from ferry_offload.torch import OffloadAdamW  # noqa: E402
from ferry_offload.torch._format import Format  # noqa: E402


def test_codes_of_a_loaded_state_are_those_of_an_update_but_close_to_half_way():
    from ferry_offload.torch._format import Format
    format = Format("sgd", ["momentum_buffer"], "int8", "fp32")
    shares = torch.tensor(ferry.moment_shares("sgd"))
    assert len(shares) == 256 and torch.equal(shares, shares.sort().values)
    around_half_way = [torch.cat([torch.ones(1), shares[:-1] + shares.diff() * (0.5 + off)]) for off in (-2**-11, 2**-11)]
    values = torch.cat([shares, *around_half_way, torch.zeros(256),
                        torch.randn(1000, generator=torch.Generator().manual_seed(1)).exp()])
    made, loaded = (format.empty(len(values), torch.device("cpu")) for _ in range(2))
    format.set_moment(made, "m", None)
    assert not format.moment(made, "m").any()
    ferry.update(ferry.Hyper("sgd", momentum=0.9), 1, values, **made)
    format.set_moment(loaded, "m", values)
    assert torch.equal(made["m"], loaded["m"]) and torch.equal(made["m_scale"], loaded["m_scale"])
    assert (format.moment(loaded, "m") - values).abs().max() < 0.1 * values.abs().max()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(made is x for x in args):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("given", ["values", "values and scales", "scales", "nothing"])
@pytest.mark.parametrize("name", ["m", "v"])
def test_moments_are_coded_by_slices_to_the_same_codes(monkeypatch, name, given):
    from ferry_offload.torch import _format
    format = _format.Format("adamw", ["exp_avg", "exp_avg_sq"], "int8", "fp32")
    count = 10 * 256 + 77
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).pow(2 if name == "v" else 3)
    scales = _format.scales_of(values, count) * 2 if "scales" in given else None
    whole, sliced = (format.empty(count, torch.device("cpu")) for _ in range(2))
    format.set_moment(whole, name, values if "values" in given else torch.zeros(count), scales)
    monkeypatch.setattr(_format, "_SLICE", 3 * 256)
    with Largest() as largest:
        format.set_moment(sliced, name, values if "values" in given else None, scales)
    assert all(torch.equal(whole[row], sliced[row]) for row in whole)
    assert whole[name].unique().numel() > 100 or "values" not in given
    assert largest.elements <= 3 * 256


def resumed(make, state_dict, model_state, **options):
    model = make_model(torch.bfloat16)
    optimizer = make(OffloadAdamW, model, lr=1.0, **options)
    optimizer.load_state_dict(state_dict)
    model.load_state_dict(model_state)  # in either order: what is the master's weight already stays it
    return model, optimizer


@pytest.mark.parametrize("format", ["fp32", *FORMATS])
@pytest.mark.parametrize("name", ["host", "nvme"])
def test_a_saved_state_goes_on_with_the_same_bits_anywhere(make, storage, tmp_path, name, format):
    smaller, budget = FORMATS.get(format, ({}, None))
    model, data = make_model(torch.bfloat16), Data(torch.bfloat16)
    optimizer = make(OffloadAdamW, model, lr=1e-2, **smaller)

    def steps(model, optimizer, count):
        for _ in range(count):
            data.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(model, optimizer, 3)
    torch.save([model.state_dict(), optimizer.state_dict(), data.generator.get_state()], tmp_path / "run")
    steps(model, optimizer, 3)
    saved = torch.load(tmp_path / "run")
    data.generator.set_state(saved[2])
    placement = placed(name, storage)
    if name == "nvme" and budget:
        placement["host"] = budget
    other, again = resumed(make, saved[1], saved[0], **smaller, **placement)
    assert (again.stats.nvme_bytes > 0) == (name == "nvme")
    assert again.param_groups[0]["lr"] == 1e-2
    steps(other, again, 3)
    assert torch.equal(weights_of(model), weights_of(other))
    again.close()


def test_state_goes_to_torch_and_comes_from_it(make):
    ours, theirs = make_model(), make_model()
    mine, reference = make(OffloadAdamW, ours, lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    assert mine.state_dict()["state"] == {}
    train(ours, mine, steps=3)
    train(theirs, reference, steps=3)
    exchanged = copy.deepcopy(mine.state_dict()), copy.deepcopy(reference.state_dict())
    reference.load_state_dict(exchanged[0])
    mine.load_state_dict(exchanged[1])
    for state in mine.state_dict()["state"].values():
        assert int(state["step"]) == 3 and set(state) == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(train(ours, mine, steps=3), train(theirs, reference, steps=3), rtol=1e-4, atol=1e-6)


def test_a_state_between_backward_and_step_is_the_last_steps(make, storage):
    model = make_model()
    optimizer = make(OffloadAdamW, model, **placed("nvme", storage))
    train(model, optimizer, steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    Data().loss(model).backward()
    assert made_ahead(optimizer)
    for one, other in zip(before["state"].values(), optimizer.state_dict()["state"].values()):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_torch_distributed_checkpoint_takes_it(make):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    model, other = make_model(), make_model()
    optimizer, fresh = make(OffloadAdamW, model, lr=1e-2), make(OffloadAdamW, other, lr=1e-2)
    train(model, optimizer, steps=2)
    state = get_optimizer_state_dict(model, optimizer)
    assert "0.weight" in state["state"]
    template = get_optimizer_state_dict(other, fresh)
    assert template["state"].keys() == state["state"].keys() and torch.equal(weights_of(other), weights_of(make_model()))
    set_optimizer_state_dict(other, fresh, copy.deepcopy(state))
    other.load_state_dict(model.state_dict())
    assert torch.equal(train(model, optimizer, steps=2), train(other, fresh, steps=2))


def _with(change):
    def changed(state):
        change(state)
        return state
    return changed


@pytest.mark.parametrize("change", [
    _with(lambda state: state["state"][2].update(exp_avg_sq=torch.zeros(3))),
    _with(lambda state: state["state"][1].update(exp_avg="hello")),
    _with(lambda state: state["state"][3].update(step=torch.tensor(1e30))),
    _with(lambda state: state["param_groups"][0].update(lr=-1.0)),
    _with(lambda state: state["param_groups"][0].update(amsgrad=True)),
    _with(lambda state: state["param_groups"][0].pop("betas")),
], ids=["size", "type", "step", "lr", "amsgrad", "betas"])
def test_a_state_that_is_refused_changes_nothing(make, change):
    found = []
    for loads in (False, True):
        model, data = make_model(), Data()
        optimizer = make(OffloadAdamW, model, lr=1e-2)
        for step in range(3):
            if step == 1 and loads:
                with pytest.raises(ferry.UsageError):
                    optimizer.load_state_dict(change(copy.deepcopy({**optimizer.state_dict()})))
            data.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((weights_of(model), optimizer.param_groups[0]["lr"], optimizer.state_dict()["state"][0]["step"]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]


@pytest.mark.parametrize("name", ["host", "nvme"])
def test_a_load_that_failed_keeps_nothing_from_closing(monkeypatch, storage, name):
    model = make_model()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, **placed(name, storage))
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    with monkeypatch.context() as patched:
        def fail(*_):
            raise RuntimeError("no room for a temporary")

        patched.setattr(Format, "set_moment", fail)
        with pytest.raises(RuntimeError, match="no room") as caught:
            optimizer.load_state_dict(state)
    optimizer.close()  # while the error lives, with the frames that it came through
    assert caught.traceback
