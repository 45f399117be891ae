"""`python -m pie_server.prepare`: builds and compiles ahead what `pie serve` would otherwise build at its first start."""

from __future__ import annotations

import sys

from pie_server.build.cpu_module import BuildError, cpu_module
from pie_server.compiled import CompiledCacheError
from pie_server.sandbox import Sandbox


def main() -> int:
    """Build the cpu device's module and the Python component and compile the latter; the exit code."""
    try:
        cpu_module()
        Sandbox(spares=0, progress=lambda line: print(line, flush=True)).close()
    except (BuildError, CompiledCacheError) as err:
        print(f"pie: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
