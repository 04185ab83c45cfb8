"""Key of a cached plan: only fields that affect a decision change the key."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import flatout
from flatout.training.spec import Spec
from flatout.tuning import plan_cache
from flatout.tuning.arguments import check, resolved
from flatout.tuning.plan_cache import code_of, key_of, training_of
from flatout.tuning.session import Session
from tests.jobs import FORCED, NO_TECHNIQUES, Net, make_data, make_job

DEFAULTS = {name: p.default for name, p in inspect.signature(flatout.optimize).parameters.items()}


def session_of(**changes: Any) -> Session:
    """Return the session of a small training with some arguments changed."""
    model, loader, optimizer = make_job()
    arguments = {"model": model, "loader": loader, "optimizer": optimizer, "loss_fn": functional.cross_entropy}
    spec = Spec(**(DEFAULTS | arguments | changes))
    choices = check(spec)
    return Session(resolved(spec, choices), choices)


def key_for(**changes: Any) -> dict[str, str]:
    """Return the key of a small training with some arguments changed. The training is as before."""
    session = session_of(**{"expected_steps": 1000} | changes)
    try:
        session.prepare()
        return key_of(session)
    finally:
        session.restore(RuntimeError())
        session.close()


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


class Twin(Net):
    """Same modules under another name."""


class Slower(Net):
    def forward(self, x: Any) -> Any:
        return self.body(x) + 0


class Loader(DataLoader):
    """User's loader class."""


class Samples(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> Any:
        return make_data()[i]


class OtherSamples(Samples):
    def __getitem__(self, i: int) -> Any:
        x, y = make_data()[i]
        return x * 2, y


def collate(samples: Any) -> Any:
    return default_collate(samples)


def other_loss(output: Any, target: Any) -> Any:
    return functional.cross_entropy(output, target) * 2


def with_model(model: nn.Module, make: Callable[..., Any] = torch.optim.Adam, **settings: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": make(model.parameters(), **({"lr": 0.01} | settings))}


def loader(data: Any = None, make: type = DataLoader, **settings: Any) -> dict[str, Any]:
    data = make_data() if data is None else data
    return {"loader": make(data, **({"batch_size": 16, "shuffle": True} | settings))}


def in_doubles() -> TensorDataset:
    x, y = make_data().tensors
    return TensorDataset(x.double(), y)


def scheduled() -> dict[str, Any]:
    arguments = with_model(Net())
    return {**arguments, "scheduler": torch.optim.lr_scheduler.StepLR(arguments["optimizer"], 10)}


ARGUMENTS: dict[str, tuple[Callable[[], dict[str, Any]], set[str]]] = {
    "class of the model": (lambda: with_model(Twin()), {"model"}),
    "code of the model": (lambda: with_model(Slower()), {"model", "code"}),
    "dtype": (lambda: with_model(Net().double()) | loader(in_doubles()), {"model", "batch"}),
    "class of the optimizer": (lambda: with_model(Net(), torch.optim.SGD), {"optimizer", "settings", "choices"}),
    "setting of the optimizer": (lambda: with_model(Net(), amsgrad=True), {"settings"}),
    "weight decay": (lambda: with_model(Net(), weight_decay=0.1), {"settings"}),
    "no optimizer": (lambda: {"optimizer": None}, {"optimizer", "settings", "choices"}),
    "code of the loss": (lambda: {"loss_fn": other_loss}, {"code"}),
    "class of the loader": (lambda: loader(make=Loader), {"loader"}),
    "length": (lambda: loader(make_data(128)), {"loader"}),
    "workers": (lambda: loader(num_workers=1), {"loader"}),
    "order": (lambda: loader(shuffle=False), {"loader"}),
    "batch size": (lambda: loader(batch_size=8), {"loader", "batch"}),
    "collate_fn": (lambda: loader(collate_fn=collate), {"code"}),
    "class of the dataset": (lambda: loader(Samples()), {"loader", "code"}),
    "accumulate": (lambda: {"accumulate": 2}, {"update"}),
    "clipping": (lambda: {"max_grad_norm": 1.0}, {"update"}),
    "scheduler": (scheduled, {"scheduler"}),
    "precision": (lambda: {"precision": "fp32"}, {"choices"}),
    "forbidden": (lambda: {"techniques": {"compile": False}}, {"choices"}),
    "forced": (lambda: {"techniques": {"workers": 1}}, {"choices"}),
    "batch_size": (lambda: {"batch_size": 32}, {"choices"}),
    "lr_rule": (lambda: {"lr_rule": "none"}, {"choices"}),
    "memory_limit": (lambda: {"memory_limit": 10**10}, {"choices"}),
    "expected_steps": (lambda: {"expected_steps": 10_000}, {"expected steps"}),
}  # fmt: skip


@pytest.mark.parametrize(("change", "fields"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_every_argument_that_decisions_depend_on_changes_its_field(
    change: Callable[[], dict[str, Any]], fields: set[str]
) -> None:
    assert changed(key_for(), key_for(**change())) == fields


def trained() -> dict[str, Any]:
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    return with_model(model.eval())


IRRELEVANT: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "weights": trained,
    "learning rate": lambda: with_model(Net(), lr=0.5),
    "limit of the norm": lambda: {"max_grad_norm": 2.0},
    "seed": lambda: {"seed": 3},
    "budget": lambda: {"budget": 5.0},
    "nearly as many steps": lambda: {"expected_steps": 2000},
    "plan": lambda: {"plan": None},
    "order of choices": lambda: {"techniques": {"cpu_threads": False, "compile": False}},
}


@pytest.mark.parametrize("change", IRRELEVANT.values(), ids=IRRELEVANT)
def test_what_no_decision_depends_on_changes_nothing(change: Callable[[], dict[str, Any]]) -> None:
    same = {"max_grad_norm": 1.0, "techniques": {"compile": False, "cpu_threads": False}}
    assert changed(key_for(**same), key_for(**(same | change()))) == set()


def test_of_a_number_in_the_settings_only_its_type_counts_unless_the_number_is_0() -> None:
    without, weak, strong = (key_for(**with_model(Net(), weight_decay=decay)) for decay in (0.0, 0.1, 0.2))
    assert changed(without, weak) == {"settings"}
    assert changed(weak, strong) == set()


def one_core(patch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    patch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores + 1)} if cores == 1 else {0})


MACHINES: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], set[str]]] = {
    "affinity": (one_core, {"cores", "device"}),
    "threads": (lambda patch: torch.set_num_threads(torch.get_num_threads() + 1), {"cores"}),
    "ranks": (lambda patch: patch.setattr(plan_cache, "group_size", lambda: 4), {"cores"}),
    "processor": (lambda patch: patch.setattr(plan_cache, "cpu_name", lambda: "abacus"), {"hardware"}),
    "torch": (lambda patch: patch.setattr(torch, "__version__", "2.99.0"), {"torch"}),
    "flatout": (lambda patch: patch.setattr(plan_cache, "__version__", "9.0"), {"flatout"}),
    "python": (lambda patch: patch.setattr(platform, "python_version", lambda: "4.0"), {"python"}),
    "cudnn.benchmark": (lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True), {"modes"}),
    "products": (lambda patch: torch.set_float32_matmul_precision("high"), {"modes"}),
    "attention": (lambda patch: torch.backends.cuda.enable_flash_sdp(False), {"modes"}),
}


@pytest.mark.parametrize(("change", "fields"), MACHINES.values(), ids=MACHINES)
def test_every_property_of_the_machine_changes_its_field(
    change: Callable[[pytest.MonkeyPatch], object], fields: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_for()
    change(monkeypatch)
    assert changed(before, key_for()) == fields


@pytest.mark.parametrize("change", ["name", "total_memory", "multi_processor_count", "driver", "cuda", "cudnn"])
def test_another_gpu_or_driver_changes_the_hardware(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses a simulated GPU. The fingerprint's ``device`` holds its name."""
    gpu = {"total_memory": 80 << 30, "multi_processor_count": 132}
    facts = gpu | {"driver": "550.54", "cuda": "13.0", "cudnn": 91000}

    def hardware(facts: dict[str, Any]) -> str:
        properties = SimpleNamespace(**{name: facts[name] for name in gpu})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.version, "cuda", facts["cuda"])
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: facts["cudnn"])
        monkeypatch.setattr(plan_cache, "text_of", lambda _: facts["driver"])
        return plan_cache._hardware(torch.device("cuda", 0))

    is_same = hardware(facts) == hardware(facts | {change: "other"})
    assert is_same == (change == "name")


@pytest.mark.parametrize("value", ["1", "2"])
@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "ONEDNN_MAX_CPU_ISA",
        "FLATOUT_SOMETHING",
    ],
)
def test_environment_variables_for_kernels_and_numerics_are_in_the_key(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = key_for()
    monkeypatch.setenv(name, value)
    after = key_for()
    assert changed(before, after) == {"environment"}
    assert f"{name}={value}" in after["environment"]


@pytest.mark.parametrize(
    "name", ["HOME", "FLATOUT_CACHE", "FLATOUT_BUDGET", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "CUDA_HOME"]
)
def test_environment_variables_for_folders_and_logs_are_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_for()
    monkeypatch.setenv(name, "/elsewhere")
    assert changed(before, key_for()) == set()


def test_lambdas_are_told_apart_by_their_code() -> None:
    first, second = (
        lambda output, target: functional.cross_entropy(output, target),
        lambda output, target: functional.cross_entropy(output, target) * 2,
    )
    assert changed(key_for(loss_fn=first), key_for(loss_fn=second)) == {"code"}


def test_a_deterministic_training_has_another_key() -> None:
    assert "deterministic" in changed(key_for(), key_for(deterministic=True))


def test_only_the_code_of_the_dataset_may_differ() -> None:
    """The classes have one name, as after an edit."""
    OtherSamples.__qualname__ = Samples.__qualname__
    assert changed(key_for(**loader(Samples())), key_for(**loader(OtherSamples()))) == {"code"}


def mean_loss(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return functional.cross_entropy(model(x.mean(1)), y)


def padded(*lengths: int) -> dict[str, Any]:
    batches = [(torch.randn(16, length, 8), torch.zeros(16, dtype=torch.long)) for length in lengths]
    return {"loader": batches, "compute_loss": mean_loss, "loss_fn": None}


def test_padding_within_a_power_of_two_is_the_same_key() -> None:
    before = key_for(**padded(90, 70, 120))
    assert changed(before, key_for(**padded(100, 66, 127))) == set()
    assert changed(before, key_for(**padded(100, 66, 129))) == {"batch"}
    assert changed(before, key_for(**padded(120, 120, 120))) == {"batch"}


class Unsized:
    """Iterable whose length raises."""

    def __iter__(self) -> Any:
        return iter(make_job()[1])

    def __len__(self) -> int:
        raise ZeroDivisionError


def test_a_loader_without_a_length_has_a_key() -> None:
    assert "unknown" in key_for(loader=Unsized())["loader"]


def facts_of(**changes: Any) -> dict[str, str]:
    """Return the facts on a small training with some arguments of ``optimize`` changed."""
    model, loader, optimizer = make_job()
    arguments: dict[str, Any] = {"optimizer": optimizer, "loss_fn": functional.cross_entropy, "budget": 0, **changes}
    run = flatout.optimize(arguments.pop("model", model), arguments.pop("loader", loader), **arguments)
    try:
        return {**run.report.summary.training, **run.report.summary.code}
    finally:
        run.undo()


def test_techniques_do_not_change_the_facts_on_a_training() -> None:
    assert facts_of(techniques=FORCED | {"torchscript": True}) == facts_of(techniques=NO_TECHNIQUES)


def test_the_facts_are_those_of_the_prepared_session() -> None:
    session = session_of()
    try:
        session.prepare()
        facts, code = training_of(session), code_of(session)
        assert facts["batch"] == key_of(session)["batch"]
        assert [name.rpartition(".")[2] for name in code] == ["Net"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert training_of(session)["precision"] == "float32, autocast bfloat16"
        assert facts["precision"] == "float32, autocast off"
    finally:
        session.restore(RuntimeError())
        session.close()
