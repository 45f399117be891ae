"""What a guest says at the end of a step: one of three answers, or a typed failure in few words; it waits for futures that there are."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pie_core.eta import json_text
from pie_core.host import answer
from pie_core.host.answer import MAX_LISTS, MAX_PENDING, MAX_VALUES, InferletFailed, read_answer
from pie_core.host.brief import brief
from pie_core.host.process import Process
from tests.engine.fake_runner import FakeRunner
from tests.engine.support import running
from tests.host.script_guest import Api, ScriptGuest
from tests.host.support import SERVICES, run


def failed(**error: Any) -> str:
    return json.dumps({"s": "failed", "e": error})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"s":"pending","w":[7]}', ("pending", {7})),
        ('{"w": [1, 2, 2], "s": "pending"}', ("pending", {1, 2})),
        ('{"s":"pending","w":[]}', ("pending", set())),
        ('{"s":"done","r":[1.5,"ü"]}', ("done", [1.5, "ü"])),
        ('{"s":"done"}', ("done", None)),
        (json.dumps({"s": "done", "r": "," * 3_000_000}), ("done", "," * 3_000_000)),
    ],
)
async def test_answers(text: str, said: tuple[str, Any]) -> None:
    assert await read_answer(text) == said


FUTURES = "a list of future ids is needed"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("", "GuestFault", "the guest answered '', which is not JSON"),
        ("{", "GuestFault", "the guest answered '{', which is not JSON"),
        ('{"s":"done","r":NaN}', "GuestFault", "holds NaN, which is not JSON"),
        ('{"s":"done","r":"\\ud800"}', "GuestFault", "lone surrogate"),
        ('{"s":"done","r":' + "[" * 100_000, "GuestFault", "nested deeper"),
        ("[]", "GuestFault", r"the guest answered \[\], which is no state of the ABI"),
        ("null", "GuestFault", "None, which is no state"),
        ('{"s":["done"]}', "GuestFault", r"\{'s': \['done'\]\}, which is no state"),
        ('{"s":"pending"}', "GuestFault", f"waits for None: {FUTURES}"),
        ('{"s":"pending","w":{"1":2}}', "GuestFault", FUTURES),
        *((f'{{"s":"pending","w":[{one}]}}', "GuestFault", FUTURES) for one in ("[1]", '{"a":1}', "null", '"x"', "1e5", "true", "0", "-1")),
        ('{"s":"pending","w":[1,9999999999999999]}', "GuestFault", FUTURES),
        (f'{{"s":"pending","w":[{"1," * MAX_PENDING}1]}}', "OutputLimitExceeded", f"an answer of a step takes at most {MAX_PENDING}"),
        (f'{{"w":[{"1," * MAX_PENDING}1],"s":"pending"}}', "OutputLimitExceeded", f"an answer of a step takes at most {MAX_PENDING}"),
        (f'{{"s":"done","r":[{"1," * MAX_VALUES}1]}}', "OutputLimitExceeded", f"holds more than {MAX_VALUES} values"),
        (f'{{"s":"done","r":[{"{}," * MAX_LISTS}1]}}', "OutputLimitExceeded", f"holds more than {MAX_LISTS} lists and objects"),
        ('{"s":"failed"}', "GuestFault", "the guest failed with None, which is no error of the ABI"),
        (failed(type=["x"], message={"a": 1}), "GuestFault", r"failed with \{'type': \['x'\], 'message': \{'a': 1\}\}"),
        (failed(type="KeyError"), "KeyError", "^KeyError: $"),
        (failed(type="K" * 900, message="m" * 200_000), "K" * 200, "mmm…$"),
    ],
)
async def test_every_other_answer_is_a_typed_failure(text: str, kind: str, words: str) -> None:
    with pytest.raises(InferletFailed, match=words) as caught:
        await read_answer(text)
    assert caught.value.type == kind
    assert len(caught.value.message) <= (1 << 16) + 1


async def test_of_an_error_only_what_has_its_type_is_taken() -> None:
    with pytest.raises(InferletFailed) as caught:
        await read_answer(failed(type="E", message="m", file=[1], line=True, traceback={"t": 1}))
    assert (caught.value.file, caught.value.line, caught.value.traceback) == (None, None, "")


async def test_long_answers_are_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def loads(text: str, **more: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return json_text.loads(text, **more)

    monkeypatch.setattr(answer, "loads", loads)
    await read_answer(json.dumps({"s": "done", "r": "x" * 100}))
    await read_answer(json.dumps({"s": "done", "r": "x" * 100_000}))
    no_threads = sys.platform == "emscripten"
    assert threads == [True, no_threads]


class Waits:
    """Waits for `keys` until one of them settles."""

    def __init__(self, process: Process, keys: Iterator[int]) -> None:
        self.port, self.keys, self.events = process.port, keys, ""

    async def start(self, request: str) -> str:
        assert self.port.call("sleep", '{"ms":1,"f":5}') == ""
        return json.dumps({"s": "pending", "w": list(self.keys)})

    async def resume(self, events: str) -> str:
        return f'{{"s":"done","r":{events}}}'

    def close(self) -> None:
        pass


async def test_futures_that_there_are_not_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES)
        looked: list[int] = []
        of = process._executor.may_settle
        monkeypatch.setattr(process._executor, "may_settle", lambda awaited: looked.append(len(awaited)) or of(awaited))
        guest = Waits(process, iter(range(5, 20_000)))
        assert await process.run(guest, process.request("", None)) == [[5, True, None]]
        assert looked and set(looked) == {1}


async def test_receives_are_served_in_order() -> None:
    async def script(api: Api, _: Any) -> list[Any]:
        futures = [api.future("receive") for _ in range(3)]
        api.call("send", value="ready")
        return [await future for future in reversed(futures)]

    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES)
        task = run_of(process, script)
        async for _ in process.messages():
            for value in "abc":
                process.deliver(value)
        assert await task == ["c", "b", "a"]


def run_of(process: Process, script: Any) -> Any:
    return asyncio.ensure_future(process.run(ScriptGuest(process.port, script), process.request("", None)))


async def test_all_that_waits_in_vain_is_told() -> None:
    async def script(api: Api, _: Any) -> str:
        futures = [api.future("receive") for _ in range(100)]
        try:
            await futures[50]
        except Exception as error:
            return str(error)
        return "?"

    async with running(FakeRunner()) as engine:
        assert "receive() waits for a message" in await run(engine, script, receives=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([[[]] * 3, {"a": 1, "b": "c"}, None], "[[[], [], []], {'a': 1, 'b': 'c'}, None]"),
        ([-1] * 10_000_000, "[" + "-1, " * 13 + "-1,…]"),
        ({"k" * 100: 1}, "{'" + "k" * 54 + "…}"),
        ("it's " * 100, '"' + "it's " * 11 + '…"'),
        ({"a": ["x" * 10_000_000] * 9}, "{'a': ['" + "x" * 48 + "…}"),
        (json.loads("[" * 150 + "]" * 150), "[" * 56 + "…]"),
        (10**100, "1" + "0" * 55 + "…0"),
        ("x" * 60, "'" + "x" * 55 + "…'"),
    ],
)
def test_of_a_long_value_the_beginning_is_shown(value: Any, text: str) -> None:
    assert brief(value) == text
