"""Generator of stubs for the functions of cudart that torch's libraries import and the emulation lacks.

python missing.py FOLDER_OF_TORCH_LIBRARIES OUTPUT SOURCE...
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

STUB = 'int {name}() {{ std::fprintf(stderr, "emulated CUDA: {name} is not emulated\\n"); return 801; }}'
"""Code of a stub, which returns cudaErrorNotSupported (801)."""


def imported(libraries: Path) -> set[str]:
    """Return the names that torch's libraries import from cudart."""
    names: set[str] = set()
    for library in sorted(libraries.glob("lib*.so")):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        names.update(re.findall(r"U (\w+)@libcudart", listed.stdout))
    return names


def main(libraries: Path, output: Path, sources: list[Path]) -> None:
    """Write a stub for each function that no source defines."""
    text = "".join(source.read_text() for source in sources)
    stubs = [STUB.format(name=name) for name in sorted(imported(libraries)) if not re.search(rf"\b{name}\(", text)]
    output.write_text("\n".join(["#include <cstdio>", 'extern "C" {', *stubs, "}", ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
