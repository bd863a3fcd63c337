# SPDX-License-Identifier: Apache-2.0
"""What a person is told who got something wrong.  # F57"""

import socket

import pytest
import trustme

from forebay.cli.trace import report
from forebay.observe.traces.trace_summary import NodeSummary, Summary, Times

MODEL = """
import pathlib, forebay

class Box:
    def __init__(self, x): self.x = x

class It(forebay.Model):
    def predict(self, batch: list[{type}]) -> list[int]:
        return [1 for _ in batch]

pathlib.Path(__file__).with_suffix(".imported").touch()
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "model.py"
        path.write_text(text)
        return path

    return write


def test_a_certificate_without_its_key_is_told_so(cli, write, tmp_path):
    certificate = trustme.CA().issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    model = write(MODEL.format(type="int"))
    found = cli("serve", model, "--http-port", "0", "--certfile", tmp_path / "cert.pem")
    assert found.returncode == 2
    assert "cert.pem holds no private key; name the file that does with --keyfile" in found.stderr
    assert "PEM lib" not in found.stderr
    found = cli(
        "serve", model, "--http-port", "0", "--certfile", tmp_path / "no.pem", "--keyfile", tmp_path / "key.pem"
    )
    assert "no.pem: No such file or directory" in found.stderr
    other = trustme.CA().issue_cert("localhost")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    found = cli(
        "serve", model, "--http-port", "0", "--certfile", tmp_path / "cert.pem", "--keyfile", tmp_path / "other.pem"
    )
    assert "is the key of another certificate" in found.stderr


def test_an_empty_body_is_told_so(launch, models):
    server = launch("zoo.py", "--worker-kind", "thread", "--log-format", "json")
    answer = server.client.post("/models/echo", content=b"", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("The body is empty; ")


def test_a_class_of_the_file_is_named_as_it_is_written_there(cli, write):
    found = cli("check", write(MODEL.format(type="Box")))
    assert "`Box` cannot be read from a request; take a type that one can carry, such as bytes" in found.stderr
    assert "_forebay" not in found.stderr


def test_a_port_in_use_is_told_before_the_model_is_imported(cli, write, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = cli("serve", write(MODEL.format(type="int")), "--http-port", taken.getsockname()[1])
    assert found.returncode == 2
    assert "is in use already" in found.stderr
    assert not (tmp_path / "model.imported").exists()


def test_a_syntax_error_has_its_caret(cli, write):
    found = cli("check", write("import forebay\nx = 1 +* 2\n"))
    assert found.returncode == 2
    assert found.stderr.splitlines()[1:] == ["    x = 1 +* 2", "           ^"]
    assert "model.py:2: invalid syntax" in found.stderr


def test_no_bottleneck_is_named_where_nothing_is_busy():
    times = Times(0.0, 0.0)
    node = NodeSummary("a", 1, 3, 3, times, times, times, times, 0.001, 0.004)
    summary = Summary(10.0, 0, [node], [], "a", 1000.0, ["a"], 0.001)
    text = "\n".join(report(summary, None))
    assert "bottleneck" not in text
    assert "nothing was saturated: a, the busiest, ran 0.4% of the time" in text
