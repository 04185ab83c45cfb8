"""12: live monitoring."""

from __future__ import annotations

from flatout.techniques.base import Rule


class Monitoring(Rule):
    """Counts steps, samples, waits and the share of the peak that the model makes use of (MFU) as training runs.

    When it helps: utilisation says that some kernel ran, not that the GPU did much; a loop that waits for its loader or
    for Python shows at once. When it hurts: never measurably; a step costs a few microseconds of the host.
    """

    name = "monitoring"
    number = 12
    title = "live monitoring"
    rationale = (
        "run.stats counts steps, phases and MFU without waiting for the device; run.verdict sets MFU beside NVML's "
        "utilisation; `flatout monitor` shows GPUs, host and workers live"
    )
    exact = True
