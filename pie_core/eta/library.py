"""The library: one fixed expansion each, in one table. A faster kernel may replace an expansion only where it proves it equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pie_core.eta import adjust, attention_masks, filters, probability, repetition

SECTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Distributions": probability.FUNCTIONS,
    "Filters": filters.FUNCTIONS,
    "Penalties, temperatures, mirostat": (*adjust.FUNCTIONS, repetition.dry),
    "Attention masks": attention_masks.FUNCTIONS,
}
LIBRARY: dict[str, Callable[..., Any]] = {fn.__name__: fn for section in SECTIONS.values() for fn in section}
