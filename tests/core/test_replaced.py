"""Functions of torch that several observers replace, and that are torch's own again after the last of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.advise.observe import Observer
from flatout.autotune.loaders import Loaders
from flatout.autotune.recorder import Recorder
from flatout.core.replaced import is_replacement, replaced
from flatout.profile.phase_timer import PhaseTimer


class Base:
    def value(self) -> str:
        return ""


class Derived(Base):
    pass


def adding(letter: str) -> Callable[[Any], Any]:
    return lambda function: lambda self: function(self) + letter


@pytest.mark.parametrize("end", list(permutations("abc")))
@pytest.mark.parametrize("owner", [Base, Derived])
def test_blocks_end_in_any_order(owner: type[Base], end: tuple[str, ...]) -> None:
    before = vars(owner).get("value")
    blocks = {letter: ExitStack() for letter in "abc"}
    for letter, block in blocks.items():
        block.enter_context(replaced(owner, "value", adding(letter)))
    for letter in end:
        assert owner().value() == "".join(blocks)
        blocks.pop(letter).close()
    assert vars(owner).get("value") is before


def test_a_function_of_other_code_stays() -> None:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as first, ExitStack() as second:
        patch.setattr(Base, "value", Base.value)  # restored at the end
        first.enter_context(replaced(Base, "value", adding("a")))
        inner = Base.value
        patch.setattr(Base, "value", lambda self: inner(self) + "x")
        second.enter_context(replaced(Base, "value", adding("b")))
        first.close()
        assert Base().value() == "axb"
        second.close()
        assert Base().value() == "ax"
        with replaced(Base, "value", adding("c")):
            assert Base().value() == "axc"


def test_code_of_replacements_is_known() -> None:
    codes = []

    def noting(function: Any) -> Any:
        def call(self: Any) -> Any:
            codes.append(sys._getframe().f_code)
            return function(self)

        return call

    with replaced(Base, "value", noting):
        Base().value()
    assert is_replacement(codes[0])
    assert not is_replacement(Base.value.__code__)


@contextmanager
def recorder() -> Iterator[Callable[[], int]]:
    seen: list[Any] = []
    with closing(Recorder(lambda *update: seen.append(update), pytest.fail, pytest.fail)) as recording:

        def count() -> int:
            recording.end_update(torch.optim.SGD(MODULE.parameters(), lr=0.1))
            return len(seen)

        yield count


@contextmanager
def phase_timer() -> Iterator[Callable[[], int]]:
    timer = PhaseTimer()
    with timer.listening():
        yield lambda: timer._phases.count("backward")


@contextmanager
def observer() -> Iterator[Callable[[], int]]:
    with closing(Observer()) as observing:
        yield lambda: sum(site.with_graph + site.is_reached for site in observing.calls)


@contextmanager
def loaders() -> Iterator[Callable[[], int]]:
    with closing(Loaders()) as serving:
        serving.start_counting()

        def count() -> int:
            drawn = serving.drawn()
            return 0 if drawn is None else drawn.batches

        yield count


MODULE = nn.Linear(2, 1)
OBSERVERS: list[Callable[[], AbstractContextManager[Callable[[], int]]]] = [recorder, phase_timer, observer, loaders]


def train() -> None:
    for x in DataLoader(torch.ones(3, 2), batch_size=None):
        MODULE(x).sum().backward()


def functions() -> list[Any]:
    """Return the functions that two or more observers replace, and the one of batches."""
    loading = DataLoader.__init__, DataLoader.__iter__, _BaseDataLoaderIter.__next__
    return [nn.Module.__call__, torch.autograd.backward, *loading]


@pytest.mark.parametrize(("first", "second"), list(permutations(OBSERVERS, 2)))
def test_an_observer_goes_on_after_an_earlier_one(first: Any, second: Any) -> None:
    before = functions()
    with ExitStack() as earlier, ExitStack() as later:
        earlier.enter_context(first())
        count = later.enter_context(second())
        earlier.close()
        train()
        assert count() > 0
    assert all(now is then for now, then in zip(functions(), before, strict=True))
