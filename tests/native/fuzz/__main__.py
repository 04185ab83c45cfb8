"""``python -m tests.native.fuzz``: runs many cases, or repeats one."""

import sys

from tests.native.fuzz.runner import main

sys.exit(main())
