"""Plans: save, load and use, and rejection with the name of the field that differs."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.plan import SCHEMA_VERSION
from flatout.techniques import REGISTRY
from tests.helpers import snapshot, special_file
from tests.jobs import FORCED, FORCED_IN_OWN_LOOP, Net, make_data, make_job
from tests.reasons import reasons

pytestmark = pytest.mark.usefixtures("clock")


def planned(**how: Any) -> flatout.Plan:
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0, **how)
    run.undo()
    return run.plan


def assert_refused(plan: Any, field: str, model: nn.Module, loader: Any, opt: Any = None, loss_fn: Any = None) -> None:
    """Check that the error names the field and the plan's value, and that nothing changed."""
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match=rf"\b{field}\b.*{re.escape(plan.fingerprint[field])}"):
        flatout.optimize(model, loader, opt, loss_fn, plan=plan)
    assert snapshot(model, opt) == before


def test_a_plan_comes_back_from_its_file_and_decides_the_same(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = flatout.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.fingerprint.keys() == {"device", "torch", "model", "optimizer", "batch"}
    for given in (loaded, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        model, loader, opt = make_job()
        run = flatout.optimize(model, loader, opt, functional.cross_entropy, plan=given)
        assert run.plan == plan
        assert not any(row.trials for row in run.report.rows)
        kept = {row.technique for row in run.report.rows if "asked-for" in reasons(row)}
        assert kept == plan.decisions.keys()


WHAT_WAS_ASKED_FOR = {
    "techniques": {"techniques": FORCED},
    "precision": {"precision": "bf16", "techniques": {"compile": False, "workers": False}},
    "fp32": {"precision": "fp32", "techniques": {"fused_optimizer": True}},
    "a number": {"techniques": {"workers": 1, "cpu_threads": 1}},
    "advice": {"techniques": {"loading_stages": False}},
    "implied": {"techniques": {"torchscript": True}},
}


@pytest.mark.parametrize("asked", WHAT_WAS_ASKED_FOR.values(), ids=WHAT_WAS_ASKED_FOR)
def test_arguments_that_match_the_plan_are_accepted(tmp_path: Path, asked: Any) -> None:
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0, **asked)
    run.plan.save(tmp_path / "plan.json")
    run.undo()
    again = flatout.optimize(model, loader, opt, functional.cross_entropy, plan=tmp_path / "plan.json", **asked)
    again.undo()
    assert again.plan == run.plan


@pytest.mark.parametrize(
    ("decided", "asked", "facts"),
    [
        ({"precision": "bf16"}, {"precision": "fp32"}, "precision.*'bf16'.*False"),
        ({"precision": "bf16"}, {"precision": "fp16"}, "precision.*'bf16'.*'fp16'"),
        ({}, {"precision": "bf16"}, "precision.*False.*'bf16'"),
        ({"fused_optimizer": True}, {"techniques": {"fused_optimizer": False}}, "fused_optimizer.*True.*False"),
        ({"cpu_threads": 1}, {"techniques": {"cpu_threads": 2}}, "cpu_threads.*1.*2"),
    ],
)
def test_a_conflict_with_the_plan_is_refused_with_both_values(decided: Any, asked: Any, facts: str) -> None:
    model, loader, opt = make_job()
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match=facts):
        flatout.optimize(
            model, loader, opt, functional.cross_entropy, plan=flatout.Plan(decided, planned().fingerprint), **asked
        )
    assert snapshot(model, opt) == before


def test_what_does_not_apply_is_left_out_of_a_plan_and_is_an_error_where_it_is_asked_for() -> None:
    plan = flatout.Plan({"channels_last": True}, planned().fingerprint)
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, plan=plan)
    assert run.plan.decisions == {}
    with pytest.raises(ValueError, match="channels_last"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, plan=plan, techniques={"channels_last": True})


def test_a_plan_decides_about_techniques_that_are_not_forced() -> None:
    plan = planned()
    model, loader, opt = make_job()
    run = flatout.optimize(
        model, loader, opt, functional.cross_entropy, plan=plan, precision="bf16", techniques={"compile": False}
    )
    assert run.plan == plan


def test_a_plan_of_settings_in_a_dict_comes_back(tmp_path: Path) -> None:
    model, loader, opt = make_job()
    techniques = FORCED | {"in_memory": False, "workers": {"num_workers": 1, "prefetch_factor": 3}}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
    run.plan.save(tmp_path / "plan.json")
    run.undo()
    again = flatout.optimize(model, loader, opt, functional.cross_entropy, plan=tmp_path / "plan.json")
    assert again.plan == run.plan
    assert again.plan.decisions["workers"]["prefetch_factor"] == 3


def test_trained_weights_do_not_matter() -> None:
    plan = planned()
    model, loader, opt = make_job()
    with torch.no_grad():
        model.body[0].weight.zero_()
    model.eval()  # models from checkpoints start in eval mode
    flatout.optimize(model, loader, opt, functional.cross_entropy, plan=plan)


class Other(Net):
    """Model of the same structure under another class name."""


def gelu() -> nn.Module:
    model = Net()
    model.body[2] = nn.GELU()
    return model


def frozen() -> nn.Module:
    model = Net()
    model.body[0].bias.requires_grad_(False)
    return model


def with_buffer() -> nn.Module:
    model = Net()
    model.register_buffer("seen", torch.zeros(1))
    return model


def narrow() -> nn.Module:
    model = Net()
    model.body[0], model.body[1], model.body[4] = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return model


@pytest.mark.parametrize("make", [Other, gelu, frozen, with_buffer, narrow, lambda: Net().double()], ids=range(6))
def test_another_model_is_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert_refused(
        planned(), "model", model, make_job()[1], torch.optim.Adam(model.parameters()), functional.cross_entropy
    )


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    model, loader, opt = make_job()
    assert_refused(plan, "torch", model, loader, opt, functional.cross_entropy)


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores + 1)} if cores == 1 else {0})
    model, loader, opt = make_job()
    assert_refused(plan, "device", model, loader, opt, functional.cross_entropy)
    of_a_gpu = flatout.Plan(plan.decisions, {**plan.fingerprint, "device": "NVIDIA H200"})
    with pytest.raises(ValueError, match=r"device.*NVIDIA H200.*cpu"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, plan=of_a_gpu)


def test_another_optimizer_or_use_is_refused() -> None:
    plan = planned()
    model, loader, _ = make_job()
    assert_refused(plan, "optimizer", model, loader, torch.optim.SGD(model.parameters(), 0.1), functional.cross_entropy)
    assert_refused(plan, "optimizer", model, loader)
    # The fingerprint is checked first: this decision has no candidate without an optimizer.
    assert_refused(flatout.Plan({"precision": "fp16"}, plan.fingerprint), "optimizer", model, loader)
    own_loop = flatout.optimize(model, loader, techniques=FORCED_IN_OWN_LOOP, budget=0).plan
    flatout.undo(model)
    with pytest.raises(ValueError, match=r"optimizer.*training.*inference"):
        flatout.optimize(model.eval(), loader, plan=own_loop)


@pytest.mark.parametrize("change", ["size", "dtype", "shape"])
def test_other_batches_are_refused(change: str) -> None:
    model, _, opt = make_job()
    x, y = make_data().tensors
    data = {"size": (x, y), "dtype": (x, y.int()), "shape": (x, y[:, None])}[change]
    loader = DataLoader(TensorDataset(*data), batch_size=8 if change == "size" else 16)
    assert_refused(planned(), "batch", model, loader, opt, lambda output, target: output.square().mean())


@pytest.mark.parametrize("field", ["device", "torch", "model", "optimizer", "batch"])
def test_every_field_is_checked_and_none_may_be_missing(field: str) -> None:
    plan = planned()
    model, loader, opt = make_job()
    other = flatout.Plan(plan.decisions, {**plan.fingerprint, field: "something else"})
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match=f"{field}.*something else"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, plan=other)
    without = flatout.Plan(plan.decisions, {k: v for k, v in plan.fingerprint.items() if k != field})
    with pytest.raises(ValueError, match=rf"\b{field}\b"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, plan=without)
    assert snapshot(model, opt) == before


def test_a_technique_that_there_is_not_is_refused() -> None:
    plan = planned()
    model, loader, opt = make_job()
    with pytest.raises(ValueError, match="warp_drive"):
        flatout.optimize(
            model, loader, opt, functional.cross_entropy, plan=flatout.Plan({"warp_drive": True}, plan.fingerprint)
        )


def test_a_refused_plan_leaves_an_earlier_run_in_place() -> None:
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    kinds = type(model), type(opt)
    with pytest.raises(ValueError, match="abacus"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, plan=flatout.Plan({}, {"device": "abacus"}))
    assert (type(model), type(opt)) == kinds
    flatout.undo(model)


GOOD: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "decisions": {"precision": "bf16"}, "fingerprint": {"a": "b"}}
NO_PLANS: dict[str, Any] = {
    "no object": [1, 2],
    "nothing": {},
    "no decisions": GOOD | {"decisions": None},
    "a text of decisions": GOOD | {"decisions": "ab"},
    "pairs of decisions": GOOD | {"decisions": [["precision", "bf16"]]},
    "no fingerprint": {"schema_version": SCHEMA_VERSION, "decisions": {}},
    "a fingerprint of numbers": GOOD | {"fingerprint": {"device": 1}},
    "a list of fingerprints": GOOD | {"fingerprint": []},
    "a technique that there is not": GOOD | {"decisions": {"warp_drive": True}},
    "negative noise": GOOD | {"noise": -0.1},
    "no finite load": GOOD | {"load_average": float("inf")},
    "half a core": GOOD | {"cores": 0.5},
    "a text of undecided techniques": GOOD | {"undecided": "compile"},
    "a reason of a status alone": GOOD | {"left_out": {"compile": "rejected"}},
    "a reason of an unknown status": GOOD | {"left_out": {"compile": ["kept", "it pays"]}},
    "a list of reasons": GOOD | {"left_out": [["compile", "rejected"]]},
    "another version": GOOD | {"schema_version": 99},
    "version 1": GOOD | {"schema_version": 1},
    "a version of lists": GOOD | {"schema_version": [[]]},
    "no version": GOOD | {"schema_version": None},
}


@pytest.mark.parametrize("data", NO_PLANS.values(), ids=NO_PLANS)
def test_a_file_that_is_no_plan_is_refused_by_its_path(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    assert flatout.Plan.load(path).decisions == {"precision": "bf16"}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"plan\.json"):
        flatout.Plan.load(path)


def test_a_plan_of_version_2_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(GOOD | {"schema_version": 2}))
    assert flatout.Plan.load(tmp_path / "plan.json") == flatout.Plan({"precision": "bf16"}, {"a": "b"})


def test_a_plan_holds_the_conditions_of_its_measurements(tmp_path: Path) -> None:
    """Plans with different conditions are equal, because their decisions are equal."""
    plan = flatout.Plan(
        {}, {}, noise=0.02, load_average=3.5, cores=2, undecided=["compile"], left_out={"compile": ["not tried", "a"]}
    )
    plan.save(tmp_path / "plan.json")
    loaded = flatout.Plan.load(tmp_path / "plan.json")
    assert loaded.to_dict() == plan.to_dict()
    assert loaded == flatout.Plan({}, {})
    assert loaded.is_made_under_load
    assert not flatout.Plan({}, {}).is_made_under_load


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"NaN",
        json.dumps(GOOD).encode("utf-16"),
    ],
    ids=range(8),
)
def test_bytes_that_are_no_plan_are_refused_by_their_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json"):
        flatout.Plan.load(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        flatout.Plan.load(tmp_path / "missing.json")


NEVER: tuple[Any, ...] = (
    [[[]]],
    [],
    {},
    {"a": []},
    "warp",
    1.5,
    None,
    -1,
    "",
    {"num_workers": True},
    {"num_workers": 1, "prefetch_factor": 0},
    {"num_workers": 1, "persistent_workers": 1},
    {"samples": "many"},
)
"""Values that no technique accepts."""


@pytest.mark.parametrize("technique", [technique.name for technique in REGISTRY])
def test_values_that_a_technique_never_has_are_refused(tmp_path: Path, technique: str) -> None:
    for value in NEVER:
        (tmp_path / "plan.json").write_text(json.dumps(GOOD | {"decisions": {technique: value}}))
        with pytest.raises(ValueError, match=rf"plan\.json.*{technique}"):
            flatout.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("technique", ["precision", "compile", "torchscript", "in_memory", "workers", "batch_size"])
def test_such_values_are_refused_as_techniques_too(technique: str) -> None:
    for value in ([[[]]], {}, {"a": []}, "warp", -1):
        model, loader, opt = make_job()
        with pytest.raises(ValueError, match=technique):
            flatout.optimize(model, loader, opt, functional.cross_entropy, techniques={technique: value}, budget=0)


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "device"])
def test_a_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match="special"):
        flatout.Plan.load(special_file(tmp_path, kind))


def test_mutations_of_a_plan_are_read_or_refused(tmp_path: Path) -> None:
    path, draw = tmp_path / "plan.json", random.Random(0)
    plan = planned()
    plan.save(path)
    content = path.read_bytes()
    read = 0
    for _ in range(1000):
        mutated = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(mutated))
            piece = draw.choice(
                [b"", b"[", b"{", b'"', b"null", b"1e999", b"\xff", b"\\ud800", bytes([draw.randrange(256)])]
            )
            mutated[at : at + draw.randint(0, 4)] = piece
        path.write_bytes(mutated)
        try:
            loaded = flatout.Plan.load(path)
        except ValueError:
            continue
        read += 1
        loaded.check_decisions()
        loaded.save(path)
        assert flatout.Plan.load(path) == loaded
    assert 0 < read < 500
