"""Export of a trained model, as a program for PyTorch or as weights alone."""

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
"""Keys of targets in a mapping. Inference has no targets."""


def example_of(batch: Any) -> Any:
    """Return two samples of a batch, copied to the CPU, or all samples if the batch cannot be split."""
    size = batch_size_of(batch) if tensors_of(batch) else 0
    parts = split(batch, [2, size - 2]) if size > 2 else None
    return map_tensors(lambda tensor: tensor.detach().cpu().clone(), batch if parts is None else parts[0])


def inputs_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's positional and keyword arguments from a batch.

    The arguments are a tensor, the first element of a sequence, or the entries of a mapping without targets.
    """
    if isinstance(example, Mapping):
        return (), {key: value for key, value in example.items() if key not in TARGETS}
    if isinstance(example, Tensor):
        return (example,), {}
    return (example[0],), {}


def export(model: nn.Module, path: str | Path, example: Any, form: str) -> None:
    """Save a copy of a model, in eval mode, on the CPU and without flatout's changes, for use without Python code.

    Args:
        model: the model, which is not changed.
        path: the file, by convention ``.pt2`` for "export" and ``.pt`` for "torchscript".
        example: a batch like the training's batches. If the model allows other batch sizes, so does the program.
        form: ``"export"`` or ``"torchscript"``. ``torch.export.load(path).module()`` loads the first form.
            ``torch.jit.load(path)``, or ``torch::jit::load`` in C++, loads the second form. TorchScript is scripted, or
            traced if scripting fails.

    Raises:
        ValueError: ``form`` is unknown, or the trace for TorchScript depends on the values of the inputs.
        Exception: torch cannot export the model.
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
        except Exception:  # scripting raises errors of many types, and a trace may still work
            caught.clear()
            traced = torch.jit.trace(model, args or None, example_kwarg_inputs=kwargs or None)
    for warning in caught:
        if issubclass(warning.category, torch.jit.TracerWarning):
            raise ValueError(f"a trace would lose what depends on the inputs: {str(warning.message).splitlines()[0]}")
    return traced


def export_weights(model: nn.Module, path: str | Path) -> None:
    """Save parameters and buffers as safetensors.

    Tied weights are saved once, as ``safetensors.torch.load_model`` expects.

    Raises:
        ImportError: the package safetensors is not installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("export_weights needs the package safetensors: pip install safetensors")
    from safetensors.torch import save_model

    save_model(_plain(model), str(path))


def _plain(model: nn.Module) -> nn.Module:
    """Return a contiguous copy on the CPU without flatout's changes.

    A copy has the model's own class and is not compiled.
    """
    return copy.deepcopy(model).cpu().to(memory_format=torch.contiguous_format)
