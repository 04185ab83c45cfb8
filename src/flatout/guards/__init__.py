"""Assumptions of techniques. Each assumption is one file, with an experiment before a technique is kept."""

from flatout.guards.base import Guard
from flatout.guards.first_order import FirstOrder
from flatout.guards.host_random import HostRandom
from flatout.guards.mean_over_samples import MeanOverSamples
from flatout.guards.python_state import PythonState

__all__ = ["FirstOrder", "Guard", "HostRandom", "MeanOverSamples", "PythonState"]
