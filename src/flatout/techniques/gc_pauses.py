"""Neighbour: pauses of Python's garbage collector."""

from __future__ import annotations

from flatout.techniques.base import Rule


class GcPauses(Rule):
    """Lets a full garbage collection pause training once in an epoch, not again and again.

    What outlives a full collection that took 10 ms or more is set aside (``gc.freeze``) until the epoch ends, or the
    loop is left: those that follow look only at what was made since.

    A rule, and not a trial: it costs nothing before such a collection has come, next to nothing afterwards, and
    changes no result; while trials of some seconds rarely see one, and medians shrug it off.

    When it helps: large heaps (tokenizers, datasets of Python objects, transformers) in a loop that makes many objects
    or calls ``gc.collect()`` itself: full collections of 600 to 700 ms between steps of 680 ms were seen
    (karpathy/nanochat, pull request 477), and freezing took a collection from 1.5 s to 5 ms (VectorInstitute/FL4Health,
    pull request 222). When it hurts: an object of before the freeze that becomes garbage *in a reference cycle* is not
    found until the epoch ends. For that reason automatic collection stays on: torchtitan turns it off and collects
    every so many steps, for 1.5 % on 512 GPUs (pytorch/torchtitan, pull request 148), because ranks that pause at
    different times wait for each other. On one GPU a pause costs the same wherever it falls, and memory that cycles
    hold would wait for that step.
    """

    name = "gc_pauses"
    title = "garbage-collector pauses"
    rationale = (
        "when Python's garbage collector stops the training to look at every object, what is still in use is set aside "
        "until the epoch ends: the next time is short"
    )
    exact = True
