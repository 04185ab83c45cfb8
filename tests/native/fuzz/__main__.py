"""``python -m tests.native.fuzz``: any number of cases, or one again."""

import sys

from tests.native.fuzz.runner import main

sys.exit(main())
