"""The steps that build a sequence: narrow places, cuts, evictions, fewer repeats."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from gcpass.solvers.anneal import anneal, settings_for, thresholds
from gcpass.solvers.bound import choose_pivots
from gcpass.solvers.check import check
from gcpass.solvers.cut import boundary_cut, cut
from gcpass.solvers.cut_plan import (
    PivotNetwork,
    lay_out,
    mix,
    pivot_network,
    recomputed,
    saved_bytes,
)
from gcpass.solvers.edit import insert, place_all
from gcpass.solvers.evict import evict
from gcpass.solvers.frontier import frontier
from gcpass.solvers.liveness import make_plan
from gcpass.solvers.narrow import MOST_VALUES, waists
from gcpass.solvers.network import (
    NONE,
    BoolArray,
    IntArray,
    Network,
    Numbering,
    network_of,
)
from gcpass.solvers.plain import given_peak_bytes
from gcpass.solvers.problem import OpId, Origin, Phase, Problem
from gcpass.solvers.tighten import drop_repeats
from gcpass.solvers.timeline import (
    BARRED_BYTES,
    Timeline,
    can_run,
    new_timeline,
    peak_bytes,
    sequence_of,
    total_cost,
)
from tests.problems import Builder, chain, random_plain, random_problem, transformer

SLOTS = 1024
WORK = 50_000  # enough for every eviction here


def cases(count: int) -> Iterator[tuple[int, Problem, Network, Numbering]]:
    """Yield plain sequences and training problems whose tangents are all read."""
    for seed in range(count):
        problem = random_problem(seed, 6 + seed % 15)
        if seed % 3 == 0:
            problem = random_plain(seed, 6 + seed % 15)
        readers = problem.readers()
        if all(
            value.origin is not Origin.TANGENT or readers[v]
            for v, value in enumerate(problem.values)
        ):
            net, numbering = network_of(problem)
            yield seed, problem, net, numbering


def given_line(net: Network) -> Timeline:
    line = new_timeline(net, SLOTS)
    place_all(net, line, np.arange(len(net.cost), dtype=np.int64))
    return line


def assert_valid(
    problem: Problem, net: Network, numbering: Numbering, line: Timeline
) -> None:
    """Hold a timeline against the problem's own rules, peak and cost."""
    numbers = sequence_of(line)
    times = np.bincount(numbers, minlength=len(net.cost))
    assert (times >= 1).all()
    assert (times[net.once] == 1).all()  # the turn, too
    sequence, boundary = numbering.sequence(numbers)
    plan = make_plan(problem, sequence, boundary, "test")
    assert plan.cost_seconds == pytest.approx(total_cost(net, line))
    if peak_bytes(line) < BARRED_BYTES:
        check(problem, plan, int(peak_bytes(line)))
        assert plan.peak_bytes == peak_bytes(line)


def test_evictions_fit_and_stay_valid() -> None:
    fitted = stuck = 0
    for _, problem, net, numbering in cases(150):
        line = given_line(net)
        peak = given_peak_bytes(problem)
        for budget in range(peak - 1, peak // 3, -max(1, peak // 8)):
            place_all(net, line, np.arange(len(net.cost), dtype=np.int64))
            before = peak_bytes(line)
            fits = evict(net, line, budget, WORK)
            assert fits == (peak_bytes(line) <= budget)
            assert peak_bytes(line) <= before
            assert_valid(problem, net, numbering, line)
            fitted += fits
            stuck += not fits
    assert fitted > 200
    assert stuck > 100


def test_two_results_that_cannot_be_drawn_again_are_not() -> None:
    """p is read at once and q at the end, so that the draw cannot wait.

    At the workspace of 9 bytes q (4 bytes) is alive: 13 with the 1 of the chain is the
    least; dropping q would draw it a second time.
    """
    b = Builder()
    p, q, r, s = (b.value(k) for k in (1, 4, 1, 1))
    back = Phase.BACKWARD
    b.run([], [p, q], 1.0, back, recomputable=False)
    b.run([p], [r], 1.0, back)
    b.run([r], [s], 1.0, back, workspace_bytes=9)
    b.run([q, s], [b.value(1)], 1.0, back)
    net, _ = network_of(b.problem())
    line = given_line(net)
    assert peak_bytes(line) == 15
    assert not evict(net, line, 14, WORK)
    assert sequence_of(line).tolist() == [0, 1, 2, 3]


def test_an_operation_whose_result_is_not_read_yet_moves() -> None:
    """q (4 bytes) is read by the last operation only and can be computed late."""
    b = Builder()
    q, r, s = (b.value(k) for k in (4, 3, 1))
    back = Phase.BACKWARD
    b.run([], [q], 1.0, back, recomputable=False)
    b.run([], [r], 1.0, back)
    b.run([r], [s], 1.0, back)
    b.run([q, s], [b.value(1)], 1.0, back)
    net, _ = network_of(b.problem())
    line = given_line(net)
    assert peak_bytes(line) == 8
    assert evict(net, line, 6, WORK)
    assert sequence_of(line).tolist() == [1, 2, 0, 3]


def test_dropping_repeats_costs_nothing() -> None:
    dropped = 0
    for seed, problem, net, numbering in cases(90):
        rng = random.Random(seed)
        line = given_line(net)
        for _ in range(60):
            op, slot = rng.randrange(len(net.cost)), rng.randrange(SLOTS)
            if line.operation[slot] == NONE and not net.once[op]:
                if can_run(net, line, slot, op):
                    insert(net, line, slot, op)
        budget, cost = int(peak_bytes(line)), total_cost(net, line)
        length = len(sequence_of(line))
        count = drop_repeats(net, line, budget)
        assert peak_bytes(line) <= budget
        assert len(sequence_of(line)) == length - count
        assert total_cost(net, line) <= cost
        assert_valid(problem, net, numbering, line)
        drop_repeats(net, line, BARRED_BYTES << 6)
        assert line.number[0] == len(net.cost)  # no budget, no repeat
        dropped += count
    assert dropped > 200


def test_layouts_of_every_choice_are_plans() -> None:
    mixed = 0
    for seed, problem, net, numbering in cases(90):
        networks = [boundary_cut(problem)] if numbering.turn != NONE else []
        networks += [cut(problem, op) for op in choose_pivots(problem, 3)]
        line = new_timeline(net, SLOTS)
        for network in networks:
            choices = frontier(network)
            if not choices:
                continue
            at = pivot_network(net, numbering, network)
            masks = [recomputed(net, numbering, choice) for choice in choices]
            for choice, again in zip(choices, masks, strict=True):
                saved = saved_bytes(net, again, at.required, at.free)
                assert saved == choice.saved_bytes
            low, high = choices[-1].saved_bytes, choices[0].saved_bytes
            cap = random.Random(seed).randint(low, high)
            blend = mix(net, at, masks[0], masks[-1], cap)
            assert low <= saved_bytes(net, blend, at.required, at.free) <= cap
            assert not (blend & ~masks[-1]).any()
            mixed += bool((blend != masks[-1]).any())
            for again in (*masks, blend):
                place_all(net, line, laid_out(net, at, again))
                assert_valid(problem, net, numbering, line)
    assert mixed > 20


def laid_out(net: Network, at: PivotNetwork, again: BoolArray) -> IntArray:
    """Return the sequence of a choice at a moment."""
    return lay_out(net, at.pivot, at.before, again, at.free, at.required)


def test_draws_that_keep_their_order_are_laid_out_once() -> None:
    """The second draw does not read the first, but comes after it all the same."""
    b = Builder()
    x, first, second = b.value(1, Origin.INPUT), b.value(4), b.value(4)
    b.run([x], [first], 1.0, recomputable=False)
    b.run([x], [second], 1.0, recomputable=False, workspace_bytes=9)
    tangent = b.value(1, Origin.TANGENT)
    b.run([first, second, tangent], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    problem = b.problem()
    net, numbering = network_of(problem)
    network = cut(problem, OpId(1))
    at = pivot_network(net, numbering, network)
    for choice in frontier(network):
        again = recomputed(net, numbering, choice)
        assert laid_out(net, at, again).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layers", [6, 20])
def test_every_place_of_a_chain_is_narrow(layers: int) -> None:
    """All but the first and last, which have no place on one of their sides."""
    net, numbering = network_of(chain(layers, 5, 1.0))
    before = np.arange(len(net.cost)) < numbering.turn
    found = [values.tolist() for values in waists(net, before)]
    assert found == [[numbering.value_of[v]] for v in range(2, layers - 1)]


def test_waists_of_a_transformer_are_its_residual_streams() -> None:
    """Each block ends in one value, r2, which is all that leads into the next."""
    problem = transformer(6)
    net, numbering = network_of(problem)
    before = np.arange(len(net.cost)) < numbering.turn
    single = [w.tolist() for w in waists(net, before) if len(w) == 1]
    streams = [problem.operations[10 * block + 9].writes[0] for block in range(5)]
    assert [[numbering.value_of[v]] for v in streams] == [
        w for w in single if w[0] in {numbering.value_of[v] for v in streams}
    ]


def test_waists_cross_their_place() -> None:
    for _, _, net, _ in cases(60):
        everything = np.ones(len(net.cost), dtype=np.bool_)
        for values in waists(net, everything):
            assert 0 < len(values) <= MOST_VALUES
            low = max(net.writer[values].tolist())
            for value in values.tolist():
                start, stop = net.readers_from[value], net.readers_from[value + 1]
                assert max(net.readers[start:stop].tolist()) > low
    assert waists(net, np.zeros(len(net.cost), dtype=np.bool_)) == []


def test_annealing_returns_what_it_says() -> None:
    cheaper = 0
    for seed, problem, net, numbering in cases(60):
        line = given_line(net)
        budget = given_peak_bytes(problem) * 8 // 10
        start = np.arange(len(net.cost), dtype=np.int64)
        settings = settings_for(net, budget, 3_000, (4.0, 2.0), SLOTS)
        cost, peak, numbers = anneal(net, line, start, seed, settings, thresholds())
        np.testing.assert_array_equal(sequence_of(line), numbers)
        assert (cost, peak) == (total_cost(net, line), peak_bytes(line))
        assert_valid(problem, net, numbering, line)
        cheaper += peak <= budget
    assert cheaper > 15
