"""Infinite and NaN training: one warning, and an error that names the first module affected."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatout
from flatout.training import logged_metrics, non_finite
from tests.jobs import NO_TECHNIQUES, job_of, make_data
from tests.reasons import reasons


class Adds(nn.Module):
    """Layer that adds a number, so that the output becomes infinite and gradients stay finite."""

    number = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


class Spoils(nn.Module):
    """Layer that divides by ``by``."""

    by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by


def run_of(middle: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy, **how: object):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), middle, nn.Linear(4, 3))
    loader = torch.utils.data.DataLoader(make_data(), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return flatout.optimize(model, loader, optimizer, loss_fn, budget=0, **how)


def train(run: flatout.Run, steps: int) -> int:
    done = 0
    while True:
        for batch in run.loader:
            if done == steps:
                return done
            run.step(batch)
            done += 1


def test_finite_training_warns_of_nothing() -> None:
    run = run_of(nn.Tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(run, 120) == 120


def test_the_first_bad_module_is_named_when_skipping_does_not_end() -> None:
    spoils = Spoils()
    run = run_of(nn.Sequential(nn.Tanh(), spoils), precision="fp16")
    run.stop_after_bad = 5
    train(run, 12)
    spoils.by = 0.0
    with pytest.raises(FloatingPointError, match=r"^5 .*\b1\.1 \(Spoils\)"):
        train(run, 200)


def test_a_bad_batch_now_and_then_stops_nothing() -> None:
    spoils = Spoils()
    run = run_of(spoils, lambda output, y: functional.cross_entropy(output, y) * 0 + spoils.by)
    run.stop_after_bad = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            for i, batch in enumerate(run.loader):
                spoils.by = float("inf") if i % 2 else 1.0
                run.step(batch)


def test_a_parameter_that_has_gone_is_named() -> None:
    run = run_of(nn.Tanh())
    run.stop_after_bad = 3
    with torch.no_grad():
        run.model[0].weight[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="nan"), pytest.raises(FloatingPointError, match=r"\b0\.weight\b"):
        train(run, 200)


def test_a_scaler_that_keeps_skipping_ends_with_the_name_of_the_gradient() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * float("inf")

    class Wall(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x)

    run = run_of(Wall(), precision="fp16")
    run.stop_after_bad = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FloatingPointError, match=r"\b0\.bias\b"):
            train(run, 200)


def test_an_infinity_of_the_loss_function_names_no_module() -> None:
    run = run_of(nn.Tanh(), lambda output, y: output.sum() / 0, precision="fp16")
    run.stop_after_bad = 2
    with pytest.raises(FloatingPointError) as stopped:
        train(run, 200)
    assert "loss-not-finite" in reasons(str(stopped.value))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_on_a_cpu_every_step_counts(precision: str, patience: int) -> None:
    spoils = Spoils()
    run = run_of(nn.Sequential(nn.Tanh(), spoils), precision=precision)
    run.stop_after_bad = patience
    train(run, 20)
    before = run.steps
    spoils.by = 0.0
    with pytest.raises(FloatingPointError):
        train(run, 200)
    assert run.steps == before + patience


def test_with_a_scaler_updates_count_and_not_their_batches() -> None:
    spoils = Spoils()
    run = run_of(nn.Sequential(nn.Tanh(), spoils), precision="fp16", accumulate=3)
    run.stop_after_bad = 3
    for by in (1.0, 0.0, 1.0):
        spoils.by = by
        train(run, 6)
    spoils.by = 0.0
    with pytest.raises(FloatingPointError):
        train(run, 200)
    assert run.steps == 18 + 3 * 3


def test_updates_count_across_an_epochs_leftover_batches() -> None:
    spoils = Spoils()
    run = run_of(nn.Sequential(nn.Tanh(), spoils), precision="fp16", accumulate=len(make_data()) // 16 - 1)
    run.stop_after_bad = 3
    spoils.by = 0.0
    with pytest.raises(FloatingPointError):
        run.fit(4, progress=False)


def test_the_warning_names_the_step_and_the_callers_line() -> None:
    spoils = Spoils()
    run = run_of(spoils)
    train(run, 7)
    spoils.by = 0.0
    with pytest.warns(RuntimeWarning, match=rf"\b{run.steps + 1}\b") as told:
        train(run, 3)
    assert [each.filename for each in told if each.category is RuntimeWarning] == [__file__]


class Device:
    """Device that delivers logged numbers some steps late, as an asynchronous GPU does."""

    def __init__(self) -> None:
        self.delay, self.step, self.sent = 0, 0, []

    def watch(self, stop_after: int, losses: Iterable[float]) -> None:
        model = nn.Linear(8, 3)
        job = job_of(model, [], torch.optim.SGD(model.parameters(), lr=0.01))
        watch = non_finite.NonFiniteMonitor(job, stop_after)
        for self.step, loss in enumerate(losses, 1):
            if self.step >= watch.next_look:
                watch.look(self.step, OnDevice(torch.tensor(loss)), None)


class Slot:
    """Logged number that arrives after the device's delay."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def send(self, tensor: Tensor) -> None:
        self.value, self.there = tensor.item(), self.device.step + self.device.delay
        self.device.sent.append(self.device.step)

    def ready(self) -> bool:
        return self.device.step >= self.there

    def read(self) -> float:
        return self.value


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(logged_metrics, "_slots", lambda dtype: [Slot(device) for _ in range(64)])
    return device


class OnDevice(Tensor):
    device, is_cpu = torch.device("cuda"), False

    @staticmethod
    def __new__(cls, value: Tensor) -> OnDevice:
        return value.as_subclass(cls)


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_a_gpu_is_asked_for_every_fiftieth_loss_while_all_is_well(delay: int, device: Device) -> None:
    device.delay = delay
    device.watch(1, [1.0] * 160)
    assert device.sent == [1, 51, 101, 151]


@pytest.mark.parametrize(
    ("delay", "raised_at"),
    [
        (0, 53),  # steps 51, 52 and 53
        (1, 54),  # the same steps, each one step later
        (5, 63),  # 51 arrives in step 56, and then 56, 57 and 58 arrive in 61, 62 and 63
    ],
)
def test_late_losses_are_counted_from_the_first_bad_step_that_was_read(
    delay: int, raised_at: int, device: Device
) -> None:
    device.delay = delay
    with pytest.warns(RuntimeWarning, match=r"\b51\b.*nan"), pytest.raises(FloatingPointError):
        device.watch(3, [1.0] * 45 + [math.nan] * 100)
    assert device.step == raised_at


def test_bad_steps_between_finite_ones_are_not_counted_together(device: Device) -> None:
    device.delay = 3
    with pytest.warns(RuntimeWarning):
        device.watch(2, [math.nan if step % 3 == 1 else 1.0 for step in range(1, 400)])


class Converts(nn.Module):
    """Layer that yields another layout or dtype, with one infinite element if ``is_spoiled``."""

    is_spoiled = False

    def __init__(self, converted: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.converted = converted

    def forward(self, x: Tensor) -> Any:
        return self.converted(torch.tensor([[1.0, 2.0], [math.inf if self.is_spoiled else 1.0, 1.0]]))


class Beside(nn.Module):
    """Model that also calls an untrained module."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = nn.Linear(8, 3), beside

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x)
        return self.inner(x)


def diagnosis_of(converts: Converts) -> str:
    """Return the error of a step with an infinite loss, in which no other module has a non-finite output."""
    model, batch = Beside(converts), (torch.ones(4, 8), torch.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    excess = 0.0
    loss = lambda output, y: output.sum() + excess  # noqa: E731
    run = flatout.optimize(model, [batch], optimizer, loss, techniques=NO_TECHNIQUES, budget=0)
    run.stop_after_bad, excess = 1, math.inf
    with pytest.warns(RuntimeWarning), pytest.raises(FloatingPointError) as stopped:
        run.step(batch)
    return str(stopped.value)


@pytest.mark.parametrize(
    "converted",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.nested_tensor(list(x)),
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda x: x.to(torch.complex64),
        lambda x: x.to(torch.float8_e5m2),
        lambda x: x.to(torch.float8_e5m2fnuz),  # has NaN without infinity, and torch has no isfinite for it
        lambda x: x.to(torch.float8_e4m3fnuz),
        lambda x: x.to(torch.float16),
    ],
)
def test_elements_are_finite_or_not_in_every_layout_and_dtype(converted: Callable[[Tensor], Any]) -> None:
    converts = Converts(converted)
    assert "loss-not-finite" in reasons(diagnosis_of(converts))
    converts.is_spoiled = True
    assert "beside (Converts)" in diagnosis_of(converts)


@pytest.mark.parametrize(
    "converted",
    [lambda x: torch.arange(3), lambda x: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)],
)
def test_other_dtypes_than_floats_are_finite(converted: Callable[[Tensor], Any]) -> None:
    assert "loss-not-finite" in reasons(diagnosis_of(Converts(converted)))


def test_an_infinity_between_modules_is_named_by_the_enclosing_module() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.number = nn.Linear(8, 4), nn.Linear(4, 3), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + self.number)

    model, batch = Between(), (torch.ones(4, 8), torch.zeros(4, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, [batch], optimizer, functional.cross_entropy, precision="fp16", budget=0)
    run.stop_after_bad, model.number = 1, math.inf
    with pytest.raises(FloatingPointError, match=r"\(Between\)"):
        run.step(batch)


def test_a_module_is_named_on_sparse_inputs() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 3)
            self.adds = Adds()

        def forward(self, x: Tensor) -> Tensor:
            return self.adds(torch.sparse.mm(x, self.inner.weight.t()))

    model = Sparse()
    batch = torch.eye(8).to_sparse(), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, [batch], optimizer, lambda output, y: output.sum(), budget=0)
    run.stop_after_bad = 1
    model.adds.number = math.inf
    with pytest.warns(RuntimeWarning), pytest.raises(FloatingPointError, match=r"adds \(Adds\)"):
        run.step(batch)


def test_a_parameter_is_named_by_its_sparse_gradient() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    words, batch = Words(), (torch.arange(4), torch.arange(4))
    loss = lambda output, y: (output * 0).abs().sqrt().sum()  # noqa: E731  (its derivative at 0 is infinite)
    optimizer = torch.optim.SGD(words.parameters(), 0.1)
    run = flatout.optimize(words, [batch], optimizer, loss, precision="fp16", budget=0)
    run.stop_after_bad = 1
    with pytest.raises(FloatingPointError, match=r"table\.weight"):
        run.step(batch)


def test_a_diagnosis_that_fails_does_not_replace_the_error() -> None:
    class Refuses(nn.Module):
        """Layer that spoils one batch and raises for all later batches."""

        state = "fine"

        def forward(self, x: Tensor) -> Tensor:
            if self.state == "refuses":
                raise TypeError("no more")
            if self.state == "spoils":
                self.state = "refuses"
                return x * math.nan
            return x

    middle = Refuses()
    run = run_of(middle, precision="fp16")
    run.stop_after_bad = 1
    middle.state = "spoils"
    with pytest.raises(FloatingPointError, match="TypeError: no more"):
        train(run, 1)


def test_patience_is_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match=r"stop_after_bad.*0"):
        run_of(nn.Tanh()).stop_after_bad = 0
