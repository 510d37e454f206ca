#!/usr/bin/env python3
"""Makes checkpoints with DeepSpeed's own writer, on CPUs, and what they hold in memory beside them.

    python3 tests/python/make_deepspeed_checkpoints.py FOLDER [NAME ...]

Needs torch, deepspeed and transformers. For each of CASES: FOLDER/NAME/saved is what save_checkpoint() wrote, with
config.json beside it; FOLDER/NAME/universal what DeepSpeed's ds_to_universal makes of it, where the case asks for it; and
FOLDER/NAME/truth.pt what DeepSpeed says of its own state in memory: by name the fp32 master, `exp_avg` and `exp_avg_sq`,
the frozen weights, and how many steps were taken."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

STEPS, LR, BETAS, EPS, DECAY = 3, 1e-3, (0.9, 0.999), 1e-8, 0.1
SEQUENCE, VOCAB = 24, 67

# Odd sizes: nothing divides by the number of ranks. `frozen` is a part of the names that do not train; `groups` as Trainers
# make them, with and without decay; `wrapped` has another module around the model.
CASES: dict[str, dict[str, Any]] = {
    "stage1-bf16-1": {"stage": 1, "type": "bf16", "ranks": 1, "groups": 2, "universal": True},
    "stage1-bf16-2": {"stage": 1, "type": "bf16", "ranks": 2, "accumulate": "fp32", "frozen": "layers.0.mlp"},
    "stage1-fp16-2": {"stage": 1, "type": "fp16", "ranks": 2, "tied": True, "skip": True},
    "stage2-fp32-2": {"stage": 2, "type": "fp32", "ranks": 2, "groups": 2, "universal": True, "tied": True},
    "stage2-bf16-2": {"stage": 2, "type": "bf16", "ranks": 2, "frozen": "layers.0.", "round_robin": True, "wrapped": True,
                      "universal": True},
    "stage3-fp32-1": {"stage": 3, "type": "fp32", "ranks": 1},
    "stage3-bf16-2": {"stage": 3, "type": "bf16", "ranks": 2, "groups": 2, "universal": True, "frozen": "layers.0.mlp"},
    "stage3-fp16-2": {"stage": 3, "type": "fp16", "ranks": 2, "groups": 2, "tied": True, "sub_groups": 1000},
}


def model_config(tied: bool = False):
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=VOCAB, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, head_dim=10, max_position_embeddings=64, tie_word_embeddings=tied)


def batch():
    """One sequence, the same at every step: no order of data plays a part. Its last token is a target alone."""
    import torch

    return torch.randint(0, VOCAB, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(4))


def loss_of(model: Any, tokens: Any) -> Any:
    import torch

    logits = model(input_ids=tokens[None, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0].float(), tokens[1:])


def _wrapped(model: Any) -> Any:
    import torch

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, **given: Any) -> Any:
            return self.module(**given)

    return Wrapper()


def _groups(model: Any, count: int) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if count == 1:
        return [{"params": trained}]
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]


def _deepspeed_config(case: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": case["stage"], "round_robin_gradients": case.get("round_robin", False)}
    if "sub_groups" in case:
        zero["sub_group_size"] = case["sub_groups"]
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero,
                              "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
                              "checkpoint": {"load_universal": False}}
    if case["type"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["type"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 24 if case.get("skip") else 8, "hysteresis": 1}
    if "accumulate" in case:
        config["data_types"] = {"grad_accum_dtype": case["accumulate"]}
    return config


def _train(rank: int, case: dict[str, Any], folder: Path, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["ranks"]), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = model_config(case.get("tied", False))
    inner = LlamaForCausalLM(config)
    for name, parameter in inner.named_parameters():
        parameter.requires_grad_(not ("frozen" in case and case["frozen"] in name))
    model = _wrapped(inner) if case.get("wrapped") else inner
    optimizer = torch.optim.AdamW(_groups(model, case.get("groups", 1)), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_deepspeed_config(case))
    tokens = batch()
    while engine.global_steps - engine.skipped_steps < STEPS:
        engine.backward(loss_of(engine, tokens))
        engine.step()
    engine.save_checkpoint(str(folder / "saved"), client_state={"what_a_caller_adds": {"epoch": 1}})
    truth = _truth(engine, case)
    if rank == 0:
        config.save_pretrained(folder / "saved")
        torch.save(truth, folder / "truth.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _truth(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own view of its state. Every rank takes part."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if case.get("round_robin"):
        return _of_shuffled(engine, case)
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links them after the first group's first step, when the others' are not made yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    trained, frozen = {}, {}
    for name, parameter in engine.module.named_parameters():
        plain = name.removeprefix("module.")
        if parameter.requires_grad:
            trained[plain] = {"master": safe_get_full_fp32_param(parameter).detach().cpu().clone(),
                              **{kind: safe_get_full_optimizer_state(parameter, kind).detach().cpu().clone()
                                 for kind in ("exp_avg", "exp_avg_sq")}}
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=case["stage"] == 3):
                frozen[plain] = parameter.detach().cpu().clone()
    return {"trained": trained, "frozen": frozen, **_counts(engine, case)}


def _counts(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    return {"global_step": engine.global_steps, "optimizer_step": engine.global_steps - engine.skipped_steps,
            "loss_scale": float(engine.optimizer.loss_scaler.cur_scale) if case["type"] == "fp16" else None}


def _of_shuffled(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """With round_robin_gradients the flat vectors have another order than DeepSpeed's view by name believes (0.19.8), so
    they are gathered and cut here. That each master, rounded, is the parameter shows which one is right."""
    import torch

    zero, trained = engine.optimizer, {}
    names = {id(parameter): name.removeprefix("module.") for name, parameter in engine.module.named_parameters()}
    for index, master in enumerate(zero.single_partition_of_fp32_groups):
        state = zero.optimizer.state[master]
        for kind, part in {"master": master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, part.detach())
            flat, at = torch.cat(parts), 0
            for parameter in zero.round_robin_bit16_groups[index]:
                value = flat[at:at + parameter.numel()].reshape(parameter.shape).clone()
                trained.setdefault(names[id(parameter)], {})[kind] = value
                at += parameter.numel()
                assert kind != "master" or torch.equal(value.to(parameter.dtype), parameter)
    frozen = {names[id(p)]: p.detach().clone() for p in engine.module.parameters() if not p.requires_grad}
    return {"trained": trained, "frozen": frozen, **_counts(engine, case)}


def _universal(folder: Path) -> None:
    """What `ds_to_universal` does; the information that it asks of the client is its default."""
    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "saved" / "latest").read_text().strip()
    ds_to_universal.main(argparse.Namespace(
        input_folder=str(folder / "saved" / tag), output_folder=str(folder / "universal" / f"{tag}_universal"),
        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=False, inject_missing_state=True))
    (folder / "universal" / "latest_universal").write_text(f"{tag}_universal")


def make(folder: Path, name: str) -> Path:
    import torch

    case, place = CASES[name], folder / name
    place.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_train, (case, place, port), nprocs=case["ranks"])
    if case.get("universal"):
        _universal(place)
    (place / "case.json").write_text(json.dumps(case))
    return place


if __name__ == "__main__":
    for asked in sys.argv[2:] or CASES:
        print(make(Path(sys.argv[1]), asked))
