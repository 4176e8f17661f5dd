"""Where plans are kept: in this process, beside the compile cache, in a dump folder.

When a compile cache answers, nothing is planned, in this process or another; the
sidecar file beside the cache then still says what the compiled code does. It is never
what is run: a lost sidecar costs the decisions and what later regions count by them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from gcpass.decisions import RegionPlan
from gcpass.errors import GcpassError

__all__ = ["clear", "dump", "load_sidecar", "plans", "record", "region_key"]
__all__ += ["save_sidecar", "sidecar_path"]

log = logging.getLogger("gcpass")

_lock = threading.Lock()
_recorded: list[RegionPlan] = []


def record(plan: RegionPlan) -> None:
    """Add a plan to those of this process."""
    with _lock:
        _recorded.append(plan)


def plans() -> tuple[RegionPlan, ...]:
    """Return the plans of this process, oldest first."""
    with _lock:
        return tuple(_recorded)


def clear() -> None:
    """Forget the plans of this process; files stay."""
    with _lock:
        _recorded.clear()


def region_key(fingerprint: str, graph_text: str, inputs: Sequence[object]) -> str:
    """Return 64 hexadecimal digits that name a region, equal in every process.

    Args:
        fingerprint: of everything that decides a plan besides the graph.
        graph_text: the region's code; memory addresses and comments in it do not
            count. (Comments say from which line code came. Torch's compile caches do
            not look at that, and the plan must be found whenever they answer.)
        inputs: tensors count by dtype, shape, stride, device and requires_grad,
            sizes and everything else by their repr.
    """
    digest = hashlib.sha256()
    code = re.sub(r"^\s*(#.*)?\n", "", graph_text, flags=re.MULTILINE)
    for part in (fingerprint, code, *map(_input_text, inputs)):
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", part).encode()
        digest.update(b"%d:" % len(text))  # so that parts cannot run together
        digest.update(text)
    return digest.hexdigest()


def sidecar_path(key: str) -> Path:
    """Return where the plan of a region is kept beside Inductor's cache."""
    from gcpass.torch_private import cache_dir

    return Path(cache_dir(), "gcpass", f"{key}.json")


def save_sidecar(key: str, plan: RegionPlan) -> None:
    """Keep a plan for processes that find its code in the cache.

    A cache folder that cannot be written costs a warning, as it does with Inductor.
    """
    path = sidecar_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, plan.to_json())
    except OSError as error:
        log.warning("the decisions are not kept for later cache hits: %s", error)


def load_sidecar(key: str) -> RegionPlan | None:
    """Return the plan kept for a region, None if there is none that can be read."""
    path = sidecar_path(key)
    try:
        return RegionPlan.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, GcpassError) as error:
        log.warning("ignoring the decisions in %s: %s", path, error)
        return None


def dump(plan: RegionPlan, folder: str | os.PathLike[str]) -> Path:
    """Write a plan into a folder for people, and return the file.

    The folder is made if need be. A file that holds an equal plan is left as it is
    and returned; one that holds another plan is never overwritten.

    Raises:
        OSError: the folder cannot be written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    region = re.sub(r"[^\w.-]", "_", plan.region)
    stem, number = f"{region}_{plan.digest[:8]}", 1
    while True:
        suffix = "" if number == 1 else f"_{number}"
        path = Path(folder, f"{stem}{suffix}.json")
        if _create(path, plan.to_json()) or _holds(path, plan):
            return path
        number += 1


def _input_text(value: object) -> str:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return repr(value)
    names = ("dtype", "shape", "device", "requires_grad", "layout")
    texts = [str(getattr(value, name, None)) for name in names]
    stride = getattr(value, "stride", None)
    if texts[-1] in ("torch.strided", "None") and callable(stride):
        texts.append(str(stride()))  # sparse tensors have no strides
    return " ".join(texts)


def _holds(path: Path, plan: RegionPlan) -> bool:
    try:
        return RegionPlan.from_json(path.read_text(encoding="utf-8")) == plan
    except (OSError, UnicodeDecodeError, GcpassError):
        return False


def _create(path: Path, text: str) -> bool:
    """Write a new file whole and return True; False when the name is taken."""
    draft = _write_draft(path, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        return _create_in_place(path, text)
    finally:
        draft.unlink()
    return True


def _create_in_place(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old text or the new, never a part."""
    draft = _write_draft(path, text)
    try:
        os.replace(draft, path)
    except OSError:
        draft.unlink()
        raise


def _write_draft(path: Path, text: str) -> Path:
    """Write a file beside ``path``, under a name that no other writer uses."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return draft
