# SPDX-License-Identifier: Apache-2.0
"""The command line: it teaches, and whatever a person gets wrong is one sentence with the place and the cure."""

import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from tests.forked import COMMAND, Forked

ROOT = Path(__file__).parents[2]

MODEL = """import forebay


class Iris(forebay.Model):
    def predict(self, batch):
        return batch
"""


@pytest.fixture
def write(tmp_path):
    """Writes a model file."""

    def make(text, name="model.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


@pytest.fixture(scope="module")
def zoo(launch):
    return launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")


def sentence(result, status=2):
    """The one line that a failed command wrote."""
    assert (result.returncode, result.stdout) == (status, ""), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("forebay: ")
    assert "Traceback" not in result.stderr
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# Help


def test_help_teaches_with_examples(cli):
    text = cli("--help").stdout
    for word in ("forebay serve model.py", "forebay check model.py", "forebay call http"):
        assert word in text


@pytest.mark.parametrize("command", ["serve", "check", "call", "bench", "init"])
def test_every_command_has_help_that_names_each_argument(cli, command):
    result = cli(command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert {"call": "DATA", "bench": "DATA", "init": "NAME"}.get(command, "TARGET") in result.stdout
    for line in result.stdout.splitlines():  # no option without a word on it, alone in its line or with text beside
        assert not re.fullmatch(r"  --\S+", line), line


def test_help_names_the_defaults(cli):
    text = cli("serve", "--help").stdout
    for default in ("127.0.0.1", "8080", "30000", "4096", "(process)", "(30)"):
        assert default in text


def test_help_names_every_target_and_protocol(cli):
    text = " ".join(cli("serve", "--help").stdout.split())
    for word in ("folder of a SavedModel", "KServe v2 and TensorFlow Serving over gRPC"):
        assert word in text


def test_no_command_shows_the_help(cli):
    result = cli()
    assert result.returncode == 2
    assert "examples:" in result.stdout + result.stderr


def test_version_is_told(cli):
    assert re.fullmatch(r"forebay \d+\.\d+\.\d+\n", cli("--version").stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "zoo.py"],
        ["call", "URL/models/echo", "1"],
        ["call", "URL/models/count", "3"],
        ["bench", "URL/models/echo", "1", "--seconds", "0.3", "--warmup-s", "0"],
    ],
)
def test_a_command_ends_silently_when_nobody_reads_on(zoo, models, arguments):  # as before `| head -1`
    read, write = os.pipe()
    os.close(read)
    command = [*COMMAND, *(one.replace("URL", zoo.url) for one in arguments)]
    with Forked(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=models) as process:
        os.close(write)
        said = process.communicate()[1]
    assert process.returncode == 141
    assert [line for line in said.splitlines() if not line.startswith("200 ")] == []


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.py"], ["nowhere.py", "no file"]),
        (["model.txt"], ["model.txt"]),
        (["model:Iris"], ["model:Iris does not exist; did you mean model.py:Iris?"]),
        (["pkg.sub.nets"], ["pkg.sub.nets does not exist; did you mean pkg/sub/nets.py?"]),
        (["./pkg/sub.nets:Net"], ["did you mean ./pkg/sub/nets.py:Net?"]),
        (["pkg.sub.nets.Net"], ["did you mean pkg/sub/nets.py:Net?"]),
        (["pkg/sub/nets.py::Net"], ["did you mean pkg/sub/nets.py:Net?"]),
        (["pkg/sub"], ["pkg/sub is a folder without a project file; did you mean pkg/sub/nets.py?"]),
        (["{model}", "-p", "80"], ["did you mean --port?"]),
        (["pkg/nul.py"], ["pkg/nul.py", "null bytes"]),
        (["triton"], ["a model of Triton's Python backend", "docs/how-to/coming-from/triton.md"]),
        (["triton/add/1"], ["a model of Triton's Python backend"]),
        ([""], ["TARGET: expected a file or a folder, got ''"]),
        (["x" * 5000 + ".py"], ["x" * 200 + "... cannot be looked at: File name too long"]),
        (["{model}:"], ["no name follows the colon of '{model}:'", "{model} alone"]),
        (["{model}:iriss"], ["iriss", "did you mean Iris?"]),
        (["{model}", "--worker-kind", "fork"], ["fork", "process"]),
        (
            ["{model}", "--attach", "here"],
            ["forebay: --attach: expected unix:PATH or tcp:HOST:PORT, got 'here'", "did you mean unix:here?"],
        ),
        (["{model}", "--wokers", "2"], ["--wokers", "did you mean --workers?"]),
        (["{model}", "--workers", "0"], ["workers is 0", "need a door: --attach ADDRESS"]),
        (["{model}", "--workers", "-1"], ["--workers", "'-1'", "from 0 to 1024"]),
        (["--config", "x" * 300 + "/forebay.yaml"], ["x/forebay.yaml cannot be read: File name too long"]),
        (["{model}", "--workers", "many"], ["--workers", "many"]),
        (["{model}", "--max-wait-ms", "-1"], ["--max-wait-ms", "-1"]),
        (["{model}", "--drain-s", "nan"], ["--drain-s", "nan"]),
        (["{model}", "--http-port", "eighty"], ["--http-port", "eighty"]),
        (["{model}", "--name", "a b/c"], ["--name", "'a b/c'", "letters, digits"]),
        (["{model}", "--idle", "nap"], ["--idle", "nap", "gather"]),
        (["{model}", "--api-key", "@nowhere"], ["nowhere", "No such file"]),
        ([], ["TARGET"]),
    ],
)
def test_a_wrong_target_or_option_is_named(cli, write, tmp_path, arguments, words):
    names = {"model": str(write(MODEL)), "folder": str(tmp_path / "empty")}
    for folder in ("empty", "pkg", "pkg/sub"):
        (tmp_path / folder).mkdir()
    write(MODEL, "pkg/sub/nets.py")
    write("a = 1\0", "pkg/nul.py")
    (tmp_path / "triton/add/1").mkdir(parents=True)
    write("class TritonPythonModel: ...\n", "triton/add/1/model.py")
    said = sentence(cli("check", *[argument.format(**names) for argument in arguments], cwd=tmp_path))
    for word in words:
        assert word.format(**names) in said


def test_a_tenant_that_no_key_names_is_a_warning(cli, write):
    write(MODEL)
    config = {
        "target": "model.py",
        "http": {"api_keys": {"team-b": ["k1"], "shop": ["k2"]}},
        "tenants": {"team-c": {"weight": 2}, "shop": {"weight": 1}, "*": {"weight": 1}},
    }
    told = cli("check", write(json.dumps(config), "forebay.yaml"))
    assert told.returncode == 0
    (warning,) = told.stderr.splitlines()
    assert warning.endswith("tenants: no API key has the name 'team-c'; did you mean 'team-b'?")


def test_a_zero_in_a_text_of_a_file_is_told_with_its_line(cli, write):
    told = sentence(cli("check", write('models:\n- target: "a\\0b.py"\n', "forebay.yaml")))
    assert "forebay.yaml:2: 'a\\x00b.py' has a zero byte" in told


@pytest.mark.parametrize("target", ["locked/model.py", "locked/forebay.yaml", "locked/net.onnx", "locked"])
def test_a_folder_that_is_closed_to_the_user_is_told(tmp_path, target):
    (tmp_path / "locked").mkdir(mode=0)
    run = "import sys; from forebay.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "check", f"{tmp_path}/{target}"]
    if os.geteuid() == 0:  # to whom nothing is closed otherwise
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    assert "Permission denied" in sentence(subprocess.run(command, capture_output=True, text=True, check=False))


@pytest.mark.parametrize("command", ["check", "serve", "init"])
def test_a_folder_that_is_gone_is_told(tmp_path, command):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os; os.rmdir({str(gone)!r}); from forebay.cli.main import main; raise SystemExit(main())"
    arguments = [sys.executable, "-P", "-c", program, command, "model.py"]  # as the script starts it
    found = subprocess.run(arguments, cwd=gone, capture_output=True, text=True, check=False)
    assert "is gone; go to another one" in sentence(found)


def test_nucleus_tells_of_a_path_that_is_none_and_of_a_file_that_it_cannot_write(cli, tmp_path):
    for path in ("x" * 5000, "x" * 300 + "/nucleus.yaml"):
        assert "File name too long" in sentence(cli("nucleus", "generate", path))
    (tmp_path / "nucleus.yaml").write_text("type: python\npath: handler.py\n")
    (tmp_path / "handler.py").write_text("class Handler:\n    def handle_post(self):\n        return 1\n")
    (tmp_path / "nucleus.Dockerfile").mkdir()
    found = cli("nucleus", "generate", cwd=tmp_path)
    assert (found.returncode, "Traceback" in found.stderr) == (2, False)
    assert "nucleus.Dockerfile cannot be written: Is a directory" in found.stderr


def test_an_unknown_command_is_named_with_the_known_ones(cli):
    said = sentence(cli("sevre", "model.py"))
    assert "sevre" in said
    assert "serve" in said


@pytest.mark.parametrize(
    "helper, told",
    [
        ("x = 1\ndef f(x) return x\n", "helper.py:2: expected ':'"),
        ("import no_such_package\n", "helper.py:1 imports 'no_such_package'"),
        ("import json\njson.loads('{')\n", "helper.py:2 cannot be imported: JSONDecodeError"),
    ],
)
def test_what_is_wrong_in_a_file_that_the_model_imports_is_said_with_that_place(cli, write, tmp_path, helper, told):
    (tmp_path / "helper.py").write_text(helper)  # F57: model.py:1 was told
    result = cli("check", write("import helper\n" + MODEL))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"forebay: {tmp_path / told}")


@pytest.mark.parametrize("imports", ["from .helper import f", "from . import helper"])
def test_an_import_with_a_dot_in_a_folder_that_is_no_package_is_told_as_that(cli, write, tmp_path, imports):
    (tmp_path / "helper.py").write_text("f = 1\n")
    said = sentence(cli("check", write(f"{imports}\n" + MODEL)))
    assert "model.py:1 imports by a name that begins with a dot, and its folder is not a package" in said


@pytest.mark.parametrize(
    "written, told",
    [
        ("max_batch_size = 0", "model.py:5: Iris.max_batch_size: expected a whole number >= 1, got 0"),
        ("max_batchsize = 8", "model.py:5: Iris.max_batchsize is nothing"),
        ("workers = 2", "model.py:5: Iris.workers is nothing that a class says; say --workers, or `workers:`"),
        ("def load(self, weights): ...", "model.py:5: Iris.load(self, weights) is called without arguments"),
        ("name: str = 'a b'", "model.py:5: Iris.name: expected letters, digits"),
        ("version = '1/2'", "model.py:5: Iris.version: expected letters, digits"),
        ("def __init__(self, path): ...", "model.py:5: Iris.__init__(self, path)"),
    ],
)
def test_what_is_wrong_in_a_class_is_said_with_its_line(cli, write, written, told):  # F53
    assert told in sentence(cli("check", write(MODEL.replace("    def", f"    {written}\n\n    def"))))


def test_a_class_of_whose_name_no_endpoint_can_have_one_is_said_with_its_line(cli, write):
    said = sentence(cli("check", write(MODEL.replace("Iris", "_Iris"))))
    assert "model.py:4: _Iris.name: expected letters, digits" in said


def test_a_name_that_is_nowhere_is_told_those_that_are(cli, write):
    assert "has no forebay.Model named Q; there is Iris" in sentence(cli("check", f"{write(MODEL)}:Q"))
    target = write(MODEL + "\n\ndef plain(text):\n    return text\n")
    told = sentence(cli("check", f"{target}:plain"))
    assert "has no forebay.Model named plain, but a function; call plain in the method `predict` of a class" in told


def test_a_file_of_functions_is_told_them_and_how_to_serve_one(cli, write):
    target = write(
        "from json import loads\n" + "".join(f"def tell_{one}(text): ...\n" for one in "abcdef") + "def _g(): ...\n"
    )
    told = sentence(cli("serve", target))
    assert "defines no forebay.Model, only functions (tell_a, tell_b, tell_c, tell_d, tell_e, ...); call tell_a" in told
    assert told.endswith(f"`class TellA(forebay.Model): ...`, and serve that: forebay serve {target}:TellA")


@pytest.mark.parametrize(
    "text, words",
    [
        ("import forebay\nimport no_such_package\n", ["model.py:2", "no_such_package", "not installed"]),
        ("import forebay\n\n1 / 0\n", ["model.py:3", "ZeroDivisionError"]),
        ("import sys\nsys.exit(0)\n", ["model.py:2", "SystemExit"]),
        ("import forebay\n", ["model.py", "class MyModel(forebay.Model)"]),
        (MODEL.replace("predict", "forecast"), ["Iris", "predict"]),
        (MODEL.replace("(self, batch)", "(self)"), ["Iris.predict(self)", "def predict(self, batch)"]),
        (MODEL.replace("    def", "    max_batch_size = 0\n    def"), ["Iris.max_batch_size", "0", ">= 1"]),
        (MODEL.replace("    def", "    name = 'a//b'\n    def"), ["Iris.name", "a//b"]),
        (MODEL.replace("    def", "    max_wait_ms = 'long'\n    def"), ["Iris.max_wait_ms", "long"]),
        (MODEL + MODEL.replace("Iris", "Rose").replace("    def", "    name = 'iris'\n    def"), ["'iris'"]),
        (MODEL.replace("(self, batch)", "(self, batch: list[Missing])"), ["Missing"]),
        (MODEL.replace("(self, batch)", "(self, batch: int)"), ["predict", "list"]),
        (
            MODEL.replace("    def", "    max_batchsize = 8\n    def"),
            ["Iris.max_batchsize", "did you mean `max_batch_size`?"],
        ),
        (MODEL.replace("    def", "    def setup(self):\n        pass\n\n    def"), ["Iris.setup", "`load`"]),
        (MODEL.replace("    def", "    def __init__(self, path):\n        pass\n\n    def"), ["__init__(self, path)"]),
        ("\0", ["model.py"]),
    ],
)
def test_what_is_wrong_in_a_model_file_is_said_with_its_place(cli, write, text, words):
    said = sentence(cli("check", write(text)))
    for word in words:
        assert word in said


def test_a_file_that_is_no_text_is_named(cli, tmp_path):
    path = tmp_path / "model.py"
    path.write_bytes(b"\xff\xfe\x00nonsense")
    assert "model.py" in sentence(cli("check", path))


def test_a_port_in_use_is_found_before_models_are_loaded(cli, write):
    slow = write(
        MODEL.replace("    def", "    def load(self):\n        import time\n        time.sleep(30)\n\n    def")
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        said = sentence(cli("serve", slow, "--http-port", port))
        assert time.monotonic() - started < 25
    assert f"127.0.0.1:{port} is in use" in said
    assert "choose another port" in said


def test_serve_names_a_wrong_target_like_check_does(cli, write):
    assert "did you mean Iris?" in sentence(cli("serve", f"{write(MODEL)}:iriss", "--http-port", "0"))


@pytest.mark.parametrize("port", ["65536", "-1"])
def test_an_impossible_port_is_named_with_the_possible_ones(cli, write, port):
    said = sentence(cli("serve", write(MODEL), "--http-port", port))
    assert port in said
    assert "65535" in said


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", ""])
def test_an_address_that_is_not_ours_is_named(cli, write, host):
    said = sentence(cli("serve", write(MODEL), "--http-port", "0", "--host", host or "256.0.0.1"))
    assert (host or "256.0.0.1") in said


def test_tls_files_that_cannot_be_used_are_named(cli, write, tmp_path):
    (tmp_path / "cert.pem").write_text("nonsense")
    for name in ("nowhere.pem", "cert.pem"):
        assert name in sentence(cli("serve", write(MODEL), "--http-port", "0", "--certfile", tmp_path / name))


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("--certfile", "no.pem", "--http-port", "0"), "the TLS file no.pem: No such file or directory"),
        (("--certfile", "model.py"), "model.py holds no certificate in PEM"),
        (("--certfile", "cert.pem"), "cert.pem holds no private key; name the file that does with --keyfile"),
        (("--certfile", "cert.pem", "--keyfile", "model.py"), "model.py holds no private key"),
        (("--certfile", "cert.pem", "--keyfile", "other.pem"), "other.pem is the key of another certificate than that"),
        (("--certfile", "cert.pem", "--keyfile", "rsa.pem"), "rsa.pem is the key of another certificate than that"),
        (("--certfile", "cert.pem", "--keyfile", "locked.pem"), "the private key in locked.pem is encrypted"),
        (("--keyfile", "key.pem"), "--keyfile was given without --certfile"),
        (("--host", "no.such.host.invalid"), "the host 'no.such.host.invalid' leads to no address: "),
        (("--host", "[::1]"), "the host '[::1]' has brackets, which belong in URLs only; write ::1"),
        (("--host", "203.0.113.1"), "expected an address of this machine, or 0.0.0.0 for all, got 203.0.113.1"),
    ],
)
@pytest.mark.parametrize("command", ["check", "serve"])
def test_what_no_port_can_be_opened_with_is_told_by_check_already(cli, write, tmp_path, command, arguments, told):
    write(MODEL)
    mine, other = (trustme.CA().issue_cert("localhost") for _ in range(2))
    rsa = trustme.CA().issue_cert("localhost", key_type=trustme.KeyType.RSA)
    rsa.private_key_pem.write_to_path(tmp_path / "rsa.pem")
    mine.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    mine.private_key_pem.write_to_path(tmp_path / "key.pem")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    key = serialization.load_pem_private_key(mine.private_key_pem.bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    (tmp_path / "locked.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    said = sentence(cli(command, "model.py", *arguments, cwd=tmp_path))
    assert told in said.replace(f"{tmp_path}/", "")


def test_check_tells_of_a_host_that_no_worker_could_attach_at(cli, write):
    said = sentence(cli("check", write(MODEL), "--attach", "tcp:no.such.host.invalid:0", "--attach-secret", "x" * 16))
    assert "the host 'no.such.host.invalid' leads to no address: " in said


def test_check_tells_of_a_path_that_no_socket_could_have(cli, write, tmp_path):
    said = sentence(cli("check", write(MODEL), "--attach", "unix:nowhere/s", cwd=tmp_path))
    assert "the socket nowhere/s cannot be made: there is no folder nowhere; choose a path in a folder" in said
    said = sentence(cli("check", write(MODEL), "--attach", "unix:model.py", cwd=tmp_path))
    assert "model.py exists and is not a socket" in said
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        assert cli("check", write(MODEL), "--attach", "unix:s", cwd=tmp_path).returncode == 0
    assert (tmp_path / "s").exists()


def test_check_does_not_mind_a_port_that_is_in_use(cli, write):
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = cli("check", write(MODEL), "--http-port", str(other.getsockname()[1]))
    assert (found.returncode, found.stderr) == (0, "")


def test_a_key_without_a_certificate_is_a_mistake(cli, write, tmp_path):
    (tmp_path / "key.pem").write_text("nonsense")
    assert "--certfile" in sentence(cli("serve", write(MODEL), "--http-port", "0", "--keyfile", tmp_path / "key.pem"))


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["run", "model.py"], "did you mean serve?"),
        (["new", "project"], "did you mean init?"),
        (["model.py:Iris"], "did you mean forebay serve model.py:Iris?"),
        (["--workers", "2", "serve", "model.py"], "--workers stands before the command; write forebay serve first"),
    ],
)
def test_a_command_that_others_have_leads_to_ours(cli, arguments, hint):
    assert hint in sentence(cli(*arguments))


@pytest.mark.parametrize("keys", ["", " ", ",", ", ,"])  # F112
def test_a_variable_with_keys_that_holds_none_does_not_let_everybody_in(cli, write, keys):  # "$ONE,$OTHER"
    said = sentence(cli("check", write(MODEL), env={**os.environ, "FOREBAY_API_KEY": keys}))
    assert said.startswith(f"forebay: FOREBAY_API_KEY: expected at least one value, got {keys!r}")


def test_a_host_that_is_empty_does_not_let_other_machines_in(cli, write):  # --host "$HOST"
    assert sentence(cli("check", write(MODEL), "--host", "")).startswith("forebay: --host is empty")


@pytest.mark.parametrize("kind", ["process", "thread", "inline"])
@pytest.mark.parametrize("wrong", ["raise RuntimeError('no tree')", "import sys; sys.exit(5)"])
def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_traceback(cli, write, kind, wrong):
    path = write(MODEL.replace("    def", f"    def load(self):\n        {wrong}\n\n    def"))
    result = cli("serve", path, "--http-port", "0", "--worker-kind", kind)
    assert result.returncode == 1
    first, *rest = result.stderr.splitlines()
    assert first.startswith("forebay: ")
    assert ("RuntimeError: no tree" if "raise" in wrong else "SystemExit: 5") in first
    assert any(re.search(r"model\.py.*line 6", line) for line in rest)
    assert "forebay/cli" not in result.stderr


def test_a_model_that_kills_its_process_while_it_loads_ends_the_server(cli, write):
    path = write(MODEL.replace("    def", "    def load(self):\n        import os\n        os._exit(7)\n\n    def"))
    result = cli("serve", path, "--http-port", "0")
    assert result.returncode == 1
    assert "status 7" in result.stderr
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# check


def test_check_says_what_would_be_served_and_loads_nothing(cli, write):
    path = write(MODEL.replace("    def", "    def load(self):\n        raise RuntimeError\n\n    def"))
    result = cli("check", path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "POST /models/iris" in result.stdout
    assert "up to 64" in result.stdout


def test_check_shows_what_options_change(cli, write):
    shown = cli("check", write(MODEL), "--max-batch-size", "5", "--timeout-ms", "70", "--max-wait-ms", "9").stdout
    for word in ("up to 5", "70 ms", "9 ms"):
        assert word in shown


def test_check_takes_one_class_of_a_file(cli, models):
    shown = cli("check", f"{models / 'zoo.py'}:Count").stdout
    assert "/models/count" in shown
    assert "streams" in shown
    assert "echo" not in shown


# ---------------------------------------------------------------------------------------------------------------------
# call


def test_call_prints_the_answer_to_json(cli, zoo):
    result = cli("call", f"{zoo.url}/models/echo", '{"a": [1, "é"]}')
    assert result.returncode == 0
    assert msgspec.json.decode(result.stdout) == {"a": [1, "é"]}
    assert result.stderr.startswith("200 application/json")


def test_call_without_data_gets(cli, zoo):
    assert "alive" in cli("call", f"{zoo.url}/healthz").stdout


def test_call_sends_files_by_their_kind(cli, zoo, tmp_path):
    (tmp_path / "a.json").write_bytes(b"[1]")
    (tmp_path / "a.msgpack").write_bytes(msgspec.msgpack.encode([2]))
    (tmp_path / "a.png").write_bytes(b"png\xff")
    assert cli("call", f"{zoo.url}/models/echo", f"@{tmp_path / 'a.json'}").stdout.split() == ["[", "1", "]"]
    assert cli("call", f"{zoo.url}/models/echo", f"@{tmp_path / 'a.msgpack'}").stdout.split() == ["[", "2", "]"]
    assert cli("call", f"{zoo.url}/models/upper", f"@{tmp_path / 'a.png'}", text=False).stdout == b"PNG\xff"


class Refusing(http.server.BaseHTTPRequestHandler):
    """Refuses as often as it is told to, and notes when it was asked."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        told: Any = self.server
        told.asked.append(time.monotonic())
        fields = told.refusals.pop(0) if told.refusals else None
        body = b"1" if fields is None else b'{"error": "later"}'
        self.send_response(200 if fields is None else 429)
        for name, value in {**(fields or {}), "content-type": "application/json", "content-length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args): ...


@pytest.fixture
def refusing():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        told: Any = server
        told.asked, told.refusals = [], []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield told
        server.shutdown()


def test_call_sends_again_when_a_server_that_refuses_says_so(cli, refusing):  # F45
    url = "http://{}:{}/models/echo".format(*refusing.server_address)
    refusing.refusals = [{"retry-after": 1, "retry-after-ms": 200}, {"retry-after": 1}]
    done = cli("call", url, "1", "--retries", "2")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert re.findall(r"429, retrying in (\S+) s", done.stderr) == ["0.2", "1"]
    first, second, third = refusing.asked
    assert second - first >= 0.2
    assert third - second >= 1.0
    refusing.refusals = [{"retry-after": 1}] * 2
    done = cli("call", url, "1")
    assert (done.returncode, len(refusing.asked)) == (1, 4)
    assert "the server says to try again in 1 s; --retries N does so" in done.stderr
    for fields in ({"retry-after": 61}, {"retry-after": "Sun, 29 Nov 2026 10:00:00 GMT"}, {"retry-after": "-1"}, {}):
        refusing.refusals = [fields]
        assert cli("call", url, "1", "--retries", "2").returncode == 1  # too late, or nobody says when
    assert len(refusing.asked) == 8


def test_call_sends_forms_with_files(cli, launch, tmp_path):
    thumbnails = re.search(r"# thumbnails.py\n.*?```", (ROOT / "docs/how-to/requests.md").read_text(), re.DOTALL)
    assert thumbnails
    (tmp_path / "thumbnails.py").write_text(thumbnails[0].removesuffix("```"))
    (tmp_path / 'c"a\nt.png').write_bytes(b"\r\n--png\xff")
    url = launch(tmp_path / "thumbnails.py", "--worker-kind", "thread").url.removeprefix("http://")
    told = cli("call", f"{url}/models/thumbnails", f'image=@{tmp_path}/c"a\nt.png', "width=64", "tags=a=b", "tags=c")
    assert told.returncode == 0, told.stdout
    answer = msgspec.json.decode(told.stdout)
    assert (answer["bytes"], answer["sha"]) == (8, hashlib.sha1(b"\r\n--png\xff").hexdigest()[:8])
    assert "c" in answer["name"]


def test_call_sends_standard_input(cli, zoo):
    result = cli("call", f"{zoo.url}/models/upper", "-", input="abc")
    assert result.stdout == "ABC"
    result = cli("call", f"{zoo.url}/models/echo", "-", input="[7]")
    assert result.stdout.split() == ["[", "7", "]"]
    result = cli("call", f"{zoo.url}/models/echo", "-", "--content-type", "application/json", input="[7")
    assert "ends in the middle" in result.stdout


def test_call_sends_headers(cli, zoo):
    asked = ["call", f"{zoo.url}/models/failing", '"raise"', "--header", "X-Request-Id: called-1"]
    result = cli(*asked)
    assert result.returncode == 1
    assert "called-1" in result.stdout
    assert result.stderr.startswith("500 ")


def test_call_shows_a_stream_part_by_part(cli, zoo):
    result = cli("call", f"{zoo.url}/models/count", "3")
    assert (result.returncode, result.stdout) == (0, "data: 0\ndata: 1\ndata: 2\n")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["127.0.0.1:1/x"], ["127.0.0.1:1/x does not answer"]),
        (["iris", "1"], ["'iris' is not a URL, such as http://"]),
        (["http://127.0.0.1:1/x", "{}", "[]"], ["'[]' is a second one"]),
        (["http://127.0.0.1:1/x", "a=1", "[]"], ["'[]' is not a form field"]),
        (["http://127.0.0.1:1/x", "a=@nowhere"], ["nowhere cannot be read"]),
        (["http://127.0.0.1:1/x", "hello you"], ["""has quotes: '"hello you"'"""]),
        (["http://127.0.0.1:1/x", "{}"], ["http://127.0.0.1:1/x", "refused"]),
        (["http://127.0.0.1:99999/x", "{}"], ["http://127.0.0.1:99999/x"]),
        (["http://"], ["http://"]),
        (["http://127.0.0.1:port/"], ["127.0.0.1:port"]),
        (["http://127.0.0.1:1/x", "{nonsense"], ["JSON", "@FILE"]),
        (["http://127.0.0.1:1/x", '"\udcff"'], ["JSON", "@FILE"]),
        (["http://127.0.0.1:1/x", "@nowhere.json"], ["nowhere.json", "No such file"]),
        (["http://127.0.0.1:1/x", "{}", "--header", "nonsense"], ["nonsense", "NAME:VALUE"]),
        (["http://127.0.0.1:1/x", "{}", "--timeout-s", "soon"], ["--timeout-s", "soon"]),
        (["http://127.0.0.1:1/x", "{}", "--timeout-s", "-1"], ["--timeout-s", "'-1'", "from 0.01 to 86400"]),
        (["http://127.0.0.1:1/x", "{}", "--timeout-s", "0"], ["--timeout-s", "'0'"]),
        (["http://127.0.0.1:1/x", "{}", "--timeout-s", "nan"], ["--timeout-s", "nan"]),
        (["http://127.0.0.1:1/x", "{}", "--timeout-s", "1e300"], ["--timeout-s", "1e300"]),
        (["localhost:1/models/a", "1"], ["localhost:1/models/a does not answer"]),
        (["http://127.0.0.1:1/x", "body.json"], ["is not JSON", "did you mean @body.json?"]),
        (["http://127.0.0.1:1/x", "{}", "--api-kye", "k"], ["--api-kye", "did you mean --api-key?"]),
        (["http://127.0.0.1:1/x", "{}", "--api-key", "a\nb"], ["--api-key", "of one line"]),
        (["http://127.0.0.1:1/x", "{}", "--api-key", ""], ["--api-key: expected a key, got ''"]),  # F112
        (["http://127.0.0.1:1/x", "{}", "--api-key", "@/dev/null"], ["--api-key: expected a key, got ''"]),  # F134
        (["http://127.0.0.1:1/x", "{}", "--header", "X-Näme: a"], ["X-Näme", "NAME:VALUE"]),
        (["http://127.0.0.1:1/x", "{}", "--content-type", "a\nb"], ["--content-type", "'a\\nb'"]),
    ],
)
def test_what_is_wrong_with_a_call_is_one_sentence(cli, arguments, words, tmp_path):
    (tmp_path / "body.json").write_text("{}")
    said = sentence(cli("call", *arguments, cwd=tmp_path))
    for word in words:
        assert word in said


@pytest.mark.parametrize("command", ["call", "bench", "trace"])
def test_a_name_and_a_password_in_a_url_are_not_left_out_in_silence(cli, command):
    said = sentence(cli(command, "http://me:secret@127.0.0.1:1/"))
    assert "expected a URL without a user name before @" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    "url, word",
    [
        ("titanic", "is not a URL, such as http://127.0.0.1:8080/models/titanic"),
        ("http://[::1/models/x", "Invalid IPv6 URL"),
        ("http://..a/models/x", "its host"),
        ("http://no such host/", "a URL has no space"),
        ("http://127.0.0.1:port/", "port"),
        ("http://:80/", "expected a host"),
    ],
)
@pytest.mark.parametrize("command", ["call", "bench", "trace"])
def test_what_is_no_url_is_told_by_all_that_ask_a_server(cli, command, url, word):
    said = sentence(cli(command, url))
    assert f"{url!r} is not a URL" in said
    assert word in said
    assert ("no space" in said) is (" " in url)


def test_a_url_and_a_key_that_are_not_ascii_are_sent_as_utf_8(cli, launch, tmp_path):
    server = launch("zoo.py", "--worker-kind", "thread", "--api-key", "ключ")
    with_key = "--api-key", "ключ", "--header", "X-Request-Id: é"
    assert cli("call", f"{server.url}/models/echo?a=ä", "1", *with_key).stdout == "1\n"
    assert "\"there is no model 'schön'" in cli("call", f"{server.url}/models/schön", "1", *with_key).stdout
    assert " good answers" in cli("bench", f"{server.url}/models/echo?a=ä", "1", "-s", "0.2", *with_key).stdout
    (tmp_path / "keys").write_text("# ours\nключ\n")
    assert cli("call", f"{server.url}/models/echo", "1", "--api-key", f"@{tmp_path}/keys").stdout == "1\n"  # F134
    asked = "trace", server.url, "--seconds", "0.1", "-o", tmp_path / "t.json", "--api-key"
    assert cli(*asked, "ключ").returncode == 0
    assert "answers 401" in cli(*asked, "schlüssel").stderr


@pytest.fixture
def call_answered(cli):
    """Calls a server that answers with these bytes and closes."""

    def call(answer, *data):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def reply():
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1000):  # closed with something unread, it would be reset
                        pass

            thread = threading.Thread(target=reply)
            thread.start()
            result = cli("call", f"http://127.0.0.1:{listening.getsockname()[1]}/", *data)
            thread.join()
        return result

    return call


def test_call_says_when_the_answer_is_no_http(call_answered):
    assert "127.0.0.1" in sentence(call_answered(b"nonsense\r\n\r\n", "{}"))


@pytest.mark.parametrize("media", ["application/json", "text/event-stream"])
def test_call_says_when_the_answer_breaks_off(call_answered, media):
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {media}\r\ntransfer-encoding: chunked\r\n\r\n"
    result = call_answered(head.encode() + b"9\r\ndata: 1\n\n\r\n", "{}")
    assert result.returncode == 2
    assert "/ broke off its answer" in result.stderr


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 O", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-le"])
def test_call_says_when_the_answer_breaks_off_in_its_head(call_answered, head):
    assert "/ broke off its answer" in sentence(call_answered(head, "{}"))


def test_call_says_when_there_is_no_answer(call_answered):
    assert "/ closed the connection and did not answer" in sentence(call_answered(b"", "{}"))


def test_call_sends_and_prints_json_that_is_too_deep_to_be_read(call_answered):
    deep = "[" * 1_000_000 + "]" * 1_000_000  # Python 3.14 reads as many as its stack holds: 60,000 in 8 MB
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(deep)}\r\n\r\n"
    result = call_answered((head + deep).encode(), "[" * 60_000 + "]" * 60_000)  # an argument has 128 KiB at most
    assert result.returncode == 0, result.stderr
    assert result.stdout == deep + "\n"


def test_an_answer_that_leads_elsewhere_is_no_good_one(call_answered):
    result = call_answered(b"HTTP/1.1 304 Not Modified\r\n\r\n")
    assert (result.returncode, result.stderr.split()[0]) == (1, "304")


def test_call_gives_up_in_time(cli, zoo):
    said = sentence(cli("call", f"{zoo.url}/models/later", "1.0", "--timeout-s", "0.1"))
    assert "timed out" in said


@pytest.mark.parametrize(
    "flag, given", [("--wait-s", "nan"), ("--wait-s", "-1"), ("--port", "0"), ("--port", "eighty")]
)
def test_a_number_that_pipeline_stop_cannot_use_is_named(cli, flag, given):
    said = sentence(cli("pipeline", "stop", "--port", "1", flag, given))
    assert re.search(rf"argument {flag}: expected .*, got '{given}'", said)


@pytest.mark.parametrize(
    "arguments,hint", [(["serv", "x.py"], "serve"), (["serve", "x.py", "--worker-kind", "proces"], "process")]
)
def test_a_misspelt_choice_is_answered_with_the_nearest(cli, arguments, hint):
    assert f"did you mean {hint}?" in sentence(cli(*arguments))


def test_an_unknown_flag_that_is_near_to_none_is_answered_with_the_help(cli):
    said = sentence(cli("serve", "x.py", "--env", "A=b"))
    assert said.endswith("unrecognized arguments: --env A=b; see forebay serve --help")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "iris.py", "--http-port", "0", "--host", "127.0.0..1"],
        ["serve", "iris.py", "--http-port", "0", "--host", "x" * 64],
        ["serve", "--http-port", "0", "--attach", "tcp:127.0.0..1:0"],
        ["worker", "iris.py", "--connect", "tcp:127.0.0..1:9000"],
    ],
    ids=lambda arguments: arguments[-2],
)
def test_a_host_that_no_name_server_could_know_is_one_sentence(cli, tmp_path, arguments):
    # F47
    (tmp_path / "iris.py").write_text(
        "import forebay\nclass Iris(forebay.Model):\n    def predict(self, batch: list[int]) -> list[int]:\n"
        "        return batch\n"
    )
    found = cli(*arguments, cwd=tmp_path)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "expected an address or a host name" in found.stderr.splitlines()[-1]
