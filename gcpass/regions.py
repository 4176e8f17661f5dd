"""``gcpass.region``: a limit or a policy of its own for a part of the model.

    with gcpass.region(memory_budget=0.1):  # of the bytes it would save otherwise
        x = self.encoder(x)
    with gcpass.region(policy="save"):  # nothing of it is computed twice
        x = self.head(x)

`apply_scopes` turns what was marked into what the problem already knows: operations
that must not run again, and values that must not be saved. The rest is planned as
always, so a limit on a scope holds for every plan, whatever the budget.

A limit chooses by the minimum cut at the boundary that counts the bytes of this scope
only: what the cheapest choice within the limit saves may be saved, the scope's other
values may not. Values that leave the step (outputs) are alive anyway and do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import operator
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import fx

from gcpass.capture import Capture, ScopeShare
from gcpass.errors import InfeasibleRegionError, InvalidOptionError, SolverError
from gcpass.options import Options
from gcpass.scopes import ANNOTATION, Scope, make_scope, scope_of
from gcpass.solvers.cut import CutProblem, boundary_cut
from gcpass.solvers.frontier import Frontier
from gcpass.solvers.problem import Phase, Problem, ValueId
from gcpass.torch_private import CheckpointPolicy, annotate, surfaced

log = logging.getLogger("gcpass")

# The cut flips equal layers at one price, all or none. Later ones are made dearer by
# at most this share, so that it can split them; their bytes are free again first.
TILT = 1e-3

_Scopes = tuple[Scope | None, ...]  # by operation


@contextlib.contextmanager
def region(
    *, memory_budget: object = None, policy: object = None, name: str = ""
) -> Iterator[None]:
    """Mark the operations inside, for a limit or a policy of their own.

    Does nothing in eager mode. Regions with equal arguments in one graph are one and
    share its limit, a name keeps them apart; of nested ones the innermost counts.

    Args:
        memory_budget: limit on the bytes saved for the backward by what is computed
            inside: bytes (4096, "512MiB"), or a fraction in (0, 1] of the bytes that
            the fastest plan saves from it.
        policy: "save": nothing inside is recomputed; "recompute": nothing inside is
            saved but what leaves it, as if it were checkpointed.
        name: for decisions and errors.

    Raises:
        InvalidOptionError: both or none are given, or one is not understood.
    """
    text = _annotation(name, _known(memory_budget), policy)
    if torch.compiler.is_compiling():
        with annotate({ANNOTATION: text}):
            yield
    else:
        yield


def _known(number: object) -> object:
    """Return the same as what Dynamo takes for a constant, and guards on.

    A number that changes between calls is symbolic from the second value on. These
    two methods are among the few that make Dynamo look at its value.
    """
    if isinstance(number, float) and 0.0 < number <= 1.0:
        above, below = number.as_integer_ratio()
        return above / below  # exact: the quotient is rounded to nearest
    if isinstance(number, int) and not isinstance(number, bool):
        return operator.index(number)
    return number


# Dynamo calls it instead of tracing it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _annotation(name: object, memory_budget: object, policy: object) -> str:
    with surfaced(InvalidOptionError):
        make_scope(name, memory_budget, policy)
    return json.dumps([name, memory_budget, policy])


def scopes_fingerprint(gm: fx.GraphModule, patterns: Sequence[Scope]) -> str:
    """Return what tells apart graphs that differ in their scopes; "" without scopes.

    The cache keys of torch know neither annotations nor module paths.
    """
    found = [repr(scope_of(node, patterns)) for node in _all_nodes(gm)]
    if set(found) <= {"None"}:
        return ""
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def apply_scopes(captured: Capture, options: Options) -> Capture:
    """Return the capture with the policies and limits of its scopes.

    Args:
        captured: of a joint graph; the user's checkpoint tags are in it already.
        options: the patterns, and what to do with a limit that cannot be met.

    Raises:
        InfeasibleRegionError: what cannot be recomputed takes more than a limit.
    """
    _warn_of_unused(captured, options.regions)
    scopes = _scopes_of(captured, options.regions)
    if not any(scopes):
        return captured
    shares = _shares(captured, scopes)
    captured = _recompute(_save(captured, scopes), scopes)
    for share in sorted(shares, key=_tightness):
        captured = _limit(captured, share, options)
    return dataclasses.replace(captured, shares=tuple(shares))


def _warn_of_unused(captured: Capture, patterns: Sequence[Scope]) -> None:
    for scope in patterns:
        if not any(scope_of(node, (scope,)) for node in captured.graph.nodes):
            log.warning("regions: nothing in this graph is in a module %r", scope.name)


def _scopes_of(captured: Capture, patterns: Sequence[Scope]) -> _Scopes:
    """Return the scope of each operation that can run before the boundary.

    What only the backward reads but does not depend on gradients may be saved instead
    of what it is computed from, so it belongs to the same scope if to no other.
    """
    operations, writers = captured.problem.operations, captured.problem.writers()
    scopes: list[Scope | None] = []
    for node, operation in zip(captured.op_nodes, operations, strict=True):
        if operation.phase is Phase.BACKWARD:
            scopes.append(None)
            continue
        scope = scope_of(node, patterns)
        if operation.phase is Phase.EITHER and scope is None:
            sources = [w for v in operation.reads if (w := writers[v]) is not None]
            scope = next(filter(None, (scopes[w] for w in sources)), None)
        scopes.append(scope)
    return tuple(scopes)


def _save(captured: Capture, scopes: _Scopes) -> Capture:
    """Forbid to run the operations of scopes of policy "save" again."""
    operations = list(captured.problem.operations)
    values = list(captured.problem.values)
    reasons = list(captured.reasons)
    for op_id, (node, scope) in enumerate(zip(captured.op_nodes, scopes, strict=True)):
        if scope is None or scope.policy != "save" or reasons[op_id] is not None:
            continue
        if operations[op_id].phase is not Phase.FORWARD or _must_recompute(node):
            continue
        reasons[op_id] = 'region of policy "save"'
        operations[op_id] = dataclasses.replace(operations[op_id], recomputable=False)
        for value in operations[op_id].writes:  # a hint may have forbidden it
            values[value] = dataclasses.replace(values[value], savable=True)
    problem = dataclasses.replace(
        captured.problem, operations=tuple(operations), values=tuple(values)
    )
    return dataclasses.replace(captured, problem=problem, reasons=tuple(reasons))


def _must_recompute(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def _recompute(captured: Capture, scopes: _Scopes) -> Capture:
    """Forbid to save what scopes of policy "recompute" write and does not leave them.

    A value leaves when the forward reads it elsewhere. What must not be recomputed may
    be saved all the same.
    """
    operations, readers = captured.problem.operations, captured.problem.readers()
    hidden: set[ValueId] = set()
    for op_id, scope in enumerate(scopes):
        if scope is None or scope.policy != "recompute":
            continue
        if captured.reasons[op_id] is not None:
            continue
        for value in operations[op_id].writes:
            outside = [r for r in readers[value] if scopes[r] != scope]
            if not any(operations[r].phase is Phase.FORWARD for r in outside):
                hidden.add(value)
    return _without_saving(captured, hidden, 'a region of policy "recompute"')


def _shares(captured: Capture, scopes: _Scopes) -> list[ScopeShare]:
    """Return each scope with its values and bytes, in the order of the graph."""
    values: dict[Scope, list[ValueId]] = {}
    for scope, operation in zip(scopes, captured.problem.operations, strict=True):
        if scope is not None:
            written = (
                v for v in operation.writes if not captured.problem.values[v].held
            )
            values.setdefault(scope, []).extend(written)
    fastest = boundary_cut(captured.problem).fastest()
    if fastest is None:
        raise SolverError("no choice of saved values is possible")
    return [
        ScopeShare(
            scope=scope,
            values=frozenset(mine),
            fastest_bytes=_size(captured.problem, set(mine) & set(fastest.saved)),
        )
        for scope, mine in values.items()
    ]


def _tightness(share: ScopeShare) -> float:
    """Return the share of its bytes that a scope may keep: the least goes first."""
    if share.limit_bytes is None:
        return 1.0
    return share.limit_bytes / max(share.fastest_bytes, 1)


def _limit(captured: Capture, share: ScopeShare, options: Options) -> Capture:
    """Forbid to save values of a scope so that the rest is within its limit."""
    limit = share.limit_bytes
    if limit is None:
        return captured
    problem = captured.problem
    frontier = Frontier(_counting(boundary_cut(problem), share.values, problem))
    if not frontier.points:
        raise SolverError("no choice of saved values is possible beside the policies")
    if not frontier.can_fit(limit):
        limit = _least(captured, share, frontier, options)
    more, less = (set(p.saved) & share.values for p in frontier.neighbours(limit))
    kept = less | _filling(problem, more - less, limit - _size(problem, less))
    return _without_saving(captured, share.values - kept, "the limit of its region")


def _counting(
    network: CutProblem, counted: frozenset[ValueId], problem: Problem
) -> CutProblem:
    """Return the network that counts the bytes of some values only, see `TILT`."""
    mine = np.array([value in counted for value in network.values], dtype=np.bool_)
    place = np.array(network.operations, dtype=np.float64) / len(problem.operations)
    return dataclasses.replace(
        network,
        sizes=np.where(mine, network.sizes, 0),
        costs=network.costs * (1.0 + TILT * place),
    )


def _filling(problem: Problem, values: Iterable[ValueId], room: int) -> set[ValueId]:
    """Return values that fit into what a choice leaves free, the largest first."""
    chosen = set()
    for value in sorted(values, key=lambda v: (-problem.values[v].size_bytes, -v)):
        if problem.values[value].size_bytes <= room:
            chosen.add(value)
            room -= problem.values[value].size_bytes
    return chosen


def _least(
    captured: Capture, share: ScopeShare, frontier: Frontier, options: Options
) -> int:
    """Return the least bytes that a scope can save, where that may stand for less."""
    least = frontier.points[-1]
    saved = sorted(set(least.saved) & share.values)
    names = [str(captured.value_nodes[v]) for v in saved]
    error = InfeasibleRegionError(
        region=share.scope.name,
        budget_bytes=share.limit_bytes or 0,
        floor_bytes=least.saved_bytes,
        alive=names,
    )
    if options.on_infeasible == "error":
        raise error
    log.warning("%s Taking the least.", error)
    return least.saved_bytes


def _without_saving(
    captured: Capture, hidden: Iterable[ValueId], reason: str
) -> Capture:
    values = list(captured.problem.values)
    refusals = dict(captured.refusals)
    for value in sorted(hidden):
        if values[value].savable:
            values[value] = dataclasses.replace(values[value], savable=False)
            refusals[value] = f"{reason} forbids to keep it"
    problem = dataclasses.replace(captured.problem, values=tuple(values))
    return dataclasses.replace(captured, problem=problem, refusals=refusals)


def _size(problem: Problem, values: Iterable[ValueId]) -> int:
    return sum(problem.values[value].size_bytes for value in values)
