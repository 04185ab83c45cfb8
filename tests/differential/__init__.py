"""Random training jobs, each run twice: as a plain torch loop, and through ``flatout.optimize``.

``pytest tests/differential`` runs a fixed set that covers every kind of part. ``--jobs 300 --seed 1000`` draws more
jobs.
"""
