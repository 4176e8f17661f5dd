"""``python -m tests.gpu.interpret CASE FOLDER``: the GPU's program run on a CPU.

Runs the wrappers that `tests.gpu.lower` left in the folder on CPU tensors: kernels
by Triton's interpreter, library calls by the CPU's, allocations counted as the CUDA
caching allocator would. Compares with eager, and prints a JSON object for each budget.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read while Triton is loaded
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import gc
import json
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import nn
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from tests.gpu.attention import install_attention
from tests.gpu.models import CASES, Case
from tests.gpu.order import earlier_than_planned, launched_calls, library_calls
from tests.gpu.program import Graph, Lowered

BLOCK_BYTES = 512  # the CUDA caching allocator hands out multiples of it
CPU = torch.device("cpu")
STEP = 3e-3  # of the loss, for differences: rounding is 1e-7, losses are about 1

# libdevice is machine code; under the interpreter its functions are empty. Those of the
# same meaning in torch, where they are called otherwise.
_IN_TORCH = {
    "rint": "round",
    "nearbyint": "round",
    "fast_dividef": "div",
    "div_rn": "div",
    "sqrt_rn": "sqrt",
    "finitef": "isfinite",
}


class Libdevice:
    """libdevice's functions for interpreted kernels, computed by torch."""

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        if name.startswith("__"):
            raise AttributeError(name)
        operator = getattr(torch, _IN_TORCH.get(name, name))

        def call(*arguments: Any, _semantic: Any = None) -> tl.tensor:
            handles = [a.handle for a in arguments if isinstance(a, tl.tensor)]
            values = [
                torch.from_numpy(numpy.ascontiguousarray(a.handle.data))
                if isinstance(a, tl.tensor)
                else torch.tensor(getattr(a, "value", a))
                for a in arguments
            ]
            result = operator(*values).numpy()
            kind = tl.int32 if result.dtype == bool else handles[0].dtype.scalar
            result = result.astype("int32" if result.dtype == bool else values_of(kind))
            shape = list(result.shape)
            return tl.tensor(
                interpreter.TensorHandle(result, kind),
                tl.block_type(kind, shape) if shape else kind,
            )

        return call


def values_of(kind: tl.dtype) -> Any:
    """Return numpy's type for Triton's floating point type."""
    return {"fp64": numpy.float64, "fp32": numpy.float32}[str(kind)]


class Allocator(TorchDispatchMode):
    """Counts the memory of new tensors as a GPU's allocator does.

    Attributes:
        peak_bytes: the most that was alive at one moment.
    """

    def __init__(self, alive: Sequence[Any]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._free = {t.untyped_storage()._cdata for t in tree_leaves(alive)}
        self._used: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, values: Any) -> None:
        """Count what is new among these tensors."""
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._free:
                blocks = -(-storage.nbytes() // BLOCK_BYTES)
                reference = StorageWeakRef(storage)
                self._used[storage._cdata] = (reference, blocks * BLOCK_BYTES)
        if self.alive_bytes() > self.peak_bytes:
            gc.collect()  # interpreted kernels leave cycles
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes())

    def alive_bytes(self) -> int:
        """Return the bytes in use now."""
        gone = [key for key, (ref, _) in self._used.items() if ref.expired()]
        for key in gone:
            del self._used[key]
        return sum(size for _, size in self._used.values())

    def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Allocate as a generated wrapper does."""
        return torch.empty_strided(size, stride, dtype=dtype)


def converted(data: Any, old: tl.dtype, new: tl.dtype, rounding_mode: Any) -> Any:
    """Convert between float32 and bfloat16, to the nearest as GPUs do.

    The interpreter of Triton 3.7.1 truncates, which adds up to errors of 4 %.
    """
    if (old, new) == (tl.bfloat16, tl.float32):
        return data.astype(numpy.uint32) << 16
    assert (old, new) == (tl.float32, tl.bfloat16)
    values = torch.from_numpy(numpy.ascontiguousarray(data))
    return values.bfloat16().view(torch.uint16).numpy()


def prepare() -> None:
    """Make Inductor run its kernels with Triton's interpreter."""

    class Driver:
        def get_current_target(self) -> Any:
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return CPU

        def get_device_interface(self) -> Any:
            return torch.cpu

    triton.runtime.driver.set_active(Driver())
    interpreter._convert_float = converted
    triton_helpers.libdevice = Libdevice()
    triton_helpers.set_driver_to_gpu = lambda: None
    run = interpreter.InterpretedFunction.run

    def unseen(self: Any, *arguments: Any, **named: Any) -> Any:
        # What the interpreter allocates is no memory of the program.
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *arguments, **named)

    interpreter.InterpretedFunction.run = unseen
    create = CachingAutotuner.__init__

    def with_few_programs(self: Any, *arguments: Any, **named: Any) -> None:
        # The interpreter takes the first configuration, and its time for each program.
        create(self, *arguments, **named)
        self.configs.sort(key=lambda c: c.kwargs.get("XBLOCK", 1), reverse=True)

    CachingAutotuner.__init__ = with_few_programs


def loaded(graph: Graph, allocator: Allocator) -> Callable[[list[Any]], Any]:
    """Return a wrapper's ``call``, to be called with CPU tensors."""
    source = graph.source.replace(
        "from torch._C import _cuda_getCurrentRawStream as get_raw_stream", ""
    )
    # Inductor compiles kernels from the text of the module that defines them.
    head, mark, tail = source.partition("\nasync_compile.wait(globals())")
    assert mark, "a wrapper is laid out otherwise"
    tail = re.sub(r"with torch\.cuda\._DeviceGuard\(\d+\):", "if True:", tail)
    tail = re.sub(r"torch\.cuda\.set_device\(\d+\)", "pass", tail)
    tail = tail.replace("'cuda:0'", "'cpu'")
    namespace: dict[str, Any] = {"__name__": "interpreted"}
    exec(compile(head + mark + tail, "<wrapper>", "exec"), namespace)
    namespace["empty_strided_cuda"] = allocator.empty
    namespace["get_raw_stream"] = lambda index: 0
    namespace["device"] = lambda **_: CPU
    namespace["copy_if_misaligned"] = lambda tensor: tensor
    call: Callable[[list[Any]], Any] = namespace["call"]
    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step computed.

    Attributes:
        loss: the model's result.
        gradients: by the parameter's name.
        peak_bytes: the most that was allocated at one moment.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    peak_bytes: int


def train(
    lowered: Lowered, model: nn.Module, given: torch.Tensor, *, seed: int = 0
) -> Step:
    """Run the generated forward and backward as AOTAutograd would.

    Args:
        lowered: what was generated.
        model: provides parameters and buffers; buffers may be written.
        given: its input.
        seed: of the random numbers.
    """
    owned = {name: p.detach() for name, p in model.named_parameters()}
    owned |= {**dict(model.named_buffers()), "": given}
    arguments = [a if isinstance(a, int) else owned[a] for a in lowered.arguments]
    allocator = Allocator([a for a in arguments if not isinstance(a, int)])
    forward = loaded(lowered.forward, allocator)
    backward = loaded(lowered.backward, allocator)
    num_saved = sum("tangents" not in name for name in lowered.backward.inputs)
    torch.manual_seed(seed)
    gc.collect()
    gc.freeze()  # collecting is quick that way
    with torch.no_grad(), allocator:
        results = list(forward(list(arguments)))
        loss, saved = results[-num_saved - 1], results[-num_saved:]
        del results
        sizes = [s for s in saved if isinstance(s, int)]
        # Sizes come last out of the forward and first into the backward.
        crossing = [*sizes, *(s for s in saved if not isinstance(s, int))]
        del saved
        crossing.append(torch.ones_like(loss))
        gradients = backward(crossing)
    gc.unfreeze()
    found = zip(lowered.arguments, gradients, strict=True)
    return Step(
        loss=float(loss),
        gradients={n: g for n, g in found if isinstance(n, str) and g is not None},
        peak_bytes=allocator.peak_bytes,
    )


def error_by_differences(
    lowered: Lowered, case: Case, gradients: dict[str, torch.Tensor]
) -> float:
    """Return how far gradients are from the difference of two losses, relative.

    For models that draw random numbers, which eager would draw otherwise. Parameters
    are moved along the gradients, so that the loss should move by their square. Where
    the backward drew other numbers than the forward, the error is in the order of 1.
    """
    square = sum(float(g.square().sum()) for g in gradients.values())
    losses = []
    for sign in (1, -1):
        model = case.model()
        for name, parameter in model.named_parameters():
            parameter.data += sign * STEP / square * gradients[name]
        losses.append(train(lowered, model, case.input()).loss)
    return abs((losses[0] - losses[1]) / (2 * STEP) - 1)


def eager_gradients(case: Case) -> dict[str, torch.Tensor]:
    """Return the gradients of a case's parameters in eager mode."""
    model = case.model()
    model(case.input()).backward()
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def described(lowered: Lowered, step: Step) -> dict[str, Any]:
    """Return what is to be known of a case at a budget."""
    graphs = (lowered.forward, lowered.backward)
    planned_and_run = list(zip(lowered.planned, graphs, strict=True))
    early = [
        calls
        for planned, graph in planned_and_run
        for name, calls in earlier_than_planned(graph, planned).items()
        if not name.startswith("copy_")  # a write of a buffer keeps nothing alive
    ]
    return {
        "budget": lowered.budget,
        "recomputations": lowered.recomputations,
        "kernels": [len(graph.kernels) for graph in graphs],
        "machine_code": {k: len(v) for k, v in lowered.machine_code.items()},
        "draws_in_backward": len(
            re.findall(r"tl\.rand|rand4x", lowered.backward.source)
        ),
        "budget_bytes": lowered.budget_bytes,
        "predicted_bytes": lowered.predicted_bytes,
        "scheduled_bytes": lowered.scheduled_bytes,
        "counted_bytes": step.peak_bytes,
        "calls_as_planned": all(
            library_calls(planned) == launched_calls(graph)
            for planned, graph in planned_and_run
        ),
        "values_found": len(early),
        "most_calls_early": max(early),
    }


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference, relative to what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def main() -> None:
    """Run a case, see the module."""
    warnings.simplefilter("ignore")
    name, folder = sys.argv[1:]
    case = CASES[name]
    results: list[Lowered] = pickle.loads(
        (Path(folder) / f"{name}.pickle").read_bytes()
    )
    prepare()
    library = install_attention()
    wanted = {} if case.draws else eager_gradients(case)
    for lowered in results:
        step = train(lowered, case.model(), case.input())
        line = described(lowered, step)
        if case.draws:
            line["error"] = error_by_differences(lowered, case, step.gradients)
            if lowered is results[-1]:  # the check itself: these are wrong
                wrong = train(lowered, case.model(), case.input(), seed=1).gradients
                line["error_of_others"] = error_by_differences(lowered, case, wrong)
        else:
            gradients = step.gradients
            line["error"] = max(relative_error(gradients[n], wanted[n]) for n in wanted)
        print(json.dumps(line), flush=True)
    del library


if __name__ == "__main__":
    main()
