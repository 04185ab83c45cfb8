"""Renderings of everything that flatout shows. Only these files hold its wording.

``python -m tests.renderings`` rewrites the files, and their diff shows each change of wording. Other tests check
codes, data and the structure of pages.
"""
