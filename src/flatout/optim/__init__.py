"""Optimizers with a native step in one pass over memory, as subclasses of torch's, and updates in one call.

Files to write for another optimizer rule:

1. ``csrc/optim/rules.h``: the rule, its config, and lines in ``RuleName``, ``rule_named`` and ``with_config``.
2. ``csrc/library.cpp``: states and options of the rule, in the comment of ``step_``.
3. A module here: a subclass of ``NativeStep`` and of torch's class, as in ``sgd.py``. Its ``_streams`` and ``_options``
   have the order of ``rules.h``.
4. This file: import and ``__all__``. Add a class that torch has to ``_NATIVE`` in ``fuse.py``, too.
5. ``tests/optim/rules.py``: the rule in float64, and its row of the table that most tests of optimizers read.
6. ``tests/optim/test_parity.py``: parity with torch's class.

``make .venv/.native`` builds the changed C++. The CUDA kernels need no line: ``with_config`` instantiates them.

In 8 bits the first of ``_streams`` has a sign. The others have none, and their names end in ``_sq``. Another layout of
signs also needs a change of ``fetch`` in ``step_cpu.cpp``, of ``step_codes.h`` and of ``dynamic8.has_sign``. New state
begins with zeros (``keep_moment`` in ``bucket.py``).
"""

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
