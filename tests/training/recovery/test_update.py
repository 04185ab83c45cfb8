"""Updates that run out of memory: repeated as a whole, skipped, or reported as partial."""

import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

import flatout
from flatout.optim import PartialUpdateError
from flatout.optim.atomic_update import AtomicUpdate
from tests.helpers import Operators, bits
from tests.reasons import reasons
from tests.training.recovery.harness import (
    MemoryEnds,
    assert_same,
    batches_of,
    end_epoch,
    make,
    net,
    picture,
    train,
    waiting,
)
from tests.trap import out_of_memory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

UPDATES = [
    {},
    {"accumulate": 3},
    {"accumulate": 3, "max_grad_norm": 0.05},
]

NEW_STATE = "aten::zeros_like"
"""Operator that initializes an optimizer's state."""


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("settings", UPDATES, ids=str)
@pytest.mark.parametrize("failing", [1, 3, 8])
def test_an_update_of_ours_is_tried_again(failing, settings, is_scaled):
    run, twin = (make(optimizer="fused adamw", is_scaled=is_scaled, **settings) for _ in range(2))
    batches = batches_of(*[16] * 5)
    with MemoryEnds(NEW_STATE, failing) as memory:
        losses = train(run, batches)
    assert memory.calls > failing
    assert [bits(loss) for loss in losses] == [bits(loss) for loss in train(twin, batches)]
    assert [bits(p) for p in run.model.parameters()] == [bits(p) for p in twin.model.parameters()]
    assert run.micro_batch is None


class Hungry(torch.optim.SGD):
    """Optimizer that initializes its state entry by entry, and whose step may fail after some of its writes."""

    fails_after = None

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            if len(self.state[p]) == 0:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["momentum"] = torch.zeros_like(p)
        for i, p in enumerate(parameters):
            if i == self.fails_after:
                raise out_of_memory()
            self.state[p]["momentum"].mul_(0.9).add_(p.grad)
            p.add_(self.state[p]["momentum"], alpha=-self.param_groups[0]["lr"])


def hungry(model):
    return Hungry(model.parameters(), lr=0.1)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("settings", UPDATES, ids=str)
@pytest.mark.parametrize("failing", [1, 4])
def test_an_update_of_anybodys_that_has_written_nothing_is_tried_again(failing, settings, is_scaled):
    run, twin = (make(optimizer=hungry, is_scaled=is_scaled, **settings) for _ in range(2))
    batches = batches_of(*[16] * 5)
    with MemoryEnds(NEW_STATE, failing) as memory:
        train(run, batches)
    train(twin, batches)
    assert memory.calls > failing
    # A clip that runs twice is exact to 1e-6 of the norm, as torch's clip is.
    for ours, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert run.micro_batch is None


def test_an_epochs_leftover_is_averaged_once():
    run, twin = (make(optimizer="fused adamw", accumulate=4, is_scaled=True) for _ in range(2))
    batches = batches_of(16, 16, 16)
    for batch in batches:
        run.step(batch)
    with MemoryEnds(NEW_STATE, 1), pytest.warns(RuntimeWarning) as told:
        end_epoch(run)
    (warning,) = told
    assert "update-retried" in reasons(str(warning.message))
    train(twin, batches)
    assert [bits(p) for p in run.model.parameters()] == [bits(p) for p in twin.model.parameters()]


@pytest.mark.parametrize("after", [1, 3])
def test_an_update_cut_in_half_is_an_error(after):
    run = make(optimizer=hungry)
    run.optimizer.fails_after = after
    with pytest.raises(PartialUpdateError, match="Hungry") as caught:
        run.step(batches_of(16)[0])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert waiting(run) == 0


def backward_of(model):
    model(batches_of(16)[0][0]).sum().backward()


def one_bucket_each(cls, model):
    return cls([{"params": [p], "ema_decay": 0.1 * i} for i, p in enumerate(model.parameters())], lr=0.1)


WRITE = "flatout::step_bucket_"


def test_an_update_of_ours_has_its_memory_before_the_first_write():
    model = net()
    optimizer = one_bucket_each(flatout.optim.AdamW, model)
    backward_of(model)
    for step in range(2):
        with Operators() as seen:
            flatout.optim.update(optimizer, inv_scale=0.5, max_grad_norm=0.1)
        first = seen.names.index(WRITE)
        assert seen.names[first:] == [WRITE] * 8
        assert (NEW_STATE in seen.names) == (step == 0)


def test_an_update_of_ours_that_fails_between_buckets_is_cut_in_half():
    model = net()
    optimizer = one_bucket_each(flatout.optim.SGD, model)
    backward_of(model)
    with MemoryEnds(WRITE, 1, 3):
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        with pytest.raises(PartialUpdateError):
            optimizer.step()


@pytest.mark.parametrize("inv_scale", [None, 0.5])
def test_torchs_step_in_the_place_of_ours(inv_scale):
    words = nn.Embedding(5, 3, sparse=True)
    optimizer = flatout.optim.SGD(words.parameters(), lr=0.1)
    words(torch.tensor([1, 2])).sum().backward()
    before = bits(words.weight)
    # A repeated step would scale the gradients twice.
    error = torch.OutOfMemoryError if inv_scale is None else PartialUpdateError
    with MemoryEnds("aten::add_", 1) as memory, pytest.raises(error):
        flatout.optim.update(optimizer, inv_scale=inv_scale)
    assert memory.calls == 1
    assert bits(words.weight) == before
    if inv_scale is None:
        flatout.optim.update(optimizer)
        assert bits(words.weight) != before


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
def test_an_update_that_fails_for_good_is_left_out(optimizer):
    run, twin = make(optimizer=optimizer), make(optimizer=optimizer)
    batch, *rest = batches_of(16, 16, 16)
    before = picture(run)
    with MemoryEnds(NEW_STATE, *range(1, 99)), pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(batch)
    assert "update-left-out" in reasons(str(caught.value))
    assert picture(run) == before
    assert waiting(run) == 0
    train(run, rest)
    train(twin, rest)
    assert_same(run, twin)


class AnyMemoryEnds(TorchFunctionMode):
    """Mode in which the n-th call of torch, or of one of its functions, runs out of memory. Later calls succeed.

    The class is no dispatch mode, because ``torch._foreach_`` functions then do not increase versions (torch 2.14).
    """

    def __init__(self, failing, name=""):
        super().__init__()
        self.failing, self.name, self.calls = failing, name, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func.__name__ == self.name if self.name else func.__name__ != "__get__"
        if self.calls == self.failing:
            self.failing = None
            raise out_of_memory()
        return func(*args, **(kwargs or {}))


def mixed_parameters():
    """Return parameters of two groups and two dtypes, without gradients."""
    torch.manual_seed(0)
    dtypes = [[torch.float32] * 4 + [torch.float64], [torch.float64, torch.float32]]
    return [
        {"params": [torch.randn(2, 3, dtype=dtype, requires_grad=True) for dtype in of_group]} for of_group in dtypes
    ]


def set_gradients(groups, step):
    """Give other parameters gradients in each step. The first one never gets any."""
    for i, p in enumerate(p for group in groups for p in group["params"]):
        p.grad = torch.randn_like(p) if i in ((2, 4, 6) if step == 0 else (1, 2, 3, 5, 6)) else None


def numbers_of(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [
        (i, name, bits(value) if isinstance(value, torch.Tensor) else value)
        for i, p in enumerate(parameters)
        for name, value in optimizer.state.get(p, {}).items()
    ]
    return [bits(p) for p in parameters], state


TORCHS = [
    (torch.optim.Adadelta, {}), (torch.optim.Adagrad, {}), (torch.optim.Adam, {}), (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}), (torch.optim.Adamax, {}), (torch.optim.ASGD, {}), (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}), (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.Rprop, {}),
    (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
]  # fmt: skip
FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
KINDS = [
    *((cls, {**options, "foreach": foreach}) for cls, options in TORCHS for foreach in (True, False)),
    *((cls, {**options, "fused": True}) for cls, options in TORCHS if cls in FUSED),
    (torch.optim.Adafactor, {"foreach": True}),
    (torch.optim.Adafactor, {"foreach": False}),
]


@pytest.mark.parametrize(("cls", "options"), KINDS, ids=str)
def test_every_write_of_torchs_optimizers_is_seen(cls, options):
    """Every call of two steps fails once.

    State may change only with an error about it, and the error requires a change.
    """
    failing, complete, told = 0, 0, 0
    while complete < 2:
        failing += 1
        groups = mixed_parameters()
        optimizer = cls(groups, lr=0.1, **options)
        guard, memory, complete = AtomicUpdate(optimizer), AnyMemoryEnds(failing), 0
        for step in range(2):
            takes_late_ones = cls is not torch.optim.SGD or "fused" not in options  # torch 2.14: otherwise a TypeError
            set_gradients(groups, step if takes_late_ones else 1)
            before = numbers_of(optimizer)
            try:
                with memory, guard:
                    optimizer.step()
            except PartialUpdateError:
                has_changed = numbers_of(optimizer) != before
                assert has_changed or options.get("fused")
                told += has_changed
            except torch.OutOfMemoryError:
                assert numbers_of(optimizer) == before
                assert not guard.has_rewritten_gradients
            else:
                complete += 1
                continue
            break
    assert told
    assert failing > 4


def guarded(groups, cls=torch.optim.SGD, **options):
    optimizer = cls(groups, lr=0.1, **options)
    set_gradients(groups, 1)
    return optimizer, AtomicUpdate(optimizer)


def test_a_parameter_that_has_changed_its_dtype_is_no_proof():
    """The guard groups parameters by dtype before the change. The next update is guarded as usual."""
    groups = mixed_parameters()
    optimizer, guard = guarded(groups)
    with guard:
        optimizer.step()
    changed = groups[0]["params"][3]
    changed.data, changed.grad = changed.data.half(), None
    for error in (PartialUpdateError, torch.OutOfMemoryError):
        with pytest.raises(error), guard:
            raise out_of_memory()


def fails(*_):
    raise out_of_memory()


@pytest.mark.parametrize("where", ["post-hook", "global post-hook", "pre-hook", "class", "instance"])
def test_code_of_the_user_is_seen_in_a_step(where, monkeypatch):
    """Each writes to the last parameter, which torch would not write first, and fails."""
    optimizer, guard = guarded(mixed_parameters()[:1], foreach=False)
    last = optimizer.param_groups[0]["params"][-1]

    def writes(*_):
        with torch.no_grad():
            last.add_(1)
        raise out_of_memory()

    if where == "post-hook":
        optimizer.register_step_post_hook(writes)
    elif where == "global post-hook":
        handle = register_optimizer_step_post_hook(writes)
    elif where == "pre-hook":
        optimizer.register_step_pre_hook(writes)
    else:
        monkeypatch.setattr(torch.optim.SGD if where == "class" else optimizer, "step", writes)
    try:
        with pytest.raises(PartialUpdateError), guard:
            optimizer.step()
    finally:
        if where == "global post-hook":
            handle.remove()


def test_a_fused_step_before_a_hook_that_fails_is_no_proof():
    optimizer, guard = guarded([{"params": mixed_parameters()[0]["params"][:2]}], fused=True)
    optimizer.register_step_post_hook(fails)
    with pytest.raises(PartialUpdateError), guard:
        optimizer.step()


def test_a_fused_step_of_a_users_class_is_seen():
    """The second group has no memory for its first state. The kernel of the first group increases no versions."""

    class Own(torch.optim.AdamW):
        pass

    optimizer, guard = guarded(mixed_parameters(), Own, fused=True)
    with AnyMemoryEnds(7, "zeros_like"), pytest.raises(PartialUpdateError), guard:
        optimizer.step()


def test_foreach_on_wrapper_subclasses_is_no_proof():
    p = TwoTensor(torch.zeros(3), torch.zeros(3)).requires_grad_()
    optimizer = torch.optim.SGD([p], lr=0.1, foreach=True)
    with pytest.raises(PartialUpdateError), AtomicUpdate(optimizer):
        raise out_of_memory()


def test_an_optimizer_that_forgets_state_is_no_proof():
    optimizer, guard = guarded(mixed_parameters(), momentum=0.9)
    optimizer.step()
    optimizer.step = lambda: optimizer.state.popitem() and fails()
    with pytest.raises(PartialUpdateError), guard:
        optimizer.step()


@pytest.mark.parametrize("is_coalesced", [True, False])
@pytest.mark.parametrize("has_dense", [True, False])
def test_scaled_gradients_are_seen_beside_sparse_ones(has_dense, is_coalesced):
    words = torch.zeros(5, 3, requires_grad=True)
    words.grad = torch.sparse_coo_tensor([[1, 2]], torch.ones(2, 3), (5, 3), is_coalesced=is_coalesced)
    dense = torch.zeros(3, requires_grad=True)
    dense.grad = torch.ones(3)
    optimizer = torch.optim.SGD([words, dense] if has_dense else [words], lr=0.1)
    guard = AtomicUpdate(optimizer)
    with pytest.raises(torch.OutOfMemoryError), guard:
        raise out_of_memory()
    assert not guard.has_rewritten_gradients
    optimizer.step = fails
    with pytest.raises(torch.OutOfMemoryError), guard:
        flatout.optim.update(optimizer, inv_scale=0.5)
    assert guard.has_rewritten_gradients


def test_a_guard_keeps_no_state_alive():
    optimizer, guard = guarded(mixed_parameters(), momentum=0.9)
    optimizer.step()
    with guard:
        optimizer.step()
    kept = [weakref.ref(value) for entry in optimizer.state.values() for value in entry.values()]
    optimizer.state.clear()
    assert not any(ref() is not None for ref in kept)
