# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, told what to do over its pipe (the DevTools protocol); it needs no library and no port."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

from tests.waiting import PATIENCE_S

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --mute-audio --remote-debugging-pipe"
)
# It reads commands from descriptor 3 and writes to descriptor 4; both are copied first, as one may be the other.
_START = """
import fcntl, os, sys
copies = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for place, copy in zip((3, 4), copies):
    os.dup2(copy, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Left(Exception):
    """The page that was asked is being replaced by another one."""


class Browser:
    """The program; `page` opens a tab that shares nothing with others."""

    def __init__(self):
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, ours = os.pipe()
        theirs, answers = os.pipe()
        command = [PROGRAM, *_FLAGS.split(), f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _START, str(commands), str(answers), *command],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._in, self._out = ours, theirs
        self._buffer = b""
        self._ids = itertools.count(1)
        self._pages = {}

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        os.close(self._in)  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        self._folder.cleanup()

    def page(self, width=1280, height=900, *, media=()):
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        page.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in media])
        return page

    def call(self, method, session=None, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._in, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Left(method)
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if "method" in answer and (page := self._pages.get(answer.get("sessionId"))) is not None:
                page.hear(answer["method"], answer["params"])

    def _read(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], PATIENCE_S)
            assert ready, "the browser says nothing"
            data = os.read(self._out, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


class Page:
    """A tab, and what it said and asked for."""

    def __init__(self, browser, session, context):
        self._browser = browser
        self._session = session
        self._context = context
        self.said = []
        """What stands in its console, and what it raised."""
        self.requests = []
        """What it asked for, with the headers that it gave."""
        self._made_up = {}

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def hear(self, event, told):
        if event == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(one.get("value", one.get("description"))) for one in told["args"]))
        elif event == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded":
            self.said.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requests.append((told["request"]["url"], told["request"]["headers"]))
        elif event == "Fetch.requestPaused":
            self._answer(told)

    def make_up(self, answers):
        """Answer these paths with these JSON values instead of asking the server."""
        self._made_up = answers
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}"} for path in answers])

    def _answer(self, told):
        path = next(path for path in self._made_up if told["request"]["url"].endswith(path))
        media, text = self._made_up[path]
        headers = [{"name": "content-type", "value": media}]
        body = base64.b64encode(text.encode()).decode()
        self.send(
            "Fetch.fulfillRequest", requestId=told["requestId"], responseCode=200, responseHeaders=headers, body=body
        )

    def send(self, method, **params):
        """Call without waiting: an event is being heard."""
        message = {"id": 0, "method": method, "params": params, "sessionId": self._session}
        os.write(self._browser._in, json.dumps(message).encode() + b"\0")

    def open(self, url):
        self.call("Page.navigate", url=url)
        return self

    def eval(self, script):
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script):
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            whole = f"(found => found instanceof Node || found)({script})"
            told = {}
            with contextlib.suppress(Left):
                told = self.call("Runtime.evaluate", expression=whole, returnByValue=True)
            if "exceptionDetails" not in told and (found := told.get("result", {}).get("value")):
                return found
            assert time.monotonic() < deadline, (script, told, self.said, self.eval("document.body.innerText"))
            time.sleep(0.05)

    def text(self, selector):
        return self.eval(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")

    def click(self, selector):
        self.until(f"(found => found && (found.click(), true))(document.querySelector({json.dumps(selector)}))")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def write(self, selector, text):
        """Put a text into a field as if it had been typed."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.eval(f"{field}.value = {json.dumps(text)}")
        for event in ("input", "change"):
            self.eval(f"{field}.dispatchEvent(new Event('{event}', {{bubbles: true}})) && null")

    def shot(self, path):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))
