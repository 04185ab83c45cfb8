"""Decisions of ``optimize`` as data, which can be saved and applied again without measurements."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.core.batches import objects_of, sizes_of, tensors_of
from flatout.core.cache_folder import is_special
from flatout.core.described import Described
from flatout.core.formatting import first_line
from flatout.core.machine import usable_cores
from flatout.techniques import REGISTRY, Measured
from flatout.training.checkpoint.folder import newest_in

SCHEMA_VERSION = 3
READABLE_VERSIONS = (2, SCHEMA_VERSION)
"""Versions of plan files that ``Plan.load`` reads. Version 2 has only decisions and fingerprint."""


@dataclass(frozen=True, repr=False)
class Plan(Described):
    """Decisions of ``optimize``, and the setup that they were made for.

    Two plans are equal if their decisions and fingerprints are equal.

    Attributes:
        decisions: value for each kept technique, as ``optimize(techniques=...)`` accepts it.
        fingerprint: device, torch, model, optimizer and batch that the decisions were made for.
        noise: noise floor of the measurements, as relative difference of the baseline from itself. None if unknown.
        load_average: load average of the last minute before the measurements, or None if unknown.
        cores: number of cores that the process could use, or None if unknown.
        undecided: names of techniques that the budget or the noise left without a decision.
        left_out: status ("rejected" or "not tried") and reason of each technique that trials did not keep, by name.
    """

    decisions: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    noise: float | None = field(default=None, compare=False)
    load_average: float | None = field(default=None, compare=False)
    cores: int | None = field(default=None, compare=False)
    undecided: Sequence[str] = field(default=(), compare=False)
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @property
    def is_made_under_load(self) -> bool:
        """True if other programs competed for the cores when the plan was made."""
        return self.load_average is not None and self.cores is not None and self.load_average > self.cores

    def _facts(self) -> dict[str, str]:
        used = [name if value is True else f"{name}={value!r}" for name, value in self.decisions.items()]
        return {
            "decisions": ", ".join(used) or "no technique",
            "undecided": f"undecided: {', '.join(self.undecided)}" if self.undecided else "",
            "fingerprint": f"for {', '.join(self.fingerprint.values())}" if self.fingerprint else "",
        }

    def without(self, *techniques: str) -> Plan:
        """Return the same plan without decisions about some techniques."""
        return replace(self, decisions={n: value for n, value in self.decisions.items() if n not in techniques})

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file that ``save`` writes."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: the file is not a plan, or has another version.
            OSError: the file cannot be read.
        """
        if is_special(path):
            raise ValueError(f"path must be a regular file, got {path}")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data["schema_version"]
            if version in READABLE_VERSIONS:
                return cls.from_dict(data)
            known = " and ".join(map(str, READABLE_VERSIONS))
            reason = f"has plan version {version!r}, this flatout reads versions {known}"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a flatout plan: {first_line(error)}") from error
        raise ValueError(f"{path} {reason}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return a plan from its fields as plain data, as ``dataclasses.asdict`` returns them.

        Raises:
            KeyError: decisions or fingerprint are missing.
            ValueError: a field is invalid.
        """
        decisions, fingerprint = data["decisions"], data["fingerprint"]
        for name, given in (("decisions", decisions), ("fingerprint", fingerprint)):
            if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
                raise ValueError(f"{name} must be an object, got {type(given).__name__}")
        if not all(isinstance(value, str) for value in fingerprint.values()):
            raise ValueError(f"fingerprint must hold strings, got {fingerprint!r}")
        conditions = {name: data[name] for name in _CONDITIONS if name in data}
        plan = cls(_with_lr_rule(decisions), fingerprint, **conditions)
        for name, (is_valid, allowed) in _CONDITIONS.items():
            if not is_valid(getattr(plan, name)):
                raise ValueError(f"{name} must be {allowed}, got {getattr(plan, name)!r}")
        plan.check_decisions()
        return plan

    @classmethod
    def from_checkpoints(cls, folder: str | Path) -> Plan | None:
        """Return the plan of the newest checkpoint in a folder of ``Run.fit``, or None without a checkpoint.

        A script with ``optimize(..., plan=Plan.from_checkpoints("checkpoints") or "cached")`` uses the same decisions
        after each restart, and no timing changes them. ``techniques=`` and ``precision=`` may stay in the script,
        because they agree with the plan.

        Raises:
            ValueError: the newest checkpoint holds no plan.
            flatout.CorruptCheckpointError: checkpoints exist, but none is readable.
        """
        state = newest_in(folder)
        if state is None:
            return None
        try:
            return cls.from_dict(state["plan"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the newest checkpoint in {folder} holds no plan: {first_line(error)}") from error

    def check_decisions(self) -> None:
        """Reject unknown techniques, and values that a technique does not accept.

        Raises:
            ValueError: a decision is rejected. The message names the first such technique.
        """
        known = {technique.name: technique for technique in REGISTRY}
        for name, value in self.decisions.items():
            technique = known.get(name)
            if technique is None:
                raise ValueError(f"this plan decides about {name!r}, a technique that this flatout does not have")
            if value is not False and not (
                technique.accepts(value) if isinstance(technique, Measured) else value is True
            ):
                raise ValueError(f"this plan decides {name} = {value!r}, a value that the technique never has")

    def check_choice(self, technique: str, value: Any) -> None:
        """Reject a choice of the user that differs from the plan.

        Args:
            technique: the name of the technique.
            value: value of ``techniques=`` or ``precision=``, as in ``decisions``. False means forbidden.

        Raises:
            ValueError: the choice differs. The message names the technique and both values.
        """
        decided = self.decisions.get(technique, False)
        if value != decided:
            raise ValueError(
                f"the plan has decided {technique} = {decided!r}, techniques= or precision= comes to {value!r}: "
                "leave one of them out, or make them agree"
            )

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Reject a setup that the plan was not made for.

        Raises:
            ValueError: a field differs. The message names the first such field and both values.
        """
        for name, here in fingerprint.items():
            there = self.fingerprint.get(name, "nothing")
            if there != here:
                raise ValueError(f"this plan was made for another {name}: {there} there, {here} here")


def _is_quantity(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf)


def _is_reason(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and value[0] in ("rejected", "not tried")
        and isinstance(value[1], str)
    )


_CONDITIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "noise": (_is_quantity, "a number >= 0"),
    "load_average": (_is_quantity, "a number >= 0"),
    "cores": (lambda value: value is None or (type(value) is int and value >= 1), "an int >= 1"),
    "undecided": (
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value),
        "a list of strings",
    ),
    "left_out": (
        lambda value: isinstance(value, dict) and all(map(_is_reason, value.values())),
        "an object of pairs of strings",
    ),
}
"""Fields about the machine and the measurements, with a check and the allowed values for an error.

Older files lack some of these fields.
"""


def _with_lr_rule(decisions: dict[str, Any]) -> dict[str, Any]:
    """Return decisions with a rule of learning rates. In plans without a rule, linear was the default."""
    size = decisions.get("batch_size")
    if not isinstance(size, dict) or size.get("samples") is None:
        return decisions
    return decisions | {"batch_size": size | {"lr_rule": size.get("lr_rule", "linear")}}


def fingerprint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, batch: Any = None
) -> dict[str, str]:
    """Return the setup that decisions depend on.

    The setup is the device, the version of torch, the model, the optimizer's class, and the shapes and dtypes of a
    batch.

    Args:
        model: the model. The classes of its modules, its parameters and its buffers count, but not their values.
        optimizer: the optimizer, or None for the user's own loop and for inference.
        device: device of the training.
        batch: a batch, or None to leave the batch out of the fingerprint.
    """
    made = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    made += [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    made += [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    parameters = sum(p.numel() for p in model.parameters())
    make = hashlib.sha256("\n".join(made).encode()).hexdigest()[:12]
    if optimizer is not None:
        updated_by = type(optimizer).__qualname__
    else:
        updated_by = "none, in training" if model.training else "none, in inference"
    found = {
        "device": _name(device),
        "torch": str(torch.__version__),
        "model": f"{type(model).__qualname__} of {parameters:,} parameters ({make})",
        "optimizer": updated_by,
    }
    if batch is not None:
        tensors = [f"{str(t.dtype).removeprefix('torch.')}{list(sizes_of(t))}" for t in tensors_of(batch)]
        found["batch"] = ", ".join([*tensors, *(type(leaf).__qualname__ for leaf in objects_of(batch))])
    return found


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} of {usable_cores()} cores" if device.type == "cpu" else device.type
