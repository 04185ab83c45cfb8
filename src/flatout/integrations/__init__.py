"""Thin adapters of :func:`flatout.auto` for frameworks that run the training loop.

``flatout.integrations.lightning``, ``.transformers`` and ``.accelerate`` each import their framework. flatout does not
depend on these frameworks.
"""
