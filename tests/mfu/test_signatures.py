"""FLOPs by signature: each is counted once, and what counting takes is bounded."""

from __future__ import annotations

import pytest
import torch

from flatout.mfu import FlopCount, FlopNode, signatures
from flatout.mfu.signatures import CountedFlops


def count(total: int) -> FlopCount:
    return FlopCount(total, 0, 0, total, FlopNode("", total, 0, 0, ()), {}, {})


class Clock:
    """Counting takes a second each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.counted: list[tuple[int, ...]] = []
        monkeypatch.setattr(signatures.time, "perf_counter", lambda: self.now)

    def __call__(self, x: torch.Tensor) -> FlopCount:
        self.now += 1.0
        self.counted.append(tuple(x.shape))
        return count(x.numel())


def test_each_signature_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    flops = CountedFlops(clock)
    for size in (4, 4, 3, 4, 3):
        clock.now += 1000.0
        known = flops(torch.ones(size, 2))
        assert known is not None
        assert known.total == 2 * size
    assert clock.counted == [(4, 2), (3, 2)]
    clock.now += 1000.0
    flops(torch.ones(4, 2, dtype=torch.float64))
    flops(torch.ones(4, 2, requires_grad=True))
    assert len(clock.counted) == 4
    assert [known.total for known in flops.counts] == [8, 6, 8, 8]


def test_counting_takes_two_per_cent_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    flops = CountedFlops(clock)
    for size in range(1, 400):  # a step a second, no two alike
        flops(torch.ones(size))
        clock.now += 1.0
    assert 7 <= len(clock.counted) <= 9


def test_what_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(x: torch.Tensor) -> FlopCount:
        tried.append(x)
        raise torch.OutOfMemoryError("full")

    flops = CountedFlops(fail)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError: full"):
        assert flops(torch.ones(1)) is None
    assert flops(torch.ones(1)) is None
    assert len(tried) == 1
    assert flops.counts == []
