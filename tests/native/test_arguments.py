"""Arguments that once crashed the process, and that native calls must now refuse or handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.native import _host

ops = torch.ops.flatout


def sgd_bucket(weight: Tensor) -> int:
    bucket: int = ops.make_bucket("sgd", [weight], [], [], [], [], [], [])
    return bucket


def step(bucket: int) -> None:
    group: dict[str, Any] = dict(lrs=[1.0], lr_tensors=[None], weight_decays=[0.0])
    scalars: dict[str, Any] = dict(maximize=False, ema_decay=0.0, seed=None, grad_factor=None, found_inf=None)
    ops.step_bucket_(bucket, [0.0] * 3, **group, **scalars)


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_norm", "factor"), [(None, 0.25), (3.0, 0.25), (0.0, 0.0)])
def test_no_gradients_have_a_norm_of_zero(max_norm, factor):
    inv_scale = torch.tensor(0.25, dtype=torch.float64)
    found = ops.unscale_and_check([], inv_scale, max_norm)
    assert [value.item() for value in found] == [0, 0, factor]
    assert [value.dtype for value in found] == [torch.float32] * 3
    torch.library.opcheck(ops.unscale_and_check.default, ([], inv_scale, max_norm))


def test_no_gradients_are_rewritten():
    inv_scale = torch.tensor(0.25)
    assert [value.item() for value in ops.unscale_and_check_([], inv_scale)] == [0, 0]
    ops.scale_([], inv_scale)
    torch.library.opcheck(ops.unscale_and_check_.default, ([], inv_scale))
    torch.library.opcheck(ops.scale_.default, ([], inv_scale))


def test_no_gradients_and_no_factor_are_an_error():
    with pytest.raises(NotImplementedError):
        ops.unscale_and_check([], None, None)


@pytest.mark.parametrize("factor", [torch.ones(2), torch.ones((), dtype=torch.int64)])
def test_a_factor_is_checked_without_gradients(factor):
    with pytest.raises(RuntimeError, match="factor"):
        ops.scale_([], factor)


def freed() -> Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_memory_that_was_freed_is_not_read():
    one = torch.ones(())
    with pytest.raises(RuntimeError, match=r"grads\[1\]"):
        ops.unscale_and_check([torch.ones(3), freed()], one, None)
    with pytest.raises(RuntimeError, match=r"grads\[0\]"):
        ops.scale_([freed()], one)
    with pytest.raises(RuntimeError, match="weights"):
        sgd_bucket(freed())
    bucket = sgd_bucket(torch.ones(1000))
    with pytest.raises(RuntimeError, match=r"grads\[0\]"):
        ops.set_grads(bucket, [freed()], [])
    ops.free_bucket(bucket)


# -- buckets -------------------------------------------------------------------------------------------------


def test_a_weight_that_moved_makes_the_bucket_stale():
    weight = torch.ones(5)
    bucket = sgd_bucket(weight)
    weight.data = torch.zeros(2)
    assert ops.set_grads(bucket, [torch.ones(5)], []) == 1
    step(bucket)  # steps no tensor
    assert weight.tolist() == [0, 0]
    ops.free_bucket(bucket)


def test_a_weight_that_moves_before_the_step_keeps_its_new_values():
    weight = torch.ones(100_000)
    bucket = sgd_bucket(weight)
    assert ops.set_grads(bucket, [torch.ones(100_000)], []) == 0
    weight.data = torch.zeros(2)
    step(bucket)
    assert weight.tolist() == [0, 0]
    ops.free_bucket(bucket)


def test_gradients_live_until_the_step():
    weight = torch.ones(100_000)
    bucket = sgd_bucket(weight)
    assert ops.set_grads(bucket, [torch.full((100_000,), 0.5)], []) == 0  # the bucket holds the only reference
    step(bucket)
    assert weight.unique().tolist() == [0.5]
    ops.free_bucket(bucket)


def check_scaled(bucket: int, **tensors: Tensor) -> tuple[Tensor, ...]:
    scale, tracker = torch.ones(()), torch.zeros((), dtype=torch.int32)
    given = dict(scale=scale, growth_tracker=tracker, next_scale=scale.clone(), next_growth_tracker=tracker.clone())
    numbers = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=1, max_norm=None)
    result: tuple[Tensor, ...] = ops.check_scaled_buckets([bucket], **(given | tensors), **numbers)
    return result


@pytest.mark.parametrize("name", ["scale", "growth_tracker", "next_scale", "next_growth_tracker"])
@pytest.mark.parametrize("make", [lambda: torch.ones((), dtype=torch.int64), lambda: torch.ones(2), freed])
def test_a_loss_scale_is_one_number_each(name, make):
    bucket = sgd_bucket(torch.ones(5))
    assert ops.set_grads(bucket, [torch.ones(5)], []) == 0
    with pytest.raises(RuntimeError, match=name):
        check_scaled(bucket, **{name: make()})
    assert [value.item() for value in check_scaled(bucket)] == [0, pytest.approx(5**0.5), 1, False]
    ops.free_bucket(bucket)


def test_a_next_scale_shares_no_memory_with_the_scale():
    bucket, scale = sgd_bucket(torch.ones(5)), torch.ones(())
    with pytest.raises(RuntimeError, match="share memory"):
        check_scaled(bucket, scale=scale, next_scale=scale)
    ops.free_bucket(bucket)


def test_norms_are_of_at_least_one_gradient():
    with pytest.raises(RuntimeError, match="grads"):
        ops.grad_norms([], torch.ones(()))
    with pytest.raises(RuntimeError, match=r"grads\[1\]"):
        ops.grad_norms([torch.ones(3), freed()], None)


def test_setting_no_gradients_releases_them():
    weight, grad = torch.ones(5), torch.ones(5)
    bucket = sgd_bucket(weight)
    holders = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    ops.set_grads(bucket, [grad.view(5)], [])
    assert torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > holders
    assert ops.set_grads(bucket, [], []) == 0
    assert torch._C._storage_Use_Count(grad.untyped_storage()._cdata) == holders
    step(bucket)
    assert weight.tolist() == [1] * 5
    ops.free_bucket(bucket)


def test_gradients_on_meta_are_elsewhere():
    bucket = sgd_bucket(torch.ones(5))
    assert ops.set_grads(bucket, [torch.ones(5, device="meta")], []) == 3
    ops.free_bucket(bucket)


@pytest.mark.parametrize("which", [[0, 0], [1, 0], [-1], [2]])
def test_indices_ascend(which):
    bucket = ops.make_bucket("sgd", [torch.ones(5), torch.ones(5)], [], [], [], [], [], [])
    with pytest.raises(RuntimeError, match="which"):
        ops.set_grads(bucket, [torch.ones(5)] * len(which), which)
    ops.free_bucket(bucket)


def test_states_share_no_memory_with_weights():
    weight = torch.ones(8)
    with pytest.raises(RuntimeError, match="share memory"):
        ops.make_bucket("lion", [weight], [weight], [], [], [], [], [])


def test_codes_share_no_memory_with_values():
    memory = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="share memory"):
        ops.encode_(memory.view(torch.float32), memory[:256], torch.zeros(1), True)


# -- the classes of flatout.native._host ----------------------------------------------------------------------------


def test_a_window_holds_a_step():
    with pytest.raises(ValueError, match="window"):
        _host.StepCounter(0)


@pytest.mark.parametrize("phase", [-1, len(_host.PHASES), 200])
def test_only_phases_are_marked(phase):
    counter = _host.StepCounter(4)
    counter.measure_phases_every(1)
    with pytest.raises(ValueError, match="phase"):
        counter.mark(counter.begin(), phase)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "numbers",
    [
        dict(seconds=NAN),
        dict(seconds=INF),
        dict(gap=INF),
        dict(waited=-1.0),
        dict(waited=NAN),
        dict(samples=-1),
        dict(flops=INF),
        dict(phases=[NAN] + [0.0] * 5),
    ],
    ids=lambda numbers: next(iter(numbers)),
)
def test_times_are_numbers(numbers):
    counter = _host.StepCounter(4)
    with pytest.raises(ValueError, match="must"):
        counter.add(**{"seconds": 1.0, **numbers})
    assert counter.total().steps == 0


def test_waits_are_durations():
    with pytest.raises(ValueError, match="seconds"):
        _host.StepCounter(4).waited(NAN)


def test_what_has_no_bytes_is_copied():
    stager = _host.Stager(_host.Ring(-1, 2))
    data = torch.zeros(4)
    copied = stager.copy([(data.data_ptr(), data.data_ptr(), 0)], False, 0, 0, data)
    copied.wait()
    assert copied.finished()


@pytest.mark.parametrize("transfer", [(0, 1, 1), (1, 0, 1), (1, 1, 1 << 62), (1, 1, (1 << 64) - 1)])
def test_transfers_have_addresses_and_sizes(transfer):
    with pytest.raises(ValueError, match="must"):
        _host.Stager(_host.Ring(-1, 2)).copy([transfer], False, 0, 0, None)


def test_the_host_has_no_streams():
    with pytest.raises(ValueError, match="fence"):
        _host.Stager(_host.Ring(-1, 2)).copy([], False, 0, 1, None)


DATA = torch.zeros(8)
COLUMN = ([(DATA.data_ptr(), 4, 8)], 8, 2, 32, [2])


@pytest.mark.parametrize(
    "column",
    [
        ([], 8, 2, 32, [2]),
        ([(0, 4, 8)], 8, 2, 32, [2]),
        ([(DATA.data_ptr(), -1, 8)], 8, 2, 32, [2]),
        ([(DATA.data_ptr(), 4, 8)], 8, 2, 32, [1000]),
        ([(DATA.data_ptr(), 4, 8)], 8, 2, 32, [-2]),
        ([(DATA.data_ptr(), 4, 8)], 8, 99, 32, [2]),
        ([(DATA.data_ptr(), 4, 8)], 1, 1, 1, [8]),
    ],
)
def test_columns_fit_their_rows(column):
    with pytest.raises(ValueError, match="must"):
        _host.Columns([column], DATA)


@pytest.mark.parametrize("numbers", [dict(count=1 << 61), dict(count=5), dict(first=-1), dict(batches=1 << 62)])
def test_batches_are_of_rows(numbers):
    arguments = {"indices": 0, "first": 0, "count": 2, "batches": 1, **numbers}
    with pytest.raises(ValueError, match="must"):
        _host.Stager(_host.Ring(-1, 2)).gather(_host.Columns([COLUMN], DATA), owner=None, **arguments)


def test_none_is_no_object():
    with pytest.raises(TypeError):
        _host.Stager(None)
    with pytest.raises(TypeError):
        _host.Stager(_host.Ring(-1, 2)).gather(None, 0, 0, 1, 1, None)
    with pytest.raises(TypeError):
        _host.range_push(None)


@pytest.mark.parametrize("threads", [0, -1, 1 << 20])
def test_threads_are_few(threads):
    with pytest.raises(ValueError, match="threads"):
        _host.Stager(_host.Ring(-1, 2), threads)


def test_states_of_rows_lie_somewhere():
    with pytest.raises(ValueError, match="address"):
        _host.RowStates(0, 4, None)
    with pytest.raises(ValueError, match="rows"):
        _host.RowStates(DATA.data_ptr(), 1 << 61, DATA)


@pytest.mark.parametrize("kind", ["StepCounter", "Ring", "Stager", "RowStates", "StepTimer"])
def test_objects_that_were_never_made_are_refused(kind):
    unmade = getattr(_host, kind).__new__(getattr(_host, kind))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        {
            "StepCounter": lambda: unmade.begin(),
            "Ring": lambda: unmade.clear(),
            "Stager": lambda: unmade.close(),
            "RowStates": lambda: unmade.claim(0),
            "StepTimer": lambda: _host.StepCounter(4).use_timer(unmade),
        }[kind]()
