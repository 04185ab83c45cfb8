"""Rejection of invalid states. A rejected state changes nothing."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from tests.training.checkpoint.test_file import equal
from tests.training.checkpoint.training import make

Snapshot = dict[str, Any]


@pytest.fixture(scope="module", params=["plain", "scaled", "workers"])
def run(request: pytest.FixtureRequest) -> Iterator[flatout.Run]:
    run = make(request.param)
    for _, batch in zip(range(3), run.loader, strict=False):  # in the middle of an epoch
        run.step(batch)
    yield run
    run.undo()


@pytest.fixture(scope="module")
def good(run: flatout.Run) -> Snapshot:
    return copy.deepcopy(run.state_dict())


def everything(run: flatout.Run) -> Any:
    generators = torch.get_rng_state(), random.getstate(), [np.asarray(part) for part in np.random.get_state()[1:3]]
    return copy.deepcopy(run.state_dict()), run.micro_batch, run.steps, vars(run.fitted), generators


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(equal(left, right))


def put(state: Snapshot, *keys: Any, value: Any) -> Snapshot:
    """Return a copy of the state with another value at this path."""
    changed = copy.deepcopy(state)
    place: Any = changed
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return changed


WRONG: dict[str, Callable[[Snapshot], Any]] = {
    "micro_batch of a list": lambda good: put(good, "micro_batch", value=[]),
    "micro_batch of no samples": lambda good: put(good, "micro_batch", value=0),
    "micro_batch of a truth value": lambda good: put(good, "micro_batch", value=True),
    "steps of a text": lambda good: put(good, "steps", value="3"),
    "steps below 0": lambda good: put(good, "steps", value=-1),
    "a version of tensors": lambda good: put(good, "version", value=torch.ones(2)),
    "a plan of lists": lambda good: put(good, "plan", value=[]),
    "a plan that decides nonsense": lambda good: put(good, "plan", "decisions", value={"precision": [[[]]]}),
    "history of a text": lambda good: put(good, "fitted", "history", value="abc"),
    "history of texts": lambda good: put(good, "fitted", "history", value=[{"loss": "low"}]),
    "a loss without steps": lambda good: put(good, "fitted", "loss", value=torch.ones(())),
    "a loss of many": lambda good: put(good, "fitted", value=good["fitted"] | {"loss": torch.ones(3), "steps": 1}),
    "fitted with more": lambda good: put(good, "fitted", "more", value=1),
    "a scheduler without a step": lambda good: put(good, "scheduler", "step", value=5),
    "a scheduler's rates as a text": lambda good: put(good, "scheduler", "_last_lr", value="0.1"),
    "a learning rate of a text": lambda good: put(good, "job", "optimizer", "param_groups", 0, "lr", value="0.1"),
    "one beta": lambda good: put(good, "job", "optimizer", "param_groups", 0, "betas", value=(0.9,)),
    "moments of another shape": lambda good: put(good, "job", "optimizer", "state", 0, "exp_avg", value=torch.ones(7)),
    "moments of a text": lambda good: put(good, "job", "optimizer", "state", 0, "exp_avg", value="small"),
    "a last parameter of another shape": lambda good: put(
        good, "job", "modules", 0, list(good["job"]["modules"][0])[-1], value=torch.ones(7, 7)
    ),
    "pending as a text": lambda good: put(good, "job", "pending", value="no"),
    "pending below 0": lambda good: put(good, "job", "pending", value=-1),
    "generators of a text": lambda good: put(good, "random", value="abc"),
    "half of the generators": lambda good: put(good, "random", 1, value=(good["random"][1][0], ("no", "state"))),
    "a scheduler's new entry and no generators": lambda good: put(
        put(good, "random", 0, value=("torch's default generator", 0)), "scheduler", "new", value=1
    ),
    "a position of a text": lambda good: put(good, "loader", "position", value="abc"),
    "a position below 0": lambda good: put(good, "loader", "position", "taken", value=-5),
    "a position of no generators": lambda good: put(good, "loader", "position", "generators", 0, value="abc"),
    "a position of a state of nothing": lambda good: put(
        good, "loader", "position", "generators", 0, 0, value=("torch's default generator", torch.ones(3))
    ),
    "an object": lambda good: put(good, "steps", value=object()),
    "a cycle": lambda good: _with_a_cycle(good),
    "a deep list": lambda good: put(good, "scheduler", "deep", value=_deep()),
}


def _with_a_cycle(good: Snapshot) -> Snapshot:
    changed = copy.deepcopy(good)
    changed["job"]["again"] = changed
    return changed


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_state_changes_nothing(name: str, run: flatout.Run, good: Snapshot) -> None:
    run.load_state_dict(good)
    loaded = everything(run)
    with torch.no_grad():  # weights differ from the state, so that a partial load would show
        for p in run.model.parameters():
            p.add_(1)
    torch.manual_seed(7)
    before = everything(run)
    with pytest.raises(ValueError, match="state"):
        run.load_state_dict(WRONG[name](good))
    assert same(everything(run), before)
    run.load_state_dict(good)
    assert same(everything(run), loaded)


class Counted(torch.optim.lr_scheduler.StepLR):
    """Schedule that counts its loads outside of its state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loads = {"count": 0}

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "loads"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads["count"] += 1
        super().load_state_dict(state_dict)


class Rejecting(torch.optim.SGD):
    """Optimizer that rejects a state after it has written a part of it."""

    rejects = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["momentum"] = 0.0
        for state in self.state.values():
            state["momentum_buffer"].zero_()
        if self.rejects:
            raise KeyError("momentum_buffer")
        super().load_state_dict(state_dict)


class Positioned(torch.utils.data.TensorDataset):
    """Dataset with a state that may be rejected."""

    rejects = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.rejects:
            raise RuntimeError("no such position")


class Extra(torch.nn.Linear):
    """Layer with extra state, which replaces an attribute."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.seen = [0]
        self.scale = torch.ones(())

    def get_extra_state(self) -> list[int]:
        return self.seen

    def set_extra_state(self, state: list[int]) -> None:
        self.seen = list(state)
        self.scale.mul_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def training(steps: int) -> flatout.Run:
    """Return a run in the middle of an epoch and of an update, after some steps."""
    torch.manual_seed(0)
    model, samples = Extra(), Positioned(torch.randn(40, 6), torch.arange(40) % 3)
    optimizer = Rejecting(model.parameters(), lr=0.1, momentum=0.9)
    run = flatout.optimize(
        model,
        torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True),
        optimizer,
        torch.nn.functional.cross_entropy,
        scheduler=Counted(optimizer, 2),
        loss_weight=lambda batch: float(batch[1].sum()),
        accumulate=2,
        budget=0,
        techniques={"fused_optimizer": False, "in_memory": False},
    )
    for _, batch in zip(range(steps), run.loader, strict=False):
        run.step(batch)
        model.seen.append(1)
    return run


def reject(run: flatout.Run, at: str) -> None:
    """Load a state that is rejected at one place, and make no later load fail."""
    state = copy.deepcopy(training(6).state_dict())
    part: Any = {"optimizer": run.optimizer, "loader": run.loader.dataset}.get(at)
    if at == "gradients":
        state["job"] |= {"pending": 1, "gradients": []}
    elif at == "scheduler":
        state["scheduler"]["gamma"] = 0.5
        state["random"] = None
    if part is not None:
        part.rejects = True
    with pytest.raises(ValueError, match="state"):
        run.load_state_dict(state)
    if part is not None:
        part.rejects = False


@pytest.mark.parametrize("at", ["optimizer", "gradients", "scheduler", "loader"])
def test_a_training_continues_as_before_a_load_that_failed_in_the_middle(at: str) -> None:
    run, untouched = training(3), training(3)
    generators = torch.get_rng_state()
    before = {name: getattr(run._job.stepper, name) for name in ("pending", "last_loss", "pending_weights")}
    seen, scale = run.model.seen, run.model.scale
    reject(run, at)
    assert {name: getattr(run._job.stepper, name) for name in before} == before
    assert run.model.seen is seen
    assert run.model.scale is scale
    assert scale == 1
    assert run._scheduler.loads == {"count": 0}
    results = []
    for each in (run, untouched):
        torch.set_rng_state(generators)
        steps = [(x, each.step((x, y))) for x, y in each.loader]
        results.append([steps, list(each.model.parameters()), each.state_dict()])
    assert same(*results)


def leaves(state: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of a state."""
    if keys:
        yield keys
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*keys, key))
    elif isinstance(state, list):
        for i, value in enumerate(state):
            yield from leaves(value, (*keys, i))


def mutated(good: Snapshot, draw: random.Random) -> Snapshot:
    state = copy.deepcopy(good)
    for _ in range(draw.randint(1, 2)):
        keys = draw.choice(list(leaves(state)))
        place: Any = state
        for key in keys[:-1]:
            place = place[key]
        act = draw.randrange(6)
        if act == 0:
            del place[keys[-1]]
        elif act == 1 and isinstance(place, dict):
            place[draw.choice(["step", "__class__", "", 7])] = place[keys[-1]]
        else:
            place[keys[-1]] = draw.choice(
                [None, [], {}, (), "x", "", b"y", -1, 0, 1 << 70, 1e30, math.nan, True, 3j, torch.tensor(3),
                 torch.zeros(2, 3), torch.zeros(0), torch.ones(5056, dtype=torch.uint8), torch.zeros(2, device="meta")]
            )  # fmt: skip
    return state


def test_mutations_of_a_state_are_loaded_or_change_nothing(run: flatout.Run, good: Snapshot) -> None:
    run.load_state_dict(good)
    loaded = 0
    for seed in range(120):
        state = mutated(good, random.Random(seed))
        before = everything(run)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of decisions of another run
                run.load_state_dict(state)
        except ValueError:
            assert same(everything(run), before), seed
            continue
        loaded += 1
        run.load_state_dict(good)
        now = run.state_dict()
        now["scheduler"] = {name: now["scheduler"][name] for name in good["scheduler"]}  # drop unknown entries
        now["micro_batch"] = good["micro_batch"]  # the smallest size of all states that were loaded stays
        assert equal(now, good), seed
    assert 0 < loaded < 100
