"""``python -m flatout``, for where no ``flatout`` is on the path, and for ``torchrun``."""

import sys

from flatout.cli import main

sys.exit(main())
