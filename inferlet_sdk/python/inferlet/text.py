"""Text from tokens as it grows: incremental decoding of split characters, and stop strings."""

from pie_core.text.stream import Detokenizer, StopMatcher

__all__ = ["Detokenizer", "StopMatcher"]
