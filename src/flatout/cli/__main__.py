"""``python -m flatout.cli``, for where no ``flatout`` is on the path."""

import sys

from flatout.cli import main

sys.exit(main())
