"""The decisions of ``optimize``, as data that can be saved and applied again without measuring."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.data import tensors_of

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What to turn on, and the circumstances in which that was found to pay.

    Attributes:
        decisions: value for each kept technique, as ``optimize(techniques=...)`` takes it.
        fingerprint: device, torch, model signature and batch signature that the decisions were made for.
    """

    decisions: Mapping[str, Any]
    fingerprint: Mapping[str, str]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: the file is not such a plan, or is of another version.
        """
        try:
            data = json.loads(Path(path).read_text())
            version = data["schema_version"]
            plan = cls(decisions=dict(data["decisions"]), fingerprint=dict(data["fingerprint"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a flatout plan: {error!r}") from error
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has plan version {version}, this flatout reads version {SCHEMA_VERSION}")
        return plan

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Refuse to be applied in other circumstances.

        Raises:
            ValueError: names the first field that differs, and both values.
        """
        for field, here in fingerprint.items():
            there = self.fingerprint.get(field)
            if there != here:
                raise ValueError(f"this plan was made for another {field}: {there!r} there, {here!r} here")


def fingerprint(model: nn.Module, batch: Any, device: torch.device) -> dict[str, str]:
    """What decisions depend on: device, torch, the model's parameters, and a batch's shapes and dtypes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parameters = "".join(f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad};" for n, p in model.named_parameters())
    return {
        "device": name,
        "torch": torch.__version__,
        "model": f"{type(model).__qualname__} {hashlib.sha256(parameters.encode()).hexdigest()[:16]}",
        "batch": ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors_of(batch)),
    }
