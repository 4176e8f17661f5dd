"""Bytes that operations move in fused kernels, against values derived by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gcpass.collector import paused_collector
from gcpass.solvers.problem import Phase
from gcpass.traffic import Step, bytes_moved

FORWARD, EITHER, BACKWARD = Phase


def pointwise(
    reads: Sequence[int], write: int, phase: Phase = Phase.FORWARD, *, fusible=True
) -> Step:
    return Step(
        reads=reads, writes=[write], phase=phase, fusible=fusible, absorbing=True
    )


def call(reads: Sequence[int], write: int, phase: Phase = Phase.FORWARD) -> Step:
    return Step(
        reads=reads, writes=[write], phase=phase, fusible=False, absorbing=False
    )


def test_the_first_of_a_kernel_pays_for_a_read() -> None:
    steps = [call([0], 1), pointwise([1], 2), pointwise([1], 3), call([2, 3], 4)]
    moved = bytes_moved(steps, [7, 100, 100, 100, 1], set())
    assert moved == [107, 200, 100, 201]


def test_a_library_call_between_parts_two_kernels() -> None:
    # A residual: 1 is read next to its norm and again behind the call.
    steps = [
        call([0], 1),
        pointwise([1], 2),
        call([2], 3),
        pointwise([1, 3], 4),
        call([4], 5),
    ]
    moved = bytes_moved(steps, [7, 100, 100, 100, 100, 1], set())
    assert moved == [107, 200, 200, 300, 101]


def test_what_has_one_reader_is_computed_inside() -> None:
    steps = [pointwise([0], 1), pointwise([1], 2), call([2], 3)]
    assert bytes_moved(steps, [10, 100, 100, 1], set()) == [10, 100, 101]
    assert bytes_moved(steps, [10, 100, 100, 1], {1}) == [110, 200, 101]


def test_again_in_a_kernel_that_reads_the_source_anyway() -> None:
    # 1 = a call's result, 2 = f(1) that the backward reads together with 1.
    steps = [
        call([0], 1),
        pointwise([1], 2),
        pointwise([1, 2, 3], 4, BACKWARD),
        call([4], 5, BACKWARD),
    ]
    sizes = [7, 100, 100, 100, 100, 1]
    assert bytes_moved(steps, sizes, set()) == [107, 0, 300, 101]
    # Read by the backward in another kernel: the source is read once more.
    apart = [*steps[:2], pointwise([2, 3], 4, BACKWARD), call([4], 5, BACKWARD)]
    apart.append(pointwise([1, 5], 6, BACKWARD))
    assert bytes_moved(apart, [*sizes, 100], {6})[1] == 100


def test_what_only_the_backward_needs_is_in_its_readers_kernel() -> None:
    steps = [
        call([0], 1),
        pointwise([1], 2),  # read by the kernel that computes 3 inside, from 1
        pointwise([1], 3, EITHER),
        pointwise([1, 3], 4, EITHER),
        pointwise([2, 4, 5], 6, BACKWARD),
        call([6], 7, BACKWARD),
    ]
    moved = bytes_moved(steps, [7, 100, 100, 100, 100, 100, 100, 1], set())
    assert moved[1:5] == [0, 100, 0, 200]


def test_a_result_is_written_for_a_call_of_the_backward() -> None:
    def moved(last: Step) -> int:
        steps = [call([0], 1), pointwise([1], 2), call([2], 3), last]
        return bytes_moved(steps, [7, 100, 100, 100, 100, 1], {3})[1]

    assert moved(call([2, 4], 5, BACKWARD)) == 200
    assert moved(pointwise([2, 4], 5, BACKWARD, fusible=False)) == 100


def test_many_readers_of_a_value_take_no_time() -> None:
    layers = 2_000  # a mask that every layer reads, forward and backward
    steps = []
    sizes = [4, 4]
    for phase in (FORWARD, BACKWARD):
        for _ in range(layers):
            sizes += [4, 4]
            steps += [
                call([len(sizes) - 3], len(sizes) - 2, phase),
                pointwise([0, len(sizes) - 2], len(sizes) - 1, phase),
            ]
    with paused_collector():
        started = time.process_time()
        bytes_moved(steps, sizes, set())
        assert time.process_time() - started < 1.0
