"""Options of the reducer of the hidden DDP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReducerOptions:
    """Options of DDP's reducer. A change of an option requires a new DDP.

    Attributes:
        bucket_bytes: bytes of gradients that one all-reduce averages. None means 1 MiB for the first bucket of a
            backward, and 25 MiB for the others.
        gradient_as_bucket_view: True if gradients are views of the buckets, so that DDP need not copy them.
        static_graph: True if every step uses the parameters of the first step, so that DDP need not search the graph
            for unused parameters.
        is_compressed: True if all-reduces average gradients in bfloat16.
    """

    bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    is_compressed: bool = False
