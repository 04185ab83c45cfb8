"""Convolutions on channels-last activations, and rejection of models that fail on the new strides."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.clock import TimedStep
from tests.helpers import snapshot
from tests.jobs import NO_TECHNIQUES, job_of, only
from tests.reasons import reasons
from tests.techniques.harness import candidates, decided, forced, refusal


class Net(nn.Module):
    def __init__(self, view=False):
        super().__init__()
        self.view = view
        self.one = nn.Conv2d(3, 8, 3, padding=1, bias=False)  # a bias before BatchNorm has no gradient except noise
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x):
        x = self.two(torch.relu(self.norm(self.one(x))))
        if self.view and not self.training:
            return self.head(x.view(len(x), -1))
        return self.head(x.flatten(1))


def make(view=False, optimizer=torch.optim.Adam):
    torch.manual_seed(0)
    model = Net(view)
    opt = optimizer(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(24, 3, 6, 6), torch.randint(0, 3, (24,)))
    return model, DataLoader(data, batch_size=8), opt


def train(model, loader, opt):
    for x, y in loader:
        opt.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        opt.step()


def formats(model, image):
    """Return True for each convolution whose output is in channels_last, not in the default format."""
    seen = []
    convolutions = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]

    def note(module, args, output):
        seen.append(output.stride() == output.clone(memory_format=torch.channels_last).stride())

    hooks = [m.register_forward_hook(note) for m in convolutions]
    model(image)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("warm", [False, True])
def test_weights_gradients_and_moments_never_change_their_memory(warm):
    model, loader, opt = make()
    if warm:
        train(model, loader, opt)
    classes = [type(m) for m in model.modules()]
    before, pointers = snapshot(model, opt), [p.data_ptr() for p in model.parameters()]
    candidate = forced("channels_last", True, job_of(model, optimizer=opt))
    for _ in range(2):
        with candidate:
            assert snapshot(model, opt) | {"class": Net} == before
            assert [p.data_ptr() for p in model.parameters()] == pointers
        assert [type(m) for m in model.modules()] == classes
        assert [p.data_ptr() for p in model.parameters()] == pointers
    with candidate:
        train(model, loader, opt)
        state = [t for each in opt.state.values() for t in each.values()]
        assert all(t.is_contiguous() for p in model.parameters() for t in (p, p.grad, *state))


def test_all_activations_between_convolutions_are_in_the_format():
    """One input channel and a 1x1 kernel have the same memory in both formats, so that only strides differ."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 3, 3))
    image = torch.randn(2, 1, 5, 5)
    (candidate,) = candidates("channels_last", job_of(model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    assert formats(model, image) == [False] * 3
    expected = model(image)
    with candidate:
        assert formats(model, image) == [True] * 3
        assert model(image).is_contiguous()
        torch.testing.assert_close(model(image), expected)
        assert model[0](image[0]).shape == (4, 3, 3)  # an image without a batch
    assert formats(model, image) == [False] * 3


def test_a_script_may_flatten_outputs_and_all_gradients():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    image = torch.randn(2, 3, 5, 5, requires_grad=True)
    seen = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.view(-1)))
    with forced("channels_last", True, job_of(model, optimizer=optimizer)):
        loss = model(image).view(2, -1).square().sum()
        loss.backward(retain_graph=True)
        found = torch.autograd.grad(loss, [image, *model.parameters()])
        assert all(gradient.view(-1).numel() for gradient in found)
        assert all(p.grad.view(-1).numel() for p in model.parameters())
    assert seen


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3)])
def test_hooks_of_gradients_run_in_the_same_order(layer):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: order.append(name))
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    with forced("channels_last", True, job_of(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))):
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    assert order[4:] == order[:4]


class Standardized(nn.Conv2d):
    """Convolution with a standardized weight."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / weight.std(), None)


def test_a_convolution_uses_the_weight_that_its_forward_computes():
    model = nn.Sequential(Standardized(3, 4, 3))
    image = torch.randn(2, 3, 5, 5)
    expected = model(image)
    with forced("channels_last", True, job_of(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))):
        torch.testing.assert_close(model(image), expected)


def test_a_model_that_is_a_convolution():
    model = nn.Conv2d(3, 4, 3)
    image = torch.randn(2, 3, 5, 5)
    with forced("channels_last", True, job_of(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))):
        assert model(image).is_contiguous()
        assert type(copy.deepcopy(model)) is nn.Conv2d
    assert type(model) is nn.Conv2d


def test_training_is_carried_over_in_both_directions():
    model, loader, opt = make()
    twin, twin_loader, twin_opt = make()
    candidate = forced("channels_last", True, job_of(model, optimizer=opt))
    with candidate:
        train(model, loader, opt)
    train(model, loader, opt)
    with candidate:
        train(model, loader, opt)
    for _ in range(3):
        train(twin, twin_loader, twin_opt)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_an_optimizer_that_is_not_given_is_not_affected():
    """Fused updates of torch read weights and moments in the order of memory."""

    def fused(parameters, lr):
        return torch.optim.Adam(parameters, lr, fused=True)

    model, loader, opt = make(optimizer=fused)
    twin, twin_loader, twin_opt = make(optimizer=fused)
    train(model, loader, opt)
    techniques = NO_TECHNIQUES | {"channels_last": True}
    run = flatout.optimize(model, loader, device="cpu", budget=0, plan=None, techniques=techniques)
    train(model, loader, opt)
    run.undo()
    train(model, loader, opt)
    for _ in range(3):
        train(twin, twin_loader, twin_opt)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
def test_it_goes_with_the_fused_optimizer_in_use(optimizer):
    model, loader, opt = make(optimizer=optimizer)
    train(model, loader, opt)
    force = NO_TECHNIQUES | {"channels_last": True, "fused_optimizer": True}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=force, budget=0)
    twin, twin_loader, twin_opt = make(optimizer=optimizer)
    train(twin, twin_loader, twin_opt)
    train(twin, twin_loader, twin_opt)
    for batch in run.loader:
        run.step(batch)
    assert all(formats(model, torch.randn(8, 3, 6, 6)))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    run.undo()
    assert not any(formats(model, torch.randn(8, 3, 6, 6)))
    train(model, loader, opt)


def test_a_view_in_evaluation_only_is_detected(clock):
    model, loader, opt = make(view=True)
    loss_fn = TimedStep(clock, 0.01)
    job = job_of(model, list(loader), optimizer=opt, loss_fn=loss_fn)
    before = snapshot(model, opt)
    with decided("channels_last", job=job) as outcome:
        assert snapshot(model, opt) == before
    row = outcome.rows["channels_last"]
    assert row.status == "rejected"
    assert "view" in row.trials[0].failure  # torch's message


# -- random numbers ------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Convolutions with random masks between them.

    Args:
        mask: draws a mask of its input's shape and applies it.
        wrong: factor of the output in channels_last.
    """

    def __init__(self, mask, wrong=1.0):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8 * 16, 3)
        self._mask, self._wrong = mask, wrong

    def forward(self, x):
        x = self.one(x)
        factor = 1.0 if x.is_contiguous() else self._wrong
        x = self._mask(x) if self.training else x
        return factor * self.head(self.two(x).flatten(1))


@torch.library.custom_op("flatout_tests::masked", mutates_args=())
def masked(x: torch.Tensor) -> torch.Tensor:
    """Drop half of ``x`` in the order of memory, as a fused kernel that torch's operators do not show."""
    keep = torch.empty(x.numel()).random_(2).as_strided(x.shape, x.stride())
    return x * keep * 2


masked.register_autograd(lambda ctx, gradient: gradient)

MASKS = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "fused": masked,
}


def tuned(clock, mask="dropout", wrong=1.0, **options):
    torch.manual_seed(0)
    model = Dropping(MASKS[mask], wrong)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(64, 3, 6, 6), torch.randint(0, 3, (64,)))
    loss_fn = TimedStep(clock, lambda _, active: 0.005 if "channels_last" in active else 0.01).watch(model)
    loader = DataLoader(data, batch_size=16)
    options = {"techniques": only("channels_last"), "budget": 1000} | options
    run = flatout.optimize(model, loader, opt, loss_fn, **options)
    return run.report.row("channels_last")


@pytest.mark.parametrize("mask", ["dropout", "noise"])
def test_both_memory_formats_draw_the_same_masks(mask, clock):
    row = tuned(clock, mask)
    assert row.status == "kept"
    assert "reseeded" in reasons(row)
    (trial,) = row.trials
    assert trial.output_difference < 1e-4
    assert trial.gradient_difference < 1e-3


def test_masks_of_fused_kernels_are_compared_with_those_of_another_seed(clock):
    row = tuned(clock, "fused")
    assert row.status == "kept"
    assert row.trials[0].output_difference > 0.1


def test_wrong_outputs_do_not_hide_behind_random_masks(clock):
    row = tuned(clock, wrong=1.2)
    assert row.status == "rejected"
    assert "numerics-differ" in reasons(row)


def test_deterministic_training_keeps_its_masks(clock):
    row = tuned(clock, deterministic=True)
    assert row.status == "not tried"
    assert "deterministic" in reasons(row)


def test_the_row_of_a_model_without_random_numbers_says_nothing_of_masks():
    model, loader, opt = make()
    techniques = NO_TECHNIQUES | {"channels_last": True}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
    assert "reseeded" not in reasons(run.report.row("channels_last"))


def test_models_without_convolutions_have_a_reason():
    assert "no-convolutions" in refusal("channels_last", job_of(nn.Linear(4, 2)))
