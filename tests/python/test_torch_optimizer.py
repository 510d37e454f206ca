"""OffloadAdamW and its like as torch.optim optimizers. Skipped where torch is not installed."""

import concurrent.futures
import contextlib
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
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ferry_offload.torch import OffloadAdam, OffloadAdamW, OffloadLion, OffloadSGD  # noqa: E402
from ferry_offload.torch._format import Format  # noqa: E402
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


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_the_state_lies_changes_no_bit(make, storage, name, dtype):
    runs = []
    for options in ({}, placed(name, storage)):
        model = make_model(dtype)
        optimizer = make(OffloadAdamW, model, lr=1e-2, max_norm=0.3, accumulation_steps=2, **options)
        runs.append((train(model, optimizer, dtype=dtype, passes=2), optimizer.state_dict()))
        assert ("nvme" in options) == (optimizer.stats.nvme_bytes > 0)
        assert optimizer.stats.clip_factor < 1
    assert torch.equal(runs[0][0], runs[1][0])
    for one, other in zip(runs[0][1]["state"].values(), runs[1][1]["state"].values()):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Of smaller state, and a budget with which some of it is on NVMe.
FORMATS = {"bf16": ({"moments": "bf16"}, "72KiB"), "int8": ({"moments": "int8"}, "72KiB"),
           "split": ({"master": "split"}, "116KiB"), "split, int8": ({"master": "split", "moments": "int8"}, "92KiB")}


@pytest.mark.parametrize("name", ["in step", "kept", "small chunks", "nvme"])
@pytest.mark.parametrize("kind", [OffloadAdamW, OffloadLion])
@pytest.mark.parametrize("format", FORMATS)
def test_where_smaller_state_lies_changes_no_bit(make, storage, name, kind, format):
    runs, (smaller, budget) = [], FORMATS[format]
    for options in ({}, placed(name, storage)):
        if "nvme" in options and kind is OffloadAdamW:
            options["host"] = budget
        model = make_model(torch.bfloat16)
        optimizer = make(kind, model, lr=1e-2, max_norm=0.3, accumulation_steps=2, **smaller, **options)
        runs.append((train(model, optimizer, dtype=torch.bfloat16, passes=2), optimizer.state_dict()))
        assert optimizer.stats.nvme_bytes > 0 or name != "nvme" or not options or kind is not OffloadAdamW
        assert optimizer.stats.clip_factor < 1
    assert torch.equal(runs[0][0], runs[1][0])
    for one, other in zip(runs[0][1]["state"].values(), runs[1][1]["state"].values()):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_split_master_is_the_fp32_one(make):
    runs = []
    for master in ("fp32", "split"):
        model = make_model(torch.bfloat16)
        optimizer = make(OffloadAdamW, model, lr=1e-2, master=master)
        weights = train(model, optimizer, steps=1, dtype=torch.bfloat16)
        runs.append((weights, torch.cat([s["master"].reshape(-1) for s in optimizer.state_dict()["state"].values()])))
    assert torch.equal(runs[0][1], runs[1][1])
    half_way = (runs[0][1].view(torch.int32) & 0xFFFF) == 0x8000  # rounded up in magnitude, not to even
    assert torch.equal(runs[0][0][~half_way], runs[1][0][~half_way])


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


def test_smaller_moments_are_near_those_of_32_bits(make):
    runs = {}
    for moments in ("fp32", "bf16", "int8"):
        model = make_model()
        start = weights_of(model)
        optimizer = make(OffloadAdamW, model, lr=1e-3, moments=moments, overlap=False)
        runs[moments] = train(model, optimizer, steps=50) - start, optimizer.stats.host_bytes, optimizer.state_dict()
    (wide, wide_bytes, _), (narrow, narrow_bytes, state), (codes, codes_bytes, _) = runs.values()
    assert 0 < (narrow - wide).norm() < 0.02 * wide.norm()
    assert 0 < (codes - wide).norm() < 0.1 * wide.norm()
    assert narrow_bytes < 0.75 * wide_bytes and codes_bytes < 0.56 * wide_bytes
    for of_parameter in state["state"].values():  # exactly what is kept, in fp32
        assert of_parameter["exp_avg"].dtype == torch.float32
        assert torch.equal(of_parameter["exp_avg"].bfloat16().float(), of_parameter["exp_avg"])


def test_a_budget_is_kept_to_the_byte(make, storage):
    optimizer = make(OffloadAdamW, make_model(), **placed("nvme", storage))
    assert 100_000 < optimizer.stats.host_bytes <= 120 << 10


TORCH = {
    "adamw": (OffloadAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (OffloadAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (OffloadSGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "nesterov": (OffloadSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("name", TORCH)
def test_fifty_steps_are_torchs(make, name):
    ours, theirs, options = TORCH[name]
    model, reference = make_model(), make_model()
    mine = train(model, make(ours, model, max_norm=0.4, **options), steps=50)
    expected = train(reference, theirs(reference.parameters(), **options), steps=50, clip=0.4)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(mine, weights_of(make_model()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fifty_steps_of_16_bits_are_torchs_on_fp32_masters(make, dtype):
    model, reference = make_model(dtype), make_model(dtype)
    mine = train(model, make(OffloadAdamW, model, lr=1e-2), 50, dtype)
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    optimizer, data = torch.optim.AdamW(masters, lr=1e-2), Data(dtype)
    for _ in range(50):
        data.loss(reference).backward()
        for master, p in zip(masters, reference.parameters()):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, reference.parameters()):
                p.copy_(master)
    # A rounding of 16 bits may go the other way, and the runs part from there on.
    torch.testing.assert_close(mine, weights_of(reference), rtol=0, atol=5e-3)


def test_lion_is_its_formula(make):
    model, reference = make_model(), make_model()
    mine = train(model, make(OffloadLion, model, lr=1e-3, weight_decay=0.1), steps=5)
    data, moments = Data(), [torch.zeros_like(p) for p in reference.parameters()]
    for _ in range(5):
        data.loss(reference).backward()
        with torch.no_grad():
            for p, m in zip(reference.parameters(), moments):
                p.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * (0.9 * m + 0.1 * p.grad).sign())
                m.mul_(0.99).add_(p.grad, alpha=0.01)
                p.grad = None
    torch.testing.assert_close(mine, weights_of(reference), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what .grad holds

def test_a_gradient_leaves_and_reading_fetches_it(make):
    model, reference = make_model(), make_model()
    optimizer = make(OffloadAdamW, model)
    Data().loss(model).backward()
    Data().loss(reference).backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert "DepartedGradient" in repr(p.grad) and p.grad.shape == p.shape
        assert torch.equal(p.grad.clone(), q.grad) and torch.equal(p.grad + 1, q.grad + 1)
        torch.testing.assert_close(p.grad.norm(), q.grad.norm())
    # Trainer logs the norm so.
    norms = [torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf")) for module in (model, reference)]
    torch.testing.assert_close(*norms)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("change", [
    lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    lambda model, optimizer: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
    lambda model, optimizer: model[0].weight.grad.mul_(2),
    lambda model, optimizer: model[0].weight.grad.data.clamp_(-1, 1),
    lambda model, optimizer: model[0].weight.grad.view(-1)[0].fill_(0),
    lambda model, optimizer: torch._foreach_mul_([p.grad for p in model.parameters()], 2.0),
], ids=["clip_grad_norm_", "clip_grad_value_", "in place", "data", "view", "foreach"])
def test_what_changes_a_gradient_that_left_is_refused(make, change):
    model = make_model()
    optimizer = make(OffloadAdamW, model)
    Data().loss(model).backward()
    with pytest.raises(ferry.UsageError, match="left for host memory") as caught:
        change(model, optimizer)
    assert "max_norm" in caught.value.remedy and "keep_grads" in caught.value.remedy
    optimizer.step()  # as if nothing had been tried


@pytest.mark.parametrize("options", [{"keep_grads": True}, {"overlap": False}, {"keep_grads": True, "chunk_elements": 500}])
def test_where_gradients_stay_clipping_outside_counts(make, options):
    model, inside = make_model(), make_model()
    mine = train(model, make(OffloadAdamW, model, lr=1e-2, **options), clip=0.3)
    expected = train(inside, torch.optim.AdamW(inside.parameters(), lr=1e-2), clip=0.3)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [
    lambda p: p.grad.mul_(0.5),
    lambda p: p.grad.data.mul_(0.5),  # no new version
    lambda p: setattr(p, "grad", p.grad * 0.5),
], ids=["in place", "data", "another"])
def test_where_gradients_stay_every_change_counts(make, change):
    weights = []
    for kind, options in ((OffloadSGD, {"keep_grads": True}), (OffloadSGD, {"overlap": False}), (torch.optim.SGD, {})):
        model = make_model()
        optimizer = make(kind, model, lr=0.1, **options) if options else kind(model.parameters(), lr=0.1)
        Data().loss(model).backward()
        for p in model.parameters():
            change(p)
        optimizer.step()
        weights.append(weights_of(model))
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "step"])
@pytest.mark.parametrize("options", [{}, {"keep_grads": True}, {"overlap": False}], ids=str)
def test_grad_scaler(make, options, unscale):
    weights = []
    for kind in (OffloadSGD, torch.optim.SGD):
        model, data = make_model(), Data()
        mine = {"max_norm": 0.3, **options} if kind is OffloadSGD else {}
        optimizer = make(kind, model, lr=1e-2, momentum=0.9, **mine) if mine else kind(model.parameters(), lr=1e-2, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            scaler.scale(data.loss(model, scale=float("inf") if step == 2 else 1.0)).backward()
            if unscale or not mine:
                scaler.unscale_(optimizer)
            if not mine:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append(weights_of(model))
        assert scaler.get_scale() == 512
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_the_program_sets(make):
    model, reference = make_model(), make_model()
    optimizer, expected = make(OffloadAdamW, model, lr=1e-2), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    Data().loss(model).backward()
    for module in (model, reference):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()
    expected.step()
    torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- when weights change

def test_weights_change_at_step_and_nowhere_else(make, storage):
    model = make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2, **placed("nvme", storage))
    before = weights_of(model)
    versions = [p._version for p in model.parameters()]
    Data().loss(model).backward()
    assert made_ahead(optimizer)
    assert torch.equal(weights_of(model), before)
    optimizer.step()
    assert not torch.equal(weights_of(model), before) and optimizer.stats.updates_committed > 0
    assert all(p._version > version for p, version in zip(model.parameters(), versions))  # autograd is told


def forget_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def forget_by_model(model, optimizer):
    model.zero_grad()


def forget_one_by_one(model, optimizer):
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("name", ["host", "nvme", "kept", "in step"])
@pytest.mark.parametrize("forget", [forget_by_optimizer, forget_by_model, forget_one_by_one])
def test_a_backward_without_a_step_never_happened(make, storage, name, forget):
    weights = []
    for tries in (0, 1):
        model, data = make_model(), Data()
        optimizer = make(OffloadAdamW, model, lr=1e-2, **placed(name, storage))
        for step in range(3):
            if tries and step != 1:
                (model(torch.ones(2, 64)).sum() * 7).backward()
                forget(model, optimizer)
            data.loss(model).backward()
            optimizer.step()
            forget(model, optimizer)
        optimizer.step()  # without any gradient
        weights.append(weights_of(model))
        if tries and optimizer.stats.updates_committed and name != "in step":
            assert optimizer.stats.updates_rolled_back > 0
        optimizer.close()
    assert torch.equal(*weights)


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_gradients_set_to_zero_are_gradients(make, by):
    model, reference = make_model(), make_model()
    pairs = ((model, make(OffloadAdamW, model, lr=1e-2)), (reference, torch.optim.AdamW(reference.parameters(), lr=1e-2)))
    for module, optimizer in pairs:
        data = Data()
        for _ in range(3):
            data.loss(module).backward()
            optimizer.step()
            (optimizer if by == "optimizer" else module).zero_grad(set_to_none=False)
        optimizer.step()  # by the moments
    torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=1e-5, atol=1e-6)


def test_a_second_step_uses_the_gradients_again(make):
    model, reference = make_model(), make_model()
    for module, optimizer in ((model, make(OffloadAdamW, model)), (reference, torch.optim.AdamW(reference.parameters()))):
        Data().loss(module).backward()
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- accumulation

@pytest.mark.parametrize("declared", ["steps", "context", "not"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_is_what_grad_would_hold(make, declared, dtype):
    model, reference = make_model(dtype), make_model(dtype)
    optimizer = make(OffloadAdamW, model, lr=1e-2, accumulation_steps=3 if declared == "steps" else 1)
    data = Data(dtype)
    for _ in range(4):
        with optimizer.accumulate() if declared == "context" else contextlib.nullcontext():
            data.loss(model).backward()
            data.loss(model).backward()
        data.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = train(reference, make(OffloadAdamW, reference, lr=1e-2, overlap=False), 4, dtype, passes=3)
    assert torch.equal(weights_of(model), expected)
    assert (optimizer.stats.updates_rolled_back > 0) == (declared == "not")
    assert optimizer.stats.updates_committed > 0


def test_a_last_accumulation_may_be_shorter(make):
    model, reference = make_model(), make_model()
    mine = train(model, make(OffloadAdamW, model, accumulation_steps=4), passes=3)
    assert torch.equal(mine, train(reference, make(OffloadAdamW, reference, overlap=False), passes=3))


# ---------------------------------------------------------------- parameters

def test_groups_schedulers_and_closures(make):
    weights = []
    for kind in (OffloadAdamW, torch.optim.AdamW):
        model, data = make_model(), Data()
        groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
                  {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1e-3, "betas": (0.8, 0.9)}]
        optimizer = make(kind, groups, lr=1e-2, weight_decay=0.0) if kind is OffloadAdamW else kind(groups, lr=1e-2, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=10)

        def closure():
            optimizer.zero_grad()
            loss = data.loss(model)
            loss.backward()
            return loss

        for _ in range(5):
            assert float(optimizer.step(closure).detach()) > 0
            scheduler.step()
        weights.append(weights_of(model))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_a_learning_rate_changed_before_step_counts(make):
    weights = []
    for overlap in (True, False):
        model = make_model()
        optimizer = make(OffloadAdamW, model, lr=1e-2, overlap=overlap)
        Data().loss(model).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        weights.append(weights_of(model))
    assert torch.equal(*weights) and optimizer.stats.updates_rolled_back == 0


@pytest.mark.parametrize("elements", [None, 1024])
def test_frozen_unfrozen_and_late_parameters(make, elements):
    weights = []
    for kind in (OffloadAdamW, torch.optim.AdamW):
        model, data = make_model(), Data()
        late = torch.nn.Parameter(torch.full((32,), 0.5))
        for p in model[0].parameters():
            p.requires_grad_(False)
        optimizer = make(kind, model, lr=1e-2, host="1MiB", chunk_elements=elements) if kind is OffloadAdamW else kind(model.parameters(), lr=1e-2)
        for step in range(6):
            if step == 2:
                for p in model[0].parameters():
                    p.requires_grad_(True)
            if step == 3:
                optimizer.add_param_group({"params": [late], "lr": 0.1})
            (data.loss(model) + (late.pow(2).sum() if step > 3 else 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([weights_of(model), late.detach()]))
        if kind is OffloadAdamW:
            steps = [int(state["step"]) for state in optimizer.state.values()]
            assert sorted(set(steps)) == [2, 4, 6]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_a_gradient_stays(make, storage):
    for name in ("host", "nvme"):
        model = make_model()
        idle = torch.nn.Parameter(torch.ones(5))
        optimizer = make(OffloadAdamW, [*model.parameters(), idle], **placed(name, storage))
        train(model, optimizer, steps=2)
        assert torch.equal(idle.detach(), torch.ones(5)) and idle not in optimizer.state
        optimizer.close()


def test_weights_that_are_not_contiguous(make, storage):
    results = []
    for kind, options in ((OffloadAdamW, {}), (OffloadAdamW, placed("nvme", storage)), (torch.optim.AdamW, {})):
        torch.manual_seed(3)
        p = torch.nn.Parameter(torch.randn(48, 80).t())
        optimizer = make(kind, [p], lr=1e-2, **options) if kind is OffloadAdamW else kind([p], lr=1e-2)
        for i in range(3):
            (p * torch.arange(1, 49)).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_the_program_changes_are_the_masters(make, dtype):
    model, fresh = make_model(dtype), make_model(dtype)
    optimizer = make(OffloadAdamW, model, lr=1e-2)
    train(model, optimizer, steps=2, dtype=dtype)
    state = copy.deepcopy(model.state_dict())
    state["0.weight"].fill_(0.25)
    model.load_state_dict(state)
    masters = optimizer.state_dict()["state"]
    Data(dtype).loss(model).backward()
    optimizer.step()
    after = model[0].weight.detach().float()
    assert (after - 0.25).abs().max() < 0.03
    if dtype == torch.bfloat16:  # what was not changed keeps its low bits
        again = optimizer.state_dict()["state"]
        assert not torch.equal(again[5]["master"], again[5]["master"].bfloat16().float())
        assert (again[5]["master"] - masters[5]["master"]).abs().max() < 0.03
    assert fresh is not model


# ---------------------------------------------------------------- saved state

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


# ---------------------------------------------------------------- what goes wrong

@pytest.mark.parametrize("name", ["host", "nvme"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(make, storage, name, wrong):
    weights = []
    for bad in (False, True):
        model, data = make_model(), Data()
        optimizer = make(OffloadAdamW, model, lr=1e-2, max_norm=1.0, **placed(name, storage))
        for step in range(3):
            if bad and step == 1:
                (model(torch.ones(2, 64)).sum() * wrong).backward()
                before = weights_of(model)
                with pytest.raises(ferry.DivergedError) as caught:
                    optimizer.step()
                assert isinstance(caught.value, ArithmeticError) and "parameter 0" in caught.value.where
                assert torch.equal(before, weights_of(model))
                optimizer.zero_grad()
            data.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weights_of(model))
        optimizer.close()
    assert torch.equal(*weights)


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


def gradients_of(model):
    return [p.grad + 0 for p in model.parameters()]


@pytest.mark.parametrize("options", ({}, {"overlap": False}, {"keep_grads": True}))
def test_a_gradient_that_was_replaced_counts_once(make, options):
    """A backward that follows adds to what the program has put there."""
    found = []
    for own in (False, True):
        model = make_model()
        optimizer = make(OffloadAdamW, model, lr=1e-2, **options) if own else torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = Data()
        data.loss(model).backward()
        for p in model.parameters():
            p.grad = p.grad * 0.5
        data.loss(model).backward()
        found.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        data.loss(model).backward()
        found.append(gradients_of(model))
    for mine, torchs in ((found[2], found[0]), (found[3], found[1])):
        for a, b in zip(mine, torchs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_gradient_of_before_is_not_the_next_one(make):
    model = make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2)
    data = Data()
    data.loss(model).backward()
    held = [p.grad.detach() for p in model.parameters()]
    optimizer.zero_grad()
    with pytest.raises(ferry.UsageError, match="gone"):
        held[0] + 0
    data.loss(model).backward()
    with pytest.raises(ferry.UsageError, match="gone(?s:.*)clone"):
        held[0] + 0
    assert torch.isfinite(next(model.parameters()).grad + 0).all()


def test_no_change_of_a_gradient_that_left_is_lost(make):
    model = make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2)
    Data().loss(model).backward()
    with pytest.raises(ferry.UsageError, match="changed in place"):
        model[0].weight.grad.data = torch.zeros(96, 64)
    with pytest.raises(ferry.UsageError, match="shared"):
        model.share_memory()
    optimizer.step()


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
