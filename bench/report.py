"""What every bench shares: options, a table of figures against targets, and the one JSON object at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Report:
    """Figures of one run. `target(...)` also records a bound; `ok` is true when every bound holds."""

    bench: str
    device: str
    figures: dict[str, float] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> float:
        """Record a figure without a target."""
        self.figures[name] = round(value, 4)
        return value

    def target(self, name: str, value: float, relation: Literal["<=", ">="], bound: float) -> float:
        """Record a figure that must be `relation` `bound`."""
        self.add(name, value)
        self.targets[name] = f"{relation} {bound:g}"
        if not (value <= bound if relation == "<=" else value >= bound):
            self.failed.append(name)
        return value

    def finish(self, as_json: bool) -> int:
        """Print the table (and the JSON object when asked); the exit code."""
        print(f"{self.bench} on {self.device}")
        for name, value in self.figures.items():
            bound = self.targets.get(name, "")
            verdict = "" if not bound else ("  MISSED" if name in self.failed else "  ok")
            print(f"  {name:<56} {value:>12.4f}  {bound:<10}{verdict}")
        for note in self.notes:
            print(f"  {note}")
        if as_json:
            print(
                json.dumps(
                    {"bench": self.bench, "device": self.device, "figures": self.figures, "targets": self.targets, "ok": not self.failed}
                )
            )
        return 1 if self.failed else 0


def arguments(
    doc: str | None, argv: Sequence[str] | None = None, *, devices: bool = True, tokens: int = 64, parts: Sequence[str] = ()
) -> argparse.Namespace:
    """Options common to all benches: --json, --device, --model, --tokens; --only where a bench has `parts`."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true", help="end with one JSON object")
    if devices:
        p.add_argument("--device", choices=["cpu", "webgpu"], default="cpu")
        p.add_argument("--model", default=None, help="name or path; the default model otherwise")
        p.add_argument("--tokens", type=int, default=tokens, help="tokens decoded in each measurement")
    if parts:
        p.add_argument("--only", choices=parts, action="append", help="measure this part (may be given several times); else all")
    return p.parse_args(sys.argv[1:] if argv is None else argv)
