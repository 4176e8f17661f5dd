"""One budget for several problems: the compiled regions that run in one step.

Regions run forward one after the other and backward the other way round. While one of
them runs, those before it hold what they saved, and those after it have left their
gradients. So for every execution i of an order of executions

    sum of held_bytes before i + peak_bytes of i + sum of gradient_bytes after i

is at most the budget. A region that runs several times has one plan for all of them.

Each region offers a menu of plans that trade time for held bytes and for peak, solved
with `Problem.between_bytes`: with p - h bytes set aside at the boundary, a budget of p
limits the held bytes to h. A small integer program takes one from each menu, and the
menus are refined around what it took.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcpass.solvers.errors import SolverError
from gcpass.solvers.ilp_model import cp_model
from gcpass.solvers.liveness import make_plan, simulate
from gcpass.solvers.problem import Origin, Plan, Problem
from gcpass.solvers.solve import Planner

LEVELS = 4  # of held bytes and of peaks in a menu, besides the largest of each
REFINEMENTS = 3
RESERVE = 0.02  # of the budget, left for what the generated programs need beyond plans
COST_UNITS = 10**9  # the integer program's, for all fastest plans together

Order = Sequence[int]  # members in the order of their forwards, with repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one plan of a region costs and needs.

    Attributes:
        cost_seconds: time of its forward and backward.
        held_bytes: alive between forward and backward: saved values and outputs.
        peak_bytes: largest number of bytes alive while it runs.
        plan: the plan, None where it is fixed.
    """

    cost_seconds: float
    held_bytes: int
    peak_bytes: int
    plan: Plan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A region's part of a budget.

    Attributes:
        peak_bytes: limit while it runs.
        held_bytes: limit between its forward and backward, None where no other region
            with a budget runs meanwhile.
        others_bytes: what the other executions of the step need at most meanwhile.
        executions: how often the step runs it.
        cost_seconds: of the plan that the division counts on.
        plan: that plan, None where the region's plan is fixed.
    """

    peak_bytes: int
    held_bytes: int | None
    others_bytes: int
    executions: int
    cost_seconds: float
    plan: Plan | None


def held_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes alive between forward and backward."""
    profile = simulate(problem, plan.sequence, plan.boundary)
    return sum(
        problem.values[i.value].size_bytes
        for i in profile.instances
        if i.start < plan.boundary and (i.saved or problem.values[i.value].held)
    )


def set_aside_bytes(problem: Problem, peak_limit: int, held_limit: int) -> int:
    """Return the `between_bytes` with which a peak within one limit keeps the other."""
    arriving = sum(v.size_bytes for v in problem.values if v.origin is Origin.TANGENT)
    return max(problem.between_bytes, peak_limit - arriving - held_limit)


@dataclass(slots=True, kw_only=True)
class Menu:
    """Plans of one region, made as they are asked for.

    Attributes:
        problem: the region's.
        planner: makes a planner for a problem, as the region will be planned.
    """

    problem: Problem
    planner: Callable[[Problem], Planner]
    _found: dict[Choice, None] = field(default_factory=dict)
    _planners: dict[int, Planner] = field(default_factory=dict)
    _asked: set[tuple[int, int]] = field(default_factory=set)
    _filled: bool = False

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the plans that no other one beats in everything."""
        found = sorted(self._found, key=_numbers)
        kept: list[Choice] = []
        for choice in found:
            if not any(_beats(other, choice) for other in kept):
                kept.append(choice)
        return tuple(kept)

    def fastest(self) -> Choice:
        """Return the plan without a limit."""
        return self._add(self._quick(self.problem.between_bytes).fastest)

    def leanest(self) -> Plan:
        """Return the plan that holds the fewest bytes, whatever its peak."""
        plan = self._own(self.planner(self._problem(self._loose())).floor)
        self._add(plan)
        return plan

    def fill(self) -> None:
        """Make plans from the fastest down to the least peak and the fewest bytes."""
        if self._filled:
            return
        self._filled = True
        fastest = self.fastest()
        floor = self._add(self.planner(self.problem).floor)
        lean = self._add(self.leanest())
        top = fastest.peak_bytes
        for limit in _levels(floor.peak_bytes, top):
            self.ask(limit, limit)
        for held in _levels(lean.held_bytes, fastest.held_bytes):
            self.ask(held, held + 2 * top)
            for limit in ((floor.peak_bytes + top) // 2, floor.peak_bytes):
                self.ask(held, limit)

    def ask(self, held_limit: int, peak_limit: int) -> None:
        """Make the cheapest plan found within both limits, unless there is one."""
        spare = set_aside_bytes(self.problem, peak_limit, held_limit)
        if (spare, peak_limit) in self._asked:
            return
        self._asked.add((spare, peak_limit))
        plan = self._quick(spare).solve(peak_limit).plan
        if plan is not None:
            self._add(plan)

    def _loose(self) -> int:
        """Return spare bytes that leave the boundary as the only limit."""
        return self.problem.between_bytes + self.fastest().peak_bytes

    def _quick(self, between_bytes: int) -> Planner:
        """Return a planner that leaves out what is slow and seldom changes a share."""
        if between_bytes not in self._planners:
            planner = self.planner(self._problem(between_bytes))
            if planner.method == "auto":
                planner.method = "min_cut"
            self._planners[between_bytes] = planner
        return self._planners[between_bytes]

    def _problem(self, between_bytes: int) -> Problem:
        return dataclasses.replace(self.problem, between_bytes=between_bytes)

    def _own(self, plan: Plan) -> Plan:
        """Return a plan of other bytes between, priced as one of this problem."""
        return make_plan(self.problem, plan.sequence, plan.boundary, plan.origin)

    def _add(self, plan: Plan) -> Choice:
        own = self._own(plan)
        choice = Choice(
            cost_seconds=own.cost_seconds,
            held_bytes=held_bytes(self.problem, own),
            peak_bytes=own.peak_bytes,
            plan=own,
        )
        self._found[choice] = None
        return choice


@dataclass(slots=True, kw_only=True)
class Member:
    """A region of a step.

    Attributes:
        menu: its plans; one choice alone when its plan is fixed.
        gradient_bytes: of its parameters: they stay after its backward.
        limited: it has a budget; without one it is in the way of others only.
    """

    menu: Menu | Choice
    gradient_bytes: int
    limited: bool = True

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return its plans so far."""
        return (self.menu,) if isinstance(self.menu, Choice) else self.menu.choices


def fastest_peak(members: Sequence[Member], orders: Sequence[Order]) -> int:
    """Return the step's peak when every region runs its fastest plan."""
    menus = [m.menu for m in members]
    picks = [m if isinstance(m, Choice) else m.fastest() for m in menus]
    return max(
        before + picks[order[i]].peak_bytes + after
        for order in orders
        for i, before, after in _moments(members, picks, order)
    )


def least_peak(
    members: Sequence[Member], orders: Sequence[Order], deadline: float = math.inf
) -> int:
    """Return the least peak of the step that the menus reach, and refine them for it.

    Raises:
        SolverError: ortools is missing or found nothing.
    """
    _fill(members, deadline)
    least = 0
    for _ in range(REFINEMENTS):
        picks = _pick(members, orders, None)
        assert picks is not None, "without a budget every choice is allowed"
        least = _limited_peak(members, picks, orders)
        _refine(members, picks, orders, [least] * len(members), deadline)
    picks = _pick(members, orders, None)
    assert picks is not None
    return min(least, _limited_peak(members, picks, orders))


def divide(
    members: Sequence[Member],
    orders: Sequence[Order],
    budgets: Sequence[int],
    *,
    reserve: float = RESERVE,
    deadline: float = math.inf,
) -> tuple[Share, ...] | None:
    """Return each region's share of a step, None when no plans found fit.

    Args:
        members: the regions.
        orders: of the executions of steps that must all fit.
        budgets: of each region's moments, in bytes; ignored where it has no limit.
        reserve: part of the budgets that plans leave free where they can; above
            `RESERVE` they must.
        deadline: `time.monotonic()` after which menus are no longer refined.

    Raises:
        SolverError: ortools is missing or found nothing.
    """
    _fill(members, deadline)
    allowed = [[int(b / (1 + reserve)) for b in budgets]]
    if reserve <= RESERVE:
        allowed.append(list(budgets))
    if not any(_pick(members, orders, limits) for limits in allowed):
        least_peak(members, orders, deadline)  # refines menus where they end
    picks: tuple[Choice, ...] | None = None
    for _ in range(REFINEMENTS + 1):
        found = (_pick(members, orders, limits) for limits in allowed)
        picks = next((picks for picks in found if picks is not None), None)
        if picks is None:
            return None
        if all(p == _cheapest(m) for p, m in zip(picks, members, strict=True)):
            break
        _refine(members, picks, orders, budgets, deadline)
    assert picks is not None
    return _shares(members, picks, orders, budgets, reserve)


def _numbers(choice: Choice) -> tuple[float, int, int]:
    return choice.cost_seconds, choice.held_bytes, choice.peak_bytes


def _beats(other: Choice, choice: Choice) -> bool:
    return (
        other.cost_seconds <= choice.cost_seconds
        and other.held_bytes <= choice.held_bytes
        and other.peak_bytes <= choice.peak_bytes
    )


def _levels(low: int, high: int) -> list[int]:
    return sorted({low + (high - low) * k // LEVELS for k in range(LEVELS)})


def _cheapest(member: Member) -> Choice:
    return min(member.choices, key=_numbers)


def _fill(members: Sequence[Member], deadline: float) -> None:
    for member in members:
        if isinstance(member.menu, Menu):
            if time.monotonic() <= deadline:
                member.menu.fill()
            else:
                member.menu.leanest()


def _refine(
    members: Sequence[Member],
    picks: Sequence[Choice],
    orders: Sequence[Order],
    budgets: Sequence[int],
    deadline: float,
) -> None:
    """Ask for plans near the picks, with the peaks that the others leave free."""
    rooms = _rooms(members, picks, orders, budgets)
    for member, pick, room in zip(members, picks, rooms, strict=True):
        if not isinstance(member.menu, Menu) or room is None:
            continue
        levels = sorted({c.held_bytes for c in member.choices})
        at = levels.index(pick.held_bytes)
        near = [levels[i] for i in (at - 1, at + 1) if 0 <= i < len(levels)]
        for held in (pick.held_bytes, *((pick.held_bytes + n) // 2 for n in near)):
            if time.monotonic() > deadline:
                return
            # What this region no longer holds it has while it runs, where its own
            # earlier executions held it.
            member.menu.ask(held, room)
            member.menu.ask(held, room + pick.held_bytes - held)


def _moments(
    members: Sequence[Member], picks: Sequence[Choice], order: Order
) -> Iterable[tuple[int, int, int]]:
    """Yield, for each execution, its place and the bytes before and after it."""
    held = [picks[m].held_bytes for m in order]
    left = [members[m].gradient_bytes for m in order]
    before = [0, *itertools.accumulate(held)]
    total = sum(left)
    after = [total - x for x in itertools.accumulate(left)]
    return [(i, before[i], after[i]) for i in range(len(order))]


def _rooms(
    members: Sequence[Member],
    picks: Sequence[Choice],
    orders: Sequence[Order],
    budgets: Sequence[int],
) -> list[int | None]:
    """Return the peak that each region may have while the others keep their picks."""
    rooms: list[int | None] = [None] * len(members)
    for order in orders:
        for i, before, after in _moments(members, picks, order):
            m = order[i]
            if members[m].limited:
                room, known = budgets[m] - before - after, rooms[m]
                rooms[m] = room if known is None else min(known, room)
    return rooms


def _limited_peak(
    members: Sequence[Member], picks: Sequence[Choice], orders: Sequence[Order]
) -> int:
    return max(
        before + picks[order[i]].peak_bytes + after
        for order in orders
        for i, before, after in _moments(members, picks, order)
        if members[order[i]].limited
    )


def _pick(
    members: Sequence[Member], orders: Sequence[Order], budgets: Sequence[int] | None
) -> tuple[Choice, ...] | None:
    """Return the cheapest choice of all within the budgets, None if there is none.

    Without budgets, that of the least peak, and the cheapest of those.
    """
    cp = cp_model()
    model = cp.CpModel()
    menus = [m.choices for m in members]
    taken = [[model.NewBoolVar("") for _ in menu] for menu in menus]
    for variables in taken:
        model.AddExactlyOne(variables)
    most = sum(
        max(c.held_bytes + c.peak_bytes for c in menus[m]) + members[m].gradient_bytes
        for order in orders
        for m in order
    )
    peak = model.NewIntVar(0, most, "")

    def total(member: int, amounts: Sequence[int]) -> Any:
        return sum(x * a for x, a in zip(taken[member], amounts, strict=True))

    for order in orders:
        for i, m in enumerate(order):
            if not members[m].limited:
                continue
            terms = [total(m, [c.peak_bytes for c in menus[m]])]
            terms += [total(j, [c.held_bytes for c in menus[j]]) for j in order[:i]]
            after = sum(members[j].gradient_bytes for j in order[i + 1 :])
            limit = peak if budgets is None else budgets[m]
            model.Add(sum(terms) + after <= limit)
    counts = [max(list(o).count(m) for o in orders) for m in range(len(members))]
    base = math.fsum(
        n * _cheapest(m).cost_seconds for n, m in zip(counts, members, strict=True)
    )
    unit = COST_UNITS / base if base else 0.0
    cost = sum(
        total(m, [round(n * unit * c.cost_seconds) for c in menus[m]])
        for m, n in enumerate(counts)
    )
    objectives = [cost] if budgets is not None else [peak, cost]
    solver = _solver(cp)
    for objective in objectives:
        model.Minimize(objective)
        status = solver.Solve(model)
        if status == cp.INFEASIBLE:
            return None
        if status != cp.OPTIMAL:
            raise SolverError(f"dividing the budget: {solver.StatusName(status)}")
        if objective is peak:
            model.Add(peak <= round(solver.ObjectiveValue()))
    return tuple(
        next(c for c, x in zip(menu, variables, strict=True) if solver.Value(x))
        for menu, variables in zip(menus, taken, strict=True)
    )


def _solver(cp: Any) -> Any:
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    return solver


def _shares(
    members: Sequence[Member],
    picks: Sequence[Choice],
    orders: Sequence[Order],
    budgets: Sequence[int],
    reserve: float,
) -> tuple[Share, ...]:
    """Return limits that fit together: the picks' held bytes and a little, and peaks.

    A region holds what its plan holds, in a few large steps; more room for it would be
    left over, and is given to the peaks.
    """
    cheapest = all(p == _cheapest(m) for p, m in zip(picks, members, strict=True))
    scale = math.inf if cheapest else 1 + reserve
    for order in orders:
        for i, before, after in _moments(members, picks, order):
            m = order[i]
            if members[m].limited:
                need = before + picks[m].peak_bytes
                scale = min(scale, (budgets[m] - after) / max(1, need))
    scaled = [
        dataclasses.replace(p, held_bytes=int(p.held_bytes * scale)) if m.limited else p
        for p, m in zip(picks, members, strict=True)
    ]
    rooms = _rooms(members, scaled, orders, budgets)
    shares = []
    for m, (room, choice) in enumerate(zip(rooms, scaled, strict=True)):
        peak = choice.peak_bytes if room is None else room
        precedes = any(
            members[later].limited
            for order in orders
            for i, earlier in enumerate(order)
            if earlier == m
            for later in order[i + 1 :]
        )
        shares.append(
            Share(
                peak_bytes=peak,
                held_bytes=choice.held_bytes if precedes else None,
                others_bytes=0 if room is None else budgets[m] - room,
                executions=max(list(order).count(m) for order in orders),
                cost_seconds=choice.cost_seconds,
                plan=choice.plan,
            )
        )
    return tuple(shares)
