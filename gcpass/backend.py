"""The ``torch.compile`` backend, and the other ways in.

    torch.compile(model, backend="gcpass", options={"memory_budget": "12GiB"})
    torch.compile(model, backend=gcpass.backend(memory_budget="12GiB"))
    with gcpass.enable(memory_budget="12GiB"): ...  # where inductor is a must

A region's way from here: `gcpass.step`, which knows what else runs in the step,
`gcpass.compiler`, `gcpass.partition`. Graphs without a backward go to Inductor
untouched.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from gcpass import step, store
from gcpass.budget import Auto
from gcpass.compiler import EXACT_CASTS, RegionCompiler, run_compiler
from gcpass.corrections import correct_inductor
from gcpass.custom_partitioner import NO_REGIONS, Partitioner
from gcpass.decisions import RegionPlan
from gcpass.errors import GcpassError
from gcpass.fit import FREE_AT_ONCE
from gcpass.options import Options, parse_options
from gcpass.torch_private import (
    CustomPartitionerFn,
    dynamo_config,
    ends_in_graph_break,
    inductor_config,
    probe,
    surfaced,
)

__all__ = ["enable", "gcpass", "make_backend", "partitioner", "plans"]

AUTO_RESERVE = 0.05  # of what is free, left for fragmentation and other users
AUTO_STEP = 1 << 26  # bytes; "auto" is rounded down to it, so that caches can hit


def gcpass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile one region within the memory budget; the function torch.compile calls.

    Args:
        gm: the region as captured by Dynamo.
        example_inputs: its inputs.
        mode: as for Inductor.
        options: see `gcpass.options.Options`; other names are Inductor's.

    Raises:
        GcpassError: options, torch or budget are not usable, see `gcpass.errors`.
    """
    with surfaced(GcpassError):
        parsed = parse_options(
            options, mode=mode, inductor_keys=inductor_config.get_config_copy
        )
        return _compile(gm, example_inputs, parsed)


class _Backend:
    """A backend whose options were validated when it was made."""

    compiler_name = "gcpass"
    __name__ = "gcpass"

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        with surfaced(GcpassError):
            return _compile(gm, example_inputs, self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and other.options == self.options

    def __hash__(self) -> int:
        return hash(self.options)


def make_backend(**options: object) -> Callable[..., Any]:
    """Return a backend with these options, validated now.

    ``gcpass.backend(memory_budget="12GiB")`` is this function.

    Raises:
        InvalidOptionError: an option is misspelt or ill-typed.
    """
    return _Backend(_parse(options))


def partitioner(**options: object) -> CustomPartitionerFn:
    """Return Inductor's ``custom_partitioner_fn`` with these options.

    Raises:
        InvalidOptionError: an option is misspelt or ill-typed.
        GcpassError: `check_gradients` or `regions` is set, which need the backend.
    """
    parsed = _without_regions(_parse(options))
    _refuse_check_gradients(parsed)
    correct_inductor()
    return Partitioner(parsed)


class enable:  # lower case: it is used like a function
    """Make ``backend="inductor"`` plan with gcpass, as a call or a context manager.

    Inductor's configuration belongs to a thread; a change does not recompile what is
    compiled already (call ``torch.compiler.reset()`` first if something is).
    """

    def __init__(self, **options: object) -> None:
        self._before = {
            name: getattr(inductor_config, name)
            for name in ("custom_partitioner_fn", *EXACT_CASTS, *FREE_AT_ONCE)
        }
        parsed = _without_regions(_parse(options))
        if parsed.codegen != "inductor" or parsed.inductor or parsed.mode != "default":
            raise GcpassError(
                "gcpass.enable plans for Inductor as it is configured: codegen, mode "
                "and Inductor's own options are set there"
            )
        _refuse_check_gradients(parsed)
        correct_inductor()
        for name, value in (EXACT_CASTS | FREE_AT_ONCE).items():
            setattr(inductor_config, name, value)
        inductor_config.custom_partitioner_fn = Partitioner(_resolve(parsed))

    def __enter__(self) -> enable:
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            setattr(inductor_config, name, value)


def plans() -> tuple[RegionPlan, ...]:
    """Return the plans of the regions compiled in this process, oldest first."""
    return store.plans()


def _without_regions(options: Options) -> Options:
    if options.regions:
        raise GcpassError(NO_REGIONS)
    return options


def _parse(options: Mapping[str, object]) -> Options:
    return parse_options(options, inductor_keys=inductor_config.get_config_copy)


def _refuse_check_gradients(options: Options) -> None:
    if options.check_gradients:
        raise GcpassError(
            "check_gradients needs the whole region, which only the backend sees: use "
            'torch.compile(model, backend="gcpass") or gcpass.check'
        )


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """Compile a region: the whole way through Inductor with our partitioner."""
    probe()
    correct_inductor()
    if getattr(dynamo_config, "caching_precompile", False):
        raise GcpassError(
            "TORCH_CACHING_PRECOMPILE serves compiled code for another backend or "
            "budget (its key is the function's name and line): unset it"
        )
    options = _resolve(options)
    if not torch.is_grad_enabled():
        return run_compiler(gm, example_inputs, options, partitioner=None)
    return step.compile_region(
        RegionCompiler(gm, example_inputs, options),
        example_inputs,
        followed=ends_in_graph_break(gm),
    )


def _resolve(options: Options) -> Options:
    """Return the options with "auto" turned into bytes, so that they are a key."""
    if not isinstance(options.budget, Auto):
        return options
    free = _free_bytes()
    size = int(free * (1 - AUTO_RESERVE)) // AUTO_STEP * AUTO_STEP
    if size <= 0:
        raise GcpassError(f'memory_budget="auto": only {free} bytes are free')
    return options.model_copy(update={"memory_budget": size})


def _free_bytes() -> int:
    """Return what the current device has free: the GPU if there is one, else RAM."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(free + cached)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise GcpassError('memory_budget="auto" is not known on this system: give bytes')


class _CallableModule(types.ModuleType):
    """Lets ``gcpass.backend(...)`` make a backend although it is this module."""

    def __call__(self, **options: object) -> Callable[..., Any]:
        return make_backend(**options)


sys.modules[__name__].__class__ = _CallableModule
