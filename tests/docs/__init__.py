"""Tests of the documentation: README and the pages in docs/."""
