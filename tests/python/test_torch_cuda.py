"""OffloadAdamW with parameters on a GPU. Skipped where torch or a GPU is missing."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
from ferry_offload.torch import OffloadAdamW  # noqa: E402

MIB = 1 << 20


def make_model(dtype, width=1024):
    torch.manual_seed(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def train(model, optimizer, steps=5, passes=1, scaler=None, clip=None):
    dtype = next(model.parameters()).dtype
    generator = torch.Generator("cuda").manual_seed(2)
    for _ in range(steps):
        for _ in range(passes):
            x = torch.randn(64, 1024, generator=generator, device="cuda").to(dtype)
            loss = model(x).float().pow(2).sum() / 64
            (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        optimizer.zero_grad()
    getattr(optimizer, "synchronize", lambda: None)()
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).cpu()


@pytest.mark.parametrize(("dtype", "moments", "master", "tight"), [
    # Of 72 MiB of state or less, and weights and gradients on their way.
    (torch.float32, "fp32", "fp32", "110MiB"), (torch.bfloat16, "fp32", "fp32", "84MiB"),
    (torch.float16, "fp32", "fp32", "84MiB"), (torch.bfloat16, "bf16", "fp32", "62MiB"),
    (torch.bfloat16, "int8", "fp32", "46MiB"), (torch.bfloat16, "fp32", "split", "72MiB"),
    (torch.bfloat16, "int8", "split", "50MiB")])
def test_where_the_state_lies_changes_no_bit(storage, dtype, moments, master, tight):
    torch.use_deterministic_algorithms(True)
    runs = []
    for options in ({}, {"overlap": False}, {"keep_grads": True}, {"chunk_elements": 100_000}, {"model": True},
                    {"gpu_state": "30MiB"}, {"gpu_state": "30MiB", "model": True}, {"gpu_state": "1GiB"},
                    {"host": tight, "nvme": [storage], "chunk_elements": 256 << 10}):
        model = make_model(dtype)
        options["model"] = model if options.get("model") else None
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, max_norm=0.01, accumulation_steps=2, moments=moments,
                                 master=master, **options)
        assert ("gpu_state" in options) == (optimizer.stats.gpu_bytes > 0)
        assert ("nvme" in options) == (optimizer.stats.nvme_bytes > 0)
        weights = train(model, optimizer, passes=2)
        states = [value for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()]
        runs.append(torch.cat([weights, *(value.reshape(-1) for value in states)]))
        assert optimizer.stats.clip_factor < 1 and optimizer.stats.host_bytes <= 40 << 30
        optimizer.close()
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_twenty_steps_are_torchs_and_commit_early(storage):
    model, reference = make_model(torch.float32), make_model(torch.float32)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, max_norm=1e3)
    mine = train(model, optimizer, steps=20)
    assert optimizer.stats.updates_committed > 0 and optimizer.stats.updates_rolled_back == 0
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), steps=20)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_gradients_leave_the_gpu():
    model = make_model(torch.bfloat16, width=1024)
    optimizer = OffloadAdamW(model.parameters())
    before = torch.cuda.memory_allocated()
    model(torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < MIB  # a layer's gradient has 2
    gradient = model[0][0].weight.grad
    assert gradient.device.type == "cuda" and torch.isfinite(gradient + 0).all() and (gradient + 0).is_cuda
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("smaller", [{}, {"moments": "int8"}, {"moments": "int8", "master": "split"}], ids=str)
def test_a_share_of_the_state_stays_on_the_gpu_and_goes_on_from_any_state(smaller):
    weights, options = [], {"lr": 1e-3, "max_norm": 1.0, **smaller}
    # The first layer's, and biases: an int8 moment has a scale of 4 bytes for 256.
    element, share = {0: (12, "20MiB"), 1: (6 + 8 / 256, "11MiB"), 2: (6 + 8 / 256, "11MiB")}[len(smaller)]
    for kept in ("0", share):
        model = make_model(torch.bfloat16)
        before = torch.cuda.memory_allocated()
        optimizer = OffloadAdamW(model.parameters(), gpu_state=kept, **options)
        taken = torch.cuda.memory_allocated() - before
        assert optimizer.stats.gpu_bytes <= taken <= 1.01 * optimizer.stats.gpu_bytes  # torch rounds small ones up
        assert optimizer.stats.gpu_bytes == (0 if kept == "0" else (1024 * 1024 + 6 * 1024) * element)
        train(model, optimizer, steps=2)
        with torch.no_grad():
            model[0][0].weight[0, :8] = 0.25  # the master's from now on
        train(model, optimizer, steps=2)
        other = OffloadAdamW(model.parameters(), gpu_state="1GiB" if kept == "0" else 0, **options)
        other.load_state_dict(optimizer.state_dict())
        optimizer.close()
        weights.append(train(model, other, steps=2))
        other.close()
    assert torch.equal(*weights)


def test_where_all_state_is_on_the_gpu_gradients_are_torchs():
    model = make_model(torch.float32)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, gpu_state="1GiB")
    mine = train(model, optimizer, clip=0.5)
    reference = make_model(torch.float32)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), clip=0.5)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_a_gradient_on_the_gpu_that_is_not_finite_changes_nothing():
    model = make_model(torch.bfloat16)
    optimizer = OffloadAdamW(model.parameters(), gpu_state="1GiB")
    before = [p.detach().clone() for p in model.parameters()]
    (model(torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)).sum() * float("nan")).backward()
    with pytest.raises(ArithmeticError, match="not finite"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"keep_grads": True}, {"overlap": False}, {"gpu_state": "20MiB"}], ids=str)
def test_grad_scaler(options):
    model, reference = make_model(torch.float32), make_model(torch.float32)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, **options)
    mine = train(model, optimizer, scaler=torch.amp.GradScaler("cuda"))
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), scaler=torch.amp.GradScaler("cuda"))
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_activations_go_to_the_host_and_to_nvme(storage):
    from ferry_offload.torch import offload_activations
    gradients = []
    for budget in (None, "64MiB", "3MiB"):
        model = make_model(torch.float32)
        x = torch.randn(512, 1024, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
        offload = offload_activations(budget, nvme=[storage]) if budget else None
        for _ in range(3):
            model.zero_grad()
            if offload is None:
                model(x).pow(2).mean().backward()
                continue
            with offload:
                loss = model(x).pow(2).mean()
            loss.backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        if offload is not None:
            assert offload.stats.to_host > 3 * 6 * 2 * MIB and (offload.stats.to_nvme > 0) == (budget == "3MiB")
            del loss
            offload.close()
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_a_streamed_model_trains_with_the_same_bits():
    from ferry_offload.torch import stream_model

    class Stack(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    runs = []
    for streamed in (False, True):
        model = Stack(make_model(torch.bfloat16))
        stream = stream_model(model.cpu(), host="1GiB", device_blocks=2) if streamed else None
        optimizer = OffloadAdamW(stream.parameters() if stream else model.parameters(), lr=1e-3, max_norm=0.1)
        if stream:
            stream.train_with(optimizer)
        train(model, optimizer, steps=4)
        weights = stream.state_dict() if stream else {name: p.detach().cpu() for name, p in model.named_parameters()}
        runs.append(weights)
        optimizer.close()
        if stream:
            assert stream.stats.device_bytes <= 2 * stream._blocks[0].layout.bytes and stream.stats.ahead > 0
            stream.close()
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 4096, 1_000_003])
def test_squares_on_the_gpu_are_the_hosts(dtype, count):
    from ferry_offload import square_sum
    from ferry_offload.torch._squares import Squares
    gradient = torch.randn(count, generator=torch.Generator("cuda").manual_seed(4), device="cuda").to(dtype)
    assert Squares(gradient).sum() == square_sum(gradient.cpu())


def test_a_step_does_not_wait_for_gradients_that_zero_grad_forgets():
    weights = []
    for late in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(4096, 4096, bias=False).to("cuda", torch.bfloat16)
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_norm=0.1, model=model if late else None, chunk_elements=1 << 20)
        for step in range(4):
            x = torch.randn(64, 4096, generator=torch.Generator("cuda").manual_seed(step), device="cuda").bfloat16()
            model(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        weights.append(model.weight.detach().clone())
        optimizer.close()
    assert torch.equal(*weights)
