"""Entry point of the `pie` script. Importing the command takes a moment: until then Ctrl-C ends the process without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line and end the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pie_server import cli

    cli.main()
