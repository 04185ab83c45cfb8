"""Loops as users write them: behind ``model, loader = optimize(model, loader)`` they train as they did before."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.clock import Clock
from tests.helpers import bits, snapshot, trained_state
from tests.jobs import QUICK, Net, make_data

pytestmark = pytest.mark.usefixtures("short_trials")

Loop = Callable[[nn.Module, Any], list[float]]
EXACT = QUICK | {"in_memory": True}
BF16 = QUICK | {"in_memory": True, "precision": "bf16"}


def make() -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    return Net(), DataLoader(make_data(), batch_size=16, shuffle=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# -- loops -----------------------------------------------------------------------------------------------------


def plain(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = sgd(model), []
    assert len(loader) == 6
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert len(losses) == 12
    return losses


def grad_scaler(model: nn.Module, loader: Any) -> list[float]:
    optimizer, scaler, losses = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 1024.0  # no step was skipped
    return losses


def flatouts_scaler(model: nn.Module, loader: Any) -> list[float]:
    optimizer, scaler, losses = sgd(model), flatout.amp.GradScaler("cpu", init_scale=1024.0), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_grad_norm=0.5)
        scaler.update()
        losses.append(loss.item())
    return losses


def accumulation(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses, accumulate = sgd(model), [], 4
    for i, (x, y) in enumerate(loader):
        loss = functional.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def several_optimizers(model: nn.Module, loader: Any) -> list[float]:
    first = torch.optim.SGD(model.body[:2].parameters(), lr=0.05)
    second = torch.optim.AdamW(model.body[2:].parameters(), lr=0.01)
    losses = []
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()
        losses.append(loss.item())
    return losses


def closures(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3), []
    for x, y in loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def evaluation_between_epochs(model: nn.Module, loader: Any) -> list[float]:
    losses = []
    for _ in range(2):
        model.train()
        losses += plain(model, loader)
        model.eval()
        with torch.no_grad():
            losses += [functional.cross_entropy(model(x), y).item() for x, y in loader]
        assert not any(module.training for module in model.modules())
    return losses


def progressive_unfreezing(model: nn.Module, loader: Any) -> list[float]:
    model.body[0].requires_grad_(False)
    losses = plain(model, loader)
    model.body[0].requires_grad_(True)
    return losses + plain(model, loader)


def schedule_per_batch(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = sgd(model), []
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=len(loader))
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert scheduler.last_epoch == len(loader)
    return losses


def gradient_penalty(model: nn.Module, loader: Any) -> list[float]:
    optimizer, losses = sgd(model), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(grad.pow(2).sum() for grad in grads).sqrt()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_on_the_way(model: nn.Module, loader: Any) -> list[float]:
    """State dict and whole model, as either is loaded where nobody has heard of flatout."""
    losses = plain(model, loader)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    fresh = Net()
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    whole = pickle.dumps(model)
    assert b"flatout" not in whole
    for copied in (fresh, pickle.loads(whole), copy.deepcopy(model)):
        assert type(copied) is Net
        assert [bits(p) for p in copied.parameters()] == [bits(p) for p in model.parameters()]
    model.load_state_dict(fresh.state_dict())
    return losses + plain(model, loader)


def averaged(model: nn.Module, loader: Any) -> list[float]:
    """torch's EMA, and statistics of its own from the loader at the end."""
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer, losses = sgd(model), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        losses.append(loss.item())
    assert type(ema.module) is Net
    update_bn(loader, ema)
    ema.eval()
    with torch.no_grad():
        losses += [functional.cross_entropy(ema(x), y).item() for x, y in loader]
    return losses


def copied_average(model: nn.Module, loader: Any) -> list[float]:
    """The EMA that everybody writes: a deepcopy and a lerp."""
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer, losses = sgd(model), []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
            for average, buffer in zip(ema.buffers(), model.buffers(), strict=True):
                average.copy_(buffer)
        losses.append(loss.item())
    ema.eval()
    assert not any(p.requires_grad for p in ema.parameters())
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        losses += [functional.cross_entropy(ema(x), y).item() for x, y in loader]
    return losses


LOOPS: list[Loop] = [
    plain,
    grad_scaler,
    flatouts_scaler,
    accumulation,
    several_optimizers,
    closures,
    evaluation_between_epochs,
    progressive_unfreezing,
    schedule_per_batch,
    gradient_penalty,
    saved_on_the_way,
    averaged,
    copied_average,
]


def assert_alike(
    make: Callable[[], tuple[nn.Module, Any]], loop: Loop, techniques: dict[str, Any], *, rel: float, budget: float = 0
) -> None:
    """The loop behind ``optimize``, against the loop without."""
    model, loader = make()
    torch.manual_seed(7)
    expected = loop(model, loader)
    expected_state = model.state_dict()

    model, loader = make()
    kind, before = type(model), trained_state(model)
    tuned, batches = flatout.optimize(model, loader, techniques=techniques, budget=budget)
    assert tuned is model
    assert trained_state(model) == before
    torch.manual_seed(7)
    losses = loop(tuned, batches)
    assert losses == pytest.approx(expected, rel=rel, abs=0.5 * rel)
    if techniques.get("precision") is False:
        for (name, ours), theirs in zip(model.state_dict().items(), expected_state.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda told, n=name: f"{n}: {told}")
    assert list(model.state_dict()) == list(expected_state)
    flatout.undo(model)
    assert type(model) is kind


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_trains_as_it_did(loop: Loop) -> None:
    assert_alike(make, loop, EXACT, rel=1e-4)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_trains_on_in_sixteen_bits(loop: Loop) -> None:
    assert_alike(make, loop, BF16, rel=0.2 if loop is closures else 0.05)


def test_what_trials_decide_trains_alike(clock: Clock) -> None:
    def make_slow() -> tuple[nn.Module, DataLoader[Any]]:
        model, loader = make()
        clock.slow_down(model, 0.01)
        return model, loader

    assert_alike(make_slow, plain, QUICK, rel=1e-4, budget=3)


def test_twice_is_once() -> None:
    def twice(model: nn.Module, loader: Any) -> list[float]:
        if isinstance(loader, DataLoader):
            return plain(model, loader)
        model, loader = flatout.optimize(model, loader, techniques=EXACT, budget=0)
        return plain(model, loader)

    assert_alike(make, twice, EXACT, rel=1e-4)


# -- torch's own AMP recipe and examples -----------------------------------------------------------------------


def amp_recipe(model: nn.Module, loader: Any, use_amp: bool = True) -> list[float]:
    """ "All together" of docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html, for device "cpu" and bfloat16."""
    device, losses = "cpu", []
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_fn = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(device, enabled=use_amp)
    for _ in range(2):
        for input, target in loader:
            with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
                output = model(input)
                assert output.dtype is (torch.bfloat16 if use_amp else torch.float32)
                loss = loss_fn(output, target)
                assert loss.dtype is torch.float32
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


def amp_without(model: nn.Module, loader: Any) -> list[float]:
    return amp_recipe(model, loader, use_amp=False)


def amp_inspected(model: nn.Module, loader: Any) -> list[float]:
    """The recipe's "Inspecting/modifying gradients": unscale_, then clip."""
    opt, scaler, losses = sgd(model), torch.amp.GradScaler("cpu"), []
    for input, target in loader:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(input)
            loss = functional.cross_entropy(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def amp_accumulated(model: nn.Module, loader: Any) -> list[float]:
    """ "Gradient accumulation" of docs.pytorch.org/docs/stable/notes/amp_examples.html."""
    optimizer, scaler, losses, iters_to_accumulate = sgd(model), torch.amp.GradScaler("cpu"), [], 3
    for i, (input, target) in enumerate(loader):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(input)
            loss = functional.cross_entropy(output, target)
            loss = loss / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def amp_penalised(model: nn.Module, loader: Any) -> list[float]:
    """ "Gradient penalty" of the same notes."""
    optimizer, scaler, losses = sgd(model), torch.amp.GradScaler("cpu"), []
    for input, target in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(input)
            loss = functional.cross_entropy(output, target)
        scaled_grad_params = torch.autograd.grad(
            outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True
        )
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            grad_norm = torch.zeros(())
            for grad in grad_params:
                grad_norm = grad_norm + grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def amp_several_optimizers(model: nn.Module, loader: Any) -> list[float]:
    """ "Working with multiple models, losses, and optimizers" of the same notes."""
    optimizer0 = torch.optim.SGD(model.body[:2].parameters(), lr=0.05)
    optimizer1 = torch.optim.SGD(model.body[2:].parameters(), lr=0.05)
    scaler, losses = torch.amp.GradScaler("cpu"), []
    for input, target in loader:
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output0 = model(input)
            output1 = model(input)
            loss0 = functional.cross_entropy(2 * output0 + 3 * output1, target)
            loss1 = functional.cross_entropy(3 * output0 - 5 * output1, target)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
        losses += [loss0.item(), loss1.item()]
    return losses


def cuda_amp(model: nn.Module, loader: Any) -> list[float]:
    """The loop of older tutorials; without a GPU both parts of it say so, and do nothing."""
    opt, losses = sgd(model), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.cuda.amp.GradScaler()
        for input, target in loader:
            opt.zero_grad()
            with torch.cuda.amp.autocast():
                output = model(input)
                loss = functional.cross_entropy(output, target)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
    return losses


AMP_LOOPS: list[Loop] = [amp_recipe, amp_inspected, amp_accumulated, amp_penalised, amp_several_optimizers]


@pytest.mark.parametrize("loop", AMP_LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
def test_an_amp_loop_is_autocast_once(loop: Loop, techniques: dict[str, Any]) -> None:
    """Whatever flatout would compute in: the user's autocast wins, and the losses are the same to the last bits."""
    assert_alike(make, loop, techniques, rel=1e-4)


@pytest.mark.parametrize("loop", [amp_without, cuda_amp], ids=lambda loop: loop.__name__)
def test_an_amp_loop_whose_autocast_is_off_is_any_loop(loop: Loop) -> None:
    assert_alike(make, loop, EXACT, rel=1e-4)


def test_autocast_that_is_off_around_the_call_stays_off() -> None:
    """``autocast(enabled=False)`` inside an outer autocast is a user who wants float32."""
    model, loader = make()
    model, loader = flatout.optimize(model, loader, techniques=BF16, budget=0)
    seen: list[torch.dtype] = []
    model.body[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x, _ = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    assert model(x).dtype is torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_a_forward_with_an_autocast_of_its_own() -> None:
    """As DataParallel's users are told to write it."""

    class Own(Net):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def make_own() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return Own(), DataLoader(make_data(), batch_size=16, shuffle=True)

    assert_alike(make_own, plain, EXACT, rel=1e-4)
    with pytest.raises(ValueError, match="precision"):
        assert_alike(make_own, plain, BF16, rel=1e-4)


# -- models ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Input and output share their weight, as language models' do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
def test_tied_weights_stay_tied(techniques: dict[str, Any]) -> None:
    def make_tied() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        tokens = torch.randint(0, 20, (64,))
        return Tied(), DataLoader(TensorDataset(tokens, tokens.roll(1)), batch_size=16)

    def loop(model: nn.Module, loader: Any) -> list[float]:
        optimizer, losses = sgd(model), []
        for tokens, target in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == 3
        return losses

    assert_alike(make_tied, loop, techniques, rel=1e-4 if techniques is EXACT else 0.05)


@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
def test_frozen_parameters_stay_frozen(techniques: dict[str, Any]) -> None:
    def make_frozen() -> tuple[nn.Module, Any]:
        model, loader = make()
        model.body[0].requires_grad_(False)
        model.body[1].eval()
        return model, loader

    def loop(model: nn.Module, loader: Any) -> list[float]:
        flags = [p.requires_grad for p in model.parameters()]
        assert flags == [False, False, True, True, True, True]
        assert not model.body[1].training
        frozen = bits(model.body[0].weight), bits(model.body[1].running_mean)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert (bits(model.body[0].weight), bits(model.body[1].running_mean)) == frozen
        assert model.body[0].weight.grad is None
        return losses

    assert_alike(make_frozen, loop, techniques, rel=1e-4 if techniques is EXACT else 0.05)


@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
def test_models_that_return_dicts(techniques: dict[str, Any]) -> None:
    class Several(Net):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            logits = super().forward(x)
            return {"logits": logits, "aux": [logits.square().mean()], "count": len(x), "none": None}

    def make_several() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return Several(), DataLoader(make_data(), batch_size=16, shuffle=True)

    def loop(model: nn.Module, loader: Any) -> list[float]:
        optimizer, losses = sgd(model), []
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            assert output["count"] == len(x)
            assert output["none"] is None
            loss = functional.cross_entropy(output["logits"], y) + 0.1 * output["aux"][0]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert_alike(make_several, loop, techniques, rel=1e-4 if techniques is EXACT else 0.05)


def test_two_networks_that_train_each_other() -> None:
    """A GAN: each network tuned by a call of its own, one loader."""

    def gan(tune: bool) -> list[float]:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        loader: Any = DataLoader(make_data(), batch_size=16, shuffle=True)
        if tune:
            critic, loader = flatout.optimize(critic, loader, techniques=EXACT, budget=0)
            generator, _ = flatout.optimize(generator, [torch.randn(16, 4)], techniques=QUICK, budget=0)
        optimizers = [torch.optim.Adam(net.parameters(), 0.01) for net in (generator, critic)]
        losses = []
        torch.manual_seed(7)
        for x, _ in loader:
            noise = torch.randn(len(x), 4)
            optimizers[1].zero_grad()
            loss = (
                functional.softplus(-critic(x)).mean() + functional.softplus(critic(generator(noise).detach())).mean()
            )
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            fooled = functional.softplus(-critic(generator(noise))).mean()
            fooled.backward()
            optimizers[0].step()
            losses += [loss.item(), fooled.item()]
        return losses

    assert gan(tune=True) == pytest.approx(gan(tune=False), rel=1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_and_after(when: str) -> None:
    """The optimizer, too: ``optimize`` is told of neither."""

    def loop(tune: bool) -> tuple[list[float], float]:
        model, loader = make()
        if tune and when == "after":
            model, loader = flatout.optimize(model, loader, techniques=EXACT, budget=0)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if tune and when == "before":
            model, loader = flatout.optimize(model, loader, techniques=EXACT, budget=0)
        losses = []
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's, of a scheduler that does not see the steps
            for _ in range(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                scheduler.step()
        return losses, optimizer.param_groups[0]["lr"]

    ours, theirs = loop(tune=True), loop(tune=False)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == theirs[1] == 0.0125


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_model_that_comes_compiled(way: str) -> None:
    def make_compiled() -> tuple[nn.Module, Any]:
        torch._dynamo.reset()
        model, loader = make()
        if way == "wrapped":
            return torch.compile(model, backend="eager"), loader
        model.compile(backend="eager")
        return model, loader

    def loop(model: nn.Module, loader: Any) -> list[float]:
        optimizer, losses = sgd(model), []
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert_alike(make_compiled, loop, EXACT, rel=1e-4)
    if way == "in place":
        assert_alike(make_compiled, loop, BF16, rel=0.05)
        return
    with pytest.raises(ValueError, match="precision"):
        assert_alike(make_compiled, loop, BF16, rel=0.05)


# -- transformers ----------------------------------------------------------------------------------------------


@pytest.fixture
def transformers() -> Any:
    try:
        import torchvision  # noqa: F401  (transformers imports it too, and breaks with one for another torch)
    except ImportError:
        pass
    except RuntimeError as error:
        pytest.skip(f"torchvision is for another torch: {error}")
    return pytest.importorskip("transformers")


def tokens(n: int = 32, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (n, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Rows(torch.utils.data.Dataset[Any]):
    """Dicts, as ``datasets`` yields them."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def hugging_face_loop(model: nn.Module, loader: Any) -> list[float]:
    """The loop of "Fine-tune a pretrained model in native PyTorch"."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    losses = []
    model.train()
    for _ in range(2):
        for batch in loader:
            batch = {k: v.to("cpu") for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            assert outputs[0] is loss
            assert outputs.logits.dtype is torch.float32
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_hugging_face_models(transformers: Any, kind: str, techniques: dict[str, Any], tmp_path: Any) -> None:
    sizes = {
        "bert": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    }[kind]

    def make_hf() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        if kind == "bert":
            config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
            model, labels = transformers.BertForSequenceClassification(config), torch.arange(32) % 2
        else:
            config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
            model, labels = transformers.GPT2LMHeadModel(config), tokens()["input_ids"]
        return model, DataLoader(Rows(**tokens(), labels=labels), batch_size=8, shuffle=True)

    def loop(model: nn.Module, loader: Any) -> list[float]:
        losses = hugging_face_loop(model, loader)
        model.eval()
        model.save_pretrained(tmp_path / "saved")
        again = type(model).from_pretrained(tmp_path / "saved").eval()
        for ours, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
            assert bits(ours) == bits(theirs)
        if kind == "gpt2":
            assert model.lm_head.weight is model.transformer.wte.weight
            made = model.generate(tokens(2, 4)["input_ids"], max_new_tokens=3, do_sample=False)
            assert made.shape == (2, 7)
        return losses

    assert_alike(make_hf, loop, techniques, rel=1e-3 if techniques is EXACT else 0.05)


def test_nothing_of_a_run_is_left_behind_an_own_loop() -> None:
    model, loader = make()
    before = snapshot(model)
    _, batches = flatout.optimize(model, loader, techniques=BF16, budget=0)
    flatout.undo(model)
    del batches
    assert snapshot(model) == before
