"""Harmless, as a property: whatever is trained, on whatever, ``optimize`` leaves no trace of its trials."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatout
from flatout.data import is_rewindable
from flatout.measure.state import State
from flatout.optimize import TRIAL_BATCHES
from flatout.reproducible import seed_all
from flatout.techniques import REGISTRY, Advice, Measured
from tests.helpers import bits, snapshot, trained_state

SAMPLES, BATCH, CLASSES, WORDS = 18, 4, 3, 11
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def shortest_trials() -> Iterator[None]:
    """What trials leave behind depends neither on how long they take nor on how exactly they measure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.measure.bench.TRIAL_SECONDS", 0.02)
        patch.setattr("flatout.measure.bench.STRETCH_SECONDS", 0.005)
        patch.setattr("flatout.measure.bench.PHASE_SECONDS", 0.02)
        yield


# ---- models ------------------------------------------------------------------------------------------------


class Vectors(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES))

    def forward(self, x):
        return super().forward(x.to(self[0].bias.dtype))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout2d(0.2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x.to(self.conv.bias.dtype))).relu())
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """One block; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.drop(x + mixed.transpose(1, 2).flatten(2)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(self.words(x))[0][:, -1])


class SparseWords(nn.Module):
    """Its embedding has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


class WithLoss(Vectors):
    """Takes a mapping, and says itself what is to be minimised."""

    def forward(self, x, y):
        output = super().forward(x)
        return {"logits": output, "loss": functional.cross_entropy(output, y)}


class Counting(Vectors):
    """Buffers that a forward writes to, puts others in the place of, and draws; one is in no ``state_dict``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("drawn", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced + len(x)
        self.drawn.normal_()
        return super().forward(x) + 0 * self.drawn


class OneLayer(nn.Linear):
    """What is done to a layer is done to the model."""

    def __init__(self):
        super().__init__(8, CLASSES)

    def forward(self, x):
        return super().forward(x.to(self.bias.dtype))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "vectors": (Vectors, "vectors"),
    "images": (Images, "images"),
    "attention": (Attention, "words"),
    "recurrent": (Recurrent, "words"),
    "sparse": (SparseWords, "words"),
    "with loss": (WithLoss, "vectors"),
    "counting": (Counting, "vectors"),
    "one layer": (OneLayer, "vectors"),
}
"""What makes one, and what it takes."""


def _last_linear(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def _freeze(model):
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)


def _hook(model):
    part = _last_linear(model)
    part.register_forward_hook(lambda module, args, output: output * 1)
    part.register_forward_pre_hook(lambda module, args: (args[0] + 0 * torch.rand(1).to(args[0]),))
    model.register_full_backward_hook(lambda module, into, out: None)
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    next(p for p in reversed(list(model.parameters())) if p.requires_grad).register_hook(lambda gradient: gradient * 1)


def _set_part_to_eval(model):
    next(model.children(), model).eval()


def _old_weight_norm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(_last_linear(model))


QUIRKS: dict[str, Callable[[nn.Module], object]] = {
    "16 bits": lambda model: model.to(torch.bfloat16),
    "weight norm": lambda model: parametrizations.weight_norm(_last_linear(model)),
    "old weight norm": _old_weight_norm,
    "spectral norm": lambda model: parametrizations.spectral_norm(_last_linear(model)),
    "frozen": _freeze,
    "hooks": _hook,
    "part in eval mode": _set_part_to_eval,
    "eval mode": nn.Module.eval,
}
"""What is done to a model, in this order."""

NORMS = [name for name in QUIRKS if name.endswith("norm")]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
}

TAKES_SPARSE = ("sgd", "adagrad")


# ---- loaders -----------------------------------------------------------------------------------------------


class Samples(Dataset):
    """Map-style. Draws from the generators that it is told to, its own among them."""

    def __init__(self, make, draws=""):
        self.make = make
        self.draws = draws
        self.own = np.random.default_rng(7)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x, y = self.make(i)
        if self.draws and x.is_floating_point():
            draw = {"torch": lambda: torch.rand(()).item(), "python": random.random, "own": self.own.random}
            x = x + draw[self.draws]()
        return x, y


class Stream(IterableDataset):
    """Each sample is seen once, whatever is iterated how often."""

    def __init__(self, make):
        self.left = map(make, range(SAMPLES))

    def __iter__(self):
        return self.left


class Once:
    """Batches that are handed out once, whatever is iterated how often."""

    def __init__(self, batches):
        self.left = iter(batches)

    def __iter__(self):
        return self.left


class Restarts(IterableDataset):
    """Iterable as often as wanted, which nobody can know; shuffles by torch's generator as it goes."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        for i in range(SAMPLES):
            yield self.make((i + int(torch.randint(SAMPLES, ()))) % SAMPLES)


def sample(kind: str, i: int, size: int = 6) -> tuple[torch.Tensor, int]:
    """Sample ``i`` of a kind of data."""
    generator = torch.Generator().manual_seed(i)
    if kind == "words":
        return torch.randint(WORDS, (size,), generator=generator), i % CLASSES
    shape = (8,) if kind == "vectors" else (2, size, size)
    return torch.randn(shape, generator=generator), i % CLASSES


def _batches(kind: str, *, varied: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for i in range(0, SAMPLES, BATCH):
        size = 6 + i // BATCH * varied
        chosen = [sample(kind, k, size) for k in range(i, min(i + BATCH + size - 6, SAMPLES))]
        yield torch.stack([x for x, _ in chosen]), torch.tensor([y for _, y in chosen])


def _as_mappings(batches: Any) -> Any:
    xs, ys = torch.utils.data.default_collate(batches)
    return {"x": xs, "y": ys}


def make_loader(case: Case) -> Any:
    """The loader of a case, anew."""
    kind = MODELS[case.model][1]
    make = partial(sample, kind)
    name, _, how = case.loader.partition(", ")
    if name in ("list", "varied list", "once"):
        batches = list(_batches(kind, varied=name == "varied list"))
        if case.model == "with loss":
            batches = [{"x": x, "y": y} for x, y in batches]
        return Once(batches) if name == "once" else batches
    if name == "tensors":
        made = [make(i) for i in range(SAMPLES)]
        data: Any = TensorDataset(torch.stack([x for x, _ in made]), torch.tensor([y for _, y in made]))
    else:
        data = {"stream": Stream, "restarts": Restarts}.get(name, Samples)(make)
        if name.startswith("draws from "):
            data.draws = name.removeprefix("draws from ")
    arguments: dict[str, Any] = {"collate_fn": _as_mappings} if case.model == "with loss" else {}
    if "shuffled" in how:
        arguments |= {"shuffle": True}
    if "own generator" in how:
        arguments |= {"generator": torch.Generator().manual_seed(3)}
    if "worker" in how:
        arguments |= {"num_workers": 1, "persistent_workers": "persistent" in how}
    return DataLoader(data, BATCH, drop_last="full" in how, **arguments)


LOADERS = (
    *(f"tensors, {how}" for how in ("in order", "shuffled", "shuffled by own generator", "shuffled, full batches")),
    *(f"samples, {how}" for how in ("in order", "shuffled", "shuffled by own generator")),
    *(f"draws from {what}, shuffled" for what in ("torch", "python", "own")),
    "stream",
    "restarts",
    "restarts, own generator",
    "list",
    "varied list",
    "once",
)
LOADERS_WITH_WORKERS = ("samples, shuffled, a worker", "tensors, shuffled by own generator, a persistent worker")


# ---- cases -------------------------------------------------------------------------------------------------


class Injected(Exception):
    """Raised in the middle of a trial."""


@dataclass(frozen=True)
class Failure:
    """What is raised, where, and at which call."""

    where: str
    call: int
    error: type[BaseException]


@dataclass(frozen=True)
class Case:
    """A job, and what is asked of ``optimize``. ``form`` is "run", "own loop" (no optimizer) or "inference"."""

    model: str = "vectors"
    quirks: tuple[str, ...] = ()
    form: str = "run"
    optimizer: str = "adam"
    groups: bool = False
    trained: int = 0
    scheduler: str = ""
    loader: str = "tensors, shuffled"
    techniques: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    earlier: bool = False
    failure: Failure | None = None

    @property
    def reseeds_samples(self) -> bool:
        """Whether random samples are asked to be other ones, that repeat."""
        return bool(self.arguments.get("deterministic")) and self.arguments.get("seed") is not None


FLAGS: dict[str, Callable[[], object]] = {
    "no benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "products": lambda: torch.set_float32_matmul_precision("high"),
    "no flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "unfilled": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "no collector": gc.disable,
}
"""What a user may have set for the whole process."""

FORCES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16",),
    "fused_optimizer": (True,),
    "channels_last": (True,),
    "sdpa_backend": ("math", "flash"),
    "in_memory": (True,),
    "workers": (0,),
}
"""Values that techniques can be forced with, where they apply, in little time."""

SLOW_FORCES = {"compile": (True,), "torchscript": (True,), "workers": (1,), "cpu_threads": (1, 2)}

ALWAYS = {"compile": False, "torchscript": False, "workers": False, "cpu_threads": False}
"""What takes seconds to try is tried by the slow tests."""

FORBIDDABLE = [t.name for t in REGISTRY if isinstance(t, (Measured, Advice))]


@st.composite
def techniques(draw: Any, *, slow: bool = False) -> dict[str, Any]:
    forbidden = draw(st.sets(st.sampled_from(FORBIDDABLE)))
    forces = FORCES | SLOW_FORCES if slow else FORCES
    forced = {name: draw(st.sampled_from(forces[name])) for name in draw(st.sets(st.sampled_from(sorted(forces))))}
    if "torchscript" in forced:
        forced.pop("compile", None)
    return (ALWAYS if not slow else {"cpu_threads": False}) | dict.fromkeys(sorted(forbidden), False) | forced


@st.composite
def cases(draw: Any, *, budgets: tuple[float, ...] = (0, 0, 2), slow: bool = False, fails: bool = False) -> Case:
    model = draw(st.sampled_from(sorted(MODELS)))
    form = draw(st.sampled_from(["run", "run", "run", "own loop", "inference"]))
    norm = draw(st.sampled_from(["", "", *NORMS])) if model != "attention" else ""  # whose last layer is tied
    chosen = draw(st.sets(st.sampled_from([name for name in QUIRKS if name not in NORMS]))) | {norm}
    optimizers = TAKES_SPARSE if model == "sparse" else tuple(OPTIMIZERS)
    arguments: dict[str, Any] = {"budget": draw(st.sampled_from(budgets))}
    if form == "run":
        arguments["accumulate"] = draw(st.sampled_from([1, 1, 2]))
        if model != "sparse":
            arguments["max_grad_norm"] = draw(st.sampled_from([None, 0.5]))
    if draw(st.integers(0, 3)) == 0:
        arguments["deterministic"] = True
    if draw(st.integers(0, 3)) == 0:
        arguments["seed"] = 5
    failure = None
    if fails:
        error = draw(st.sampled_from([KeyboardInterrupt, Injected, MemoryError]))
        failure = Failure(draw(st.sampled_from(["forward", "loss"])), draw(st.integers(1, 60)), error)
    return Case(
        model=model,
        quirks=tuple(name for name in QUIRKS if name in chosen),
        form=form,
        optimizer=draw(st.sampled_from(optimizers)),
        groups=draw(st.booleans()),
        trained=draw(st.sampled_from([0, 2])),
        scheduler=draw(st.sampled_from(["", "before", "given"])) if form == "run" else "",
        loader=draw(st.sampled_from(LOADERS + LOADERS_WITH_WORKERS if slow else LOADERS)),
        techniques=draw(
            techniques(slow=slow).filter(lambda made: model == "attention" or not made.get("sdpa_backend"))
        ),
        arguments=arguments,
        flags=tuple(sorted(draw(st.sets(st.sampled_from(sorted(FLAGS)), max_size=3)))),
        earlier=draw(st.integers(0, 3)) == 0,
        failure=failure,
    )


# ---- jobs --------------------------------------------------------------------------------------------------


class World:
    """Everything of a case, made anew: two worlds of one case are alike to the bit."""

    def __init__(self, case: Case) -> None:
        self.case = case
        seed_all(11)
        make, self.kind = MODELS[case.model]
        self.model = make()
        for name in case.quirks:
            QUIRKS[name](self.model)
        self.optimizer: Any = None
        self.scheduler: Any = None
        if case.form == "run":
            parameters = list(self.model.parameters())
            groups: Any = parameters
            if case.groups:
                groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
            self.optimizer = OPTIMIZERS[case.optimizer](groups, lr=0.01)
            if case.scheduler:
                self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.calls = 0
        self.armed = False
        if case.failure is not None and case.failure.where == "forward":
            self.model.register_forward_pre_hook(self._count)
        self.train(case.trained)
        if case.form == "inference":
            self.model.eval()
        self.loader = make_loader(case)
        random.random(), np.random.rand(), torch.rand(1)

    def _count(self, *_: object) -> None:
        failure = self.case.failure
        if failure is not None and self.armed:
            self.calls += 1
            if self.calls == failure.call:
                raise failure.error("injected")

    def loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        if self.case.failure is not None and self.case.failure.where == "loss":
            self._count()
        return functional.cross_entropy(output.float(), target)

    @property
    def loss_fn(self) -> Any:
        return None if self.case.model == "with loss" else self.loss

    def train(self, steps: int) -> list[bytes]:
        """A plain loop, on batches of its own; leaves gradients behind. The bits of losses, and of weights."""
        optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.01)
        losses = []
        for x, y in itertools.islice(_batches(self.kind), steps):
            optimizer.zero_grad()
            loss = self.model(x, y)["loss"] if self.loss_fn is None else self.loss(self.model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(bits(loss))
        return [*losses, *map(bits, self.model.parameters())]

    def optimize(self, **changes: Any) -> flatout.Run:
        scheduler = {"scheduler": self.scheduler} if self.case.scheduler == "given" else {}
        arguments = {"techniques": self.case.techniques} | scheduler | self.case.arguments | changes
        while True:
            try:
                return flatout.optimize(self.model, self.loader, self.optimizer, self.loss_fn, **arguments)
            except ValueError as error:  # a technique that is forced does not apply: then without it
                refused = re.match(r"techniques\['(\w+)'\] must serve", str(error))
                if refused is None:
                    raise
                arguments["techniques"] = arguments["techniques"] | {refused[1]: False}


# ---- pictures ----------------------------------------------------------------------------------------------


def _children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def _native_threads() -> int:
    return sum((task / "comm").read_text().startswith("flatout") for task in Path("/proc/self/task").iterdir())


def of_process() -> dict[str, Any]:
    """What the whole process has but once, and no technique of the CPU turns. TorchInductor's executors are torch's."""
    module = torch.nn.modules.module
    optimizer = sys.modules[torch.optim.Optimizer.__module__]
    return {
        "threads": sorted(t.name for t in threading.enumerate() if not t.name.startswith("ThreadPoolExecutor")),
        "native threads": _native_threads(),
        "children": _children(),
        "collector": (gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold(), list(gc.callbacks)),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "autograd": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.autograd.is_multithreading_enabled(),
            torch._C._autograd._saved_tensors_hooks_is_enabled(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled),
        "module hooks": {
            k: dict(v) for k, v in vars(module).items() if k.startswith("_global_") and hasattr(v, "items")
        },
        "optimizer hooks": [dict(getattr(optimizer, f"_global_optimizer_{when}_hooks")) for when in ("pre", "post")],
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "interrupt": signal.getsignal(signal.SIGINT),
        "directory": os.getcwd(),
    }


def _hooks(module: nn.Module) -> dict[str, list[Any]]:
    return {name: list(value.items()) for name, value in vars(module).items() if "hooks" in name and value}


def _where(tensor: torch.Tensor | None) -> Any:
    """Which object, whose memory, and how it is laid out."""
    if tensor is None or tensor.layout is not torch.strided:
        return id(tensor)
    return id(tensor), tensor.data_ptr(), tensor.stride(), tensor.requires_grad, tensor.is_leaf


def of_objects(world: World) -> dict[str, Any]:
    """What techniques may change while they are on, and ``undo`` gives back: objects, memory, classes, flags."""
    model, optimizer, loader = world.model, world.optimizer, world.loader
    seen: dict[str, Any] = {
        "all": snapshot(model, optimizer),
        "attributes of modules": [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()],
        "tensors": [_where(t) for t in (*model.parameters(), *model.buffers())],
        "loader": {k: id(v) for k, v in vars(loader).items()} if isinstance(loader, DataLoader) else None,
        "deterministic": (
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
    }
    if optimizer is not None:
        state = [
            (id(p), [(key, id(t), not t.is_sparse and t.stride()) for key, t in entry.items() if hasattr(t, "stride")])
            for p, entry in optimizer.state.items()
        ]
        groups = [(id(group), list(group), list(map(id, group["params"]))) for group in optimizer.param_groups]
        defaults = copy.copy(optimizer.defaults)
        seen["optimizer"] = state, id(optimizer.param_groups), groups, defaults, optimizer.__dict__.get("step")
    return seen


def of_training(world: World) -> dict[str, Any]:
    """What stays as it is while techniques are on."""
    model, loader = world.model, world.loader
    state = trained_state(model, world.optimizer)
    state.pop("flags")
    return state | {
        "hooks in full": [_hooks(m) for m in model.modules()],
        "hooks of tensors": [copy.copy(p._backward_hooks) for p in model.parameters()],
        "gradients": [id(p.grad) for p in model.parameters()],
        "keys of optimizer": world.optimizer and list(map(id, world.optimizer.state)),
        "scheduler": world.scheduler and copy.deepcopy(world.scheduler.state_dict()),
        "generators of loader": _generators_of(loader),
    }


def _generators_of(loader: Any) -> Any:
    generator, own = getattr(loader, "generator", None), getattr(getattr(loader, "dataset", None), "own", None)
    return generator and bits(generator.get_state()), own and str(own.bit_generator.state)


@contextmanager
def process_of(case: Case) -> Iterator[None]:
    """The process as the user has set it up."""
    state, collects = State.capture([]), gc.isenabled()
    torch.set_num_threads(1)  # two would wait for each other wherever a machine is busy
    for name in case.flags:
        FLAGS[name]()
    try:
        yield
    finally:
        state.restore()
        if collects:
            gc.enable()


# ---- the property ------------------------------------------------------------------------------------------


def changed(before: Any, after: Any, where: str = "") -> list[str]:
    """Places in two pictures that differ."""
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        return [place for key in before for place in changed(before[key], after[key], f"{where}/{key}")]
    if type(before) in (list, tuple) and type(after) is type(before) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [place for i, (old, new) in pairs for place in changed(old, new, f"{where}/{i}")]
    return [] if before == after else [f"{where}: {str(before)[:60]} -> {str(after)[:60]}"]


def assert_same(before: Any, after: Any) -> None:
    places = changed(before, after)
    assert not places, "\n".join(places[:20])


def content(batch: Any) -> Any:
    return [bits(t) for t in (batch.values() if isinstance(batch, dict) else batch)]


def epoch_of(loader: Any) -> list[Any]:
    """The batches of an epoch; none where the loader is spent, which ``run.loader`` says by an error."""
    seen: list[Any] = []
    with contextlib.suppress(ValueError):
        seen.extend(map(content, loader))
    return seen


def expected_batches(case: Case) -> tuple[list[list[Any]], Any]:
    """Two epochs, as the user's loop has them, and where the generators are then."""
    world = World(case)
    if is_rewindable(world.loader):
        first: list[Any] = []
        batches = None
    else:
        batches = iter(world.loader)
        first = list(map(content, itertools.islice(batches, TRIAL_BATCHES)))
    if (seed := case.arguments.get("seed")) is not None:
        seed_all(seed)
    first += map(content, world.loader if batches is None else batches)
    return [first, list(map(content, world.loader))], generators(world)


def generators(world: World) -> Any:
    return snapshot(nn.Module())["random"], _generators_of(world.loader)


def check(case: Case) -> None:
    with process_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check(case)
        gc.collect()


EARLIER = ALWAYS | {"precision": "bf16", "fused_optimizer": True, "channels_last": True}


def _check(case: Case) -> None:
    world, plain = World(case), World(case)
    process, untouched = of_process(), of_objects(world)
    first = world.optimize(techniques=EARLIER, budget=0, seed=None, deterministic=False) if case.earlier else None
    if not is_rewindable(world.loader):  # what an earlier call took is in its own loader
        world.loader, plain.loader = make_loader(case), make_loader(case)
    training = of_training(world)
    world.armed = True
    try:
        run = world.optimize()
    except (KeyboardInterrupt, Injected, MemoryError):
        if case.failure is None:
            raise
        run = None
    world.armed = False
    gc.collect()
    drawn = not is_rewindable(world.loader) or case.arguments.get("seed") is not None
    assert_same(_of(training, drawn), _of(of_training(world), drawn))
    if run is None or not case.arguments.get(
        "deterministic"
    ):  # which sets a variable of the environment while it is on
        assert_same(process, of_process())
    for each in (run, first):
        if each is not None:
            each.undo()
    assert_same(_of(untouched, drawn), _of(of_objects(world), drawn))
    assert_same(process, of_process())
    seed_all(3)
    expected = plain.train(STEPS)
    seed_all(3)
    assert world.train(STEPS) == expected
    assert_same(process, of_process())


def _of(picture: dict[str, Any], drawn: bool) -> dict[str, Any]:
    """A picture; where numbers were drawn that trials do not give back, without their generators."""
    picture = {k: _of(v, drawn) if k == "all" else v for k, v in picture.items()}
    return {k: v for k, v in picture.items() if not drawn or k not in ("random", "generators of loader", "loader")}


def check_order(case: Case) -> None:
    """``run.loader`` yields two epochs of what the user's own loader would have, from the same random numbers."""
    with process_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, after = expected_batches(case)
        world = World(case)
        run = world.optimize()
        if not case.reseeds_samples or not case.loader.startswith("draws from"):
            assert_same(expected, [epoch_of(run.loader) for _ in range(2)])
            assert_same(after, generators(world))
        run.undo()


def check_steps(case: Case) -> None:
    """Training with everything on, left in the middle of an epoch, and undone: a plain model that trains on."""
    with process_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = World(case)
        process, keys, untouched = of_process(), list(world.model.state_dict()), vars(world.optimizer).get("step")
        kinds = [type(m) for m in world.model.modules()], type(world.optimizer)
        run = world.optimize()
        before = [bits(p) for p in world.model.parameters()]
        for batch in itertools.islice(run.loader, STEPS):
            assert run.step(batch).isfinite()
        run.undo()
        gc.collect()
        assert [bits(p) for p in world.model.parameters()] != before
        assert ([type(m) for m in world.model.modules()], type(world.optimizer)) == kinds
        assert vars(world.optimizer).get("step") == untouched
        assert list(world.model.state_dict()) == keys
        assert run.loader is world.loader or not is_rewindable(world.loader)
        # What it has learnt is the user's, in a form that torch's own classes take.
        twin = World(case)
        twin.model.load_state_dict(world.model.state_dict())
        twin.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
        seed_all(3)
        expected = twin.train(STEPS)
        seed_all(3)
        assert world.train(STEPS) == expected
        del batch
        gc.collect()
        assert_same(process, of_process())


TRIED = settings(max_examples=25, suppress_health_check=list(HealthCheck))
QUICKLY = settings(TRIED, max_examples=20)
SLOWLY = settings(TRIED, max_examples=15)


@TRIED
@given(cases())
@example(Case(model="sparse", optimizer="adagrad", trained=2))  # whose gradients have no strides
@example(Case(techniques=ALWAYS | {"cpu_threads": 2}, arguments={"budget": 0}))
@example(Case(model="images", trained=2, scheduler="before", techniques=EARLIER, arguments={"budget": 0}))
@example(Case(model="attention", techniques=ALWAYS | {"sdpa_backend": "math"}, arguments={"budget": 0}))
@example(Case(quirks=("eval mode",), techniques=ALWAYS, arguments={"budget": 2}))
@example(Case(model="counting", form="own loop", loader="stream", techniques=ALWAYS, arguments={"budget": 2}))
def test_trials_leave_no_trace_and_undo_gives_everything_back(case: Case) -> None:
    check(case)


@TRIED
@given(cases(budgets=(0, 2), fails=True))
def test_an_exception_in_the_middle_of_a_trial_leaves_no_trace(case: Case) -> None:
    check(case)


@QUICKLY
@given(cases(budgets=(0, 0, 0, 2)))
def test_the_loader_yields_what_the_users_own_would(case: Case) -> None:
    check_order(case)


@QUICKLY
@given(cases(budgets=(0, 0, 0, 2)).filter(lambda case: case.form == "run"))
def test_training_and_undo_leave_a_plain_model(case: Case) -> None:
    check_steps(case)


@pytest.fixture(scope="module")
def compiled_once() -> None:
    """The first compilation of a process starts TorchInductor's own processes, and sets its variables."""
    torch.compile(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    gc.collect()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@SLOWLY
@given(cases(slow=True))
@example(Case(techniques={"compile": True}, arguments={"budget": 0}))
@example(Case(techniques={"torchscript": True}, arguments={"budget": 0}))
@example(Case(loader=LOADERS_WITH_WORKERS[0], techniques={"compile": False, "workers": 1}, arguments={"budget": 0}))
@example(
    Case(loader=LOADERS_WITH_WORKERS[1], techniques={"compile": False, "in_memory": True}, arguments={"budget": 0})
)
def test_with_what_takes_long_too(case: Case) -> None:
    check(case)
    check_order(case)
    if case.form == "run":
        check_steps(case)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@SLOWLY
@given(cases(budgets=(0, 2), slow=True, fails=True))
def test_an_exception_in_the_middle_of_what_takes_long(case: Case) -> None:
    check(case)
