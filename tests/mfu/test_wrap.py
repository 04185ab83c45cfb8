"""Wrapped models, which count their steps in any training loop, and are otherwise unchanged."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import flatout
from flatout.mfu import MfuCounter, count_flops
from tests.mfu.harness import StepTaker, calls_of


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, steps: int = 3, batch: int = 5, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            loss = model(torch.randn(batch, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_wrapped_model_counts_its_steps_samples_and_flops() -> None:
    counter, model = MfuCounter(peak_flops=1e30, device="cpu"), mlp()
    assert counter.wrap(model) is model
    losses = train(model)
    assert (counter.steps, counter.samples, counter.total.tokens) == (3, 15, 0)
    expected = 3 * count_flops(mlp(), torch.randn(5, 8)).total
    assert counter.total.flops_per_second * counter.total.seconds == pytest.approx(expected)
    assert counter.hfu == pytest.approx(counter.mfu)
    assert losses == train(mlp())  # bit for bit


def test_every_forward_and_backward_is_a_step_with_accumulation_too() -> None:
    counter, model = MfuCounter(1.0, device="cpu", phases_every=1), mlp()
    counter.wrap(model)
    train(model, steps=2, accumulate=3)
    assert counter.steps == 6
    assert counter.phases is not None
    assert min(counter.phases.forward, counter.phases.backward, counter.phases.update) > 0


def test_forwards_before_one_backward_are_one_step() -> None:
    counter, model = MfuCounter(2.0, device="cpu"), mlp()
    counter.wrap(model)
    (model(torch.ones(3, 8)).sum() - model(torch.ones(4, 8)).sum()).backward()
    assert (counter.steps, counter.samples) == (1, 7)
    assert counter.total.flops_per_second * counter.total.seconds == pytest.approx(4.0)


def test_tokens_are_counted_where_there_are_token_ids() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), nn.Embedding(10, 4)
    counter.wrap(model)
    model(torch.zeros(3, 7, dtype=torch.long)).sum().backward()
    assert (counter.samples, counter.total.tokens) == (3, 21)
    assert counter.tokens_per_second == pytest.approx(21 / counter.total.seconds)


def test_only_training_counts() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.eval()
    model(torch.ones(2, 8))
    assert counter.steps == 0
    model.train()
    train(model, steps=1)
    assert counter.steps == 1


def test_an_update_of_another_model_is_not_its_own() -> None:
    counter, model, other = MfuCounter(1.0, device="cpu", phases_every=1), mlp(), mlp()
    counter.wrap(model)
    model(torch.ones(2, 8)).sum().backward()
    train(other, steps=1)
    assert counter.total.phases is not None
    assert counter.total.phases.update == 0


def test_a_forward_that_fails_is_no_step() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(2, 9))
    assert counter.steps == 0
    assert train(model, steps=2) == train(mlp(), steps=2)
    assert counter.steps == 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, twice: bool = False) -> dict[str, Any]:
        return {"a": self.a(x), "rest": [self.b(x), None], "twice": twice}


def test_models_with_several_outputs_are_counted() -> None:
    counter, model = MfuCounter(device="cpu", phases_every=1), TwoHeads()
    counter.wrap(model)
    for _ in range(2):
        output = model(torch.ones(3, 8), twice=True)
        (output["a"].sum() + output["rest"][0].sum()).backward()
    assert counter.steps == 2
    assert counter.phases is not None
    assert counter.phases.backward > 0


@pytest.mark.parametrize("compiled", ["in place", "around"])
def test_compiled_models_are_counted(compiled: str) -> None:
    model: Any = mlp()
    if compiled == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager", fullgraph=True)
    counter = MfuCounter(device="cpu")
    counter.wrap(model)
    losses = train(model)
    assert counter.steps == 3
    assert counter.flops_per_second is not None
    assert losses == pytest.approx(train(mlp()))


def test_compiling_afterwards_goes_on_counting() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    model.compile(backend="eager")
    train(model)
    assert counter.steps == 3


def test_copies_and_pickles_are_plain() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    keys = list(model.state_dict())
    counter.wrap(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model, nn.Sequential)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert type(twin) is nn.Sequential
        train(twin, steps=1)
    assert counter.steps == 0
    assert repr(model) == repr(mlp())


def test_it_says_what_it_cannot_wrap() -> None:
    counter, model = MfuCounter(device="cpu"), mlp()
    counter.wrap(model)
    with pytest.raises(ValueError, match="Sequential"):
        counter.wrap(model)
    with pytest.raises(TypeError, match="ScriptModule"):
        counter.wrap(torch.jit.trace(mlp(), torch.ones(2, 8)))


def test_a_model_that_is_gone_leaves_nothing_behind() -> None:
    MfuCounter(1.0, device="cpu").wrap(mlp())
    gc.collect()  # models of other tests
    hooks = len(_global_optimizer_post_hooks)
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    train(model)
    gone = [weakref.ref(model), weakref.ref(calls_of(model))]
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert len(_global_optimizer_post_hooks) == hooks  # one hook for all models
    assert counter.steps >= 2


def test_a_model_may_be_collected_while_torch_goes_through_its_hooks() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    model.itself = [counter.wrap(mlp())]
    forgotten = model.itself
    counter.wrap(model)
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    handle = register_optimizer_step_post_hook(lambda *_: (forgotten.clear(), gc.collect()))
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert counter.steps == 1


def test_flops_that_cannot_be_counted_are_unknown_and_training_goes_on() -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("not now")
            return super().forward(x)

    counter, model = MfuCounter(peak_flops=1e12, device="cpu"), Moody(8, 8)
    counter.wrap(model)
    with pytest.warns(RuntimeWarning, match="RuntimeError: not now"):
        train(model)
    assert counter.steps == 3
    assert counter.mfu is None


def test_a_backward_that_fails_is_no_step_and_counting_goes_on() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)

    def fail(gradient: Tensor) -> None:
        raise KeyError("in backward")

    halfway = model(torch.ones(2, 8))
    halfway.register_hook(fail)
    with pytest.raises(KeyError):
        halfway.sum().backward()
    assert train(model) == train(mlp())
    assert (counter.steps, counter.samples) == (3, 15)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_repeats_counts_once(reentrant: bool) -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    for _ in range(3):
        checkpoint(model, torch.ones(5, 8, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert (counter.steps, counter.samples) == (3, 15)


def test_several_backwards_of_a_forward_are_one_step() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    for _ in range(2):
        output = model(torch.ones(2, 8))
        output.sum().backward(retain_graph=True)
        output.mean().backward()
    assert (counter.steps, counter.samples) == (2, 4)


class Recursive(nn.Linear):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(x) if depth == 0 else self(super().forward(x), depth - 1)


def test_a_model_that_calls_itself_is_counted_once() -> None:
    counter, model = MfuCounter(device="cpu"), Recursive(8, 8)
    counter.wrap(model)
    model(torch.ones(2, 8)).sum().backward()
    assert (counter.steps, counter.samples) == (1, 2)
    expected = count_flops(Recursive(8, 8), torch.ones(2, 8)).total
    assert counter.total.flops_per_second * counter.total.seconds == pytest.approx(expected)


def test_threads_count_their_own_steps() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)

    def run() -> None:
        for _ in range(100):
            model(torch.ones(3, 8)).sum().backward()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counter.steps, counter.samples) == (400, 1200)


def test_two_models_that_train_in_turns_share_a_counter() -> None:
    counter, generator, critic = MfuCounter(1.0, device="cpu"), nn.Linear(8, 8), mlp()
    counter.wrap(generator)
    counter.wrap(critic)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
    for _ in range(3):
        made = generator(torch.ones(2, 8))
        critic(made.detach()).sum().backward()
        optimizers[1].step()
        critic(made).sum().backward()
        optimizers[0].step()
    assert counter.steps == 9


@dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, ...]


class Odd(nn.Linear):
    """Layer that returns the result of a given function."""

    make: Callable[[Tensor], Any]

    def forward(self, x: Tensor) -> Any:
        return self.make(super().forward(x))


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda y: Output(y.sum(), (y, y * 2)), lambda output: output.loss),
        (lambda y: (y, [y, None]), lambda output: output[1][0].sum()),
        (lambda y: y, lambda y: y.mul_(2).sum()),  # changes the output in place after the hook
    ],
    ids=["dataclass", "nested", "in place"],
)
def test_outputs_of_any_kind_train_as_without(make: Callable[[Tensor], Any], loss: Callable[[Any], Tensor]) -> None:
    counter = MfuCounter(1.0, device="cpu")
    torch.manual_seed(0)
    model = Odd(4, 4)
    model.make = make
    plain = copy.deepcopy(model)
    counter.wrap(model)
    for trained in (model, plain):
        loss(trained(torch.ones(2, 4))).backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert counter.steps == 1


def test_outputs_that_live_on_keep_no_hook() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), nn.Identity()
    counter.wrap(model)
    image = torch.ones(2, 8, requires_grad=True)
    for _ in range(5):
        model(image).sum().backward()
    assert counter.steps == 5
    assert not image._backward_hooks


def test_a_backward_that_cannot_be_seen_shows_in_the_update() -> None:
    def parts(y: Tensor) -> Iterator[Tensor]:
        yield y

    def write(view: Tensor) -> Tensor:
        return view.add_(1)

    counter = MfuCounter(1.0, device="cpu")
    for make, first in ((parts, next), (lambda y: y.view(-1), write)):
        model = Odd(4, 4)
        model.make = make  # type: ignore[assignment]
        counter.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            first(model(torch.ones(2, 4))).sum().backward()
            optimizer.step()
    assert (counter.steps, counter.samples) == (6, 12)


def test_the_last_step_of_a_model_that_is_gone_counts() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)(torch.ones(2, 8)).sum().backward()
    del model
    gc.collect()
    assert counter.steps == 1


def test_an_update_between_forward_and_backward_ends_nothing() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 8)).sum()
    optimizer.step()
    assert counter.steps == 0
    loss.backward()
    assert counter.steps == 1


def test_a_frozen_model_is_no_step() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp().requires_grad_(False)
    counter.wrap(model)
    for _ in range(3):
        model(torch.ones(2, 8))
    model.requires_grad_(True)
    model(torch.ones(2, 8)).sum().backward()
    assert (counter.steps, counter.samples) == (1, 2)


def test_nothing_of_a_batch_is_kept_alive() -> None:
    counter, model = MfuCounter(device="cpu"), mlp()
    counter.wrap(model)
    batch = torch.ones(2, 8)
    output = model(batch)
    output.sum().backward()
    gone = [weakref.ref(batch), weakref.ref(output)]
    del batch, output
    assert [tensor() for tensor in gone] == [None, None]
    assert counter.steps == 1


def test_counting_flops_of_a_wrapped_model_counts_it_once() -> None:
    counter, model = MfuCounter(device="cpu"), mlp()
    expected = count_flops(model, torch.ones(2, 8)).total
    counter.wrap(model)
    assert count_flops(model, torch.ones(2, 8)).total == expected
    assert counter.steps == 0
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_transforms_and_traces_are_not_counted() -> None:
    counter, model = MfuCounter(device="cpu"), mlp()
    counter.wrap(model)
    weights, x = dict(model.named_parameters()), torch.ones(2, 8)
    torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
    traced = torch.jit.trace(model, x)
    assert str(traced.inlined_graph).count("aten::linear") == 2
    scripted = torch.jit.script(model)
    exported = torch.export.export(model, (x,)).module()
    for twin in (traced, scripted, exported):
        assert torch.equal(twin(x), model(x))
    assert counter.steps == 0
    torch.func.functional_call(model, weights, (x,)).sum().backward()
    assert counter.steps == 1


@pytest.mark.parametrize("first", ["wrap", "parametrize"])
def test_parametrizations_go_with_it(first: str) -> None:
    counter, model = MfuCounter(1.0, device="cpu"), nn.Linear(8, 4)
    if first == "parametrize":
        weight_norm(model)
    counter.wrap(model)
    if first == "wrap":
        weight_norm(model)
    train(model)
    twin = copy.deepcopy(model)
    train(twin)
    assert counter.steps == 3
    MfuCounter(1.0, device="cpu").wrap(twin)


class Meta(type):
    pass


class Registered(nn.Linear, metaclass=Meta):
    """Class with slots, a metaclass, a registry of subclasses, and its own pickling and calls."""

    __slots__ = ("calls",)
    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, name: str, **rest: Any) -> None:
        cls.names.append(name)
        super().__init_subclass__(**rest)

    def __call__(self, *args: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().__call__(*args)

    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), self.__getstate__()

    def __getstate__(self) -> Any:
        return self.__dict__.copy()


def test_classes_with_ways_of_their_own_are_wrapped() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), Registered(8, 4)
    counter.wrap(model)
    train(model)
    assert (counter.steps, model.calls, Registered.names) == (3, 3, [])
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is Registered
    assert torch.equal(twin.weight, model.weight)
    run = flatout.optimize(model, [torch.ones(2, 8)], techniques={"precision": "bf16", "compile": False}, budget=0)
    train(model)
    run.undo()
    train(model)
    assert type(pickle.loads(pickle.dumps(model))) is Registered


def test_several_processes_do_not_count_by_themselves() -> None:
    """One process would wait for the other in the middle of a count."""
    counter, model = MfuCounter(peak_flops=1e12, device="cpu"), mlp()
    counter.wrap(model)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.warns(RuntimeWarning, match="flops_per_step"):
            train(model)
    finally:
        torch.distributed.destroy_process_group()
    assert (counter.steps, counter.mfu) == (3, None)


def weight_of(model: nn.Module, answer: Any) -> None:
    answer.put((type(model).__name__, next(model.parameters()).sum().item()))


@pytest.mark.slow
def test_a_wrapped_model_travels_to_a_spawned_process() -> None:
    model = MfuCounter(1.0, device="cpu").wrap(mlp())
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=weight_of, args=(model, answer))
    process.start()
    assert answer.get(timeout=600) == ("Sequential", next(model.parameters()).sum().item())
    process.join()


@pytest.mark.parametrize("first", ["wrap", "optimize"])
def test_undo_leaves_counting_and_takes_autocast_out(first: str) -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    if first == "wrap":
        counter.wrap(model)
    run = flatout.optimize(model, [torch.ones(2, 8)], techniques={"precision": "bf16", "compile": False}, budget=0)
    if first == "optimize":
        counter.wrap(model)
    train(model, steps=1)
    run.undo()
    counter.reset()
    plain = copy.deepcopy(model)
    assert type(plain) is nn.Sequential
    x = torch.randn(4, 8)
    assert torch.equal(model(x), plain(x))  # in float32
    train(model, steps=2)
    assert counter.steps == 2
    assert pickle.loads(pickle.dumps(model)) is not None


def test_a_wrapped_part_of_a_compiled_whole_is_left_alone() -> None:
    counter, part = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(part)
    whole = torch.compile(nn.Sequential(part, nn.Linear(4, 2)), backend="eager", fullgraph=True)
    whole(torch.ones(2, 8)).sum().backward()
    assert counter.steps == 0


def test_a_step_that_another_thread_has_taken_is_not_taken_twice() -> None:
    """A reading finishes the last step of another thread, which may finish the same step at the same time."""
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    model(torch.ones(3, 8))
    taker = StepTaker(model)
    assert not taker.take_another()
    assert taker.take()
    assert not taker.take()
