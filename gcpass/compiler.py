"""Compiles one region, again where its share of a step changes.

Each region is compiled by Inductor's own `compile_fx`; gcpass is its partitioner
(`gcpass.partition`). A region whose step is not known yet is compiled to run operation
by operation, holding as little as possible: that costs no code generation.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gcpass import store
from gcpass.custom_partitioner import Partitioner
from gcpass.decisions import RegionPlan
from gcpass.eager import run_operations
from gcpass.errors import GcpassError
from gcpass.fit import FREE_AT_ONCE
from gcpass.options import Options
from gcpass.partition import show
from gcpass.plan_order import compile_in_plan_order
from gcpass.region_check import CheckedOnce, captured_copy
from gcpass.regions import scopes_fingerprint
from gcpass.request import Request, current_request
from gcpass.sizes import storage_bytes
from gcpass.solvers.problem import Problem
from gcpass.solvers.shares import Share
from gcpass.toolchain import require_cpp_compiler
from gcpass.torch_private import (
    CompileContext,
    TracingContext,
    compile_context,
    compile_fx,
    compile_fx_inner,
    compile_id,
    functorch_config,
    inductor_config,
    list_mode_options,
    own_context,
    tracing,
)

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

Run = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled region.

    Attributes:
        run: takes the region's inputs.
        plan: what it does; None without a backward, and where it only counts.
        problem: what was solved; None without a backward and after a cache hit.
    """

    run: Run
    plan: RegionPlan | None
    problem: Problem | None


class RegionCompiler:
    """What it takes to compile a region now and later.

    Args:
        gm: the region as captured by Dynamo.
        example_inputs: its inputs; they are not kept.
        options: the user's, with "auto" turned into bytes.
    """

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
    ) -> None:
        self.options = options
        self.gradient_bytes = _gradient_bytes(example_inputs)
        self.ends_in_loss = _ends_in_loss(gm)
        self._gm = captured_copy(gm)
        self._scopes = scopes_fingerprint(gm, options.regions)
        self._key = store.region_key("", _nameless_code(gm), example_inputs)
        self._tracing = TracingContext.try_get()
        self._context = CompileContext.try_get()

    def compile(
        self, share: Share | None, example_inputs: Sequence[Any] | None = None
    ) -> Compiled:
        """Compile the region.

        Args:
            share: of a step with several executions, None when it is alone.
            example_inputs: where they are at hand; fake ones do otherwise.
        """
        part = Partitioner(self.options, share, self._scopes)
        key = store.region_key(part.uuid(), self._key, ())
        request = Request(key=key)
        inputs = self._fake_inputs() if example_inputs is None else example_inputs
        with self._requested(request):
            run = run_compiler(
                captured_copy(self._gm), inputs, self.options, partitioner=part
            )
        if self.options.check_gradients:
            run = CheckedOnce(captured_copy(self._gm), run)
        plan = request.made[-1] if request.made else self._cached_plan(key)
        problem = request.problems[-1] if request.problems else None
        return Compiled(run=run, plan=plan, problem=problem)

    def count(self) -> Compiled:
        """Compile the region for a step that is not known yet."""
        part = Partitioner(self.options, None, self._scopes, counting=True)
        request = Request(key="")
        with self._requested(request):
            run = run_compiler(
                captured_copy(self._gm),
                self._fake_inputs(),
                self.options.model_copy(update={"codegen": "eager"}),
                partitioner=part,
            )
        problem = request.problems[-1] if request.problems else None
        return Compiled(run=run, plan=None, problem=problem)

    def _fake_inputs(self) -> list[Any]:
        """Return inputs that keep no data alive, as Dynamo noted them."""
        nodes = self._gm.graph.find_nodes(op="placeholder")
        inputs = [node.meta.get("example_value") for node in nodes]
        if any(value is None for value in inputs):
            raise GcpassError(
                "one of several regions in a step has inputs of unknown size"
            )
        return inputs

    def _cached_plan(self, key: str) -> RegionPlan | None:
        """Return the plan of a region out of a compile cache, and show it."""
        plan = store.load_sidecar(key)
        if plan is not None:
            plan = plan.as_cached(compile_id())
            show(plan, self.options)
        return plan

    @contextlib.contextmanager
    def _requested(self, request: Request) -> Iterator[None]:
        """Be where Dynamo was when it asked for this region, which may be now."""
        token = current_request.set(request)
        try:
            if TracingContext.try_get() is self._tracing:
                yield
                return
            with tracing(own_context(self._tracing)), compile_context(self._context):
                yield
        finally:
            current_request.reset(token)


def run_compiler(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    partitioner: Partitioner | None,
) -> Run:
    """Compile a graph as the options say.

    Args:
        gm: as captured by Dynamo; it is changed.
        example_inputs: its inputs.
        options: the user's.
        partitioner: None without a backward.
    """
    patches: dict[str, Any] = list_mode_options(options.mode) | EXACT_CASTS
    if _on_cpu(example_inputs):
        patches |= EXACT_ON_CPU
    if partitioner is not None:
        patches |= FREE_AT_ONCE
    if options.check_gradients:
        patches |= EAGERS_DRAWS
    patches.update(options.inductor)
    if partitioner is not None:
        patches["custom_partitioner_fn"] = partitioner
    compile_region: Any = compile_fx  # returns a callable for what Dynamo hands over
    if options.codegen == "inductor":
        require_cpp_compiler(inductor_config.cpp.cxx)
        inner = compile_fx_inner if partitioner is None else compile_in_plan_order
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
    result: Run = compiled
    return result


def _nameless_code(gm: fx.GraphModule) -> str:
    """Return the code with inputs named by their places.

    Their names come from the user's variables, which torch's caches do not look at. A
    place is no identifier, so that it is no other variable's name.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    places = {
        name: f"<{place}>"
        for place, node in enumerate(inputs)
        for name in (node.name, str(node.target))
    }
    code: str = gm.print_readable(False)
    return re.sub(r"\b\w+\b", lambda word: places.get(word[0], word[0]), code)


def _on_cpu(example_inputs: Sequence[Any]) -> bool:
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    return all(x.device.type == "cpu" for x in tensors)


def _ends_in_loss(gm: fx.GraphModule) -> bool:
    """Return whether an output is a number that the caller may start backward from."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [n.meta.get("example_value") for n in output.all_input_nodes]
    return any(
        isinstance(v, torch.Tensor) and v.dim() == 0 and v.requires_grad for v in values
    )


def _gradient_bytes(example_inputs: Sequence[Any]) -> int:
    """Return the bytes of the gradients that stay after the backward."""
    leaves = {
        id(x): storage_bytes(x)
        for x in example_inputs
        if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf
    }
    return sum(leaves.values())
