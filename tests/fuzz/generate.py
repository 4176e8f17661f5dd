"""Draws a program from a seed."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from tests.fuzz.changes import FAMILIES
from tests.fuzz.draft import Draft, Skip
from tests.fuzz.oracle import InvalidProgramError, Reference, reference
from tests.fuzz.program import Program, bound, names, value_of

SHORTEST, USUAL, LONGEST = 8, 18, 60  # lines of a forward
TRIES = 40  # of a seed until eager accepts a program


def generate(seed: int, longest: int = LONGEST) -> tuple[Program, Reference]:
    """Return the program of a seed and what eager makes of it.

    Args:
        seed: of all draws.
        longest: lines of the forward, but for the last block.
    """
    for attempt in range(TRIES):
        rng = random.Random(f"{seed} {attempt}")
        torch.manual_seed(seed)
        program = _draw(rng, longest)
        for _ in range(4):
            try:
                return program, reference(program)
            except InvalidProgramError:
                program = _without_some_changes(program, rng)
    raise RuntimeError(f"seed {seed}: no valid program in {TRIES} tries")


def _without_some_changes(program: Program, rng: random.Random) -> Program:
    """Return the program with fewer lines in place: autograd forbids many of them."""
    kept = (n for n in program.lines if bound(n) is not None or rng.random() < 0.5)
    return dataclasses.replace(program, lines=tuple(kept)).pruned()


def _draw(rng: random.Random, longest: int) -> Program:
    draft = Draft(rng=rng)
    _arguments(draft)
    length = SHORTEST + int(rng.expovariate(1 / (USUAL - SHORTEST)))
    weights = [rng.random() ** 2 * weight for weight, _ in FAMILIES]
    while len(draft.lines) < min(length, longest):
        if rng.random() < 0.05:
            _repeat_a_block(draft, weights)
        else:
            _one(draft, weights)
    return _finish(draft).pruned()


def _one(draft: Draft, weights: list[float]) -> None:
    (operation,) = draft.rng.choices([f for _, f in FAMILIES], weights)
    lines, values = len(draft.lines), len(draft.values)
    try:
        operation(draft)
    except Skip:
        del draft.lines[lines:], draft.values[values:]


def _repeat_a_block(draft: Draft, weights: list[float]) -> None:
    """Draw the same few operations again and again, with weights of their own."""
    before, seed = draft.rng, draft.rng.random()
    size, repeats = before.randint(2, 6), before.randint(2, 5)
    for _ in range(repeats):
        draft.rng = random.Random(seed)
        for _ in range(size):
            _one(draft, weights)
    draft.rng = before


def _arguments(draft: Draft) -> None:
    rng = draft.rng
    b, t, w = rng.choice([2, 4]), rng.choice([4, 8]), rng.choice([8, 16, 32])
    shapes = [[b * t, w], [b, t, w], [b, 4, t, t], [w]]
    gradient = ", requires_grad=True"
    for shape in rng.choices(shapes, [4, 4, 3, 1], k=rng.randint(1, 3)):
        new = f"torch.randn({shape}"
        kind = rng.choices(
            ["leaf", "plain", "inner", "alias", "layout"], [5, 4, 1, 1, 1]
        )[0]
        if kind == "leaf":
            draft.add_argument(f"{new}{gradient})")
        elif kind == "plain":
            draft.add_argument(f"{new})")
        elif kind == "inner":
            leaf = draft.add_argument(f"{new}{gradient})", "leaf")
            draft.add_argument(f"{leaf} * 1")
        elif kind == "alias":
            x = draft.add_argument(f"{new})")
            draft.add_argument(
                rng.choice(
                    [
                        f"{x}.view(-1)",
                        f"{x}[..., 1:]",
                        f"{x}[:1]",
                        f"{x}.t()" if len(shape) < 3 else f"{x}.mT",
                    ]
                )
            )
        else:
            leaf = draft.add_argument(f"{new}{gradient})", "leaf")
            draft.add_argument(
                rng.choice(
                    [
                        f"{leaf}.swapaxes(0, -1)",
                        f"{leaf}[..., ::2]",
                        f"{leaf}[:1].expand({[-1] * len(shape)})",
                    ]
                )
            )
    draft.add_argument(f"torch.randint(0, 50, ({b}, {t}))")
    first = draft.values[0]
    draft.bind(f"{first} * {draft.parameter(draft[first].shape[-1])}")


def _finish(draft: Draft) -> Program:
    rng = draft.rng
    if rng.random() < 0.7:
        _sum_up(draft)
    outputs = [draft.values[-1]] if draft[draft.values[-1]].requires_grad else []
    for _ in range(rng.randint(0 if outputs else 1, 3)):
        outputs.append(rng.choice(draft.values))
    rng.shuffle(outputs)
    text = [_dressed(draft, name) for name in outputs]
    if rng.random() < 0.1:
        text.append(rng.choice(["None", "3", draft.values[0]]))
    trained = [i for i, name in enumerate(outputs) if _trains(draft[name])]
    losses = rng.sample(trained, rng.randint(1, len(trained))) if trained else []
    return Program(
        state=tuple(draft.state),
        arguments=tuple(draft.arguments),
        lines=tuple(draft.lines),
        outputs=tuple(text),
        losses=tuple(sorted(losses)),
        training=rng.random() < 0.8,
        steps=rng.choice([1, 1, 2, 3]),
        backwards=rng.choice([1, 1, 1, 1, 2]),
    )


def _sum_up(draft: Draft) -> None:
    """Add a scalar loss that reads most of what nothing else reads."""
    read = set().union(*(names(value_of(n)) for n in draft.lines if bound(n)))
    chosen = [
        n
        for n in draft.values
        if n not in read
        and _trains(draft[n])
        and not draft[n].is_complex()
        and draft.rng.random() < 0.8
    ]
    if not chosen:
        return
    terms = " + ".join(f"{n}.float().square().mean()" for n in chosen)
    try:
        draft.bind(terms)
    except Skip:
        return


def _dressed(draft: Draft, name: str) -> str:
    t = draft[name]
    if t.dim() and draft.rng.random() < 0.2:
        return draft.rng.choice(
            [f"{name}.transpose(0, -1)", f"{name}[:1]", f"{name}.view(-1)"]
            if t.is_contiguous()
            else [f"{name}.transpose(0, -1)", f"{name}[..., :1]"]
        )
    return name


def _trains(t: Tensor) -> bool:
    return t.requires_grad and (t.is_floating_point() or t.is_complex())
