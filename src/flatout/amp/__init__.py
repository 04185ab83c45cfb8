"""Mixed-precision helpers with torch's API. Updates of flatout's optimizers do not wait for the device."""

from flatout.amp.clip import clip_grad_norm_, grad_norms, unscale_and_check_
from flatout.amp.scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_", "grad_norms", "unscale_and_check_"]
