"""What every test starts from: nothing compiled, planned or cached by another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gcpass import fit, step, store
from gcpass.rewrite import Split


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep Inductor's files out of the user's cache.

    One folder for all tests: a folder of its own would cost every test that builds
    another precompiled header (15 s).
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models here are too small for threads, which also keep buffers of their own."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without compiled code, plans, outstanding regions and GCPASS variables."""
    monkeypatch.delenv("GCPASS_MEMORY_BUDGET", raising=False)
    monkeypatch.delenv("GCPASS_DUMP_DIR", raising=False)
    torch._dynamo.reset()
    store.clear()
    step.forget()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    step.forget()


@pytest.fixture
def wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every rewrite wrong: the last product of the backward is negated."""
    real = fit.rewrite

    def wrong(*arguments: Any, **named: Any) -> Split:
        split = real(*arguments, **named)
        graph = split.backward.graph
        product = graph.find_nodes(
            op="call_function", target=torch.ops.aten.mm.default
        )[-1]
        with graph.inserting_after(product):
            negated = graph.call_function(torch.ops.aten.neg.default, (product,))
        product.replace_all_uses_with(
            negated, delete_user_cb=lambda user: user is not negated
        )
        split.backward.recompile()
        return split

    monkeypatch.setattr(fit, "rewrite", wrong)
