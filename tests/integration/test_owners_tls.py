# SPDX-License-Identifier: Apache-2.0
"""Fronts that dial their owner over TLS: what is believed on both sides, and what is said of what is not."""

import os

import pytest
import trustme
from tests.integration.test_attached import door_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What an authority and a stranger have signed."""
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name, signer, host in (
        ("both", authority, "127.0.0.1"),
        ("elsewhere", authority, "elsewhere.example"),
        ("stranger", stranger, "127.0.0.1"),
    ):
        signer.issue_cert(host).private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    return folder


@pytest.fixture
def pair(serve, files):
    """Starts an owner and a front; each option that names a file of `files` gets it in full."""

    def start(owns, fronts, target=None, host="127.0.0.1", **more):
        def full(options):
            return [str(files / word) if word.endswith(".pem") else word for word in options.split()]

        owner = door_of(serve("owned.py", "--attach", f"tcp:{host}:0", *full(owns)))
        owner.door = owner.door.replace("0.0.0.0", "127.0.0.1")
        return owner, serve(target, "--owner", owner.door, *full(fronts), **more)

    return start


def test_requests_and_streams_are_handed_on_over_tls(pair, tmp_path):
    _, front = pair("--attach-certfile both.pem", "--owner-cafile ca.pem")
    sample = os.urandom(1_500_000).hex()
    assert front.call("fails", sample).json() == sample
    (tmp_path / "gate").touch()
    answer = front.call("slow", [str(tmp_path / "gate"), 5])
    assert answer.text.count("data:") == 5


def test_both_sides_may_show_a_certificate_instead_of_a_secret(pair):
    owner, front = pair(
        "--attach-certfile both.pem --attach-cafile ca.pem",
        "--owner-cafile ca.pem --owner-certfile both.pem",
        host="0.0.0.0",
    )
    assert "not encrypted" not in owner.log
    assert front.call("clip", 1.0).json()[0] == 1.0


@pytest.mark.parametrize(
    "owns, fronts, front_says, owner_says",
    [
        (
            "--attach-certfile stranger.pem",
            "--owner-cafile ca.pem",
            "shows a certificate that is not believed",
            "it hung up during the TLS handshake, as who does not believe this server's certificate does",
        ),
        (
            "--attach-certfile elsewhere.pem",
            "--owner-cafile ca.pem",
            "not valid for '127.0.0.1'",
            "it hung up during the TLS handshake, as who does not believe this server's certificate does",
        ),
        (
            "",
            "--owner-cafile ca.pem",
            "it does not speak TLS; start it with --attach-certfile, or leave out --owner-cafile",
            "it speaks TLS, and this server does not",
        ),
        ("--attach-certfile both.pem", "", "it does not speak TLS, and this server does", "it does not speak TLS"),
        (
            "--attach-certfile both.pem --attach-cafile ca.pem",
            "--owner-cafile ca.pem",
            "--attach-cafile",
            "it has no certificate, and --attach-cafile asks for one",
        ),
        (
            "--attach-certfile both.pem --attach-cafile ca.pem",
            "--owner-cafile ca.pem --owner-certfile stranger.pem",
            "--owner-certfile, --owner-keyfile",
            "its certificate is not of an authority in --attach-cafile",
        ),
    ],
)
def test_who_cannot_be_believed_is_said_on_both_sides_and_what_is_served_stays_served(
    pair, eventually, owns, fronts, front_says, owner_says
):
    owner, front = pair(owns, fronts, target="single.py")
    (line,) = [line for line in front.records if "is unreachable" in line["message"]]
    assert f"the owner {owner.door} is unreachable: " in line["message"]
    assert front_says in line["message"]
    eventually(lambda: f"was refused: {owner_says}" in owner.log)
    for server in (owner, front):
        for model in server.client.get("/models").json()["models"]:
            assert server.client.get(f"/v2/models/{model['name']}/ready").is_success
    assert owner.call("clip", 1.0).json()[0] == 1.0


@pytest.mark.parametrize(
    "options, words",
    [
        (
            "--owner unix:s --owner-cafile ca.pem",
            "unix:s stays on this machine and is not encrypted; leave out --owner",
        ),
        ("--owner tcp:a:1 --owner-certfile both.pem", "--owner-certfile was given without --owner-cafile"),
        (
            "single.py --owner-cafile ca.pem",
            "--owner-cafile was given, and no owner to dial: --owner tcp:HOST:PORT",
        ),
        ("--owner tcp:a:1 --owner-cafile none", "the TLS file none: No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_sentence(cli, files, models, options, words):
    given = [str(models / one) if one == "single.py" else one for one in options.split()]
    done = cli("check", *given, cwd=files)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
