# SPDX-License-Identifier: Apache-2.0
"""The documentation page works without the internet: everything it loads comes from the server itself."""

import gzip
import re

import httpx
import pytest
from tests.browser import PROGRAM


@pytest.fixture(scope="module")
def zoo(launch):
    return launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")


def test_the_page_loads_only_what_the_server_has(zoo):
    page = zoo.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert loaded
    for address in loaded:
        assert "//" not in address, "another host"
        if not address.startswith(("data:", "#")):
            answer = zoo.client.get(str(httpx.URL(zoo.url + "/docs").join(address)))
            assert answer.status_code == 200
            assert answer.content
    kinds = {address.rpartition(".")[2] for address in loaded}
    assert {"js", "css"} <= kinds


def test_the_page_works_below_the_prefix_of_a_proxy(zoo):  # F9
    page = zoo.client.get("/docs").text
    script = zoo.client.get("/docs/docs-init.js").text
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page) + re.findall(r'url: "([^"]+)"', script)
    assert "openapi.json" in addresses
    for address in addresses:
        if not address.startswith(("data:", "#")):
            assert str(httpx.URL("http://proxy/api/docs").join(address)).startswith("http://proxy/api/"), address
    server = zoo.client.get("/openapi.json").json()["servers"][0]["url"]
    assert str(httpx.URL("http://proxy/api/openapi.json").join(server)) == "http://proxy/api/"


@pytest.mark.parametrize("path", ["/docs", "/ui"])
@pytest.mark.parametrize("more", ["/", "//", "/?a=1"])
def test_a_page_with_a_slash_at_its_end_leads_to_the_page(zoo, path, more):  # F116
    answer = zoo.client.get(path + more, headers={"accept": "text/html"})
    while answer.is_redirect:
        answer = zoo.client.get(str(answer.url.join(answer.headers["location"])))
    assert (answer.status_code, answer.url.path) == (200, path)


def test_a_browser_guesses_no_type_of_the_page_or_its_files(zoo):  # F134
    page = zoo.client.get("/docs")
    for address in ["", *re.findall(r'(?:src|href)="docs/([^"]+)"', page.text)]:
        answer = zoo.client.get(f"/docs/{address}".rstrip("/"))
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff"), address


def test_the_page_and_its_own_script_name_no_other_host(zoo):
    for path in ("/docs", "/docs/docs-init.js"):
        assert not re.search(r"https?://|['\"(]//", zoo.client.get(path).text)


def test_the_page_shows_the_document_of_this_server(zoo):
    text = zoo.client.get("/docs").text + zoo.client.get("/docs/docs-init.js").text
    assert "openapi.json" in text
    assert zoo.client.get("/openapi.json").json()["paths"]


@pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")
def test_the_page_asks_models_under_a_policy_that_lets_in_nothing_else(launch, browser):
    server = launch("pictures.py", "--worker-kind", "thread")
    policy = server.client.get("/docs").headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    with browser.page() as page:
        page.open(f"{server.url}/docs#/models/painter")
        page.until("document.querySelector('.opblock')")
        block = "[...document.querySelectorAll('.opblock-post')].find(it => it.innerText.includes('/models/painter'))"
        page.eval(f"{block}.querySelector('.opblock-summary-control').click()")
        page.until(f"{block}.querySelector('.try-out__btn')")
        page.eval(f"{block}.querySelector('.try-out__btn').click()")
        page.until(f"{block}.querySelector('textarea')")
        page.eval(f"({WRITTEN})({block}.querySelector('textarea'), '\"picture\"')")
        page.eval(f"{block}.querySelector('.execute').click()")
        page.until(f"{block}.querySelector('.live-responses-table img')?.src.startsWith('blob:')")
        page.until(f"{block}.querySelector('.live-responses-table img').complete")
        assert page.said == []


@pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")
def test_the_page_is_grouped_by_model_follows_the_colours_and_leads_back(launch, browser):
    server = launch("tried.py", "--worker-kind", "thread")
    with browser.page(390, media=[("prefers-color-scheme", "dark")]) as page:
        page.open(f"{server.url}/docs").until("document.querySelectorAll('.opblock').length > 5")
        groups = page.eval("[...document.querySelectorAll('.opblock-tag')].map(one => one.dataset.tag)")
        assert groups[:4] == ["pictures", "bytes", "tensors", "parrot"]
        assert "version 2.1: Looks at pictures" in page.eval("document.querySelector('.opblock-tag').innerText")
        assert "Names what is in a picture" in page.eval("document.body.innerText")
        assert page.eval("document.querySelectorAll('[onerror], #swagger-ui script').length") == 0, "no docstring runs"
        assert page.eval("window.hacked ?? null") is None
        shade = "getComputedStyle(document.documentElement).backgroundColor"
        assert page.eval(shade) == "rgb(28, 32, 34)"
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        page.until(f"{shade} !== 'rgb(28, 32, 34)'")
        assert page.eval("document.documentElement.scrollWidth") <= 390
        page.click(".top a")
        page.until("location.pathname === '/ui' && document.querySelector('#link').dataset.state === 'live'")
        assert [line for line in page.said if not line.endswith(f"404 (Not Found) {server.url}/x")] == []


def test_the_document_of_one_model_has_its_name_and_version(launch):
    document = launch("watched.py:Iris", "--worker-kind", "thread").client.get("/openapi.json").json()
    assert document["info"] == {"title": "iris", "version": "3"}


def test_the_page_has_no_link_to_a_dashboard_that_is_not_there(launch):
    page = launch("zoo.py", "--worker-kind", "thread", "--no-dashboard").client.get("/docs").text
    assert "openapi.json" in page
    assert 'href="ui"' not in page


WRITTEN = """(field, text) => {
    Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set.call(field, text);
    field.dispatchEvent(new Event('input', {bubbles: true}));
}"""
"""Writes into a field of React's, which looks at what was set by others only."""


@pytest.mark.parametrize("name", ["swagger-ui-bundle.js", "swagger-ui.css"])
def test_assets_are_sent_packed_only_to_who_can_unpack(zoo, name):
    with zoo.connect() as wire:
        packed = wire.ask("GET", f"/docs/{name}", headers=["accept-encoding: gzip"])
        plain = wire.ask("GET", f"/docs/{name}")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["content-type"].startswith("text/")
    assert "max-age" in packed.headers["cache-control"]


@pytest.mark.parametrize("name", ["nothing.js", "../docs.html", "%2e%2e/docs.html", "..%2fdocs.html", "LICENSE", "%00"])
def test_the_page_serves_no_other_files(zoo, name):
    with zoo.connect() as wire:
        assert wire.ask("GET", f"/docs/{name}").status in {400, 404}
