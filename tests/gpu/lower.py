"""``python -m tests.gpu.lower CASE FOLDER``: from a model to the GPU's machine code.

Plans and lowers a case's model for a GPU at every budget, compiles every kernel, and
leaves what was generated in the folder, for `tests.gpu.interpret`.
"""

from __future__ import annotations

# First: it has to be loaded before torch.
from tests.gpu.fake_cuda import (  # isort: skip
    FakeCuda,
    fake_cuda,
)

import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import fx
from torch._inductor.codecache import PyCodeCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gcpass
from gcpass import custom_partitioner
from tests.gpu.models import CASES, Case
from tests.gpu.program import Call, Kernel, Lowered

BUDGETS: tuple[Any, ...] = (None, 0.5, "min")
GENERATED_FOR = 90  # Hopper
CAPABILITIES = (80, GENERATED_FOR)  # 80: Ampere


def lower(case: Case, budget: Any) -> Lowered:
    """Return what a case's model becomes at a budget."""
    splits: list[tuple[fx.GraphModule, fx.GraphModule]] = []
    partition = custom_partitioner.partition

    def noted(*arguments: Any, **named: Any) -> Any:
        split = partition(*arguments, **named)
        splits.append(split)
        return split

    with (
        fake_cuda(GENERATED_FOR) as cuda,
        case.attending(),
        mock.patch.object(custom_partitioner, "partition", noted),
    ):
        arguments = _step(case, budget, cuda)
    plan = gcpass.plans()[-1]
    (split,) = splits
    forward, backward = cuda.graphs
    assert (forward.is_backward, backward.is_backward) == (False, True)
    return Lowered(
        budget=budget,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_peak_bytes,
        scheduled_bytes=plan.scheduled_peak_bytes,
        recomputations=plan.recomputations,
        arguments=arguments,
        forward=forward,
        backward=backward,
        planned=(_calls(split[0]), _calls(split[1])),
    )


def _step(case: Case, budget: Any, cuda: FakeCuda) -> list[str | int]:
    """Train one step; return what the region's inputs are."""
    model = cuda.module(case.model())
    given = cuda.tensor(case.input())
    names: dict[int, str] = {id(given): ""}
    names |= {id(tensor): name for name, tensor in model.named_parameters()}
    names |= {id(tensor): name for name, tensor in model.named_buffers()}
    seen: list[list[str | int]] = []
    compile_region = gcpass.backend(memory_budget=budget)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        compiled = compile_region(gm, inputs)

        def run(*arguments: Any) -> Any:
            seen.append([a if isinstance(a, int) else names[id(a)] for a in arguments])
            return compiled(*arguments)

        return run

    if case.dynamic:
        torch._dynamo.mark_dynamic(given, 0)
    with cuda.mode:
        torch.compile(model, backend=backend, fullgraph=True)(given).backward()
    return seen[0]


def _calls(module: fx.GraphModule) -> list[Call]:
    nodes = module.graph.nodes
    return [(n.name, str(n.target)) for n in nodes if n.op == "call_function"]


def machine_code(kernel: Kernel, capability: int) -> list[int]:
    """Compile a kernel for a GPU.

    For the GPU that it was generated for with every configuration that Inductor would
    try, for another one with the first.

    Returns:
        The bytes of the machine code of each.
    """
    tuner = getattr(PyCodeCache.load(kernel.source), kernel.name)
    sizes = []
    for config in tuner.configs if capability == GENERATED_FOR else tuner.configs[:1]:
        meta = tuner._create_compile_meta(config)
        source = ASTSource(
            tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True  # never what is cached
            built = triton.compile(
                source,
                target=GPUTarget("cuda", capability, 32),
                options=tuner._create_compile_options(config, meta),
            )
        assert f".target sm_{capability}" in built.asm["ptx"]
        sizes.append(len(built.asm["cubin"]))
    return sizes


def main() -> None:
    """Lower and compile a case, see the module."""
    warnings.simplefilter("ignore")
    name, folder = sys.argv[1:]
    results = [lower(CASES[name], budget) for budget in BUDGETS]
    known: dict[tuple[str, int], list[int]] = {}
    with fake_cuda(GENERATED_FOR):
        for result in results:
            for capability in CAPABILITIES:
                sizes = result.machine_code.setdefault(capability, [])
                for kernel in result.forward.kernels + result.backward.kernels:
                    key = re.sub(r"'kernel_name': '\w+'|\w+_\d+\(", "", kernel.source)
                    if (key, capability) not in known:
                        known[key, capability] = machine_code(kernel, capability)
                    sizes += known[key, capability]
    (Path(folder) / f"{name}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
