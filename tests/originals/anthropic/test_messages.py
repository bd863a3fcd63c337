# SPDX-License-Identifier: Apache-2.0
"""What Anthropic's service streams at `/v1/messages`, without the events that say nothing."""

import dataclasses

import pytest
from tests.originals.replay import assert_as_recorded, exchanges, read_json, sent


def says_something(event):
    """Pings, and pieces without a letter, only keep a connection open."""
    return event["type"] != "ping" and event.get("delta", {}).get("partial_json") != ""


@pytest.mark.parametrize("exchange", exchanges("anthropic/messages.json"))
def test_a_stream_of_a_message(launch, exchange):
    server = launch("recorded_chats.py", "--worker-kind", "thread")
    events = [one for one in exchange.answer["events"] if says_something(one)]
    recorded = dataclasses.replace(exchange, answer={"status": 200, "events": events})
    answer = sent(server.client, dataclasses.replace(exchange, answer={"text": ""}))
    told = [event.split("\n") for event in answer["text"].removesuffix("\n\n").split("\n\n")]
    found = [read_json(data.removeprefix("data: ")) for _, data in told]
    assert [name for name, _ in told] == [f"event: {one['type']}" for one in found]
    assert_as_recorded(recorded, {"status": answer["status"], "events": found}, page="docs/how-to/openai.md")
