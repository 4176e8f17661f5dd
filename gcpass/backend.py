"""The ``torch.compile`` backend, and the other ways in.

    torch.compile(model, backend="gcpass", options={"memory_budget": "12GiB"})
    torch.compile(model, backend=gcpass.backend(memory_budget="12GiB"))
    with gcpass.enable(memory_budget="12GiB"): ...  # where inductor is a must

Each region is compiled by Inductor's own `compile_fx`; gcpass is its partitioner
(`gcpass.partition`). Graphs without a backward go to Inductor untouched.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from gcpass import step, store
from gcpass.budget import Auto, Unlimited
from gcpass.corrections import correct_inductor
from gcpass.cost import cost_registry_fingerprint
from gcpass.decisions import RegionPlan
from gcpass.eager import run_operations
from gcpass.errors import GcpassError
from gcpass.fusion import compile_in_plan_order
from gcpass.options import Options, parse_options
from gcpass.partition import (
    FREE_AT_ONCE,
    Request,
    current_request,
    partition,
    show,
)
from gcpass.region_check import CheckedOnce, captured_copy
from gcpass.regions import scopes_fingerprint
from gcpass.step import Held
from gcpass.toolchain import require_cpp_compiler
from gcpass.torch_private import (
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    compile_id,
    dynamo_config,
    functorch_config,
    inductor_config,
    list_mode_options,
    probe,
    surfaced,
)

__all__ = ["enable", "gcpass", "make_backend", "partitioner", "plans"]

# Channels-last kernels round otherwise than eager's, and elements near the kink of a
# ReLU or a tie of max pooling go the other way: on a ResNet gradients move by 2e-3 to
# 1e-2 instead of 3e-6 (in eager's own channels-last format by up to 7e-3; with SiLU by
# 2e-5). What was wrong on a UNet had another cause, see `gcpass.corrections`.
EXACT_ON_CPU = {"layout_optimization": False}
# Inductor computes in float32 inside of a kernel, so that a low precision value has
# other bits there than in memory. What is compared with itself then differs: bfloat16
# gradients of amax(sin(x) * 2) are NaN, and masks flip where a value is recomputed.
EXACT_CASTS = {"emulate_precision_casts": True}
EAGERS_DRAWS = {"fallback_random": True}  # else dropout has other masks than in eager
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


# Inductor asks a partitioner for its cache key before there is a graph.
_NO_REGIONS = (
    'regions need torch.compile(..., backend="gcpass"): compile caches would not tell '
    "them apart where Inductor is the backend"
)


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
    return Partitioner(parsed, Held())


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
        budgeted = not isinstance(parsed.budget, Unlimited)
        chosen = EXACT_CASTS | (FREE_AT_ONCE if budgeted else {})
        for name, value in chosen.items():
            setattr(inductor_config, name, value)
        inductor_config.custom_partitioner_fn = Partitioner(_resolve(parsed), Held())

    def __enter__(self) -> enable:
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            setattr(inductor_config, name, value)


def plans() -> tuple[RegionPlan, ...]:
    """Return the plans of the regions compiled in this process, oldest first."""
    return store.plans()


class Partitioner(CustomPartitionerFn):
    """Immutable: it is copied and pickled into Inductor's cache keys.

    Args:
        options: the user's.
        earlier: what earlier regions of the same step hold.
        scopes: `scopes_fingerprint` of the graph to come, None if it is not known.
    """

    def __init__(
        self, options: Options, earlier: Held, scopes: str | None = None
    ) -> None:
        self._options = options
        self._earlier = earlier
        self._scopes = scopes
        self._fingerprint = _fingerprint(options, earlier, scopes or "")

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **arguments: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph, see `gcpass.partition.partition`."""
        if self._scopes is None and scopes_fingerprint(gm, ()):
            raise GcpassError(_NO_REGIONS)
        return partition(
            gm,
            joint_inputs,
            self._options,
            self._earlier,
            num_fwd_outputs=arguments["num_fwd_outputs"],
            static_lifetime_input_indices=arguments.get(
                "static_lifetime_input_indices"
            ),
        )

    def uuid(self) -> str:
        """Return what identifies every decision of this partitioner."""
        return self._fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self._fingerprint,))

    def __deepcopy__(self, memo: object) -> Partitioner:
        return self


def _without_regions(options: Options) -> Options:
    if options.regions:
        raise GcpassError(_NO_REGIONS)
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
    patches: dict[str, Any] = list_mode_options(options.mode) | EXACT_CASTS
    if _on_cpu(example_inputs):
        patches |= EXACT_ON_CPU
    if not isinstance(options.budget, Unlimited):
        patches |= FREE_AT_ONCE
    if options.check_gradients:
        patches |= EAGERS_DRAWS
    patches.update(options.inductor)
    if options.codegen == "inductor":
        require_cpp_compiler(inductor_config.cpp.cxx)
    if not torch.is_grad_enabled():
        return _run_compiler(gm, example_inputs, options, patches)
    earlier = step.outstanding()
    part = Partitioner(options, earlier, scopes_fingerprint(gm, options.regions))
    patches["custom_partitioner_fn"] = part
    key = store.region_key(part.uuid(), gm.print_readable(False), example_inputs)
    request = Request(key=key)
    captured = captured_copy(gm) if options.check_gradients else None
    token = current_request.set(request)
    try:
        compiled = _run_compiler(gm, example_inputs, options, patches)
    finally:
        current_request.reset(token)
    if captured is not None:
        compiled = CheckedOnce(captured, compiled)
    plan = request.made[-1] if request.made else _cached_plan(key, options)
    return compiled if plan is None else _tracked(compiled, key, plan)


def _cached_plan(key: str, options: Options) -> RegionPlan | None:
    """Return the plan of a region that came out of a compile cache, and show it."""
    plan = store.load_sidecar(key)
    if plan is not None:
        plan = plan.as_cached(compile_id())
        show(plan, options)
    return plan


def _on_cpu(example_inputs: Sequence[Any]) -> bool:
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    return all(x.device.type == "cpu" for x in tensors)


def _run_compiler(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    compile_region: Any = compile_fx  # returns a callable for what Dynamo hands over
    if options.codegen == "inductor":
        planned = "custom_partitioner_fn" in patches
        free = isinstance(options.budget, Unlimited) or not planned
        inner = compile_fx_inner if free else compile_in_plan_order
        compiled = compile_region(
            gm, example_inputs, inner_compile=inner, config_patches=patches
        )
    else:
        patches |= {"fx_graph_cache": False, **EAGERS_DRAWS}
        with functorch_config.patch(enable_autograd_cache=False):
            compiled = compile_region(
                gm,
                example_inputs,
                inner_compile=run_operations,
                config_patches=patches,
            )
    result: Callable[..., Any] = compiled
    return result


def _tracked(
    compiled: Callable[..., Any], key: str, plan: RegionPlan
) -> Callable[..., Any]:
    """Return the compiled region, noting for later regions what it holds."""
    held = Held(
        bytes=plan.held_bytes,
        fastest_bytes=plan.fastest_held_bytes,
        peak_bytes=plan.fastest_peak_bytes,
    )

    def run(*arguments: Any) -> Any:
        results = compiled(*arguments)
        step.forward_ran(key, held, results)
        return results

    return run


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


def _fingerprint(options: Options, earlier: Held, scopes: str) -> str:
    """Return a digest of everything that decides a plan besides the graph."""
    digest = hashlib.sha256()
    for part in (
        options.fingerprint(),
        repr(earlier),
        scopes,
        _source_digest(),
        cost_registry_fingerprint(),
        torch.__version__,
        str(os.cpu_count()),
    ):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _source_digest() -> str:
    """Return a digest of gcpass's own sources: another version, another plan."""
    global _sources
    if not _sources:
        digest = hashlib.sha256()
        root = Path(__file__).parent
        for folder in (root, root / "solvers"):
            for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*.json")):
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
        _sources = digest.hexdigest()
    return _sources


_sources = ""


class _CallableModule(types.ModuleType):
    """Lets ``gcpass.backend(...)`` make a backend although it is this module."""

    def __call__(self, **options: object) -> Callable[..., Any]:
        return make_backend(**options)


sys.modules[__name__].__class__ = _CallableModule
