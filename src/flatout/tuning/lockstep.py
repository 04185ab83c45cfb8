"""Lockstep of all ranks: a technique applies or a candidate works only if it does so on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from flatout.distributed.agreement import Agreement, RankFailure
from flatout.plan import CACHED
from flatout.techniques import Candidate, NotApplicable
from flatout.tuning.choices import Choices
from flatout.tuning.request import Request


class _Labeled(Protocol):
    label: str


Labeled = TypeVar("Labeled", bound=_Labeled)


@contextmanager
def applies_on_all(ranks: Agreement) -> Iterator[None]:
    """Run a block that fails if a technique does not apply, and let it fail on all ranks together.

    Raises:
        NotApplicable: the block failed on some of the ranks.
    """
    try:
        with ranks.attempt():
            yield
    except RankFailure as failure:
        raise NotApplicable(str(failure)) from failure


_SAME = (
    "accumulate",
    "batch_size",
    "budget",
    "deterministic",
    "expected_steps",
    "lr_rule",
    "max_grad_norm",
    "memory_limit",
)
"""Arguments of ``optimize`` that change the trials."""


def check_same(ranks: Agreement, request: Request, choices: Choices) -> None:
    """Reject arguments that differ between ranks, because all ranks must make the same trials.

    Raises:
        ValueError: an argument differs. The message names it.
    """
    if ranks.size == 1:
        return
    arguments = {name: repr(getattr(request, name)) for name in _SAME}
    arguments["plan"] = repr(request.plan == CACHED)
    arguments["techniques"] = json.dumps(
        dict(choices.values), sort_keys=True, default=lambda value: type(value).__name__
    )
    given = ranks.every(arguments)
    for name in arguments:
        values = [each[name] for each in given]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on all ranks, got {shown}. Or pass parallel='none'")


def same_candidates(ranks: Agreement, find: Callable[[], Sequence[Labeled]]) -> Sequence[Labeled]:
    """Return the candidates that ``find`` returns on every rank.

    Raises:
        NotApplicable: the candidates differ, or ``find`` failed on some of the ranks.
    """
    with applies_on_all(ranks):
        found = find()
    labels = ranks.every([candidate.label for candidate in found])
    if any(other != labels[0] for other in labels):
        shown = "; ".join(f"rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(labels))
        raise NotApplicable(f"ranks have different candidates ({shown})")
    return found


def failure_of(ranks: Agreement, candidate: Candidate) -> str:
    """Return the reason why a candidate stopped working on a rank; empty while it works on all ranks."""
    return next(filter(None, ranks.every(candidate.failure)), "")
