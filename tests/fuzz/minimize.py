"""Makes a failing program small: takes lines out while it fails in the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tests.fuzz.program import Program, bound, load, names, renamed, value_of

Fails = Callable[[Program], bool]


def minimize(program: Program, fails: Fails) -> Program:
    """Return a smaller program that fails as well; no single step makes it smaller.

    Args:
        program: a failing program.
        fails: whether a program fails in the same way; False for invalid ones.
    """
    while True:
        smaller = _in_chunks(program, fails)
        for step in (_simpler_training, _fewer_outputs, _bypassed, _cut):
            smaller = _first(step, smaller, fails)
        if smaller == program:
            return program
        program = smaller


def _in_chunks(program: Program, fails: Fails) -> Program:
    """Remove runs of lines, long ones first; what they bound becomes an argument."""
    size = len(program.lines) // 2
    while size:
        at = 0
        while at < len(program.lines):
            candidate = _removed(program, range(at, min(at + size, len(program.lines))))
            if candidate is not None and fails(candidate):
                program = candidate
            else:
                at += size
        size //= 2
    return program


def _first(
    step: Callable[[Program], Iterator[Program]], program: Program, fails: Fails
) -> Program:
    """Take a kind of step as long as one leads to a failing program."""
    found = True
    while found:
        found = False
        for candidate in step(program):
            if fails(candidate):
                program, found = candidate, True
                break
    return program


def _simpler_training(program: Program) -> Iterator[Program]:
    if program.backwards > 1:
        yield dataclasses.replace(program, backwards=1)
    if program.steps > 1:
        yield dataclasses.replace(program, steps=program.steps - 1)
    if not program.training:
        yield dataclasses.replace(program, training=True)


def _fewer_outputs(program: Program) -> Iterator[Program]:
    for i in range(len(program.outputs)):
        outputs = program.outputs[:i] + program.outputs[i + 1 :]
        if outputs and program.losses != (i,):
            yield dataclasses.replace(
                program,
                outputs=outputs,
                losses=_without(program.losses, i),
            ).pruned()
    for n in program.losses:
        rest = tuple(m for m in program.losses if m != n)
        if rest:
            yield dataclasses.replace(program, losses=rest)
    for i, text in enumerate(program.outputs):
        plain = re.match(r"\w+", text)
        if plain and plain[0] != text:
            outputs = (*program.outputs[:i], plain[0], *program.outputs[i + 1 :])
            yield dataclasses.replace(program, outputs=outputs)


def _without(places: tuple[int, ...], gone: int) -> tuple[int, ...]:
    return tuple(n - (n > gone) for n in places if n != gone)


def _bypassed(program: Program) -> Iterator[Program]:
    """Put a line's operand in place of its result."""
    for at, line in enumerate(program.lines):
        name = bound(line)
        if name is None:
            continue
        for operand in sorted(names(value_of(line))):
            lines = [renamed(n, name, operand) for n in program.lines[at + 1 :]]
            yield dataclasses.replace(
                program,
                lines=(*program.lines[:at], *lines),
                outputs=tuple(renamed(o, name, operand) for o in program.outputs),
            ).pruned()


def _cut(program: Program) -> Iterator[Program]:
    """Put a new argument in place of a line's result, or take the line out."""
    for at in range(len(program.lines)):
        candidate = _removed(program, [at])
        if candidate is not None:
            yield candidate


def _removed(program: Program, places: Sequence[int]) -> Program | None:
    """Return the program without some lines; None if it cannot be run for shapes."""
    gone = {program.lines[i] for i in places}
    lines = [n for i, n in enumerate(program.lines) if i not in set(places)]
    text = "\n".join([*lines, *program.outputs])
    wanted = [n for n in map(bound, gone) if n is not None and n in names(text)]
    arguments = list(program.arguments)
    if wanted:
        values = _values(program)
        if values is None:
            return None
        for name in sorted(wanted):
            new = f"x{100 + len(arguments)}"
            arguments.append(f"{new} = {_like(values[name])}")
            lines = [renamed(n, name, new) for n in lines]
            outputs = tuple(renamed(o, name, new) for o in program.outputs)
            program = dataclasses.replace(program, outputs=outputs)
    return dataclasses.replace(
        program, lines=tuple(lines), arguments=tuple(arguments)
    ).pruned()


def _values(program: Program) -> dict[str, Tensor] | None:
    """Return every value of the forward by name, None if it cannot be run."""
    try:
        space = load(program.source())
        module = space["Program"]()
        given = dict(zip(program.parameters, space["arguments"](), strict=True))
        space |= given | {"self": module}
        for line in program.lines:
            exec(line, space)
    except Exception:
        return None
    return space


def _like(value: Tensor) -> str:
    size = list(value.shape)
    if value.is_floating_point() or value.is_complex():
        grad = ", requires_grad=True" if value.requires_grad else ""
        dtype = "" if str(value.dtype) == "torch.float32" else f", dtype={value.dtype}"
        return f"torch.randn({size}{dtype}{grad})"
    if str(value.dtype) == "torch.bool":
        return f"torch.rand({size}) > 0.5"
    return f"torch.randint(0, 4, {size})"
