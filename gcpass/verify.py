"""The peak of a split as it will run, with everything that Inductor does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gcpass.eager import boxed
from gcpass.lowering import read_program
from gcpass.replay import Scheduled, callable_of, like, replay
from gcpass.rewrite import Split
from gcpass.torch_private import FakeTensor, donated, functorch_config


def schedule(
    split: Split,
    primals: Sequence[Any],
    *,
    num_outputs: int,
    outside_bytes: int,
    codegen: str,
    inner_compile: Callable[..., Any],
) -> Scheduled:
    """Return the peaks of the programs that will run for a split.

    Args:
        split: forward and backward module.
        primals: inputs of the forward, fake.
        num_outputs: how many results of the forward are the region's outputs.
        outside_bytes: what the caller needs between forward and backward.
        codegen: "inductor" or "eager".
        inner_compile: what will compile the graphs, for Inductor.

    Raises:
        UnreadableProgramError: the programs cannot be followed without data.
    """
    names = [n.name for n in split.forward.graph.find_nodes(op="placeholder")]
    result_names = _result_names(split.forward)
    placeholders = split.backward.graph.find_nodes(op="placeholder")
    sources = [_source(p, names, result_names) for p in placeholders]

    def backward_inputs(inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        found = []
        for node, (kind, position) in zip(placeholders, sources, strict=True):
            if kind == "result":
                found.append(results[position])
            elif kind == "input":
                found.append(inputs[position])
            else:
                found.append(like(node.meta.get("val")))
        return found

    if codegen == "eager":
        forward, backward = boxed(split.forward), boxed(split.backward)
    else:
        forward, backward = _programs(
            split, primals, sources, num_outputs, inner_compile
        )
    return replay(
        forward,
        backward,
        primals=primals,
        backward_inputs=backward_inputs,
        num_outputs=num_outputs,
        outside_bytes=outside_bytes,
    )


Callee = Callable[[list[Any]], Any]


def _programs(
    split: Split,
    primals: Sequence[Any],
    sources: Sequence[tuple[str, int]],
    num_outputs: int,
    inner_compile: Callable[..., Any],
) -> tuple[Callee, Callee]:
    forward = read_program(
        split.forward,
        primals,
        is_backward=False,
        static_inputs=0,
        user_visible_outputs=range(num_outputs),
        inner_compile=inner_compile,
    )
    inputs = []
    for node, (kind, position) in zip(
        split.backward.graph.find_nodes(op="placeholder"), sources, strict=True
    ):
        value = node.meta.get("val")
        strides = forward.output_strides[position] if kind == "result" else None
        inputs.append(_restride(value, strides))
    static = sum(1 for kind, _ in sources if kind != "tangent")
    with donated(_donated(split, sources, num_outputs)):
        backward = read_program(
            split.backward,
            inputs,
            is_backward=True,
            static_inputs=static,
            user_visible_outputs=(),
            inner_compile=inner_compile,
        )
    return callable_of(forward), callable_of(backward)


def _donated(
    split: Split, sources: Sequence[tuple[str, int]], num_outputs: int
) -> list[int]:
    """Return the positions of saved tensors that the backward may write.

    By torch's rule: those whose storage nothing else has.
    """
    if not functorch_config.donated_buffer:
        return []
    forward_results = _outputs(split.forward)
    others = [
        *split.forward.graph.find_nodes(op="placeholder"),
        *forward_results[:num_outputs],
        *_outputs(split.backward),
    ]
    taken = {s for node in others if (s := _storage(node)) is not None}
    return [
        i
        for i, (kind, position) in enumerate(sources)
        if kind == "result"
        and (storage := _storage(forward_results[position])) is not None
        and storage not in taken
    ]


def _outputs(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def _storage(node: Any) -> int | None:
    """Return what tells the storage of a node's tensor from others, None without."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _restride(value: Any, strides: tuple[int, ...] | None) -> Any:
    """Return the tensor with the strides that the forward will really give it."""
    if strides is None or not isinstance(value, torch.Tensor):
        return value
    if any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride())):
        return value  # Inductor keeps layouts when shapes are symbolic
    if tuple(value.stride()) == strides:
        return value
    return value.as_strided(value.size(), strides)


def _result_names(forward: fx.GraphModule) -> list[str]:
    return [x.name if isinstance(x, fx.Node) else "" for x in _outputs(forward)]


def _source(
    placeholder: fx.Node, inputs: Sequence[str], results: Sequence[str]
) -> tuple[str, int]:
    """Return where the backward gets an input from: ("result" | "input", position)."""
    if placeholder.name in inputs:
        return "input", inputs.index(placeholder.name)
    if placeholder.name in results:
        last = len(results) - 1 - results[::-1].index(placeholder.name)
        return "result", last
    return "tangent", 0
