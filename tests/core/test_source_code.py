"""Hash of source code: changes that alter it, changes that do not, and no execution of the code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn import functional

from flatout.core.source_code import hash_of_source, hashes_of_source


def one(x: int) -> int:
    return x + 1


def another(x: int) -> int:
    return x + 2


class Model(nn.Module):
    scale = 1

    def forward(self, x: Any) -> Any:
        return self.helper(x) * self.factor

    @staticmethod
    def helper(x: Any) -> Any:
        return x

    @property
    def factor(self) -> int:
        return 1


def with_method(**methods: Any) -> type:
    """Return a class like ``Model`` with another method, under the same name."""
    return type("Model", (nn.Module,), {**vars(Model), **methods})


def edited(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` under another name, as an editor would replace a function."""
    function.__qualname__ = name
    return function


class Child(Model):
    def extra(self) -> None:
        """Change the class."""


class Trap:
    """Attribute that fails when it is accessed."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AssertionError("the attribute was read")


class WithTrap(nn.Module):
    trap = Trap()


OTHERS: dict[str, tuple[Any, Any]] = {
    "function": (one, another),
    "method": (Model, with_method(forward=edited(lambda self, x: x * 2, "Model.forward"))),
    "static method": (Model, with_method(helper=staticmethod(edited(lambda x: -x, "Model.helper")))),
    "property": (Model, with_method(factor=property(edited(lambda self: 2, "Model.factor")))),
    "base class": (Child, type("Child", (with_method(forward=another),), dict(vars(Child)))),
    "subclass": (Model, Child),
    "partial function": (functools.partial(one), functools.partial(another)),
    "torch's function": (one, functional.cross_entropy),
}


@pytest.mark.parametrize(("first", "second"), OTHERS.values(), ids=OTHERS)
def test_other_code_has_another_hash(first: Any, second: Any) -> None:
    assert hash_of_source([first]) != hash_of_source([second])


SAME: dict[str, tuple[list[Any], list[Any]]] = {
    "order": ([one, Model], [Model, one]),
    "repetition": ([one], [one, one]),
    "object and class": ([Model()], [Model]),
    "partial function": ([one], [functools.partial(one, x=3)]),
    "torch's code": ([nn.Linear(1, 1), functional.mse_loss], [nn.CrossEntropyLoss]),
    "bound method": ([Model().forward], [Model.forward]),
}


@pytest.mark.parametrize(("first", "second"), SAME.values(), ids=SAME)
def test_the_same_code_has_the_same_hash(first: list[Any], second: list[Any]) -> None:
    assert hash_of_source(first) == hash_of_source(second)


def test_code_without_a_source_counts_by_its_name() -> None:
    made: dict[str, Any] = {"__name__": "made"}
    exec("def f(x): return x\ndef g(x): return x", made)
    assert hash_of_source([made["f"]]) not in (hash_of_source([]), hash_of_source([made["g"]]))


def test_nothing_runs() -> None:
    hash_of_source([WithTrap, WithTrap()])


def test_hashes_by_name_leave_out_code_of_libraries() -> None:
    hashes = hashes_of_source([nn.Linear(1, 1), Model(), one, functools.partial(another), functional.mse_loss])
    assert [name.removeprefix(f"{__name__}.") for name in hashes] == ["Model", "another", "one"]
    assert hashes[f"{__name__}.one"] == hash_of_source([one])


def test_a_change_changes_one_hash() -> None:
    changed = with_method(forward=edited(lambda self, x: x * 2, "Model.forward"))
    before, after = hashes_of_source([Model, one]), hashes_of_source([changed, one])
    assert [name.rpartition(".")[2] for name in before if before[name] != after[name]] == ["Model"]
