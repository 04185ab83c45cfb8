"""Optional frameworks that tests need."""

from __future__ import annotations

from typing import Any

import pytest


def imported(name: str) -> Any:
    """Import a module of a framework, or skip with the reason."""
    try:
        import torchvision  # noqa: F401  (frameworks import it too, and break with one for another torch)
    except ImportError:
        pass
    except RuntimeError as error:
        pytest.skip(f"torchvision is for another torch: {error}", allow_module_level=True)
    return pytest.importorskip(name)
