"""Options of the reducer: gradients of plain DDP bit for bit, also after failures and exchanges."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from flatout.distributed.agreement import GroupAgreement, RankFailure
from flatout.distributed.gradient_sync import GradientSync, ReducerOptions
from flatout.distributed.process_group import control_group
from flatout.distributed.step_clock import StepClock
from flatout.techniques.data_parallel import Replicas
from flatout.training.job import Job
from flatout.training.recovery import Recovery
from tests.distributed.data_parallel_checks import (
    CLASSES,
    WIDTH,
    Net,
    assert_equal_on_all_ranks,
    assert_same_training,
    net,
    optimizer_of,
    slices,
    whole_training,
    works,
)
from tests.jobs import job_of
from tests.ranks import RankPool, on_ranks


def _name(options: ReducerOptions) -> str:
    return "+".join(name for name in CHANGES if getattr(options, name)) or "default"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


SMALL = 200


"""Bytes of a bucket. A weight of ``Net`` has 440 bytes, so it does not fit."""


CHANGES: dict[str, Any] = {
    "bucket_bytes": SMALL,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "is_compressed": True,
}


CASES = [
    ReducerOptions(**{name: CHANGES[name] for name in names})
    for count in (0, 1, 2, len(CHANGES))
    for names in itertools.combinations(CHANGES, count)
]


"""Options to check: the default, each option, each pair, and all options."""


def ranks() -> GroupAgreement:
    return GroupAgreement(control_group())


def plain_ddp(model: nn.Module, options: ReducerOptions, *, unused: bool) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        model,
        init_sync=False,
        bucket_cap_mb=None if options.bucket_bytes is None else options.bucket_bytes / 2**20,  # type: ignore[arg-type]
        find_unused_parameters=unused and not options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    if options.is_compressed:
        ddp.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))  # see GradientSync
    return ddp


def steps_of(model: nn.Module, backward: Callable[[Tensor, Tensor], None], steps: int) -> list[list[Tensor]]:
    """Return the gradients of steps with SGD, and the weights after these. A missing gradient is empty."""
    optimizer, found = optimizer_of(model, "sgd"), []
    for x, y in itertools.islice(itertools.cycle(slices()), steps):
        optimizer.zero_grad()
        backward(x, y)
        found.append([torch.empty(0) if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return [*found, [p.detach().clone() for p in model.parameters()]]


def by_sync(sync: GradientSync, model: nn.Module, x: Tensor, y: Tensor) -> None:
    with sync.averaged():
        sync.run(lambda: cross_entropy(model(x), y)).backward()


def by_ddp(ddp: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(ddp(x), y).backward()


def assert_bit_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def steps_equal_those_of_ddp(options: ReducerOptions, unused: str) -> None:
    """Compare the gradients of each step, and the weights after them, with those of DDP."""
    model, reference = net(unused=unused), net(unused=unused)
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    sync.finds_unused, sync.options = bool(unused), options
    ddp = plain_ddp(reference, options, unused=bool(unused))
    found = steps_of(model, partial(by_sync, sync, model), 5)
    expected = steps_of(reference, partial(by_ddp, ddp), 5)
    assert_bit_equal(found, expected)
    assert_equal_on_all_ranks(found[-1])
    assert sync.steps_to_settle == 0
    sync.remove()


class TwoDtypes(nn.Module):
    """Model whose gradients need two buckets at least."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double())


@pytest.mark.parametrize("options", CASES[:5], ids=_name)
@on_ranks("pair")
def test_gradients_of_two_dtypes_equal_those_of_ddp(options: ReducerOptions) -> None:
    torch.manual_seed(0)
    model = TwoDtypes()
    reference = copy.deepcopy(model)
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    sync.options = options
    ddp = plain_ddp(reference, options, unused=False)
    assert_bit_equal(steps_of(model, partial(by_sync, sync, model), 4), steps_of(reference, partial(by_ddp, ddp), 4))
    sync.remove()


def compression_rounds_to_its_dtype() -> None:
    model, reference = net(), net()
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    sync.options = ReducerOptions(is_compressed=True)
    (found, _), (expected, _) = (
        steps_of(model, partial(by_sync, sync, model), 1),
        steps_of(reference, partial(by_ddp, plain_ddp(reference, ReducerOptions(), unused=False)), 1),
    )
    for grad, mean in zip(found, expected, strict=True):
        assert grad.dtype is torch.float32
        assert torch.equal(grad, grad.bfloat16().float())
        # Each part and each sum is rounded, by at most 2**-9 of the largest partial sum.
        torch.testing.assert_close(grad, mean, rtol=0, atol=dist.get_world_size() * 2**-8 * float(mean.abs().max()))
    assert not all(map(torch.equal, found, expected))
    sync.remove()


class _Sums(torch.autograd.Function):
    """Layer that makes all-reduces in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(3))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        for _ in range(5):
            dist.all_reduce(torch.ones(3))
        return grad


class Summing(nn.Module):
    """Model whose last layer makes all-reduces."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return _Sums.apply(self.net(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", CASES, ids=_name)
@on_ranks("pair")
def test_collectives_of_the_model_do_not_count(options: ReducerOptions) -> None:
    """A rank fails after the all-reduces of the model. The rank still completes all all-reduces of the gradients."""
    model, together = Summing(net()), ranks()
    sync = GradientSync([model], together, StepClock(torch.device("cpu")))
    sync.options = options

    def fails(where: str, call: int, samples: int) -> None:
        if (where, call, dist.get_rank()) == ("backward", 3, 1):
            raise ValueError("planned")

    model.net.fails = fails
    x, y = slices()[0]
    for step in range(1, 5):
        model.zero_grad()
        if step == 3:
            with pytest.raises(RankFailure, match="planned"), together.attempt():
                by_sync(sync, model, x, y)
            sync.reset()
        else:
            by_sync(sync, model, x, y)
    assert_equal_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
    sync.remove()


def living(kind: type) -> int:
    return sum(isinstance(value, kind) for value in gc.get_objects())


@pytest.mark.parametrize("options", CASES[1:], ids=_name)
@on_ranks("pair")
def test_an_exchange_frees_the_old_ddp(options: ReducerOptions) -> None:
    """Exchange the options between steps. At most one DDP lives at any time, and none at the end."""
    gc.collect()
    before = living(DistributedDataParallel)
    model, reference = net(), net()
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    made: list[int] = []

    def make(*args: Any, **kwargs: Any) -> DistributedDataParallel:
        made.append(living(DistributedDataParallel) - before)
        return DistributedDataParallel(*args, **kwargs)

    gc.disable()
    try:
        for changed in (sync.options, options, sync.options, options):
            sync.options = changed
            with mock.patch("flatout.distributed.gradient_sync.DistributedDataParallel", make):
                found = steps_of(model, partial(by_sync, sync, model), 2)
            ddp = plain_ddp(reference, changed, unused=False)
            assert_bit_equal(found, steps_of(reference, partial(by_ddp, ddp), 2))
            ddp._remove_autograd_hooks()
            del ddp
            assert living(DistributedDataParallel) == before + 1
        assert made == [0, 0, 0]  # the first change is none
        sync.remove()
        assert living(DistributedDataParallel) == before
    finally:
        gc.enable()
    x, y = slices()[0]
    plain = net()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.zero_grad()
        cross_entropy(each(x), y).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):  # no hook averages any more
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@on_ranks("pair")
def test_an_option_set_and_taken_back_keeps_the_ddp() -> None:
    """Trials turn kept candidates off and on before they restore a state. DDP keeps its buckets."""
    model = net()
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    steps_of(model, partial(by_sync, sync, model), 2)
    before, sync.options = sync.options, ReducerOptions(static_graph=True)
    assert sync.steps_to_settle == 3
    sync.options = before
    assert sync.steps_to_settle == 0
    assert not sync.refresh()
    sync.remove()


@on_ranks("pair")
def test_a_step_alone_leaves_the_gradients_of_this_rank() -> None:
    model, plain = net(), net()
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    x, y = slices()[0]
    with sync.alone():
        by_sync(sync, model, x, y)
    cross_entropy(plain(x), y).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert sync.steps_to_settle == 2
    sync.remove()


@on_ranks("pair")
def test_strides_that_change_keep_the_options() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 2, 0])
    sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    sync.options = ReducerOptions(gradient_as_bucket_view=True, is_compressed=True)
    by_sync(sync, model, x, y)
    model.to(memory_format=torch.channels_last)
    assert sync.refresh()
    assert not sync.refresh()
    model.zero_grad()
    by_sync(sync, model, x, y)
    weight = model[0].weight
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, weight.grad.bfloat16().float())
    assert weight.grad._base is not None
    sync.remove()


def training(model: Net, optimizer: torch.optim.Optimizer, options: ReducerOptions) -> tuple[Job, Replicas]:
    """Return a data-parallel training with options of the reducer."""
    job = job_of(model, slices(), optimizer, loss_fn=cross_entropy, ranks=ranks())
    replicas = Replicas(job)
    replicas.enable()
    assert job.stepper.sync is not None
    job.stepper.sync.options = options
    return job, replicas


def a_failure_is_recovered(options: ReducerOptions, place: str, rank: int, at: int, unused: str) -> None:
    """Run out of memory on one rank, in the forward or the backward. The step is repeated in parts."""
    exact = replace(options, is_compressed=False)
    reference, model = net(unused=unused), net(unused=unused)
    losses = whole_training(reference, "sgd", epochs=1)
    job, replicas = training(model, optimizer_of(model, "sgd"), exact)
    assert job.stepper.sync is not None
    job.stepper.sync.finds_unused = bool(unused)
    if options != exact:  # the rounding of the steps before the failure
        job.stepper.sync.options = options

    def fails(where: str, call: int, samples: int) -> None:
        if where == place and dist.get_rank() == rank and call == at and samples > 2:
            raise torch.OutOfMemoryError("planned")

    model.fails = fails
    recovery = Recovery(job.stepper)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [recovery.step(batch).item() for batch in slices()]
    if options == exact:
        assert_same_training(model, reference, found, losses)
    assert job.stepper.micro_batches.size is not None
    assert_equal_on_all_ranks(model.parameters())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-2, atol=1e-2)
    replicas.disable()


def an_error_ends_the_step_on_all(options: ReducerOptions, place: str, at: int, unused: str) -> None:
    """After a step that failed on one rank, all ranks are in step. The next steps equal those of one process."""
    reference, model = net(unused=unused), net(unused=unused)
    losses = whole_training(reference, "sgd", epochs=1)
    job, replicas = training(model, optimizer_of(model, "sgd"), options)
    assert job.stepper.sync is not None
    job.stepper.sync.finds_unused = bool(unused)

    def fails(where: str, call: int, samples: int) -> None:
        if where == place and call == at and dist.get_rank() == 1:
            raise ValueError("planned")

    model.fails = fails
    found = []
    for number, batch in enumerate(slices(), 1):
        if number == at:
            with pytest.raises(RankFailure, match="planned"):
                job.stepper.step(batch)
            model.fails = works
        found.append(job.stepper.step(batch).item())
    if not options.is_compressed:
        assert_same_training(model, reference, found, losses)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-2, atol=1e-2)
    assert_equal_on_all_ranks(model.parameters())
    replicas.disable()


@pytest.mark.parametrize("unused", ["later", "at first"])
@pytest.mark.parametrize("options", [each for each in CASES if each.static_graph and not each.is_compressed], ids=_name)
@on_ranks("pair")
def test_a_graph_that_changes_is_static_no_more(options: ReducerOptions, unused: str) -> None:
    """A parameter gets a gradient in the first steps only, or in later steps only."""
    reference, model = net(unused=unused), net(unused=unused)
    losses = whole_training(reference, "sgd", epochs=1)
    job, replicas = training(model, optimizer_of(model, "sgd"), options)
    sync = job.stepper.sync
    assert sync is not None
    sync.finds_unused = True
    recovery = Recovery(job.stepper)
    found = [recovery.step(batch).item() for batch in slices()]
    assert_same_training(model, reference, found, losses)
    assert not sync.options.static_graph
    assert sync.finds_unused
    assert sync.options == replace(options, static_graph=False)
    replicas.disable()


@pytest.mark.parametrize("unused", ["", "always", "on rank 1"])
@pytest.mark.parametrize("options", CASES, ids=_name)
def test_steps_equal_those_of_ddp(pair: RankPool, options: ReducerOptions, unused: str) -> None:
    pair(steps_equal_those_of_ddp, options, unused)


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_steps_of_four_ranks_equal_those_of_ddp(four: RankPool, options: ReducerOptions) -> None:
    four(steps_equal_those_of_ddp, options, "on rank 1")


def test_compression_rounds_to_its_dtype(pair: RankPool, four: RankPool) -> None:
    pair(compression_rounds_to_its_dtype)
    four(compression_rounds_to_its_dtype)


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_a_failure_is_recovered(pair: RankPool, options: ReducerOptions) -> None:
    for place, at in itertools.product(("forward", "backward"), (1, 2, 5)):
        pair(a_failure_is_recovered, options, place, at % 2, at, "always" if at < 5 else "")


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_an_error_ends_the_step_on_all(pair: RankPool, options: ReducerOptions) -> None:
    for place, at in itertools.product(("forward", "backward"), (1, 2, 4)):
        pair(an_error_ends_the_step_on_all, options, place, at, "" if at == 2 else "always")


@pytest.mark.parametrize("options", CASES[-1:], ids=_name)
@pytest.mark.parametrize("at", [1, 4])
def test_an_error_of_one_ends_the_step_on_four(four: RankPool, options: ReducerOptions, at: int) -> None:
    four(an_error_ends_the_step_on_all, options, "backward", at, "always")
