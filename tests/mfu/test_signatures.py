"""FLOPs by signature: each signature is counted once, and the time for counting is limited."""

from __future__ import annotations

import copy
import threading
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import flatout
from flatout.core.batches import tensors_of
from flatout.mfu import FlopCount, FlopNode, flop_count
from flatout.mfu.flop_count import CountedWork
from flatout.native._host import signature
from tests.clock import Clock, simulated_time

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    left: Any
    right: Any


TENSORS = st.builds(
    lambda kind, shape, dtype, grad: kind(torch.empty(shape, dtype=dtype)).requires_grad_(grad),
    st.sampled_from([torch.Tensor.detach, lambda t: nn.Parameter(t, requires_grad=False)]),
    st.lists(st.integers(0, 2), max_size=3),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
OTHERS = st.sampled_from([None, "text", b"", 1, True, 1.5, {1}, object()])
BATCHES = st.recursive(
    TENSORS | OTHERS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.integers(), parts, max_size=3),
        st.dictionaries(st.text(max_size=2), parts, max_size=3).map(UserDict),
        st.builds(Pair, parts, parts),
        st.builds(Record, parts, parts),
    ),
    max_leaves=6,
)


@given(BATCHES, BATCHES)
def test_signatures_tell_apart_what_tensors_tell_apart(one: Any, other: Any) -> None:
    def slowly(batch: Any) -> Any:
        return [(t.shape, t.dtype, t.requires_grad) for t in tensors_of(batch)]

    def quickly(batch: Any) -> bytes:
        return signature(batch, Tensor, tensors_of)

    assert (quickly(one) == quickly(other)) == (slowly(one) == slowly(other))
    assert quickly((one, other)) == quickly([one, {"x": other}])


def test_signatures_of_what_is_ragged_or_odd() -> None:
    def of(*batch: Any) -> bytes:
        return signature(batch, Tensor, tensors_of)

    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    more = torch.nested.nested_tensor([torch.ones(3, 3), torch.ones(3, 3)], layout=torch.jagged)
    assert of(ragged) == of(2 * ragged)
    assert of(ragged) != of(more)
    batch: list[Any] = []
    batch.append(batch)
    with pytest.raises(RecursionError):
        of(batch)
    with pytest.raises(TypeError, match="signature"):
        signature(batch)  # type: ignore[call-arg]


def test_a_ragged_dimension_is_nobody_elses_size() -> None:
    nested = [torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged) for _ in "abc"]
    for ragged in nested:
        hashed = hash(ragged.shape[1])
        assert signature(ragged, Tensor, tensors_of) != signature(torch.ones(2, hashed, 3), Tensor, tensors_of)


class Emptied(Tensor):
    """Tensor that empties its batch when its dtype is read."""

    batch: Any = None

    @property
    def dtype(self) -> torch.dtype:
        if self.batch:
            self.batch.clear()
        return super().dtype


@pytest.mark.parametrize("kind", [list, lambda parts: dict(enumerate(parts))])
def test_a_batch_may_change_meanwhile(kind: Any) -> None:
    first = torch.ones(1).as_subclass(Emptied)
    first.batch = batch = kind([[first, torch.ones(2)], *(torch.ones(3) for _ in range(100))])
    expected = signature([torch.ones(1), torch.ones(2)], Tensor, tensors_of)
    assert signature(batch, Tensor, tensors_of) == expected


class Odd(Tensor):
    """Tensor with attributes that are wrong or raise."""

    wrong: str

    @property
    def shape(self) -> Any:
        return [1] if self.wrong == "shape" else super().shape

    @property
    def dtype(self) -> torch.dtype:
        return self._asked("dtype", super().dtype)

    @property
    def requires_grad(self) -> bool:
        return self._asked("requires_grad", super().requires_grad)

    def _asked(self, name: str, value: Any) -> Any:
        if self.wrong == name:
            raise KeyError(name)
        return value


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("shape", TypeError, r"shape.*tuple.*\[1\]"),
        ("dtype", KeyError, "dtype"),
        ("requires_grad", KeyError, "requires_grad"),
    ],
)
def test_errors_of_tensors_are_told(wrong: str, error: type[Exception], message: str) -> None:
    odd = torch.ones(1).as_subclass(Odd)
    odd.wrong = wrong
    with pytest.raises(error, match=message):
        signature([odd], Tensor, tensors_of)


def test_sizes_that_are_not_known_are_told() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with pytest.raises(TypeError, match="SymInt"):
        signature(mode.from_tensor(torch.ones(5, 7), static_shapes=False), Tensor, tensors_of)


def test_tensors_must_come_in_a_list() -> None:
    with pytest.raises(TypeError, match=r"tensors_of.*list.*\(\)"):
        signature(object(), Tensor, lambda part: ())  # type: ignore[arg-type,return-value]


def count(total: int) -> FlopCount:
    return FlopCount(total, 0, 0, total, FlopNode("", total, 0, 0, ()), {}, {})


class Counting:
    """FLOP counter that takes a second for each call."""

    def __init__(self, clock: Clock) -> None:
        self.counted: list[tuple[int, ...]] = []
        self._clock = clock

    def __call__(self, x: torch.Tensor) -> FlopCount:
        self._clock.advance(1.0)
        self.counted.append(tuple(x.shape))
        return count(x.numel())


@pytest.fixture
def clock() -> Iterator[Clock]:
    with simulated_time(tick=0.0) as clock:
        yield clock


def test_each_signature_is_counted_once(clock: Clock) -> None:
    counting = Counting(clock)
    work = CountedWork(counting)
    for size in (4, 4, 3, 4, 3):
        clock.advance(1000.0)
        done = work(torch.ones(size, 2))
        assert (done.samples, done.tokens, done.flops) == (size, 0, count(2 * size))
    assert counting.counted == [(4, 2), (3, 2)]
    clock.advance(1000.0)
    work(torch.ones(4, 2, dtype=torch.float64))
    work(torch.ones(4, 2, requires_grad=True))
    assert len(counting.counted) == 4
    assert [known.total for known in work.counts] == [8, 6, 8, 8]


def test_counting_takes_two_per_cent_of_the_time_at_most(clock: Clock) -> None:
    counting = Counting(clock)
    work = CountedWork(counting)
    for size in range(1, 400):  # one step per second, all of different shapes
        work(torch.ones(size))
        clock.advance(1.0)
    assert 7 <= len(counting.counted) <= 9


def test_a_failed_count_is_not_repeated() -> None:
    tried = []

    def fail(x: torch.Tensor) -> FlopCount:
        tried.append(x)
        raise torch.OutOfMemoryError("full")

    work = CountedWork(fail)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError: full"):
        assert work(torch.ones(1)).flops is None
    assert work(torch.ones(1)) == (1, 0, None)
    assert len(tried) == 1
    assert work.counts == []


def test_the_number_of_signatures_is_bounded(clock: Clock) -> None:
    counting = Counting(clock)
    work = CountedWork(counting)
    for size in range(1, 400):
        clock.advance(1000.0)
        work(torch.ones(size))
    assert len(counting.counted) == len(work.counts) == flop_count.MOST
    assert work(torch.ones(1)).flops is not None
    assert work(torch.ones(399)) == (399, 0, None)


def test_one_thread_counts_at_a_time() -> None:
    under_way, may_end = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> FlopCount:
        under_way.set()
        may_end.wait(600)
        return count(1)

    work = CountedWork(slow)
    thread = threading.Thread(target=work, args=(torch.ones(1),))
    thread.start()
    under_way.wait(600)
    other = CountedWork(lambda x: count(2))
    assert other(torch.ones(1)).flops is None
    may_end.set()
    thread.join()
    assert other(torch.ones(1)).flops == count(2)


def test_counting_leaves_no_trace_in_what_the_loss_keeps_to_itself() -> None:
    critic, scale = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Parameter(torch.ones(4))
    model, batch = nn.Linear(8, 4), torch.randn(3, 8)
    scale.grad = torch.full((4,), 7.0)

    def loss(model: nn.Module, critic: nn.Module, scale: Tensor) -> Tensor:
        return (critic(model(batch)) * scale).sum()

    twins = copy.deepcopy((model, critic, scale))
    twins[2].grad = torch.full((4,), 7.0)
    loss(*twins).backward()
    stepped: list[Tensor] = []
    for parameter in (critic[0].weight, scale):
        parameter.register_post_accumulate_grad_hook(stepped.append)
    run = flatout.optimize(
        model,
        [batch],
        torch.optim.SGD(model.parameters(), lr=0.1),
        compute_loss=lambda model, x: loss(model, critic, scale),
        budget=0,
    )
    assert stepped == []
    run.step(batch)
    assert run.stats.total.flops_per_second is not None
    assert len(stepped) == 2
    assert torch.equal(scale.grad, twins[2].grad)
    for ours, theirs in zip(critic.parameters(), twins[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(critic.buffers(), twins[1].buffers(), strict=True):
        assert torch.equal(ours, theirs)
