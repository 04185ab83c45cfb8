from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.process_state import ATTENTION, STATES, put_back

drawn: list[tuple[float, float, float, int]] = []


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_starts_with_the_same_states(turn: int) -> None:
    drawn.append((random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads()))
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert drawn[-1] == drawn[0]


def by_new_flag(backend: Any, precision: str) -> Callable[[], None]:
    def put() -> None:
        backend.fp32_precision = precision

    return put


def flip(owner: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, not getattr(owner, name))


def flip_attention(name: str) -> Callable[[], None]:
    cuda = torch.backends.cuda
    return lambda: getattr(cuda, f"enable_{name}_sdp")(not getattr(cuda, f"{name}_sdp_enabled")())


def keep_memory() -> None:
    from flatout.techniques import malloc as mallopt

    if why := mallopt.why_not():
        pytest.skip(why)
    mallopt.keep(not mallopt.keeps())


CHANGES: dict[str, tuple[str, Callable[[], Any]]] = {
    # changed setting: (its state, function that changes it)
    "Python's random": ("Python's random", random.random),
    "NumPy's random": ("NumPy's random", np.random.rand),
    "torch's random": ("torch's random", lambda: torch.rand(())),
    "threads": ("threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "gradients": ("gradients", lambda: torch.set_grad_enabled(False)),
    "dtype": ("dtype", lambda: torch.set_default_dtype(torch.float64)),
    "deterministic": ("determinism", lambda: torch.use_deterministic_algorithms(True)),
    "deterministic, warnings": ("determinism", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
    "filled memory": ("determinism", flip(torch.utils.deterministic, "fill_uninitialized_memory")),
    "cuDNN": ("cuDNN", flip(torch.backends.cudnn, "enabled")),
    "cudnn.benchmark": ("cuDNN", flip(torch.backends.cudnn, "benchmark")),
    "cudnn.deterministic": ("cuDNN", flip(torch.backends.cudnn, "deterministic")),
    "precision": ("matrix products", lambda: torch.set_float32_matmul_precision("medium")),
    "TF32": ("matrix products", by_new_flag(torch.backends.cuda.matmul, "tf32")),
    "bfloat16": ("matrix products", by_new_flag(torch.backends.mkldnn.matmul, "bf16")),
    **{f"attention {name}": ("attention", flip_attention(name)) for name in ATTENTION},
    "order of attention": ("attention", lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])),
    "malloc": ("malloc", keep_memory),
}


def plain(value: Any) -> Any:
    """Return the value without tensors and arrays, for comparisons."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_test_changes_is_put_back(name: str, change: Callable[[], Any]) -> None:
    def seen() -> dict[str, Any]:
        return {state: plain(read()) for state, (read, _) in STATES.items()}

    before = seen()
    with put_back():
        change()
        assert seen()[name] != before[name]
    assert seen() == before


def test_every_state_is_tried() -> None:
    assert {name for name, _ in CHANGES.values()} == STATES.keys() - {"random of GPUs"}
