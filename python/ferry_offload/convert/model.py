"""What config.json says of the model: its tensors, in the order in which transformers' module has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..text import shown
from .files import is_there, read_json
from .state import unsupported

_BESIDE = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
           "merges.txt", "chat_template*", "spiece.model")
_WRAPPERS = ("module.", "_orig_mod.")
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # transformers' defaults
_MOST_LAYERS = 1 << 16  # each is so many names in memory
_HEAD, _EMBEDDING = "lm_head.weight", {"gpt2": "transformer.wte.weight"}


class Model:
    """A model of one of ferry's families (docs/models.md)."""

    def __init__(self, config_path: Path) -> None:
        self.path = config_path
        self.config = read_json(config_path, dict)
        self.family = str(self.config.get("model_type"))
        if self.family not in _TENSORS:
            raise unsupported("a model of a family that ferry does not train", config_path, shown(self.family),
                              ", ".join(sorted(_TENSORS)))
        # transformers' defaults: what config.json leaves out.
        self.tied = bool(self.config.get("tie_word_embeddings", self.family == "gpt2"))
        self.tensors = dict(_TENSORS[self.family](self))
        if not self.tied:
            self.tensors[_HEAD] = self.tensors[self.embedding]

    @property
    def embedding(self) -> str:
        return _EMBEDDING.get(self.family, "model.embed_tokens.weight")

    @property
    def prefix(self) -> str:
        return self.embedding.partition(".")[0] + "."

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of the keys that is there."""
        value = next((self.config[key] for key in keys if self.config.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise unsupported("config.json does not say the model's shape", f"{self.path}: {keys[0]}",
                              "missing" if value is None else shown(repr(value)), "a positive whole number")
        return value

    def layers(self, *keys: str) -> range:
        count = self.number(*keys)
        if count > _MOST_LAYERS:
            raise unsupported("config.json names more layers than any model has", f"{self.path}: {keys[0]}", count, _MOST_LAYERS)
        return range(count)

    def absent(self, key: str, without: int, null: int) -> int:
        """A key whose default depends on whether it is missing or null."""
        return self.number(key, default=null if key in self.config else without)

    def flag(self, key: str) -> bool:
        return bool(self.config.get(key, False))

    def name_of(self, name: str) -> str:
        """Of a name in a checkpoint: without the prefix of what was wrapped around the model."""
        plain = name
        while plain.startswith(_WRAPPERS):
            plain = plain[len(next(wrapper for wrapper in _WRAPPERS if plain.startswith(wrapper))):]
        return self.prefix + plain if plain not in self.tensors and self.prefix + plain in self.tensors else plain

    def is_head(self, name: str) -> bool:
        return name == _HEAD

    def files(self) -> list[Path]:
        """Those to be taken over as they are."""
        folder = self.path.parent
        found = (path for path in folder.iterdir() if any(path.match(pattern) for pattern in _BESIDE) and is_there(path))
        return [self.path, *sorted(found)]

    def require(self, shapes: dict[str, tuple[int, ...]], where: object) -> None:
        """Throws usage where these are not the model's tensors."""
        missing = [name for name in self.tensors if name not in shapes]
        if missing:
            raise unsupported("a tensor of config.json is not in the checkpoint", f"{where}: {missing[0]}",
                              f"{len(missing)} of {len(self.tensors)} missing", "",
                              "check that config.json belongs to it; a checkpoint without its frozen tensors is not enough")
        for name, shape in shapes.items():
            wanted = self.tensors.get(name)
            if wanted is None:
                raise unsupported("a tensor of the checkpoint is not the model's", f"{where}: {shown(name)}", list(shape),
                                  f"the tensors of {self.path}", "name the model's own config.json: --model DIR")
            if wanted != tuple(shape):
                raise unsupported("a tensor has another shape than config.json says", f"{where}: {shown(name)}", list(shape),
                                  list(wanted), "name the model's own config.json: --model DIR")


def config_of(candidates: Iterable[Path]) -> Path:
    """The first config.json of these directories."""
    searched = list(dict.fromkeys(candidates))
    for folder in searched:
        if is_there(folder / "config.json"):
            return folder / "config.json"
    raise unsupported("there is no config.json, which says what the model is", searched[0], "", "",
                      "name a directory that has it: --model DIR")


def _linear(name: str, out: int, inner: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (out, inner)
    if bias:
        yield name + ".bias", (out,)


def _llama(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = model.number("hidden_size"), model.number("num_attention_heads")
    inner, usual = model.number("intermediate_size"), max(1, hidden // heads)
    head = model.absent("head_dim", 128 if model.family == "qwen3" else usual, usual)
    values = model.absent("num_key_value_heads", _KV_HEADS.get(model.family, heads), heads) * head
    qwen2 = model.family == "qwen2"
    bias = qwen2 or (model.family != "mistral" and model.flag("attention_bias"))
    mlp_bias = model.family == "llama" and model.flag("mlp_bias")
    yield model.embedding, (model.number("vocab_size"), hidden)
    for layer in model.layers("num_hidden_layers"):
        block = f"model.layers.{layer}."
        for part, rows in (("q", heads * head), ("k", values), ("v", values)):
            yield from _linear(f"{block}self_attn.{part}_proj", rows, hidden, bias)
        yield from _linear(block + "self_attn.o_proj", hidden, heads * head, bias and not qwen2)
        if model.family == "qwen3":
            yield from ((f"{block}self_attn.{part}_norm.weight", (head,)) for part in "qk")
        yield from _linear(block + "mlp.gate_proj", inner, hidden, mlp_bias)
        yield from _linear(block + "mlp.up_proj", inner, hidden, mlp_bias)
        yield from _linear(block + "mlp.down_proj", hidden, inner, mlp_bias)
        yield from ((f"{block}{norm}_layernorm.weight", (hidden,)) for norm in ("input", "post_attention"))
    yield "model.norm.weight", (hidden,)


def _gpt2(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = model.number("n_embd", "hidden_size")
    inner = model.number("n_inner", default=4 * hidden)

    def pair(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"transformer.{name}.weight", shape
        yield f"transformer.{name}.bias", shape[-1:]

    yield model.embedding, (model.number("vocab_size"), hidden)
    yield "transformer.wpe.weight", (model.number("n_positions", "max_position_embeddings"), hidden)
    for layer in model.layers("n_layer", "num_hidden_layers"):
        yield from pair(f"h.{layer}.ln_1", hidden)
        yield from pair(f"h.{layer}.attn.c_attn", hidden, 3 * hidden)  # stored transposed
        yield from pair(f"h.{layer}.attn.c_proj", hidden, hidden)
        yield from pair(f"h.{layer}.ln_2", hidden)
        yield from pair(f"h.{layer}.mlp.c_fc", hidden, inner)
        yield from pair(f"h.{layer}.mlp.c_proj", inner, hidden)
    yield from pair("ln_f", hidden)


_TENSORS = {"llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama, "gpt2": _gpt2}
