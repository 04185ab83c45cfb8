"""A trained model for those who run it: as a program of PyTorch's own, or its weights alone."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core.batches import batch_size_of, map_tensors, split, tensors_of

FORMATS = ("export", "torchscript")
TARGETS = ("labels", "label", "targets", "target")
"""Keys of a mapping that tell a model what it is to answer, which who runs it does not know."""


def example_of(batch: Any) -> Any:
    """Two samples of a batch, on the CPU and in memory of their own; all of one that cannot be taken apart."""
    size = batch_size_of(batch) if tensors_of(batch) else 0
    parts = split(batch, [2, size - 2]) if size > 2 else None
    return map_tensors(lambda tensor: tensor.detach().cpu().clone(), batch if parts is None else parts[0])


def inputs_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tensor, a pair's first, or a mapping's entries but for targets."""
    if isinstance(example, Mapping):
        return (), {key: value for key, value in example.items() if key not in TARGETS}
    if isinstance(example, Tensor):
        return (example,), {}
    return (example[0],), {}


def export(model: nn.Module, path: str | Path, example: Any, form: str) -> None:
    """Save a copy of a model, in eval mode, on the CPU and without anything of flatout's, for use without Python code.

    Args:
        model: stays as it is.
        path: of the file, by custom ``.pt2`` for "export" and ``.pt`` for "torchscript".
        example: a batch like those trained on. Its size may be another later on, where the model allows that.
        form: ``"export"``: ``torch.export.load(path).module()``; ``"torchscript"``: ``torch.jit.load(path)``, or
            ``torch::jit::load`` in C++; scripted, or traced where it cannot be.

    Raises:
        ValueError: there is no such form, or what TorchScript makes of the model would not be the same model.
        Exception: whatever torch says of a model that it cannot export.
    """
    if form not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {form!r}")
    plain = _plain(model).eval()
    args, kwargs = inputs_of(example)
    with torch.no_grad():
        if form == "export":
            sizes = pytree.tree_map_only(Tensor, _any_size, kwargs or args)
            program = torch.export.export(plain, args, kwargs, dynamic_shapes=sizes)
            torch.export.save(program, path)
        else:
            torch.jit.save(_scripted(plain, args, kwargs), str(path))


def _any_size(tensor: Tensor) -> dict[int, Any] | None:
    return {0: torch.export.Dim.AUTO} if tensor.dim() else None


def _scripted(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return torch.jit.script(model)
        except Exception:  # of many types: what TorchScript does not understand, a trace may get around
            caught.clear()
            traced = torch.jit.trace(model, args or None, example_kwarg_inputs=kwargs or None)
    for warning in caught:
        if issubclass(warning.category, torch.jit.TracerWarning):
            raise ValueError(f"a trace would lose what depends on the inputs: {str(warning.message).splitlines()[0]}")
    return traced


def export_weights(model: nn.Module, path: str | Path) -> None:
    """Save parameters and buffers as safetensors; tied ones once, as ``safetensors.torch.load_model`` takes them.

    Raises:
        ImportError: the package safetensors is not installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("export_weights needs the package safetensors: pip install safetensors")
    from safetensors.torch import save_model

    save_model(_plain(model), str(path))


def _plain(model: nn.Module) -> nn.Module:
    """A copy on the CPU without anything of flatout's: copies are of the model's own class and not compiled."""
    return copy.deepcopy(model).cpu().to(memory_format=torch.contiguous_format)
