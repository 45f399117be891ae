"""The blocks of docs/inferlets.md in a page, on the cpu device: what they return under `pie run` they return there."""

from __future__ import annotations

import json

import pytest

from e2e.conftest import OpenContext
from tests.server.guide_blocks import EXAMPLES, as_shown

pytestmark = pytest.mark.timeout(300)
RUN = """async ([source, input, received]) => {
  const sent = [], {pie} = window.pieHello;
  const run = pie.run(source, {input, receives: received.length > 0, onMessage: (value) => sent.push(value)});
  for (const value of received) run.send(value);
  return run.then((result) => [sent, result], (error) => [sent, `${error.type}: ${error.message}`]);
}"""


def test_every_block_returns_in_a_page_what_the_guide_shows(contexts: OpenContext) -> None:
    context, open_tab = contexts()
    tab = open_tab().hello("cpu")
    for example in EXAMPLES:
        found = tab.page.evaluate(RUN, [example.source, example.input, list(example.received)])
        assert as_shown(found) == [example.sent, json.loads(example.result)], example.title
    context.close()
