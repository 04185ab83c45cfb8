"""Thin adapters over :func:`flatout.auto` for frameworks that own the training loop.

``flatout.integrations.lightning``, ``.transformers`` and ``.accelerate`` each import their framework. flatout does not
depend on these frameworks.
"""
