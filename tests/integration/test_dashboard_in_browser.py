# SPDX-License-Identifier: Apache-2.0
"""The dashboard as Chromium shows it: nothing is told in the console, nothing runs that should not."""

import contextlib
import json
import signal
import threading

import httpx
import pytest
from tests.browser import PROGRAM
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")

CALLS = {"iris": {"measures": [5.1, 3.5, 1.4, 0.2]}, "ocr": 1.5, "failing": "x"}
ROW = "[...document.querySelectorAll('.models tbody tr')].find(row => row.querySelector('.name')?.textContent === '{}')"
HOSTILE = "<img src=x onerror=\"window.hacked='name'\">"


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory, models):
    """Everything of `watched.py`: its models and its graph."""
    file = tmp_path_factory.mktemp("watched") / "all.yaml"
    targets = [f"{models}/watched.py:{name}" for name in ("Iris", "Story", "Failing", "ocr")]
    file.write_text(json.dumps({"models": targets, "worker_kind": "thread"}))
    return launch(None, "--config", str(file))


@pytest.fixture(scope="module")
def load(server):
    """Clients that call every model as long as the tests of this file run."""
    over = threading.Event()

    def call(name):
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            while not over.wait(0.02):
                client.post(f"/models/{name}", json=CALLS[name])

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in CALLS]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_what_the_server_does_is_shown_as_it_does_it(browser, server, load, width, scheme):
    with browser.page(width, media=[("prefers-color-scheme", scheme)]) as page:
        page.open(f"{server.url}/")
        page.until("document.querySelector('#link').dataset.state === 'live'")
        assert page.eval("location.pathname") == "/ui"
        for name in CALLS:
            page.until(f"Number({ROW.format(name)}.querySelector('td.rate b').textContent) > 0")
        page.until("document.querySelector('.c-p99.line').getAttribute('d').length > 20")
        before = page.eval("document.querySelector('.c-ok.stack').getAttribute('d')")
        page.until(f"document.querySelector('.c-ok.stack').getAttribute('d') !== {json.dumps(before)}")
        page.eval(f"{ROW.format('ocr')}.querySelector('.name').click()")
        page.until("document.querySelector('.drawing g[data-busiest] .fill')?.getAttribute('width') > 0")
        assert page.eval("document.querySelectorAll('.drawing g[data-endpoint]').length") == 3
        assert "%" in page.text(".drawing g[data-endpoint='ocr/read'] text.now")
        assert page.eval("document.documentElement.scrollWidth") <= width
        page.click("#detail > header a")
        page.until("document.querySelector('.faults .message')")
        assert "RuntimeError: <img src=x" in page.text(".faults")
        assert "watched.py" in page.text(".faults pre")
        assert page.eval("window.hacked ?? null") is None
        left, right = page.eval(
            "(time => { const text = document.createRange(); text.selectNodeContents(time);"
            "return [text.getBoundingClientRect().right, time.getBoundingClientRect().right]; })"
            "(document.querySelector('.faults time'))"
        )
        assert (right - left < 1) is (width < 760)  # there is a column of times only where there is room for it
        dark = page.eval("getComputedStyle(document.documentElement).backgroundColor")
        assert (int(dark.split("(")[1].split(",")[0]) < 50) is (scheme == "dark")
        assert page.said == []


def test_a_model_is_tried_in_the_page(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#try-measures')")
        page.write("#try-measures", "[5.1, 3.5, 1.4, 0.2]")
        page.eval("document.querySelector('#try-kind').value = JSON.stringify('garden')")
        page.click("#try button.primary")
        page.until("document.querySelector('#try > .output pre')?.textContent === '\"setosa, garden\"'")
        assert page.text("#try .status").startswith("200 ")
        # what does not fit is told as the server tells it
        page.write("#try-measures", '"four"')
        page.click("#try button.primary")
        page.until("document.querySelector('#try .status').textContent.startsWith('422')")
        page.until("document.querySelector('#try > .output').textContent.includes('$.measures')")
        # what is no JSON is told before it is sent
        page.write("#try-measures", "[1,")
        page.click("#try button.primary")
        assert page.text("#try .wrong").startswith("measures: ")
        # the same as JSON
        page.write("#try-measures", "[1, 2]")
        page.click("#try [data-value=json]")
        assert json.loads(page.eval("document.querySelector('#asked-json').value"))["measures"] == [1, 2]
        assert [line for line in page.said if "422" not in line] == []


def test_a_stream_is_shown_as_it_comes_and_can_be_stopped(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#try-measures')")
        page.write("#asked-model", "story")
        page.until("document.querySelector('#try-sample')")
        page.write("#try-sample", "3")
        page.click("#try button.primary")
        page.until("document.querySelector('#try .status').textContent.includes('· 3 parts ·')")
        assert page.text("#try .joined") == "word0 word1 word2 "
        page.write("#try-sample", "100000")
        page.click("#try button.primary")
        page.until("/[0-9]+ parts so far/.test(document.querySelector('#try .status').textContent)")
        page.click("#try .row button.quiet:not([hidden])")
        page.until("document.querySelector('#try .status').textContent.startsWith('stopped after')")
        assert page.said == []


def test_a_trace_is_recorded_and_offered(browser, server, load):
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.click("#trace [data-value='1']")
        page.click("#trace button.record")
        page.until("document.querySelector('#trace a[download]')")
        assert "batches in 1 s" in page.text("#trace .status")
        assert any(url.endswith("/trace?seconds=1") and "X-Forebay-Page" in headers for url, headers in page.requests)
        assert page.said == []


def test_names_from_elsewhere_are_texts_wherever_they_stand(browser, server, load):
    facts = server.client.get("/models/iris").json()
    hostile = facts | {
        "name": HOSTILE,
        "description": HOSTILE,
        "version": HOSTILE,
        "versions": [{"version": HOSTILE, "state": "failed", "weight": 0, "error": HOSTILE}],
        "nodes": {HOSTILE: facts},
    }
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" onload="window.hacked=1">'
        "<script>window.hacked=2</script>"
        '<g data-endpoint="x"><rect x="0" y="0" width="9" height="9"/>'
        "<text>&lt;img src=x onerror=window.hacked=3></text></g></svg>"
    )
    with browser.page() as page:
        page.make_up(
            {
                "/models": ("application/json", json.dumps({"models": [hostile, facts], "problem": HOSTILE})),
                "/openapi.json": ("application/json", json.dumps({"paths": {}})),
                "%3E": ("image/svg+xml", drawing),
            }
        )
        page.open(f"{server.url}/ui")
        page.until("document.querySelectorAll('#models a.name').length === 2")
        page.until("document.querySelector('.faults .message')")
        page.click("#models a.name")
        page.until("document.querySelector('.drawing text')")
        assert page.text("#detail h2") == HOSTILE
        assert HOSTILE in page.text("#notices"), "what could not be read anew"
        assert HOSTILE in page.text("#detail .notice"), "and the version that could not be loaded"
        assert page.eval("document.querySelectorAll('img, script:not([src])').length") == 0
        assert page.eval("window.hacked ?? null") is None


def test_a_key_is_asked_for_and_sent_as_a_header_only(browser, launch, eventually):
    server = launch("single.py", "--worker-kind", "thread", "--api-key", "sesame street")
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#login').open")
        page.write("#login-key", "wrong")
        page.click("#login button")
        page.until("document.querySelector('#login-wrong').textContent && document.querySelector('#login').open")
        page.write("#login-key", "sesame street")
        page.click("#login button")
        page.until("document.querySelectorAll('#models a.name').length === 1")
        assert page.eval("document.querySelector('#login').open") is False
        page.open(f"{server.url}/ui")
        page.until("document.querySelectorAll('#models a.name').length === 1")

        def is_asked_with_key():
            page.eval("null")  # what it asks for meanwhile is heard
            given = {url for url, headers in page.requests if headers.get("X-API-Key") == "sesame street"}
            return {"events", "models"} <= {url.rpartition("/")[2] for url in given}

        eventually(is_asked_with_key)
        assert not [url for url, _ in page.requests if "sesame" in url]
        page.click("#key")
        page.until("document.querySelector('#login').open")
        assert all("401" in line for line in page.said)


def test_a_key_may_be_of_any_script(browser, launch):
    server = launch("single.py", "--worker-kind", "thread", "--api-key", "Schlüssel 钥匙")
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        for key in ("“Schlüssel 钥匙”", "Schlüssel 钥匙"):
            page.until("document.querySelector('#login').open")
            page.write("#login-key", key)
            page.click("#login button")
        page.until("document.querySelectorAll('#models a.name').length === 1")


def graph_of(names):
    nodes = [f'@forebay.node(worker_kind="thread")\ndef {name}(x: float) -> float:\n    return x\n' for name in names]
    calls = "".join(f"    x = {name}(x)\n" for name in names)
    asked = "class Asked(msgspec.Struct):\n" + "".join(f"    {name}: float\n" for name in names)
    model = (
        "class Asking(forebay.Model):\n    def predict(self, batch: list[Asked]) -> list[float]:\n        return []\n"
    )
    graph = f"@forebay.compose\ndef wired(x: float) -> float:\n{calls}    return x\n"
    return "\n\n".join(("import forebay, msgspec", *nodes, asked, model, graph))


def test_what_was_loaded_anew_is_drawn_and_asked_for_anew(browser, serve, tmp_path):
    file = tmp_path / "code.py"
    file.write_text(graph_of(["first", "second"]))
    config = tmp_path / "all.yaml"
    config.write_text(json.dumps({"models": ["code.py:wired", "code.py:Asking"], "worker_kind": "thread"}))
    server = serve(None, "--config", str(config))
    drawn = "[...document.querySelectorAll('.drawing g[data-endpoint]')].map(one => one.dataset.endpoint).join()"
    fields = "[...document.querySelectorAll('#try .fields label')].map(one => one.firstChild.data).join()"
    with browser.page() as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#asked-model option')")
        page.write("#asked-model", "asking")
        page.eval(f"{ROW.format('wired')}.querySelector('.name').click()")
        page.until(f"{drawn} === 'wired/first,wired/second'")
        page.write("#asked-model", "asking")
        page.until(f"{fields}.endsWith('first,second')")
        page.write("#try-second", "0.5")
        file.write_text(graph_of(["second", "third", "fourth"]))
        server.signal(signal.SIGHUP)
        page.until(f"{drawn} === 'wired/second,wired/third,wired/fourth'")
        page.until(f"{fields}.endsWith('second,third,fourth')")
        assert page.eval("document.querySelector('#try-second').value") == "0.5"
        assert page.said == []


def test_who_finds_no_place_is_told_so(browser, serve):
    server = serve("single.py", "--worker-kind", "thread")
    with contextlib.ExitStack() as looking, browser.page() as page:
        for _ in range(8):
            assert looking.enter_context(server.client.stream("GET", "/ui/events")).status_code == 200
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#notices').textContent.startsWith('8 are looking at this dashboard')")
        looking.pop_all().close()
        page.until("document.querySelector('#link').dataset.state === 'live'")
        page.until("document.querySelector('#notices').textContent === ''")


CLEARED = """
import('/ui/faults.js').then(({ Faults }) => {
  const host = document.body.appendChild(document.createElement("section"));
  const faults = new Faults(host, () => {});
  const fault = { endpoint: "one", code: "internal", kind: "Wrong", message: "why" };
  const take = (at, number) => faults.take({ ...fault, at }, number);
  const shown = () => (faults.show(), host.querySelectorAll("li").length);
  take(10, null);
  take(11, 1);
  const told = [shown()];
  host.querySelector("header button").click();
  told.push(shown());
  take(11, null);
  told.push(shown());
  take(12, 1);
  return [...told, shown()];
})
"""


def test_errors_that_were_cleared_do_not_come_back_with_the_connection(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#link').dataset.state === 'live'")
        assert page.eval(CLEARED) == [1, 0, 0, 1]


@pytest.mark.parametrize("width", [1280, 360])
def test_long_graphs_can_be_read_and_long_names_stay_in_their_place(browser, serve, tmp_path, width):
    name = "a" * 100
    (tmp_path / "code.py").write_text(graph_of([f"node{number}" for number in range(30)]))
    (tmp_path / "long.py").write_text(graph_of(["one"]).replace("def predict", f"name = '{name}'\n    def predict"))
    config = tmp_path / "all.yaml"
    config.write_text(json.dumps({"models": ["code.py:wired", "long.py:Asking"], "worker_kind": "thread"}))
    server = serve(None, "--config", str(config))
    with browser.page(width) as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#asked-model option')")
        right = f"{ROW.format(name)}.querySelector('.name').getBoundingClientRect().right"
        assert page.eval(f"{right} < document.querySelector('#models').getBoundingClientRect().right")
        page.eval(f"{ROW.format('wired')}.querySelector('.name').click()")
        page.until("document.querySelector('.drawing text.name')?.getBoundingClientRect().height > 9")
        canvas = "document.querySelector('.canvas')"
        assert page.eval(f"{canvas}.scrollWidth > {canvas}.clientWidth")
        assert page.eval("document.documentElement.scrollWidth") <= width


def test_a_server_that_went_away_is_found_again(browser, serve):
    first = serve("single.py", "--worker-kind", "thread")
    with browser.page() as page:
        page.open(f"{first.url}/ui")
        page.until("document.querySelector('#link').dataset.state === 'live'")
        first.signal()
        page.until("document.querySelector('#link').dataset.state === 'lost'")
        first.wait()
        serve("single.py", "--worker-kind", "thread", port=first.port)
        page.until("document.querySelector('#link').dataset.state === 'live'")


HISTORY = """
import('/ui/history.js').then(({ History }) => {
  const history = new History();
  const seen = [];
  for (const from of [500000, 100]) { // a machine that has run for long, then one that was just started
    history.began({ seconds: [1], rows: [1] }, []);
    for (const second of [0, 1, 2, 3, 4, 5]) {
      const state = { in_flight: 0, waiting: 0, alive: 1, idle: 1, slots: 1, restarts: 0 };
      const told = { endpoint: "one", version: "1", codes: { ok: 4 }, ...state };
      history.take({ monotonic: from + second, beats: [told] });
    }
    const { columns } = history.columns("one", 60, 40);
    seen.push([history.recent("one", 4), columns.findLast((column) => column)].map(({ ok, dt }) => ok / dt));
  }
  return seen;
})
"""


def test_charts_go_on_where_the_server_that_comes_back_has_another_clock(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#link').dataset.state === 'live'")
        assert page.eval(HISTORY) == [[4, 4], [4, 4]]


HIDDEN = """
globalThis.isHidden = true;
Object.defineProperty(document, "hidden", { get: () => globalThis.isHidden });
const wait = setTimeout;
globalThis.setTimeout = (task, ms) => wait(task, ms === 60000 ? 0 : ms); // a minute is over at once
"""


@pytest.mark.parametrize("is_there", [True, False])
def test_a_tab_that_was_opened_in_the_background_looks_only_once_it_is_seen(browser, serve, is_there):
    server = serve("single.py", "--worker-kind", "thread")
    with browser.page() as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=HIDDEN)
        if not is_there:
            page.make_up({"/ui/events": ("text/event-stream", "")})  # a server that ends every stream
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#link')?.dataset.state === 'paused'")
        page.call("Fetch.disable")
        page.eval("isHidden = false; document.dispatchEvent(new Event('visibilitychange')) && null")
        page.until("document.querySelector('#link').dataset.state === 'live'")


TABLE = """
Promise.all([import('/ui/models.js'), import('/ui/history.js')]).then(([{ Models }, { History }]) => {
  const host = document.body.appendChild(document.createElement("section"));
  const table = new Models(host, new History());
  const learn = (...names) => table.learn({ models: names.map((name) => ({ name, ready: true })) });
  const shown = () => [...host.querySelectorAll("a.name")].map((link) => link.textContent).join("");
  const focused = () => document.activeElement.textContent;
  const find = (text) => {
    const field = host.querySelector("input");
    field.value = text;
    field.dispatchEvent(new Event("input"));
    return host.innerText;
  };
  learn("a", "b");
  host.querySelectorAll("a.name")[1].focus();
  learn("a", "b");
  const told = [focused()];
  learn("c", "a", "b");
  told.push(focused(), shown());
  learn(..."abcdefghijklmn");
  told.push(find("b").includes("in its name"), shown(), find("zzz").includes("No model has this in its name."));
  learn("a", "b");
  return [...told, shown()];
})
"""


def test_the_table_of_models_keeps_the_focus_and_shows_what_is_looked_for(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#link').dataset.state === 'live'")
        assert page.eval(TABLE) == ["b", "b", "abc", False, "b", True, "ab"]


PIECES = """
import('/ui/server.js').then(async ({ events }) => {
  const pieces = ["event: hello", "\\ndata: ", "1\\n", "\\n"].map((piece) => new TextEncoder().encode(piece));
  const told = [];
  const pull = (stream) => (pieces.length ? stream.enqueue(pieces.shift()) : stream.close());
  const body = new ReadableStream({ pull });
  for await (const event of events(new Response(body), () => told.push("piece"))) told.push(...event);
  return told;
})
"""


def test_a_connection_that_is_slow_is_not_taken_for_a_silent_one(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#link').dataset.state === 'live'")
        assert page.eval(PIECES) == ["piece"] * 4 + ["hello", "1"]


BOOK = """
import msgspec
import forebay

class Asked(msgspec.Struct):
    title: str
    model: str
    姓名: str
    书名: str
    number: int
    numbers: list[int]

class Book(forebay.Model):
    def predict(self, batch: list[Asked]) -> list[list[int]]:
        return [[one.number, *one.numbers] for one in batch]
"""


@pytest.fixture(scope="module")
def book(launch, tmp_path_factory):
    file = tmp_path_factory.mktemp("book") / "book.py"
    file.write_text(BOOK)
    return launch(str(file), "--worker-kind", "thread")


def test_every_field_has_the_label_with_its_name(browser, book):
    names = ["title", "model", "姓名", "书名", "number", "numbers"]
    with browser.page() as page:
        page.open(f"{book.url}/ui").until("document.querySelector('#try textarea')")
        fields = "[...document.querySelectorAll('#try .field')]"
        own = "one.querySelector('label').control === one.querySelector('input, textarea')"
        named = page.eval(f"{fields}.map(one => {own} && one.querySelector('label').firstChild.data)")
        assert named[-len(names) :] == names
        assert all(named)


def test_long_numbers_are_sent_and_shown_with_all_their_digits(browser, book):
    numbers = [9007199254740993, -12345678901234567, 3]
    with browser.page() as page:
        page.open(f"{book.url}/ui").until("document.querySelector('#try-numbers')")
        page.write("#try-number", str(numbers[0]))
        page.write("#try-numbers", json.dumps(numbers[1:]))
        page.click("#try [data-value=json]")
        assert json.loads(page.eval("document.querySelector('#asked-json').value"))["number"] == numbers[0]
        for way in ("json", "form"):
            page.click(f"#try [data-value={way}]")
            page.click("#try button.primary")
            page.until("document.querySelector('#try > .output pre')")
            assert json.loads(page.text("#try > .output pre")) == numbers
        assert page.said == []


def test_the_command_is_shown_where_a_page_may_not_copy(browser, book):
    with browser.page() as page:
        page.open(f"{book.url}/ui").until("document.querySelector('#try-numbers')")
        page.eval("Object.defineProperty(navigator, 'clipboard', { value: undefined }) && null")  # as by http elsewhere
        page.click("#try .row button.quiet:not([hidden])")
        page.until("document.querySelector('#try form .output:not([hidden]) pre')")
        assert page.text("#try form pre").startswith(f"curl -N '{book.url}/models/book' ")
        assert page.text("#try .wrong") == ""


def test_everything_has_a_name_and_charts_are_read_with_the_keyboard(browser, server, load):
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until(f"Number({ROW.format('iris')}.querySelector('td.rate b').textContent) > 0")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "link", "textbox", "combobox", "searchbox", "spinbutton", "checkbox", "image", "region"}
        unnamed = [
            one for one in nodes if not one["ignored"] and one["role"]["value"] in roles and not one["name"]["value"]
        ]
        assert unnamed == []
        headings = [one["name"]["value"] for one in nodes if not one["ignored"] and one["role"]["value"] == "heading"]
        assert {"forebay", "Models", "All models", "Errors", "Try it", "Trace"} <= set(headings)
        page.eval("document.querySelector('#detail .plot').focus()")
        page.press("ArrowLeft")
        assert page.until("document.querySelector('#detail .chart-panel [aria-live]').textContent").startswith("now")
        summary = page.eval("document.querySelector('#detail svg.chart').getAttribute('aria-label')")
        assert summary.startswith("Requests, the last ")
        assert "1 minutes" not in summary
        page.press("Escape")
        assert page.eval("document.querySelector('#detail .tip').hidden")


PIPELINE = """
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Work(Op):
    pass

server = PipelineServer("ui")
server.set_response_op(ResponseOp(input_ops=[Work(name="work", input_ops=[RequestOp()])]))
server.prepare_server(yml_dict={"http_port": 18081, "dag": {"is_thread_op": True}})
server.run_server()
"""


GRAPH = """
import forebay

@forebay.node(worker_kind="thread")
def same(x: float) -> float:
    return x

@forebay.compose
def quick(x: float) -> float:
    return same(x)
"""


def test_a_graph_whose_nodes_have_little_to_do_is_not_called_idle(browser, serve, tmp_path):
    (tmp_path / "quick.py").write_text(GRAPH)
    server = serve(str(tmp_path / "quick.py"))
    told = "document.querySelector('.graph .figure').textContent"
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until(f"{told} === 'idle'")
        ask = "fetch('models/quick', {method: 'POST', headers: {'content-type': 'application/json'}, body: '1'})"
        once_a_second = f"Date.now() - (globalThis.asked ?? 0) > 1000 && (globalThis.asked = Date.now(), {ask})"
        page.until(f"({once_a_second}, {told} === 'hardly busy')")
        page.until(f"{told} === 'idle'")


def test_the_workers_of_every_version_and_their_devices_are_told_before_any_is_asked(browser, serve, models, tmp_path):
    about = {"target": f"{models}/watched.py:Iris", "weight": 1}
    versions = [{**about, "version": one, "devices": [device]} for one, device in (("1", "npu"), ("2", "gpu:3"))]
    file = tmp_path / "both.yaml"
    file.write_text(json.dumps({"models": versions, "worker_kind": "thread"}))
    server = serve(None, "--config", str(file))
    server.call("iris", CALLS["iris"])
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until(f"{ROW.format('iris')}.querySelector('td.workers').textContent === '2 up'")
        page.until("document.querySelector('#tiles').textContent.includes('2 slots')")
        page.until("document.querySelector('.crew .devices')?.textContent === 'npugpu:3'")
        page.until(f"{ROW.format('iris')}.querySelector('td.total').textContent === '1'")
        assert page.said == []


def test_repositories_are_told(browser, serve, tmp_path):
    for name, text in (("here", "Hi"), ("elsewhere", "Hello"), ("<b>", "no name of a model")):
        (tmp_path / "texts" / name / "1").mkdir(parents=True)
        (tmp_path / "texts" / name / "1" / "text.txt").write_text(text)
    more = ["--worker-kind", "thread", "--max-models", "1"]
    server = serve("stocked.py", *more, env={"FOREBAY_TEST_BUCKET": str(tmp_path / "texts")})
    for _ in range(3):
        assert server.call("here", "you").json() == "Hi you"
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#repositories').hidden === false")
        page.until("document.querySelector('#repositories').textContent.includes('1 in memory')")
        told = page.text("#repositories")
        assert str(tmp_path / "texts") in told
        assert "2 models with 2 versions" in told
        assert "67" in told  # percent of the requests found their model there
        assert "<b>/ cannot be the name of a model" in told
        assert "not in memory" in page.eval(f"{ROW.format('elsewhere')}.textContent")
        assert page.eval(f"{ROW.format('elsewhere')}.querySelector('td.workers').dataset.alarm ?? null") is None
        assert page.said == []


def test_a_pipeline_has_it_beside_its_services(browser, serve, tmp_path):
    (tmp_path / "server.py").write_text(PIPELINE)
    server = serve(tmp_path / "server.py", env={"XDG_STATE_HOME": str(tmp_path)})
    asked = {"key": ["x"], "value": ["1"]}
    # A service may be called what our page is called: its requests are its own.
    assert server.client.post("/ui/models", json=asked).json()["err_no"] == 0
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until("document.querySelector('#link').dataset.state === 'live'")
        assert page.eval("location.pathname") == "/ui/"
        page.until("document.querySelectorAll('.drawing g[data-endpoint]').length === 1")
        server.client.post("/ui/prediction", json=asked)
        page.until(f"Number({ROW.format('ui')}.querySelector('td.rate b').textContent) > 0")
        assert page.eval("getComputedStyle(document.querySelector('#try')).display") == "none"
        assert page.said == []


def test_a_cluster_is_shown_with_its_nodes_and_programs(browser, launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    peers = [f"--attach-peer=unix:{folder}/{name}" for name in ("here", "away")]
    server = launch(None, "--attach", f"unix:{folder}/here", *peers)
    node = {"name": HOSTILE, "is_here": True, "owns": ["iris"], "workers": 2, "door": "tcp:10.0.0.7:9100", "away": ""}
    told = {
        "deployment": "main",
        "version": 7,
        "nodes": [node, {**node, "name": "b", "is_here": False, "is_draining": True, "away": "it cannot be reached"}],
        "processes": [{"name": "front", "starts": 2, "is_ready": False, "problem": HOSTILE}],
        "problems": [],
        "programs": [{"address": "tcp:10.0.0.7:9200", "servings": [HOSTILE, "clip"]}],
        "program_count": 3,
    }
    with browser.page(390) as page:
        page.open(f"{server.url}/")
        page.until("!document.querySelector('#cluster').hidden")
        assert "away" in page.text("#cluster")
        assert "0 programs with servings" in page.text("#cluster")
        page.eval(
            "(async () => { const { Cluster } = await import('./ui/cluster.js');"
            "const host = document.createElement('section'); host.id = 'shown'; document.body.append(host);"
            f"new Cluster(host).learn({json.dumps(told)}); }})()"
        )
        page.until("document.querySelector('#shown h2')")
        text = page.text("#shown")
        assert "Deployment main, version 7" in text
        assert "forebay cluster resume b --deployment main" in text
        assert "this node · owns iris · 2 workers · programs join at tcp:10.0.0.7:9100" in text
        assert "it cannot be reached" in text
        assert "3 programs with servings; 2 of them are not listed" in text
        assert page.eval("window.hacked ?? null") is None


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_tenants_are_shown_with_what_they_got_and_were_refused(
    browser, launch, models, tmp_path_factory, width, scheme
):
    file = tmp_path_factory.mktemp("tenants") / "all.yaml"
    keys = {"team-a": "key-a", "team-b": "key-b"}
    file.write_text(
        json.dumps(
            {
                "models": [{"target": str(models / "costly.py"), "worker_kind": "thread"}],
                "http": {"api_keys": keys, "worker_second_price": 100.0},
                "tenants": {"team-a": {"weight": 3}},
            }
        )
    )
    server = launch(None, "--config", str(file))
    assert server.client.get("/ui/tenants").status_code == 401
    assert server.client.get("/ui/tenants", headers={"x-api-key": "key-a"}).json() == {"price": 100.0, "tenants": []}
    with browser.page(width, media=[("prefers-color-scheme", scheme)]) as page:
        page.open(f"{server.url}/ui").until("document.querySelector('#login').open")
        page.write("#login-key", "key-a")
        page.click("#login button")
        page.until("document.querySelector('#tenants .teach')?.checkVisibility()")
        assert "No tenant has called" in page.text("#tenants")
        for name, key in keys.items():
            assert server.client.post("/models/costly", json=1, headers={"x-api-key": key}).status_code == 200, name
        late = {"x-api-key": "key-b", "x-request-timeout-ms": "1"}
        eventually(lambda: server.client.post("/models/costly", json=1, headers=late).status_code == 503)
        page.until("document.querySelector('#tenants').textContent.includes('too late')")
        rows = page.eval(
            "[...document.querySelectorAll('#tenants tbody tr')].map(row => Object.fromEntries("
            "[['name', row.querySelector('b').textContent],"
            " ...[...row.querySelectorAll('td')].map(one => [one.className, one.textContent])]))"
        )
        shown = {row["name"]: row for row in rows}
        assert [shown[name]["promised"] for name in sorted(keys)] == ["75\u202f%", "25\u202f%"]
        assert sum(int(shown[name]["got"].partition("\u202f")[0]) for name in keys) in {99, 100, 101}
        assert "too late" in shown["team-b"]["refused"]
        assert shown["team-a"]["refused"] == "0"
        assert float(shown["team-a"]["cost"]) > 0.0
        assert page.eval("document.documentElement.scrollWidth") <= width
        assert all("401" in line for line in page.said)
