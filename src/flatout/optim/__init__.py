"""Optimizers that move the least memory an update can: subclasses of torch's, and one-call updates."""

from flatout import native  # noqa: F401  (loads the operators)
from flatout.core.deprecated import old_names
from flatout.optim.adam import Adam, AdamW
from flatout.optim.atomic_update import PartialUpdateError
from flatout.optim.ema import Averages
from flatout.optim.fuse import fuse, unfuse, why_not_fusable
from flatout.optim.lion import Lion
from flatout.optim.sgd import SGD
from flatout.optim.update import UpdateResult, update

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Averages",
    "Lion",
    "PartialUpdateError",
    "UpdateResult",
    "fuse",
    "unfuse",
    "update",
    "why_not_fusable",
]

__getattr__ = old_names("flatout.optim", {"UpdateCutInHalf": PartialUpdateError})
