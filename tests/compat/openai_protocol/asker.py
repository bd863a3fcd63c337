# SPDX-License-Identifier: Apache-2.0
"""Asks with OpenAI's client, or with Anthropic's or Cohere's.

Each line of the input is a call, each line of the output what came of it.
It runs in an environment that has these clients, and nothing of forebay's.
"""

import asyncio
import importlib
import json
import sys
from typing import Any

CLIENTS = {
    "openai": ("OpenAI", "AsyncOpenAI", "OpenAIError"),
    "anthropic": ("Anthropic", "AsyncAnthropic", "AnthropicError"),
    "cohere": ("ClientV2", "AsyncClientV2", "core.ApiError"),
}


def client_of(library, options, *, is_async=False) -> Any:
    """A client, and what it raises."""
    module = importlib.import_module(library)
    alone, several, failure = CLIENTS[library]
    return getattr(module, several if is_async else alone)(**options), method_of(module, failure)


def method_of(client, name):
    for part in name.split("."):
        client = getattr(client, part)
    return client


def error_of(error):
    found: dict[str, object] = {"class": type(error).__name__, "message": str(error)}
    for name in ("status_code", "code", "param", "type", "request_id", "body"):
        found[name] = getattr(error, name, None)
    return {"error": found}


def dumped(value):
    data = value.model_dump() if hasattr(value, "model_dump") else value
    if isinstance(data, dict) and getattr(value, "_request_id", None):
        data["_request_id"] = value._request_id
    return data


def ask(library, options, call, arguments, take):
    parts = []
    opened, failure = client_of(library, options)
    try:
        with opened as client:
            answer = method_of(client, call)(**arguments)
            if call == "models.list":
                return {"result": [dumped(one) for one in answer]}
            if not arguments.get("stream"):
                return {"result": dumped(answer)}
            with answer:
                for part in answer:
                    parts.append(dumped(part))
                    if len(parts) == take:
                        break
        return {"parts": parts}
    except failure as error:
        return {"parts": parts, **error_of(error)}


async def ask_async(library, options, call, arguments, take):
    parts = []
    opened, failure = client_of(library, options, is_async=True)
    try:
        async with opened as client:
            answer = await method_of(client, call)(**arguments)
            if not arguments.get("stream"):
                return {"result": dumped(answer)}
            async with answer:
                async for part in answer:
                    parts.append(dumped(part))
                    if len(parts) == take:
                        break
        return {"parts": parts}
    except failure as error:
        return {"parts": parts, **error_of(error)}


async def ask_all(calls):
    return await asyncio.gather(*(ask_async(**call) for call in calls))


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        answer = asyncio.run(ask_all(asked)) if isinstance(asked, list) else ask(**asked)
        print(json.dumps(answer), flush=True)


main()
