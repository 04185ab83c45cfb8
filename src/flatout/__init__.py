"""flatout: make any PyTorch training loop run flat out."""

from flatout import _native  # noqa: F401  (loads the operators; raises on a torch that is too old)

__version__ = "0.1.0"
