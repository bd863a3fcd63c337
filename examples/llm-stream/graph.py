# SPDX-License-Identifier: Apache-2.0
"""The same model as a node of a graph: what is known of the question is looked up first. Asked as any chat model."""

from concurrent.futures import ThreadPoolExecutor

from model import STREAMS, Sampling, asked, load_model

import forebay
from forebay.openai import Message, TextPart

NOTES = [
    "The ferry to Holm leaves at 9:40 and at 15:10.",
    "The library is closed on Mondays.",
    "The museum of clocks is in Mill Street 4.",
]


@forebay.node
def look_up(request: Sampling) -> Sampling:
    """Put the note that has most words of the question before it."""
    words = set(request.messages[-1].text.lower().replace("?", "").split())
    note = max(NOTES, key=lambda note: len(words & set(note.lower().rstrip(".").split())))
    told = Message(role="system", content=f"Answer in one sentence. You know: {note}")
    return Sampling(messages=[told, *request.messages], max_tokens=request.limit or 40, temperature=0.0)


class Answer(forebay.Model):
    """Whole answers; those of a batch share each step of the library, too."""

    max_batch_size = STREAMS

    def load(self):
        self.llm = load_model()
        self.threads = ThreadPoolExecutor(STREAMS)

    def predict(self, batch: list[Sampling]) -> list[TextPart]:
        return list(self.threads.map(self.answer, batch))

    def answer(self, request: Sampling) -> TextPart:
        found = self.llm.handle_chat_completions(asked(request))
        (choice,), used = found["choices"], found["usage"]
        text = choice["message"]["content"]
        return TextPart(text, used["completion_tokens"], used["prompt_tokens"], choice["finish_reason"])


answer = forebay.node(Answer)


@forebay.compose
def guide(request: Sampling) -> TextPart:
    """What the guide of a small town knows."""
    return answer(look_up(request))
