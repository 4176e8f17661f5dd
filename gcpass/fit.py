"""Plans until the program that will run is within the budget; see `Search.run`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from torch import fx

from gcpass.budget import Budget, Bytes, Fraction, Minimum
from gcpass.capture import Capture
from gcpass.errors import InfeasibleBudgetError, SolverError
from gcpass.options import Options
from gcpass.plan_order import compile_in_plan_order
from gcpass.replay import Scheduled, UnreadableProgramError
from gcpass.request import current_request
from gcpass.rewrite import Split, rewrite
from gcpass.solvers.check import check
from gcpass.solvers.liveness import make_plan, simulate
from gcpass.solvers.problem import Plan, Solution
from gcpass.solvers.shares import Menu, Share, held_bytes
from gcpass.solvers.solve import Planner
from gcpass.torch_private import compile_fx_inner
from gcpass.verify import schedule

log = logging.getLogger("gcpass")

# Inductor keeps a dead buffer for a later one of the same size, which can lie on top of
# the peak: 54.9 instead of 47.6 MB on a small GPT; no difference in time was seen.
FREE_AT_ONCE = {"allow_buffer_reuse": False}
MAX_ROUNDS = 5  # of planning and reading the generated program
REFUSED_RATIO = 0.98  # of the bytes to plan for, after `check` refused a plan
SLACK = 0.02  # share of the budget that a plan may leave unused before one more round


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, rewritten, with the peak of the program that will run."""

    solution: Solution
    split: Split
    scheduled: Scheduled | None
    note: str

    @property
    def plan(self) -> Plan:
        """Return the plan; a candidate has one."""
        assert self.solution.plan is not None
        return self.solution.plan

    @property
    def peak_bytes(self) -> int:
        """Return the peak that counts: the scheduled one where it is known."""
        if self.scheduled is None:
            return self.plan.peak_bytes
        return self.scheduled.peak_bytes


@dataclass(slots=True, kw_only=True)
class Search:
    """Plans until the program that will run is within the budget.

    Attributes:
        joint_module: AOTAutograd's joint graph.
        captured: its problem. Where the share limits what is held, more is set aside
            between forward and backward than the caller needs.
        primals: inputs of the region, fake.
        static: which of them stay where they are.
        options: the user's.
        share: of a step with several executions.
        outside_bytes: what the caller needs between forward and backward.
        planner: of the problem.
        budget_bytes: limit of the region's peak, None without one.
        base_peak: of the fastest plan.
        base_held: what that plan holds between forward and backward.
        floor_bytes: the least peak reached.
        rounds: how often a program was read.
        verify_time_s: seconds that took.
    """

    joint_module: fx.GraphModule
    captured: Capture
    primals: list[Any]
    static: Any
    options: Options
    share: Share | None
    outside_bytes: int
    planner: Planner
    budget_bytes: int | None = None
    base_peak: int = 0
    base_held: int = 0
    floor_bytes: int = 0
    rounds: int = 0
    verify_time_s: float = 0.0

    def run(self) -> Candidate:
        """Return the candidate to use.

        Raises:
            InfeasibleBudgetError: no plan's program stays within the budget.
        """
        budget = self.options.budget
        if self.share is not None and self.share.plan is not None:
            self.planner.learn(self.share.plan)
        fastest = self._candidate(
            self.planner.solve(None),
            verify=isinstance(budget, Fraction) and self.share is None,
        )
        self.base_peak = fastest.peak_bytes
        self.base_held = held_between(self.captured, fastest)
        self.budget_bytes = self._limit(budget, fastest.peak_bytes)
        self.floor_bytes = self.own_peak(self.planner.floor)
        if self.budget_bytes is None and isinstance(budget, Minimum):
            return self._least()
        if self.budget_bytes is None:
            return fastest
        best = self._fit(self.budget_bytes)
        if best is not None:
            return best
        return self._infeasible(self.budget_bytes)

    def _limit(self, budget: Budget, base_peak: int) -> int | None:
        """Return this region's bytes."""
        if self.share is not None:
            return self.share.peak_bytes
        if isinstance(budget, Bytes):
            return budget.size_bytes
        if isinstance(budget, Fraction):
            return int(budget.of_peak * base_peak)
        return None

    def own_peak(self, plan: Plan) -> int:
        """Return a plan's peak without what is set aside to limit what it holds."""
        problem = self.captured.with_between(self.outside_bytes).problem
        return make_plan(problem, plan.sequence, plan.boundary, "").peak_bytes

    def own_scheduled_peak(self, candidate: Candidate) -> int | None:
        """Return the same of the program that will run, None where it is unknown."""
        found = candidate.scheduled
        if found is None:
            return None
        set_aside = self.captured.problem.between_bytes - self.outside_bytes
        between = found.between_bytes - set_aside
        return max(found.forward_bytes, between, found.backward_bytes)

    def leanest(self) -> Split:
        """Return the split of a plan that holds as few bytes as possible."""
        menu = Menu(problem=self.captured.problem, planner=self.planner.on)
        plan = menu.leanest()
        return self._split(plan, keep_apart=False)

    def _fit(self, budget_bytes: int) -> Candidate | None:
        """Return the cheapest candidate whose program is within the budget."""
        best: Candidate | None = None
        target = budget_bytes
        tried: set[tuple[int, ...]] = set()
        for _ in range(MAX_ROUNDS):
            solution = self.planner.solve(max(target, self.planner.floor.peak_bytes))
            assert solution.plan is not None
            if solution.plan.sequence in tried:
                break
            tried.add(solution.plan.sequence)
            try:
                candidate = self._candidate(solution, verify=True, limit=target)
            except SolverError as error:  # a fault of the solver: not this plan, then
                if self.options.strict:
                    raise
                log.warning("a plan was refused and another is made: %s", error)
                target = int(target * REFUSED_RATIO)
                continue
            left = budget_bytes - candidate.peak_bytes
            if left < 0:
                if target <= self.planner.floor.peak_bytes:
                    break
                target = min(target, solution.plan.peak_bytes) + left
                continue
            if best is None or candidate.plan.cost_seconds < best.plan.cost_seconds:
                best = candidate
            free = solution.plan.cost_seconds <= self.planner.fastest.cost_seconds
            if candidate.scheduled is None or left <= SLACK * budget_bytes or free:
                break
            target = solution.plan.peak_bytes + left
        floor = self.planner.floor
        if best is not None and floor.cost_seconds < best.plan.cost_seconds:
            # Lowering the target overshot: a larger budget must not cost more.
            least = self._floor_candidate()
            if least.peak_bytes <= budget_bytes:
                best = least
        return best

    def _least(self) -> Candidate:
        """Return the candidate of the least peak, and take its peak for the floor."""
        least = self._floor_candidate()
        scheduled = self.own_scheduled_peak(least)
        self.floor_bytes = self.own_peak(least.plan) if scheduled is None else scheduled
        return least

    def _floor_candidate(self) -> Candidate:
        floor = self.planner.floor.peak_bytes
        return self._candidate(self.planner.solve(floor), verify=True)

    def _infeasible(self, budget_bytes: int) -> Candidate:
        least = self._least()
        if least.peak_bytes <= budget_bytes:
            return least
        others = 0 if self.share is None else self.share.others_bytes
        if self.options.takes_floor:
            if not isinstance(self.options.budget, Minimum):
                log.warning(
                    "budget of %d bytes is under the floor of %d: taking the floor",
                    budget_bytes + others,
                    least.peak_bytes + others,
                )
            return least
        raise InfeasibleBudgetError(
            budget_bytes=max(budget_bytes + others, 0),
            floor_bytes=least.peak_bytes + others,
            alive=_alive_at_peak(self.captured, least.plan),
            held_bytes=others,
        )

    def _candidate(
        self,
        solution: Solution,
        *,
        verify: bool,
        limit: int | None = None,
    ) -> Candidate:
        """Return a checked and rewritten plan, with its program's peak if asked for.

        Args:
            solution: has a plan.
            verify: read the program (unless the user switched that off).
            limit: bytes that fusion may make use of, None for the plan's own peak.
        """
        assert solution.plan is not None
        split = self._split(
            solution.plan,
            keep_apart=self.options.codegen == "inductor",
            limit=limit,
        )
        scheduled, note = None, "not verified"
        if verify and self.options.verify:
            scheduled, note = self._schedule(split)
        return Candidate(solution=solution, split=split, scheduled=scheduled, note=note)

    def _split(
        self, plan: Plan, *, keep_apart: bool, limit: int | None = None
    ) -> Split:
        check(self.captured.problem, plan, None)
        return rewrite(
            self.joint_module,
            self.captured,
            plan,
            keep_apart=keep_apart,
            limit_bytes=limit,
            static_lifetime_input_nodes=self.static,
        )

    def _schedule(self, split: Split) -> tuple[Scheduled | None, str]:
        started = time.monotonic()
        self.rounds += 1
        in_order = current_request.get() is not None
        try:
            found = schedule(
                split,
                self.primals,
                num_outputs=self.captured.num_fwd_outputs,
                outside_bytes=self.captured.problem.between_bytes,
                codegen=self.options.codegen,
                inner_compile=compile_in_plan_order if in_order else compile_fx_inner,
            )
        except UnreadableProgramError as error:
            log.warning("the scheduled peak is unknown: %s", error)
            return None, str(error)
        finally:
            elapsed = time.monotonic() - started
            self.verify_time_s += elapsed
            self.planner.deadline += elapsed  # the limit is on solving
        return found, ""


def held_between(captured: Capture, candidate: Candidate) -> int:
    """Return the bytes alive between forward and backward."""
    if candidate.scheduled is not None:
        return candidate.scheduled.held_bytes
    return held_bytes(captured.problem, candidate.plan)


def _alive_at_peak(captured: Capture, plan: Plan) -> tuple[str, ...]:
    """Return the largest values alive at the plan's peak, with their bytes."""
    profile = simulate(captured.problem, plan.sequence, plan.boundary)
    alive = [
        (captured.problem.values[i.value].size_bytes, i.value)
        for i in profile.instances
        if not i.virtual and i.start <= profile.peak_step <= i.end
    ]
    names = []
    for size, value in sorted(alive, key=lambda item: (-item[0], item[1]))[:8]:
        node = captured.value_nodes[value]
        name = node.name if node is not None else f"value {value}"
        names.append(f"{name} ({size / 1e6:.2f} MB)")
    return tuple(names)
