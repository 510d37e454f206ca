"""Offloading optimizers in the loops that programs write: gradients, accumulation, frozen weights."""

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from offload import (  # noqa: E402,F401: some are fixtures
    Data, made_ahead, make, make_model, nothing_is_taken_back, placed, train, weights_of)

from ferry_offload.torch import OffloadAdamW, OffloadSGD  # noqa: E402


def test_a_gradient_leaves_and_reading_fetches_it(make):
    model, reference = make_model(), make_model()
    optimizer = make(OffloadAdamW, model)
    Data().loss(model).backward()
    Data().loss(reference).backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert "DepartedGradient" in repr(p.grad) and p.grad.shape == p.shape
        assert torch.equal(p.grad.clone(), q.grad) and torch.equal(p.grad + 1, q.grad + 1)
        torch.testing.assert_close(p.grad.norm(), q.grad.norm())
        assert np.array_equal(p.grad.numpy(), q.grad.numpy()) and np.array_equal(p.grad.cpu(), q.grad)
        assert p.grad.tolist() == q.grad.tolist()
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


@pytest.mark.parametrize("options", [{}, {"keep_grads": True}, {"overlap": False}, {"host": "120KiB", "chunk_elements": 1024, "nvme": True}])
def test_gradients_that_the_program_asks_autograd_for_change_nothing(make, storage, options):
    """torch.autograd.grad() leaves .grad as it is, whether the gradient is there or has left."""
    def run(model, optimizer):
        data = Data()
        for _ in range(3):
            for _ in range(2):
                data.loss(model).backward()
                before = [p.grad.clone() for p in model.parameters()]
                torch.autograd.grad(Data().loss(model), list(model.parameters()))
                assert all(torch.equal(p.grad.clone(), one) for p, one in zip(model.parameters(), before))
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    options = {**options, "nvme": [storage]} if options.get("nvme") else options
    model, reference = make_model(), make_model()
    mine = run(model, make(OffloadAdamW, model, lr=1e-2, accumulation_steps=2, **options))
    torch.testing.assert_close(mine, run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2)), rtol=1e-5, atol=1e-6)


def test_the_memory_of_a_gradient_that_left_is_not_given_away(make):
    """There is none: whoever read it would read anything, or end the process."""
    model = make_model()
    optimizer = make(OffloadAdamW, model)
    Data().loss(model).backward()
    gradient = model[0].weight.grad
    for take in (torch.from_dlpack, np.from_dlpack, ferry.square_sum):
        with pytest.raises(ferry.UsageError, match="gradient"):
            take(gradient)
    with pytest.raises(ValueError, match="read-only"):
        gradient.numpy()[0] = 0
    optimizer.step()


def in_place_of_another(gradient):
    other = torch.empty(gradient.shape)
    other.data = gradient
    return other


@pytest.mark.parametrize("take", [
    torch.utils.dlpack.to_dlpack, torch._C._to_dlpack, torch.Tensor.__dlpack__, torch.Tensor.data_ptr, torch.Tensor.share_memory_,
    lambda gradient: gradient.untyped_storage(), lambda gradient: gradient.untyped_storage().data_ptr(),
    lambda gradient: gradient.untyped_storage().share_memory_(), lambda gradient: gradient.untyped_storage().__setitem__(0, 1),
    lambda gradient: torch.empty(0).set_(gradient.untyped_storage(), 0, gradient.shape),
    lambda gradient: in_place_of_another(gradient).numpy(),
], ids=["to_dlpack", "_to_dlpack", "__dlpack__", "data_ptr", "share_memory_", "storage", "storage's address", "storage shared",
        "storage written", "set_", "data of another"])
def test_torch_finds_no_address_of_a_gradient_that_left(make, take):
    """Past the methods of the stand-in, in torch's C++: an address of 0 ends the process when it is read."""
    model = make_model()
    optimizer = make(OffloadAdamW, model)
    Data().loss(model).backward()
    with pytest.raises(RuntimeError, match="left for host memory") as caught:
        take(model[0].weight.grad)
    assert "clone" in str(caught.value) and "keep_grads" in str(caught.value)
    optimizer.step()


def test_torchs_builds_without_cuda_train(make, monkeypatch):
    """They have not got the call that takes a storage away. There a tensor that was given a gradient's data reads NaN."""
    monkeypatch.delattr(torch._C, "_set_storage_access_error_msg")
    p = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = make(OffloadSGD, [p], lr=1.0)
    (3 * p.sum()).backward()
    for take in (torch.Tensor.data_ptr, lambda gradient: gradient.untyped_storage(), torch._C._to_dlpack):
        with pytest.raises(RuntimeError):
            take(p.grad)
    other = torch.zeros(4, 3)
    other.data = p.grad
    assert torch.isnan(other.sum())
    assert torch.equal(p.grad.clone(), torch.full((4, 3), 3.0))
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((4, 3), -3.0))


def test_copies_of_a_gradient_that_left_are_ordinary_tensors(make):
    model = make_model()
    optimizer = make(OffloadAdamW, model)
    Data().loss(model).backward()
    gradient = model[0].weight.grad
    file = io.BytesIO()
    torch.save({"gradient": gradient}, file)
    file.seek(0)
    copies = [copy.copy(gradient), copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), torch.load(file)["gradient"]]
    for one in copies:
        assert type(one) is torch.Tensor and torch.equal(one, gradient)
        one.zero_()
    assert gradient.norm() > 0 and not gradient.is_shared()
    with pytest.raises(ferry.UsageError, match="leaf"):
        torch.nn.Parameter(gradient)
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"keep_grads": True}, {"overlap": False}])
def test_a_graph_of_gradients_is_not_lost(make, options):
    """A penalty on gradients would cost nothing, silently, if .grad lost its graph."""
    def run(model, optimizer, how):
        for step in range(3):
            loss = Data().loss(model)
            if how is torch.autograd.grad:
                gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            else:
                loss.backward(create_graph=True)
                gradients = [p.grad for p in model.parameters()]
            penalty = sum(one.square().sum() for one in gradients)
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    ways = [torch.autograd.grad] if not options else [torch.autograd.grad, torch.autograd.backward]
    for way in ways:
        model, reference = make_model(), make_model()
        mine = run(model, make(OffloadAdamW, model, lr=1e-2, **options), way)
        torch.testing.assert_close(mine, run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), way), rtol=1e-4, atol=1e-5)
    if not options:
        model = make_model()
        make(OffloadAdamW, model)
        with pytest.raises(ferry.UsageError, match="create_graph"):
            Data().loss(model).backward(create_graph=True)


def test_a_gradient_that_left_may_be_put_in_anothers_place(make):
    """And counts there; not one that is gone."""
    first, second = (torch.nn.Parameter(torch.zeros(6, 4)) for _ in range(2))
    optimizer = make(OffloadSGD, [first, second], lr=1.0)
    (2 * second.sum()).backward()
    first.grad = second.grad
    first.sum().backward()
    assert torch.equal(first.grad.clone(), torch.full((6, 4), 3.0))
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((6, 4), -3.0)) and torch.equal(second.detach(), torch.full((6, 4), -2.0))
    first.grad = second.grad
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((6, 4), -5.0))
    gone = second.grad
    optimizer.zero_grad()
    first.grad = gone
    with pytest.raises(ferry.UsageError, match="gone"):
        optimizer.step()


def test_gradients_that_left_may_change_places(make):
    """Each is read before another one is in its place, and who holds one is not given the other."""
    first, second = (torch.nn.Parameter(torch.zeros(6, 4)) for _ in range(2))
    optimizer = make(OffloadSGD, [first, second], lr=1.0)
    (first.sum() + 2 * second.sum()).backward()
    held = first.grad
    first.grad, second.grad = second.grad, first.grad
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((6, 4), -2.0)) and torch.equal(second.detach(), torch.full((6, 4), -1.0))
    with pytest.raises(ferry.UsageError, match="gone"):
        held.clone()


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
