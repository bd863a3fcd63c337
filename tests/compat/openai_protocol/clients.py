# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client for tests: it runs in an environment of its own, in a process that outlives a test."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.gen_ai_times import times_on
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv/environments/openai/bin/python"
KEY = "sesame-key"


class Asker:
    """OpenAI's client in a process of its own."""

    def __init__(self):
        self._start()

    def _start(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = subprocess.Popen([str(PYTHON), str(HERE / "asker.py")], **pipes)
        self.owed = 0

    def owes_nothing(self):
        """Starts anew after a test that failed before it had read all answers: the next one would be given them."""
        if self.owed:
            self.process.kill()
            self.close()
            self._start()
        return self

    def send(self, what):
        self.owed += 1
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def read(self):
        found = json.loads(self.process.stdout.readline())
        self.owed -= 1
        return found

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PATIENCE_S)


class Client:
    def __init__(self, asker, server, headers, *, library="openai", **options):
        self.asker = asker
        self.library = library
        self.headers = headers
        url = f"{server.url}/v1" if library == "openai" else server.url
        self.options = {"base_url": url, "api_key": KEY, "max_retries": 0, "timeout": PATIENCE_S, **options}
        if library != "cohere":  # it takes headers with each call
            self.options["default_headers"] = headers
        self.server = server

    def call(self, call, *, take=0, **arguments):
        return {"library": self.library, "options": self.options, "call": call, "arguments": arguments, "take": take}

    def ask(self, call, **arguments):
        self.asker.send(self.call(call, **arguments))
        return self.asker.read()

    def ask_all(self, *calls):
        self.asker.send([self.call(call, **arguments) for call, arguments in calls])
        return self.asker.read()

    def describe(self, model):
        return self.server.client.get(f"/models/{model}", headers={"x-api-key": KEY}).json()

    def times(self, model):
        """OpenTelemetry's metrics of a model so far."""
        return times_on(self.server.client.get("/metrics", headers={"x-api-key": KEY}).text, model)

    def chat(self, text, **more):
        return self.ask("chat.completions.create", **chat(text, **more))


def chat(text, *, model="words", **more):
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}
