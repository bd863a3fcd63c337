# SPDX-License-Identifier: Apache-2.0
"""Every setting is declared once: flags, variables, keys of files, attributes of classes and the page agree."""

from __future__ import annotations

import json
import os
import re
import shlex
import time

import pytest
from tests.settings.page import FILE_PAGE, PAGE, file_page, page

from forebay.cli.main import main
from forebay.server.config import SECTIONS, Overrides
from forebay.serving.models.misspelt_names import OUTSIDE
from forebay.serving.models.model import Model
from forebay.types.settings import declared

IRIS = """
import os
import forebay

class Iris(forebay.Model):
    max_batch_size = 5
    timeout_ms = 4000

    def predict(self, batch):
        return [os.environ.get("PLACE") for _ in batch]
"""
ROSE = IRIS.replace("Iris", "Rose")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model, and nothing said yet."""
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "iris.py").write_text(IRIS)
    (tmp_path / "rose.py").write_text(ROSE)
    return tmp_path


@pytest.fixture
def check(folder, capsys):
    """Runs `forebay check` here; returns its status and what it wrote."""

    def run(words="", env="", file=None, name="forebay.yaml"):
        if file is not None:
            (folder / name).write_text(file)
        with pytest.MonkeyPatch.context() as patch:
            for variable in shlex.split(env):
                patch.setenv(*variable.split("=", 1))
            try:
                status = main(["check", *shlex.split(words)])
            except SystemExit as end:
                status = end.code
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


@pytest.fixture
def said(check):
    """What would be served, for what is said."""

    def run(*told, **more):
        status, out, err = check(*told, **more)
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def refused(check):
    """The one sentence that answers a mistake."""

    def run(*told, **more):
        status, out, err = check(*told, **more)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        return err.removeprefix("forebay: ").removesuffix("\n")

    return run


# ---------------------------------------------------------------------------------------------------------------------
# One source


def test_the_pages_are_what_the_structs_declare():  # F59
    assert PAGE.read_text() == page(), "write it again: python -m tests.settings.page"
    assert FILE_PAGE.read_text() == file_page(), "write it again: python -m tests.settings.page"


def test_the_file_with_every_key_is_read(tmp_path, cli):  # F59
    (tmp_path / "model.py").write_text(
        "import forebay\nclass M(forebay.Model):\n    def predict(self, batch): return batch\n"
    )
    text = file_page().split("```yaml\n")[1].removesuffix("```\n")
    (tmp_path / "forebay.yaml").write_text(re.sub(r"^( *)# (\w+: \S*)$", r"\1\2", text, flags=re.MULTILINE))
    result = cli("check", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_every_setting_is_told_about_and_its_ways_are_its_own():
    settings = [setting for struct in SECTIONS for setting in declared(struct).values()]
    assert all(setting.doc.endswith(".") for setting in settings), [one.name for one in settings if not one.doc]
    for way in ("flag", "variable"):
        ways = [one.written.flag if way == "flag" else one.variable for one in settings]
        told = [one for one in ways if one is not None]
        assert len(told) == len(set(told))
    assert all(setting.doc for setting in declared(Model).values())


def test_what_a_class_says_may_be_said_from_outside_in_the_same_range():
    classes, outside = declared(Model), declared(Overrides)
    common = classes.keys() & outside.keys()
    assert common >= {"max_batch_size", "max_wait_ms", "timeout_ms", "max_queue", "policy", "latency_objective_ms"}
    for name in common:
        assert (classes[name].kind, classes[name].range) == (outside[name].kind, outside[name].range)


def test_help_names_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for struct in SECTIONS:
        for setting in declared(struct).values():
            if setting.written.flag is not None:
                assert re.search(f" {setting.written.flag}(,| )", told), setting.written.flag
                assert not setting.usual or f"({setting.usual})" in told


@pytest.mark.parametrize("command", ["init", "serve", "check"])
def test_help_begins_with_what_the_command_does_in_lines_that_are_not_too_long(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: forebay {command} [")
    assert lines[1] == ""
    assert max(map(len, lines)) <= 120
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(set(headings)) == len(headings)
    assert "gRPC:" in headings or command == "init"  # it is for every model, not for pipelines only


# ---------------------------------------------------------------------------------------------------------------------
# Who is heard


@pytest.mark.parametrize(
    "flag, env, file, size",
    [
        ("--max-batch-size 2", "FOREBAY_MAX_BATCH_SIZE=3", "max_batch_size: 4", 2),
        ("", "FOREBAY_MAX_BATCH_SIZE=3", "max_batch_size: 4", 3),
        ("", "FOREBAY_MAX_BATCH_SIZE=", "max_batch_size: 4", 4),
        ("", "", "models: [{target: iris.py, max_batch_size: 6}]\nmax_batch_size: 4", 6),
        ("", "", "workers: 2", 5),
        ("", "", "", 5),
    ],
)
def test_a_flag_wins_over_a_variable_over_a_file_over_a_class(said, flag, env, file, size):
    target = "" if "models" in file else "iris.py"
    told = said(f"{target} --config any.yml {flag}", env, file=file, name="any.yml")
    assert f"batches of up to {size} " in told


def test_what_nobody_says_is_the_default(said, folder):
    (folder / "plain.py").write_text(
        "import forebay\nclass Plain(forebay.Model):\n    def predict(self, b): return b\n"
    )
    assert "batches of up to 64 (gather), 1 worker slot, timeout 30000 ms" in said("plain.py")


def test_what_a_class_cannot_say_is_said_from_outside():  # F53
    assert set(OUTSIDE) <= set(Overrides.__struct_fields__) - set(Model.__annotations__)


def test_what_streams_says_how_many_streams(said, folder):
    (folder / "tales.py").write_text(
        "import forebay\n"
        "class Tale(forebay.Model):\n"
        "    max_batch_size = 16\n"
        "    def start(self, sample: int) -> int: return sample\n"
        "    def step(self, states: list[int]) -> list[forebay.Last[int]]: return [forebay.Last(1) for _ in states]\n"
        "class Told(forebay.Model):\n"
        "    max_batch_size = 4\n"
        "    def predict(self, b: list[int]): yield b\n"
    )
    assert "/models/tale  version 1, up to 32 streams at a time, timeout" in said("tales.py:Tale --workers 2")
    assert "/models/told  version 1, batches of up to 4 (go), up to 4 streams at a time" in said("tales.py:Told")


def test_a_switch_is_turned_off_again_from_nearer(folder, serve):
    server = serve(folder / "iris.py", "--worker-kind", "thread", "--no-access-log", env={"FOREBAY_ACCESS_LOG": "yes"})
    server.call("iris", 1)
    server.signal()
    assert server.wait() == 0
    assert [record["logger"] for record in server.records] == ["forebay"]  # and not forebay.access


# ---------------------------------------------------------------------------------------------------------------------
# The file


def test_a_file_of_any_name_says_it_all(folder, serve):
    (folder / "keys.txt").write_text("sesame\n")
    (folder / "prod.yaml").write_text(
        "models:\n"
        "  - iris.py\n"
        "  - {target: rose.py, name: german, version: 1.10, env: {PLACE: Weimar}, workers: 2}\n"
        "env: {PLACE: home}\n"
        "http: {api_keys: ['@keys.txt'], keep_alive_s: 5}\n"
        "log: {format: json, level: warning}\n"
        "drain: 1.5\n"
    )
    server = serve(None, "--config", str(folder / "prod.yaml"))
    assert server.call("iris", 1).status_code == 401
    assert server.call("iris", 1, x_api_key="sesame").json() == "home"
    assert server.call("german", 1, x_api_key="sesame").json() == "Weimar"
    about = server.client.get("/models/german", headers={"x-api-key": "sesame"}).json()
    assert (about["version"], about["workers"]["slots"]) == ("1.10", 2)
    server.signal()
    assert server.wait() == 0
    assert "draining" not in server.log  # that is said at the level info


def test_a_single_target_stands_at_the_top(said):
    assert "POST /models/lily  version 3," in said(".", file="target: iris.py:Iris\nname: lily\nversion: 3\n")


def test_the_settings_of_a_file_hold_for_a_project_of_another_server(said, folder):
    (folder / "nucleus.yaml").write_text("type: python\npath: handler.py\n")
    (folder / "handler.py").write_text("class Handler:\n    def handle_post(self): return 1\n")
    assert "3 processes" in said(". --config mine.yaml", file="workers: 3\n", name="mine.yaml")


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    "file, told",
    [
        ("http:\n  port: 65536\n", "2: http.port: expected a whole number from 0 to 65535, got 65536"),
        ("http:\n  keep_alive_s: 0\n", "2: http.keep_alive_s: expected seconds > 0, such as 30 or 5m, got 0"),
        ("http:\n  read_timeout_s: .inf\n", "2: http.read_timeout_s: expected seconds > 0, such as 30 or 5m, got inf"),
        (
            "http: {max_head_bytes: 5}\n",
            "1: http.max_head_bytes: expected a whole number of bytes >= 256, such as 65536 or 10MB, got 5",
        ),
        ("http: {access_log: 1}\n", "1: http.access_log: expected true or false, got 1"),
        ("http: {api_keys: [1]}\n", "1: http.api_keys: expected a list of strings, got [1]"),
        *(
            (
                f"http: {{allowed_hosts: [a.example, '{host}']}}\n",
                "1: http.allowed_hosts: expected a host name such as models.example, without a port, or *, got",
            )
            for host in ("http://a", "a:80", "*.a", "a.", "schön.example", "")
        ),
        *(
            (
                f"http: {{cors_origins: ['*', '{origin}']}}\n",
                f"1: http.cors_origins: expected an origin as browsers send it, or *, got '{origin}'",
            )
            for origin in ("https://a/", "a", "https://*.a", "//a", "https://a:", "http://a:80", "https://a:443", "")
        ),
        (
            "http: {allowed_hosts: a:80}\n",
            "1: http.allowed_hosts: expected a host name such as",
        ),
        (
            "http: {cors_origins: a.example}\n",
            "1: http.cors_origins: expected an origin as browsers send it, or *, got 'a.example'",
        ),
        ("http: 9000\n", "1: http: expected a mapping of keys to values, got 9000"),
        ("workers: yes\n", "1: workers: expected a whole number from 0 to 1024"),
        ("max_wait_ms: -1\n", "1: max_wait_ms: expected milliseconds >= 0, such as 500 or 2s, got -1"),
        ("idle: gahter\n", "1: idle: expected 'gather', 'go' or 'wait', got 'gahter'; did you mean 'gather'?"),
        ("max_batchsize: 3\n", "1: max_batchsize: unknown key; did you mean max_batch_size?"),
        ("log: {leve: info}\n", "1: log.leve: unknown key; did you mean level?"),
        ("http: {body_bytes: 5}\n", "1: http.body_bytes: unknown key; did you mean max_body_bytes?"),
        ("poll_s: 5\n", "1: poll_s: unknown key; did you mean repository: {poll_s: ...}?"),
        ("http.port: 5\n", "1: http.port: unknown key; did you mean http: {port: ...}?"),
        ("http_port: 5\n", "1: http_port: unknown key; did you mean http: {port: ...}?"),
        ("config: other.yaml\n", "1: config: unknown key"),
        ("drain: soon\n", "1: drain: expected seconds >= 0, such as 30 or 5m, got 'soon'"),
        ("attach: {adress: unix:x}\n", "1: attach.adress: unknown key; did you mean address?"),
        ("env: {A: [1]}\n", "1: env.A: expected a string or a number, got [1]"),
        ("devices: [cuda:x]\n", "1: devices: expected a device such as cpu"),
        ("models: [{target: iris.py:Rosa}]\n", "1: iris.py has no forebay.Model named Rosa"),
        ("models:\n  - iris.py\n  - target: isis.py\n", "3: there is no file isis.py; did you mean iris.py?"),
        ("env: {A: b}\nworker_kind: thread\ntarget: iris.py\n", "3: an environment of its own needs worker kind"),
        ("models:\n  - target: iris.py\n    name: a/b/c\n", "3: name: expected letters, digits"),
        ("models:\n  - target: iris.py\n    version: a/b\n", "3: version: expected letters, digits"),
        ("models: iris.py\n", "1: models: expected a list with at least one model, each with a target"),
        ("models:\n  - iris.py\n  - iris.py\n", "3: two models are named 'iris'; give one of them another `name`"),
        ("models: [iris.py, rose.py]\nname: both\n", "2: name: it holds for one model, and there are 2"),
        ("models: [iris.py]\ntarget: rose.py\n", "2: target: there are models as well; put it among them"),
        (
            "target: iris.py\ntimeout_ms: 5000\nmax_timeout_ms: 900\n",
            "2: timeout_ms is 5000, more than max_timeout_ms, ",
        ),
        ("max_timeout_ms: 900\nmodels:\n  - target: iris.py\n    timeout_ms: 901\n", "4: timeout_ms is 901, more "),
        (
            "target: iris.py\ntimeout_ms: 3600001\n",
            "2: timeout_ms is 3600001, more than max_timeout_ms, which is 3600000",
        ),
        ("models: [iris.py, rose.py]\nmax_timeout_ms: 900\n", "1: Iris: timeout_ms is 4000, more than max_timeout_ms"),
        ("target: iris:Iris\n", "1: there is no file iris:Iris; did you mean iris.py:Iris?"),
        ("target: iris.py\nlog_level: debug\n", "2: log_level: unknown key; did you mean log: {level: ...}?"),
        ("http: {port: 1}\n", "1: models: expected a list with at least one model"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_sentence_with_its_place(refused, file, told):
    assert refused(".", file=file).startswith(f"forebay.yaml:{told}")


def test_a_secret_that_is_too_short_is_told_with_its_file(refused):
    told = refused(".", file="attach: {address: 'unix:x', secret: x}\n")
    assert told.startswith("forebay.yaml: secret: expected a secret of at least 16 bytes, got 1; make one with")


@pytest.mark.parametrize(
    "env, told",
    [
        (
            "FOREBAY_HTTP_PORT=http://10.0.0.1:80",
            "FOREBAY_HTTP_PORT: expected a whole number from 0 to 65535, got 'http://10.0.0.1:80'",
        ),
        ("FOREBAY_API_KEY=", "FOREBAY_API_KEY: expected at least one value, got ''"),  # F112
        ("FOREBAY_SECRET=", "FOREBAY_SECRET: expected a secret of at least 16 bytes, got 0"),  # F112
        ("FOREBAY_NAME=a/b/c", "FOREBAY_NAME: expected letters, digits, '.', '_' and '-', starting with"),
        ("FOREBAY_DRAIN_S=nan", "FOREBAY_DRAIN_S: expected seconds >= 0, such as 30 or 5m, got 'nan'"),
        ("FOREBAY_ACCESS_LOG=maybe", "FOREBAY_ACCESS_LOG: expected true or false, got 'maybe'"),
        ("FOREBAY_WORKER_KIND=proces", "FOREBAY_WORKER_KIND: expected 'inline', 'process' or 'thread', got 'proces'"),
    ],
)
def test_what_is_wrong_in_the_environment_is_one_sentence(refused, env, told):
    assert refused("iris.py", env).startswith(told)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            "iris.py --http-port 65536",
            "argument --http-port/--port: expected a whole number from 0 to 65535, got '65536'",
        ),
        (
            "iris.py --workers 1000000",
            "argument --workers: expected a whole number from 0 to 1024",
        ),
        (
            "iris.py --threads 1000000",
            "argument --threads: expected a whole number from 1 to 1024, got '1000000'",
        ),
        ("iris.py --workers 1024 --threads 1024", "expected at most 65536 slots for a model or op, got 1024 workers"),
        ("iris.py --keep-alive-s 0", "argument --keep-alive-s: expected seconds > 0, such as 30 or 5m, got '0'"),
        ("iris.py --keep-alives 5", "unrecognized arguments: --keep-alives 5; did you mean --keep-alive-s?"),
        ("iris.py --timeout 5", "unrecognized arguments: --timeout 5; did you mean --timeout-ms?"),
        ("iris.py --worker 5", "unrecognized arguments: --worker 5; did you mean --workers?"),
        (
            "iris.py rose.py",
            "unrecognized arguments: rose.py; give one TARGET, or several in the file of --config; see forebay",
        ),
        ("iris.py --poll-s 5", "unrecognized arguments: --poll-s 5; did you mean --repository-poll-s?"),
        (
            "iris.py --timeout-ms 50 --max-timeout-ms 49",
            "iris.py: timeout_ms is 50, more than max_timeout_ms, which is 49",
        ),
        ("iris.py --max-timeout-ms 900", "Iris: timeout_ms is 4000, more than max_timeout_ms, which is 900"),
        ("--config nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory"),
        (
            "iris.py --config two.yaml",
            "two.yaml:1: models: expected TARGET or models in the file, got both (iris.py)",
        ),
        (". --config two.yaml", ". is a configuration, and --config names another one"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_sentence(refused, folder, words, told):
    (folder / "two.yaml").write_text("models: [rose.py]\n")
    if words.startswith(". "):
        (folder / "forebay.yaml").write_text("target: rose.py\n")
    assert refused(words).startswith(told)


def test_the_usual_time_of_a_model_is_no_longer_than_the_longest(folder, check):
    (folder / "plain.py").write_text(IRIS.replace("    timeout_ms = 4000\n", ""))
    assert "timeout 900 ms" in check("plain.py --max-timeout-ms 900")[1]
    (folder / "forebay.yaml").write_text("target: iris.py\ntimeout_ms: 5000000\n")
    status, out, _ = check("--config forebay.yaml --timeout-ms 7000000 --max-timeout-ms 8000000")
    assert (status, "timeout 7000000 ms" in out) == (0, True)


def test_a_variable_that_nothing_reads_is_answered_with_the_nearest(check):
    _, _, err = check("iris.py", "FOREBAY_POLL_S=2")
    assert err.endswith("FOREBAY_POLL_S; did you mean FOREBAY_REPOSITORY_POLL_S?\n")
    _, _, err = check("iris.py", "FOREBAY_PORT=9000")  # F111: it is no address of a service
    assert err.endswith("FOREBAY_PORT; did you mean FOREBAY_HTTP_PORT?\n")
    env = "FOREBAY_WORKRES=2 FOREBAY_SERVICE_HOST=10.0.0.1 FOREBAY_PORT=tcp://10.0.0.1:80 FOREBAY_PORT_80_TCP_ADDR=x"
    status, out, err = check("iris.py", env)
    assert (status, "iris" in out) == (0, True)
    assert err == "forebay: warning: nothing reads the variable FOREBAY_WORKRES; did you mean FOREBAY_WORKERS?\n"


@pytest.mark.parametrize("service", ["forebay", "forebay-http", "forebay-grpc", "forebay-nucleus"])
@pytest.mark.parametrize("host", ["10.0.0.1", "[fd00::1]"])
def test_variables_that_kubernetes_sets_for_a_service_set_nothing(check, service, host):  # F111
    prefix = service.upper().replace("-", "_")
    url = f"tcp://{host}:80"
    named = {"SERVICE_HOST": host, "SERVICE_PORT": "80", "SERVICE_PORT_HTTP_1": "80", "PORT": url, "PORT_80_TCP": url}
    named |= {"PORT_80_TCP_PROTO": "tcp", "PORT_80_TCP_PORT": "80", "PORT_80_TCP_ADDR": host, "PORT_53_UDP": url}
    status, out, err = check("iris.py", " ".join(f"{prefix}_{name}={value}" for name, value in named.items()))
    assert (status, "iris" in out) == (0, True), err
    is_setting = service in {"forebay-http", "forebay-grpc"}
    ignored = f"ignored the variable {prefix}_PORT: {url!r} is the address of a Kubernetes service, not a port"
    assert err == (f"forebay: warning: {ignored}\n" if is_setting else "")


@pytest.mark.parametrize("value", ["", "''", "['']", "[' ']", "['@keys']", "['k', '@keys']"])
def test_an_empty_key_in_a_file_does_not_open_the_server(refused, folder, value):  # F112
    (folder / "keys").write_text("# only a comment\n\n  # and another\n")
    told = refused(".", file=f"target: iris.py\nhttp:\n  api_keys: {value}\n")
    assert re.match(
        r"forebay\.yaml(:3)?: (http\.)?api_keys: expected a key, got (null|''|.*keys, which has none)", told
    )


def test_an_empty_secret_in_a_file_is_an_error(refused):  # F112
    told = refused(".", file="target: iris.py\nattach:\n  address: unix:s\n  secret:\n")
    assert told.startswith("forebay.yaml:4: attach.secret: expected a key, got null")


def test_keys_and_secrets_on_the_command_line_are_warned_of(check, folder):  # F134
    (folder / "keys").write_text("a key of the tests\n")
    secret = "--attach unix:s --attach-secret"
    _, _, err = check(f"iris.py --api-key @keys {secret} @keys", "FOREBAY_API_KEY=other")
    assert err == ""
    _, _, err = check(f"iris.py --api-key @keys --api-key visible {secret} 0123456789abcdef")
    assert err == "".join(
        f"forebay: warning: {flag} shows its value in the process list; give @FILE or {variable}\n"
        for flag, variable in [("--api-key", "FOREBAY_API_KEY"), ("--attach-secret", "FOREBAY_SECRET")]
    )


def test_several_models_cannot_share_a_name(refused, folder):
    (folder / "both.py").write_text(IRIS + ROSE)
    told = refused(".", file="target: both.py\nname: one\n")
    assert (
        told
        == "forebay.yaml:1: ./both.py has several that are served (Iris, Rose), and one name; say which: ./both.py:NAME"
    )


# ---------------------------------------------------------------------------------------------------------------------
# What nothing could set before


def test_limits_of_connections_are_settings(folder, serve):
    limits = ["--max-head-bytes", "400", "--keep-alive-s", "0.3", "--read-timeout-s", "0.3", "--max-timeout-ms", "9000"]
    server = serve(folder / "iris.py", "--worker-kind", "thread", *limits)
    with server.connect() as wire:
        assert wire.ask("POST", "/models/iris", b"1", headers=["x-long: " + "a" * 500]).status == 431
    with server.connect() as idle, server.connect() as slow:
        assert idle.ask("POST", "/models/iris", b"1").status == 200
        slow.send(slow.head("POST", "/models/iris", "content-length: 5"))
        started = time.monotonic()
        assert slow.read().status == 408
        assert idle.read_rest() == b""
        assert time.monotonic() - started < 20


def test_logs_are_json_where_the_environment_says_so(folder, serve):
    server = serve(folder / "iris.py", env={"FOREBAY_LOG_FORMAT": "text", "FOREBAY_WORKER_KIND": "thread"})
    server.signal()
    assert server.wait() == 0
    assert re.search(r"\d\d:\d\d:\d\d info +SIGTERM: draining", server.log)
    assert not any(line.startswith("{") and json.loads(line) for line in server.lines)


# ---------------------------------------------------------------------------------------------------------------------
# Units, and what holds


@pytest.mark.parametrize(
    "flag,text,name,value",
    [
        ("--max-body-bytes", "10MB", "http.max_body_bytes", 10_000_000),
        ("--max-body-bytes", "2mib", "http.max_body_bytes", 2_097_152),
        ("--max-body-bytes", "0.5Ki", "http.max_body_bytes", 512),
        ("--max-body-bytes", "77", "http.max_body_bytes", 77),
        ("--timeout-ms", "1.5s", "timeout_ms", 1500),
        ("--max-wait-ms", "0.25s", "max_wait_ms", 250),
        ("--drain-s", "500ms", "drain", 0.5),
        ("--drain-s", "2h", "drain", 7200),
    ],
)
def test_an_amount_may_have_a_unit_wherever_it_is_told(said, flag, text, name, value):
    section, _, key = name.rpartition(".")
    variable = "FOREBAY_" + flag.removeprefix("--").replace("-", "_").upper()
    file = "target: iris.py\n" + (f"{section}: {{{key}: {text}}}" if section else f"{key}: {text}")
    ways = {
        flag: said(f"iris.py {flag} {text} --settings"),
        variable: said("iris.py --settings", f"{variable}={text}"),
        f"forebay.yaml: {key}": said("forebay.yaml --settings", file=file),
    }
    for source, told in ways.items():
        (line,) = [line for line in told.splitlines() if line.startswith(f"{name} ")]
        _, got, of = line.split(maxsplit=2)
        assert (float(got), of) == (value, source)


@pytest.mark.parametrize(
    "flag,text",
    [("--max-body-bytes", "10s"), ("--drain-s", "1MB"), ("--timeout-ms", "0.1ms"), ("--drain-s", "1e3s")],
)
def test_an_amount_with_a_wrong_unit_is_refused_with_an_example(refused, flag, text):
    wanted = rf"{flag}: expected .*, such as \d+ or \d+(MB|m|s), got '{text}'"
    assert re.search(wanted, refused(f"iris.py {flag} {text}"))


def test_settings_that_hold_say_where_they_come_from_and_hide_keys(said, folder):
    (folder / "keys.txt").write_text("sesame\n")
    told = said("iris.py --api-key @keys.txt --port 9000 --settings")
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in told.splitlines()}
    assert lines["http.port"] == ["9000", "--http-port"]
    assert lines["http.host"] == ["127.0.0.1", "default"]
    assert "(not shown)" in told
    assert "sesame" not in told
    assert set(lines) >= {"workers", "timeout_ms", "log.level", "grpc.port", "attach.secret"}


def test_settings_of_models_are_shown_where_they_differ_from_those_of_all(said, folder):
    model = "class {0}(forebay.Model):\n    {1}\n    def predict(self, batch: list[int]) -> list[int]: ...\n"
    names = [f"M{number}" for number in range(6)]
    own = ["stream_idle_ms = 0; timeout_ms = 5000"] + ["timeout_ms = 5000"] * 4 + ["max_queue = 7; timeout_ms = 60000"]
    (folder / "several.py").write_text("import forebay\n" + "".join(map(model.format, names, own)))
    table = said("several.py --settings --max-queue 7")
    rows = [tuple(line.split(maxsplit=2)) for line in table.splitlines()]
    rows = [row for row in rows if row[0] in {"stream_idle_ms", "timeout_ms", "max_queue"}]
    # What is left out of the row of all models holds for none of them.
    assert rows == [
        ("timeout_ms", "5000", "model m0, m1, m2 and 2 more"),
        ("timeout_ms", "60000", "model m5"),
        ("stream_idle_ms", "30000", "default"),
        ("stream_idle_ms", "0", "model m0"),
        ("max_queue", "7", "--max-queue"),
    ]
