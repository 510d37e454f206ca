"""OffloadAdamW and its like step as torch.optim's optimizers do. Skipped where torch is not installed, as its neighbours are."""

import pytest

torch = pytest.importorskip("torch")
from offload import Data, make, make_model, nothing_is_taken_back, train, weights_of  # noqa: E402,F401: some are fixtures

from ferry_offload.torch import OffloadAdam, OffloadAdamW, OffloadLion, OffloadSGD  # noqa: E402

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
