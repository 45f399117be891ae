"""Where tests find the default model and the goldens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pie_server import models

GOLDENS = Path(__file__).parent.parent / "goldens" / "smollm2.hf_fp32.json"


def default_model() -> Path:
    """The default model's file, already fetched by `make test`. Raises a typed error saying how to fetch it."""
    return models.resolve(models.DEFAULT_MODEL)


def goldens() -> Any:
    """Reference ids and log-probabilities: transformers in fp32 over the dequantised checkpoint."""
    return json.loads(GOLDENS.read_text())
