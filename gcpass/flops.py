"""Floating point operations of one node of a joint graph.

A multiplication and an addition count as two. The order in which a formula is looked
for, first hit wins:

1. the user's: `register_cost`, then torch's `register_flop_formula`;
2. `gcpass.flop_formulas`: what torch prices at 0, prices wrongly or leaves out;
3. torch's own flop registry;
4. by kind: views and copies 0, reductions their input, pointwise and every other ATen
   operator its output, an operator with a body its body.

An operator of another library without a formula is unknown (None): it may hide any
amount of work.

Symbolic sizes are read by their hint, or as functions of the graph's symbols
(`gcpass.sizes`); the formulas are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from gcpass.errors import InvalidOptionError
from gcpass.flop_formulas import (
    OWN_FORMULAS,
    Call,
    most,
    per_input,
    per_output,
    sizes_of,
)
from gcpass.sizes import Reader, expression, hint_int, shape_only, tensors_in
from gcpass.symbols import Symbolic
from gcpass.torch_private import HigherOrderOperator, OpOverload, tree_map

__all__ = ["USER_FORMULAS", "Call", "call_of", "carried_call", "graph_bodies"]
__all__ += ["node_flops", "node_flops_at", "op_names", "symbolic_flops"]
__all__ += ["user_formulas"]

Formula = Callable[..., int]
_View = Callable[[Any], Any]  # of one leaf of metadata or of the arguments
_Count = Callable[[fx.Node], Symbolic | None]

USER_FORMULAS: dict[str, Formula] = {}
"""Formulas of `gcpass.cost.register_cost` by operator name ("lib::op.overload")."""


def call_of(node: fx.Node) -> Call:
    """Return a node's call; graph modules stay as they are, None where unknown."""
    return _call_of(node, _concrete)


def _call_of(node: fx.Node, view: _View) -> Call:
    def meta_of(argument: fx.Node) -> Any:
        return _meta_of(argument, view)

    args, kwargs = map_arg((node.args, dict(node.kwargs)), meta_of)
    out = tree_map(view, node.meta.get("val"))
    return Call(target=node.target, args=tuple(args), kwargs=kwargs, out=out)


def node_flops(node: fx.Node) -> int | None:
    """Return the FLOPs of one execution of the node, None when they are unknown."""
    if not _does_work(node):
        return 0
    flops: int | None = _call_flops(call_of(node), node_flops)
    return flops


def node_flops_at(node: fx.Node, read: Reader) -> int | None:
    """Return `node_flops` at other sizes.

    Args:
        node: of a joint graph.
        read: tells each size, a number.

    Returns:
        FLOPs; None where they are unknown or the formula fails there.
    """
    if not _does_work(node):
        return 0
    count = partial(node_flops_at, read=read)
    try:
        flops: int | None = _call_flops(
            _call_of(node, partial(_concrete, read=read)), count
        )
    except Exception:  # as below
        return None
    return flops


def symbolic_flops(node: fx.Node) -> Symbolic | None:
    """Return `node_flops` as a function of the graph's symbols.

    Returns:
        an int where no symbol decides, else a `sympy.Expr`; None where the FLOPs are
        unknown or the formula takes numbers only (a logarithm, a user's).
    """
    if not _does_work(node):
        return 0
    try:
        return _call_flops(_call_of(node, _symbolic), symbolic_flops)
    except Exception:  # a user's or torch's code, which was not written for this
        return None


def _does_work(node: fx.Node) -> bool:
    """Return False for inputs, items of tuples and arithmetic on sizes."""
    operator_call = isinstance(node.target, OpOverload | HigherOrderOperator)
    return node.op == "call_function" and operator_call


@cache
def op_names(target: Any) -> tuple[str, ...]:
    """Return the names a formula may be registered under, the most specific first.

    An overload has two, "aten::sum.dim_IntList" and "aten::sum"; a higher-order
    operator one, "cond"; anything else none.
    """
    if isinstance(target, OpOverload):
        packet = target.name().split(".")[0]
        overload = str(target).rsplit(".", 1)[-1]
        return (f"{packet}.{overload}", packet)
    if isinstance(target, HigherOrderOperator):
        return (target.name(),)
    return ()


def user_formulas() -> dict[str, Formula]:
    """Return what users registered, with gcpass or with torch, by operator name."""
    with_torch = {
        str(target): formula
        for target, formula in flop_registry.items()
        if not _is_torch_own(formula)
    }
    return with_torch | USER_FORMULAS


def _call_flops(call: Call, count: _Count) -> Symbolic | None:
    """Return the FLOPs of a call; `count` gives those of the nodes of its body."""
    for name in op_names(call.target):
        if name in USER_FORMULAS:
            flops = USER_FORMULAS[name](*call.args, **call.kwargs, out=call.out)
            return _checked(name, flops)
    torch_formula = _torch_formula(call.target)
    if torch_formula is not None and not _is_torch_own(torch_formula):
        return _apply_torch_formula(torch_formula, call)
    if isinstance(call.target, HigherOrderOperator):
        if torch_formula is not None:  # flex attention
            return _apply_torch_formula(torch_formula, call)
        return _body_flops(call, count)
    own = OWN_FORMULAS.get(op_names(call.target)[-1])
    if own is not None:
        return own(call)
    if torch_formula is not None:
        return _apply_torch_formula(torch_formula, call)
    return _flops_by_kind(call)


def _checked(name: str, flops: Any) -> Symbolic:
    if isinstance(flops, sympy.Expr):  # given functions of symbols
        return flops
    if isinstance(flops, int) and not isinstance(flops, bool) and flops >= 0:
        return flops
    raise InvalidOptionError(
        f"the cost formula of {name} must return FLOPs as an int of 0 or more and "
        f"returned {flops!r}",
        option="register_cost",
    )


def _torch_formula(target: Any) -> Formula | None:
    key = target.overloadpacket if isinstance(target, OpOverload) else target
    return flop_registry.get(key)


def _is_torch_own(formula: Formula) -> bool:
    # functools.wraps keeps the module of what the registry's decorators wrap
    return formula.__module__.startswith("torch.")


def _apply_torch_formula(formula: Formula, call: Call) -> Symbolic:
    flops = formula(*call.args, **call.kwargs, out_val=call.out)
    return flops if isinstance(flops, sympy.Expr) else int(flops)


def _meta_of(node: fx.Node, view: _View) -> Any:
    val = node.meta.get("val")
    if val is not None or node.op != "get_attr" or node.graph.owning_module is None:
        return tree_map(view, val)
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _concrete(val: Any, read: Reader = hint_int) -> Any:
    """Return metadata without symbols: hints are numbers, and numbers add no guard."""
    if isinstance(val, torch.SymInt):
        return read(val)
    if isinstance(val, torch.SymFloat | torch.SymBool):
        return 1.0 if isinstance(val, torch.SymFloat) else True  # costs do not ask
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return val
    if not any(isinstance(s, torch.SymInt) for s in (*val.shape, *val.stride())):
        return val
    sizes = [read(size) for size in val.shape]
    strides = [read(stride) for stride in val.stride()]
    return torch.empty_strided(sizes, strides, dtype=val.dtype, device="meta")


def _symbolic(val: Any) -> Any:
    """Return metadata with sizes as functions of symbols."""
    if isinstance(val, torch.SymInt):
        return expression(val)
    return shape_only(val) if isinstance(val, torch.Tensor) else _concrete(val)


# --- operators with a body ------------------------------------------------------------


def graph_bodies(call: Call) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order operator runs, in argument order."""
    items: list[Any] = []
    for value in (*call.args, *call.kwargs.values()):
        items += value if isinstance(value, tuple | list) else [value]
    return [item for item in items if isinstance(item, fx.GraphModule)]


def carried_call(call: Call) -> Call | None:
    """Return the call that an operator on operators makes, None for any other.

    These are operators with effects, with random states, or functionalised ones.
    `auto_functionalized_v2` replaces each written argument by a position in a list of
    bases; the argument is taken to be its whole base.
    """
    carried = next((a for a in call.args if isinstance(a, OpOverload)), None)
    if carried is None:
        return None
    if not call.target.name().startswith("auto_functionalized"):
        position = next(i for i, a in enumerate(call.args) if a is carried)
        rest = call.args[position + 1 :]
        return Call(target=carried, args=rest, kwargs=call.kwargs, out=call.out)
    bases = call.kwargs.get("_all_bases", ())
    arguments = []
    for argument in carried._schema.arguments:
        base = call.kwargs.get(f"_{argument.name}_base_index")
        given = call.kwargs.get(argument.name)
        arguments.append(given if base is None else bases[base])
    return Call(target=carried, args=tuple(arguments), kwargs={}, out=call.out)


def _body_flops(call: Call, count: _Count) -> Symbolic | None:
    carried = carried_call(call)
    if carried is not None:
        return _call_flops(carried, count)
    name = call.target.name()
    counts = [_graph_flops(body, count) for body in graph_bodies(call)]
    known = [count for count in counts if count is not None]
    if not counts or len(known) < len(counts) or name == "while_loop":
        return None  # nobody knows how many rounds a while loop takes
    if name == "cond":
        return most(known)
    return sum(known) * _body_runs(name, call)


def _graph_flops(body: fx.GraphModule, count: _Count) -> Symbolic | None:
    counts = [count(node) for node in body.graph.nodes]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _body_runs(name: str, call: Call) -> Symbolic:
    """Return how often a body runs: once per slice of the scanned tensors."""
    scanned = {"scan": 2, "associative_scan": 1, "map_impl": 1}.get(name)
    if scanned is None or len(call.args) <= scanned:
        return 1
    tensors = tensors_in(call.args[scanned])
    return sizes_of(tensors[0])[0] if tensors else 1


# --- by kind --------------------------------------------------------------------------


def _flops_by_kind(call: Call) -> Symbolic | None:
    target = call.target
    if target.namespace not in ("aten", "prims"):
        return None
    if _shares_memory(target) or torch.Tag.view_copy in target.tags:
        return 0
    if torch.Tag.reduction in target.tags:
        return per_input(1)(call)
    return per_output(1)(call)


def _shares_memory(target: OpOverload) -> bool:
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)
