"""flatout: make any PyTorch training loop run flat out.

``run = flatout.optimize(model, loader, optimizer=opt, loss_fn=loss)`` tries each technique of the GPU-utilisation
checklist on the user's own step, keeps what pays, undoes what does not, and ``print(run.report)`` explains it.
"""

import logging  # noqa: I001  (native stays before the other modules)

from flatout import native  # noqa: F401  (first: it refuses a torch that is too old)
from flatout import amp, data, mfu, optim
from flatout.training.checkpoint.file import CorruptCheckpointError
from flatout.optimize import optimize
from flatout.autotune.door import auto
from flatout.plan import Plan
from flatout.report import Report
from flatout.core.deprecated import old_names
from flatout.core.reproducible import reproducible
from flatout.core.version import __version__
from flatout.run import Run, report_of, undo

__all__ = [
    "CorruptCheckpointError",
    "Plan",
    "Report",
    "Run",
    "__version__",
    "amp",
    "auto",
    "data",
    "mfu",
    "optim",
    "optimize",
    "report_of",
    "reproducible",
    "undo",
]

# Without a handler, Python would print warnings of a library.
logging.getLogger("flatout").addHandler(logging.NullHandler())

__getattr__ = old_names("flatout", {"DamagedCheckpoint": CorruptCheckpointError})
