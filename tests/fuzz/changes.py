"""The operations that change something: values in place, buffers, and the context.

They are added to the families of `tests.fuzz.operations`, which says what is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz.draft import Draft, Skip
from tests.fuzz.operations import FAMILIES, family

__all__ = ["FAMILIES"]


@family(9)
def in_place(d: Draft) -> None:
    name = d.pick(lambda t: t.is_floating_point() and t.dim() >= 1)
    if name.startswith("x") and d[name].is_leaf and d[name].requires_grad:
        raise Skip
    t = d[name]
    if _overlaps(t):  # functionalization refuses to write where elements overlap
        raise Skip
    i = d.rng.randrange(t.dim())
    target = d.rng.choice(
        [
            name,
            name,
            f"{name}[..., 0]",
            f"{name}[:1]",
            f"{name}.select({i}, 0)",
            f"{name}.transpose({i}, 0)",
            f"{name}.view(-1)[:2]",
            f"{name}.detach()",
        ]
    )
    other = d.same_shape(name)
    choices = [
        f"{target}.add_(1)",
        f"{target}.mul_(0.5)",
        f"{target}.tanh_()",
        f"{target}.zero_()",
        f"{target}.fill_(0.3)",
        f"{target}.clamp_(-0.5, 0.5)",
        f"{target}.sub_({target} * 0.1)",
        f"{name}.add_({other}, alpha=0.3)",
        f"{name}.copy_({other})",
        f"{name}.masked_fill_({other} > 0.5, 0.1)",
        f"{name}[..., 0] = {other}[..., -1]",
        f"{name}[:1] = 0.2",
        f"{target}.mul_({other}.mean())",
        f"{name}.index_fill_({i}, torch.tensor([0]), 0.4)",
        f"{name}.sin_()",
        f"F.relu_({target})",
        f"{target}.add_(torch.rand_like({name}).mean())",
        f"{name}.t_().add_(1)" if t.dim() == 2 else f"{name}.neg_()",
    ]
    if t.is_contiguous():
        choices += [
            f"{name}.normal_()",
            f"{name}.detach().normal_()",
            f"{name}[:1].normal_()",
            f"{name}.exponential_()",
            f"F.dropout({name}, 0.5, inplace=True)",
        ]
    d.change(d.rng.choice(choices))


def _overlaps(t: Tensor) -> bool:
    places = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    places = places.as_strided(t.shape, t.stride(), t.storage_offset())
    return places.unique().numel() < t.numel()


@family(4)
def stateful(d: Draft) -> None:
    v = d.full(2)
    n = d[v].shape[-1]
    row = f"{v}.detach().reshape(-1, {n}).mean(0)"
    kind = d.rng.randrange(6)
    if kind == 0:
        b = d.buffer("torch.zeros((), dtype=torch.int64)")
        d.change(f"{b}.add_(1)")
        d.bind(f"{v} * (1 / (1 + {b}))")
        return
    b = d.buffer(f"torch.linspace(0, 1, {n})")
    if kind == 1:
        d.bind(f"torch.sin({v} + {b})")
        d.change(f"{b}.add_(0.1)")
    elif kind == 2:
        d.change(f"{b}.lerp_({row}, 0.3)")
        d.bind(f"{v} * {b}")
    elif kind == 3:
        d.bind(f"{v} * {b}[:1]")
        d.change(f"{b}[1:].mul_(0.9)")
        d.bind(f"{v} * {b}")
    elif kind == 4:
        d.bind(f"{b}.view(1, -1)")
        d.bind(f"{v} + {b}.view(1, -1)")
        d.change(f"{b}.copy_({row})")
    else:
        old = d.bind(f"{b}.clone()")
        d.change(f"{b}.normal_()")
        d.bind(f"{v} * {b} + {old}")


@family(4)
def fenced(d: Draft) -> None:
    v = d.full(2)
    n = d[v].shape[-1]
    kind = d.rng.randrange(6)
    if kind == 0:
        b = d.buffer("torch.zeros(())")
        d.change(f"with torch.no_grad(): {b}.add_({v}.mean())")
        d.bind(f"{v} + {b} * 0.1")
    elif kind == 1:
        d.bind(f"torch.tanh({v}) * 2", "torch.no_grad()")
    elif kind == 2:
        w = d.parameter(n, n)
        d.bind(f"torch.tanh({v} @ {w})", 'torch.autocast("cpu", torch.bfloat16)')
    elif kind == 3:
        w = d.parameter(n, n)
        inner = d.rng.choice(["torch.sin(t @ {w})", "F.dropout(t, 0.2) @ {w}"])
        inner = inner.format(w=w)
        d.bind(f"checkpoint(lambda t: {inner}, {v}, use_reentrant=False)")
    elif kind == 4 and d.rng.random() < 0.3:
        d.change("torch._dynamo.graph_break()")
    else:
        inside = d.rng.choice(["{v}.dim() > 2", "self.training"]).format(v=v)
        d.bind(f"torch.sin({v}) if {inside} else torch.cos({v})")
