"""Checkpoint readers: typed metadata and raw tensor bytes; nothing here knows what a model is."""

from pie_core.weights.checkpoint import Checkpoint, open_gguf
from pie_core.weights.errors import (
    BadHeader,
    BadMetadata,
    MissingKey,
    NotReadable,
    TruncatedFile,
    UnsupportedFormat,
    WeightsError,
)
from pie_core.weights.formats import FORMATS, Format
from pie_core.weights.gguf import Header, TensorInfo, read_header
from pie_core.weights.metadata import Metadata

__all__ = [
    "FORMATS", "BadHeader", "BadMetadata", "Checkpoint", "Format", "Header", "Metadata", "MissingKey", "NotReadable", "TensorInfo",
    "TruncatedFile", "UnsupportedFormat", "WeightsError", "open_gguf", "read_header",
]  # fmt: skip
