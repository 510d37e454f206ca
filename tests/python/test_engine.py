"""The engine and its plan, from Python."""

import math
import pickle
import subprocess

import pytest

import ferry_offload as ferry
from ferry_offload import planning


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text(" ".join(str(i * i % 97) for i in range(6000)))
    subprocess.run([planning.program(), "data", text, "-o", folder / "tokens.bin"], check=True, capture_output=True)
    return folder / "tokens.bin"


def config(tokens):
    return {"model": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "vocab": 256},
            "data": {"tokens": str(tokens), "held_back": 0.1}, "batch": {"sequence": 16, "micro_batch": 2, "micro_batches": 2},
            "optimizer": {"lr": 0.003}, "evaluate": {"micro_batches": 2}, "seed": 3, "steps": 4, "threads": 1}


def test_a_run_and_where_its_state_lies(tokens, storage):
    hashes = []
    for overrides in ([], [f'budgets.nvme=[{{"path": "{storage}"}}]', "swap.state_on_nvme=1"]):
        with ferry.Engine(config(tokens), overrides) as engine:
            reports = [engine.step() for _ in range(4)]
            assert [report.step for report in reports] == [1, 2, 3, 4]
            assert reports[-1].loss < reports[0].loss and not reports[0].skipped
            assert engine.last_step == 4 and math.isfinite(engine.evaluate().loss)
            assert (engine.report().nvme_bytes > 0) == bool(overrides)
            hashes.append(engine.state_hash())
    assert hashes[0] == hashes[1]


def test_a_checkpoint_goes_on_with_the_same_bits(tokens, tmp_path):
    with ferry.Engine(config(tokens)) as engine:
        engine.step()
        engine.save(tmp_path / "run")
        engine.step()
        expected = engine.state_hash()
    with ferry.Engine(config(tokens), checkpoint=tmp_path / "run" / "step-00000001") as engine:
        assert engine.last_step == 1
        engine.step()
        assert engine.state_hash() == expected


def test_a_model_to_keep(tokens, tmp_path):
    with ferry.Engine(config(tokens)) as engine:
        engine.step()
        engine.save_model(tmp_path / "model", dtype="float32")
        with pytest.raises(ferry.UsageError, match="model"):
            engine.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
    with pytest.raises(ferry.ClosedError):
        engine.step()


def test_a_plan(tokens):
    plan = ferry.plan(config(tokens), ["steps=7"])
    assert plan and isinstance(plan, dict)
    with pytest.raises(ferry.UsageError, match="stepz"):
        ferry.plan(config(tokens), ["stepz=7"])


def test_errors_have_their_parts_and_can_be_pickled():
    with pytest.raises(ferry.UsageError) as caught:
        ferry.Engine({"steps": 1})
    error = caught.value
    assert isinstance(error, ValueError) and error.where.startswith("config_json") and error.remedy
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.where == error.where
