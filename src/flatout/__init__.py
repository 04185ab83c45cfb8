"""flatout: make any PyTorch training loop run flat out.

``run = flatout.optimize(model, loader, optimizer=opt, loss_fn=loss)`` tries each technique of the GPU utilization
checklist on the user's own step. Techniques that help are kept, and all others are reverted. ``print(run.report)``
explains the decisions.
"""

from flatout import native  # noqa: F401, I001  (imported first, because it rejects a torch that is too old)
from flatout import amp, data, mfu, optim
from flatout.training.checkpoint.file import CorruptCheckpointError
from flatout.optimize import optimize
from flatout.autotune.auto import auto
from flatout.plan import Plan
from flatout.report import Report
from flatout.core.deprecated import old_names
from flatout.core.reproducible import reproducible
from flatout.core.standard_error import show_log
from flatout.core.version import __version__
from flatout.run import Run, report_of, undo
from flatout import integrations, monitor, profile, report, testing

__all__ = [
    "CorruptCheckpointError",
    "Plan",
    "Report",
    "Run",
    "__version__",
    "amp",
    "auto",
    "data",
    "integrations",
    "mfu",
    "monitor",
    "optim",
    "optimize",
    "profile",
    "report",
    "report_of",
    "reproducible",
    "testing",
    "undo",
]

show_log()

__getattr__ = old_names("flatout", {"DamagedCheckpoint": CorruptCheckpointError})
