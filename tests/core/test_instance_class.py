"""Classes made for one instance: pickles, copies and compilation see only the user's own class."""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import flatout
from flatout.core.instance_class import instance_class, take_class_out, users_class


class Plain(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class WithState(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "note": "from getstate"}


class WithNewArgs(Plain):
    def __new__(cls, *args: Any) -> WithNewArgs:
        made = super().__new__(cls)
        object.__setattr__(made, "given", args)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (7, "eight")


class WithKeywords(Plain):
    def __new__(cls, *args: Any, **kwargs: Any) -> WithKeywords:
        made = super().__new__(cls)
        object.__setattr__(made, "given", kwargs)
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"seven": 7}


class WithReduce(Plain):
    def __reduce__(self) -> Any:
        return type(self), (3,), self.__dict__


class WithReduceEx(Plain):
    def __reduce_ex__(self, protocol: Any) -> Any:
        make, args, state, *rest = super().__reduce_ex__(protocol)
        return make, args, {**state, "protocol": protocol}, *rest


class InTable(Plain):
    pass


def rebuilt(state: dict[str, Any]) -> InTable:
    made = InTable()
    made.__dict__.update(state, note="from the table")
    return made


class AGlobal(Plain):
    def __reduce__(self) -> str:
        return "GLOBAL"


class AList(Plain, list[int]):
    def __init__(self) -> None:
        super().__init__()
        self.append(5)


GLOBAL = AGlobal()
CLASSES = [Plain, WithState, WithNewArgs, WithKeywords, WithReduce, WithReduceEx, InTable, AList]


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, InTable, lambda module: (rebuilt, (module.__dict__,)))


def changed(module: nn.Module, **members: Any) -> nn.Module:
    module.__class__ = instance_class(type(module), **members)
    return module


def through_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch,
} | {
    f"{kind} {protocol}": lambda module, protocol=protocol, dump=dump: pickle.loads(dump(module, protocol))
    for kind, dump in (("C", pickle.dumps), ("Python", pickle._dumps))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_those_of_the_users_class(make: type[nn.Module], copied: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    plain = make()
    expected, got = copied(plain), copied(changed(copy.deepcopy(plain), flatout_extra=1))
    assert type(got) is type(expected) is make
    assert {k: v for k, v in vars(got).items() if k != "_modules"} == {
        k: v for k, v in vars(expected).items() if k != "_modules"
    }
    assert all(map(torch.equal, got.state_dict().values(), expected.state_dict().values()))
    if make is AList:
        assert list(got) == list(expected) == [5]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("make", [*CLASSES, nn.Linear])
def test_pickles_are_those_of_the_users_class_byte_for_byte(make: type[nn.Module], protocol: int) -> None:
    module = make(2, 2) if make is nn.Linear else make()
    expected = pickle.dumps(module, protocol)
    assert pickle.dumps(changed(changed(module)), protocol) == expected
    assert pickle._dumps(module, protocol) == pickle._dumps(_as(module, make), protocol)


def _as(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    module.__class__ = cls
    return module


def test_the_name_of_a_global_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = changed(AGlobal())
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", module)
    assert pickle.loads(pickle.dumps(module)) is module


def test_a_module_that_holds_itself_is_pickled() -> None:
    module = changed(Plain())
    object.__setattr__(module, "myself", module)
    got = pickle.loads(pickle.dumps(module))
    assert got.myself is got
    assert type(got) is Plain


def test_the_class_seen_is_the_type_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    module = changed(Plain())
    made = type(module)
    for copied in COPIES.values():
        copied(module)
        assert module.__class__ is made
    reduced = module.__reduce_ex__(2)
    assert module.__class__ is Plain
    seen: list[type] = []
    thread = threading.Thread(target=lambda: seen.append(module.__class__))
    thread.start()
    thread.join()
    assert seen == [made]  # other threads may do this at any time
    del reduced
    assert module.__class__ is made
    module.note = lambda: None  # cannot be pickled
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(module)
    assert module.__class__ is made


def test_others_make_classes_of_what_they_see() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    linear = changed(nn.Linear(2, 2), forward=lambda self, x: "changed")
    made = type(linear)
    parametrize.register_parametrization(linear, "weight", Doubled())
    assert linear(torch.ones(1, 2)) == "changed"
    parametrize.remove_parametrizations(linear, "weight")
    assert type(linear) is made
    take_class_out(linear, made)
    assert type(linear) is nn.Linear is users_class(made)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        named = self.__class__.__name__ == type(self).__name__ == "Named" and isinstance(self, Named)
        return self.inner(x) + named


def test_compile_and_export_see_the_same_module() -> None:
    module, x = changed(Named()), torch.ones(1, 2)
    expected = module(x)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), expected)
    torch.testing.assert_close(torch.export.export(module, (x,), strict=True).module()(x), expected)


def test_a_whole_model_is_loaded_where_there_is_no_flatout(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("""
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.body(x)
""")
    sys.path.insert(0, str(tmp_path))
    try:
        from theirs import Net  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    x = torch.ones(3, 4)
    off = {"compile": False, "workers": False}
    model, _ = flatout.optimize(Net(), [(x, x)], precision="bf16", budget=0, techniques=off)
    assert type(model) is not Net
    torch.save(model, tmp_path / "whole.pt")
    torch.save({"model": model, "epoch": 3}, tmp_path / "within.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    code = """
import sys, torch
from torch import nn
from theirs import Net
weights = torch.load("weights.pt")
for only in (True, False):
    with torch.serialization.safe_globals([Net, nn.Sequential, nn.Linear, nn.ReLU]):
        for model in (torch.load("whole.pt", weights_only=only), torch.load("within.pt", weights_only=only)["model"]):
            assert type(model) is Net
            assert all(map(torch.equal, model.state_dict().values(), weights.values()))
            assert model(torch.ones(3, 4)).shape == (3, 2)
assert "flatout" not in sys.modules
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
