"""Brings the engine up in the page: device, self-test, weights, engine. What goes wrong becomes a class of web/src/errors.ts."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pyodide.ffi import JsException

from pie_core.device.protocol import DeviceError, DeviceLost, DeviceOutOfMemory, LimitError
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.poem import PoemError
from pie_core.text.stream import TextError
from pie_core.text.tokenizer import TEMPLATE_KEYS, TokenizerSpec, token_table, tokenizer_spec
from pie_core.weights import WeightsError
from pie_core.weights.metadata import Metadata
from pie_web.adapter import OpenDevice, open_device
from pie_web.checkpoint import PageCheckpoint
from pie_web.page import Page
from pie_web.selftest import AskedTest
from pie_web.turns import Turns

_logger = logging.getLogger(__name__)

# The core names settings by the command line's words; here they are options of Pie.load.
PAGE_WORDS: Final = {
    "--device cpu": 'device: "cpu"',
    "--kv-pool-mb": "kvPoolBytes",
    ". A model file of your own can be given with --poem FILE": "",
}


CACHE_BUFFER: Final = re.compile(r"buffer '[kv]\d+' ")  # K or V of a layer (pie_core/poem/compile.py)


class LoadFailed(Exception):
    """`kind` is the error's class in the page."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def load(host: Any) -> Page | None:
    """The engine on a device of `host` (engine/host.ts); None when it failed, and `host.fail` was told why."""
    try:
        return await _load(host)
    except LoadFailed as failure:
        host.fail(failure.kind, _in_page_words(failure))
    except DeviceLost as error:
        host.fail("DeviceUnavailable", str(error))
    except (DeviceError, PoemError, TextError, WeightsError) as error:
        host.fail("LoadError", _in_page_words(error))
    except JsException as error:  # of the host: reading the model
        host.fail(error.name, error.message)
    except Exception as error:  # loading's boundary: the page must be able to tell, whatever it was
        _logger.exception("the load failed")
        host.fail("LoadError", f"{type(error).__name__}: {error}")
    return None


def _in_page_words(error: Exception) -> str:
    text = str(error)
    for words, here in PAGE_WORDS.items():
        text = text.replace(words, here)
    return text


async def _load(host: Any) -> Page | None:
    turns = Turns(host.ticker)
    checkpoint = PageCheckpoint(host.source, str(host.modelName))
    checkpoint.check_runnable()
    host.progress("device", 0, 0)
    try:
        opened = await open_device(host, turns)
    except DeviceError as error:
        raise LoadFailed("DeviceUnavailable", str(error)) from error
    if opened is None:
        return None
    try:
        with _kv_pool(int(host.kvPoolBytes)):
            return await _bring_up(host, opened, checkpoint)
    except BaseException:
        opened.device.close()
        raise


async def _bring_up(host: Any, opened: OpenDevice, checkpoint: PageCheckpoint) -> Page:
    device = opened.device
    host.progress("selftest", 0, 0)

    def progress(done: int, total: int) -> None:
        host.progress("weights", done, total)

    with _self_test():
        test = AskedTest(device)
    try:
        with _self_test():
            await test.ask({info.fmt for info in checkpoint.tensors.values() if len(info.dims) > 1})
        spec = tokenizer_spec(checkpoint.metadata)  # behind the self-test's kernels, which compile meanwhile
        runner = ModelRunner.load(device, checkpoint, kv_pool_bytes=int(host.kvPoolBytes), progress=progress)
        host.progress("selftest", 0, 0)
        with _self_test():
            await test.verdict()
    finally:
        test.close()
    await device.read(runner.results, 0, 4)  # what the device refused while the weights came is raised here
    engine = Engine(runner)
    engine.start()
    page = Page(host, opened, engine, spec, text_spec(checkpoint.metadata, spec))
    gc.collect()
    gc.freeze()  # modules, kernels and plans stay: collections need not look at them while the page decodes
    return page


@contextmanager
def _self_test() -> Iterator[None]:
    """What the device refuses in here is called so, unless it is lost or full, which the model may have caused."""
    try:
        yield
    except (DeviceLost, DeviceOutOfMemory):
        raise
    except DeviceError as error:
        raise LoadFailed("SelfTestFailed", str(error)) from error


@contextmanager
def _kv_pool(size: int) -> Iterator[None]:
    """A device that is full, or refuses a buffer of the KV cache, is told in the words of who loads: by the option that sets its size."""
    try:
        yield
    except DeviceOutOfMemory as error:
        full = f"the device has no memory for the model and a KV cache of {size:,} bytes (kvPoolBytes); a smaller one may fit: {error}"
        raise LoadFailed("LoadError", full) from error
    except LimitError as error:
        if not CACHE_BUFFER.match(str(error)):
            raise
        raise LoadFailed("LoadError", f"kvPoolBytes is {size:,}, more than the device takes; use a smaller one: {error}") from error


def text_spec(metadata: Metadata, spec: TokenizerSpec) -> str:
    """JSON text of what works beside the inferlets: tokenizer, chat template, and the tokens that the template may name."""
    ids = {key: metadata.optional_int(f"tokenizer.ggml.{word}_token_id", None) for key, word in TEMPLATE_KEYS.items()}
    texts = {index: text for text, index in spec["tokenizer"]["model"]["vocab"].items()}
    named = {key: texts[index] for key, index in ids.items() if index in texts}
    words = list(dict.fromkeys(named.values()))
    few: Any = {**spec["tokenizer"], "model": {"vocab": {word: number for number, word in enumerate(words)}}}
    table = token_table({**spec, "tokenizer": few})
    tokens = {key: table[words.index(text)].decode("utf-8", "replace") for key, text in named.items()}
    template = metadata.optional_str("tokenizer.chat_template", None)
    return json.dumps({"spec": spec, "template": template, "tokens": tokens}, ensure_ascii=False, separators=(",", ":"))
