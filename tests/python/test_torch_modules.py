"""OffloadAdamW with model=: step() does not wait for the end of its update. Skipped where torch is not installed."""

import copy
import threading

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from offload import weights_of  # noqa: E402

from ferry_offload.torch import OffloadAdamW, OffloadLion, OffloadSGD  # noqa: E402


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.LayerNorm(96),
                               torch.nn.Linear(96, 64)).to(dtype)


def batches(dtype=torch.float32, count=6):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, 64, generator=generator).to(dtype) for _ in range(count)]


def train(model, optimizer, dtype=torch.float32, to_none=True):
    for x in batches(dtype):
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    optimizer.synchronize()
    return weights_of(model)


@pytest.fixture
def make(storage):
    made = []

    def one(kind, module, **options):
        made.append(kind(module.parameters(), **options))
        return made[-1]

    yield one
    for optimizer in made:
        optimizer.close()


class Gate:
    """Holds the optimizer's worker until it is opened."""

    def __init__(self, optimizer):
        self._open = threading.Event()
        optimizer._worker.submit(lambda: self._open.wait(60))

    def open(self):
        self._open.set()


def step_behind_a_gate(model, optimizer):
    """step() has returned, and no weight has changed yet."""
    model(batches()[0]).pow(2).mean().backward()
    for version in list(optimizer._versions.values()):
        version.job.result()
    optimizer._worker.submit(lambda: [r.square(optimizer._team) for r in optimizer._records.values()]).result()
    scale_of, gate = optimizer._scale_of, []

    def closing(active):
        scale = scale_of(active)
        gate.append(Gate(optimizer))
        return scale

    optimizer._scale_of = closing
    optimizer.step()
    optimizer._scale_of = scale_of
    return gate[0]


PLACEMENTS = {
    "host": {}, "in step": {"overlap": False}, "kept": {"keep_grads": True}, "small chunks": {"chunk_elements": 100},
    "clipped": {"max_norm": 0.01}, "nvme": {"host": "150KiB", "chunk_elements": 1024, "nvme": True},
}


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_a_step_that_waits(make, storage, name, dtype, to_none):
    runs = []
    for late in (False, True):
        options = dict(PLACEMENTS[name])
        if options.get("nvme"):
            options["nvme"] = [storage]
        model = make_model(dtype)
        optimizer = make(OffloadAdamW, model, lr=1e-2, model=model if late else None, **options)
        runs.append((train(model, optimizer, dtype, to_none), optimizer.state_dict()["state"]))
        assert ("nvme" in options) == (optimizer.stats.nvme_bytes > 0)
        optimizer.close()
    assert torch.equal(runs[0][0], runs[1][0])
    for one, other in zip(runs[0][1].values(), runs[1][1].values()):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", [OffloadLion, OffloadSGD])
def test_other_methods_have_it_too(make, kind):
    models = make_model(), make_model()
    mine = train(models[0], make(kind, models[0], lr=1e-3, model=models[0]))
    assert torch.equal(mine, train(models[1], make(kind, models[1], lr=1e-3)))


def test_step_returns_before_its_end_and_a_module_waits_for_its_own_weights(make):
    model, reference = make_model(), make_model()
    optimizer, expected = make(OffloadAdamW, model, lr=1e-2, model=model), make(OffloadAdamW, reference, lr=1e-2)
    before, outputs = weights_of(model), []
    gate = step_behind_a_gate(model, optimizer)
    assert torch.equal(weights_of(model), before)
    forward = threading.Thread(target=lambda: outputs.append(model[0](batches()[1])))
    forward.start()
    forward.join(0.2)
    assert forward.is_alive() and not outputs
    gate.open()
    forward.join(60)
    reference(batches()[0]).pow(2).mean().backward()
    expected.step()
    assert torch.equal(outputs[0], reference[0](batches()[1]))


@pytest.mark.parametrize("read", [
    lambda model, optimizer: optimizer.synchronize(),
    lambda model, optimizer: model.state_dict(),
    lambda model, optimizer: model[0].state_dict(),
    lambda model, optimizer: optimizer.state_dict(),
    lambda model, optimizer: model.load_state_dict(copy.deepcopy(model.state_dict())),
    lambda model, optimizer: model(batches()[0]),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: optimizer.step(),
], ids=["synchronize", "state_dict", "of a part", "the optimizer's", "load_state_dict", "forward", "zero_grad", "step"])
def test_what_waits_for_all_weights(make, read):
    model = make_model()
    optimizer = make(OffloadSGD, model, lr=1e-1, model=model)
    before = weights_of(model)
    gate = step_behind_a_gate(model, optimizer)
    reader = threading.Thread(target=lambda: read(model, optimizer))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive() and torch.equal(weights_of(model), before)
    gate.open()
    reader.join(60)
    changed = [not torch.equal(p.detach(), q.detach()) for p, q in zip(model[0].parameters(), make_model()[0].parameters())]
    assert all(changed)
    optimizer.synchronize()


def test_gradients_may_be_forgotten_while_the_update_reads_them(make):
    model, reference = make_model(), make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2, model=model)
    gate = step_behind_a_gate(model, optimizer)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    gate.open()
    optimizer.synchronize()
    expected = make(OffloadAdamW, reference, lr=1e-2)
    reference(batches()[0]).pow(2).mean().backward()
    expected.step()
    assert torch.equal(weights_of(model), weights_of(reference))


def test_autograd_is_told_at_step(make):
    model = make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2, model=model)
    x = batches()[0]
    loss = model(x).pow(2).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_update_that_failed_is_told_by_whoever_waits_for_it(make, storage):
    model = make_model()
    optimizer = make(OffloadAdamW, model, lr=1e-2, model=model, overlap=False)
    train(model, optimizer)
    model(batches()[0]).pow(2).mean().backward()
    state, broken = optimizer._masters.tiers[0].state, ferry.StorageError("the drive is gone")

    def fail(*_):
        raise broken

    state.write = fail
    with pytest.raises(ferry.StorageError, match="the drive is gone"):
        optimizer.step()
        model(batches()[0])
    del state.write
    with pytest.raises(ferry.UsageError, match="failed half-way"):
        optimizer.step()


def test_hooks_end_with_the_optimizer():
    model = make_model()
    optimizer = OffloadAdamW(model.parameters(), model=model)
    assert model[0]._forward_pre_hooks and model._forward_hooks
    optimizer.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks or module._state_dict_pre_hooks
                   or module._load_state_dict_pre_hooks for module in model.modules())
