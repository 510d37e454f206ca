"""torch.optim optimizers whose state lies in host memory and on NVMe (docs/embedding.md)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .._core import Team, clip_factor
from ..errors import error_of, message, usage
from ..sizes import to_bytes
from ..tiered_state import Chunk, TieredState
from ._departed import DepartedGradient
from ._format import Format
from ._masters import Masters, Tier, chunks_of
from ._modules import land_before_use
from ._options import (check_constants, check_norm, check_whole, default_threads, directories, name_of,
                       refuse_options, steps_of)
from ._records import Record, has_ranks, local
from ._resident import Resident
from ._squares import Squares
from ._transfers import Transfers
from ._updates import Finish, Version, Work
from ._worker import Worker


@dataclasses.dataclass
class Stats:
    """Of all steps so far; `updates` are of chunks."""

    steps: int = 0
    updates_committed: int = 0  # made while backward went on
    updates_rolled_back: int = 0
    updates_in_step: int = 0
    gpu_bytes: int = 0  # of state
    host_bytes: int = 0
    nvme_bytes: int = 0
    norm: float = 0.0  # of the last step's gradient
    clip_factor: float = 1.0


class _Home:
    """Of a gradient that has left. It does not keep its optimizer alive."""

    def __init__(self, optimizer: OffloadOptimizer, record: Record) -> None:
        self._optimizer, self._record = weakref.ref(optimizer), record
        self._number = record.dropped

    def _alive(self) -> OffloadOptimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise usage("the optimizer that has this gradient is gone", where=self._record.name)
        if self._number != self._record.dropped:
            raise usage("this gradient is gone: zero_grad() or another gradient came after it", where=self._record.name,
                        remedy="keep a copy: p.grad.clone()")
        return optimizer

    def fetch(self) -> torch.Tensor:
        self._alive()
        return self._record.fetch()

    def norm(self) -> float:
        return math.sqrt(self._record.square(self._alive()._team))

    def zero(self) -> None:
        self._alive()._change(self._record, 0.0)

    def scale(self, factor: float) -> None:
        self._alive()._change(self._record, factor)


class OffloadOptimizer(torch.optim.Optimizer):
    """What OffloadAdamW and its like share.

    max_norm           the gradient's global norm is clipped to it, as by clip_grad_norm_
    host               host memory to take at most, with what gradients and weights pass through
    nvme               directories for what does not fit
    overlap            gradients leave in backward, and updates begin then; False: .grad is torch's, and step()
                       does everything
    accumulation_steps backward passes of a step; accumulate() declares them one by one
    keep_grads         with overlap: .grad keeps the gradient, and what changes it there counts
    model              step() does not wait for the end of the update: a module of this model waits for its own
                       weights when it is called, and synchronize() for all of them
    moments            "fp32", or "bf16": half of their memory and traffic, rounded stochastically with random bits that
                       follow from the parameter's place in param_groups, the element and the step; or "int8": a quarter,
                       codes in blocks of 256 elements with a scale each, as in torchao's AdamW8bit. Elements and blocks
                       of shards are this rank's own, so that another number of ranks rounds otherwise
    master             "fp32", or "split" for weights in bf16: the master is the weight and its low 16 bits, which together
                       are fp32 exactly. Weights are then rounded half up in magnitude, not half to even
    gpu_state          so much of the state stays on the GPU of its parameters, in the order in which they are given:
                       those that are used first get their gradients last
    """

    method = ""
    _moments: tuple[str, ...] = ()
    _step_supports_amp_scaling = True  # GradScaler says by what to divide, and does not touch gradients

    def __init__(self, params: Any, defaults: dict[str, Any], *, max_norm: float | None = None,
                 host: int | str = "40GiB", nvme: Sequence[Any] = (), overlap: bool = True, accumulation_steps: int = 1,
                 keep_grads: bool = False, model: torch.nn.Module | None = None, gpu_state: int | str = 0,
                 moments: str = "fp32", master: str = "fp32", threads: int = 0, chunk_elements: int | None = None) -> None:
        self._format = Format(self.method, self._moments, moments, master)
        check_norm(max_norm)
        check_whole("accumulation_steps", accumulation_steps, 1)
        check_whole("threads", threads, 0)
        if chunk_elements is not None:
            check_whole("chunk_elements", chunk_elements, 1)
        self.max_norm, self.accumulation_steps, self.stats = max_norm, accumulation_steps, Stats()
        self._host_left, self._nvme, self._overlap, self._keep = to_bytes(host), directories(nvme), overlap, keep_grads
        self._gpu_left = to_bytes(gpu_state)
        self._threads, self._chunk_elements = threads, chunk_elements
        self._transfers, self._worker = Transfers(keeps_weights=self._format.is_split), Worker()
        self._records: dict[torch.Tensor, Record] = {}
        self._masters = Masters(self._format, self._transfers, self._worker)
        self._versions: dict[int, Version] = {}  # by id(chunk): what was made of it ahead of step()
        self._lock = threading.Lock()  # hooks may run on several threads
        self._accumulating, self._failed, self._built, self._closed = False, "", False, False
        self._gradient_scale = 1.0  # of the last step, by GradScaler: likely of the next one too
        self._checked: list[dict[str, Any]] = []  # constants of each group
        super().__init__(params, defaults)
        self._team = Team(threads or default_threads(self.param_groups))
        self._built = True
        self._lands_late = model is not None
        self._adopt()
        hooks = land_before_use(model, self) if model is not None else []
        self._closes = weakref.finalize(self, _close, self._worker, self._masters.tiers, self._transfers, self._records, hooks)

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_open()
        super().add_param_group(param_group)
        try:
            refuse_options(self.param_groups)
            self._check_constants()
            if self._built:
                self._adopt()
        except BaseException:
            for p in self.param_groups.pop()["params"]:
                record = self._records.pop(p, None) if self._built else None
                for hook in record.hooks if record is not None else []:
                    hook.remove()
            raise

    def _adopt(self) -> None:
        """State for parameters that want gradients and have none: new ones, and those that were frozen."""
        new, number = [], -1
        for g, group in enumerate(self.param_groups):
            for p in group["params"]:
                number += 1
                if p in self._records:
                    self._records[p].group = g
                elif p.requires_grad and local(p).numel() > 0:
                    new.append(Record(len(self._records) + len(new), p, g, name_of(self.param_groups, p)))
                    new[-1].number = number
                    self._format.check_weights(new[-1].weights, new[-1].name)
        if self._lands_late and any(r.is_sharded for r in new):
            raise usage("model= is for parameters that are not sharded", where=new[0].name, measured="DTensor",
                        remedy="leave model= out: FSDP gathers weights in hooks of its own")
        new = self._keep_on_gpu(new)
        if not new:
            return
        fixed = self._transfers.bytes_for(new, self._overlap)
        if fixed > self._host_left:
            raise error_of(3, "does not fit", message(
                "host memory has no room for gradients and weights on their way", "", f"{fixed} bytes",
                f"{self._host_left} bytes are left of `host`", "give more"))
        state = TieredState([r.count for r in new], self._format.rows, host_bytes=self._host_left - fixed, nvme=self._nvme,
                            speculative=self._overlap, chunk_elements=self._chunk_elements, threads=self._threads)
        tier = self._masters.add(new, state)
        speculative = {r.index for r in new if self._overlap and any(state.can_speculate(c) for _, c in r.chunks)}
        self._host_left -= self._transfers.reserve(new, speculative) + state.host_bytes
        self._count_bytes()
        for r in new:
            self._records[r.parameter] = r
            if self._overlap:
                self._hook(r)
        self._masters.begin(tier)

    def _keep_on_gpu(self, new: list[Record]) -> list[Record]:
        """Makes the state of those that gpu_state has room for, and returns the others."""
        others = []
        for r in new:
            size = self._format.bytes_for(r.count)
            if r.weights.device.type != "cuda" or size > self._gpu_left:
                others.append(r)
                continue
            self._gpu_left -= size
            self.stats.gpu_bytes += size
            r.resident = Resident(r, self._format)
            self._records[r.parameter] = r
        return others

    def _count_bytes(self) -> None:
        self.stats.nvme_bytes = self._masters.nvme_bytes
        self.stats.host_bytes = self._masters.host_bytes + self._transfers.host_bytes

    def _hook(self, record: Record) -> None:
        me = weakref.ref(self)

        def before(_: Any) -> None:
            if optimizer := me():
                optimizer._before_arrival(record, optimizer._stays(record))

        def after(_: torch.Tensor) -> None:
            if optimizer := me():
                optimizer._arrived(record)

        p = record.parameter
        if record.is_sharded:
            record.hooks.append(p.register_hook(before))
        else:  # not a hook of the parameter: it would also run in torch.autograd.grad(), which leaves .grad as it is
            with torch.enable_grad():
                record.accumulates = torch.autograd.graph.get_gradient_edge(p).node
            record.hooks.append(record.accumulates.register_prehook(before))
        record.hooks.append(p.register_post_accumulate_grad_hook(after))

    # ---- gradients

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here do not end an accumulation."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _stays(self, record: Record) -> bool:
        """Whether .grad keeps the gradient: FSDP adds to it itself, and DDP, or the program, makes one of all ranks'."""
        return self._keep or record.is_sharded or has_ranks()

    def _before_arrival(self, record: Record, stays: bool) -> None:
        """Autograd is to find no gradient where one has left, and to add to one that stays."""
        p = record.parameter
        if p.grad is not None and p.grad is record.departed and not stays:
            p.grad = None
            return
        if isinstance(p.grad, DepartedGradient):  # another parameter's, or from now on they stay
            p.grad = p.grad.clone()
        if record.gradient is None:
            return
        if p.grad is None:
            self._forget(record)  # the model's zero_grad()
        elif not stays:
            self._withdraw(record)
            record.drop()  # the program put another one in its place: what arrives is that one and this pass's

    def _arrived(self, record: Record) -> None:
        if has_ranks() and not record.is_sharded:
            self._take_when_backward_ends(record)
        else:
            self._take_what_is_there(record, self._stays(record))

    def _take_when_backward_ends(self, record: Record) -> None:
        """DDP puts the ranks' mean into .grad then, in a callback that it queues with the last gradient. One that is queued
        by a callback comes after it."""
        me = weakref.ref(self)
        queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]

        def take() -> None:
            if optimizer := me():
                optimizer._take_what_is_there(record, stays=True)

        queue(lambda: queue(take))

    def _take_what_is_there(self, record: Record, stays: bool) -> None:
        gradient = record.parameter.grad
        if gradient is None:
            return
        if gradient.requires_grad and not stays:
            raise usage("a gradient is to leave that further gradients follow from", where=record.name,
                        measured="backward(create_graph=True)", limit="gradients without a graph",
                        remedy="torch.autograd.grad(..., create_graph=True), keep_grads=True or overlap=False")
        self._take(record, gradient, stays)

    def arrive(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """A gradient of `parameter` that was computed elsewhere, say for a copy of it on a GPU: as if backward had left
        it in .grad."""
        record = self._records.get(parameter)
        if record is None or record.resident is not None or not self._overlap or self._keep:
            raise usage("a gradient arrives that no update waits for", where=name_of(self.param_groups, parameter),
                        measured="no state of its own" if record is None else "overlap=False, keep_grads or gpu_state",
                        limit="parameters of this optimizer, with overlap")
        self._before_arrival(record, stays=False)
        given = parameter.grad  # by the program
        self._take(record, gradient if given is None else gradient + given.to(gradient.device), keep=False)

    def _take(self, record: Record, gradient: torch.Tensor, keep: bool) -> None:
        self._land(record)  # its last update has read the gradient before
        self._withdraw(record)
        if record.gradient is None or keep:
            record.take(gradient, self._transfers, keep)
        else:
            record.add(gradient, self._transfers)
        if not keep:
            if record.departed is None:
                record.departed = DepartedGradient(record.parameter.detach(), _Home(self, record))
            record.parameter.grad = record.departed
        if self._accumulating:
            return
        record.arrivals += 1
        if record.arrivals >= self.accumulation_steps and self.stats.clip_factor == 1.0:  # the last step's: likely this one's
            self._speculate_on(record)

    def _change(self, record: Record, factor: float) -> None:
        self._land(record)
        self._withdraw(record)
        record.scale(factor)

    def _forget(self, record: Record) -> None:
        self._withdraw(record)
        record.drop()
        record.arrivals = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.synchronize()  # updates read what is to be zero
        for r in self._records.values():
            r.arrivals = 0
            if set_to_none:
                self._forget(r)
        super().zero_grad(set_to_none)  # zeroes those that have left where they are

    # ---- updates ahead of step()

    def _speculate_on(self, record: Record) -> None:
        for tier, chunk in record.chunks:
            if not tier.state.can_speculate(chunk):
                continue
            records = [tier.records[part.parameter] for part in chunk.parts]
            with self._lock:
                if id(chunk) in self._versions or any(r.arrivals < self.accumulation_steps for r in records):
                    continue
                key = self._key(chunk, records, self._gradient_scale)
                work = Work(self, self._gradient_scale, {r.index: r for r in records})
                version = self._versions[id(chunk)] = Version(tier, chunk, key, work)
                self._worker.make_ahead(version)

    def _withdraw(self, record: Record) -> None:
        """What was made of this gradient ahead of step() is void."""
        for _, chunk in record.chunks:
            with self._lock:
                version = self._versions.pop(id(chunk), None)
            if version and not self._worker.take_back(version):
                concurrent.futures.wait([version.job])
                version.tier.state.roll_back(chunk)
                self.stats.updates_rolled_back += 1

    def _key(self, chunk: Chunk, records: list[Record], scale: float) -> Any:
        """Everything that an update's numbers follow from."""
        return scale, [(r.index, r.generation, r.version, self._step_of(r), self._constants(self.param_groups[r.group]))
                       for r in records]

    # ---- step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Weights change here and nowhere else. A gradient that is not finite is a DivergedError, and nothing
        changes."""
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._failed:
            raise usage("an earlier step failed half-way: the state is not consistent", measured=self._failed,
                        remedy="load a state that was saved before")
        self._check_constants()
        self.synchronize()
        self._adopt()
        for r in self._records.values():
            r.check_moved()
        if getattr(self, "found_inf", None) is not None and float(self.found_inf) > 0:
            return loss  # GradScaler's: without this step
        active = self._with_gradients()
        self._take_over_weights()
        scale = self._scale_of(active)
        try:
            self._masters.check()
            self._update_all(active, scale)
        except Exception as error:
            self._failed = str(error)
            raise
        for r in active:
            state = self.state[r.parameter]
            state["step"] = torch.tensor(self._step_of(r) + 1.0)
            r.arrivals = 0
        self.stats.steps += 1
        return loss

    def _with_gradients(self) -> list[Record]:
        """Those with a gradient, which is on its way to the host at least."""
        active = []
        for r in self._records.values():  # before any of them takes another one
            gradient = r.parameter.grad
            if isinstance(gradient, DepartedGradient) and gradient is not r.departed:
                r.parameter.grad = gradient.clone()
        for r in self._records.values():
            gradient = r.parameter.grad
            if gradient is None:
                if r.gradient is not None:
                    self._forget(r)
                continue
            if r.resident is not None:
                r.check_gradient(gradient)
                active.append(r)
                continue
            if gradient is not r.departed and r.is_stale():
                self._withdraw(r)
                if r.departed is not None:
                    r.drop()  # whoever holds it is not to read the gradient that is in its place
                r.take(gradient, self._transfers, keep=True, watch=self._overlap)  # without it nothing is made ahead
            active.append(r)
        return active

    def _take_over_weights(self) -> None:
        """Weights that were changed by somebody else are the master's from now on."""
        changed = [r for r in self._records.values() if r.weights._version != r.version]
        for r in changed:
            self._withdraw(r)
        self._masters.take_over(changed)
        for r in changed:
            r.version = r.weights._version

    def _scale_of(self, active: list[Record]) -> float:
        """By what gradients are multiplied: what GradScaler divides by, and the clip factor."""
        grad_scale = getattr(self, "grad_scale", None)
        self._gradient_scale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        begun = {id(r): Squares(local(r.parameter.grad)) for r in active if r.resident is not None}
        missing = [r for r in active if r.resident is None and not r.has_square]
        for r in missing:
            r.wait()  # here: the worker makes updates meanwhile
        if missing:
            self._worker.submit(lambda: [r.square(self._team) for r in missing]).result()
        squares = [r.square(self._team) if r.resident is None else begun[id(r)].sum() for r in active]
        norm = math.sqrt(self._sum_over_ranks(sum(squares), active)) * self._gradient_scale
        if not math.isfinite(norm):
            wrong = next((r.name for r, s in zip(active, squares) if not math.isfinite(s)), "on another rank")
            raise error_of(5, "diverged", message("the gradient is not finite", wrong, norm, "a finite norm",
                                                  "zero_grad() goes on without this step: nothing has changed"))
        self.stats.norm, self.stats.clip_factor = norm, clip_factor(norm, self.max_norm or 0.0)
        return self.stats.clip_factor * self._gradient_scale

    def _sum_over_ranks(self, mine: float, active: list[Record]) -> float:
        """Of parameters that are sharded (DTensor) every rank has a part of the norm."""
        meshes = {r.parameter.device_mesh for r in active if r.is_sharded}  # type: ignore[attr-defined]
        if not meshes:
            return mine
        if len(meshes) > 1 or len(active) != sum(r.is_sharded for r in active):
            raise usage("parameters are sharded in several ways, and their common norm is not done",
                        measured=f"{len(meshes)} meshes", limit="all parameters on one mesh of one dimension")
        mesh = meshes.pop()
        total = torch.tensor(mine, dtype=torch.float64, device=mesh.device_type)
        torch.distributed.all_reduce(total, group=mesh.get_group())
        return float(total)

    def _update_all(self, active: list[Record], scale: float) -> None:
        work = Work(self, scale, {r.index: r for r in active if r.resident is None})
        work.after = Transfers.now(list(work.records.values()))
        for r in active:
            if r.resident is not None:
                assert r.parameter.grad is not None
                r.resident.update(r, local(r.parameter.grad), work.hypers[r.group], self._step_of(r) + 1, scale)
        committed, others = [], []
        for tier, chunk in chunks_of(list(work.records.values())):
            version = self._versions.pop(id(chunk), None)
            if version is None or self._worker.take_back(version):
                others.append(Finish(work, tier, chunk))
            else:
                records = [tier.records[part.parameter] for part in chunk.parts]
                committed.append(Finish(work, tier, chunk, version, self._key(chunk, records, scale)))
        for i, finish in enumerate(others):
            finish.next_ones = others[i + 1:i + 3]
        self._worker.submit(self._transfers.wait_until_sent)
        for finish in committed + others:
            job = self._worker.submit(finish)
            for r in finish.records():
                r.landing.append(job)
        for r in active:
            torch.autograd.graph.increment_version(r.weights)
            r.version = r.weights._version
            reads_grad = r.taken is not None and r.weights.device.type == "cpu"  # which the program may change
            if not self._lands_late or reads_grad:
                self._land(r)

    def _land(self, record: Record) -> None:
        """What is done or enqueued from now on finds the last step's weights."""
        landing, record.landing = record.landing, []
        for job in landing:
            for device, sent in job.result():
                torch.cuda.current_stream(device).wait_event(sent)

    def _land_parameters(self, parameters: Iterable[torch.Tensor | None]) -> None:
        for p in parameters:
            r = self._records.get(p) if p is not None else None
            if r is not None and r.landing:
                self._land(r)

    def synchronize(self) -> None:
        """With model=: every parameter has the weights of the last step. Whatever reads them elsewhere than in the
        forward of their module calls it first."""
        for r in self._records.values():
            if r.landing:
                self._land(r)

    # ---- what a method is

    def _constants(self, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _check_constants(self) -> None:
        now = [self._constants(group) for group in self.param_groups]
        if now != self._checked:
            check_norm(self.max_norm)
            for constants in now:
                check_constants(self.method, constants)
            self._checked = now

    def _step_of(self, record: Record) -> int:
        state = self.state.get(record.parameter)
        return int(state["step"]) if state else 0

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with moments in fp32 on the CPU, "master" where weights have 16 bits, and "..._scale" of moments in
        int8, from which their codes follow again. Of parameters without a step yet there is nothing."""
        self._check_open()
        self.synchronize()
        steps = {p: dict(state) for p, state in self.state.items()}
        try:
            for r in self._records.values():
                if r.parameter in self.state:
                    self.state[r.parameter].update(self._masters.read(r))
            return super().state_dict()
        finally:
            self.state.clear()
            self.state.update(steps)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also one of torch.optim's, whose weights are then the masters."""
        self._check_open()
        state_dict = copy.copy(state_dict)
        groups, loaded = state_dict["param_groups"], state_dict["state"]
        for number, values in loaded.items():
            steps_of(values, f"parameter {number} of the state")
        self.synchronize()
        before, states = self.param_groups, dict(self.state)
        super().load_state_dict({"state": {}, "param_groups": groups})
        numbers = [number for group in groups for number in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        given = {p: loaded[number] for number, p in zip(numbers, mine) if number in loaded}
        try:
            for own, group in zip(before, self.param_groups):
                if missing := own.keys() - group.keys():
                    raise usage("a group of the state lacks what its optimizer has", measured=", ".join(sorted(missing)))
            refuse_options(self.param_groups)
            self._check_constants()
            self._adopt()
            self._masters.check_state(given, self._records.values())
        except BaseException:
            self.param_groups = before
            self.state.update(states)
            raise
        self._failed = "load_state_dict() did not end"
        self.zero_grad()
        self.state.clear()
        self._masters.load(given, [r for r in self._records.values() if r.resident is not None])
        for p, values in given.items():
            if p in self._records:
                self.state[p] = {"step": torch.tensor(steps_of(values, self._records[p].name))}
        for r in self._records.values():
            r.version = r.weights._version
        self._failed = ""

    def __getstate__(self) -> dict[str, Any]:
        raise usage("an optimizer whose state lies elsewhere is copied or pickled", measured=type(self).__name__,
                    remedy="make another, and load_state_dict() what state_dict() gives")

    def _check_open(self) -> None:
        if self._closed:
            raise error_of(7, "closed", message("the optimizer is closed", type(self).__name__, "", "", "make another"))

    def close(self) -> None:
        """Gives back memory, files and hooks. Gradients that have left are gone."""
        self._closed = True
        with contextlib.suppress(Exception):  # step() said it, or the first that waited for it
            self.synchronize()
        self.zero_grad()
        self._worker.shutdown()
        self._closes()


def _close(worker: Worker, tiers: list[Tier], transfers: Transfers, records: dict[torch.Tensor, Record],
           hooks: list[Any]) -> None:
    worker.shutdown(wait=False)  # it may run here; jobs there are none, for they hold the optimizer
    for hook in hooks:
        hook.remove()
    for record in records.values():
        for hook in record.hooks:
            hook.remove()
        if isinstance(record.parameter.grad, DepartedGradient):
            record.parameter.grad = None
    for tier in tiers:
        tier.state.close()
    transfers.close()
