"""Errors of tensor programs, each one sentence that names the op, the value and the fix."""

from __future__ import annotations


class EtaError(Exception):
    """Base of everything that a tensor program can be refused for."""


class TraceError(EtaError, TypeError):
    """A traced function used an op wrongly; raised at the author's line."""


class ProgramError(EtaError, ValueError):
    """A serialised Program is malformed, breaks a rule of its stage or is over a cap."""
