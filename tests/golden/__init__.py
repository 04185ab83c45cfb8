"""Records of what flatout decides and trains, to compare a refactored version with."""

import os

# Before torch is imported: idle threads of OpenMP sleep, where they would spin on cores that others use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
