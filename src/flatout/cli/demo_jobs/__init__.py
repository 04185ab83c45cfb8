"""Demo: two jobs on real data, each trained with a plain loop and through ``flatout.optimize``."""

from flatout.cli.demo_jobs.runner import JOBS, run_demo

__all__ = ["JOBS", "run_demo"]
