# SPDX-License-Identifier: Apache-2.0
"""Asks with OpenAI's client, or with Anthropic's or Cohere's.

Each line of the input is a call, each line of the output what came of it.
It runs in an environment that has these clients, and nothing of forebay's.
"""

import asyncio
import importlib
import json
import sys
from pathlib import Path
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
    if hasattr(value, "iter_bytes"):  # an answer that is no JSON
        return {"type": value.response.headers["content-type"], "audio": value.read().decode("latin-1")}
    data = value.model_dump() if hasattr(value, "model_dump") else value
    if isinstance(data, dict) and getattr(value, "_request_id", None):
        data["_request_id"] = value._request_id
    return data


def given(arguments):
    """What a call is given: files are told by their paths."""
    return {name: Path(one["path"]) if name == "file" else one for name, one in arguments.items()}


def ask(library, options, call, arguments, take):
    parts = []
    opened, failure = client_of(library, options)
    try:
        with opened as client:
            answer = method_of(client, call)(**given(arguments))
            if call.endswith("with_streaming_response.create"):
                with answer as response:
                    return streamed(response, parts, take)
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


def streamed(response, parts, take):
    """The pieces of an answer that is no JSON, as they come; what breaks off raises an error of the HTTP library."""
    try:
        for part in response.iter_bytes():
            parts.append(part.decode("latin-1"))
            if len(parts) == take:
                break
    except Exception as error:
        return {"parts": parts, **error_of(error)}
    return {"parts": parts, "type": response.headers["content-type"]}


async def ask_async(library, options, call, arguments, take):
    parts = []
    opened, failure = client_of(library, options, is_async=True)
    try:
        async with opened as client:
            answer = await method_of(client, call)(**given(arguments))
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
