#!/usr/bin/env python3
"""Writes tests/golden/hf: tiny random models of every family that ferry reads, and what PyTorch with
transformers makes of them.

    python3 tests/golden/make_hf_golden.py [build/release/ferry]

Needs PyTorch, transformers and tests/golden/train/tokens.bin with its text (make_train_golden.py).
The model, its initial weights and their directory are transformers' own; the rest of a run is as in
make_train_golden.py, and so are NAME.json, NAME.txt and NAME.bin.

NAME/            the model as transformers saves it
"""
import copy
import json
import math
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
import transformers

import make_train_golden as golden

FOLDER = pathlib.Path(__file__).parent / "hf"
VOCAB = golden.VOCAB
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.15}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}

# name: (class of the configuration, its arguments, how it is saved)
MODELS = {
    "llama": (transformers.LlamaConfig,
              SIZES | {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True,
                       "tie_word_embeddings": False}, {"max_shard_size": "20KB"}),
    "mistral": (transformers.MistralConfig,
                SIZES | {"head_dim": 8, "sliding_window": 20, "rope_parameters": LINEAR}, {}),
    "qwen2": (transformers.Qwen2Config,
              SIZES | {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1,
                       "tie_word_embeddings": True, "rope_parameters": YARN}, {}),
    "qwen3": (transformers.Qwen3Config, SIZES | {"head_dim": 10}, {}),
    "gpt2": (transformers.GPT2Config,
             {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 80,
              "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.15}, {}),
    # A token of the text is the padding token: its row learns from the head, which is the same tensor, alone.
    "padded": (transformers.Qwen2Config, SIZES | {"pad_token_id": 1, "tie_word_embeddings": True}, {}),
}
RUN = golden.TIED | {"precision": "fp32", "seed": 5}
RUN.pop("model")


def config_of(name):
    config = copy.deepcopy(RUN)
    config["model"] = {"path": f"tests/golden/hf/{name}"}
    if name == "gpt2":
        config["model"]["dropout"] = "ignore"
    return config


def make_exact(model):
    """transformers computes RMSNorm and RoPE's angles in fp32 whatever the model's type; the fp64 run does not."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: golden.rms_norm(x, m.weight, m.variance_epsilon)
    rotary = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
    if rotary is None:
        return

    def forward(x, position_ids, *_args, **_kwargs):
        angle = position_ids[:, :, None].double() * frequencies_of(model.config, int(position_ids.max()) + 1)
        angle = torch.cat((angle, angle), dim=-1)
        scale = rotary.attention_scaling
        return (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)

    rotary.forward = forward


def frequencies_of(config, length):
    """RoPE's in a text of that length, written out in double."""
    rope = config.rope_parameters
    theta, kind, factor = rope["rope_theta"], rope["rope_type"], rope.get("factor", 1.0)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind == "linear":
        return plain / factor
    if kind == "proportional":
        turning = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
        return torch.where(torch.arange(dim // 2) < turning, plain / factor, 0.0)
    if kind == "dynamic":
        longer = max(length, config.max_position_embeddings) / config.max_position_embeddings
        theta *= (factor * longer - (factor - 1)) ** (dim / (dim - 2))
        return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind == "longrope":
        beyond = length > rope["original_max_position_embeddings"]
        return plain / torch.tensor(rope["long_factor" if beyond else "short_factor"], dtype=torch.float64)
    if kind == "llama3":
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return plain / factor * (1 - share) + plain * share
    if kind == "yarn":
        def dimension(turns):
            length = rope["original_max_position_embeddings"]
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low = max(math.floor(dimension(32)), 0)
        high = min(math.ceil(dimension(1)), dim - 1)
        ramp = ((torch.arange(dim // 2).double() - low) / (high - low)).clamp(0, 1)
        return plain / factor * ramp + plain * (1 - ramp)
    return plain


class Trace(golden.Trace):
    """A run of transformers' model in one precision."""

    def __init__(self, config, model, tokens, mask, dtype):
        self.model = copy.deepcopy(model).to(dtype).eval()  # without dropout
        if dtype == torch.float64:
            make_exact(self.model)
        initial = {n: p.detach().clone() for n, p in model.named_parameters()}
        super().__init__(config, initial, tokens, mask, dtype)

    def logits(self, p, inputs):
        return torch.func.functional_call(self.model, p, (inputs,), {"use_cache": False}).logits


def evaluation(trace, tokens, mask):
    """The loss of the initial weights over the whole file."""
    length = golden.SEQUENCE
    total, count = 0.0, 0
    targets = torch.where(mask, -1, tokens)
    for begin in range(0, (len(tokens) - 1) // length * length, length):
        wanted = targets[begin + 1:begin + 1 + length]
        with torch.no_grad():
            out = trace.logits(trace.initial, tokens[None, begin:begin + length])[0]
        total += F.cross_entropy(out, wanted, ignore_index=-1, reduction="sum").item()
        count += int((wanted >= 0).sum())
    return {"loss": total / count, "perplexity": math.exp(total / count), "targets": count}


def zero_gradient(name, trace, tensor):
    """Exact zeros that rounding makes noise, which AdamW then takes whole steps along: gpt2's key biases."""
    if name == "gpt2" and tensor.endswith("c_attn.bias"):
        width = trace.p[tensor].numel() // 3
        return slice(width, 2 * width)
    return None


def main():
    torch.set_num_threads(1)
    torch.manual_seed(11)
    FOLDER.mkdir(exist_ok=True)
    ferry = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/release/ferry").resolve())
    tokens, mask = golden.write_tokens(ferry)
    for name, (kind, arguments, saved) in MODELS.items():
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        configuration = kind(**arguments)
        # The eager implementation takes the softmax in fp32 whatever the type.
        model = transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation="sdpa")
        for parameter_name, parameter in model.named_parameters():  # biases and norms that show
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(FOLDER / name, **saved)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        config = config_of(name)
        exact = Trace(config, model, tokens, mask, torch.float64)
        single = Trace(config, model, tokens, mask, torch.float32)
        print(name, "losses", exact.losses[0], exact.losses[-1], "norms", " ".join(f"{n:.3f}" for n in exact.norms))
        config["clip_norm"] = round(sorted(exact.norms)[len(exact.norms) // 2], 3)  # binds in half of the steps
        (FOLDER / f"{name}.json").write_text(json.dumps(config, indent=2) + "\n")
        exact = Trace(config, model, tokens, mask, torch.float64)
        single = Trace(config, model, tokens, mask, torch.float32)
        (FOLDER / f"{name}.eval.json").write_text(json.dumps(evaluation(exact, tokens, mask)) + "\n")
        for trace in (exact, single):
            for values in (trace.gradient, *trace.weights.values(), trace.initial):
                for tensor, value in values.items():
                    part = zero_gradient(name, trace, tensor)
                    if part is not None:
                        value[part] = 0
        shown = (20,)
        text = "".join(f"loss{bits} {golden.hexadecimal(t.losses)}\nnorm{bits} {golden.hexadecimal(t.norms)}\n"
                       for bits, t in (("64", exact), ("32", single)))
        text += "shown " + " ".join(map(str, shown)) + "\n"
        parts = [golden.describe(tensor, exact, single, shown) for tensor in exact.initial]
        text += "".join(line for line, _ in parts)
        (FOLDER / f"{name}.bin").write_bytes(b"".join(data for _, data in parts))
        (FOLDER / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
