"""Bad input is refused with an error that names the argument, the value and the fix, and nothing changes."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.tuning.arguments import OTHER_KEYWORDS, choices_of, precision_of
from tests.helpers import snapshot
from tests.jobs import Net, make_data


def bad_jobs():
    net, opt = Net(), torch.optim.Adam
    other = torch.optim.Adam(Net().parameters())
    frozen = Net().requires_grad_(False)
    loader = DataLoader(make_data(), batch_size=16)
    ce = functional.cross_entropy
    words = [["a", "b"], ["c", "d"]]
    yield "empty loader", (net, [], opt(net.parameters()), ce), {}, ValueError, "loader"
    yield "nothing to train", (frozen, loader, None, ce), {}, ValueError, "^model"
    yield "no tensors", (net, words, opt(net.parameters()), ce), {}, ValueError, "^loader"
    yield "foreign optimizer", (net, loader, other, ce), {}, ValueError, "^optimizer"
    vector = lambda out, y: functional.cross_entropy(out, y, reduction="none")  # noqa: E731
    yield "vector loss", (net, loader, opt(net.parameters()), vector), {}, ValueError, r"loss.*\(16,\)"
    number = lambda out, y: 1.0  # noqa: E731
    yield "loss not a tensor", (net, loader, opt(net.parameters()), number), {}, TypeError, "loss.*float"
    detached = lambda out, y: ce(out.detach(), y)  # noqa: E731
    yield "detached loss", (net, loader, opt(net.parameters()), detached), {}, ValueError, "loss"
    job = (net, loader, opt(net.parameters()), ce)
    yield "misspelt", job, {"techniques": {"compil": False}}, ValueError, "'compil'.*'compile'"
    yield "bad value", job, {"techniques": {"workers": -1}}, ValueError, "workers.*-1"
    yield "bad precision", job, {"precision": "fp8"}, ValueError, "'fp8'"
    yield "bad norm", job, {"max_grad_norm": -1.0}, ValueError, r"max_grad_norm.*-1\.0"
    yield "bad accumulate", job, {"accumulate": 0}, ValueError, "accumulate.*0"
    yield "bad budget", job, {"budget": -1.0}, ValueError, r"budget.*-1\.0"
    yield "not a model", (ce, *job[1:]), {}, TypeError, "^model.*function"
    yield "not a loader", (net, 3, *job[2:]), {}, TypeError, "^loader.*int"
    yield "text as budget", job, {"budget": "5s"}, TypeError, "^budget.*'5s'.*budget=5"
    yield "float as accumulate", job, {"accumulate": 2.0}, TypeError, r"^accumulate.*2\.0.*accumulate=2"
    yield "text as norm", job, {"max_grad_norm": "1"}, TypeError, "^max_grad_norm.*'1'"
    yield "text as memory", job, {"memory_limit": "4GB"}, TypeError, "^memory_limit.*'4GB'"
    yield "text as steps", job, {"expected_steps": "all"}, TypeError, "^expected_steps.*'all'"
    yield "class of model", (Net, *job[1:]), {}, TypeError, r"^model.*model = Net\("
    yield "class of optimizer", (net, loader, opt, ce), {}, TypeError, r"^optimizer.*torch\.optim\.Adam\(model"
    yield "parameters", (net, loader, net.parameters(), ce), {}, TypeError, r"^optimizer.*\(model\.parameters"
    yield "class of loss", (*job[:3], nn.CrossEntropyLoss), {}, TypeError, r"^loss_fn.*loss_fn = CrossEntropyLoss\(\)"
    yield "dataset", (net, make_data(), *job[2:]), {}, TypeError, r"^loader.*DataLoader\(dataset, batch_size="
    yield "optimizer first", (net, job[2], loader, ce), {}, TypeError, r"^loader.*optimize\(model, loader, optimizer"
    yield "two models", ([net, Net()], *job[1:]), {}, TypeError, "^model.*list of 2.*flatout run"
    yield "named models", ({"g": net, "d": Net()}, *job[1:]), {}, TypeError, "^model.*dict of 2.*flatout run"
    yield "two optimizers", (net, loader, (job[2], other), ce), {}, TypeError, "^optimizer.*tuple of 2.*flatout run"
    lazy = nn.Sequential(nn.LazyLinear(3))
    yield "lazy", (lazy, loader), {}, ValueError, r"^model.*model\(next\(iter\(loader\)\)\[0\]\)"
    yield "meta", (nn.Linear(8, 3, device="meta"), loader), {}, ValueError, r"^model.*to_empty\("
    for keyword, code in {
        "gradient_accumulation_steps": "accumulate=",
        "gradient_clip_val": "max_grad_norm=",
        "mixed_precision": "precision=",
        "amp": "precision=",
        "batch": "batch_size=",
        "criterion": "loss_fn=",
        "compile": r"techniques=\{'compile': 1\}",
        "acumulate": "accumulate=",
        "whatever": "Choose from model, loader",
    }.items():
        yield f"keyword {keyword}", job, {keyword: 1}, TypeError, f"^optimize.*{keyword}.*{code}"
    no_opt = (net, loader, None, ce)
    yield "norm without optimizer", no_opt, {"max_grad_norm": 1.0}, ValueError, "max_grad_norm"
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt(net.parameters()))
    yield "plateau", job, {"scheduler": plateau}, ValueError, "ReduceLROnPlateau"
    lbfgs = torch.optim.LBFGS(net.parameters())
    yield "lbfgs", (net, loader, lbfgs, ce), {}, ValueError, "LBFGS"
    yield "no loss", (net, loader, opt(net.parameters())), {"max_grad_norm": 1.0}, ValueError, "loss_fn.*compute_loss"
    yield "two losses", job, {"compute_loss": ce}, ValueError, "loss_fn.*compute_loss"
    yield "triple", (net, [(torch.ones(2, 8),) * 3], opt(net.parameters()), ce), {}, TypeError, "compute_loss"


def picture(model, optimizer):
    """Return the state of both. For an optimizer of another model, the state of the optimizer is left out."""
    if not isinstance(model, Net) or not isinstance(optimizer, torch.optim.Optimizer | None):
        return type(model), None
    held = set() if optimizer is None else {p for group in optimizer.param_groups for p in group["params"]}
    return type(model), snapshot(model, optimizer if held & {*model.parameters()} else None)


@pytest.mark.parametrize(("args", "kwargs", "error", "facts"), [pytest.param(*c[1:], id=c[0]) for c in bad_jobs()])
def test_bad_input_is_refused_and_changes_nothing(args, kwargs, error, facts):
    model, optimizer = args[0], args[2] if len(args) > 2 else None
    before = picture(model, optimizer)
    with pytest.raises(error, match=facts):
        flatout.optimize(*args, **kwargs)
    assert picture(model, optimizer) == before


def test_an_error_in_the_users_model_passes_through_whole():
    class Broken(Net):
        def forward(self, x):
            raise RuntimeError("mine")

    model = Broken()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"^mine$"):
        flatout.optimize(model, DataLoader(make_data(), batch_size=16), None, functional.cross_entropy, budget=0)
    assert snapshot(model) == before


@pytest.mark.parametrize("keyword", ["mixed_precision", "gradient_accumulation_steps", "compile"])
def test_auto_refuses_keywords_of_others(keyword):
    with pytest.raises(TypeError, match=f"^auto.*{keyword}"):
        flatout.auto(**{keyword: 1})


@pytest.mark.parametrize("names", OTHER_KEYWORDS.values(), ids=OTHER_KEYWORDS)
def test_keywords_of_others_are_no_arguments(names):
    assert not {*names} & {*inspect.signature(flatout.optimize).parameters}


@pytest.mark.parametrize("code", OTHER_KEYWORDS)
def test_errors_about_keywords_show_arguments_that_exist(code):
    assert code.partition("=")[0] in inspect.signature(flatout.optimize).parameters


PRECISIONS = {
    "fp32": ["fp32", "32", 32, "32-true", "float32", torch.float32, torch.float, "no"],
    "tf32": ["tf32", "TF32"],
    "bf16": ["bf16", "bfloat16", "bf16-mixed", torch.bfloat16],
    "fp16": ["fp16", "16-mixed", 16, "float16", "half", torch.float16, torch.half],
}


@pytest.mark.parametrize(("own", "other"), [(own, other) for own, others in PRECISIONS.items() for other in others])
def test_precisions_have_the_names_of_other_libraries(own, other):
    assert precision_of(other) == own
    assert choices_of(None, other) == choices_of(None, own)


@pytest.mark.parametrize("unknown", ["fp8", "bf16-true", "16-true", True, None, torch.float64, [16]])
def test_other_precisions_are_refused(unknown):
    with pytest.raises(ValueError, match="precision"):
        precision_of(unknown)


@pytest.mark.parametrize("asked", ["bfloat16", torch.bfloat16, "bf16-mixed"])
def test_optimize_accepts_other_names_of_precisions(asked):
    model = Net()
    loader, optimizer = DataLoader(make_data(), batch_size=16), torch.optim.Adam(model.parameters())
    run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, precision=asked, budget=0)
    assert run.plan.decisions["precision"] == "bf16"


def test_a_float64_model_is_refused_in_fp32_under_any_name():
    model = Net().double()
    loader, optimizer = DataLoader(make_data(), batch_size=16), torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"^precision"):
        flatout.optimize(model, loader, optimizer, functional.cross_entropy, precision=torch.float32, budget=0)


def test_data_parallel_is_noted_and_trains():
    model = nn.DataParallel(Net())
    loader, optimizer = DataLoader(make_data(), batch_size=16), torch.optim.Adam(model.parameters())
    run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=0)
    assert [note for note in run.report.summary.notes if "DataParallel" in note]
    run.step(next(iter(run.loader)))
