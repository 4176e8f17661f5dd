"""What every test starts from: nothing compiled, planned or cached by another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gcpass import step, store


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
