"""transformers' side of bench/compute.py, in a process of its own: bf16 weights, fused AdamW on them, SDPA.

    python3 bench/transformers_train.py WORKLOAD.json      (bench/compute.py writes it)

Builds the model, compiles it where the workload asks for that, and says {"ready"}. Then it runs the steps of each
side that a line of standard input names and prints a JSON line a step and one at the end. Between them its weights wait
in the host's memory, so that other processes have the GPU's for themselves. The sides:

    eager      nothing is compiled
    compiled   the whole model, which of many layers takes minutes
    layers     a layer and the loss, each compiled once; the layers are alike
"""

import contextlib
import fcntl
import json
import re
import sys
import time

# Of a kernel's name, the first that is found in it: what the kernel is of. All else are rows.
KINDS = (("attention", re.compile(r"flash|fmha|sdpa|attention|fprop|bprop", re.I)),
         ("updates", re.compile(r"adam|multi_tensor", re.I)),
         ("products", re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.I)))


class Gate:
    """The GPU for one process at a time: processes compile side by side, and only one of them runs what it compiled.

    Closed from the first call of a compiled graph until opened."""

    def __init__(self, path):
        self._file = open(path, "w", encoding="utf-8")
        self._held = False

    def close(self):
        if not self._held:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._held = True

    def open(self):
        if self._held:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._held = False


class Trainer:
    def __init__(self, workload):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.torch, self.workload, self.gate = torch, workload, Gate(workload["gate"])
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        config = AutoConfig.from_pretrained(workload["model"])
        config.use_cache = False
        self.device, self.compiled_graphs = workload["device"], 0
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
        self.model.train()
        self.vocabulary = config.vocab_size
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.checkpointed = {}  # by side: whether a step fits only with checkpointing
        self.forward = {"eager": self.model, "layers": self.model}
        self.eager_loss = self.compiled_loss = self.model.loss_function
        kinds = self.model._no_split_modules
        self.layers = [module for module in self.model.modules() if type(module).__name__ in kinds]
        self.compiled_calls = [None] * len(self.layers)

    def to(self, device):
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.to(device)
        self.free_cache()

    def free_cache(self):
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def synchronize(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def use(self, side):
        """Of the other sides the layers and the loss are as they were written."""
        by_layer = side == "layers"
        for layer, compiled in zip(self.layers, self.compiled_calls):
            layer._compiled_call_impl = compiled if by_layer else None  # what nn.Module.compile() sets
        self.model.loss_function = self.compiled_loss if by_layer else self.eager_loss

    def checkpoint(self, wanted):
        """By its flags alone: another function of checkpointing would have the model compiled anew."""
        for module in self.model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = wanted

    def steps(self, side, count):
        """Seconds and loss of each."""
        torch = self.torch
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        shape = (self.workload["sequences"], self.workload["sequence"])
        try:
            for _ in range(count):
                tokens = torch.randint(self.vocabulary, shape, device=self.device)
                self.synchronize()
                start = time.perf_counter()
                loss = self.forward[side](input_ids=tokens, labels=tokens).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e6, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                self.synchronize()
                yield time.perf_counter() - start, loss.item()
        finally:
            self.model.zero_grad(set_to_none=True)

    def kernel_seconds(self, side):
        """Of a step, what the GPU's kernels took, by their kind. Its clipping counts as an update."""
        torch = self.torch
        activities = [torch.profiler.ProfilerActivity.CUDA if self.device == "cuda" else torch.profiler.ProfilerActivity.CPU]
        steps = self.steps(side, 2)
        next(steps)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in steps:
                pass
        seconds = dict.fromkeys(("products", "attention", "rows", "updates"), 0.0)
        for event in profile.key_averages():
            kind = next((kind for kind, name in KINDS if name.search(event.key)), "rows")
            seconds[kind] += event.self_device_time_total * 1e-6
        return seconds

    def fitting(self, side, again=lambda: None):
        """Two steps, as the second has the optimizer's state from its start, with checkpointing where they do not fit
        without. `again`: before the second try."""
        self.use(side)
        for wanted in (False, True):
            self.checkpoint(wanted)
            with contextlib.suppress(self.torch.cuda.OutOfMemoryError):
                for _ in self.steps(side, 2):
                    pass
                self.checkpointed[side] = wanted
                return
            self.free_cache()
            again()
        raise RuntimeError(f"{side}: a step does not fit this GPU, not even with checkpointing")

    def gated(self, graph, inputs):
        """A backend that closes the gate before what it compiled runs."""
        from torch._inductor.compile_fx import compile_fx
        compiled = compile_fx(graph, inputs)
        self.compiled_graphs += 1

        def run(*arguments):
            self.gate.close()
            return compiled(*arguments)
        return run

    def compile(self):
        def begin():
            self.forward["compiled"] = self.torch.compile(self.model, backend=self.gated)
            self.gate.open()
        begin()
        self.fitting("compiled", lambda: self.anew(begin))

    def anew(self, begin):
        """After memory was too short. What another side compiled is lost, and compiled again when it runs."""
        self.torch._dynamo.reset()
        begin()

    def compile_layers(self):
        self.torch._dynamo.config.recompile_limit = 64  # beyond it a layer would go on eagerly, and say nothing

        def begin():
            self.compiled_graphs = 0
            for index, layer in enumerate(self.layers):
                layer.compile(backend=self.gated)
                self.compiled_calls[index] = layer._compiled_call_impl
            self.compiled_loss = self.torch.compile(self.eager_loss, backend=self.gated)
            self.use("layers")
            self.gate.open()
        begin()
        self.fitting("layers", lambda: self.anew(begin))
        if self.compiled_graphs >= len(self.layers):
            raise RuntimeError(f"{self.compiled_graphs} graphs of {len(self.layers)} layers, which are not alike")

    def run(self, side):
        self.to(self.device)
        if side not in self.checkpointed:
            self.fitting(side)
        self.use(side)
        self.checkpoint(self.checkpointed[side])
        self.free_cache()
        for step, (seconds, loss) in enumerate(self.steps(side, self.workload["steps"]), 1):
            say({"step": step, "seconds": seconds, "loss": loss})
        kernels = self.kernel_seconds(side) if self.workload["profile"] else {}
        self.to("cpu")
        say({"end": side, "checkpointing": self.checkpointed[side], "kernels": kernels})


def say(what):
    print(json.dumps(what), flush=True)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        workload = json.load(file)
    trainer = Trainer(workload)
    start, failures = time.monotonic(), {}
    for side, compile_it in (("layers", trainer.compile_layers), ("compiled", trainer.compile)):
        try:
            if side in workload["sides"]:
                compile_it()
        except Exception as error:  # the compiler's own, of any kind
            failures[side] = str(error)[-1000:] or type(error).__name__
    trainer.to("cpu")
    trainer.gate.open()
    say({"ready": time.monotonic() - start, "failures": failures})
    trainer.gate.close = lambda: None  # from here on it runs when it is told to
    for line in sys.stdin:
        trainer.run(line.strip())


if __name__ == "__main__":
    main()
