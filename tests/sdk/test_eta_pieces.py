"""The section of docs/eta.md on pieces that have no function of their own: its program runs as shown on the cpu device."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.sdk.real_engine import Job, run_jobs

GUIDE = (Path(__file__).parents[2] / "docs" / "eta.md").read_text(encoding="utf-8")


def test_pieces_run_as_shown() -> None:
    section = GUIDE.split("\n## Pieces\n")[1].split("\n## ")[0]
    ((source, data, result),) = re.findall(
        r"^```python inferlet\n(.*?)^```\n\n```text\n(.*?)\n(.*?)\n```$", section, flags=re.MULTILINE | re.DOTALL
    )
    assert run_jobs("cpu", [Job("pieces", source, json.loads(data))]) == [json.loads(result)]
