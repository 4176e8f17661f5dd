"""The partitioner: capture, solve, check, rewrite, verify; read `partition` first."""

from __future__ import annotations

import contextvars
import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gcpass import decisions, store
from gcpass.budget import Budget, Bytes, Fraction, Minimum, Unlimited
from gcpass.capture import (
    Capture,
    capture,
    output_nodes,
    snapshot_mutated_inputs,
)
from gcpass.decisions import RegionPlan
from gcpass.errors import InfeasibleBudgetError, SolverError
from gcpass.fusion import compile_in_plan_order
from gcpass.joint_graph import device_of, has_backward, mutated_inputs, prepare
from gcpass.options import Options
from gcpass.regions import apply_scopes
from gcpass.replay import Scheduled, UnreadableProgramError
from gcpass.rewrite import Split, rewrite
from gcpass.sizes import storage_bytes
from gcpass.solvers.check import check
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import Plan, Solution
from gcpass.solvers.solve import Planner
from gcpass.step import Held
from gcpass.torch_private import (
    compile_fx_inner,
    compile_id,
    default_partition,
    inductor_config,
    is_tangent,
    static_inputs,
)
from gcpass.verify import schedule

log = logging.getLogger("gcpass")

# Inductor keeps a dead buffer for a later one of the same size, which can lie on top of
# the peak: 54.9 instead of 47.6 MB on a small GPT; no difference in time was seen.
FREE_AT_ONCE = {"allow_buffer_reuse": False}
MAX_ROUNDS = 5  # of planning and reading the generated program
OUTSIDE_COPIES = 3  # of the outputs, kept free for a loss outside of the region
OUTSIDE_SHARE = 0.15  # of the fastest plan's peak: not more than this is kept free
REFUSED_RATIO = 0.98  # of the bytes to plan for, after `check` refused a plan
SLACK = 0.02  # share of the budget that a plan may leave unused before one more round


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the backend knows about a compilation that the graph does not say.

    Attributes:
        key: of the sidecar that shows the plan after a cache hit.
        made: plans made for it; none when a compile cache had the result.
    """

    key: str
    made: list[RegionPlan] = field(default_factory=list)


current_request: contextvars.ContextVar[Request | None] = contextvars.ContextVar(
    "gcpass_request", default=None
)


def partition(
    joint_module: fx.GraphModule,
    joint_inputs: Sequence[Any],
    options: Options,
    earlier: Held,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward modules of the plan for one region."""
    started = time.monotonic()
    graph = prepare(joint_module)
    placeholders = graph.find_nodes(op="placeholder")
    static = static_inputs(placeholders, static_lifetime_input_indices)
    if not has_backward(graph, num_fwd_outputs):
        return default_partition(
            joint_module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(static_lifetime_input_indices or ()),
            static_lifetime_input_nodes=static,
        )
    mutated = mutated_inputs(graph)
    snapshot_mutated_inputs(graph, mutated, output_nodes(graph)[:num_fwd_outputs])
    device = device_of(graph)
    captured = capture(
        graph,
        num_fwd_outputs=num_fwd_outputs,
        mutated=mutated,
        device=device,
        fuses=options.codegen == "inductor",
        follow_hints=isinstance(options.budget, Unlimited),
    )
    captured = apply_scopes(captured, options)
    with _paused_collector():
        captured = _with_outside(captured)
    search = _Search(
        joint_module=joint_module,
        captured=captured,
        primals=[n.meta["val"] for n in placeholders if not is_tangent(n)],
        static=static,
        options=options,
        earlier=earlier,
        planner=Planner(
            problem=captured.problem,
            method=options.solver,
            strict=options.strict,
            deadline=started + options.time_limit_s,
        ),
    )
    with _paused_collector():
        chosen = search.run()
    _record(search, chosen, time.monotonic() - started)
    return chosen.split.forward, chosen.split.backward


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
class _Search:
    """Plans until the program that will run is within the budget."""

    joint_module: fx.GraphModule
    captured: Capture
    primals: list[Any]
    static: Any
    options: Options
    earlier: Held
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
        fastest = self._candidate(
            self.planner.solve(None),
            verify=isinstance(budget, Fraction),
            budgeted=False,
        )
        self.base_peak = fastest.peak_bytes
        self.base_held = _held_bytes(self.captured, fastest)
        self.budget_bytes = self._share(budget, fastest.peak_bytes)
        self.floor_bytes = self.planner.floor.peak_bytes
        if self.budget_bytes is None and isinstance(budget, Minimum):
            return self._least()
        if self.budget_bytes is None:
            return fastest
        best = self._fit(self.budget_bytes)
        if best is not None:
            return best
        return self._infeasible(self.budget_bytes)

    def _share(self, budget: Budget, base_peak: int) -> int | None:
        """Return this region's bytes: the step's budget less what is held already."""
        if isinstance(budget, Bytes):
            return budget.size_bytes - self.earlier.bytes
        if isinstance(budget, Fraction):
            step_peak = max(
                self.earlier.peak_bytes, self.earlier.fastest_bytes + base_peak
            )
            return int(budget.of_peak * step_peak) - self.earlier.bytes
        return None

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
                candidate = self._candidate(solution, verify=True)
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
        self.floor_bytes = least.peak_bytes
        return least

    def _floor_candidate(self) -> Candidate:
        floor = self.planner.floor.peak_bytes
        return self._candidate(self.planner.solve(floor), verify=True)

    def _infeasible(self, budget_bytes: int) -> Candidate:
        least = self._least()
        if least.peak_bytes <= budget_bytes:
            return least
        total = budget_bytes + self.earlier.bytes
        if self.options.on_infeasible == "min":
            log.warning(
                "budget of %d bytes is under the floor of %d: taking the floor",
                total,
                least.peak_bytes + self.earlier.bytes,
            )
            return least
        raise InfeasibleBudgetError(
            budget_bytes=max(total, 0),
            floor_bytes=least.peak_bytes + self.earlier.bytes,
            alive=_alive_at_peak(self.captured, least.plan),
            held_bytes=self.earlier.bytes,
        )

    def _candidate(
        self, solution: Solution, *, verify: bool, budgeted: bool = True
    ) -> Candidate:
        """Return a checked and rewritten plan, with its program's peak if asked for.

        Args:
            solution: has a plan.
            verify: read the program (unless the user switched that off).
            budgeted: as compiled under a budget, otherwise as without one.
        """
        assert solution.plan is not None
        check(self.captured.problem, solution.plan, None)
        split = rewrite(
            self.joint_module,
            self.captured,
            solution.plan,
            keep_apart=budgeted and self.options.codegen == "inductor",
            static_lifetime_input_nodes=self.static,
        )
        scheduled, note = None, "not verified"
        if verify and self.options.verify:
            scheduled, note = self._schedule(split, budgeted=budgeted)
        return Candidate(solution=solution, split=split, scheduled=scheduled, note=note)

    def _schedule(
        self, split: Split, *, budgeted: bool
    ) -> tuple[Scheduled | None, str]:
        started = time.monotonic()
        self.rounds += 1
        in_order = budgeted and current_request.get() is not None
        patches = {} if budgeted else dict.fromkeys(FREE_AT_ONCE, True)
        try:
            with inductor_config.patch(patches):
                found = schedule(
                    split,
                    self.primals,
                    num_outputs=self.captured.num_fwd_outputs,
                    outside_bytes=self.captured.problem.between_bytes,
                    codegen=self.options.codegen,
                    inner_compile=(
                        compile_in_plan_order if in_order else compile_fx_inner
                    ),
                )
        except UnreadableProgramError as error:
            log.warning("the scheduled peak is unknown: %s", error)
            return None, str(error)
        finally:
            elapsed = time.monotonic() - started
            self.verify_time_s += elapsed
            self.planner.deadline += elapsed  # the limit is on solving
        return found, ""


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Keep Python's cyclic collector from walking torch's heap again and again.

    Planning allocates millions of small tuples and no cycles; each full collection
    walks everything that torch and the model hold (75 s instead of 8 on a GPT).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _with_outside(captured: Capture) -> Capture:
    """Return the capture with room for what the caller does before the backward.

    When the loss is not computed in the region, the caller computes it from the
    outputs, and its memory is unknown here. A pointwise loss in eager mode needs
    `OUTSIDE_COPIES` times the outputs besides the tangents (measured on
    ``x.square().mean()``), a cross-entropy less.
    """
    outputs = output_nodes(captured.graph)[: captured.num_fwd_outputs]
    tangents = [n.meta["val"] for n in captured.graph.nodes if is_tangent(n)]
    if any(isinstance(t, torch.Tensor) and t.dim() == 0 for t in tangents):
        return captured  # the loss itself
    wanted = sum(storage_bytes(t) for t in tangents if isinstance(t, torch.Tensor))
    if not outputs or not wanted:
        return captured
    peak = Planner(problem=captured.problem).fastest.peak_bytes
    between = min(OUTSIDE_COPIES * wanted, int(OUTSIDE_SHARE * peak))
    problem = dataclasses.replace(captured.problem, between_bytes=between)
    return dataclasses.replace(captured, problem=problem)


def _held_bytes(captured: Capture, candidate: Candidate) -> int:
    """Return the bytes alive between forward and backward."""
    if candidate.scheduled is not None:
        return candidate.scheduled.held_bytes
    plan = candidate.plan
    profile = simulate(captured.problem, plan.sequence, plan.boundary)
    return sum(
        captured.problem.values[i.value].size_bytes
        for i in profile.instances
        if i.start < plan.boundary
        and (i.saved or captured.problem.values[i.value].held)
    )


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


def _record(search: _Search, chosen: Candidate, total_s: float) -> None:
    """Keep the decisions, also for later cache hits, and show them."""
    request = current_request.get()
    region = region_plan(search, chosen, total_s)
    if request is not None:
        request.made.append(region)
        store.save_sidecar(request.key, region)
    show(region, search.options)


def show(region: RegionPlan, options: Options) -> None:
    """Make a plan known: registry, one log line, and the dump if it is asked for."""
    store.record(region)
    log.info("%s", region.summary())
    if options.dump is not None:
        store.dump(region, options.dump)


def region_plan(search: _Search, chosen: Candidate, total_s: float) -> RegionPlan:
    """Return the record of what was asked, decided and proven."""
    plan, captured = chosen.plan, search.captured
    fastest = search.planner.fastest
    base = fastest.cost_seconds or 1.0
    flops = _flops(captured, fastest) or 1
    overhead = plan.cost_seconds / base - 1.0
    bound = max(0.0, chosen.solution.bound_seconds / base - 1.0)
    profile = simulate(captured.problem, plan.sequence, plan.boundary)
    return RegionPlan(
        region=compile_id(),
        requested=str(search.options.memory_budget),
        budget_bytes=search.budget_bytes,
        earlier_bytes=search.earlier.bytes,
        fastest_peak_bytes=search.base_peak,
        fastest_held_bytes=search.base_held,
        floor_bytes=search.floor_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        scheduled_peak_bytes=(
            None if chosen.scheduled is None else chosen.scheduled.peak_bytes
        ),
        scheduled_note=chosen.note,
        saved_bytes=profile.saved_bytes,
        held_bytes=_held_bytes(captured, chosen),
        overhead=overhead,
        overhead_flops=_flops(captured, plan) / flops - 1.0,
        bound=min(bound, max(overhead, 0.0)),
        gap_points=100.0 * max(0.0, overhead - bound),
        solver=plan.origin,
        termination=chosen.solution.termination.value,
        limit=chosen.solution.limit,
        rounds=search.rounds,
        solve_time_s=total_s - search.verify_time_s,
        verify_time_s=search.verify_time_s,
        recomputations=len(plan.sequence) - len(set(plan.sequence)),
        digest=decisions.plan_digest(plan, chosen.split.saved_names),
        scopes=decisions.describe_scopes(captured, plan),
        values=decisions.describe_values(captured, plan),
    )


def _flops(captured: Capture, plan: Plan) -> int:
    return sum(captured.problem.operations[o].flops for o in plan.sequence)
