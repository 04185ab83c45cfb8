"""Command that rewrites the renderings."""

from tests.renderings.samples import SAMPLES, file_of, render

for name in SAMPLES:
    file_of(name).write_text(render(name), encoding="utf-8")
