"""Pacing: how much prefill a step may hold beside decode, from a running estimate of what rows cost on this device."""

from __future__ import annotations

SHARE = 1.0  # of the decode step: time that prefill may add, so that a stream's gap stays within twice of what it is without
LONGEST = 0.25  # seconds; the most that prefill alone makes of a step, which is how long whoever comes next waits for it
FIRST = 16  # rows beside decode while nothing is known
FEWEST = 2
FEWEST_ALONE = 32  # below, products cost more a row
_SMOOTH = 0.2
_SPIKE = 3.0  # times the estimate; a longer step was held up by something else


class Pace:
    """Estimates, in seconds: a step of decode by the power of two of its rows, and one more row of prefill. Fixed sizes when off."""

    __slots__ = ("_cap", "_decode", "_most", "_row", "enabled")

    def __init__(self, most: int, cap: int, *, enabled: bool = True) -> None:
        self._most = most  # rows of a step
        self._cap = cap  # of prefill beside decode
        self._decode: dict[int, float] = {}
        self._row: float | None = None
        self.enabled = enabled

    @property
    def row_seconds(self) -> float | None:
        """What one more row of prefill costs, None before any ran."""
        return self._row

    def decode_seconds(self, rows: int) -> float | None:
        """A step of `rows` rows of decode: as measured at the nearest width, None before any ran."""
        known = self._decode
        if not known:
            return None
        width = rows.bit_length()
        return known[min(known, key=lambda w: (abs(w - width), w))]

    def ran(self, decode: int, prefill: int, seconds: float) -> None:
        """A step of so many rows kept the device busy for `seconds`."""
        if not prefill:
            width = decode.bit_length()
            self._decode[width] = _blend(self._decode.get(width), seconds)
            return
        alone = (self.decode_seconds(decode) or 0.0) if decode else 0.0
        if seconds > alone:
            self._row = _blend(self._row, (seconds - alone) / prefill)

    def prefill_rows(self, decode: int, streams: int) -> int:
        """Rows of prefill that a step may hold: beside `decode` rows, or while `streams` pipelines may come back at any moment."""
        beside = max(decode, streams)
        if not beside:
            if not self.enabled or self._row is None:
                return self._most
            return min(self._most, max(FEWEST_ALONE, int(LONGEST / self._row)))
        if not self.enabled:
            return self._cap if decode else self._most
        seconds = self.decode_seconds(beside)
        if seconds is None or self._row is None:
            return min(FIRST, self._cap)
        return min(self._cap, max(FEWEST, int(SHARE * seconds / self._row)))


def _blend(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + _SMOOTH * (min(new, _SPIKE * old) - old)
