# SPDX-License-Identifier: Apache-2.0
"""Asks with OpenAI's client: each line of the input is a call, each line of the output what came of it.

It runs in an environment that has the client, and nothing of forebay's.
"""

import asyncio
import json
import sys

import openai  # pyright: ignore[reportMissingImports]


def method_of(client, name):
    for part in name.split("."):
        client = getattr(client, part)
    return client


def error_of(error):
    found: dict[str, object] = {"class": type(error).__name__, "message": str(error)}
    for name in ("status_code", "code", "param", "type", "request_id"):
        found[name] = getattr(error, name, None)
    return {"error": found}


def dumped(value):
    data = value.model_dump() if hasattr(value, "model_dump") else value
    if isinstance(data, dict) and getattr(value, "_request_id", None):
        data["_request_id"] = value._request_id
    return data


def ask(options, call, arguments, take):
    parts = []
    try:
        with openai.OpenAI(**options) as client:
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
    except openai.OpenAIError as error:
        return {"parts": parts, **error_of(error)}


async def ask_async(options, call, arguments, take):
    parts = []
    try:
        async with openai.AsyncOpenAI(**options) as client:
            answer = await method_of(client, call)(**arguments)
            if not arguments.get("stream"):
                return {"result": dumped(answer)}
            async with answer:
                async for part in answer:
                    parts.append(dumped(part))
                    if len(parts) == take:
                        break
        return {"parts": parts}
    except openai.OpenAIError as error:
        return {"parts": parts, **error_of(error)}


async def ask_all(calls):
    return await asyncio.gather(*(ask_async(**call) for call in calls))


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        answer = asyncio.run(ask_all(asked)) if isinstance(asked, list) else ask(**asked)
        print(json.dumps(answer), flush=True)


main()
