#!/usr/bin/env python3
"""Writes tests/golden/rope.json: the frequencies and amplitudes of RoPE as transformers' models turn their
heads by them, for every scaling, in texts shorter and longer than what a model was made for.

    python3 tests/golden/make_rope_golden.py

Needs PyTorch and transformers. Each case is a config.json, the tokens of a sequence, and what the model's rotary
embedding holds after it has seen a sequence of that length.
"""
import importlib
import json
import pathlib

import torch
import transformers

FILE = pathlib.Path(__file__).parent / "rope.json"
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 96}
SHORT = [1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.1, 2.6]
LONG = [1.1, 1.3, 1.8, 2.5, 4.0, 6.5, 9.0, 12.0]
# name: (model_type, settings of RoPE, other keys, sequences)
CASES = {
    "plain": ("llama", {"rope_type": "default", "rope_theta": 5e5}, {}, [24]),
    "linear": ("mistral", {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, {"head_dim": 24}, [24]),
    "llama3": ("llama", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32}, {}, [24]),
    "yarn": ("qwen2", {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                       "original_max_position_embeddings": 24}, {}, [24]),
    "yarn, mscale": ("qwen3", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 0.8,
                               "mscale_all_dim": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False,
                               "original_max_position_embeddings": 24}, {"head_dim": 20}, [24]),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {}, [24, 96, 97, 300]),
    "dynamic, heads apart": ("qwen3", {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0},
                             {"head_dim": 10}, [96, 250]),
    "longrope": ("llama", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG,
                           "original_max_position_embeddings": 32}, {}, [24, 32, 33, 200]),
    "longrope, said outside": ("mistral", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT,
                                           "long_factor": LONG}, {"original_max_position_embeddings": 48}, [48, 49]),
    "longrope, factor": ("qwen2", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT,
                                   "long_factor": LONG, "factor": 8.0,
                                   "original_max_position_embeddings": 32}, {}, [33]),
    "longrope, amplitude": ("qwen3", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT,
                                      "long_factor": LONG, "attention_factor": 1.19,
                                      "original_max_position_embeddings": 32}, {"head_dim": 16}, [33]),
    "a part": ("llama", {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.6}, {}, [24]),
    "a part, stretched": ("qwen3", {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                                    "factor": 2.0}, {"head_dim": 24}, [24]),
}


def rotary_of(config):
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    return next(kind for name, kind in vars(module).items() if name.endswith("RotaryEmbedding"))(config)


def main():
    golden = []
    for name, (family, settings, other, sequences) in CASES.items():
        text = {"model_type": family, **SIZES, **other, "rope_parameters": settings}
        for sequence in sequences:
            config = transformers.AutoConfig.for_model(**json.loads(json.dumps(text)))
            rotary = rotary_of(config)
            rotary(torch.zeros(1), torch.arange(sequence)[None])
            golden.append({"name": name, "config": text, "sequence": sequence,
                           "frequencies": rotary.inv_freq.double().tolist(),
                           "amplitude": float(rotary.attention_scaling)})
    FILE.write_text("[\n" + ",\n".join(json.dumps(case) for case in golden) + "\n]\n")


if __name__ == "__main__":
    main()
