"""stream_model() on the CPU, whose memory stands for a GPU's. Skipped where torch is not installed."""

import copy
import dataclasses
import json

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from ferry_offload.torch import OffloadAdamW, stream_model  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(width), torch.nn.Linear(width, 64), torch.nn.Linear(64, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.embed, self.layers = torch.nn.Embedding(20, 32), torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(32, 20, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.skipped, self.checkpointed = (), False
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if i in self.skipped:
                continue
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x) * self.scale


def make_model(dtype=torch.float32, frozen=()):
    torch.manual_seed(1)
    model = Model().to(dtype)
    for i in frozen:
        model.layers[i].requires_grad_(False)
    return model


def tokens(step):
    return torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps=4, skip=(), passes=1):
    losses = []
    for step in range(steps):
        model.skipped = skip if step == 2 else ()
        for i in range(passes):
            out = model(tokens(10 * step + i))
            loss = torch.nn.functional.cross_entropy(out.float().flatten(0, 1), tokens(100 + step).flatten())
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture
def streamed(storage):
    made = []

    def one(model, **options):
        made.append(stream_model(model, **{"host": "10MB", "device": "cpu", **options}))
        return made[-1]

    yield one
    for each in made:
        each.close()


def compared(streamed, dtype=torch.float32, frozen=(), checkpointed=False, passes=1, skip=(), **options):
    """The streamed model beside one that is all there: losses and weights."""
    plain, model = make_model(dtype, frozen), make_model(dtype, frozen)
    plain.checkpointed = model.checkpointed = checkpointed
    stream = streamed(model, **options)
    optimizers = [OffloadAdamW([p for p in parameters if p.requires_grad], lr=1e-2, max_norm=1.0, accumulation_steps=passes)
                  for parameters in (plain.parameters(), stream.parameters())]
    stream.train_with(optimizers[1])
    expected, found = train(plain, optimizers[0], skip=skip, passes=passes), train(model, optimizers[1], skip=skip, passes=passes)
    assert found == expected and found[-1] < found[0]
    weights = stream.state_dict()
    assert all(torch.equal(p.detach(), weights[name]) for name, p in plain.named_parameters())
    for optimizer in optimizers:
        optimizer.close()
    return stream


@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_has_the_same_bits(streamed, dtype, checkpointed):
    stream = compared(streamed, dtype, checkpointed=checkpointed, device_blocks=2)
    block = stream._blocks[0].layout.bytes
    assert stream.stats.device_bytes == 2 * block and stream.stats.host_bytes == 6 * block
    assert stream.stats.ahead > stream.stats.fetches / 3 and stream.stats.deviations == 0


def test_gradients_accumulate(streamed):
    compared(streamed, passes=2, device_blocks=3)


def test_frozen_blocks_lie_on_nvme(streamed, storage):
    stream = compared(streamed, frozen=(0, 1, 3, 4), host="110KiB", nvme=[storage])
    assert stream.stats.nvme_bytes > 0 and stream.stats.host_bytes + 3 * stream._blocks[0].layout.bytes <= 110 << 10
    assert stream._store.stats.reads > 0


def test_what_leaves_the_learned_order_is_served_and_counted(streamed):
    stream = compared(streamed, skip=(2, 3))
    assert stream.stats.deviations > 0


def test_a_model_on_the_meta_device(streamed, tmp_path):
    plain = make_model()
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()} | {"scale": torch.tensor(0.5)}
    with torch.device("meta"):
        model = Model()
        model.head.weight = model.embed.weight
    stream = streamed(model, weights=weights)
    with torch.no_grad():
        for step in range(3):
            assert torch.equal(model(tokens(step)), plain(tokens(step)))
    assert stream.stats.ahead > 0 and stream.stats.deviations == 0
    assert model.head.weight is model.embed.weight


def test_a_decoder_of_transformers_from_its_files(streamed, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                      intermediate_size=96, vocab_size=50, use_cache=False)
    torch.manual_seed(3)
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    stream = streamed(model, weights=tmp_path, device_blocks=2)
    optimizers = [OffloadAdamW(one.parameters(), lr=1e-3, max_norm=1.0) for one in (plain, stream)]
    stream.train_with(optimizers[1])
    for one, optimizer in zip((plain, model), optimizers):
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        one.train()
        one.losses = []
        for step in range(3):
            ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = one(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            one.losses.append(loss.item())
    assert model.losses == plain.losses
    found = stream.state_dict()
    assert all(torch.equal(p.detach(), found[name]) for name, p in plain.named_parameters())
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize(("make", "says"), [
    (lambda: stream_model(make_model(), host="10MB", device="cpu", device_blocks=1), "device_blocks"),
    (lambda: stream_model(make_model(), host="20KB", device="cpu"), "do not fit"),
    (lambda: stream_model(torch.nn.Linear(3, 3), host="1MB", device="cpu"), "no ModuleList"),
    (lambda: stream_model(make_model(), host="1MB", device="cpu", blocks=[torch.nn.Linear(2, 2)]), "not modules of the model"),
    (lambda: stream_model(make_model().to("meta"), host="1MB", device="cpu"), "no value"),
    (lambda: stream_model(make_model().to("meta"), host="1MB", device="cpu", weights={}), "no tensor of this name"),
    (lambda: stream_model(make_model(), host="1MB", device="cpu", weights=lambda name: torch.zeros(1)), "another shape"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(make, says):
    with pytest.raises(ferry.FerryError, match=says):
        make()


def test_blocks_that_share_weights_are_refused():
    model = make_model()
    model.layers[1].up = model.layers[0].up
    with pytest.raises(ferry.UsageError, match="share a parameter"):
        stream_model(model, host="1MB", device="cpu")


# ---------------------------------------------------------------- files of weights


def saved(folder):
    """A model's weights in two files and their index."""
    from safetensors.torch import save_file
    state = {name: one.clone() for name, one in make_model().state_dict().items() if name != "head.weight"}
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: state[name] for name in some}, folder / file)
    return {name: file for file, some in parts.items() for name in some}


@pytest.mark.parametrize("change, said", [
    (None, None), ("[" * 100_000, "index"), ("{}", "weight_map"), ('{"weight_map": 7}', "weight_map"),
    ('{"weight_map": {}, "weight_map": {}}', "twice"), ("/etc/passwd", "no file beside it"), ("../x.safetensors", "no file beside it"),
    ("missing.safetensors", "missing.safetensors"), ("cut", "a.safetensors")])
def test_weights_of_files(tmp_path, streamed, change, said):
    pytest.importorskip("safetensors")
    index, first = saved(tmp_path), "layers.0.up.weight"
    text = change if change and change[0] in "[{" else None
    if change and text is None and change != "cut":
        index[first] = change
    if change == "cut":
        (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-10])
    (tmp_path / "model.safetensors.index.json").write_text(text or json.dumps({"weight_map": index}))
    with torch.device("meta"):
        model = Model()
    if said:
        with pytest.raises(ferry.FerryError, match=said):
            streamed(model, weights=tmp_path)
        return
    streamed(model, weights=tmp_path)
    assert torch.equal(model(tokens(0)), make_model()(tokens(0)))


def test_the_models_zero_grad_is_one_of_the_blocks_too(streamed):
    """Trainer calls it in place of the optimizer's."""
    plain = make_model()
    torchs = OffloadAdamW(plain.parameters(), lr=1e-2)
    model = make_model()
    stream = streamed(model)
    optimizer = OffloadAdamW(stream.parameters(), lr=1e-2)
    stream.train_with(optimizer)
    for step in range(4):
        for one, its in ((plain, torchs), (model, optimizer)):
            torch.nn.functional.cross_entropy(one(tokens(step)).flatten(0, 1), tokens(100 + step).flatten()).backward()
            if step == 2:  # and nothing is left of it
                one.zero_grad()
            its.step()
            one.zero_grad()
        assert optimizer.stats.norm == pytest.approx(torchs.stats.norm, rel=1e-5)
    there = stream.state_dict()
    for name, value in plain.state_dict().items():
        if name in there:
            torch.testing.assert_close(there[name], value, rtol=1e-4, atol=1e-5)


def test_blocks_train_with_an_optimizer_of_ferry_alone(streamed):
    model = make_model()
    stream = streamed(model)
    with pytest.raises(ferry.UsageError, match="AdamW"):
        stream.train_with(torch.optim.AdamW(stream.parameters()))
    with pytest.raises(ferry.UsageError, match="train_with"):
        torch.nn.functional.cross_entropy(model(tokens(0)).flatten(0, 1), tokens(1).flatten()).backward()


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_the_program_asks_autograd_for_change_nothing(streamed, passes):
    """torch.autograd.grad() of blocks' weights, in the midst of an accumulation and before step()."""
    plain, model = make_model(), make_model()
    stream = streamed(model, device_blocks=2)
    optimizers = [OffloadAdamW(one.parameters(), lr=1e-2, max_norm=1.0, accumulation_steps=passes) for one in (plain, stream)]
    stream.train_with(optimizers[1])

    def loss(one, step):
        return torch.nn.functional.cross_entropy(one(tokens(step)).flatten(0, 1), tokens(100 + step).flatten())

    for step in range(3):
        for i in range(passes):
            asked = []
            for one in (plain, model):
                loss(one, 10 * step + i).backward()
                before = [p.grad.clone() for p in one.layers.parameters()]
                asked.append(torch.autograd.grad(loss(one, 50 + step), list(one.layers.parameters())))
                assert all(torch.equal(p.grad.clone(), was) for p, was in zip(one.layers.parameters(), before))
            assert all(torch.equal(mine, its) for mine, its in zip(*asked))
        for one, optimizer in zip((plain, model), optimizers):
            optimizer.step()
            one.zero_grad()
    assert optimizers[1].stats.norm > 0
    weights = stream.state_dict()
    assert all(torch.equal(p.detach(), weights[name]) for name, p in plain.named_parameters())
    for optimizer in optimizers:
        optimizer.close()


def test_a_gradient_that_the_program_sets_is_the_blocks(streamed):
    """While the block is there; backward adds to it."""
    plain, model = make_model(), make_model()
    stream = streamed(model)
    optimizers = [OffloadAdamW(one.parameters(), lr=1e-2) for one in (plain, stream)]
    stream.train_with(optimizers[1])
    for step in range(2):
        for one, optimizer in zip((plain, model), optimizers):
            loss = torch.nn.functional.cross_entropy(one(tokens(step)).flatten(0, 1), tokens(100).flatten())
            weight = one.layers[-1].up.weight
            weight.grad = torch.ones_like(weight)
            if step == 1:
                loss.backward()
            optimizer.step()
            one.zero_grad()
    weights = stream.state_dict()
    assert optimizers[1].stats.steps == 2 and not torch.equal(weights["layers.5.up.weight"], make_model().layers[5].up.weight.detach())
    assert all(torch.equal(p.detach(), weights[name]) for name, p in plain.named_parameters())
    for optimizer in optimizers:
        optimizer.close()


def test_the_models_own_state_dict_has_the_blocks_weights(streamed, storage):
    """Whoever saves the model, as Trainer does, would save nothing of them."""
    plain, model = make_model(frozen=(0, 1, 3, 4)), make_model(frozen=(0, 1, 3, 4))
    stream = streamed(model, host="110KiB", nvme=[storage], device_blocks=2)
    model(tokens(0))
    for found, expected in ((model.state_dict(), plain.state_dict()),
                            (model.layers[2].state_dict(prefix="x."), plain.layers[2].state_dict(prefix="x."))):
        assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)
    assert stream.stats.nvme_bytes > 0
    with pytest.raises(ferry.UsageError, match="copied"):
        copy.deepcopy(model)
    with pytest.raises(ferry.UsageError, match="weights="):
        model.load_state_dict(plain.state_dict())
    outside = {"head.weight": torch.zeros_like(plain.head.weight)}
    model.load_state_dict(outside, strict=False)
    assert not model.head.weight.any()


@dataclasses.dataclass
class Outputs:
    hidden: torch.Tensor
    extra: torch.Tensor


class Routed(Block):
    """Its second output is needed without the first, as the loss that balances experts."""

    def forward(self, x):
        return Outputs(super().forward(x), self.up(x).square().mean())


def test_backward_may_come_by_any_output_of_a_block(streamed):
    def make():
        torch.manual_seed(1)
        return torch.nn.ModuleList(Routed() for _ in range(4))

    plain, model = (torch.nn.ModuleDict({"layers": make()}) for _ in range(2))
    stream = streamed(model, device_blocks=2)
    optimizers = [OffloadAdamW(one.parameters(), lr=1e-2) for one in (plain, stream)]
    stream.train_with(optimizers[1])
    for step in range(3):
        for one, optimizer in zip((plain, model), optimizers):
            x, extra = torch.randn(5, 32, generator=torch.Generator().manual_seed(step)), 0.0
            for layer in one.layers:
                out = layer(x)
                x, extra = out.hidden, extra + out.extra
            (extra if step == 1 else extra + x.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = stream.state_dict()
    assert all(torch.equal(p.detach(), weights[name]) for name, p in plain.named_parameters())
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize("fails", ["before", "within"])
def test_a_forward_that_failed_leaves_a_block_as_it_was(streamed, fails):
    """It may make room for others, and stays while it is used."""
    model = make_model()
    if fails == "before":
        handles = [layer.register_forward_pre_hook(lambda *_: 1 / 0) for layer in model.layers]
    stream = streamed(model, device_blocks=2)
    if fails == "within":
        handles = [layer.up.register_forward_pre_hook(lambda *_: 1 / 0) for layer in model.layers]
    for layer in model.layers:
        with pytest.raises(ZeroDivisionError):
            layer(torch.zeros(1, 32))
    for handle in handles:
        handle.remove()
    assert all(block.users == 0 for block in stream._blocks)
    with torch.no_grad():
        assert torch.equal(model(tokens(0)), make_model()(tokens(0)))


def test_gradients_of_gradients_are_refused(streamed):
    """They would read weights that have left."""
    model = make_model()
    streamed(model)
    x = torch.randn(3, 32, requires_grad=True)
    for layer in model.layers:
        out = layer(x)
    with pytest.raises(ferry.UsageError, match="gradients of gradients"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
