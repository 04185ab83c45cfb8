"""Jobs whose steps take simulated time, so that every decision of ``optimize`` can be repeated exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatout
from tests.clock import Clock, TimedStep, simulated_tuning

SAMPLES = 96
BATCH_SIZE = 16
CLASSES = 3


@dataclass(frozen=True)
class Simulated:
    """Job and the simulated times of its parts.

    Attributes:
        step_ms: milliseconds of a step of ``BATCH_SIZE`` samples without techniques.
        factors: factor of the step time by name of an active technique.
        noise: relative standard deviation of the step time.
        sample_ms: milliseconds to load one sample in the training process.
        data: ``"tensors"``, ``"samples"`` of a map-style dataset, or a ``"stream"``.
        model: ``"perceptron"`` or ``"convolution"``.
        form: ``"step"`` with an optimizer, ``"own loop"`` without, or ``"inference"``.
        arguments: further arguments of ``flatout.optimize``.
    """

    step_ms: float = 10.0
    factors: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.01
    sample_ms: float = 0.0
    data: str = "tensors"
    model: str = "perceptron"
    form: str = "step"
    arguments: Mapping[str, Any] = field(default_factory=dict)


REAL_TIME = {"compile": False, "torchscript": False, "workers": False}
"""Disabled techniques: compilers and worker processes take real time, which the simulated clock does not count."""

PAYS = {"precision": 0.6, "fused_optimizer": 0.8, "cpu_threads": 0.7, "channels_last": 0.75}
COSTS = {name: 1 / factor for name, factor in PAYS.items()}

JOBS: dict[str, Simulated] = {
    "nothing differs": Simulated(),
    "everything pays": Simulated(factors=PAYS),
    "everything costs": Simulated(factors=COSTS),
    "noisy": Simulated(factors=PAYS, noise=0.3),
    "very noisy": Simulated(factors={"fused_optimizer": 0.95}, noise=1.0),
    "long steps": Simulated(step_ms=4000, factors=PAYS),
    "short steps": Simulated(step_ms=1.0, factors=PAYS),
    "convolution": Simulated(model="convolution", factors=PAYS),
    "convolution, costs": Simulated(model="convolution", factors=COSTS),
    "slow samples": Simulated(data="samples", sample_ms=2.0),
    "slow samples, long steps": Simulated(data="samples", sample_ms=2.0, step_ms=200),
    "stream": Simulated(data="stream", sample_ms=1.0, factors=PAYS),
    "own loop": Simulated(form="own loop", factors=PAYS),
    "inference": Simulated(form="inference", factors=PAYS),
    "accumulated": Simulated(factors=PAYS, arguments={"accumulate": 3, "max_grad_norm": 0.5}),
    "deterministic": Simulated(factors=PAYS, arguments={"deterministic": True, "seed": 3}),
    "short training": Simulated(factors=PAYS, data="samples", sample_ms=2.0, arguments={"expected_steps": 12}),
    "little budget": Simulated(factors=PAYS, arguments={"budget": 0.5}),
    "default budget": Simulated(factors=PAYS, arguments={"budget": None, "expected_steps": 1000}),
    "no budget": Simulated(factors=PAYS, arguments={"budget": 0}),
    "forced": Simulated(factors=COSTS, arguments={"techniques": {"fused_optimizer": True, "in_memory": True}}),
    "forbidden": Simulated(factors=PAYS, arguments={"techniques": {"precision": False, "cpu_threads": False}}),
    "in fp32": Simulated(factors=PAYS, arguments={"precision": "fp32"}),
}


class SimulatedStep(TimedStep):
    """Loss function that advances the clock by the time of a job's step."""

    def __init__(self, job: Simulated, clock: Clock) -> None:
        super().__init__(clock)
        self._job = job
        self._noise = random.Random(7)

    def seconds(self, samples: int) -> float:
        seconds = self._job.step_ms / 1e3 * samples / BATCH_SIZE
        for name in sorted(self.active):
            seconds *= self._job.factors.get(name, 1.0)
        return seconds * max(0.1, self._noise.gauss(1.0, self._job.noise))


class Small(nn.Module):
    """Perceptron with BatchNorm and Dropout, or one convolution."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        convolution = [nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, CLASSES)]
        perceptron = [nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)]
        self.layers = nn.Sequential(*(convolution if kind == "convolution" else perceptron))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _samples(job: Simulated) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    return (x.view(SAMPLES, 2, 4, 4) if job.model == "convolution" else x), y


class TimedSamples(Dataset[Any]):
    def __init__(self, job: Simulated, clock: Clock) -> None:
        self._x, self._y = _samples(job)
        self._seconds = job.sample_ms / 1e3
        self._clock = clock

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._clock.advance(self._seconds)
        return self._x[index], self._y[index]


class TimedStream(IterableDataset[Any]):
    def __init__(self, samples: TimedSamples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self._samples[i] for i in range(SAMPLES))


def _loader(job: Simulated, clock: Clock) -> DataLoader[Any]:
    if job.data == "tensors":
        return DataLoader(TensorDataset(*_samples(job)), BATCH_SIZE, shuffle=True)
    samples = TimedSamples(job, clock)
    if job.data == "stream":
        return DataLoader(TimedStream(samples), BATCH_SIZE)
    return DataLoader(samples, BATCH_SIZE, shuffle=True)


def run(job: Simulated, use: Callable[[flatout.Run], Any]) -> Any:
    """Tune the job on a simulated clock and return ``use(run)`` for the tuned run."""
    with simulated_tuning() as clock:
        torch.manual_seed(0)
        model = Small(job.model)
        step = SimulatedStep(job, clock)
        arguments = {"budget": 60, **job.arguments}
        arguments["techniques"] = REAL_TIME | arguments.get("techniques", {})
        if job.form == "inference":
            model.eval()
            model.register_forward_hook(lambda _, __, output: step.advance_clock(len(output)))
        elif job.form == "step":
            arguments["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)
        step.watch(model, arguments.get("optimizer"))
        if job.form != "inference":
            arguments["loss_fn"] = step
        tuned = flatout.optimize(model, _loader(job, clock), **arguments)
        try:
            return use(tuned)
        finally:
            tuned.undo()
