"""``MainProgram`` gives a program the same environment and output as ``python``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from flatout.core import main_program

HERE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("main_program", {str(main_program.__file__)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kind, name, *args = sys.argv[1:]
(module.MainModule if kind == "-m" else module.MainFile)(name, args).run()
"""
"""Program that runs another program without the seconds of importing torch."""


def run(command: Sequence[str], cwd: Path, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path: Path) -> str:
    path = tmp_path / "here.py"
    path.write_text(HERE)
    return str(path)


def both(here: str, cwd: Path, *command: str, is_module: bool = False) -> list[tuple[int, str, str]]:
    """Return status, output and errors of a program under ``python``, and under flatout in a process."""
    way = ["-m"] if is_module else []
    return [
        run([sys.executable, *way, *command], cwd),
        run([sys.executable, here, "-m" if is_module else "path", *command], cwd),
    ]


FACTS = """
import sys, os
main = sys.modules["__main__"]
for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__"):
    print(name, getattr(main, name))
print(type(main.__loader__).__name__, main.__spec__ and main.__spec__.name, main.__dict__ is globals())
print(sys.argv, sys.path[0])
print(sys._getframe().f_code.co_filename)
"""


def test_a_script_finds_the_same_names(here: str, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "script.py").write_text(FACTS)
    (tmp_path / "link.py").symlink_to(folder / "script.py")
    for name in ("a folder/script.py", "link.py"):
        plain, ours = both(here, tmp_path, name, "--flag", "an arg")
        assert ours == plain
        assert plain[0] == 0


def test_a_module_and_a_package_find_the_same_names(here: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import sys; print('init', sys.argv[0])")
    for name in ("module.py", "__main__.py"):
        (package / name).write_text(f"from . import __name__ as parent\nprint(parent)\n{FACTS}")
    for name in ("package.module", "package"):
        plain, ours = both(here, tmp_path, name, "1", is_module=True)
        assert ours == plain
        assert plain[0] == 0


def test_a_folder_and_an_archive_find_the_same_names(here: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text(f"import beside\n{FACTS}")
    (folder / "beside.py").write_text("print('beside')")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        for path in folder.glob("*.py"):
            archive.write(path, path.name)
    for name in ("folder", "app.pyz"):
        plain, ours = both(here, tmp_path, name, "1")
        assert ours == plain
        assert plain[0] == 0


ENDINGS = {
    "status": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('a message')",
    "error": "def inner():\n    raise ValueError('of the script')\ninner()",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('later') from e",
    "syntax": "def broken(:\n    pass",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda k, e, tb: print(tb.tb_frame.f_code.co_name, k.__name__)\n1 / 0",
    "atexit": "import atexit, pickle\nclass K: pass\natexit.register(lambda: print(len(pickle.dumps(K()))))",
    "thread": "import threading, pickle, time\nclass K: pass\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print(len(pickle.dumps(K()))))).start()",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    "future": "def f(x: undefined) -> None: pass",
    "os._exit": "import os; os._exit(4)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_ends_as_ever(name: str, here: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(ENDINGS[name].encode("latin-1"))
    plain, ours = both(here, tmp_path, "script.py")
    assert ours == plain


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_find_the_script_as_their_main_module(method: str, here: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, sys\n"
        "class Own:\n    pass\n"
        "def work(own):\n    return type(own).__name__, sys.modules['__main__'].__file__, sys.argv\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(pool.map(work, [Own()]))\n"
    )
    plain, ours = both(here, tmp_path, "script.py", "an arg")
    assert ours == plain
    assert plain[0] == 0


def test_a_safe_path_stays_so(here: str, tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs python -P")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text("import sys\nprint(sys.path)")
    plain = run([sys.executable, "-P", "elsewhere/script.py"], tmp_path)
    assert run([sys.executable, "-P", here, "path", "elsewhere/script.py"], tmp_path) == plain
