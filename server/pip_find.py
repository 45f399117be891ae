"""Prints the address of the wheel that pip would take: `python -m pie_server.pip_find name==version`. Prints nothing when it cannot say.

`pip install --dry-run --report` tells the same, but up to at least pip 23 it downloads the whole wheel first. pip's package finder is
not a public interface (this works with 22 to 26), so the caller falls back to the report when this fails.
"""

from __future__ import annotations

import sys
from typing import Any


def find(requirement: str) -> str:
    """The address under the user's own pip configuration (indexes, links, certificates, proxies), or ""."""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.requirements import Requirement

    wanted = Requirement(requirement)
    command: Any = create_command("download")
    with command.main_context():
        options, _ = command.parse_args(["--quiet", "--no-deps", "--only-binary", ":all:", requirement])
        finder = command._build_package_finder(options=options, session=command.get_default_session(options))
        best = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
        return str(best.link.url_without_fragment) if best else ""


if __name__ == "__main__":
    print(find(sys.argv[1]))
