"""Loss scale after an update.

The check of the gradients computes the scale. After any change between check and update, torch's operation does.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flatout.optim as fo
from flatout.amp import GradScaler

ODD = dict(init_scale=1000.0, growth_factor=3.3, backoff_factor=0.7, growth_interval=2)


class Operators(TorchDispatchMode):
    """Recorder of the names of all torch operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


class Pair:
    """Two parameters, each with an optimizer, and a scaler of flatout or of torch."""

    def __init__(self, ours: bool, scaler: Any = None) -> None:
        self.params = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
        module = fo if ours else torch.optim
        self.optimizers = [module.SGD([p], lr=0.5) for p in self.params]
        self.scaler = scaler or (GradScaler if ours else torch.amp.GradScaler)("cpu", **ODD)
        self.scaler.scale(torch.ones(()))

    def step(self, which: int = 0, bad: bool = False) -> None:
        grad = torch.full((5,), float("inf") if bad else 0.25)
        self.params[which].grad = self.scaler.scale(grad).clone()
        self.scaler.step(self.optimizers[which])

    def run(
        self, steps: int = 5, bad: tuple[int, ...] = (1,), between: Callable[[Pair], Any] | None = None
    ) -> list[Any]:
        history = []
        for step in range(steps):
            self.step(bad=step in bad)
            history.append(self.scaler.get_scale())
            if between is not None:
                between(self)
            if between is not with_a_new_scale:
                self.scaler.update()
            history.append(self.scaler.state_dict())
        return [*history, *(p.tolist() for p in self.params)]


def with_a_new_scale(pair: Pair) -> None:
    pair.scaler.update(77.0)


def with_a_found_infinity(pair: Pair) -> None:
    for record in pair.scaler._per_optimizer_states.values():
        for found in record["found_inf_per_device"].values():
            found.fill_(1.0)


def with_another_infinity(pair: Pair) -> None:
    for record in pair.scaler._per_optimizer_states.values():
        record["found_inf_per_device"] = {torch.device("cpu"): torch.ones(())}


def with_a_second_optimizer(pair: Pair) -> None:
    pair.step(1, bad=pair.scaler.get_scale() < 1000)


def with_a_second_optimizer_unscaled(pair: Pair) -> None:
    pair.params[1].grad = torch.full((5,), float("nan"))
    pair.scaler.unscale_(pair.optimizers[1])


BETWEEN: list[Callable[[Pair], Any]] = [
    lambda pair: None,
    with_a_new_scale,
    with_a_found_infinity,
    with_another_infinity,
    with_a_second_optimizer,
    with_a_second_optimizer_unscaled,
    lambda pair: pair.scaler.set_growth_factor(1.7),
    lambda pair: pair.scaler.set_backoff_factor(0.3),
    lambda pair: pair.scaler.set_growth_interval(1),
    lambda pair: pair.scaler.load_state_dict(pair.scaler.state_dict() | {"scale": 11.0, "_growth_tracker": 1}),
    lambda pair: pair.scaler._scale.mul_(2),
    lambda pair: pair.scaler._growth_tracker.fill_(1),
]


@pytest.mark.parametrize("between", BETWEEN, ids=[str(i) for i in range(len(BETWEEN))])
def test_changes_between_step_and_update_count_as_in_torch(between):
    assert Pair(True).run(between=between) == Pair(False).run(between=between)


@pytest.mark.parametrize("interval", [1, 2, 3, 2**40])
@pytest.mark.parametrize("scale", [1000.0, 3e38, 1e-45, float("inf"), 0.1])
def test_the_bits_of_the_scale_are_torchs(scale, interval):
    def run(ours: bool) -> list[Any]:
        pair = Pair(ours)
        pair.scaler.load_state_dict(pair.scaler.state_dict() | {"scale": scale, "growth_interval": interval})
        return pair.run(steps=8, bad=(1, 2, 6))[:-2]

    ours, theirs = run(True), run(False)
    assert repr(ours) == repr(theirs)  # in a repr, NaN equals NaN


def test_an_update_calls_no_operator_of_torch():
    pair = Pair(True)
    pair.run(2)
    pair.params[0].grad = torch.ones(5)
    with Operators() as operators:
        pair.scaler.step(pair.optimizers[0], max_grad_norm=1.0)
        pair.scaler.update()
    assert set(operators.names) <= {"detach", "empty", "new_empty"}


def test_a_scale_that_stays_in_place_keeps_its_memory():
    pair = Pair(True)
    pair.scaler.keeps_scale_in_place = True
    scale, tracker = pair.scaler._scale, pair.scaler._growth_tracker
    assert pair.run() == Pair(False).run()
    assert pair.scaler._scale is scale
    assert pair.scaler._growth_tracker is tracker


def test_a_subclass_updates_as_it_defines():
    class Halved(GradScaler):
        def update(self, new_scale: float | Tensor | None = None) -> None:
            for record in self._per_optimizer_states.values():
                for found in record["found_inf_per_device"].values():
                    found.data[...] = 1.0  # like an all-reduce, this write keeps the version of the tensor
            super().update(new_scale)

    pair = Pair(True, Halved("cpu", **ODD))
    pair.run(1, bad=())
    assert pair.scaler.get_scale() == 700


def test_a_step_of_no_gradients_after_a_step_leaves_nothing_computed():
    pair = Pair(True)
    pair.step()
    pair.scaler.update(5.0)
    pair.params[0].grad = None
    pair.scaler.step(pair.optimizers[0])
    with pytest.raises(AssertionError, match="No inf checks"):
        pair.scaler.update()


def test_a_step_that_fails_after_its_check_counts_for_nothing():
    def run(ours: bool) -> list[Any]:
        pair = Pair(ours)
        pair.step(0)
        pair.optimizers[1].register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.step(1, bad=ours)  # torch skips a step with an infinity, and would not call the hook
        pair.scaler._per_optimizer_states.pop(id(pair.optimizers[1]))
        pair.scaler.update()
        return [pair.scaler.state_dict()]

    assert run(True) == run(False)


def test_a_backward_after_two_updates_raises_as_in_torch():
    """Two updates overwrite the scale that the backward reads."""
    pair, p = Pair(True), torch.nn.Parameter(torch.ones(5))
    scaled = pair.scaler.scale((p * p).sum())
    pair.run(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.backward()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_share_no_memory(copied):
    pair = Pair(True)
    pair.run(2)
    other = Pair(True, copied(pair.scaler))
    for mine, others, bad in ((pair, other, (1,)), (other, pair, (0, 1, 2))):
        before = others.scaler.state_dict()
        mine.run(3, bad)
        assert others.scaler.state_dict() == before


def test_a_step_in_inference_mode():
    histories = []
    for ours in (True, False):
        with torch.inference_mode():
            histories.append(Pair(ours).run())
    assert histories[0] == histories[1]
