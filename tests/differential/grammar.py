"""Grammar of random jobs. A seed gives the same job on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from flatout.techniques import REGISTRY, Advice, Measured
from tests.differential.data import BATCHES, LOADERS, NOT_REWINDABLE, OF_ONE, ONE_SHOT, WITH_WORKERS, YIELDS
from tests.differential.losses import LOSSES
from tests.differential.models import DTYPES, MODELS, NO_SINGLE_SAMPLE, NORMS, QUIRKS, SPARSE, SPLITTABLE
from tests.differential.optimizers import FOR_SPARSE, NO_COMPLEX, OPTIMIZERS, SCHEDULERS
from tests.differential.process import FLAGS

FORMS = ("step", "step", "step", "fit", "checkpoint", "own loop", "inference")
"""Owners of the loop. "checkpoint" is a ``run.step`` loop that is saved after an epoch and resumed by a new run."""

LOSSES_LEFT_OUT = {
    "checkpoint": ("teacher", "gan", "bank", "list"),  # flatout's checkpoints do not hold the loss's other objects
    "inference": (
        "gan",
        "teacher",
        "random",
        "pops labels",
        "in place",
        "ignoring some",
        "host random",
        "bank",
        "list",
    ),
}
"""Losses left out, by form.

A resized or expanded buffer and ``Lookahead`` cannot resume from a ``state_dict`` either.
"""

WHOLE_LOSSES = ("function", "closure", "of the model", "ignoring some")
"""Losses that are the sum of the losses of the parts of a batch."""

FORCES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "bf16", "fp16"),
    "fused_optimizer": (True,),
    "channels_last": (True,),
    "sdpa_backend": ("math", "flash"),
    "in_memory": (True,),
    "workers": (0, 0, 0, 1),
    "cpu_threads": (1,),
    "batch_size": ({"micro_batch": 2},),
}
"""Values that a job may force. Compilation takes seconds and is drawn separately."""

ALWAYS = {"compile": False, "torchscript": False, "workers": False, "cpu_threads": False}
"""Techniques whose trials take seconds. A job forces them or leaves them out."""

FORBIDDABLE = tuple(t.name for t in REGISTRY if isinstance(t, (Measured, Advice)))


@dataclass(frozen=True)
class Failure:
    """Exception at a call of the model or the loss, during ``optimize``."""

    where: str
    call: int
    error: type[BaseException]


@dataclass(frozen=True)
class Job:
    """Training, and the arguments of ``optimize``. The defaults are the simplest job.

    ``twice`` calls ``optimize`` two times. ``undo`` runs between the calls only in a comparison with plain training.
    """

    seed: int = 0
    form: str = "step"
    model: str = "linear"
    quirks: tuple[str, ...] = ()
    loss: str = "function"
    batch: str = "tuple"
    loader: str = "tensors shuffled"
    optimizer: str = "SGD"
    scheduler: str = ""
    trained: int = 0
    techniques: dict[str, Any] = field(default_factory=lambda: dict(ALWAYS))
    arguments: dict[str, Any] = field(default_factory=lambda: {"budget": 0})
    flags: tuple[str, ...] = ()
    twice: bool = False
    failure: Failure | None = None

    @property
    def refusable(self) -> str:
        """Reason for which ``optimize`` may refuse the job. An empty reason makes each refusal a defect."""
        if self.optimizer == "LBFGS":
            return "a step needs several backward passes"
        if self.scheduler == "ReduceLROnPlateau":
            return "the scheduler is stepped with a metric"
        if self.loss == "gan":
            return "a second optimizer steps inside the loss"
        if self.loader in ONE_SHOT:
            return "the loader ends after an epoch"
        return ""

    @property
    def kinds(self) -> frozenset[tuple[str, Any]]:
        """Kinds of parts in the job."""
        named = ("form", "model", "loss", "batch", "loader", "optimizer", "scheduler", "twice")
        forced = {("forced", name) for name, value in self.techniques.items() if value is not False}
        return frozenset(
            {(name, getattr(self, name)) for name in named}
            | {("quirk", name) for name in self.quirks}
            | {("flag", name) for name in self.flags}
            | forced
            | {("argument", name, str(value)) for name, value in self.arguments.items()}  # type: ignore[arg-type]
            | ({("failure", self.failure.where), ("error", self.failure.error)} if self.failure else set())
        )

    def __str__(self) -> str:
        simplest = Job()
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(simplest, f.name)]
        return f"Job({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


class Injected(Exception):
    """Exception that is raised in the middle of a trial."""


def draw(seed: int) -> Job:
    """Return the job of a seed."""
    rng = random.Random(seed)

    def chance(share: float) -> bool:
        return rng.random() < share

    form = rng.choice(FORMS)
    model = rng.choice([name for name in MODELS if form != "checkpoint" or name not in ("observer", "odd")])
    kind = MODELS[model][1]
    loss = rng.choice([name for name in LOSSES if name not in LOSSES_LEFT_OUT.get(form, ())])
    loader = rng.choice([n for n in LOADERS if n not in WITH_WORKERS]) if chance(0.94) else rng.choice(WITH_WORKERS)
    if loader in OF_ONE and model in NO_SINGLE_SAMPLE:
        loader = "samples shuffled"
    if form == "checkpoint" and loader in NOT_REWINDABLE:  # these loaders restart in a new process
        loader = "samples shuffled"
    takes = LOSSES[loss][1]
    fitting = [
        name
        for name, container in BATCHES.items()
        if takes in container.takes
        and (kind == "vectors" or "sparse" not in container.takes)
        and name == YIELDS.get(loader, name)
    ]
    if not fitting:
        loader, fitting = "samples shuffled", [name for name, c in BATCHES.items() if takes in c.takes]
    batch = rng.choice(fitting)
    optimizers = FOR_SPARSE.get(model) or [
        name for name in OPTIMIZERS if name != "SparseAdam" and (model != "complex" or name not in NO_COMPLEX)
    ]
    left_out = {"Lookahead" if form == "checkpoint" else "", "Adafactor" if model == "odd" else ""}
    optimizer = rng.choice([name for name in optimizers if name not in left_out])
    quirks = _quirks(rng, model, form)
    if form == "own loop" and loss in LOSSES_LEFT_OUT["inference"]:
        # Without an optimizer, a model in eval mode is one for inference. These losses cannot run there.
        quirks = tuple(name for name in quirks if name != "eval mode")
    scheduler = rng.choice(["", *SCHEDULERS]) if form != "inference" else ""
    techniques = _techniques(rng, form)
    if model in NO_SINGLE_SAMPLE and techniques.get("precision") in ("bf16", "fp16"):
        # BatchNorm turns two samples, as in the last batch, into 1 and -1. Rounding may exchange them.
        loader = "full batches"
    if model == "scripted" and techniques.get("precision") == "fp16":
        techniques["precision"] = "bf16"  # scripted modules of one type share graphs, with the first autocast dtype
    if model not in SPLITTABLE or loss not in WHOLE_LOSSES or {"hooks", "spectral norm"} & {*quirks}:
        techniques.pop("batch_size", None)
    arguments: dict[str, Any] = {"budget": rng.choice([0, 0, 0, 0.3])}
    trains = form in ("step", "fit", "checkpoint")
    if trains:
        arguments["accumulate"] = rng.choice([1, 1, 2])
        if model not in SPARSE and chance(0.3):
            arguments["max_grad_norm"] = 0.5
    if chance(0.15):
        arguments["deterministic"] = True
    if chance(0.15):
        arguments["seed"] = 5
    failure = None
    if form == "step" and chance(0.2):
        error = rng.choice([KeyboardInterrupt, Injected, MemoryError])
        failure = Failure(rng.choice(["forward", "loss"]), rng.choice([1, 2, 3, 4, 6, 9, 20]), error)
        arguments["budget"] = 0.3
    return Job(
        seed=seed,
        form=form,
        model=model,
        quirks=quirks,
        loss=loss,
        batch=batch,
        loader=loader,
        optimizer=optimizer,
        scheduler="" if (form, scheduler) == ("own loop", "ReduceLROnPlateau") else scheduler,
        trained=rng.choice([0, 2]),
        techniques=techniques,
        arguments=arguments,
        flags=tuple(name for name in FLAGS if chance(0.1)),
        twice=chance(0.3),
        failure=failure,
    )


def _techniques(rng: random.Random, form: str) -> dict[str, Any]:
    chosen = dict(ALWAYS)
    for name in FORBIDDABLE:
        if rng.random() < 0.15:
            chosen[name] = False
    for name, values in FORCES.items():
        if rng.random() < 0.25:
            chosen[name] = rng.choice(values)
    if form in ("own loop", "inference") and chosen.get("precision") == "fp16":  # only ``run.step`` scales the loss
        chosen["precision"] = "bf16"
    if rng.random() < 0.02:
        name, other = rng.choice([("compile", "torchscript"), ("compile", "torchscript"), ("torchscript", "compile")])
        chosen |= {name: True, other: False}
    return chosen


def _quirks(rng: random.Random, model: str, form: str) -> tuple[str, ...]:
    chosen = {name for name in QUIRKS if name not in NORMS + DTYPES and rng.random() < 0.12}
    if model not in ("attention", *SPARSE):  # these have a tied last layer, or none
        if rng.random() < 0.25:
            chosen.add(rng.choice(NORMS))
        if rng.random() < 0.2 and model not in ("complex", "scripted", "graph module"):
            chosen.add(rng.choice(DTYPES))
    if "bf16" in chosen:
        chosen -= {"orthogonal", "spectral norm"}  # torch has no 16-bit kernels for these
    if model in SPARSE:
        chosen -= {"frozen", "hooks"}
    if form == "checkpoint":
        chosen.discard("noted calls")  # flatout's checkpoints do not hold notes
    if form == "inference":
        chosen.add("eval mode")
    return tuple(name for name in QUIRKS if name in chosen)


def is_slow(job: Job) -> bool:
    """Return True for a job that compiles, which takes many times longer than any other job."""
    return any(job.techniques.get(name) is True for name in ("compile", "torchscript"))


def covering(seeds: Iterable[int], count: int, slow: int) -> list[int]:
    """Return seeds whose jobs have every kind of part among ``seeds``, as far as ``count`` jobs can.

    Args:
        seeds: seeds to choose from.
        count: number of chosen seeds.
        slow: number of chosen seeds that may compile.

    Returns:
        Chosen seeds. Each one adds the most new kinds to the seeds before it.
    """
    jobs = [draw(seed) for seed in seeds]
    chosen: list[int] = []
    seen: set[tuple[str, Any]] = set()
    for i in range(count):
        left = [job for job in jobs if job.seed not in chosen and is_slow(job) == (i < slow)]
        best = max(left, key=lambda job: len(job.kinds - seen))
        chosen.append(best.seed)
        seen |= best.kinds
    return chosen
