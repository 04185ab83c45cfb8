"""Files that ``mkdocs build`` generates: a page for each technique, the reference, and copies of benchmark results.

The pages of techniques come from the registry, and the public names from the sources. The same script adds the pages to
the navigation.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import checklist  # noqa: E402

from flatout.techniques import REGISTRY, Advice, Measured, Rule, Technique  # noqa: E402

SOURCES = ROOT / "src"
MODULES = {
    "flatout": "The call `optimize`, what it returns, and `auto`.",
    "flatout.optim": "Optimizers of torch with a native step, and updates in one call.",
    "flatout.amp": "Loss scaling and clipping, without a host synchronization.",
    "flatout.data": "Loaders, caches, and functions on batches of any nesting.",
    "flatout.mfu": "FLOPs, peaks, and a counter of steps.",
    "flatout.profile": "Where the time of a step goes.",
    "flatout.monitor": "Samples of GPUs.",
    "flatout.report": "The report as data, and comparisons of two reports.",
    "flatout.integrations.accelerate": "Tuning of a training loop of accelerate.",
    "flatout.integrations.lightning": "Tuning of a Lightning Trainer.",
    "flatout.integrations.transformers": "Tuning of the Trainer of transformers, and its native optimizer.",
    "flatout.testing": "Tests of speed for pytest.",
}
"""Public modules, with one sentence on each."""

HIDDEN = ("__version__",)
KINDS = {Measured: "Measured", Rule: "Rules", Advice: "Advice"}
DECIDED = {
    "measured + verified": "A trial measures the gain, and compares outputs, gradients and losses.",
    "measured": "A trial measures the gain. The batches are the same.",
    "on request": "`techniques=` forces the technique. flatout compares outputs and gradients.",
    "rule": "A rule applies the technique without a trial.",
    "advice": "The report names what to change. flatout changes nothing.",
}
SECTIONS = ("When it helps", "When it hurts", "Limits", "Why no trial", "Why advice", "Expected", "Source")
SECTION = re.compile(rf"(?:^|(?<=\s))({'|'.join(SECTIONS)}|Sources): ")


def technique_page(technique: Technique) -> str:
    """Return the page of a technique."""
    sections = sections_of(technique.documentation)
    rows = [("Name", f"`{technique.name}`")]
    if technique.number is not None:
        rows.append(("Number in the checklist", str(technique.number)))
    rows.append(("Decided by", DECIDED[checklist.decided_by(technique)]))
    if technique.expected:
        rows.append(("Usually", f"{technique.expected} (literature)"))
    rows.append((f'`techniques={{"{technique.name}": …}}`', _values(technique)))
    rows.append(("Source code", f"`src/flatout/techniques/{Path(inspect.getfile(type(technique))).name}`"))
    lines = [f"# {_capital(technique.title)}", "", _markdown(sections.get("", "")), ""]
    head, *others = [f"| {name} | {text} |" for name, text in rows]
    lines += [head, "|---|---|", *others, ""]
    for title in SECTIONS:
        if title in sections:
            lines += [f"## {title}", "", _capital(_markdown(sections[title])), ""]
    if technique.rationale:
        lines += ["## In the report", "", "The row of a kept technique gives this reason:", ""]
        lines += [f"> {_capital(_markdown(technique.rationale))}.", ""]
    return "\n".join(lines)


def sections_of(documentation: str) -> dict[str, str]:
    """Return a docstring by section. The text before the first section has the key ``""``."""
    found: dict[str, list[str]] = {}
    for paragraph in re.split(r"\n\s*\n", documentation.strip()):
        first, *parts = SECTION.split(" ".join(paragraph.split()))
        for title, text in [("", first), *zip(parts[::2], parts[1::2], strict=True)]:
            if text.strip():
                found.setdefault(title.replace("Sources", "Source"), []).append(text.strip())
    return {title: "\n\n".join(texts) for title, texts in found.items()}


def reference_page(module: str) -> str:
    """Return the reference page of a module, with its public names."""
    lines = [f"# `{module}`", "", MODULES[module], ""]
    for name, path in public_names(module):
        lines += [f"::: {path}", "    options:", f"      heading: {module}.{name}", f"      toc_label: {name}", ""]
    return "\n".join(lines)


def public_names(module: str) -> list[tuple[str, str]]:
    """Return the public names of a module, each with the path of its definition."""
    folder = SOURCES.joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    defined = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    listed = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ),
        [name for name in defined if not name.startswith("_")],
    )
    names = []
    for name in listed:
        path = imported.get(name, f"{module}.{name}")
        is_module = path in MODULES or SOURCES.joinpath(*path.split(".")).is_dir()
        if name not in HIDDEN and not is_module:  # a module has its own page
            names.append((name, path))
    return names


def pages(docs: Path) -> dict[str, str]:
    """Return the text of every generated page, by its path in the folder of pages."""
    index = docs / "techniques" / "index.md"
    found = {"techniques/index.md": checklist.rewritten(index.read_text(encoding="utf-8"), link=True)}
    found |= {f"techniques/{technique.name}.md": technique_page(technique) for technique in REGISTRY}
    found |= {f"reference/{module}.md": reference_page(module) for module in MODULES}
    rows = [f"| [`{module}`]({module}.md) | {text} |" for module, text in MODULES.items()]
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    found |= {f"results/{file.name}": file.read_text(encoding="utf-8") for file in results}
    lines = ["# Reference", "", "Public modules. Each page has the names of the module's `__all__`.", ""]
    lines += ["| module | content |", "|---|---|", *rows, ""]
    lines += ["[Command line](cli.md): `flatout run`, `advise` and others."]
    found["reference/index.md"] = "\n".join(lines)
    return found


def navigation(nav: list[Any]) -> None:
    """Add the generated pages to the navigation of ``mkdocs.yml``, in place."""
    techniques: list[Any] = ["techniques/index.md"]
    for kind, title in KINDS.items():
        of_kind = [each for each in REGISTRY if isinstance(each, kind)]
        techniques.append({title: [{_capital(each.title): f"techniques/{each.name}.md"} for each in of_kind]})
    reference: list[Any] = ["reference/index.md", {"Command line": "reference/cli.md"}]
    reference.append({"Python": [{module: f"reference/{module}.md"} for module in MODULES]})
    for section in nav:
        if "Techniques" in section:
            section["Techniques"] = techniques
        if "Reference" in section:
            section["Reference"] = reference


def _values(technique: Technique) -> str:
    if isinstance(technique, Measured):
        words = technique.values.replace("|", "\\|")
        return f"{words}: forces the technique. `False` forbids it."
    if isinstance(technique, Advice):
        return "`False` leaves the advice out."
    assert isinstance(technique, Rule)
    if technique.argument:
        return f"Must not be given. `optimize({technique.argument}=True)` turns the rule on."
    return "`False` forbids the rule." if technique.is_forbiddable else "Must not be given: the rule is built in."


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _capital(text: str) -> str:
    """Capitalize a sentence or a title, unless it begins with a name such as ``torch.compile`` or an address."""
    first = text.partition(" ")[0].rstrip(".,")
    return text if "." in first or "_" in first or ":" in first else text[:1].upper() + text[1:]


def _write_all() -> None:
    import mkdocs_gen_files

    config = mkdocs_gen_files.FilesEditor.current().config
    for path, text in pages(ROOT / "docs").items():
        with mkdocs_gen_files.open(path, "w") as file:
            file.write(text)
    navigation(config["nav"])


if __name__ == "<run_path>":  # mkdocs-gen-files runs the script under this name
    _write_all()
