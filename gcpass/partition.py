"""The partitioner: capture, solve, check, rewrite, verify; read `partition` first."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gcpass import store
from gcpass.budget import Minimum, Unlimited
from gcpass.capture import (
    Capture,
    capture,
    output_nodes,
    snapshot_mutated_inputs,
)
from gcpass.collector import paused_collector
from gcpass.cost_model import cost_model_of
from gcpass.decisions import RegionPlan, plan_digest
from gcpass.describe import describe_scopes, describe_values
from gcpass.fit import Candidate, Search, held_between
from gcpass.joint_graph import device_of, has_backward, mutated_inputs, prepare
from gcpass.options import Options
from gcpass.regions import apply_scopes
from gcpass.request import current_request
from gcpass.sizes import storage_bytes
from gcpass.solvers.liveness import simulate
from gcpass.solvers.problem import Plan
from gcpass.solvers.shares import Share, set_aside_bytes
from gcpass.solvers.solve import Planner
from gcpass.symbolic import plan_functions
from gcpass.torch_private import (
    compile_id,
    default_partition,
    is_tangent,
    static_inputs,
    trace_json,
)

log = logging.getLogger("gcpass")

OUTSIDE_COPIES = 3  # of the outputs, kept free for a loss outside of the region
OUTSIDE_SHARE = 0.15  # of the fastest plan's peak: not more than this is kept free


def partition(
    joint_module: fx.GraphModule,
    joint_inputs: Sequence[Any],
    options: Options,
    share: Share | None,
    *,
    counting: bool = False,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward modules of the plan for one region.

    Args:
        joint_module: AOTAutograd's joint graph.
        joint_inputs: its inputs.
        options: the user's.
        share: of a step with several executions, None where this one is alone.
        counting: plan to hold as little as possible, and only note the problem: what
            the step runs besides is not known yet.
        num_fwd_outputs: how many outputs belong to the forward.
        static_lifetime_input_indices: inputs that stay where they are (parameters).
    """
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
    captured = capture(
        graph,
        num_fwd_outputs=num_fwd_outputs,
        mutated=mutated,
        costs=cost_model_of(options.cost_model, *device_of(graph)),
        fuses=options.codegen == "inductor",
        follow_hints=isinstance(options.budget, Unlimited),
    )
    captured = apply_scopes(captured, options)
    with paused_collector():
        captured = _with_outside(captured)
    request = current_request.get()
    if request is not None:
        request.problems.append(captured.problem)
    outside = captured.problem.between_bytes
    if share is not None and share.held_bytes is not None:
        # So that a peak within the share has no more bytes between than it allows.
        captured = captured.with_between(
            set_aside_bytes(captured.problem, share.peak_bytes, share.held_bytes)
        )
    search = Search(
        joint_module=joint_module,
        captured=captured,
        primals=[n.meta["val"] for n in placeholders if not is_tangent(n)],
        static=static,
        options=options,
        share=share,
        outside_bytes=outside,
        planner=Planner(
            problem=captured.problem,
            method=options.solver,
            strict=options.strict,
            deadline=started + options.time_limit_s,
        ),
    )
    with paused_collector():
        if counting:
            least = search.leanest()
            return least.forward, least.backward
        chosen = search.run()
    _record(search, chosen, time.monotonic() - started)
    return chosen.split.forward, chosen.split.backward


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
    return captured.with_between(between)


def _record(search: Search, chosen: Candidate, total_s: float) -> None:
    """Keep the decisions, also for later cache hits, and show them."""
    request = current_request.get()
    region = region_plan(search, chosen, total_s)
    if request is not None:
        request.made.append(region)
        store.save_sidecar(request.key, region)
    show(region, search.options)


def show(region: RegionPlan, options: Options) -> None:
    """Make a plan known: registry, log line, compile trace, the dump if asked for."""
    store.record(region)
    log.info("%s", region.summary())
    trace_json("gcpass_plan", region.to_json)
    if options.dump is not None:
        store.dump(region, options.dump)


def region_plan(search: Search, chosen: Candidate, total_s: float) -> RegionPlan:
    """Return the record of what was asked, decided and proven."""
    plan, captured = chosen.plan, search.captured
    fastest = search.planner.fastest
    base = fastest.cost_seconds or 1.0
    flops = _flops(captured, fastest) or 1
    overhead = plan.cost_seconds / base - 1.0
    bound = max(0.0, chosen.solution.bound_seconds / base - 1.0)
    profile = simulate(captured.problem, plan.sequence, plan.boundary)
    # Where the step has several regions "min" plans for shares, which are no limits.
    least = isinstance(search.options.budget, Minimum)
    own = captured.with_between(search.outside_bytes)
    functions = plan_functions(own, plan, profile, search.own_peak(plan))
    return RegionPlan(
        region=compile_id(),
        requested=str(search.options.memory_budget),
        budget_bytes=None if least else search.budget_bytes,
        others_bytes=0 if search.share is None else search.share.others_bytes,
        executions=1 if search.share is None else search.share.executions,
        fastest_peak_bytes=search.base_peak,
        fastest_held_bytes=search.base_held,
        floor_bytes=min(search.floor_bytes, search.own_peak(plan)),
        predicted_peak_bytes=search.own_peak(plan),
        scheduled_peak_bytes=search.own_scheduled_peak(chosen),
        scheduled_note=chosen.note,
        saved_bytes=profile.saved_bytes,
        held_bytes=held_between(captured, chosen),
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
        digest=plan_digest(plan, chosen.split.saved_names),
        symbolic_peak_bytes=functions.peak_bytes,
        symbolic_flops=functions.flops,
        symbolic_note=functions.note,
        symbols=functions.symbols,
        scopes=describe_scopes(captured, plan),
        values=describe_values(captured, plan, functions),
    ).with_largest()


def _flops(captured: Capture, plan: Plan) -> int:
    return sum(captured.problem.operations[o].flops for o in plan.sequence)
