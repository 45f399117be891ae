"""Room at the host: what the program has let go of, and Python still holds, goes before the host's refusal reaches the author."""

from __future__ import annotations

import gc
from collections.abc import Callable

from .errors import BudgetExceeded

forget: list[Callable[[], None]] = []  # of those who keep channels and programs only to be faster


def with_room(make: Callable[[], object]) -> None:
    """Call `make`, a second time where the host has no room at first: without what is kept to be faster, and what only cycles hold."""
    try:
        make()
    except BudgetExceeded:
        for let_go in forget:
            let_go()
        gc.collect()
    else:
        return
    make()
