"""What can be wrong with a checkpoint; every message is one sentence with name, value and limit."""

from __future__ import annotations


class WeightsError(Exception):
    """A checkpoint cannot be used."""


class NotReadable(WeightsError):
    """The file is missing, not a file, or may not be read."""


class BadHeader(WeightsError):
    """The header contradicts the format or itself."""


class TruncatedFile(WeightsError):
    """The header describes more bytes than the file has."""


class UnsupportedFormat(WeightsError):
    """Valid, but not something this version reads or runs."""


class MissingKey(WeightsError):
    """A metadata key or tensor that the reader needs is not in the file."""


class BadMetadata(WeightsError):
    """A metadata value has another type or range than the reader needs."""
