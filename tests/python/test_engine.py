"""The engine and its plan, from Python."""

import gc
import math
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
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


# ---------------------------------------------------------------- batches of the program's own

def row(start):
    """A sequence of 16 and the token behind it."""
    return (np.arange(17) * 3 + start) % 251


def rows(step, sequences=4):
    return np.stack([row(step * 10 + i) for i in range(sequences)])


@pytest.fixture
def one_sequence(tmp_path):
    """A token file of one sequence: every step sees it in all its rows."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(row(0).astype(np.uint8)))
    subprocess.run([planning.program(), "data", text, "-o", tmp_path / "one.bin"], check=True, capture_output=True)
    return tmp_path / "one.bin"


def losses(engine, steps=3):
    return [engine.step().loss for _ in range(steps)], engine.state_hash()


def test_a_fed_batch_is_the_file_s(one_sequence):
    made = config(one_sequence)
    made["data"]["held_back"], made["evaluate"]["micro_batches"] = 0, 0
    with ferry.Engine(made) as engine:
        expected = losses(engine)
    del made["data"]
    batch = np.stack([row(0)] * 4)
    with ferry.Engine(made, load=lambda step: batch) as engine:
        assert losses(engine) == expected
    with ferry.Engine(made, fed=True) as engine:
        assert engine.batch_shape() == (4, 16) and engine.batch_shape(evaluation=True) == (0, 16)
        found = []
        for _ in range(3):
            engine.feed(batch[:, :-1].astype(np.int32).copy(), batch[:, 1:].astype(np.uint16).copy())
            found.append(engine.step().loss)
        assert (found, engine.state_hash()) == expected


def fed_config():
    made = config("")
    del made["data"]
    return made


def test_batches_that_cannot_be_had_leave_the_engine_as_it_was():
    def load(step):
        asked.append(step)
        answer = answers.pop(0) if answers else rows(step)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with ferry.Engine(fed_config(), load=rows_of) as engine:
        expected = losses(engine)
    answers, asked = [], []
    with ferry.Engine(fed_config(), load=load) as engine:
        for answer, error, says in ((rows(1, 3), ferry.UsageError, "3 sequences of 16 tokens"),
                                    (rows(1) + 250, ferry.UsageError, "outside the vocabulary"),
                                    (rows(1).astype(np.float32), ferry.UsageError, "another type"),
                                    (rows(1)[0], ferry.UsageError, "has no rows"),
                                    (rows(1) + 2**40, ferry.UsageError, "no token"),
                                    (None, ferry.UsageError, "no array")):
            answers.append(answer)
            with pytest.raises(error, match=says):
                engine.step()
            assert engine.last_step == 0
        answers.append(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):  # the program's own error
            engine.step()
        assert losses(engine) == expected and asked == [1] * 7 + [1, 2, 3]
    with ferry.Engine(fed_config(), fed=True) as engine:
        with pytest.raises(ferry.UsageError, match="no batch was fed"):
            engine.step()
        with pytest.raises(ferry.UsageError, match="another shape than tokens"):
            engine.feed(rows(1), rows(1)[:, 1:].copy())
        with pytest.raises(ferry.UsageError, match="another shape than a step's"):
            engine.feed(rows(1, 5))
        engine.feed(rows(1))
        assert engine.step().loss == expected[0][0]
        with pytest.raises(ferry.UsageError, match="no batch was fed"):  # a batch is for one step
            engine.step()


def rows_of(step):
    return rows(step)


def test_an_engine_that_reads_a_file_is_not_fed(tokens):
    with ferry.Engine(config(tokens)) as engine, pytest.raises(ferry.UsageError, match="data.tokens"):
        engine.feed(rows(1))


def test_a_fed_evaluation():
    with ferry.Engine(fed_config(), fed=True) as engine:
        with pytest.raises(ferry.UsageError, match="no batch was fed"):
            engine.evaluate()
        held = rows(99)
        targets = held[:, 1:].copy()
        targets[2:] = -1
        engine.feed(held[:, :-1].copy(), targets, evaluation=True)
        first = engine.evaluate()
        assert first.targets == 2 * 16 and math.isfinite(first.loss)
        engine.feed(rows(1))
        engine.step()
        assert engine.evaluate().loss != first.loss


def test_a_call_from_within_its_own_callback_is_refused():
    def load(step):
        for call in (engine.step, engine.close, lambda: engine.last_step):
            with pytest.raises(ferry.BusyError, match="within"):
                call()
        threads.append(threading.get_ident())
        return rows(step)

    threads = []
    with ferry.Engine(fed_config(), load=load) as engine:
        engine.step()
    assert threads == [threading.get_ident()]


def test_progress_that_calls_its_engine_is_refused(tmp_path):
    """Told by the thread that writes, while the program's waits in save()."""
    def tell(stage, bytes, of):
        if not engines:
            return
        threads.add(threading.get_ident())
        for call in (lambda: engines[0].last_step, engines[0].close):
            try:
                call()
                answers.append(None)
            except ferry.FerryError as error:
                answers.append(type(error))

    engines, threads, answers = [], set(), []
    with ferry.Engine(fed_config(), load=rows_of, progress=tell) as engine:
        engine.step()
        engines.append(engine)
        engine.save(tmp_path / "saved")
        engine.save_model(tmp_path / "model")
        assert set(answers) == {ferry.BusyError} and threads - {threading.get_ident()}
        assert engine.step().step == 2


class Trainer:
    """It holds an engine, which holds its methods."""

    def __init__(self):
        self.told = 0
        self.engine = ferry.Engine(fed_config(), load=self.load, progress=self.tell)

    def load(self, step):
        return rows(step)

    def tell(self, stage, bytes, of):
        self.told += 1


def test_an_engine_in_a_circle_with_its_callables_is_collected():
    trainer = Trainer()
    assert trainer.engine.step().step == 1 and trainer.told > 0
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_progress_is_told(tmp_path, monkeypatch):
    told, unraised = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: unraised.append(failure.exc_type))
    with ferry.Engine(fed_config(), load=rows_of, progress=lambda *now: told.append(now)) as engine:
        assert told and all(0 <= bytes <= of for _, bytes, of in told)
        start_up = len(told)
        engine.step()
        assert len(told) == start_up
        engine.save(tmp_path / "saved")
        engine.save_model(tmp_path / "model")
        stages = [stage for stage, bytes, of in told[start_up:] if bytes == of]
        assert set(stages) == {"checkpoint", "export"}
    with ferry.Engine(fed_config(), load=rows_of, progress=lambda *_: 1 // 0) as engine:
        assert engine.step().step == 1
    assert set(unraised) == {ZeroDivisionError}
    with ferry.Engine(fed_config(), checkpoint=tmp_path / "saved" / "step-00000001", fed=True) as engine:
        assert engine.last_step == 1


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
