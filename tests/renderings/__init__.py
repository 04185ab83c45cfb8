"""How everything that is shown to a person reads: the one place where its wording is kept.

``python -m tests.renderings`` writes the files anew, and what changed shows in their diff. Elsewhere tests look at
codes, at data and at the structure of a page.
"""
