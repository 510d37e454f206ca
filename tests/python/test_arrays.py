"""Pinned memory and optimizers on arrays."""

import gc

import numpy as np
import pytest

import ferry_offload as ferry


def test_memory_is_shared_with_numpy_and_outlives_its_names():
    pool = ferry.Pool("8MiB")
    memory = pool.reserve("2MiB", name="weights")
    assert (memory.nbytes, len(memory), memory.readonly) == (2 << 20, 2 << 20, False)
    array = memory.numpy("float32")
    assert not array.any() and array.ctypes.data % (2 << 20) == 0
    array[:] = 3
    assert (np.from_dlpack(memory).view(np.float32) == 3).all()
    assert memoryview(memory)[3] == np.float32(3).view(np.uint32) >> 24
    with pytest.raises(ferry.UsageError, match="arrays or leases use this memory"):
        pool.close()
    del memory
    gc.collect()
    assert array[-1] == 3
    del array
    pool.close()
    with pytest.raises(ferry.ClosedError):
        pool.reserve(1)


def test_a_budget_is_kept():
    with ferry.Pool("4MiB") as pool:
        with pytest.raises(ferry.DoesNotFitError) as caught:
            pool.reserve("1GiB", name="too much")
        error = caught.value
        assert isinstance(error, MemoryError) and error.code == 3 and error.status == "does not fit"
        assert (error.where, error.measured) == ("too much", "1073741824 bytes")
        assert "budget" in error.what and error.limit and error.remedy
        pool.seal()
        with pytest.raises(ferry.UsageError, match="sealed"):
            pool.reserve(1)


@pytest.mark.parametrize(("size", "count"), [(7, 7), ("4096", 4096), ("40GiB", 40 << 30), ("1.5 KB", 1500)])
def test_sizes(size, count):
    from ferry_offload.sizes import to_bytes
    assert to_bytes(size) == count


def test_sizes_that_are_none():
    from ferry_offload.sizes import to_bytes
    with pytest.raises(ferry.UsageError, match="40 gallons"):
        ferry.Pool("40 gallons")
    for size in (-1, float("nan"), float("inf"), None):
        with pytest.raises(ferry.UsageError, match="size"):
            to_bytes(size)


def adamw(p, m, v, g, step, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decay=0.1):
    """The formula in double."""
    m = m * betas[0] + g * (1 - betas[0])
    v = v * betas[1] + g * g * (1 - betas[1])
    root = np.sqrt(v / (1 - betas[1] ** step)) + eps
    return p * (1 - lr * decay) - lr / (1 - betas[0] ** step) * m / root, m, v


@pytest.mark.parametrize("team", [None, 2])
def test_adamw_is_the_formula(team):
    rng = np.random.default_rng(1)
    count = 10007
    p = rng.normal(size=count).astype(np.float32)
    m, v, weight = np.zeros_like(p), np.zeros_like(p), np.zeros(count, np.float16)
    exact = tuple(x.astype(np.float64) for x in (p, m, v))
    hyper = ferry.Hyper("adamw", lr=1e-2, weight_decay=0.1)
    threads = team and ferry.Team(team)
    for step in range(1, 6):
        g = rng.normal(size=count).astype(np.float32)
        ferry.update(hyper, step, g, p, m, v, weight, gradient_scale=0.5, team=threads)
        exact = adamw(*exact, 0.5 * g.astype(np.float64), step)
    np.testing.assert_allclose(p, exact[0], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(v, exact[2], rtol=1e-5)
    np.testing.assert_array_equal(weight, p.astype(np.float16))


def test_out_of_place_leaves_the_old_version():
    g, p, m, v = (np.full(100, x, np.float32) for x in (1, 2, 0.5, 0.25))
    new = [np.zeros_like(p) for _ in range(3)]
    hyper = ferry.Hyper("adamw")
    ferry.update(hyper, 3, g, *new, p_in=p, m_in=m, v_in=v)
    assert (p == 2).all() and (m == 0.5).all() and (v == 0.25).all()
    ferry.update(hyper, 3, g, p, m, v)
    for fresh, old in zip(new, (p, m, v)):
        np.testing.assert_array_equal(fresh, old)


@pytest.mark.parametrize("bits_in", [False, True])
def test_a_split_master_beside_float16_is_read_as_float16(bits_in):
    rng = np.random.default_rng(3)
    weight, g = rng.normal(size=1000).astype(np.float16), rng.normal(size=1000).astype(np.float32)
    low, p, hyper = np.zeros(1000, np.uint16), weight.astype(np.float32), ferry.Hyper("sgd", lr=1e-2)
    new_weight, new_low, cast = np.zeros_like(weight), np.zeros_like(low), np.zeros_like(weight)
    ferry.update(hyper, 1, g, weight=new_weight, low=new_low, low_in=low, weight_in=weight.view(np.uint16) if bits_in else weight)
    ferry.update(hyper, 1, g, p, weight=cast)
    np.testing.assert_array_equal(new_weight, cast)
    ferry.update(hyper, 1, g, weight=weight, low=low)
    np.testing.assert_array_equal(new_weight, weight)
    np.testing.assert_array_equal(new_low, low)


@pytest.mark.parametrize(("weight", "weight_in"), [
    ("float16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32"), ("uint16", "float16"),
])
def test_weights_of_two_types_are_no_split_master(weight, weight_in):
    torch = pytest.importorskip("torch")

    def ones(type):
        return np.ones(8, type) if type == "uint16" else torch.ones(8, dtype=getattr(torch, type))

    with pytest.raises(ferry.UsageError, match="weight_in has another type"):
        ferry.update(ferry.Hyper("sgd"), 1, ONES, weight=ones(weight), low=np.zeros(8, np.uint16), weight_in=ones(weight_in))


@pytest.mark.parametrize(("method", "moments"), [("adamw", 2), ("adam", 2), ("lion", 1), ("sgd", 0), ("adagrad", 1)])
def test_every_method_moves_the_weight(method, moments):
    hyper = ferry.Hyper(method, lr=0.1)
    assert hyper.moments == moments
    arrays = [np.ones(5, np.float32) for _ in range(1 + moments)]
    ferry.update(hyper, 1, np.ones(5, np.float32), *arrays)
    assert (arrays[0] < 1).all()


def test_bfloat16_as_its_bits():
    bits = (np.array([1, -2, 0.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert ferry.square_sum(bits) == 1 + 4 + 0.25
    weight = np.zeros(3, np.uint16)
    ferry.recast(np.array([1, -2, 0.5], np.float32), weight)
    np.testing.assert_array_equal(weight, bits)


def test_norms_are_one_number_whatever_the_threads():
    g = np.random.default_rng(2).normal(size=100_001).astype(np.float32)
    alone = ferry.square_sum(g)
    assert ferry.square_sum(g, team=ferry.Team(3)) == alone
    assert alone == pytest.approx(np.sum(g.astype(np.float64) ** 2), rel=1e-6)
    assert ferry.square_sum(g, initial=alone) == pytest.approx(2 * alone)
    g[77] = np.nan
    assert not np.isfinite(ferry.square_sum(g))
    assert ferry.clip_factor(10, 1) == pytest.approx(0.1) and ferry.clip_factor(0.5, 1) == 1


ONES = np.ones(8, np.float32)


def frozen():
    array = ONES.copy()
    array.flags.writeable = False
    return array


def test_arrays_without_elements_are_contiguous():
    none = np.zeros(0, np.float32)
    ferry.update(ferry.Hyper("adamw", lr=0.1), 1, none, p=none, m=none, v=none)
    assert ferry.square_sum(none) == 0


@pytest.mark.parametrize(("change", "says"), [
    ({"gradient": ONES[::2], "p": ONES[:4].copy()}, "not contiguous"),
    ({"gradient": np.ones((4, 2), np.float32).T, "p": ONES.copy()}, "not contiguous"),
    ({"gradient": np.ones(8)}, "float64"),
    ({"gradient": np.ones(8, np.int16)}, "int16"),
    ({"p": np.ones(7, np.float32)}, "7 elements"),
    ({"p": np.ones(8, np.float16)}, "another type"),
    ({"p": frozen()}, "cannot be written"),
    ({"v": None}, "update->v is NULL"),
    ({"gradient": "text"}, "no array"),
    ({"step": 0}, "step"),
    ({"p_in": "overlapping"}, "update->p_in overlaps update->p"),
])
def test_what_no_update_takes(change, says):
    block = np.ones(9, np.float32)
    arguments = {"step": 1, "gradient": ONES, "p": block[:8], "m": ONES.copy(), "v": ONES.copy(), **change}
    if change.get("p_in") is not None:
        arguments["p_in"] = block[1:]
    with pytest.raises(ferry.UsageError, match=says):
        ferry.update(ferry.Hyper("adamw"), **arguments)


@pytest.mark.parametrize(("arrays", "says"), [
    (("m", "p"), "update->p overlaps update->m"), (("v", "m"), "update->m overlaps update->v"),
    (("gradient", "p"), "update->gradient overlaps update->p"), (("weight", "v"), "update->v overlaps update->weight"),
    (("p_in", "m"), "update->p_in overlaps update->m"), (("v_in", "m"), "update->v_in overlaps update->m")])
def test_different_arrays_of_an_update_share_no_bytes(arrays, says):
    memory = np.ones(15, np.float32)
    given = {name: ONES.copy() for name in ("gradient", "p", "m", "v", "weight")}
    given[arrays[0]], given[arrays[1]] = memory[:8], memory[7:]  # one element
    kept = {name: array.copy() for name, array in given.items()}
    with pytest.raises(ferry.UsageError, match=says + "$|" + says + "\n") as caught:
        ferry.update(ferry.Hyper("adamw"), 1, given.pop("gradient"), **given)
    assert "28 bytes apart" in caught.value.measured
    assert all(np.array_equal(array, kept[name]) for name, array in given.items())


def test_neighbours_share_no_bytes():
    memory, alone = np.ones(32, np.float32), {name: ONES.copy() for name in ("p", "m", "v")}
    given = {"p": memory[:8], "m": memory[8:16], "v": memory[16:24], "p_in": memory[:8]}
    ferry.update(ferry.Hyper("adamw"), 1, memory[24:], **given)
    ferry.update(ferry.Hyper("adamw"), 1, ONES, **alone)
    assert all(np.array_equal(given[name], alone[name]) for name in alone)


def test_a_closed_team_and_an_unknown_method():
    team = ferry.Team(1)
    team.close()
    team.close()
    with pytest.raises(ferry.ClosedError):
        ferry.square_sum(ONES, team=team)
    with pytest.raises(TypeError):
        ferry.square_sum(ONES, team=3)
    with pytest.raises(ferry.UsageError, match='"adamw", "adam"'):
        ferry.Hyper("adamv")
