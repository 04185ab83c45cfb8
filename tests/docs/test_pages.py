"""The pages: their code runs, their links lead somewhere, and they agree with the sources."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import types
from pathlib import Path

import pytest
import torch

import flatout
from flatout.cli import build_parser
from flatout.techniques import REGISTRY
from tests.docs.pages import DOCS, ROOT, anchors, blocks, links, tool, written

PAGES = written()
RUNNABLE = [path for path, text in PAGES.items() if any(not block.mark for block in blocks(text))]
FRAMEWORKS = [path for path, text in PAGES.items() if any("framework" in block.mark for block in blocks(text))]
MARKS = ("", "fragment", "setup", "gpu", "race", "framework", "package")


def missing_package(mark: str) -> str:
    """Return the name of a package that a block needs and that is not installed; empty without one."""
    packages = mark.partition(":")[2].replace(" ", "").split(",") if ":" in mark else []
    return next((name for name in packages if importlib.util.find_spec(name) is None), "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, without measurements: calls without ``budget=`` apply rules only."""
    monkeypatch.setenv("FLATOUT_BUDGET", "0")
    monkeypatch.setenv("FLATOUT_PROGRESS", "0")
    monkeypatch.setattr(flatout.mfu, "measured_peak_flops", lambda *args, **options: 1e11)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_page(path: str) -> None:
    """Execute the complete blocks of a page, one after the other in one namespace."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(PAGES[path]):
        kind = block.mark.partition(":")[0]
        assert kind in MARKS, f"{path}:{block.line}: unknown mark {block.mark!r}"
        if kind in ("fragment", "race") or missing_package(block.mark):
            continue
        if kind == "gpu" and not torch.cuda.is_available():
            continue
        code = "\n" * (block.line - 1) + block.code  # tracebacks name the line of the page
        exec(compile(code, str(ROOT / path), "exec"), namespace)
    for value in list(namespace.values()):
        if isinstance(value, torch.nn.Module):
            flatout.undo(value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", RUNNABLE)
def test_the_code_of_a_page_runs(path: str, folder: Path) -> None:
    run_page(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", FRAMEWORKS)
def test_the_code_with_a_framework_runs(path: str, folder: Path) -> None:
    marks = [block.mark for block in blocks(PAGES[path]) if "framework" in block.mark]
    for mark in marks:
        if missing := missing_package(mark):
            pytest.skip(f"needs the package {missing}")
    run_page(path)


@pytest.mark.parametrize("path", PAGES)
def test_all_blocks_are_python(path: str) -> None:
    """Also fragments, and blocks that need a GPU or a package."""
    for block in blocks(PAGES[path]):
        ast.parse(block.code)


def test_names_in_fragments_and_races_exist() -> None:
    """Blocks that no test executes still import names that exist."""
    for path, text in PAGES.items():
        for block in blocks(text):
            for node in ast.walk(ast.parse(block.code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatout"):
                    if (node.module or "").startswith("flatout.integrations"):
                        continue  # needs the framework
                    module = importlib.import_module(node.module or "")
                    for alias in node.names:
                        assert hasattr(module, alias.name), f"{path}:{block.line}: {node.module}.{alias.name}"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return tool("documentation").pages(DOCS)


def test_internal_links_lead_to_a_page_and_an_anchor(generated: dict[str, str]) -> None:
    texts = {f"docs/{path}": text for path, text in generated.items()} | PAGES
    texts["docs/techniques/index.md"] = generated["techniques/index.md"]
    broken = []
    for path, text in texts.items():
        for target in links(text) if path.endswith(".md") else ():
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            place = (ROOT / path).parent / file if file else ROOT / path
            name = str(place.resolve().relative_to(ROOT))
            if name in texts:
                if anchor and anchor not in anchors(texts[name]):
                    broken.append(f"{path}: {target}, no such heading")
            elif not place.exists():
                broken.append(f"{path}: {target}")
    assert not broken, "\n".join(broken)


def test_the_readme_links_to_files_of_the_repository() -> None:
    """Generated pages are not in the repository."""
    for target in links(PAGES["README.md"]):
        assert re.match(r"[a-z]+:", target) or (ROOT / target.partition("#")[0]).exists(), target


def test_every_technique_has_its_page(generated: dict[str, str]) -> None:
    for technique in REGISTRY:
        page = generated[f"techniques/{technique.name}.md"]
        assert page.splitlines()[0].lower() == f"# {technique.title.lower()}"
        assert f"| Name | `{technique.name}` |" in page
        assert "## When it helps" in page
        assert ("## In the report" in page) == bool(technique.rationale)
        for word in technique.documentation.replace("``", "`").lower().split():  # no sentence is lost
            assert word.rstrip(":") in page.lower() or word == "sources:", (technique.name, word)


def test_the_navigation_has_every_page(generated: dict[str, str]) -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?:: |- )([\w/]+\.md)", config))
    nav: list[object] = [{"Techniques": []}, {"Reference": []}]
    tool("documentation").navigation(nav)
    listed |= set(re.findall(r"'([\w/.]+\.md)'", str(nav)))
    pages = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")} | {n for n in generated if n.endswith(".md")}
    assert pages == listed


def test_the_reference_has_every_public_name(generated: dict[str, str]) -> None:
    modules = [name.removeprefix("reference/").removesuffix(".md") for name in generated if "reference/flat" in name]
    assert "flatout" in modules
    for name in modules:
        if "integrations" in name:
            continue  # needs the framework
        module = importlib.import_module(name)
        for public in module.__all__:
            is_module = isinstance(getattr(module, public), types.ModuleType)
            assert (
                is_module
                or public == "__version__"
                or f"heading: {name}.{public}\n" in generated[f"reference/{name}.md"]
            )


def test_the_page_of_the_command_line_has_every_option() -> None:
    """Python's own layout of a help differs from version to version."""
    sections = dict(re.findall(r"^## (flatout.*?)\n(.*?)(?=^## |\Z)", PAGES["docs/reference/cli.md"], re.M | re.S))
    parser = build_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert set(sections) == {"flatout", *(f"flatout {name}" for name in commands.choices)}
    for name, command in commands.choices.items():
        text = " ".join(sections[f"flatout {name}"].split())
        formatter = command._get_formatter()
        for action in command._actions:
            if action.help and action.help != argparse.SUPPRESS:
                words = f"{formatter._format_action_invocation(action)} {formatter._expand_help(action)}".split()
                assert " ".join(words) in text, f"{name} {words}: python tools/cli_help.py docs/reference/cli.md"
        assert " ".join((command.epilog or "").split()) in text, name


def messages() -> set[str]:
    """Return the texts in flatout's sources, each with … for what varies."""
    found = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def contains(text: str, parts: list[str]) -> bool:
    """Return True if ``text`` contains the parts in this order."""
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources() -> None:
    page = PAGES["docs/troubleshooting.md"]
    shown = [text.strip("` ") for text in re.findall(r"^#### (.+)$", page, re.M)]
    assert len(shown) >= 25
    texts = messages()
    for message in shown:
        assert any(contains(text, message.split("…")) for text in texts), message


def test_the_readme_is_short_and_keeps_its_commands() -> None:
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 130
    for needed in ("make demo", "make test", "accumulate=", "flatout run", "Run once on a GPU", "docs/receipt.svg"):
        assert needed in readme, needed
