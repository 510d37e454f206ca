"""offload_activations() and NVMeTensorStore on the CPU. Skipped where torch is not installed."""

import gc

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
from ferry_offload.torch import NVMeTensorStore, offload_activations  # noqa: E402


def make_model(layers=6):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(layers)))


def gradients(model, context=None, passes=1, inside=False):
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    for _ in range(passes):
        model.zero_grad()
        if context is None:
            model(x).pow(2).mean().backward()
            continue
        with context:
            loss = model(x).pow(2).mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.fixture
def offload(storage):
    made = []

    def one(budget, **options):
        made.append(offload_activations(budget, **{"nvme": [storage], "min_bytes": 4096, **options}))
        return made[-1]

    yield one
    for each in made:
        gc.collect()
        each.close()


@pytest.mark.parametrize("budget", ["100MB", "120KiB"], ids=["roomy", "tight"])
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_have_the_same_bits(offload, budget, inside):
    mine = offload(budget)
    found = gradients(make_model(), mine, passes=3, inside=inside)
    assert torch.equal(found, gradients(make_model()))
    assert mine.stats.to_nvme > 3 * 6 * 50_000 and mine.stats.host_peak <= ferry.sizes.to_bytes(budget)
    gc.collect()
    mine._free_forgotten(all_of_them=True)
    assert mine._used == 0 and mine._host._free == [(0, mine._host.size)]  # all of it is given back


def test_a_budget_without_room_keeps_tensors_where_they_are(offload):
    mine = offload("16KiB")  # an activation has 51,200 bytes
    assert torch.equal(gradients(make_model(), mine), gradients(make_model()))
    assert mine.stats.to_nvme == 0 and mine.stats.kept > 6 * 50_000


def test_what_is_saved_twice_leaves_once(offload):
    mine, x = offload("10MB"), torch.randn(100, 100, requires_grad=True)
    with mine:
        y = x * 2
        z = (y * y.sin()).sum() + (y * 3.0).exp().sum()
    z.backward()
    assert mine.stats.shared >= y.nbytes
    expected = x.detach().clone().requires_grad_()
    y = expected * 2
    ((y * y.sin()).sum() + (y * 3.0).exp().sum()).backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("shape", ["transposed", "sliced", "expanded", "strange"])
def test_strides_are_kept_or_made_plain(offload, shape):
    mine = offload("10MB")
    base = torch.randn(120, 90, 2)
    tensor = {"transposed": base.permute(2, 0, 1), "sliced": base[::2, :, :1], "expanded": base[:, :1, :1].expand(120, 90, 2),
              "strange": base.permute(1, 2, 0)[:, :1]}[shape]
    with mine:
        p = tensor.clone(memory_format=torch.preserve_format).requires_grad_() * 1.0 if shape == "transposed" else tensor
        leaf = torch.ones(tensor.shape, requires_grad=True)
        out = (leaf * p).sum()
    out.backward()
    assert torch.equal(leaf.grad, tensor)


def test_a_graph_may_be_walked_twice_or_forgotten(offload):
    mine, x = offload("10MB"), torch.randn(100, 100, requires_grad=True)
    with mine:
        y = (x * 2).exp().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with mine:
        z = (x * 2).exp().sum()
    del y, z
    gc.collect()
    mine._free_forgotten(all_of_them=True)
    assert mine._used == 0


def test_what_no_context_is_made_of(storage):
    with pytest.raises(ferry.UsageError, match="budget"):
        offload_activations("1KiB")
    with pytest.raises(OSError, match="No such file"):
        offload_activations("1MiB", nvme=[storage / "none"])


# ---------------------------------------------------------------- NVMeTensorStore

def groups(count=6):
    generator = torch.Generator().manual_seed(3)
    return {i: {"w": torch.randn(50, 30, generator=generator).bfloat16(), "b": torch.randn(30, generator=generator),
                "n": torch.arange(5) + i, "s": torch.tensor(float(i))} for i in range(count)}


def test_groups_come_back(storage):
    expected = groups()
    with NVMeTensorStore(expected, [storage], host="12KiB") as store:
        for i in (3, 0, 5, 5, 1):
            store.prefetch([i, (i + 1) % 6])
            found = store.load(i)
            assert found.keys() == expected[i].keys()
            assert all(torch.equal(found[name], expected[i][name]) and found[name].dtype == expected[i][name].dtype for name in found)
            with store.lease(i) as tensors:
                assert torch.equal(tensors["w"], expected[i]["w"])
            del tensors
        into = {name: torch.zeros_like(one) for name, one in expected[2].items()}
        store.load_into(2, into)
        assert all(torch.equal(into[name], expected[2][name]) for name in into)
        assert store.stats.reads > 0 and 1 in store and 6 not in store


def test_groups_are_written_later(storage):
    shapes = {i: {name: one.to("meta") for name, one in group.items()} for i, group in groups().items()}
    with NVMeTensorStore(shapes, [storage], host="64KiB") as store:
        with pytest.raises(ferry.FerryError):
            store.load(0)
        for i, group in groups().items():
            store.write(i, group)
        store.flush()
        assert all(torch.equal(store.load(i)["w"], group["w"]) for i, group in groups().items())
        with pytest.raises(ferry.UsageError, match="no such group"):
            store.load("x")
    with pytest.raises(ferry.UsageError, match="no directory"):
        NVMeTensorStore(groups(), [])


@pytest.mark.parametrize("changed, said", [
    ({"n": None}, "missing"), ({"n": torch.arange(4)}, "not as it was"), ({"n": torch.tensor(1)}, "not as it was"),
    ({"n": torch.arange(5, device="meta")}, "without values"), ({"more": torch.zeros(2)}, "no such tensor")])
def test_a_refused_write_costs_nothing(storage, changed, said):
    old, new = groups(2), groups(3)[2]
    given = {name: one for name, one in {**new, **changed}.items() if one is not None}
    with NVMeTensorStore(old, str(storage), host="12KiB") as store:  # one may stand for itself
        with pytest.raises(ferry.UsageError, match=said):
            store.write(0, given)
        found = store.load(0)
        assert all(torch.equal(found[name], one) for name, one in old[0].items())
        store.write(0, new)
        assert torch.equal(store.load(0)["w"], new["w"])


@pytest.mark.parametrize("into, said", [({"b": torch.zeros(30), "x": torch.zeros(3)}, "no such tensor"),
                                        ({"b": torch.zeros(4, 30)}, "not as it was"), ({"s": torch.zeros(2)}, "not as it was")])
def test_a_refused_load_changes_nothing(storage, into, said):
    with NVMeTensorStore(groups(2), [storage]) as store:
        with pytest.raises(ferry.UsageError, match=said):
            store.load_into(1, into)
        assert not any(one.any() for one in into.values())


def test_a_failed_load_keeps_nothing_from_closing(storage):
    old = groups(2)
    store = NVMeTensorStore(old, [storage], host="12KiB")
    errors = []
    for attempt in (lambda: store.load(0, "meta:3x"), lambda: store.load_into(1, {"w": _Refusing(old[1]["w"])}),
                    lambda: store.write(0, {**old[0], "n": _Refusing(old[0]["n"])})):
        with pytest.raises(RuntimeError) as caught:
            attempt()
        errors.append(caught)
    assert all(torch.equal(store.load(1)[name], one) for name, one in old[1].items())
    store.close()  # while the errors live, with the frames that they came through
    assert len(errors) == 3


class _Refusing(torch.Tensor):
    """No copy from it or into it succeeds."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_subclass(cls, like)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "copy_" in getattr(function, "__name__", ""):
            raise RuntimeError("no copy of this one")
        return super().__torch_function__(function, types, args, kwargs or {})
