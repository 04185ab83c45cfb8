"""Records of decisions and trainings, for comparing two versions of flatout."""

import os

# Idle threads of OpenMP sleep instead of spinning. The variable must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
