"""Checks of data-parallel training that run on all ranks of a pool, compared with training in one process."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.distributed import exchange, gradient_sync
from flatout.distributed.agreement import GroupAgreement, OutOfStep, RankFailure, RanksApart
from flatout.distributed.gradient_sync import GradientSync
from flatout.distributed.step_clock import StepClock
from flatout.report.model import from_json
from flatout.techniques import REGISTRY, Measured
from tests.clock import Clock

SAMPLES, BATCH, CLASSES, WIDTH = 96, 12, 3, 10


def works(place: str, call: int, samples: int) -> None:
    """Let every call of a ``Net`` succeed."""


class Net(nn.Module):
    """Small classifier that can leave a layer out, and fail at a given call on a given rank."""

    def __init__(self, *, unused: str = "", norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.unused = unused
        self.calls = 0
        self.fails: Callable[[str, int, int], None] = works

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                self.fails("forward", self.calls, len(x))
                x = _Fails.apply(x, self)
        x = self.norm(x)
        leaves_out = self.unused == "always" or (self.unused == "on rank 1" and dist.get_rank() == 1)
        leaves_out |= self.unused == "later" and self.calls > 3
        leaves_out |= self.unused == "at first" and self.calls <= 3
        if not leaves_out:
            x = x + self.side(x)
        return self.out(x)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        ctx.net, ctx.call = net, net.calls
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.net.fails("backward", ctx.call, len(grad))
        return grad, None


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def slices() -> list[tuple[Tensor, Tensor]]:
    """Return this rank's slice of every batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in batches()]


def net(**options: Any) -> Net:
    torch.manual_seed(2)
    return Net(**options)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if kind == "flatout":
        return flatout.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def whole_training(
    model: nn.Module, kind: str, *, epochs: int, accumulate: int = 1, max_norm: float | None = None
) -> list[float]:
    """Train in one process, with plain torch, on whole batches."""
    optimizer, losses = optimizer_of(model, kind), []
    for _ in range(epochs):
        given = batches()
        for begin in range(0, len(given), accumulate):
            update = given[begin : begin + accumulate]
            optimizer.zero_grad()
            for x, y in update:
                loss = cross_entropy(model(x), y)
                (loss / len(update)).backward()
                losses.append(loss.item())
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return losses


def optimized(model: nn.Module, optimizer: torch.optim.Optimizer | None, **arguments: Any) -> flatout.Run:
    options: dict[str, Any] = {"budget": 0, "plan": None, "parallel": "ddp"} | arguments
    return flatout.optimize(model, batches(), optimizer, cross_entropy, **options)


def trained(run: flatout.Run, epochs: int) -> list[float]:
    return [run.step(batch).item() for _ in range(epochs) for batch in run.loader]


def assert_equal_on_all_ranks(tensors: Iterator[Tensor] | list[Tensor]) -> None:
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, flat.cpu())
    assert all(torch.equal(each, flat.cpu()) for each in everywhere)


def assert_same_training(model: nn.Module, reference: nn.Module, losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5, equal_nan=True)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).cpu(), parameter, rtol=1e-4, atol=1e-5)
    assert_equal_on_all_ranks(model.parameters())
    assert_equal_on_all_ranks([torch.tensor(losses).nan_to_num()])


def trains_as_one_process(kind: str, accumulate: int, max_norm: float | None, unused: str, micro: int | None) -> None:
    reference, model = net(unused=unused), net(unused=unused)
    expected = whole_training(reference, kind, epochs=2, accumulate=accumulate, max_norm=max_norm)
    if dist.get_rank() != 0:  # the weights of rank 0 count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    techniques = {} if micro is None else {"batch_size": {"micro_batch": micro}}
    run = optimized(
        model, optimizer_of(model, kind), accumulate=accumulate, max_grad_norm=max_norm, techniques=techniques
    )
    try:
        assert_same_training(model, reference, trained(run, 2), expected)
    finally:
        run.undo()


def object_and_keys_are_kept() -> None:
    model, before = net(), net().state_dict()
    run = optimized(model, optimizer_of(model, "adamw"))
    assert run.model is model
    assert isinstance(model, Net)
    assert list(model.state_dict()) == list(before)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is Net
        assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in made.parameters())
    trained(run, 1)
    run.undo()
    assert type(model) is Net
    own = slices()[0]
    model.zero_grad()
    cross_entropy(model(own[0]), own[1]).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    alone = copy.deepcopy(model)
    alone.zero_grad()
    cross_entropy(alone(own[0]), own[1]).backward()
    for grad, parameter in zip(grads, alone.parameters(), strict=True):  # not averaged any more
        assert parameter.grad is not None
        assert torch.equal(grad, parameter.grad)


def own_loop_equals_ddp(accumulate: int) -> None:
    model = net()
    optimizer = optimizer_of(model, "sgd")
    made, loader = flatout.optimize(model, batches(), optimizer, budget=0, plan=None, parallel="ddp")
    assert made is model
    device = model.out.weight.device
    reference = DistributedDataParallel(net().to(device))
    expected = optimizer_of(reference, "sgd")
    for _ in range(2):
        for i, ((x, y), (x2, y2)) in enumerate(zip(loader, slices(), strict=True)):
            is_last = (i + 1) % accumulate == 0
            for module, batch in ((model, (x, y)), (reference, (x2.to(device), y2.to(device)))):
                if is_last:
                    cross_entropy(module(batch[0]), batch[1]).backward()
                else:
                    with module.no_sync():
                        cross_entropy(module(batch[0]), batch[1]).backward()
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)
            if is_last:
                optimizer.step(), expected.step()
                optimizer.zero_grad(), expected.zero_grad()
    assert_equal_on_all_ranks(model.parameters())
    flatout.undo(model)


def parameters_may_be_left_out(unused: str) -> None:
    reference, model = net(unused=unused), net(unused=unused)
    run = optimized(model, optimizer_of(model, "adamw"))
    model.calls = 0
    losses = trained(run, 2)
    if unused != "on rank 1":
        assert_same_training(model, reference, losses, whole_training(reference, "adamw", epochs=2))
    assert_equal_on_all_ranks(model.parameters())
    run.undo()


def buffers_stay_equal(accumulate: int) -> None:
    model = net(norm=True)
    run = optimized(model, optimizer_of(model, "sgd"), accumulate=accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(run, 1)
    run.evaluate(slices())
    assert_equal_on_all_ranks([buffer for buffer in model.buffers() if buffer.is_floating_point()])
    run.undo()


def gradients_without_an_update_add_up() -> None:
    """The optimizer lacks a layer. The gradients of this layer are the sum of all steps, also after out of memory."""
    reference, model = net(), net()

    def fails(where: str, call: int, samples: int) -> None:
        if where == "backward" and dist.get_rank() == 1 and call == 5 and samples > 2:
            raise torch.OutOfMemoryError("planned")

    for each in (reference, model):
        optimizer = torch.optim.SGD([p for name, p in each.named_parameters() if not name.startswith("side")], lr=0.1)
        if each is model:
            run = optimized(model, optimizer)
            model.calls, model.fails = 0, fails
            with pytest.warns(RuntimeWarning, match="ran out of memory"):
                trained(run, 1)
            continue
        for x, y in batches():
            optimizer.zero_grad()
            cross_entropy(each(x), y).backward()
            optimizer.step()
    for ours, theirs in zip(model.side.parameters(), reference.side.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    run.undo()


def out_of_memory_is_recovered(place: str, rank: int, at: int, unused: str, accumulate: int) -> None:
    reference, model = net(unused=unused), net(unused=unused)
    expected = whole_training(reference, "adamw", epochs=2, accumulate=accumulate)
    run = optimized(model, optimizer_of(model, "adamw"), accumulate=accumulate)
    model.calls = 0

    def fails(where: str, call: int, samples: int) -> None:
        if where == place and dist.get_rank() == rank and call == at and samples > 2:
            raise torch.OutOfMemoryError("planned")

    model.fails = fails
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = trained(run, 2)
    assert any("ran out of memory" in str(each.message) for each in told)
    assert_same_training(model, reference, losses, expected)
    assert run.micro_batch
    assert_equal_on_all_ranks([torch.tensor(run.micro_batch)])
    run.undo()


def out_of_memory_in_the_update_is_recovered(kind: str, rank: int, at: int) -> None:
    reference, model = net(), net()
    expected = whole_training(reference, kind, epochs=2)
    optimizer = optimizer_of(model, kind)
    run = optimized(model, optimizer)
    own_step, calls = type(optimizer).step, 0

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and dist.get_rank() == rank:
            raise torch.OutOfMemoryError("planned")
        return own_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(type(optimizer), "step", step)
        losses = trained(run, 2)
    assert_same_training(model, reference, losses, expected)
    run.undo()


def out_of_memory_at_a_random_place_is_recovered(seed: int) -> None:
    draw = random.Random(seed)
    place = draw.choice(("forward", "backward", "update"))
    rank, at = draw.randrange(2), draw.randint(1, 2 * SAMPLES // BATCH)
    if place == "update":
        out_of_memory_in_the_update_is_recovered(draw.choice(("sgd", "adamw", "flatout")), rank, at)
    else:
        out_of_memory_is_recovered(place, rank, at, draw.choice(("", "always")), draw.choice((1, 2, 3)))


def out_of_memory_before_the_average_is_recovered(rank: int, at: int) -> None:
    """Fail while accumulated gradients are copied for their all-reduce."""
    reference, model = net(), net()
    expected = whole_training(reference, "adamw", epochs=2, accumulate=3)
    run = optimized(model, optimizer_of(model, "adamw"), accumulate=3)
    own_chunks, calls = gradient_sync._chunks, 0

    def chunks(grads: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and dist.get_rank() == rank:
            raise torch.OutOfMemoryError("planned")
        return own_chunks(grads)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(gradient_sync, "_chunks", chunks)
        losses = trained(run, 2)
    assert calls > at
    assert_same_training(model, reference, losses, expected)
    run.undo()


def an_error_of_one_rank_ends_the_step_on_all(place: str, at: int) -> None:
    model = net()
    run = optimized(model, optimizer_of(model, "adamw"))
    model.calls = 0

    def fails(where: str, call: int, samples: int) -> None:
        if where == place and call == at and dist.get_rank() == 1:
            raise ValueError("no such class")

    model.fails = fails
    expected = ValueError if dist.get_rank() == 1 else RankFailure
    with pytest.raises(expected, match="no such class"):
        trained(run, 1)
    model.fails = works
    trained(run, 1)  # all ranks are at the same place
    assert_equal_on_all_ranks(model.parameters())
    run.undo()


def messages_of_steps() -> tuple[flatout.Run, Net, list[list[str]]]:
    """Train for some steps.

    Returns:
        The run, its model, and the order of "averaged" and "sent" in each step: when gradients and messages are ready.
    """
    model = net()
    run = optimized(model, optimizer_of(model, "adamw"))
    end, send, events = StepClock.end, GroupAgreement._send, []

    def ending(self: StepClock) -> None:
        events[-1].append("averaged")
        end(self)

    def sending(self: GroupAgreement, *args: Any) -> None:
        events[-1].append("sent")
        send(self, *args)

    with mock.patch.object(StepClock, "end", ending), mock.patch.object(GroupAgreement, "_send", sending):
        for _ in range(5):
            events.append([])
            run.step(slices()[0])
    return run, model, events


def messages_of_settled_steps_are_early(are_near: bool) -> None:
    with nullcontext() if are_near else mock.patch.object(exchange, "_reaches", return_value=False):
        run, _, events = messages_of_steps()
    assert isinstance(run._job.spec.ranks._rows, exchange.LocalExchange if are_near else exchange.GlooExchange)
    assert events[0] == ["averaged", "sent"]  # no earlier step has counted the all-reduces
    assert events[-1] == ["sent", "averaged"]
    run.undo()


def an_error_after_the_message_is_out_of_step() -> None:
    run, model, _ = messages_of_steps()

    def fail() -> None:
        raise ValueError("no such class")

    is_failing = dist.get_rank() == 1
    if is_failing:
        model.out.weight.register_hook(lambda grad: Variable._execution_engine.queue_callback(fail))
    with pytest.raises(OutOfStep) if is_failing else nullcontext() as caught:
        run.step(slices()[0])
    if caught is not None:
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(OutOfStep):
            run._job.spec.ranks.check()  # would read the messages of the step
    run.undo()


class Saved:
    """Object that the graph of a step keeps alive."""


class Keeps(torch.autograd.Function):
    """Identity whose backward may run out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Saved, fails: Callable[[], None]) -> Tensor:
        ctx.saved, ctx.fails = saved, fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.fails()
        return grad, None, None


def the_graph_is_freed_before_zeros_take_memory() -> None:
    model = net()
    run = optimized(model, optimizer_of(model, "adamw"))
    graph: list[weakref.ref[Saved]] = []
    is_alive = []

    def fails() -> None:
        if dist.get_rank() == 1:
            handle.remove()
            raise torch.OutOfMemoryError("planned")

    def keeps(module: nn.Module, args: Any, x: Tensor) -> Tensor:
        saved = Saved()
        graph.append(weakref.ref(saved))
        return Keeps.apply(x, saved, fails)

    complete = GradientSync._complete

    def completing(self: GradientSync) -> None:
        is_alive.append(graph[0]() is not None)
        complete(self)

    handle = model.layers[1].register_forward_hook(keeps)
    with mock.patch.object(GradientSync, "_complete", completing), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step was split
        run.step(slices()[0])
    assert is_alive == ([False] if dist.get_rank() == 1 else is_alive)
    run.undo()


def channels_last_is_kept(**techniques: Any) -> None:
    """Train with activations in channels_last. The trial of each further technique turns the format off and on."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, 8, 2), nn.Tanh(), nn.Conv2d(8, 4, (1, 2)), nn.Flatten(),
        nn.Linear(12, CLASSES),
    )  # fmt: skip
    reference = copy.deepcopy(model)
    expected = whole_training(reference, "adamw", epochs=2)
    run = optimized(model, optimizer_of(model, "adamw"), techniques={"channels_last": True, **techniques})
    strides = [p.stride() for p in model.parameters()]
    assert strides == [p.stride() for p in reference.parameters()]
    assert run._job.stepper.sync is not None
    assert run._job.stepper.sync._strides == strides  # otherwise DDP copies every gradient
    losses = trained(run, 2)
    assert_same_training(model, reference, losses, expected)
    run.undo()


class Dropping(nn.Module):
    """Classifier with dropout, whose masks come from each rank's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES))
        self.signals_at = 0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.signals_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.body(x)


def dropping(accumulate: int, **arguments: Any) -> flatout.Run:
    torch.manual_seed(7)
    model = Dropping()
    run = optimized(model, optimizer_of(model, "adamw"), accumulate=accumulate, **arguments)
    torch.manual_seed(100 + dist.get_rank())
    return run


def a_training_resumes_bit_for_bit(
    folder: str, accumulate: int, steps: int, techniques: dict[str, Any] | None = None
) -> None:
    """Resume in another run, with the plan of the first one."""
    path = Path(folder) / "state.pt"
    run = dropping(accumulate, techniques=techniques)
    taken = iter(run.loader)
    for _ in range(steps):
        run.step(next(taken))
    run.save(path, asynchronous=True)
    rest = [run.step(batch).item() for batch in taken] + trained(run, 1)
    run.flush_saves()
    dist.barrier()
    other = dropping(accumulate, plan=run.plan)
    assert other.plan.decisions == run.plan.decisions
    torch.manual_seed(99)
    other.load(path)
    assert trained(other, 2) == rest
    for key, value in run.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[key], value), key
    run.undo(), other.undo()


def a_state_of_another_training_is_refused_by_all(folder: str) -> None:
    """Only rank 1 gets a wrong state. No rank may load its state."""
    run = dropping(1)
    trained(run, 1)
    state = run.state_dict()
    if dist.get_rank() == 1:
        state = state | {"steps": -1}
    before = copy.deepcopy(run.model.state_dict())
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    with pytest.raises(ValueError, match="steps"):
        run.load_state_dict(state)
    for key, value in before.items():
        if key in dict(run.model.named_parameters()):
            assert torch.equal(run.model.state_dict()[key], value + 1.0), key
    run.undo()


def ranks_must_save_together(folder: str) -> None:
    run = dropping(1)
    path, state = Path(folder) / "state.pt", run.state_dict()
    call = partial(run.save, path) if dist.get_rank() == 0 else partial(run.load_state_dict, state)
    with pytest.raises((RanksApart, ValueError), match=r"run\.save on rank 0, run\.load on rank 1"):
        call()
    run.undo()


def a_signal_to_one_rank_saves_on_all(folder: str, rank: int) -> None:
    torch.manual_seed(3)
    model = Dropping()
    run = optimized(model, optimizer_of(model, "adamw"))
    model.calls, model.signals_at = 0, 5 if dist.get_rank() == rank else 0
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        run.fit(2, progress=False, checkpoint_dir=folder)
    finally:
        signal.signal(signal.SIGTERM, before)
    dist.barrier()
    assert received == [signal.SIGTERM]
    assert run.steps == 5
    assert [file.name for file in Path(folder).iterdir()] == ["step-0000000005.pt"]
    model.signals_at = 0
    run.fit(2, progress=False, checkpoint_dir=folder)
    assert run.steps == 2 * SAMPLES // BATCH
    assert_equal_on_all_ranks(model.parameters())
    run.undo()


def loader_of(samples: int, *, shuffle: bool, drop_last: bool = False) -> DataLoader[Any]:
    x, y = data()
    return DataLoader(TensorDataset(x[:samples], y[:samples]), BATCH, shuffle=shuffle, drop_last=drop_last)


def whole_training_on(
    model: nn.Module, loader: DataLoader[Any], loss_fn: Callable[[Tensor, Tensor], Tensor], epochs: int
) -> list[float]:
    optimizer, losses = optimizer_of(model, "adamw"), []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def a_loader_is_sliced(samples: int, shuffle: bool, loss: str) -> None:
    """Train on slices of every batch: the last one is uneven, or has no sample for some ranks."""
    loss_fn: Any = nn.CrossEntropyLoss(reduction="sum" if loss == "sum" else "mean", ignore_index=0)
    loss_weight = (lambda batch: (batch[1] != 0).sum()) if loss == "weighted" else None
    if loss == "mean":
        loss_fn = nn.CrossEntropyLoss()
    reference, model = net(), net()
    torch.manual_seed(11)
    expected = whole_training_on(reference, loader_of(samples, shuffle=shuffle), loss_fn, 3)
    torch.manual_seed(11 + dist.get_rank())
    run = flatout.optimize(
        model,
        loader_of(samples, shuffle=shuffle),
        optimizer_of(model, "adamw"),
        loss_fn,
        loss_weight=loss_weight,
        budget=0,
        plan=None,
        parallel="ddp",
    )
    torch.manual_seed(11 + dist.get_rank())
    assert_same_training(model, reference, trained(run, 3), expected)
    run.undo()


def every_rank_knows_the_times_of_all(accumulate: int) -> None:
    """Loading takes r + 1 s on rank r, gradients take 10 (r + 1) s, and waits take 100 (r + 1) s."""
    rank, size = dist.get_rank(), dist.get_world_size()
    clock = Clock(tick=0.0)

    class Loaded(TensorDataset):
        def __getitem__(self, i: int) -> Any:
            clock.advance((rank + 1) * size / BATCH)
            return super().__getitem__(i)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        clock.advance(10 * (rank + 1))
        return cross_entropy(output, target)

    def late(plain: Callable[[GradientSync], Any]) -> Callable[[GradientSync], Any]:
        def reduce(sync: GradientSync) -> None:
            clock.advance(100 * (rank + 1))
            plain(sync)

        @contextmanager
        def averaged(sync: GradientSync) -> Iterator[None]:
            with plain(sync):
                yield
                clock.advance(100 * (rank + 1))

        return averaged if accumulate == 1 else reduce

    model, name = net(), "averaged" if accumulate == 1 else "reduce"
    run = flatout.optimize(
        model,
        DataLoader(Loaded(*data()), batch_size=BATCH),
        optimizer_of(model, "adamw"),
        loss,
        budget=0,
        plan=None,
        parallel="ddp",
        accumulate=accumulate,
    )
    with (
        mock.patch("time.perf_counter", clock),
        mock.patch.object(GradientSync, name, late(getattr(GradientSync, name))),
    ):
        for batch in run.loader:
            run.step(batch)
    batches = SAMPLES // BATCH
    waits = 100 if accumulate == 1 else 100 * (batches / accumulate - 1) / batches  # the last wait ends after the epoch
    paces = run.rank_times
    assert [pace.rank for pace in paces] == list(range(size))
    for pace in paces:
        assert pace.load_ms == pytest.approx(1e3 * (pace.rank + 1))
        assert pace.compute_ms == pytest.approx(1e4 * (pace.rank + 1))
        assert pace.wait_ms == pytest.approx(1e3 * waits * (pace.rank + 1))
        assert pace.device == "cpu"
    assert len(set(run._job.spec.ranks.every(paces))) == 1
    run.undo()
    assert run.rank_times == ()


def measured(budget: float) -> flatout.Run:
    """Return a run that has measured the original loop, and has tried no technique."""
    model = net()
    return flatout.optimize(
        model,
        loader_of(SAMPLES, shuffle=False),
        optimizer_of(model, "adamw"),
        cross_entropy,
        budget=budget,
        plan=None,
        parallel="ddp",
        expected_steps=100_000,
        techniques={technique.name: False for technique in REGISTRY if isinstance(technique, Measured)},
    )


def the_report_has_the_times_of_all_ranks() -> None:
    run = measured(60.0)  # one step is a small part of this on any machine
    summary, size = run.report.summary, dist.get_world_size()
    assert summary.after is not None
    assert [pace.rank for pace in summary.after.ranks] == list(range(size))
    assert summary.after.scaling is not None
    assert summary.after.scaling > 0
    assert summary.after.exposed_ms is not None
    assert summary.after.mfu == pytest.approx(sum(pace.mfu or 0 for pace in summary.after.ranks) / size, rel=1e-6)
    assert from_json(run.report.to_json()).after == summary.after
    assert len(set(map(str, run._job.spec.ranks.every(summary.after)))) == 1
    run.undo()


def the_rate_is_that_of_all_ranks() -> None:
    run = measured(1.0)
    pace = run.report.summary.before
    assert pace is not None
    assert pace.samples_per_second * pace.total_ms / 1e3 == pytest.approx(BATCH)
    assert run.report.summary.epoch_samples == SAMPLES
    run.undo()
