"""Where an offloaded optimizer's state lies, and in which format: no place changes a bit, and a budget is kept."""

import pytest

torch = pytest.importorskip("torch")
from offload import (  # noqa: E402,F401: some are fixtures
    FORMATS, PLACEMENTS, make, make_model, nothing_is_taken_back, placed, train, weights_of)

from ferry_offload.torch import OffloadAdamW, OffloadLion  # noqa: E402


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
