# SPDX-License-Identifier: Apache-2.0
"""The panel of the dashboard that calls a model, as Chromium shows it, and the code that it offers."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.browser import PROGRAM
from tests.models.tried import HOSTILE
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")

KEY = "sesame 'street'"
ANSWER = "document.querySelector('#try > .output pre')"
RUN = {
    "curl": ["sh", "-c"],
    "python": [sys.executable, "-c"],
    "javascript": ["node", "--no-warnings", "--input-type=module", "-e"],
}
CAT = b"\x89PNG not really"


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory, models):
    file = tmp_path_factory.mktemp("tried") / "all.yaml"
    targets = [f"{models}/tried.py:{name}" for name in ("Pictures", "Bytes", "Tensors", "Parrot")]
    file.write_text(json.dumps({"models": targets, "worker_kind": "thread", "http": {"api_keys": [KEY]}}))
    return launch(None, "--config", str(file))


def log_in(page, server):
    page.open(f"{server.url}/ui").until("document.querySelector('#login').open")
    page.write("#login-key", KEY)
    page.click("#login button")


def choose(page, name, path=0):
    """Open the page of a model, and choose one of its paths."""
    page.eval(f"location.hash = 'model/{name}'")
    page.until(f"document.querySelector('#detail h2').textContent === '{name}'")
    page.until(f"document.querySelector('#asked-path').textContent.includes('/models/{name}')")
    page.eval(f"document.querySelector('#asked-path').selectedIndex = {path}")
    page.eval("document.querySelector('#asked-path').dispatchEvent(new Event('change')) && null")


def choose_file(page, selector, *files):
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(one) for one in files])


def clean(page):
    """What stands in the console beside the request for a key."""
    return [line for line in page.said if "401" not in line]


def codes_of(page):
    """The request as a program, in each language."""
    found = {}
    for language in RUN:
        page.click(f"#try [data-language={language}]")
        found[language] = page.until("document.querySelector('#try form .output:not([hidden]) pre')?.textContent")
        assert "sesame" not in found[language]
        assert "FOREBAY_KEY" in found[language]
    return found


@pytest.fixture
def start():
    """Starts each program in a folder of its own; they run side by side until `outputs` reads them."""
    with contextlib.ExitStack() as stack:

        def started(codes, folder):
            running = []
            for language, code in codes.items():
                if shutil.which(RUN[language][0]) is None:
                    continue
                own = folder / language
                own.mkdir(parents=True)
                for file in [one for one in folder.iterdir() if one.is_file()]:
                    shutil.copy(file, own)
                process = subprocess.Popen(
                    [*RUN[language], code],
                    cwd=own,
                    env={**os.environ, "FOREBAY_KEY": KEY},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                running.append((language, process, own / "answer.bin"))
            return running

        yield started


def outputs(running):
    """What the programs have written, the file of an answer of bytes if there is one."""
    found = {}
    for language, process, saved in running:
        out, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, (language, error.decode())
        found[language] = saved.read_bytes().decode() if saved.exists() else out.decode()
    return found


def test_a_form_with_files_has_the_required_fields_first(browser, server, start, tmp_path):
    cat = tmp_path / "a cat's;1,2.png"
    cat.write_bytes(CAT)
    with browser.page() as page:
        log_in(page, server)
        choose(page, "pictures")
        fields = page.eval("[...document.querySelectorAll('#try .field label')].map(one => one.firstChild.data)")
        assert fields == ["label", "image", "note", "tags", "mask", "number", "is_new"]
        kinds = page.eval("[...document.querySelectorAll('#try .field input')].map(one => `${one.id} ${one.type}`)")
        assert {"try-image file", "try-mask file", "try-label text", "try-number number"} <= set(kinds)
        assert page.eval("document.querySelector('select#try-is_new').value") == "", "what may be left out is left out"
        page.click("#try button.primary")
        page.until("document.querySelector('#try .wrong').textContent === 'image: choose a file'")
        choose_file(page, "#try-image", cat)
        page.write("#try-label", "it's")
        page.write("#try-tags", '["a", "b"]')
        page.click("#try button.primary")
        page.until(ANSWER)
        wanted = ["it's", cat.name, len(CAT), 0, ["a", "b"], 1]
        assert json.loads(page.eval(f"{ANSWER}.textContent")) == wanted
        told = outputs(start(codes_of(page), tmp_path))
        assert json.loads(told["curl"]) == wanted
        assert told["python"].strip() == str(wanted)
        assert cat.name in told.get("javascript", cat.name)
        assert clean(page) == []


def test_every_way_to_call_gives_code_that_runs(browser, server, start, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    running = {}
    with browser.page() as page:
        log_in(page, server)
        for number, (name, path, field, value) in enumerate(
            [
                ("bytes", 0, "#asked-text", "it's"),
                ("bytes", 1, "#try-first", "9007199254740993"),
                ("bytes", 2, "#try-sample", "ab"),
                ("tensors", 0, "#try-sample", "[1.5, 2]"),
            ]
        ):
            choose(page, name, path)
            page.until(f"document.querySelector('{field}')")
            page.write(field, value)
            folder = tmp_path / str(number)
            folder.mkdir()
            running[number] = start(codes_of(page), folder)
        choose(page, "pictures", 1)
        choose_file(page, "#try input[type=file]", tmp_path / "cat.png")
        running["file"] = start(codes_of(page), tmp_path)
        assert clean(page) == []
    told = {name: outputs(one) for name, one in running.items()}
    assert told[0]["curl"] == told[0]["python"] == "s'ti"
    assert [json.loads(told[1][one]) for one in ("curl", "python")] == [[9007199254740993, 9]] * 2
    assert told[2]["curl"] == 'data: "a"\n\ndata: "b"\n\n'
    assert told[2]["python"] == '"a"\n"b"\n'
    assert [json.loads(told[3][one]) for one in ("curl", "python")] == [[3, 4]] * 2
    assert "cat.png has 15 bytes" in told["file"]["curl"]
    assert all("cat.png has 15 bytes" in one for one in told["file"].values())


def test_a_chat_streams_is_stopped_and_says_what_went_wrong(browser, server, start, tmp_path):
    said = "[...document.querySelectorAll('#try .talk > *')].map(one => one.textContent.trim())"
    with browser.page(390) as page:
        log_in(page, server)
        choose(page, "parrot")
        assert page.until("document.querySelector('#try-chat-top_k').value") == "40"
        page.click("#try button.primary")
        page.until("document.querySelector('#try .wrong').textContent === 'Write a message first.'")
        page.write("#asked-message", "to be")
        running = start(codes_of(page), tmp_path)
        page.eval("document.querySelector('#asked-message').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        page.until("document.querySelector('#try .status').textContent.includes('2 parts')")
        page.until(f"{said}.join('|') === 'Youto be|parrotto be'")
        again = codes_of(page)["curl"]
        assert again.count('"role"') == 1, "the request that was sent, without its answer"
        page.write("#try-chat-top_k", "3")
        page.write("#try-chat-temperature", "0.5")
        page.write("#asked-message", "count")
        page.click("#try button.primary")
        page.until(f"{said}[3] === 'parrot3 user 3 0.5'")
        page.write("#asked-message", "forever")
        page.click("#try button.primary")
        page.until(f"{said}[5]?.includes('forever')")
        page.click("#try .row button.quiet:not([hidden])")
        page.until("document.querySelector('#try .status').textContent.startsWith('stopped after')")
        page.write("#asked-message", "fail")
        page.click("#try button.primary")
        page.until("document.querySelector('#try .talk .wrong')")
        assert page.eval("document.querySelector('#asked-message').value") == "fail"
        page.write("#try-chat-temperature", "7")
        page.click("#try button.primary")
        page.until("document.querySelector('#try details').open")  # what is wrong is in there
        assert page.eval("document.documentElement.scrollWidth") <= 390
    told = outputs(running)
    assert told["python"] == "to be "
    assert '"content":"be "' in told["curl"]
    assert '"content":"be "' in told.get("javascript", told["curl"])


def test_a_model_that_only_speaks_tensors_gets_a_form_of_them(browser, server, start, tmp_path):
    with browser.page() as page:
        page.make_up({"/openapi.json": ("application/json", json.dumps({"paths": {}}))})
        log_in(page, server)
        page.until("document.querySelector('#asked-model option[value=tensors]')")
        page.write("#asked-model", "tensors")
        page.until("document.querySelector('#try small')?.textContent.startsWith('FP32, shape [')")
        page.write("#try .field textarea", "[[1.5, 2]]")
        page.click("#try button.primary")
        page.until(ANSWER)
        (tensor,) = json.loads(page.eval(f"{ANSWER}.textContent"))["outputs"]
        assert tensor["data"] == [3, 4]
        told = outputs(start(codes_of(page), tmp_path))
        assert json.loads(told["curl"])["outputs"] == [tensor]
        assert clean(page) == []


def test_a_graph_that_names_no_types_is_sent_numbers(browser, launch):
    server = launch(Path(__file__).parents[2] / "examples" / "ovms-incrementer")
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#try small')?.textContent.startsWith('of any type')")
        page.write("#try .field textarea", "[0, 1.5]")
        page.click("#try button.primary")
        page.until(ANSWER)
        assert json.loads(page.eval(f"{ANSWER}.textContent"))["outputs"][0]["data"] == [3, 4.5]
        assert page.said == []


def test_descriptions_and_examples_are_texts(browser, server):
    with browser.page() as page:
        log_in(page, server)
        choose(page, "pictures")
        assert page.until("document.querySelector('#try-label').value") == HOSTILE
        assert HOSTILE in page.text("#try small")
        for language in RUN:
            page.click(f"#try [data-language={language}]")
        page.click("#try [data-value=json]")
        page.click("#try [data-language=curl]")
        code = page.until("document.querySelector('#try form .output:not([hidden]) pre')?.textContent")
        assert "<img src=x onerror=" in code
        assert page.eval("document.querySelectorAll('#try img').length") == 0
        assert page.eval("window.hacked ?? null") is None
        assert clean(page) == []
