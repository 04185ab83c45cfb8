"""The demo: two jobs on real data, trained as people first write it and then through ``flatout.optimize``."""

from flatout.cli.demo_jobs.runner import JOBS, run_demo

__all__ = ["JOBS", "run_demo"]
