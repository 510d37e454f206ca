"""A model larger than its GPU: the weights of its blocks lie in host memory and on NVMe, and come when they are used."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import error_of, message, usage
from ..sizes import to_bytes
from ._departed import DepartedGradient
from ._transfers import pinned
from .optimizer import OffloadOptimizer
from .tensor_store import NVMeTensorStore, _Layout

# Of frozen blocks on NVMe: one that is copied, and two that are read ahead.
_BUFFERS = 3

Weights = Callable[[str], torch.Tensor]


@dataclasses.dataclass
class StreamStats:
    fetches: int = 0  # of blocks, to the device
    ahead: int = 0  # of them before they were asked for
    deviations: int = 0  # blocks asked for out of the learned order
    host_bytes: int = 0  # of weights
    nvme_bytes: int = 0
    device_bytes: int = 0  # of blocks, at most at once


class _Block:
    """Its parameters on the device are views of `flat`, whose memory is there only while it is used."""

    def __init__(self, index: int, name: str, module: torch.nn.Module) -> None:
        self.index, self.name, self.module = index, name, module
        self.places = [(holder, key, f"{name}.{path}") for path, holder, key in _parameters_of(module)]
        self.layout = _Layout({full: holder._parameters[key] for holder, key, full in self.places})  # type: ignore[misc]
        self.is_frozen = not any(holder._parameters[key].requires_grad for holder, key, _ in self.places)  # type: ignore[union-attr]
        self.home: torch.Tensor | None = None  # all bytes, in host memory; None: on NVMe
        self.homes: dict[str, torch.nn.Parameter] = {}
        self.trained: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []  # one there, and here
        self.accumulates: list[Any] = []  # autograd's nodes of these: without us they would come and go with each graph
        self.flat = torch.empty(0)
        self.parameters: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # and its view of flat
        self.is_there = False
        self.users = 0
        self.in_backward = False
        self.used = 0  # when, the last time
        self.arrived: Any = None


def _tensors_in(output: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Also those of a dataclass, or of another object that holds them."""
    for one in torch.utils._pytree.tree_leaves(output):
        if isinstance(one, torch.Tensor):
            yield one
        elif depth > 0 and hasattr(one, "__dict__") and not isinstance(one, (torch.nn.Module, type)):
            yield from _tensors_in(list(vars(one).values()), depth - 1)


def _parameters_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    for path, holder in module.named_modules():
        for key, p in holder._parameters.items():
            if p is not None:
                yield (f"{path}.{key}" if path else key), holder, key


class StreamedModel:
    """What stream_model() returns. parameters() are for an optimizer of ferry's: of blocks those in host memory, of the
    rest the model's own."""

    def __init__(self, model: torch.nn.Module, blocks: list[tuple[str, torch.nn.Module]], weights: Weights | None, device: torch.device,
                 device_blocks: int, host: int, nvme: Sequence[Any]) -> None:
        self.model, self.device, self.stats = model, device, StreamStats()
        self._limit = device_blocks
        self._blocks = [_Block(i, name, module) for i, (name, module) in enumerate(blocks)]
        self._refuse_shared()
        self._order: list[int] = []
        self._learned = False
        self._at = self._clock = 0
        self._optimizer: OffloadOptimizer | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._store: NVMeTensorStore | None = None
        self._hooks: list[Any] = []
        self._left: dict[torch.Tensor, DepartedGradient] = {}  # what .grad of a block's parameter holds since
        on_nvme = self._place(host, nvme)
        for block in self._blocks:
            self._fill(block, weights, on_nvme)
        self._rest: dict[str, torch.nn.Parameter] = dict(self._move_the_rest(weights))
        for block in self._blocks:
            self._hook(block)
        self._hooks.append(model.register_forward_hook(self._forward_ended))

    # ---- where weights lie

    def _refuse_shared(self) -> None:
        seen: dict[int, str] = {}
        for block in self._blocks:
            for holder, key, full in block.places:
                other = seen.setdefault(id(holder._parameters[key]), full)
                if other != full:
                    raise usage("blocks share a parameter", where=full, measured=f"it is {other} too", limit="blocks of their own weights")

    def _place(self, host: int, nvme: Sequence[Any]) -> set[int]:
        """Trained blocks lie in host memory, and so do frozen ones as far as there is room."""
        sizes = [block.layout.bytes for block in self._blocks]
        buffers = _BUFFERS * max(sizes)
        trained = sum(size for block, size in zip(self._blocks, sizes) if not block.is_frozen)
        frozen = [block for block in self._blocks if block.is_frozen]
        room = host - trained
        if sum(block.layout.bytes for block in frozen) <= room:
            return set()
        room -= buffers
        if room < 0 or not nvme:
            raise error_of(3, "does not fit", message(
                "the blocks' weights do not fit into host memory", "", f"{sum(sizes)} bytes, {trained} of them trained",
                f"{host} bytes of `host`", f"give {buffers + trained if nvme and frozen else sum(sizes)} bytes"
                + ("" if nvme else ", or directories for `nvme` (frozen blocks can lie there)")))
        on_nvme = set()
        for block in frozen:
            room -= block.layout.bytes
            if room < 0:
                on_nvme.add(block.index)
        groups = {block.index: {full: torch.empty(shape, dtype=dtype, device="meta")
                                for full, (_, dtype, shape) in block.layout.places.items()}
                  for block in self._blocks if block.index in on_nvme}
        self._store = NVMeTensorStore(groups, nvme, host=buffers)
        self.stats.nvme_bytes = sum(self._blocks[i].layout.bytes for i in on_nvme)
        return on_nvme

    def _fill(self, block: _Block, weights: Weights | None, on_nvme: set[int]) -> None:
        values = {full: _value(holder._parameters[key], full, weights) for holder, key, full in block.places}  # type: ignore[arg-type]
        if block.index in on_nvme:
            assert self._store is not None
            self._store.write(block.index, values)
        else:
            count = block.layout.bytes
            block.home = pinned(count, torch.uint8, block.name) if self.device.type == "cuda" else torch.empty(count, dtype=torch.uint8)
            self.stats.host_bytes += count
            for full, view in block.layout.views(block.home).items():
                view.copy_(values[full])
                block.homes[full] = torch.nn.Parameter(view, requires_grad=False)
        block.flat = torch.empty(block.layout.bytes, dtype=torch.uint8, device=self.device)
        views = block.layout.views(block.flat)
        for holder, key, full in block.places:
            old = holder._parameters[key]
            assert old is not None
            new = torch.nn.Parameter(views[full], requires_grad=old.requires_grad)
            holder._parameters[key] = new
            block.parameters.append((new, views[full]))
            if full in block.homes and old.requires_grad:
                block.homes[full].requires_grad_()
                block.trained.append((block.homes[full], new))
                # Not a hook of the parameter: it would also run in torch.autograd.grad(), which leaves .grad as it is.
                with torch.enable_grad():
                    block.accumulates.append(torch.autograd.graph.get_gradient_edge(new).node)
                block.accumulates[-1].register_prehook(self._before(block.homes[full], new))
                new.register_post_accumulate_grad_hook(self._sends(block.homes[full]))
        self._leave(block)

    def _move_the_rest(self, weights: Weights | None) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Embedding, norms, head and buffers stay on the device. What is shared stays shared."""
        mine = {id(p) for block in self._blocks for p, _ in block.parameters}
        moved: dict[int, torch.nn.Parameter] = {}
        for path, holder, key in _parameters_of(self.model):
            old = holder._parameters[key]
            assert old is not None
            if id(old) in mine:
                continue
            if id(old) not in moved:
                moved[id(old)] = torch.nn.Parameter(_value(old, path, weights).to(self.device), requires_grad=old.requires_grad)
                yield path, moved[id(old)]
            holder._parameters[key] = moved[id(old)]
        for path, holder in self.model.named_modules():
            for key, buffer in list(holder._buffers.items()):
                if buffer is not None:
                    full = f"{path}.{key}" if path else key
                    holder._buffers[key] = _buffer(holder, key, buffer, full, weights).to(self.device)

    # ---- the order of uses

    def _hook(self, block: _Block) -> None:
        begun: list[int] = []  # numbers of autograd's nodes

        def before(*_: Any) -> None:
            begun.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            block.users += 1
            self._ask(block)

        def after(_: Any, __: Any, output: Any) -> None:
            if not begun:  # an earlier hook of the program's failed
                return
            block.users -= 1
            first = begun.pop()
            for one in _tensors_in(output):  # backward may come by each of them alone
                if one.grad_fn is not None and one.grad_fn._sequence_nr() >= first:  # not what is passed through
                    one.register_hook(lambda _: self._backward_of(block))

        def saved(_: torch.nn.Module, found: dict[str, Any], prefix: str, __: Any) -> None:
            for name, value in self._weights_of(block).items():
                found[prefix + name[len(block.name) + 1:]] = value

        def loaded(found: dict[str, Any], prefix: str, *_: Any) -> None:
            if any(prefix + full[len(block.name) + 1:] in found for _, _, full in block.places):
                raise usage("weights are loaded into a block, where they come and go", where=block.name,
                            measured="load_state_dict()", remedy="stream_model() another model with weights=")

        # A recomputation ends by an exception, once it has all that backward needs.
        self._hooks += [block.module._register_state_dict_hook(saved),
                        block.module._register_load_state_dict_pre_hook(loaded),
                        block.module.register_forward_pre_hook(before),
                        block.module.register_forward_hook(after, always_call=True)]

    def __deepcopy__(self, _: Any) -> StreamedModel:
        raise usage("a model is copied whose blocks' weights come and go", where="stream_model",
                    remedy="make another model, and stream_model() it with weights=stream.state_dict()")

    def _backward_of(self, block: _Block) -> None:
        """Autograd walks the blocks one after the other: the one before has ended."""
        if torch.is_grad_enabled():
            raise usage("gradients of gradients want a block's weights when they have left", where=block.name,
                        measured="create_graph=True", limit="gradients of the first order")
        if block.in_backward and block.is_there:
            return
        for other in self._blocks:
            other.in_backward = False
        block.in_backward = True
        self._ask(block)

    def _forward_ended(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._step_ended()

    def _step_ended(self, *_: Any) -> None:
        """The order of the next one begins. What the optimizer has changed is not on the device any more."""
        if not self._learned and self._order:
            self._learned = True
        self._at = 0
        for block in self._blocks:
            block.in_backward = False
            if not block.is_frozen and block.is_there:
                self._leave(block)

    def _ask(self, block: _Block) -> None:
        if not self._learned:
            self._order.append(block.index)
        elif self._at < len(self._order) and self._order[self._at] == block.index:
            self._at += 1
        else:
            self.stats.deviations += 1
            later = [i for i in range(self._at, len(self._order)) if self._order[i] == block.index]
            self._at = later[0] + 1 if later else self._at
        if not block.is_there:
            self._fetch(block)
        self._clock += 1
        block.used = self._clock
        if block.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(block.arrived)
        block.users += 1  # it stays while others come
        self._look_ahead()
        block.users -= 1

    def _look_ahead(self) -> None:
        if not self._learned:
            return
        coming = [self._blocks[i] for i in self._order[self._at:self._at + self._limit]]
        if self._store is not None:
            self._store.prefetch([block.index for block in coming if block.home is None and not block.is_there])
        for block in coming[:self._limit - 1]:
            if block.is_there:
                self._clock += 1
                block.used = self._clock  # it is not to make room
            elif self._room():
                self._fetch(block)
                self.stats.ahead += 1
            else:
                return

    # ---- coming and going

    def _room(self) -> bool:
        """Whether there is room for one more block, if need be by sending one away."""
        there = [block for block in self._blocks if block.is_there]
        if len(there) < self._limit:
            return True
        idle = [block for block in there if block.users == 0 and not block.in_backward]
        if not idle:
            return False
        self._leave(min(idle, key=lambda block: block.used))
        return True

    def _leave(self, block: _Block) -> None:
        for p, _ in block.parameters:
            p.data = torch.empty(0, dtype=p.dtype, device=self.device)
        block.flat.untyped_storage().resize_(0)
        block.is_there, block.arrived = False, None

    @torch.no_grad()
    def _fetch(self, block: _Block) -> None:
        self._room()  # where all are in use it is one more: so many are needed at once
        self.stats.fetches += 1
        block.flat.untyped_storage().resize_(block.layout.bytes)
        there = sum(one.layout.bytes for one in self._blocks if one.is_there) + block.layout.bytes
        self.stats.device_bytes = max(self.stats.device_bytes, there)
        flat = block.flat.data  # of no version that autograd compares: the weights are the same ones again
        if block.home is None:
            assert self._store is not None
            self._store.load_into(block.index, block.layout.views(flat))
        elif self._stream is None:
            flat.copy_(block.home)
        else:
            # The memory may have been another block's, which the device still computes with.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                flat.copy_(block.home, non_blocking=True)
            block.flat.record_stream(self._stream)
            block.arrived = self._stream.record_event()
        for p, view in block.parameters:
            p.data = view
        block.is_there = True

    # ---- training

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """In the order of use: what comes before the blocks, the blocks, the rest."""
        yield from ((name, p) for name, p in self._rest.items() if p.requires_grad)
        for block in self._blocks:
            yield from ((name, p) for name, p in block.homes.items() if p.requires_grad)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for _, p in self.named_parameters())

    def train_with(self, optimizer: OffloadOptimizer) -> None:
        """Gradients of blocks go to this optimizer, made of parameters(). After its step() the blocks have the new weights."""
        if not isinstance(optimizer, OffloadOptimizer):
            raise usage("blocks train with an optimizer that their gradients can be handed to", where="train_with",
                        measured=type(optimizer).__name__, limit="OffloadAdamW and its like, of stream.parameters()")
        self._optimizer = optimizer
        self._hooks.append(optimizer.register_step_pre_hook(self._step_begins))
        self._hooks.append(optimizer.register_step_post_hook(self._step_ended))

    def _step_begins(self, *_: Any) -> None:
        for block in self._blocks:
            for home, p in block.trained:
                self._follow(home, p)

    def _follow(self, home: torch.nn.Parameter, p: torch.nn.Parameter) -> None:
        """The model's zero_grad() is one of what it cannot see, and a gradient that the program sets is the block's."""
        if p.grad is None:
            home.grad = None
        elif p.grad is not self._left.get(p):
            home.grad = p.grad.detach().clone().to(home.device)

    def _before(self, home: torch.nn.Parameter, p: torch.nn.Parameter) -> Callable[[Any], None]:
        def before(_: Any) -> None:
            self._follow(home, p)
            p.grad = None  # autograd is to add to nothing: the optimizer adds

        return before

    def _sends(self, home: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        def send(p: torch.Tensor) -> None:
            if self._optimizer is None:
                raise usage("a block's gradient has nowhere to go", where="stream_model",
                            remedy="call train_with(optimizer), or freeze the blocks")
            if p.grad is not None:
                gradient, p.grad = p.grad, None
                self._optimizer.arrive(home, gradient)
                p.grad = self._left[p] = DepartedGradient(p.detach(), home.grad.home)

        return send

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights, on the CPU, by their names in the model."""
        found = {name: p.detach().cpu() for name, p in self._rest.items()}
        for block in self._blocks:
            found |= {name: value.clone() for name, value in self._weights_of(block).items()}
        return found

    def _weights_of(self, block: _Block) -> dict[str, torch.Tensor]:
        """In host memory: of a block that lies there the weights themselves."""
        if self._optimizer is not None:
            self._optimizer.synchronize()
        if block.home is not None:
            return {name: p.detach() for name, p in block.homes.items()}
        assert self._store is not None
        return self._store.load(block.index)

    def close(self) -> None:
        """The model cannot be used any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            for block in self._blocks:
                if block.home is not None:
                    torch.cuda.cudart().cudaHostUnregister(block.home.data_ptr())
        if self._store is not None:
            self._store.close()


def _value(given: torch.Tensor, name: str, weights: Weights | None) -> torch.Tensor:
    if weights is None and given.is_meta:
        raise usage("a parameter has no value", where=name, measured="it is on the meta device",
                    remedy="give weights=: a directory of safetensors files, a mapping, or a function of the name")
    value = given.detach() if weights is None else weights(name)
    if value.shape != given.shape:
        raise usage("a weight has another shape than its parameter", where=name, measured=tuple(value.shape), limit=tuple(given.shape))
    return value.to(given.dtype)


def _buffer(holder: torch.nn.Module, key: str, buffer: torch.Tensor, name: str, weights: Weights | None) -> torch.Tensor:
    """One that is computed and not saved is computed again, by a module like it."""
    if not buffer.is_meta:
        return buffer
    config = getattr(holder, "config", None)
    if config is not None:
        fresh = type(holder)(config)._buffers.get(key)
        if fresh is not None:
            return fresh
    return _value(buffer, name, weights)


def _reader_of(weights: Any) -> Weights | None:
    if weights is None or callable(weights):
        return weights
    if isinstance(weights, Mapping):
        def of(name: str) -> torch.Tensor:
            if name not in weights:
                raise usage("weights have no tensor of this name", where=name, measured=f"{len(weights)} tensors")
            return weights[name]
        return of
    return _files_of(os.fspath(weights))


def _files_of(folder: str) -> Weights:
    """Those that transformers saves."""
    from safetensors import SafetensorError, safe_open

    from ..convert.files import shards_of
    index = Path(folder, "model.safetensors.index.json")
    files = shards_of(index) if index.exists() else {}
    opened: dict[str, Any] = {}

    def of(name: str) -> torch.Tensor:
        path = Path(folder, files.get(name, "model.safetensors"))
        if not path.is_file():
            raise usage("there is no file of the weights", where=f"{path}: {name}", remedy="name the directory of a model")
        try:
            if path.name not in opened:
                opened[path.name] = safe_open(path, "pt")
            return opened[path.name].get_tensor(name)
        except SafetensorError as error:
            raise error_of(4, "io", message("a tensor cannot be read", f"{path}: {name}", str(error), "", "")) from error

    return of


def stream_model(model: torch.nn.Module, *, host: int | str, nvme: Sequence[Any] = (), weights: Any = None,
                 device: torch.device | str = "cuda", device_blocks: int = 3,
                 blocks: Sequence[torch.nn.Module] | None = None) -> StreamedModel:
    """Lets a model run and train whose blocks do not fit on `device` together. It may be on the meta device, with
    `weights` a directory of safetensors files, a mapping or a function of the name. The blocks' weights lie in host memory
    up to `host`, frozen ones also in `nvme`. A block comes when its forward or backward begins; the order is learned in the
    first step, and from then on blocks come ahead. What is asked for out of that order comes when it is asked for.

    device_blocks   so many are on the device at once, 2 at least
    blocks          default: the modules of the largest ModuleList, as in transformers' decoders
    """
    if device_blocks < 2:
        raise usage("device_blocks is too small", measured=device_blocks, limit="2 or more: one that is used, one that comes")
    names = {module: name for name, module in model.named_modules()}
    found = list(blocks) if blocks is not None else _largest_list(model)
    strangers = [type(block).__name__ for block in found if block not in names]
    if strangers or not found:
        raise usage("blocks are not modules of the model", measured=strangers or "none", limit="modules of it, such as model.layers")
    return StreamedModel(model, [(names[block], block) for block in found], _reader_of(weights), torch.device(device),
                         device_blocks, to_bytes(host), nvme)


def _largest_list(model: torch.nn.Module) -> list[torch.nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) > 0]
    if not lists:
        raise usage("the model has no ModuleList", measured=type(model).__name__, remedy="name its blocks: blocks=[...]")
    return list(max(lists, key=lambda one: sum(p.numel() for p in one.parameters())))
