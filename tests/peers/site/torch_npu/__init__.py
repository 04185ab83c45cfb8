"""Fake of a package that a vendor's copy of torch's tests imports, for runs on a CPU."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.testing._internal.common_device_type as device_type


class _Absent(types.ModuleType):
    """Module whose decorators skip the decorated tests."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: unittest.skip("needs the vendor's device")


def _on_cpu(tests: type, scope: dict[str, Any], only_for: Any = None, **kwargs: Any) -> None:
    _instantiate(tests, scope, only_for="cpu" if only_for == "privateuse1" else only_for, **kwargs)


for _name in ("npu", "contrib", "testing", "testing.common_distributed", "testing.common_utils", "testing.decorator"):
    sys.modules[f"{__name__}.{_name}"] = _Absent(f"{__name__}.{_name}")
# This decorator restricts tests to models of the vendor's device. torch's tests do not have such a decorator.
sys.modules[f"{__name__}.testing.common_utils"].SupportedDevices = lambda models: lambda test: test
testing = sys.modules[f"{__name__}.testing"]
torch.Tensor.is_npu = False
npu = torch.npu = sys.modules[f"{__name__}.npu"]
npu.is_available = lambda: False
npu.device_count = lambda: 0
npu.get_device_name = lambda device=0: ""
_instantiate, device_type.instantiate_device_type_tests = device_type.instantiate_device_type_tests, _on_cpu
