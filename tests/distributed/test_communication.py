"""Techniques of the reducer on several ranks: trials decide by the exposed communication, on all ranks alike."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy

import flatout
from flatout.distributed.gradient_sync import GradientSync, ReducerOptions
from flatout.tuning.stopwatch import Stopwatch, timed_block
from tests.distributed import data_parallel_checks
from tests.distributed.data_parallel_checks import (
    Net,
    assert_equal_on_all_ranks,
    assert_same_training,
    batches,
    net,
    optimized,
    optimizer_of,
    slices,
    trained,
    whole_training,
)
from tests.helpers import snapshot
from tests.jobs import only
from tests.ranks import RankPool, on_ranks
from tests.reasons import reasons
from tests.tuning.lockstep_checks import SECONDS, Machine, decided, ranks, running_on

FORCED: dict[str, Any] = {"static_graph": True, "gradient_buckets": 1, "gradient_compression": "bf16"}


NAMES = ("static_graph", "gradient_buckets", "gradient_compression")


STEP_SECONDS = 0.1


@contextlib.contextmanager
def communication(machine: Machine, seconds: Callable[[ReducerOptions], float]) -> Iterator[None]:
    """Let every averaged step take more seconds, by the options of the reducer."""
    plain = GradientSync.run

    def run(self: GradientSync, *args: Any, **kwargs: Any) -> Any:
        if not self.is_inside:
            machine.advance(seconds(self.options))
        return plain(self, *args, **kwargs)

    with mock.patch.object(GradientSync, "run", run):
        yield


def tuned(model: Net, seconds: Callable[[ReducerOptions], float], names: tuple[str, ...] = NAMES) -> flatout.Run:
    """Tune with simulated times. The first options of the reducer are those of a GPU. All ranks must decide alike."""
    together = ranks()
    machine = Machine(together.rank, 0, 0.0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        machine.advance(STEP_SECONDS)
        return cross_entropy(output, target)

    signal.alarm(SECONDS)
    with (
        mock.patch.dict("flatout.distributed.gradient_sync.EQUAL_BUCKETS", clear=True),
        running_on(machine, together.rank),
        communication(machine, seconds),
    ):
        run = flatout.optimize(
            model,
            batches(),
            optimizer_of(model, "sgd"),
            loss,
            parallel="ddp",
            techniques=only(*names),
            budget=1000.0,
            expected_steps=10**6,
            device="cpu",
            plan=None,
        )
    signal.alarm(0)
    assert len(set(map(repr, together.every(decided(run))))) == 1
    return run


@on_ranks("pair")
def test_hidden_communication_costs_no_trial() -> None:
    run = tuned(net(unused="always"), lambda options: 0.0)
    for name in NAMES:
        row = run.report.row(name)
        assert (row.status, row.trials) == ("not tried", ())
        assert "communication-hidden" in reasons(row)
    for pace in (run.report.summary.before, run.report.summary.after):
        assert pace is not None
        assert pace.exposed_ms == pytest.approx(0, abs=1)
    run.undo()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("static_graph", "static_graph"),
        ("gradient_buckets", "bucket_bytes"),
        ("gradient_compression", "is_compressed"),
    ],
)
@on_ranks("pair")
def test_exposed_communication_is_reported_and_saved(name: str, changed: str) -> None:
    """One option saves time, and all others save nothing."""
    default = ReducerOptions()

    def seconds(options: ReducerOptions) -> float:
        return 0.02 if getattr(options, changed) != getattr(default, changed) else 0.05

    model = net(unused="always")
    before = snapshot(model, optimizer_of(model, "sgd"))["parameters"]
    run = tuned(model, seconds)
    assert run.plan.decisions.keys() == {name}
    assert snapshot(model, optimizer_of(model, "sgd"))["parameters"] == before
    summary = run.report.summary
    assert summary.before is not None
    assert summary.after is not None
    assert summary.before.exposed_ms == pytest.approx(50, rel=0.1)
    assert summary.after.exposed_ms == pytest.approx(20, rel=0.1)
    assert summary.after.step_ms == pytest.approx(120, rel=0.05)
    run.undo()


@on_ranks("pair")
def test_timed_steps_have_their_full_speed() -> None:
    """No timed step includes the first step of a new DDP, which learns the order of the gradients."""
    plain_block, plain_stretch, plain_run, found = timed_block, Stopwatch.block, GradientSync.run, []
    syncs: list[GradientSync] = []

    def run(self: GradientSync, *args: Any, **kwargs: Any) -> Any:
        syncs.append(self)
        return plain_run(self, *args, **kwargs)

    def block(*args: Any) -> Any:
        found.append(syncs[-1].steps_to_settle)
        return plain_block(*args)

    def stretch(self: Stopwatch, *args: Any) -> Any:
        found.append(self._job.stepper.steps_to_settle)
        return plain_stretch(self, *args)

    with (
        mock.patch.object(GradientSync, "run", run),
        mock.patch("flatout.tuning.bench.timed_block", block),
        mock.patch.object(Stopwatch, "block", stretch),
    ):
        tuning = tuned(net(), lambda options: 0.01 if options.bucket_bytes else 0.05, ("gradient_buckets",))
    assert tuning.plan.decisions
    assert set(found) == {0}
    tuning.undo()


@pytest.mark.parametrize("rank", [0, 1])
@on_ranks("pair")
def test_a_wrong_compression_is_caught(rank: int) -> None:
    """The sum on one rank loses a tenth of its size. Only the comparison with other gradients can show this."""

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations as objects
        if dist.get_rank() == rank:
            bucket.buffer().mul_(0.9)
        return bf16_compress_hook(group, bucket)

    def seconds(options: ReducerOptions) -> float:
        return 0.05 if not options.is_compressed else 0.01

    with mock.patch("flatout.distributed.gradient_sync.bf16_compress_hook", hook):
        run = tuned(net(), seconds, ("gradient_compression",))
    row = run.report.row("gradient_compression")
    assert row.status == "rejected"
    assert "numerics-differ" in reasons(row)
    run.undo()
    run = tuned(net(), seconds, ("gradient_compression",))
    row = run.report.row("gradient_compression")
    assert row.status == "kept"
    assert row.trials[0].gradient_difference is not None
    assert 1e-5 < row.trials[0].gradient_difference < 1e-2
    run.undo()


def a_forced_technique_is_kept(techniques: dict[str, Any], unused: str) -> None:
    reference, model = net(unused=unused), net(unused=unused)
    run = optimized(model, optimizer_of(model, "sgd"), techniques=techniques)
    assert run.plan.decisions.keys() == techniques.keys()
    assert run._job.stepper.steps_to_settle <= 1  # the first step has the buckets of all later ones
    losses, expected = trained(run, 2), whole_training(reference, "sgd", epochs=2)
    if "gradient_compression" in techniques:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-2, atol=1e-2)
        assert_equal_on_all_ranks(model.parameters())
    else:
        assert_same_training(model, reference, losses, expected)
    run.undo()
    plain = net(unused=unused)
    plain.load_state_dict(model.state_dict())
    x, y = slices()[0]
    for each in (model, plain):
        each.zero_grad()
        cross_entropy(each(x), y).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):  # no hook averages any more
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("techniques", "arguments", "code"),
    [
        ({"static_graph": True}, {}, "nothing-unused"),
        ({"gradient_buckets": 25}, {"accumulate": 2}, "averaged-after-backward"),
        ({"gradient_buckets": 25, "data_parallel": False}, {}, "forbidden"),
    ],
)
@on_ranks("pair")
def test_a_forced_technique_is_refused(techniques: dict[str, Any], arguments: dict[str, Any], code: str) -> None:
    model = net()
    before = snapshot(model, optimizer_of(model, "sgd"))
    with pytest.raises(ValueError, match=next(iter(techniques))) as refused:
        optimized(model, optimizer_of(model, "sgd"), techniques=techniques, **arguments)
    assert code in reasons(str(refused.value))
    assert snapshot(model, optimizer_of(model, "sgd")) == before


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_technique_is_kept(pair: RankPool, name: str) -> None:
    pair(a_forced_technique_is_kept, {name: FORCED[name]}, "always" if name == "static_graph" else "")


def test_all_techniques_work_together(pair: RankPool) -> None:
    pair(a_forced_technique_is_kept, FORCED, "always")


def test_a_training_with_kept_options_resumes_bit_for_bit(pair: RankPool, tmp_path: Path) -> None:
    techniques = {"gradient_buckets": 1, "gradient_compression": True}
    pair(data_parallel_checks.a_training_resumes_bit_for_bit, str(tmp_path), 1, 3, techniques)
