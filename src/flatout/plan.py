"""Decisions of ``optimize`` as data, to save and to apply again without measurements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.core.batches import objects_of, tensors_of
from flatout.core.files import is_special
from flatout.core.formatting import first_line
from flatout.core.machine import usable_cores
from flatout.techniques import REGISTRY, Measured
from flatout.training.checkpoint.folder import newest_in

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Plan:
    """Decisions of ``optimize``, and the setup that they were made for.

    Attributes:
        decisions: value for each kept technique, as ``optimize(techniques=...)`` takes it.
        fingerprint: device, torch, model, optimizer and batch that the decisions were made for.
    """

    decisions: Mapping[str, Any]
    fingerprint: Mapping[str, str]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: the file is not such a plan, or is of another version.
            OSError: the file cannot be read.
        """
        if is_special(path):
            raise ValueError(f"path must be a regular file, got {path}")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data["schema_version"]
            if version == SCHEMA_VERSION:
                return cls.from_dict(data)
            reason = f"has plan version {version!r}, this flatout reads version {SCHEMA_VERSION}"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a flatout plan: {first_line(error)}") from error
        raise ValueError(f"{path} {reason}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return a plan from its fields as plain data, as ``dataclasses.asdict`` returns them.

        Raises:
            KeyError: a field is missing.
            ValueError: a field is invalid.
        """
        decisions, fingerprint = data["decisions"], data["fingerprint"]
        for name, field in (("decisions", decisions), ("fingerprint", fingerprint)):
            if not isinstance(field, dict) or not all(isinstance(key, str) for key in field):
                raise ValueError(f"{name} must be an object, got {type(field).__name__}")
        if not all(isinstance(value, str) for value in fingerprint.values()):
            raise ValueError(f"fingerprint must hold strings, got {fingerprint!r}")
        plan = cls(decisions=_with_lr_rule(decisions), fingerprint=fingerprint)
        plan.check_decisions()
        return plan

    @classmethod
    def from_checkpoints(cls, folder: str | Path) -> Plan | None:
        """Return the plan of the newest checkpoint in a folder of ``Run.fit``; None without a checkpoint.

        A script with ``optimize(..., plan=Plan.from_checkpoints("checkpoints"))`` measures once, and uses the same
        decisions after each restart. ``techniques=`` and ``precision=`` may stay in the script, because they agree with
        the plan.

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
        """Reject unknown techniques, and values that a technique never has.

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
            value: value of ``techniques=`` or ``precision=``, as in ``decisions``; False: forbidden.

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
        for field, here in fingerprint.items():
            there = self.fingerprint.get(field, "nothing")
            if there != here:
                raise ValueError(f"this plan was made for another {field}: {there} there, {here} here")


def _with_lr_rule(decisions: dict[str, Any]) -> dict[str, Any]:
    """Return decisions with a rule of learning rates. Plans without a rule are from when linear was the default."""
    size = decisions.get("batch_size")
    if not isinstance(size, dict) or size.get("samples") is None:
        return decisions
    return decisions | {"batch_size": size | {"lr_rule": size.get("lr_rule", "linear")}}


def fingerprint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, batch: Any = None
) -> dict[str, str]:
    """Return the setup that decisions depend on: device, torch, modules, optimizer class, shapes and dtypes of a batch.

    Args:
        model: its modules' classes, parameters and buffers, not their values.
        optimizer: None for the user's own loop, and for inference.
        device: where the training runs.
        batch: left out of the fingerprint if None.
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
        tensors = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors_of(batch)]
        found["batch"] = ", ".join([*tensors, *(type(leaf).__qualname__ for leaf in objects_of(batch))])
    return found


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} of {usable_cores()} cores" if device.type == "cpu" else device.type
