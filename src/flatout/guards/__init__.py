"""Assumptions of techniques. Each assumption is one file, with an experiment before a technique is kept."""

from flatout.guards.base import Guard

__all__ = ["Guard"]
