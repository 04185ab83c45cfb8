"""``python -m flatout``, for ``torchrun``, and for systems without the command ``flatout`` on the path."""

import sys

from flatout.cli import main

sys.exit(main())
