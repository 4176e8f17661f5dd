"""The peak of generated programs, found by running them on fake tensors.

The wrapper that Inductor generated allocates, reuses and frees buffers in Python.
Running its ``call`` with fake tensors and without kernels therefore makes the same
storages come and go at the same moments as in the real run; whatever is alive is
counted after every operation. Forward and backward run one after the other on the
same tensors, so that what crosses over and what the caller holds is counted once.

Memory that an operator allocates inside itself is added (`gcpass.workspace`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gcpass.lowering import Program
from gcpass.sizes import allocated_bytes, hint_int
from gcpass.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
)
from gcpass.workspace import workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Peaks of a step, in bytes beyond what was alive before it.

    Attributes:
        forward_bytes: largest during the forward.
        held_bytes: alive between forward and backward: saved tensors and outputs.
        between_bytes: the same with the tangents and what the caller needs then.
        backward_bytes: largest during the backward, with everything that is held.
    """

    forward_bytes: int
    held_bytes: int
    between_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the largest number of bytes of the step."""
        return max(self.forward_bytes, self.between_bytes, self.backward_bytes)


class UnreadableProgramError(Exception):
    """The program does something that fake tensors cannot follow."""


Callee = Callable[[list[Any]], Sequence[Any]]


def replay(
    forward: Callee,
    backward: Callee,
    *,
    primals: Sequence[Any],
    backward_inputs: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    num_outputs: int,
    outside_bytes: int,
) -> Scheduled:
    """Return the peaks of a forward and its backward, run on fake tensors.

    Args:
        forward: boxed callable, takes the primals, returns outputs + saved.
        backward: boxed callable.
        primals: tensors (of any kind) and sizes; only their layout is used.
        backward_inputs: (primals, forward results) -> inputs of the backward,
            tangents included; called in fake mode, tangents are counted.
        num_outputs: how many of the forward's results are the region's outputs.
        outside_bytes: what the caller needs between forward and backward.

    Raises:
        UnreadableProgramError: an operation needs real data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    meter = _Meter()
    gc.freeze()  # so that collecting is quick: it need not walk torch's heap
    try:
        with mode:
            inputs = [like(x) for x in primals]
            meter.ignore(inputs)
            with meter:
                results = forward(list(inputs))
                forward_bytes = meter.peak_bytes
                held_bytes = meter.alive_bytes()
                meter.peak_bytes = held_bytes
                outputs = list(results[:num_outputs])  # the caller may hold them
                arguments = backward_inputs(inputs, results)
                meter.count(arguments)
                between_bytes = meter.alive_bytes() + outside_bytes
                del results, inputs
                gradients = backward(arguments)
                backward_bytes = meter.peak_bytes
                del outputs, gradients
    except RuntimeError as error:  # fake tensors refuse what depends on data
        raise UnreadableProgramError(f"{type(error).__name__}: {error}") from error
    finally:
        gc.unfreeze()
    return Scheduled(
        forward_bytes=forward_bytes,
        held_bytes=held_bytes,
        between_bytes=between_bytes,
        backward_bytes=backward_bytes,
    )


def like(value: Any) -> Any:
    """Return a fresh tensor laid out like ``value``; sizes become plain ints."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            [hint_int(s) for s in value.shape],
            [hint_int(s) for s in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )
    if isinstance(value, torch.SymInt):
        return hint_int(value)
    return value


@dataclass(slots=True, kw_only=True)
class _Alive:
    bytes: int
    ref: StorageWeakRef


class _Meter(TorchDispatchMode):
    """Counts the storages that operations create, while they live."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, _Alive] = {}
        self.ignored: set[int] = set()
        self.keep: list[Any] = []
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result)
        workspace = workspace_bytes(func, args, kwargs or {})
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes() + workspace)
        return result

    def ignore(self, values: Sequence[Any]) -> None:
        """Take no notice of these tensors' storages: they are alive anyway."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                self.ignored.add(storage._cdata)
                self.keep.append(tensor)

    def count(self, values: Any) -> None:
        """Count new storages among the values and update the peak."""
        for tensor in tree_leaves(values):
            if not isinstance(tensor, FakeTensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self.known.get(key)
            if key in self.ignored or (known is not None and not known.ref.expired()):
                continue
            size = allocated_bytes(storage.nbytes(), tensor.device)
            self.known[key] = _Alive(bytes=size, ref=StorageWeakRef(storage))
        if self.alive_bytes() > self.peak_bytes:
            gc.collect()  # fake kernels leave cycles that real ones do not
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes())

    def alive_bytes(self) -> int:
        """Return the bytes of counted storages that are alive now."""
        gone = [key for key, alive in self.known.items() if alive.ref.expired()]
        for key in gone:
            del self.known[key]
        return sum(alive.bytes for alive in self.known.values())


def callable_of(program: Program) -> Callee:
    """Return a program's boxed ``call`` with kernels that do nothing."""
    namespace: dict[str, Any] = {"__name__": "gcpass_replay"}
    namespace["AsyncCompile"] = _NoCompile
    for name, tensor in program.constants.items():
        namespace[name] = like(tensor)
    source = program.source.replace(
        "from torch._inductor.async_compile import AsyncCompile", ""
    )
    exec(compile(source, "<gcpass replay>", "exec"), namespace)
    for name in [n for n in namespace if n.startswith("empty_strided")]:
        namespace[name] = _empty_strided(name.removeprefix("empty_strided_"))
    namespace["empty_strided"] = torch.empty_strided
    namespace["assert_size_stride"] = _nothing
    namespace["assert_alignment"] = _nothing
    namespace["reinterpret_tensor"] = _reinterpret
    namespace["get_raw_stream"] = _nothing
    call = namespace["call"]
    return call  # type: ignore[no-any-return]


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _empty_strided(device: str) -> Callable[..., torch.Tensor]:
    place = "cpu" if device.startswith("cpu") else device

    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=place)

    return allocate


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> Any:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


@dataclass(slots=True)
class _Kernel:
    """A kernel that is never run."""

    attributes: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getitem__(self, grid: Any) -> _Kernel:
        return self


class _NoCompile:
    """Stands in for Inductor's AsyncCompile while a wrapper is loaded."""

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is being compiled."""

    def __getattr__(self, name: str) -> Callable[..., _Kernel]:
        return lambda *args, **kwargs: _Kernel()
