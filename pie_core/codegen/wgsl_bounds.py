"""Bounds of an epilogue on webgpu, all its launches together."""

from __future__ import annotations

from pie_core.eta.errors import ProgramError

# All launches of a lane together. A slow GPU takes 1 us for an iteration, and a driver's watchdog 2 s for a submission: a fourth of that.
MAX_TOTAL_ITERATIONS = 500_000
MAX_BARRIERS = 100  # of an epilogue's code, calls inlined: a software adapter compiles for some 40 ms at each


def check_total(iterations: int, barriers: int) -> None:
    """Raise ProgramError for an epilogue that takes a GPU too long to run, or a driver too long to compile."""
    if iterations > MAX_TOTAL_ITERATIONS:
        raise ProgramError(
            f"the epilogue would run {iterations} or more loop iterations an invocation on webgpu, the bound is {MAX_TOTAL_ITERATIONS}, "
            "since drivers stop what takes too long: use fewer dependent reductions, sorts and selections, or shorter vectors and fewer "
            "read-outs, or split it over several passes"
        )
    if barriers > MAX_BARRIERS:
        raise ProgramError(
            f"the epilogue's code would hold {barriers} or more barriers on webgpu, the bound is {MAX_BARRIERS}, since drivers compile it "
            "for too long: use fewer sorts, selections and running sums, or split it over several passes"
        )
