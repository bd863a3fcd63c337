# SPDX-License-Identifier: Apache-2.0
"""What a composition has beside its body: parameters in the query, and results that bring a media type of their own."""

import json
import textwrap

import httpx
import pytest

from forebay import ConfigError, Media
from forebay.graph.composition.border import Wire
from forebay.graph.composition.compose import compose
from forebay.graph.composition.node import node

ORIGIN = "http://page.example"
SOURCE = """
    from typing import Annotated
    from msgspec import Meta
    from forebay import Answer, Media, compose, node

    @node
    def shown(text: str, times: int, as_page: bool) -> dict | Media:
        line = text * times
        return Media(f"<p>{line}</p>".encode(), "text/html; charset=utf-8") if as_page else {"text": line}

    @compose
    def page(text: str, *, times: Annotated[int, Meta(ge=0, le=9)] = 1, as_page: bool = False) -> dict | Media:
        return shown(text, times, as_page)

    @node
    def known(text: str) -> dict | Answer:
        if text == "nested":
            return Answer(5, 201)
        return Answer({"known": text}, 201, {"x-a": text}) if text == "ada" else Answer("nobody", 404)

    @compose
    def find(text: str) -> dict | Answer:
        return known(text)
"""


@pytest.fixture(scope="module", params=["fast lane", "Starlette"])
def ask(request, launch, tmp_path_factory):
    """Asks the composition with a query; returns the answer."""
    file = tmp_path_factory.mktemp("graph") / "page.py"
    file.write_text(textwrap.dedent(SOURCE))
    server = launch(file, "--cors-origin", ORIGIN)
    headers = {} if request.param == "fast lane" else {"origin": ORIGIN}

    def ask(text, model="page", **query):
        return server.client.post(f"/models/{model}", content=json.dumps(text), params=query, headers=headers)

    return ask


def test_the_query_may_say_nothing(ask):
    answer = ask("ab")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": "ab"}


def test_a_parameter_of_the_query_has_its_type(ask):
    for _ in range(3):  # the second time the head is known
        assert ask("ab", times=2).json() == {"text": "abab"}
    assert ask("ab", times=3).json() == {"text": "ababab"}
    assert ask("ab", other="x").json() == {"text": "ab"}


@pytest.mark.parametrize("wrong", ["many", "10", "2.5", ""])
def test_a_wrong_one_is_refused_by_name(ask, wrong):
    answer = ask("ab", times=wrong)
    if not wrong:  # an empty value is no value
        assert answer.json() == {"text": "ab"}
        return
    assert answer.status_code == 422
    assert answer.json()["error"]["detail"] == {"path": "?times"}
    assert wrong in answer.json()["error"]["message"]


def test_a_result_may_name_its_media_type(ask):
    for _ in range(2):
        answer = ask("ab", as_page="true")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-length"] == "9"
        assert answer.text == "<p>ab</p>"
    assert ask("ab").headers["content-type"] == "application/json"


def test_a_result_may_have_a_status_and_headers(ask):
    for _ in range(2):
        found = ask("ada", "find")
        assert (found.status_code, found.headers["x-a"], found.json()) == (201, "ada", {"known": "ada"})
        assert (ask("bob", "find").status_code, ask("bob", "find").json()) == (404, "nobody")
    assert ask("nested", "find").status_code == 500  # no dict


@pytest.mark.parametrize("body", ["a,b", [1], None])
def test_what_is_no_bytes_is_refused_as_a_media_by_its_kind(body):
    with pytest.raises(TypeError, match=f"the body of a Media is bytes, and not {type(body).__name__}"):
        Media(body, "text/csv")


@pytest.mark.parametrize(
    "type",
    [
        "text/csv; header=present; charset=utf-8",
        'text/csv;charset="utf-8" ; header=present',
        'multipart/related; boundary="a b=;\\"c"; type="text/xml"',
        "application/vnd.api+json",
        "application/x!#$%&'*+.^_`|~-y",
        'a/b; c=""',
    ],
)
def test_a_media_type_may_have_every_parameter_that_a_header_may(type):  # F114
    assert Media(b"", type).type == type


@pytest.mark.parametrize(
    "type",
    [
        *("image", "image/png\r\nset-cookie: a=b", "", "a/b c", "image/png\n"),
        *(
            'a/b; c="',
            'a/b; c="\r\nd: e"',
            "a/b; c",
            "a/b;",
            'a/b; c="\\',
            "a/b; c=d e",
            'a/b; c="é"',
            "a/é",
            'a/b; c="\0"',
        ),
    ],
)
def test_a_media_type_cannot_break_out_of_its_header(type):
    with pytest.raises(ValueError, match="media type"):
        Media(b"", type)


def test_a_parameter_of_the_query_needs_a_default():
    @node
    def joined(text: str, mark: str) -> str:
        return text + mark

    @compose
    def marked(text: str, *, mark: str) -> str:
        return joined(text, mark)

    with pytest.raises(ConfigError, match="'mark' is keyword-only and stands in the query"):
        Wire(marked)


def test_without_a_server_it_is_an_argument():
    @node
    def joined(text: str, mark: str) -> str:
        return text + mark

    @compose
    def marked(text: str, *, mark: str = "!") -> str:
        return joined(text, mark)

    assert (marked.run("so"), marked.run("so", mark="?")) == ("so!", "so?")


def test_the_document_tells_what_the_query_may_say(ask):
    document = ask("ab").request.url.copy_with(path="/openapi.json", query=None)
    operation = httpx.get(document).json()["paths"]["/models/page"]["post"]
    found = {part["name"]: part["schema"] for part in operation["parameters"] if part.get("in") == "query"}
    assert found == {"times": {"type": "integer", "minimum": 0, "maximum": 9}, "as_page": {"type": "boolean"}}
    assert "*/*" in operation["responses"]["200"]["content"]
