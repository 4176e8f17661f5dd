"""Several regions in one step, or one that runs several times, share one budget.

A graph break splits a model into regions that are compiled one after the other, each
when it first runs; a layer that is compiled by itself is one region that a step runs
once per layer. An execution is *open* from its forward until its backward starts: what
it holds then is memory that no other has.

What a step runs is known after its first forward. A region that is followed by another
one, or runs while others are open, therefore runs operation by operation in the first
step, holding as little as it can. When the backward has reached the first region the
budget is divided (`gcpass.solvers.shares`), and each region is compiled for its share
when it runs next. A later step that runs more is counted in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gcpass import store
from gcpass.budget import Bytes, Fraction, Minimum, Unlimited
from gcpass.collector import paused_collector
from gcpass.compiler import Compiled, RegionCompiler, Run
from gcpass.decisions import RegionPlan
from gcpass.errors import GcpassError, InfeasibleBudgetError
from gcpass.solvers.problem import Problem
from gcpass.solvers.shares import (
    RESERVE,
    Choice,
    Member,
    Menu,
    Share,
    divide,
    fastest_peak,
    least_peak,
)
from gcpass.solvers.solve import Planner
from gcpass.torch_private import (
    FakeTensor,
    in_backward,
    saves_through_hooks,
    surfaced,
)

log = logging.getLogger("gcpass")

RESERVE_GROWTH = 3  # of what is held back, after a program that needs too much
LARGEST_RESERVE = 0.2


def compile_region(
    compiler: RegionCompiler, example_inputs: Sequence[Any], *, followed: bool
) -> Run:
    """Return a region that takes its share of the step that it runs in.

    Args:
        compiler: of the region.
        example_inputs: of its first call.
        followed: the code goes on after it, by another region as a rule.
    """
    options = compiler.options
    limited = not isinstance(options.budget, Unlimited)
    if limited and not in_backward() and (followed or open_executions()):
        counted = compiler.count()
        if counted.problem is not None:
            return _Region(compiler, counted=counted)
    elif limited and options.calls_per_step > 1:
        counted = compiler.count()
        if counted.problem is not None:
            region = _Region(compiler, counted=counted)
            _share_out([(region,) * options.calls_per_step])
            while not region.recompile(example_inputs):
                pass  # with another share
            return region
    try:
        compiled = compiler.compile(None, example_inputs)
    except InfeasibleBudgetError as error:
        # A fraction is one of the whole step, of which this may be a small part.
        if not isinstance(options.budget, Fraction) or compiler.ends_in_loss:
            raise
        return _Region(compiler, counted=compiler.count(), refused=error)
    if compiled.plan is None:
        return compiled.run
    return _Region(compiler, compiled=compiled)


def forget() -> None:
    """Forget what is open (tests)."""
    global _grown
    with _lock:
        _grown = False
        _open.clear()
        _unplanned.clear()


class _Region:
    """A compiled region: called with its inputs."""

    def __init__(
        self,
        compiler: RegionCompiler,
        *,
        compiled: Compiled | None = None,
        counted: Compiled | None = None,
        refused: InfeasibleBudgetError | None = None,
    ) -> None:
        self.options = compiler.options
        self.limited = not isinstance(self.options.budget, Unlimited)
        self.gradient_bytes = compiler.gradient_bytes
        # What is never compiled again needs nothing to do it with.
        self.compiler = compiler if self.limited else None
        self.orders: tuple[_Order, ...] = () if compiled is None else ((self,),)
        self.share: Share | None = None
        self.reserve = RESERVE
        self.refused = refused  # had it been alone in its step
        self.problem: Problem | None = None
        self.plan: RegionPlan | None = None
        self._run: Run | None = None
        self._counting: Run | None = None
        self._compiled_for: Share | None = None
        self._latest: Run | None = None
        if compiled is not None:
            self._take(compiled)
        if counted is not None:
            self._counting, self.problem = counted.run, counted.problem

    def __call__(self, *arguments: Any) -> Any:
        """Run the region, first compiling it when its share has changed."""
        with _lock:
            recomputes = in_backward()
            run = self._latest if self._must_not_change(recomputes) else None
            run = run or self._ready(alone=recomputes)
            self._latest = run
        results = run(*arguments)
        if not recomputes:
            _opened(self, results)
        return results

    def planned_problem(self) -> Problem | None:
        """Return the region's problem, which a compile cache does not know."""
        if self.problem is None and self.compiler is not None:
            self._count(self.compiler)
        return self.problem

    def take_all(self) -> None:
        """Take the whole budget: the region is alone in its step.

        Raises:
            InfeasibleBudgetError: no plan of the region is within it.
        """
        if self.refused is not None:
            raise self.refused
        planner, budget = _planner(self), self.options.budget
        if planner is not None and self.plan is None and isinstance(budget, Bytes):
            floor = planner.floor.peak_bytes
            if floor > budget.size_bytes and not self.options.takes_floor:
                raise InfeasibleBudgetError(
                    budget_bytes=budget.size_bytes, floor_bytes=floor
                )
        self.orders = ((self,),)

    def fits(self, share: Share, fastest_seconds: float) -> bool:
        """Return whether the plan that it has is within the share and as fast."""
        plan = self.plan
        if plan is None or plan.peak_bytes > share.peak_bytes:
            return False
        if share.held_bytes is not None and plan.held_bytes > share.held_bytes:
            return False
        return 1 + plan.overhead <= share.cost_seconds / (fastest_seconds or 1.0) + 1e-6

    def keep(self, share: Share) -> None:
        """Take a share that the plan fits, and show what else the step needs."""
        self.share = self._compiled_for = share
        if self.plan is not None:
            self.plan = replace(
                self.plan,
                budget_bytes=share.peak_bytes,
                others_bytes=share.others_bytes,
                executions=share.executions,
            )
            store.record(self.plan)

    def recompile(self, example_inputs: Sequence[Any] | None = None) -> bool:
        """Compile for the share, or ask for another; return whether it is compiled.

        A program may need more than was predicted of its plan. The budget is divided
        again then, with more held back.

        Raises:
            InfeasibleBudgetError: that was done before, and did not help.
        """
        assert self.compiler is not None, "a region without a budget has no share"
        try:
            with surfaced(GcpassError):
                self._take(self.compiler.compile(self.share, example_inputs))
        except InfeasibleBudgetError:
            self.reserve *= RESERVE_GROWTH
            if self.share is None or self.reserve > LARGEST_RESERVE:
                raise
            _share_out(self.orders)
            return False
        self._compiled_for = self.share
        return True

    def _ready(self, *, alone: bool) -> Run:
        """Return what to run now.

        Args:
            alone: whatever is open.
        """
        opened = [] if alone else open_executions()
        if not opened and not alone:
            _plan_what_is_new(may_compile=True)
        if self.compiler is None:
            assert self._run is not None, "a region without a budget is compiled"
            return self._run
        if self._knows((*(e.region for e in opened), self)):
            current = self._run is not None and self._compiled_for == self.share
            if current or self.recompile():
                assert self._run is not None
                return self._run
        if self._counting is None:
            self._count(self.compiler)
        assert self._counting is not None
        return self._counting

    def _must_not_change(self, recomputes: bool) -> bool:
        """Return whether a checkpoint counts on it.

        One that recomputes expects the region to save as many tensors as it did in the
        forward, in all calls.
        """
        if recomputes:
            return True
        return saves_through_hooks() and any(
            e.region is self for e in open_executions()
        )

    def _knows(self, order: _Order) -> bool:
        return any(_is_part(order, known) for known in self.orders)

    def _count(self, compiler: RegionCompiler) -> None:
        with surfaced(GcpassError):
            counted = compiler.count()
        self._counting, self.problem = counted.run, counted.problem

    def _take(self, compiled: Compiled) -> None:
        self._run, self.plan = compiled.run, compiled.plan
        self.problem = compiled.problem or self.problem


_Order = tuple[_Region, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Execution:
    region: _Region
    node: weakref.ref[Any]  # of the autograd graph: it dies with what is held


_lock = threading.RLock()
_open: list[_Execution] = []  # in the order of their forwards
_unplanned: list[_Order] = []  # that the running step has shown
_grown = False  # the last event was a forward


def open_executions() -> list[_Execution]:
    """Return the open executions; those whose results were dropped are none."""
    with _lock:
        if any(e.node() is None for e in _open):
            _note_order()
            _open[:] = [e for e in _open if e.node() is not None]
        return list(_open)


def _opened(region: _Region, results: Any) -> None:
    """Note that a forward has run; the start of its backward takes it back."""
    global _grown
    node = _autograd_node(results)
    if node is None:
        return
    try:
        execution = _Execution(region, weakref.ref(node))
    except TypeError:  # not every node can be referenced weakly: count nothing
        return
    with _lock:
        _open.append(execution)
        _grown = True
    node.register_prehook(lambda gradients: _backward_started(execution))


def _backward_started(execution: _Execution) -> None:
    with _lock:
        if execution not in _open:
            return
        _note_order()
        _open.remove(execution)
        if not _open:
            _plan_what_is_new(may_compile=False)


def _note_order() -> None:
    """Remember what is open, where that is the most of it and not planned for."""
    global _grown
    order = tuple(e.region for e in _open)
    if _grown and not any(_is_part(order, known) for known in order[-1].orders):
        _unplanned.append(order)
    _grown = False


def _plan_what_is_new(*, may_compile: bool) -> None:
    """Plan for the orders that were seen.

    Args:
        may_compile: False within a backward, which is no place to compile a region.
    """
    regions = [r for order in _unplanned for r in order if r.limited]
    if not may_compile and any(r.problem is None for r in regions):
        return
    orders = list(dict.fromkeys(_unplanned))
    _unplanned.clear()
    if regions:
        with paused_collector():
            _share_out(orders)


def _share_out(new: Sequence[_Order]) -> None:
    """Divide the budgets over all regions of the orders, old orders included.

    Raises:
        InfeasibleBudgetError: no plans of the regions are within a budget together.
    """
    orders = _together(new)
    regions = list(dict.fromkeys(r for order in orders for r in order))
    if orders == [(regions[0],)]:
        regions[0].take_all()
        return
    planners = [_planner(r) for r in regions]
    members = [
        Member(
            menu=(
                _fixed_choice(r) if p is None else Menu(problem=p.problem, planner=p.on)
            ),
            gradient_bytes=r.gradient_bytes,
            limited=r.limited,
        )
        for r, p in zip(regions, planners, strict=True)
    ]
    numbered = [[regions.index(r) for r in order] for order in orders]
    shares = _divide(regions, members, numbered)
    for region, member, share in zip(regions, members, shares, strict=True):
        region.orders = tuple(o for o in orders if region in o)
        if isinstance(member.menu, Choice):
            continue
        if region.fits(share, member.menu.fastest().cost_seconds):
            region.keep(share)
        else:
            region.share = share
    log.info(
        "%d regions share a step of %d executions",
        len(regions),
        max(len(order) for order in orders),
    )


def _divide(
    regions: Sequence[_Region], members: Sequence[Member], orders: list[list[int]]
) -> tuple[Share, ...]:
    deadline = time.monotonic() + max(r.options.time_limit_s for r in regions)
    base = fastest_peak(members, orders)
    least = None
    budgets = []
    for region in regions:
        budget = region.options.budget
        if isinstance(budget, Bytes):
            budgets.append(budget.size_bytes)
        elif isinstance(budget, Fraction):
            budgets.append(int(budget.of_peak * base))
        elif isinstance(budget, Minimum):
            least = least or least_peak(members, orders, deadline)
            budgets.append(least)
        else:
            budgets.append(0)  # has none
    reserve = max(r.reserve for r in regions)
    shares = divide(members, orders, budgets, reserve=reserve, deadline=deadline)
    if shares is not None:
        return shares
    least = least_peak(members, orders, deadline)
    limited = [(r, b) for r, b in zip(regions, budgets, strict=True) if r.limited]
    if not all(r.options.takes_floor for r, _ in limited):
        raise InfeasibleBudgetError(
            budget_bytes=min(b for _, b in limited),
            floor_bytes=int(least * (1 + reserve)) + 1,
            executions=max(map(len, orders)),
        )
    log.warning("a budget is under the floor of %d bytes: taking the floor", least)
    budgets = [max(b, least) for b in budgets]
    shares = divide(members, orders, budgets, deadline=deadline)
    assert shares is not None, "the least peak is reached by plans in the menus"
    return shares


def _planner(region: _Region) -> Planner | None:
    """Return the planner of a region, None where its plan is fixed."""
    problem = region.planned_problem() if region.limited else None
    if problem is None:
        return None
    options = region.options
    return Planner(
        problem=problem,
        method=options.solver,
        strict=options.strict,
        deadline=time.monotonic() + options.time_limit_s,
    )


def _fixed_choice(region: _Region) -> Choice:
    assert region.plan is not None, "a region without a budget is compiled at once"
    return Choice(
        cost_seconds=0.0,
        held_bytes=region.plan.held_bytes,
        peak_bytes=region.plan.peak_bytes,
    )


def _together(new: Iterable[_Order]) -> list[_Order]:
    """Return the orders with all that their regions were planned for before."""
    orders = list(new)
    regions = [r for order in orders for r in order]
    for region in regions:  # grows
        for order in region.orders:
            if order not in orders:
                orders.append(order)
                regions.extend(r for r in order if r not in regions)
    return [
        order
        for i, order in enumerate(orders)
        if not any(
            _is_part(order, other) and (order != other or j < i)
            for j, other in enumerate(orders)
            if j != i
        )
    ]


def _is_part(order: _Order, whole: _Order) -> bool:
    """Return whether the one is the other with executions left out."""
    rest = iter(whole)
    return all(any(r is w for w in rest) for r in order)


def _autograd_node(results: Any) -> Any:
    items: Sequence[Any] = results if isinstance(results, (list, tuple)) else (results,)
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if any(isinstance(t, FakeTensor) for t in tensors):
        return None  # torch traces it: DistributedDataParallel does while it compiles
    return next((t.grad_fn for t in tensors if t.grad_fn is not None), None)
