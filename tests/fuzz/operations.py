"""The operations that programs are drawn from, by family.

Each function adds one line or a few to a draft, or raises `Skip`. What is left out, and
why (all on torch 2.13.0):

- `as_strided`, and shapes that depend on data (they break the graph);
- `x[torch.randperm(n)]` on the first dimension: Inductor's own pattern for it raises
  "Not all inputs to pattern found", without gcpass as well;
- changes in place of `unfold`'s result, which functionalization refuses;
- draws in place into what is not contiguous: functionalization draws into a contiguous
  tensor, and the order of the numbers is another one;
- changes of what dropout returned outside of training: eager returns its argument
  itself, AOTAutograd a copy;
- layer norm of a constant that sums with rounding: its result is nothing but rounding;
- the median of an expanded tensor: eager gives another result in every run;
- before torch 2.13 `rrelu`, which Inductor decomposes into draws unlike eager's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.draft import Draft

Operation = Callable[[Draft], object]
FAMILIES: list[tuple[int, Operation]] = []
SLOPES = "F.rrelu({v}, training=self.training)"
if torch.__version__ < (2, 13):
    SLOPES = "F.leaky_relu({v}, 0.2)"  # in its place, so that the others stay


def family(weight: int) -> Callable[[Operation], Operation]:
    """Register a family that is drawn this often."""

    def register(function: Operation) -> Operation:
        FAMILIES.append((weight, function))
        return function

    return register


UNARY = (
    "torch.tanh({v})|torch.sin({v})|torch.cos({v})|torch.sigmoid({v})|F.gelu({v})|"
    "F.silu({v})|F.relu({v})|F.softplus({v})|F.leaky_relu({v}, 0.1)|F.elu({v})|"
    "{v}.clamp(-1, 1)|{v}.abs()|{v}.square()|torch.exp(-{v}.square())|{v} * 0.5|"
    "{v} + 1|-{v}|1 - {v}|torch.sqrt({v}.square() + 0.1)|{v}.pow(3) * 0.1|"
    "torch.rsqrt({v}.square() + 1)|torch.log1p({v}.abs())|torch.erf({v})|"
    "F.hardtanh({v})|F.mish({v})|F.logsigmoid({v})|torch.atan({v})|{v} / 3|"
    "1 / (1 + {v}.abs())|F.threshold({v}, 0.1, 0.0)|torch.nan_to_num({v})|"
    "{v}.sign() * {v}|F.hardswish({v})|torch.where({v} > 0, {v}, 0.0)|"
    "{v}.clone()|{v}.contiguous()|{v}.detach() * {v}"
).split("|")

BINARY = (
    "{a} + {b}|{a} - {b}|{a} * {b}|torch.maximum({a}, {b})|torch.minimum({a}, {b})|"
    "torch.where({a} > {b}, {a}, {b} * 0.5)|torch.lerp({a}, {b}, 0.3)|"
    "{a} / (1 + {b}.square())|torch.atan2({a}, {b}.abs() + 0.5)|"
    "torch.addcmul({a}, {a}, {b}, value=0.5)|torch.hypot({a}, {b} + 2)|"
    "{a} + {b}.sum()  * 0.01|torch.sub({a}, {b}, alpha=2)|"
    "torch.where({b} > 0.2, {a}, {b})|{a}.masked_fill({b} > 0, 0.5)"
).split("|")


@family(16)
def unary(d: Draft) -> None:
    d.bind(d.rng.choice(UNARY).format(v=d.real(0)))


@family(12)
def binary(d: Draft) -> None:
    a = d.real()
    b = d.same_shape(a) if d.rng.random() < 0.7 else d.real()
    d.bind(d.rng.choice(BINARY).format(a=a, b=b))


@family(4)
def with_parameter(d: Draft) -> None:
    v = d.full()
    size = d[v].shape[-1]
    p = d.parameter(size) if d.rng.random() < 0.7 else d.parameter()
    d.bind(
        d.rng.choice(["{v} + {p}", "{v} * {p}", "F.prelu({v}, {p}.mean())"]).format(
            v=v, p=p
        )
    )


@family(12)
def view(d: Draft) -> None:
    v = d.pick(lambda t: t.dim() >= 1)
    t = d[v]
    i, j = d.rng.randrange(t.dim()), d.rng.randrange(t.dim())
    size = t.shape[i]
    at = d.rng.randrange(size)
    choices = [
        f"{v}.transpose({i}, {j})",
        f"{v}.unsqueeze({i})",
        f"{v}.flatten()",
        f"{v}.reshape({_shape(d, t)})",
        f"{v}.view({_shape(d, t)})",
        f"{v}.movedim({i}, {j})",
        f"{v}.select({i}, {at})",
        f"{v}.narrow({i}, {at}, {size - at})",
        f"{v}.diagonal(0, {i}, {j})",
        f"{v}.chunk(2, {i})[-1]",
        f"{v}.unbind({i})[{at}]",
        f"{v}.split({max(1, size // 2)}, {i})[0]",
        f"{v}[::2]",
        f"{v}[..., 1:]",
        f"{v}[..., None]",
        f"{v}.squeeze()",
        f"{v}.unsqueeze({i}).expand({_expanded(t, i)})",
        f"{v}.unfold({i}, {min(2, size)}, 1) * 1",
        f"{v}.mT",
        f"{v}.detach()",
        f"{v}.swapaxes(0, -1)",
    ]
    d.bind(d.rng.choice(choices))


def _shape(d: Draft, t: Tensor) -> str:
    """Return other sizes with as many elements: one split or one merge."""
    sizes = list(t.shape)
    i = d.rng.randrange(len(sizes))
    if sizes[i] % 2 == 0 and (len(sizes) == 1 or d.rng.random() < 0.5):
        sizes[i : i + 1] = [sizes[i] // 2, 2]
    elif len(sizes) > 1:
        i = min(i, len(sizes) - 2)
        sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
    return str(sizes)


def _expanded(t: Tensor, i: int) -> str:
    sizes = [-1] * (t.dim() + 1)
    sizes[i] = 3
    return str(sizes)


@family(6)
def arrange(d: Draft) -> None:
    v = d.real()
    i = d.rng.randrange(d[v].dim())
    w = d.same_shape(v)
    choices = [
        f"torch.cat([{v}, {w}], {i})",
        f"torch.stack([{v}, {w}], {i})",
        f"torch.stack([{v}, {w}]).sum(0)",
        f"{v}.repeat({[1] * (d[v].dim() - 1) + [2]})",
        f"{v}.flip({i})",
        f"{v}.roll(1, {i})",
        f"F.pad({v}, (1, 1))",
        f"torch.tril({v})",
        f"{v}.repeat_interleave(2, {i})",
        f"{v}.diff(dim={i})",
        f"torch.cat([{v}, {v}.detach()], {i}).chunk(2, {i})[0]",
        f"torch.diag_embed({v})",
    ]
    d.bind(d.rng.choice(choices))


@family(10)
def reduction(d: Draft) -> None:
    v = d.real()
    i = d.rng.randrange(d[v].dim())
    choices = [
        f"{v}.sum({i})",
        f"{v}.mean({i})",
        f"{v}.amax({i})",
        f"{v} - {v}.mean({i}, keepdim=True)",
        f"{v} / (1 + {v}.std({i}, keepdim=True))",
        f"{v} - {v}.amax({i}, keepdim=True)",
        f"{v}.var({i}, unbiased=False, keepdim=True) + {v}",
        f"torch.logsumexp({v}, {i})",
        f"{v} / (1 + {v}.norm(dim={i}, keepdim=True))",
        f"F.normalize({v}, dim={i}, eps=0.1)",
        f"{v}.cumsum({i}) * 0.3",
        f"{v}.max({i}).values",
        f"{v}.sort({i}).values",
        f"{v}.topk(1, {i}).values",
        f"F.softmax({v}, {i})",
        f"F.log_softmax({v}, {i})",
        f"{v}.logcumsumexp({i})",
        f"{v}.contiguous().median({i}).values",
        f"{v}.sum() * 0.1 + {v}",
        f"{v}.prod({i}) + 1",
        f"torch.cummax({v}, {i}).values",
        f"{v}.mean()",
    ]
    d.bind(d.rng.choice(choices))


@family(12)
def product(d: Draft) -> None:
    v = d.full(2)
    k = d[v].shape[-1]
    n = d.rng.choice([k, k, k, 8, 16])
    weight, square = [n, k], d[v].dim() == 3
    kind = d.rng.choice("linear biased matmul addmm bmm gram einsum twice".split())
    if kind == "linear":
        d.bind(f"F.linear({v}, {d.parameter(*weight)})")
    elif kind == "biased":
        d.bind(f"F.linear({v}, {d.parameter(*weight)}, {d.parameter(n)})")
    elif kind == "matmul":
        d.bind(f"{v} @ {d.parameter(k, n)}")
    elif kind == "addmm" and d[v].dim() == 2:
        d.bind(f"torch.addmm({d.parameter(n)}, {v}, {d.parameter(k, n)})")
    elif kind == "bmm" and square:
        d.bind(f"torch.bmm({v}, {v}.mT) / {k}")
    elif kind == "gram":
        d.bind(f"({v} @ {d.same_shape(v)}.mT) / {k}")
    elif kind == "einsum" and square:
        d.bind(f"torch.einsum('btd,dk->bkt', {v}, {d.parameter(k, n)})")
    else:
        w = d.parameter(k, k)
        d.bind(f"torch.tanh({v} @ {w}) @ {w}")


@family(6)
def convolution(d: Draft) -> None:
    v = d.full(3, 4)
    t = d[v]
    c = t.shape[1]
    if t.dim() == 3:
        d.bind(f"F.conv1d({v}, {d.parameter(c, c, 3)} * 0.5, padding=1)")
        return
    n = d.rng.choice([c, 4, 8])
    choices = {
        "conv": lambda: (
            f"F.conv2d({v}, {d.parameter(n, c, 3, 3)}, {d.parameter(n)}, padding=1)"
        ),
        "depthwise": lambda: (
            f"F.conv2d({v}, {d.parameter(c, 1, 3, 3)}, padding=1, groups={c})"
        ),
        "strided": lambda: f"F.conv2d({v}, {d.parameter(n, c, 2, 2)}, stride=2)",
        "transposed": lambda: (
            f"F.conv_transpose2d({v}, {d.parameter(c, n, 2, 2)}, stride=2)"
        ),
        "max": lambda: f"F.max_pool2d({v}, 2)",
        "average": lambda: f"F.avg_pool2d({v}, 2)",
        "adaptive": lambda: f"F.adaptive_avg_pool2d({v}, 2)",
        "nearest": lambda: f"F.interpolate({v}, scale_factor=2.0, mode='nearest')",
        "bilinear": lambda: f"F.interpolate({v}, size=(5, 5), mode='bilinear')",
        "shuffle": lambda: f"F.pixel_unshuffle({v}, 2)",
    }
    d.bind(choices[d.rng.choice(list(choices))]())


@family(5)
def attention(d: Draft) -> None:
    v = d.full(3, 4)
    k = d.same_shape(v) if d.rng.random() < 0.5 else v
    extra = d.rng.choice(["", ", is_causal=True", ", dropout_p=0.2"])
    if d[v].dim() == 3 and d[v].shape[-1] % 2 == 0 and d.rng.random() < 0.7:
        heads = f"unflatten(-1, (2, {d[v].shape[-1] // 2})).transpose(1, 2)"
        v, k = d.bind(f"{v}.{heads}"), d.bind(f"{k}.{heads}")
        y = d.bind(f"F.scaled_dot_product_attention({v}, {k}, {k}{extra})")
        d.bind(f"{y}.transpose(1, 2).flatten(2)")
        return
    d.bind(f"F.scaled_dot_product_attention({v}, {k}, {k}{extra})")


@family(5)
def randomness(d: Draft) -> None:
    v = d.full()
    choices = [
        f"F.dropout({v}, 0.3, self.training) * 1",
        f"F.dropout({v}, 0.5)",
        f"{v} + torch.rand_like({v}) * 0.1",
        f"{v} * torch.randn({list(d[v].shape)})",
        f"{v} * torch.bernoulli(torch.full_like({v}, 0.7))",
        f"F.dropout1d({v}, 0.3)",
        f"F.alpha_dropout({v}, 0.2, self.training) * 1",
        f"{v}[None][..., torch.randperm({d[v].shape[-1]})]",
        SLOPES.format(v=v),
        f"{v} + torch.randint(0, 3, {list(d[v].shape)})",
    ]
    d.bind(d.rng.choice(choices))


@family(6)
def normalization(d: Draft) -> None:
    v = d.full(2)
    t = d[v]
    c, size = t.shape[1], t.shape[-1]
    kind = d.rng.choice("batch batch layer layer group rms instance functional".split())
    dims = {2: 1, 3: 1, 4: 2}[t.dim()]
    if kind == "batch":
        extra = d.rng.choice(["", ", momentum=0.5", ", affine=False"])
        m = d.add_state(f"self.NAME = nn.BatchNorm{dims}d({c}{extra})", "m")
        d.bind(f"{m}({v})")
    elif kind == "layer":
        m = d.add_state(f"self.NAME = nn.LayerNorm({size})", "m")
        d.bind(f"{m}({v})")
    elif kind == "group" and c % 2 == 0:
        m = d.add_state(f"self.NAME = nn.GroupNorm(2, {c})", "m")
        d.bind(f"{m}({v})")
    elif kind == "rms":
        d.bind(f"F.rms_norm({v}, ({size},), eps=1e-3)")
    elif kind == "instance" and t.dim() > 2:
        d.bind(f"F.instance_norm({v})")
    else:
        b = d.buffer(f"torch.zeros({c})")
        d.bind(f"F.batch_norm({v}, {b}, {b} * 0 + 1, training=self.training)")


@family(7)
def indexing(d: Draft) -> None:
    v = d.full()
    t = d[v]
    i = d.rng.randrange(t.dim())
    n = t.shape[i]
    ids = d.pick(lambda t: t.dtype is torch.int64)
    flat = f"{ids}.flatten()[:4] % {n}"
    choices = [
        f"{v}.index_select({i}, {flat})",
        f"{v}.movedim({i}, 0)[{flat}]",
        f"{v}.gather({i}, {v}.argsort({i}))",
        f"torch.take_along_dim({v}, {v}.argmax({i}, keepdim=True), {i})",
        f"{v}.index_add({i}, {flat}, {v}.narrow({i}, 0, 1).expand({_wider(t, i)}))",
        f"torch.zeros_like({v}).scatter_add({i}, ({v} * 0).long(), {v})",
        f"{v}.scatter({i}, ({v} * 0).long(), 0.5)",
        f"{v}.index_fill({i}, {flat}, 0.1)",
        f"{v}.flatten().take({ids}.flatten() % {t.numel()})",
        f"F.embedding({ids} % 8, {d.parameter(8, 16)})",
        f"F.one_hot({ids} % 8, 8).float() @ {d.parameter(8, 8)}",
        f"{v}.masked_fill({v} > 0.3, 0.0)",
        f"{v}[..., [0, -1, 0]]",
        f"torch.index_put({v}, ({ids}.view(-1) % {t.shape[0]},), torch.tensor(0.1))",
        f"F.cross_entropy({v}, {v}.argmax(1))",
        f"({ids} * {v}.mean())",
        f"{v}.select_scatter({v}.select({i}, 0) * 2, {i}, {n - 1})",
        f"{v}.slice_scatter({v}.narrow({i}, 0, 1), {i}, 0, 1)",
    ]
    d.bind(d.rng.choice(choices))


def _wider(t: Tensor, i: int) -> str:
    sizes = list(t.shape)
    sizes[i] = 4
    return str(sizes)


@family(3)
def loss_like(d: Draft) -> None:
    v = d.full()
    choices = [
        f"F.cross_entropy({v}.flatten(0, -2), {v}.flatten(0, -2).argmin(-1))",
        f"F.mse_loss({v}, {d.same_shape(v)})",
        f"F.smooth_l1_loss({v}, {d.same_shape(v)}, reduction='none')",
        f"F.binary_cross_entropy_with_logits({v}, {v}.detach().sigmoid())",
        f"F.kl_div({v}.log_softmax(-1), {v}.detach().sigmoid(), reduction='sum')",
        f"F.cosine_similarity({v}, {d.same_shape(v)} + 1, -1)",
    ]
    d.bind(d.rng.choice(choices))


@family(4)
def cast(d: Draft) -> None:
    v = d.pick(lambda t: t.is_floating_point() or t.is_complex())
    if d[v].is_complex():
        d.bind(
            d.rng.choice(
                [
                    f"{v}.real",
                    f"{v}.abs()",
                    f"torch.view_as_real({v})",
                    f"{v}.imag",
                    f"{v} * {v}.conj()",
                    f"{v} @ {v}.mH",
                    f"{v}.real + {v}.imag",
                ]
            )
        )
        return
    if d[v].dtype is not torch.float32:
        d.bind(d.rng.choice([f"{v}.to(torch.float32)", f"{v} * 2", f"{v} @ {v}.mT"]))
        return
    choices = [
        f"{v}.to(torch.bfloat16)",
        f"{v}.to(torch.bfloat16).to(torch.float32)",
        f"{v}.to(torch.float64)",
        f"torch.complex({v}, {d.same_shape(v)})",
        f"torch.fft.rfft({v}).abs()",
        f"torch.fft.irfft(torch.fft.rfft({v}) * 0.5)",
        f"torch.view_as_complex({v}.contiguous().unflatten(-1, (-1, 2)))",
        f"({v} > 0).to(torch.float32) + {v}",
        f"(torch.view_as_real(torch.polar({v}.abs() + 1, {v})))",
    ]
    d.bind(d.rng.choice(choices))


@family(2)
def from_nothing(d: Draft) -> None:
    v = d.full()
    t = d[v]
    n = t.shape[-1]
    choices = [
        f"torch.arange({n}) * 0.1 + {v}",
        f"torch.ones_like({v})",
        f"torch.full({list(t.shape)}, 0.25)",
        f"torch.linspace(-1, 1, {n}) * {v}",
        f"{v}.new_zeros({list(t.shape)})",
        f"({v} > 0)",
        f"{v}.argmax(-1)",
        f"torch.eye({n}) + {v}.mean()",
        f"torch.tensor([0.1, 0.2]).mean() + {v}",
    ]
    d.bind(d.rng.choice(choices))
