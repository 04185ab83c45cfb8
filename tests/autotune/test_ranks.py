"""Scripts on several ranks: they train as without flatout, and all ranks make the same decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from flatout.autotune.engine import Engine
from flatout.autotune.module_tuning import Options
from flatout.autotune.script_report import ScriptReport
from flatout.distributed.exchange import LocalExchange
from flatout.optim.native_step import NativeStep
from flatout.techniques.candidate import Candidate, ChangeCandidate
from flatout.techniques.fused_optimizer import FusedOptimizer
from flatout.training.job import Job
from tests.autotune.scripts import net
from tests.clock import Clock, simulated_tuning
from tests.jobs import NO_TECHNIQUES, only
from tests.ranks import on_ranks
from tests.reasons import reasons

QUICK = {"compile": False, "torchscript": False}
UPDATES = 40


@contextmanager
def engine(said: list[str] | None = None, **options: Any) -> Iterator[Engine]:
    made = Engine(Options(plan=None, **options), [].append if said is None else said.append)
    try:
        yield made
    finally:
        made.undo()


def replicated(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(net(), **options)


def train(model: nn.Module, updates: int = UPDATES, *, clock: Clock | None = None, **how: Any) -> Any:
    """Train a model with other samples on each rank. Return the optimizer."""
    accumulate, optimizer = how.get("accumulate", 1), how.get("optimizer")
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if clock is not None:
        model.register_forward_hook(lambda *_: clock.advance(how.get("seconds", 0.01)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(updates):
        optimizer.zero_grad()
        for last in [False] * (accumulate - 1) + [True]:
            x, y = torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
            if last:
                (functional.cross_entropy(model(x), y) / accumulate).backward()
            else:
                with model.no_sync():
                    (functional.cross_entropy(model(x), y) / accumulate).backward()
        optimizer.step()
    return optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *(value for value in states if isinstance(value, torch.Tensor))]


def of_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_alike(value: Any) -> None:
    first, *others = of_all(value)
    assert all(other == first for other in others)


def assert_weights_alike(model: nn.Module) -> None:
    assert_alike([parameter.tolist() for parameter in model.parameters()])


def statuses(running: Engine) -> dict[str, str]:
    (tuning,) = running.tunings
    return {row.technique: row.status for row in tuning.report.rows}


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [({}, 1), ({}, 2), ({"find_unused_parameters": True}, 2), ({"static_graph": True}, 1)],
    ids=str,
)
@on_ranks("pool")
def test_trials_leave_no_trace_on_any_rank(accumulate: int, options: dict[str, bool]) -> None:
    with simulated_tuning() as clock:
        model = replicated(**options)
        expected = tensors(model, train(model, clock=clock, accumulate=accumulate))
        model, said, sizes = replicated(**options), [], set()
        model.register_forward_pre_hook(lambda _, args: sizes.add(len(args[0])))
        with engine(said, techniques=QUICK, is_dry=True) as running:
            found = tensors(model, train(model, clock=clock, accumulate=accumulate))
            assert not said
            tried = [row.technique for row in running.tunings[0].report.rows if row.trials]
        assert tried
        assert_alike(tried)
        assert sizes == {8}  # a rank records its 8 samples of a batch, and not those of other ranks
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("seconds", [0.01, 0.1])
@on_ranks("pair")
def test_all_ranks_keep_the_same_and_stay_equal(seconds: float) -> None:
    """One rank is slower than the other."""
    seconds *= 1 + dist.get_rank()
    updates = 100
    with simulated_tuning() as clock:
        model = replicated()
        expected = tensors(model, train(model, updates, clock=clock))
        model, hooks = replicated(), []
        model.module[0].register_forward_hook(lambda *_: hooks.append(1))
        with engine(techniques=NO_TECHNIQUES | {"fused_optimizer": True}) as running:
            optimizer = train(model, updates, clock=clock, seconds=seconds)
            assert isinstance(optimizer, NativeStep)
            assert_alike(statuses(running))
            assert statuses(running)["fused_optimizer"] == "kept"
            assert all(name.startswith("module.") for name in model.state_dict())
            assert type(model) is DistributedDataParallel
        assert not isinstance(optimizer, NativeStep)
        assert len(hooks) >= updates
        assert_weights_alike(model)
        found = tensors(model, optimizer)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=0.001)


@on_ranks("pair")
def test_most_updates_have_no_communication() -> None:
    """All ranks meet after the same few updates."""
    met: set[int] = set()
    send = LocalExchange.send
    with simulated_tuning() as clock, engine(techniques=only("fused_optimizer", "cpu_threads")) as running:

        def noting(exchange: LocalExchange, row: Sequence[float]) -> None:
            met.add(running.updates)
            send(exchange, row)

        with mock.patch.object(LocalExchange, "send", noting):
            train(replicated(), 10 * UPDATES, clock=clock)
    assert_alike(met)
    assert 2 < len(met) < UPDATES / 2


def fails(*_: Any) -> Any:
    raise ValueError("on this rank only")


def passes(model: nn.Module) -> Any:
    return model.register_forward_hook(lambda *_: None)


def fails_in_forward(model: nn.Module) -> Any:
    return model.register_forward_hook(fails)


def fails_in_backward(model: nn.Module) -> Any:
    """Let the gradient of the first layer fail, after those of the last."""
    return model.register_forward_hook(lambda _, args, output: output.register_hook(fails) and None)


@pytest.mark.parametrize("fail", [None, fails_in_forward, fails_in_backward])
@pytest.mark.parametrize(
    ("options", "accumulate"),
    [({"bucket_cap_mb": 0.0001}, 1), ({"find_unused_parameters": True}, 1), ({"static_graph": True}, 1), ({}, 2)],
    ids=str,
)
@on_ranks("pair")
def test_a_trial_that_fails_on_one_rank_fails_on_all(fail: Any, options: dict[str, Any], accumulate: int) -> None:
    """The trial fails at once or in a step, whose all-reduces the other rank waits for."""

    def candidates(_: FusedOptimizer, job: Job) -> list[Candidate]:
        change = fail if dist.get_rank() == 1 else passes
        return [ChangeCandidate(label, True, lambda: change(job.spec.model[0]).remove) for label in ("one", "two")]

    said: list[str] = []
    with simulated_tuning() as clock:
        model = replicated(**options)
        expected = tensors(model, train(model, clock=clock, accumulate=accumulate))
        model = replicated(**options)
        with engine(said, techniques=only("fused_optimizer")) as running, pytest.MonkeyPatch.context() as patch:
            if fail is not None:
                patch.setattr(FusedOptimizer, "candidates", candidates)
            elif dist.get_rank() == 1:
                patch.setattr(FusedOptimizer, "candidates", fails)
            found = tensors(model, train(model, clock=clock, accumulate=accumulate))
            rows = [
                (row.status, row.why) for row in running.tunings[0].report.rows if row.technique == "fused_optimizer"
            ]
    assert_alike(rows)
    assert [status for status, _ in rows] != ["kept"]
    assert "on this rank only" in rows[0][1]
    assert not said
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@on_ranks("pair")
def test_a_tuning_that_fails_on_one_rank_is_undone_on_all_and_said_once() -> None:
    said: list[str] = []
    with simulated_tuning() as clock, engine(said) as running, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("flatout.tuning.agenda.Agenda.answer", lambda _: 1 / 0)
        train(replicated(), clock=clock)
        assert "ZeroDivisionError" in running.why_untuned
    assert sum(map(len, of_all(said))) == 1


@on_ranks("pair")
def test_ranks_that_record_other_calls_are_not_tuned() -> None:
    said: list[str] = []
    model = replicated()
    with engine(said) as running:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(UPDATES):
            optimizer.zero_grad()
            for _ in range(1 + dist.get_rank()):
                with model.no_sync():
                    model(torch.randn(4, 8)).sum().backward()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        assert not running.tunings
    assert [len(each) for each in of_all(said)] == [1, 0]
    assert "different calls" in running.why_untuned


def sharded() -> nn.Module:
    return fully_shard(net(), mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))


def joined() -> nn.Module:
    model = replicated()
    model.join().__enter__()
    return model


def of_another_group() -> nn.Module:
    return replicated(process_group=dist.new_group())


def inside() -> nn.Module:
    return nn.Sequential(replicated())


def of_lightning() -> nn.Module:
    made: Any = type("Module", (nn.Sequential,), {"__module__": "lightning.pytorch"})
    return DistributedDataParallel(made(*net()))


def synchronized() -> nn.Module:
    model = replicated()
    model.module.add_module("norm", nn.SyncBatchNorm(3).eval())
    return model


@pytest.mark.parametrize("make", [net, sharded, joined, of_another_group, inside, of_lightning, synchronized])
@on_ranks("pair")
def test_rank_0_says_once_why_nothing_is_tuned(make: Any) -> None:
    said: list[str] = []
    model = make()
    with engine(said) as running:
        train(model)
        assert not running.tunings
        assert reasons(str(ScriptReport.of(running))) == {"several-ranks"}
    assert [len(each) for each in of_all(said)] == [1, 0]


@on_ranks("pair")
def test_a_sharded_optimizer_is_not_fused() -> None:
    with simulated_tuning() as clock, engine(techniques=only("fused_optimizer", "cpu_threads")) as running:
        model = replicated()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        train(model, clock=clock, optimizer=optimizer)
        (row,) = (row for row in running.tunings[0].report.rows if row.technique == "fused_optimizer")
        assert row.status == "not applicable"
        assert "ZeroRedundancyOptimizer" in row.why
        assert_weights_alike(model)
