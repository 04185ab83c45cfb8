"""A training in plain PyTorch and in three forms of flatout, and what differs between them."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import flatout
from tests.jobs import NO_TECHNIQUES

FORMS = ("step", "two values", "run")
"""The three forms: ``run.step``, the two values of ``optimize`` with the user's loop, and ``flatout run``."""

OWN_LOOP = ("two values", "run")
"""Forms of a training whose loop does more than ``run.step`` can."""

ROUNDING = ("batch_size", "channels_last", "compile", "fused_optimizer", "torchscript")
"""Techniques that change the order of sums. All others must give the same bits."""

OF_LOADERS = ("in_memory", "workers")
"""Techniques that trials decide alone, because their turn comes last, when a small budget has been spent."""

LONGEST = 100
"""Seconds after which a training hangs. The slowest takes a tenth of it."""

Loss = Callable[[nn.Module, Any], Tensor]
Seen = dict[str, Any]


class Refused(Exception):
    """``optimize`` does not apply the forced technique."""


class Loop(NamedTuple):
    """What a training goes on with: its model, its loader, and a function that takes one step."""

    model: nn.Module
    loader: Any
    step: Callable[[Any], Tensor]


class Start:
    """Start of a training in one form.

    Attributes:
        form: "plain", or one of ``FORMS``.
        folder: empty folder of the training.
        run: result of ``optimize``, None in the other forms.
    """

    def __init__(self, form: str, folder: Path, settings: Mapping[str, Any], budget: float) -> None:
        self.form, self.folder, self.run = form, folder, None
        self._settings, self._budget = settings, budget
        self._tuning: Any = None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Tune the trainings of the block as ``flatout run`` does, if this is the form."""
        if self.form != "run":
            yield
            return
        with flatout.auto(plan=None, **self._settings) as self._tuning:
            yield

    def __call__(
        self,
        model: nn.Module,
        loader: Any,
        optimizer: torch.optim.Optimizer | None,
        loss: Loss | None = None,
        **arguments: Any,
    ) -> Loop:
        """Return the loop of the model. Only ``run.step`` takes the arguments of ``optimize``."""
        if self.form == "step":
            self.run = self._optimized(model, loader, optimizer, compute_loss=loss, **arguments)
            return Loop(self.run.model, self.run.loader, self.run.step)
        if self.form == "two values":
            model, loader = self._optimized(model, loader, optimizer)

        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            return value.detach()

        return Loop(model, loader, step)

    def undo(self, model: nn.Module) -> None:
        if self.form == "step":
            self.run.undo()
        elif self.form == "two values":
            flatout.undo(model)
        elif self.form == "run":
            self._tuning.undo()

    def _optimized(self, *given: Any, **arguments: Any) -> Any:
        try:
            return flatout.optimize(
                *given, budget=self._budget, plan=None, expected_steps=20_000, **arguments, **self._settings
            )
        except (ValueError, torch.OutOfMemoryError) as error:
            raise Refused(str(error)) from error


Train = Callable[[Start], Seen]


@dataclass(frozen=True, eq=False)
class Situation:
    """A training, and the forms and the technique that it is tried with.

    Attributes:
        train: function that trains and returns what the training saw. "weights" may round, all else is exact.
        forms: forms in which people write the training.
        forced: techniques that the second round forces, alone. Trials decide in the first round.
        forced_forms: forms of the second round.
        tolerance: largest difference of weights that trials may leave.
        budget: seconds that ``optimize`` may measure.
        refusable: True if an argument of the training asks for what may be impossible, so that a refusal is right.
    """

    train: Train
    forms: Sequence[str]
    forced: Mapping[str, Any] | None
    forced_forms: Sequence[str]
    tolerance: float
    budget: float
    refusable: bool

    def settings(self, way: str) -> dict[str, Any]:
        if way == "trials" and self.forced and any(name in OF_LOADERS for name in self.forced):
            return {"techniques": {name: False for name in NO_TECHNIQUES if name not in self.forced}}
        if way == "trials":
            return {"techniques": {"compile": False}, "precision": "fp32"}
        return {"techniques": NO_TECHNIQUES | dict(self.forced)}

    def allowed(self, way: str) -> float:
        return self.tolerance if way == "trials" or any(name in ROUNDING for name in self.forced) else 0


class Table:
    """Situations of one kind."""

    def __init__(self) -> None:
        self.situations: list[Situation] = []

    def add(
        self,
        forms: Sequence[str] = FORMS,
        forced: Mapping[str, Any] | None = None,
        forced_forms: Sequence[str] | None = None,
        tolerance: float = 1e-3,
        budget: float = 1,
        refusable: bool = False,
    ) -> Callable[[Train], Train]:
        def added(train: Train) -> Train:
            self.situations.append(Situation(train, forms, forced, forced_forms or forms, tolerance, budget, refusable))
            return train

        return added

    def cases(self) -> pytest.MarkDecorator:
        """Parametrize a test with each situation in its forms, with trials and with the forced technique."""
        return pytest.mark.parametrize(
            ("situation", "form", "way"),
            [
                pytest.param(one, form, way, id=f"{one.train.__name__}-{form}-{way}")
                for one in self.situations
                for way, forms in (("trials", one.forms), ("forced", one.forced_forms if one.forced else ()))
                for form in forms
            ],
        )


def check(situation: Situation, form: str, way: str) -> None:
    """Assert that the training sees in this form what it sees in plain PyTorch."""
    expected = _plain(situation)
    try:
        seen = _observed(situation, form, situation.settings(way))
    except Refused as refused:
        # Other tests check the wording. An error of the training itself is no refusal.
        named = way == "forced" and any(name in str(refused) for name in situation.forced)
        assert named or situation.refusable, f"optimize ends the training: {refused}"  # noqa: PT017
        return
    found = _differences(expected, seen, situation.allowed(way))
    assert not found, found


@functools.cache
def _plain(situation: Situation) -> Seen:
    seen, again = (_observed(situation, "plain", {}) for _ in range(2))
    found = _differences(seen, again, 0)
    assert not found, f"plain PyTorch does not repeat itself: {found}"
    return seen


def _observed(situation: Situation, form: str, settings: Mapping[str, Any]) -> Seen:
    torch.set_num_threads(1)  # the threads of two test processes must not wait for each other
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    said = io.StringIO()
    with _limited(), _quick_compiler(), tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        start = Start(form, Path(folder), settings, situation.budget)
        with start.unchanged():
            seen = situation.train(start)
    return seen | {"stdout": said.getvalue()}


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise an error in a training that hangs."""

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"the training hangs: it has not ended after {LONGEST} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _quick_compiler() -> Iterator[None]:
    """Compile without code generation. Tracing, guards and autograd are those of the default compiler."""
    compile = torch.compile

    def quick(model: Any = None, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if name not in ("mode", "options", "backend")}
        return compile(model, backend="aot_eager", **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", quick)
        yield
    torch.compiler.reset()


def _differences(expected: Seen, seen: Seen, tolerance: float) -> dict[str, str]:
    """Return what differs, by name."""
    found = {}
    for name in expected.keys() | seen.keys():
        wanted, got = expected.get(name), seen.get(name)
        if name == "weights":
            if [a.shape for a in wanted] != [b.shape for b in got]:
                found[name] = "other shapes"
                continue
            off = max(float((a.double() - b.double()).abs().max()) for a, b in zip(wanted, got, strict=True))
            if not off <= tolerance:  # also if one is NaN
                found[name] = f"off by {off:.3g}"
        elif wanted != got:
            found[name] = f"{_short(got)}, expected {_short(wanted)}"
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}… ({len(text)} characters)"


def weights(*models: nn.Module) -> list[Tensor]:
    """Return copies of parameters and buffers."""
    return [value.detach().clone() for model in models for value in model.state_dict().values()]


def mlp(inputs: int = 8, hidden: int = 16, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def points(samples: int = 128, inputs: int = 8) -> TensorDataset:
    """Return points of four classes."""
    x = torch.randn(samples, inputs, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def images(samples: int = 64, size: int = 6) -> TensorDataset:
    """Return images with three channels, of two classes."""
    x = torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def sgd(*models: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr)
