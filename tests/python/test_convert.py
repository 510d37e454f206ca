"""python3 -m ferry_offload.convert: checkpoints that DeepSpeed and a Trainer wrote, bit for bit, and ferry going on from them.

Skipped where torch, transformers or (for its own) deepspeed or accelerate is not installed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import make_deepspeed_checkpoints as deepspeeds  # noqa: E402

import ferry_offload  # noqa: E402
from ferry_offload.convert import bounded_json, convert, directory  # noqa: E402
from ferry_offload.convert.pickles import Opaque, load  # noqa: E402
from ferry_offload.convert.trainer import _tensors_in  # noqa: E402
from ferry_offload.sizes import to_bytes  # noqa: E402

FERRY = os.environ.get("FERRY") or str(Path(ferry_offload.__file__).parent / "bin/ferry")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOMENTS = ("exp_avg", "exp_avg_sq")
UNIVERSAL = [name for name, case in deepspeeds.CASES.items() if case.get("universal") and not case.get("round_robin")]


def python(*words, **options):
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False, timeout=600, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes DeepSpeed's checkpoints, each once."""
    pytest.importorskip("deepspeed")
    folder = Path(os.environ.get("FERRY_DEEPSPEED_CHECKPOINTS") or tmp_path_factory.mktemp("deepspeed"))

    def of(name):
        if not (folder / name / "case.json").exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            done = python(deepspeeds.__file__, folder, name)
            assert done.returncode == 0, done.stdout + done.stderr
        return folder / name

    return of


@pytest.fixture(scope="module")
def converted(made, tmp_path_factory):
    """Its conversions, and what they said."""
    found = {}

    def of(name, kind="saved"):
        if (name, kind) not in found:
            out = tmp_path_factory.mktemp("converted") / "out"
            found[name, kind] = out, convert(made(name) / kind, out, model=made(name) / "saved")
        return found[name, kind]

    return of


def arrays(folder):
    """All arrays of a directory: name to tensor."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, (shape, _, parts) in _tensors_in(path):
            assert name not in found
            found[name] = torch.cat(parts()).reshape(shape).clone()
    return found


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bool(
        (one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all())


def compare(found, truth, precision):
    """Every array is there once, and is the optimizer's, bit for bit."""
    expected = dict(truth["frozen"])
    for name, state in truth["trained"].items():
        expected[name] = state["master"].to(TYPES[precision])
        if precision != "fp32":
            expected[name + ".master"] = state["master"]
        for kind in MOMENTS:
            expected[f"{name}.{kind}"] = state[kind]
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert same_bits(found[name], value), name


# ---------------------------------------------------------------- the bits


@pytest.mark.parametrize("name", deepspeeds.CASES)
def test_every_bit_of_deepspeeds_state(name, made, converted):
    case, truth = deepspeeds.CASES[name], torch.load(made(name) / "truth.pt")
    out, said = converted(name)
    compare(arrays(out), truth, case["type"])
    assert (said["format"], said["stage"], said["ranks"]) == ("deepspeed", case["stage"], case["ranks"])
    assert said["frozen"] == list(truth["frozen"])
    state = json.loads((out / "trainer_state.json").read_text())
    assert (state["global_step"], state["optimizer_step"]) == (truth["global_step"], truth["optimizer_step"])
    assert truth["optimizer_step"] == deepspeeds.STEPS
    assert (truth["global_step"] > truth["optimizer_step"]) == bool(case.get("skip"))


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_is_the_same(name, converted):
    """One directory for each parameter, which DeepSpeed's own ds_to_universal made."""
    direct, universal = arrays(converted(name)[0]), arrays(converted(name, "universal")[0])
    assert sorted(direct) == sorted(universal)
    assert all(same_bits(direct[name], universal[name]) for name in direct)
    for key in ("global_step", "optimizer_step", "parameters", "frozen"):
        assert converted(name)[1][key] == converted(name, "universal")[1][key]


def test_masters_that_are_not_the_weights(copy_of, made, tmp_path):
    """Of a checkpoint with round_robin_gradients ds_to_universal cuts the flat vectors in the wrong order. Weights tell."""
    refused(made("stage2-bf16-2") / "universal", tmp_path / "out", "is not its weight", "model.layers.1.", "round_robin_gradients",
            error=ferry_offload.StorageError, model=made("stage2-bf16-2") / "saved")
    source, step = copy_of("stage1-bf16-2")
    changed(step / "mp_rank_00_model_states.pt", lambda whole: whole["module"]["model.norm.weight"][:3].add_(1))
    refused(source, tmp_path / "out", "is not its weight", "model.norm.weight", "3 of 40", error=ferry_offload.StorageError)


def test_shards_and_parts(made, tmp_path, converted, monkeypatch):
    """Small files and small parts: the same arrays, and an index that transformers reads."""
    from ferry_offload.convert import directory

    monkeypatch.setattr(directory, "_PART_ELEMENTS", 100)
    name = "stage3-bf16-2"
    out = tmp_path / "out"
    said = convert(made(name) / "saved", out, shard_bytes=20_000)
    whole = arrays(converted(name)[0])
    assert said["files"] > 12 and (out / "exp_avg-00002-of-00006.safetensors").exists()
    split = arrays(out)
    assert sorted(split) == sorted(whole) and all(same_bits(split[key], whole[key]) for key in whole)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for key, parameter in model.named_parameters():
        assert same_bits(parameter.detach(), whole[key]), key


# ---------------------------------------------------------------- ferry goes on


def run_ferry(*words, code=0):
    done = subprocess.run([FERRY, *map(str, words)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ferry_config(folder, model, steps, precision, freeze=()):
    ids = folder / "ids.bin"
    ids.write_bytes(b"".join(int(token).to_bytes(4, "little") for token in deepspeeds.batch()))
    run_ferry("data", ids, "--ids", "uint32", "--vocab", deepspeeds.VOCAB, "-o", folder / "tokens.bin")
    config = {"model": {"path": str(model)}, "data": {"tokens": str(folder / "tokens.bin"), "held_back": 0},
              "batch": {"sequence": deepspeeds.SEQUENCE, "micro_batch": 1, "micro_batches": 1}, "precision": precision,
              "optimizer": {"lr": deepspeeds.LR, "betas": list(deepspeeds.BETAS), "eps": deepspeeds.EPS,
                            "weight_decay": deepspeeds.DECAY},
              "freeze": list(freeze), "steps": steps, "threads": 1, "checkpoint": {"dir": str(folder / "run")}}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def import_and_resume(folder, out, steps, precision, freeze=()):
    """The imported checkpoint, and the lines of the steps after it."""
    config = ferry_config(folder, out, steps, precision, freeze)
    imported = run_ferry("ckpt", "import", config, out, "--json")[0]
    checkpoint = Path(imported["checkpoint"])
    found = arrays(checkpoint)  # a later checkpoint may take its place
    lines = run_ferry("train", config, "--resume", "latest", "--json", "--no-bound")
    return imported, found, [line for line in lines if "loss" in line]


@pytest.mark.parametrize("name", deepspeeds.CASES)
def test_ferry_takes_it_over(name, made, converted, tmp_path):
    """The imported checkpoint has every bit, and the run goes on at the next step."""
    case, truth = deepspeeds.CASES[name], torch.load(made(name) / "truth.pt")
    out, _ = converted(name)
    first = truth["global_step"] + 1
    assert json.loads((out / "trainer_state.json").read_text()).get("loss_scale") == truth["loss_scale"]
    imported, found, lines = import_and_resume(tmp_path, out, first, case["type"], list(truth["frozen"]))
    assert (imported["step"], imported["updates"]) == (truth["global_step"], truth["optimizer_step"])
    compare(found, truth, case["type"])
    assert [line["step"] for line in lines] == [first]
    if truth["loss_scale"]:
        assert lines[0]["loss_scale"] == truth["loss_scale"]


def torch_losses(truth, tied, steps):
    """Of torch's AdamW, going on from DeepSpeed's masters and moments in fp32."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(deepspeeds.model_config(tied))
    trained = dict(model.named_parameters())
    assert sorted(trained) == sorted(truth["trained"])
    groups = [{"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": deepspeeds.DECAY},
              {"params": [p for p in trained.values() if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=deepspeeds.LR, betas=deepspeeds.BETAS, eps=deepspeeds.EPS)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(truth["trained"][name]["master"])
            optimizer.state[parameter] = {"step": torch.tensor(float(truth["optimizer_step"])),
                                          **{kind: truth["trained"][name][kind].clone() for kind in MOMENTS}}
    losses = []
    for _ in range(steps):
        loss = deepspeeds.loss_of(model, deepspeeds.batch())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("name", [name for name, case in deepspeeds.CASES.items() if case["type"] == "fp32"])
def test_next_steps_are_those_of_torchs_adamw(name, made, converted, tmp_path):
    """The same batch in both. The first loss shows the weights, those after it the moments and the step too: without them
    they are far off."""
    truth, out = torch.load(made(name) / "truth.pt"), converted(name)[0]
    steps = 4
    expected = torch_losses(truth, deepspeeds.CASES[name].get("tied", False), steps)
    _, _, lines = import_and_resume(tmp_path, out, truth["global_step"] + steps, "fp32")
    losses = [line["loss"] for line in lines]
    assert losses == pytest.approx(expected, rel=2e-6)
    bare = tmp_path / "bare"
    bare.mkdir()
    convert(made(name) / "saved", bare / "out", moments=False)
    _, _, lines = import_and_resume(bare, bare / "out", truth["global_step"] + steps, "fp32")
    others = [line["loss"] for line in lines]
    assert others[0] == pytest.approx(expected[0], rel=2e-6)
    assert all(abs(other - loss) > 1e-3 for other, loss in zip(others[1:], expected[1:], strict=True))


# ---------------------------------------------------------------- a Trainer's


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """A checkpoint of transformers' Trainer, and its state in memory."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(deepspeeds.model_config(tied=True))
    tokens = deepspeeds.batch()[:-1]
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=4, per_device_train_batch_size=1, learning_rate=1e-3, weight_decay=0.1,
        use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    trained = {names[id(p)]: {"master": p.detach().clone(), **{kind: kept[kind].clone() for kind in MOMENTS}}
               for p, kept in optimizer.state.items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return folder / "checkpoint-4", {"trained": trained, "frozen": {}}, order


def test_a_trainers_checkpoint(trainers, tmp_path):
    folder, truth, _ = trainers
    out = tmp_path / "out"
    said = convert(folder, out)
    compare(arrays(out), truth, "fp32")
    assert (said["format"], said["global_step"], said["optimizer_step"]) == ("trainer", 4, 4)
    _, found, lines = import_and_resume(tmp_path, out, 5, "bf16")
    compare(found, truth, "bf16")
    assert [line["step"] for line in lines] == [5]


def test_a_trainers_other_order(trainers, tmp_path):
    """Parameters that were given in an order of somebody's own need their names, and then come out the same."""
    folder, truth, order = trainers
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    state = torch.load(source / "optimizer.pt")
    turned = {len(order) - 1 - index: kept for index, kept in state["state"].items()}
    groups = [{**state["param_groups"][0], "params": list(range(len(order)))}]
    torch.save({"state": turned, "param_groups": groups}, source / "optimizer.pt")
    with pytest.raises(ferry_offload.UsageError, match="which parameter is which"):
        convert(source, tmp_path / "out")
    (tmp_path / "names.json").write_text(json.dumps(order[::-1]))
    convert(source, tmp_path / "out", names=tmp_path / "names.json")
    compare(arrays(tmp_path / "out"), truth, "fp32")
    (tmp_path / "names.json").write_text(json.dumps(order[::-1][1:]))
    with pytest.raises(ferry_offload.UsageError, match="names are not those"):
        convert(source, tmp_path / "out2", names=tmp_path / "names.json")


@pytest.mark.parametrize("changed, said", [
    ({"state1": torch.zeros(4)}, "state1"), ({"max_exp_avg_sq": torch.zeros(4)}, "max_exp_avg_sq"),
    ({"step": torch.tensor(9.0)}, "different numbers of steps(.|\n)*4, 9")])
def test_what_ferrys_optimizers_do_not_keep(trainers, tmp_path, changed, said):
    source = tmp_path / "source"
    shutil.copytree(trainers[0], source)
    state = torch.load(source / "optimizer.pt")
    state["state"][0].update(changed)
    torch.save(state, source / "optimizer.pt")
    with pytest.raises(ferry_offload.UsageError, match=said):
        convert(source, tmp_path / "out")
    said = convert(source, tmp_path / "out", moments=False)
    assert said["state"] == [] and sorted(arrays(tmp_path / "out")) == sorted(trainers[1]["trained"])


# ---------------------------------------------------------------- refused, and nothing left behind


def refused(source, out, *texts, error=ferry_offload.UsageError, **options):
    with pytest.raises(error) as caught:
        convert(source, out, **options)
    for text in texts:
        assert text in str(caught.value), caught.value
    assert sorted(path.name for path in out.parent.iterdir() if "out" in path.name) == []


@pytest.fixture
def copy_of(made, tmp_path):
    """A checkpoint to be damaged, and the directory of its step."""

    def of(name, kind="saved"):
        there = tmp_path / kind
        shutil.copytree(made(name) / kind, there)
        if kind != "saved":
            shutil.copy(made(name) / "saved/config.json", there)
        return there, next(path for path in there.iterdir() if path.name.startswith("global_step"))

    return of


def changed(path, change):
    whole = torch.load(path, weights_only=False)
    change(whole)
    torch.save(whole, path)


@pytest.mark.parametrize("file", ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"])
def test_a_missing_rank(copy_of, tmp_path, file):
    source, step = copy_of("stage3-bf16-2")
    (step / file).unlink()
    refused(source, tmp_path / "out", "the file of a rank is missing", str(step / file), "1 of 2", error=ferry_offload.StorageError)


def test_ranks_of_other_checkpoints(copy_of, made, tmp_path):
    source, step = copy_of("stage3-bf16-2")
    file = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(step / file, step / file.replace("rank_1", "rank_2"))
    refused(source, tmp_path / "out", "more ranks than the checkpoint", "rank_2")
    (step / file.replace("rank_1", "rank_2")).unlink()
    shutil.copy(next((made("stage2-bf16-2") / "saved").glob(f"global_step*/{file}")), step / file)
    refused(source, tmp_path / "out", "not of one checkpoint", "stage 2")


def test_unknown_layouts(copy_of, tmp_path):
    source, step = copy_of("stage2-fp32-2")
    optimizers = sorted(step.glob("*_optim_states.pt"))
    kept = {path: path.read_bytes() for path in (*optimizers, step / "mp_rank_00_model_states.pt")}

    def check(path, change, *texts, **options):
        changed(path, change)
        refused(source, tmp_path / "out", *texts, **options)
        path.write_bytes(kept[path])

    def stage(whole):
        whole["optimizer_state_dict"]["zero_stage"] = 7

    def shorter(whole):
        groups = whole["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:-9].clone()

    check(optimizers[0], stage, "the stage of ZeRO is not known", "zero_stage 7")
    check(optimizers[1], shorter, "has not the elements of its parameters", "group 0", error=ferry_offload.StorageError)
    check(step / "mp_rank_00_model_states.pt", lambda whole: whole.pop("param_shapes"), "layout", "0.")
    check(optimizers[0], lambda whole: whole.pop("optimizer_state_dict"), "no optimizer state of ZeRO")
    (step / "layer_01-model_00-model_states.pt").touch()
    refused(source, tmp_path / "out", "pipeline or expert parallelism")


def test_other_models(copy_of, tmp_path):
    source, step = copy_of("stage3-fp16-2")
    config = source / "config.json"
    kept = json.loads(config.read_text())
    for change, *texts in (({"num_hidden_layers": 3}, "not in the checkpoint", "model.layers.2.self_attn.q_proj.weight"),
                           ({"num_hidden_layers": 1}, "is not the model's", "model.layers.1."),
                           ({"vocab_size": 70}, "another shape", "[67, 40]", "[70, 40]"),
                           ({"tie_word_embeddings": False}, "share their values", "lm_head.weight"),
                           ({"model_type": "mamba"}, "family", "mamba"), ({"hidden_size": None}, "hidden_size")):
        config.write_text(json.dumps({**kept, **change}))
        refused(source, tmp_path / "out", *texts)
    config.unlink()
    refused(source, tmp_path / "out", "no config.json", "--model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(kept))
    (tmp_path / "model/tokenizer.json").write_text("{}")
    convert(step, tmp_path / "out", model=tmp_path / "model")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    with pytest.raises(ferry_offload.UsageError, match="there already"):
        convert(step, tmp_path / "out", model=tmp_path / "model")
    assert (tmp_path / "out/tokenizer.json").exists()


def test_a_universal_checkpoint_that_is_not_whole(copy_of, tmp_path):
    source, step = copy_of("stage1-bf16-1", "universal")
    place = step / "zero/model.norm.weight"
    kept = (place / "exp_avg.pt").read_bytes()
    (place / "exp_avg.pt").unlink()
    refused(source, tmp_path / "out", "a file of a parameter is missing", str(place / "exp_avg.pt"), error=ferry_offload.StorageError)
    (place / "exp_avg.pt").write_bytes(kept[:-300])
    refused(source, tmp_path / "out", "exp_avg.pt", error=ferry_offload.StorageError)
    torch.save({"param": torch.zeros(39)}, place / "exp_avg.pt")
    refused(source, tmp_path / "out", "not the elements of its parameter", "39", error=ferry_offload.StorageError)
    (place / "exp_avg.pt").write_bytes(kept)
    changed(step / "mp_rank_00_model_states.pt",
            lambda whole: whole.update(universal_checkpoint_info={"universal_checkpoint_version": 9.0}))
    refused(source, tmp_path / "out", "version", "9.0")


def test_which_step(copy_of, tmp_path):
    source, step = copy_of("stage3-fp32-1")
    shutil.copytree(step, source / "global_step9")
    (source / "latest").unlink()
    refused(source, tmp_path / "out", "several steps", "global_step9", "--tag")
    refused(source, tmp_path / "out", "the step is not there", tag="global_step8")
    (source / "latest").write_text("global_step5\n")
    refused(source, tmp_path / "out", "the step is not there", "latest")
    assert convert(source, tmp_path / "out", tag="global_step9")["global_step"] == deepspeeds.STEPS


@pytest.mark.parametrize("keep", [0, 1, 1000, 0.5, 0.99])
def test_truncated_files(trainers, tmp_path, keep):
    for name in ("optimizer.pt", "model.safetensors"):
        source = tmp_path / name
        shutil.copytree(trainers[0], source)
        size = (source / name).stat().st_size
        os.truncate(source / name, keep if keep > 1 else int(size * keep) if isinstance(keep, float) else keep)
        refused(source, tmp_path / "out", name, error=ferry_offload.StorageError)


# ---------------------------------------------------------------- pickles


class Runs:
    """What a hostile pickle does when it is opened."""

    def __init__(self, function, *arguments):
        self.what = function, arguments

    def __reduce__(self):
        return self.what


def hostile(path, *, function, argument):
    torch.save({"state": {}, "param_groups": [], "more": Runs(function, argument)}, path)


@pytest.mark.parametrize("function", [exec, os.system, os.unlink, subprocess.getoutput])
def test_a_pickle_runs_nothing(tmp_path, function):
    victim = tmp_path / "victim"
    victim.touch()
    argument = {exec: f"import os; os.unlink({str(victim)!r})", os.unlink: str(victim)}.get(function, f"rm {victim}")
    hostile(tmp_path / "optimizer.pt", function=function, argument=argument)
    try:
        assert isinstance(load(tmp_path / "optimizer.pt")["more"], Opaque)
    except ferry_offload.UsageError as error:
        assert "nothing of it was run" in str(error) and "--trust-pickles" in str(error)
    assert victim.exists()
    load(tmp_path / "optimizer.pt", trust=True)
    assert not victim.exists()


def test_what_is_no_file_of_torchs(tmp_path):
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"state": {}}))
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as file:
        file.writestr("a", "b")
    for name in ("plain.pt", "zip.pt", "nowhere.pt"):
        with pytest.raises(ferry_offload.StorageError, match=name):
            load(tmp_path / name)


# ---------------------------------------------------------------- whatever the bytes are


@pytest.fixture
def trainer_copy(trainers, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(trainers[0], source)
    return source


DEEP = "[" * 100_000
NOT_JSON = ["", "{", "\x00", "[]", "null", DEEP, '{"a":' * 5000, '{"global_step": 4, "global_step": 5}']


@pytest.mark.parametrize("text", NOT_JSON, ids=lambda text: text[:12] or "empty")
@pytest.mark.parametrize("name", ["config.json", "trainer_state.json", "model.safetensors.index.json", "names"])
def test_json_that_is_none(trainer_copy, tmp_path, name, text):
    if name == "names" and text == "[]":
        pytest.skip("a list of too few names")
    path = tmp_path / "names.json" if name == "names" else trainer_copy / name
    path.write_text(text)
    refused(trainer_copy, tmp_path / "out", path.name, error=ferry_offload.FerryError,
            names=path if name == "names" else None)


@pytest.mark.parametrize("name, change, said", [
    ("trainer_state.json", {"global_step": float("inf")}, "global_step"),
    ("trainer_state.json", {"global_step": 1.5}, "global_step"),
    ("trainer_state.json", {"global_step": float("nan")}, "global_step"),
    ("config.json", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
    ("config.json", {"vocab_size": 10**30}, "embed_tokens"),
    ("config.json", {"hidden_size": 1e999}, "hidden_size")])
def test_numbers_that_are_none(trainer_copy, tmp_path, name, change, said):
    path = trainer_copy / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(trainer_copy, tmp_path / "out", name, said, error=ferry_offload.FerryError)


@pytest.mark.parametrize("entry", [
    7, {}, {"dtype": []}, {"dtype": "I64"}, {"shape": [-1]}, {"shape": ["a"]}, {"shape": [10**30]}, {"data_offsets": [0.0, 1.5]},
    {"data_offsets": [0]}, {"data_offsets": [-8, 0]}, {"data_offsets": [8, 4]}, {"data_offsets": [0, 10**30]}, {"data_offsets": [0, 1]}])
def test_headers_that_are_none(trainer_copy, tmp_path, entry):
    path = trainer_copy / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] = {**header[name], **entry} if entry and isinstance(entry, dict) else entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])
    refused(trainer_copy, tmp_path / "out", name, error=ferry_offload.FerryError)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("name", ["trainer_state.json", "names"])
def test_only_regular_files_of_some_size(trainer_copy, tmp_path, name, kind):
    path = tmp_path / "names.json" if name == "names" else trainer_copy / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    refused(trainer_copy, tmp_path / "out", path.name, names=path if name == "names" else None)


@pytest.mark.parametrize("kind", ["pipe", "device", "nowhere"])
@pytest.mark.parametrize("name", ["config.json", "optimizer.pt", "model.safetensors", "tokenizer.json", "merges.txt",
                                  "model.safetensors.index.json", "latest"])
def test_every_file_is_a_regular_one(trainer_copy, tmp_path, name, kind):
    """None is waited for, read without an end, or left out without a word."""
    path = trainer_copy / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nothing")
    if kind == "nowhere":
        refused(trainer_copy, tmp_path / "out", name, "No such file", error=ferry_offload.StorageError)
    else:
        refused(trainer_copy, tmp_path / "out", name, "no regular file", "a pipe" if kind == "pipe" else "a device")


@pytest.mark.parametrize("name", ["pipe", "device"])
def test_a_ranks_file_is_a_regular_one(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for trust in (False, True):
        with pytest.raises(ferry_offload.UsageError, match="no regular file"):
            load(tmp_path / name, trust=trust)


@pytest.mark.parametrize("text, said", [
    ('{\n "a": ' + "[" * 64 + "]" * 64 + "}", ["nested too deep", "line 2, column 70", "64 levels"]),
    ('{"a": 1,\n"b": 2, "a": 3}', ['the key "a" is given twice', "line 2, column 12"]),
    ('{"model_type": "' + "x" * 5_000_000 + '"}', ["(5000000 bytes)"]),
    ('{"model_type": "\\u001b[31m\\u009b2J"}', [r"\x1b[31m\xc2\x9b2J"]),
    ('{"model_type": "lla\\u0000ma"}', ["NUL character", r'"lla\x00ma"', "column 16"]),
    ('{"model_type": "\\ud800"}', ["half of a character", "column 16"]),
    ('{"é": "\\u0000"}', ["NUL character", "column 8"]),
    ('{"model_type": "llama\0"}', ["a NUL byte", "line 1, column 22"]),
    (b'{"model_type": "\xff"}', [r"no UTF-8: the byte \xff", "column 17"]),
    ('{"model_type": "llama"}'.encode("utf-16-le"), ["a NUL byte"]),
    ('{"a": [' + "[]," * 1_000_000 + "0]}", ["too many values", "1000000 values"]),
    (" " * (17 << 20), ["too large", f"{17 << 20} bytes"])], ids=lambda value: str(value)[:20] if isinstance(value, list) else "")
def test_json_beyond_its_bounds(trainer_copy, tmp_path, text, said):
    path = trainer_copy / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ferry_offload.UsageError) as caught:
        convert(trainer_copy, tmp_path / "out")
    shown = str(caught.value)
    for one in ("config.json", *said):
        assert one in shown, shown
    assert len(shown) < 1000 and shown.replace("\n", "").isprintable(), shown


@pytest.mark.parametrize("text", [
    "[]", "{}", "7", '"a"', "[[], {}, [ ], 1]", '{"a": "[{,:", "b": "\\"]", "c": {"a": [1, {"a": 2}]}}', '\ufeff{"a": 1}', "[" * 64 + "]" * 64])
def test_json_within_its_bounds(text):
    assert bounded_json.parse(text.encode()) == json.loads(text.removeprefix("\ufeff"))


def test_values_are_counted_exactly():
    """Keys are none, containers are."""
    text = b'{"a": [[], {}, [ ], {"b": 1}], "c": "x,y"}'
    assert bounded_json.parse(text, 8)
    with pytest.raises(bounded_json.JsonFault, match="too many values"):
        bounded_json.parse(text, 7)


def test_a_doubled_name_among_many(trainer_copy, tmp_path):
    """Is found in time that grows with their number, not its square."""
    names = [f"t{number:06}" for number in range(80_000)]
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = "{" + ",".join(f'"{name}":{json.dumps(entry)}' for name in [*names, names[-1]]) + "}"
    path = trainer_copy / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4))
    begun = time.process_time()
    refused(trainer_copy, tmp_path / "out", 'the key "t079999" is given twice', "byte", error=ferry_offload.StorageError)
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
                                   OSError(errno.ENOMEM, "Cannot allocate memory")], ids=lambda error: type(error).__name__)
def test_too_little_memory_is_no_damage(trainer_copy, tmp_path, monkeypatch, error):
    def fails(*_words, **_options):
        raise error

    monkeypatch.setattr(torch, "load", fails)
    refused(trainer_copy, tmp_path / "out", "too little memory", "optimizer.pt", error=ferry_offload.DoesNotFitError)


@pytest.mark.parametrize("text", [b"", b"/etc", b"../source/step", b"a\x00b", b"\xff\xfe", b"..", b"x" * 5000])
def test_a_step_is_beside_the_file_that_names_it(trainers, tmp_path, text):
    source = tmp_path / "source"
    shutil.copytree(trainers[0], source / "step")
    (source / "latest").write_bytes(text)
    refused(source, tmp_path / "out", "latest")
    (source / "latest").write_text("step\n")
    convert(source, tmp_path / "out")


def test_any_flipped_byte_of_a_pickle(trainers, tmp_path):
    """Ends in a named error, or in a checkpoint."""
    source = tmp_path / "source"
    shutil.copytree(trainers[0], source)
    path = source / "optimizer.pt"
    whole = path.read_bytes()
    begin = whole.index(b"data.pkl") + 8
    rng = random.Random(3)
    ends = set()
    places = rng.sample(range(begin, begin + 3000), 150) + rng.sample(range(len(whole) - 1500, len(whole)), 50)
    for number, at in enumerate(places):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1:])
        try:
            convert(source, tmp_path / f"out{number}")
            ends.add("done")
        except ferry_offload.FerryError as error:
            ends.add(type(error).__name__)
    assert ends >= {"done", "StorageError"}, ends


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("change", ["bytes", "another"])
def test_a_source_that_changes_meanwhile(trainer_copy, tmp_path, monkeypatch, name, change):
    path = trainer_copy / name
    add, begun = directory.Progress.add, []

    def meanwhile(self, count):
        if not begun:
            begun.append(True)
            if change == "another":
                shutil.copyfile(path, tmp_path / "new")
                os.replace(tmp_path / "new", path)
            else:
                before = path.stat()
                with open(path, "r+b") as file:
                    file.seek(-100, os.SEEK_END)
                    file.write(b"\x01")
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        add(self, count)

    monkeypatch.setattr(directory.Progress, "add", meanwhile)
    refused(trainer_copy, tmp_path / "out", name, "changed while it was read", error=ferry_offload.StorageError)


def test_weights_that_are_cut_meanwhile(trainer_copy, tmp_path, monkeypatch):
    """Are no signal."""
    add = directory.Progress.add

    def cut(self, count):
        os.truncate(trainer_copy / "model.safetensors", 5000)
        add(self, count)

    monkeypatch.setattr(directory.Progress, "add", cut)
    refused(trainer_copy, tmp_path / "out", "model.safetensors", error=ferry_offload.StorageError)


def test_only_its_own_leftovers_go(trainers, tmp_path):
    """Whatever the output is called."""
    out = tmp_path / "o[ut]*"
    mine = [tmp_path / f".{name}.converting" for name in ("out.abcd1234", "o[ut]*.notes", "other.abcd1234", "o[ut]*.abcd1234.x")]
    for folder in mine:
        folder.mkdir()
        (folder / "thesis.txt").touch()
    left = tmp_path / f".{out.name}.abcd_234.converting"
    left.mkdir()
    convert(trainers[0], out)
    assert all((folder / "thesis.txt").exists() for folder in mine) and not left.exists()


def test_what_may_not_be_read_is_no_damage(trainer_copy, tmp_path):
    path = trainer_copy / "trainer_state.json"
    path.chmod(0)
    words = [sys.executable, "-c", COMMAND, trainer_copy, tmp_path / "out"]
    if os.geteuid() == 0:
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
        if not shutil.which("setpriv") or subprocess.run([*words[:2], "true"], check=False).returncode:
            pytest.skip("root cannot give up its rights here")
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and str(path) in done.stderr and "Permission denied" in done.stderr, done.stderr


# ---------------------------------------------------------------- the command


# As `-m ferry_offload.convert`, but with torch's NCCL loaded before the one of this build: conftest.py.
COMMAND = "import torch, runpy; runpy.run_module('ferry_offload.convert', run_name='__main__', alter_sys=True)"


def test_the_command(trainers, tmp_path):
    words = ["-c", COMMAND, trainers[0], tmp_path / "out", "--json", "--shard-size", "50kB"]
    done = python(*words)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["bytes"] == sum(tensor.numel() * tensor.element_size() for tensor in arrays(tmp_path / "out").values())
    assert said["tensors"] == len(trainers[1]["trained"])
    again = python(*words)
    assert again.returncode == 2 and "there already" in again.stderr and again.stdout == ""
    without = python("-m", "ferry_offload.convert", trainers[0], tmp_path / "other", env={**os.environ, "PYTHONPATH": _without_torch(tmp_path)})
    assert without.returncode == 2 and "torch is needed" in without.stderr
    human = python(*words[:3], tmp_path / "human", "--no-moments")
    assert human.returncode == 0 and "ferry ckpt import" in human.stdout and "weights alone" in human.stdout


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_what_is_printed_goes_into_no_file(trainers, tmp_path, closed):
    """A stream that is closed lends its number to no file."""
    code = "import torch, sys\nsys.argv = ['convert', *sys.argv[1:]]\n" + COMMAND.partition("; ")[2]
    code = "import os\n" + "\n".join(f"os.close({number})" for number in closed.split()) + "\nimport runpy\n" + code
    done = python("-c", code.replace("import torch, runpy", "import runpy"), trainers[0], tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    convert(trainers[0], tmp_path / "plain")
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--json"], [], ["--help"]], ids=str)
def test_a_full_standard_output(trainers, tmp_path, words, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", COMMAND, str(trainers[0]), str(tmp_path / "out"), *words], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False, timeout=600, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 4, done.stderr
    for text in ("what ferry printed could not be written", "standard output", "No space left"):
        assert text in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert (tmp_path / "out").is_dir() == (words != ["--help"])


def test_help_has_an_example():
    done = python("-c", COMMAND, "--help")
    assert done.returncode == 0 and done.stdout.count("\nExample: python3 -m ferry_offload.convert ") == 1


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 400 + ".5 TB", "1" * 30])
def test_sizes_beyond_any(size):
    with pytest.raises(ferry_offload.UsageError, match="larger than any"):
        to_bytes(size)


def _without_torch(folder):
    (folder / "none/torch").mkdir(parents=True)
    (folder / "none/torch/__init__.py").write_text("raise ImportError('no torch here')")
    return os.pathsep.join([str(folder / "none"), os.environ.get("PYTHONPATH", "")])


def test_no_room_and_no_place(trainers, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    refused(trainers[0], tmp_path / "out", "no room", "1000 bytes are free", error=ferry_offload.StorageError)
    with pytest.raises(ferry_offload.UsageError, match="not there"):
        convert(trainers[0], tmp_path / "missing/out")


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_the_middle(trainers, tmp_path, by):
    """Nothing of that name is there. What a kill left goes with the next conversion."""
    slow = ("import torch, sys, time, runpy; from ferry_offload.convert import directory; directory._PART_ELEMENTS = 64;\n"
            "add = directory.Progress.add\n"
            "def slowly(self, count): time.sleep(0.01); add(self, count)\n"
            "directory.Progress.add = slowly\n"
            "sys.argv = ['convert', *sys.argv[1:]]; runpy.run_module('ferry_offload.convert', run_name='__main__')")
    process = subprocess.Popen([sys.executable, "-c", slow, trainers[0], tmp_path / "out"])
    try:
        for _ in range(3000):
            if list(tmp_path.glob(".out.*/model.safetensors")):
                break
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(by)
        process.wait(60)
    finally:
        process.kill()
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".out.*"))) == (by == signal.SIGKILL)
    convert(trainers[0], tmp_path / "out")
    assert list(tmp_path.glob(".out.*")) == []
