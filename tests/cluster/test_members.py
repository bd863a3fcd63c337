# SPDX-License-Identifier: Apache-2.0
"""Programs that come, go and die, and those that are not let in."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.cluster.conftest import Peer, cat, knows
from tests.ports import free_port
from tests.processes import freeze
from tests.waiting import PATIENCE_S, eventually

import forebay
from forebay import Batch, ConfigError, DeadlineExceeded, Serving, ServingNotFound, Unavailable
from forebay.workers.wire import frames

RUN = {"capture_output": True, "text": True, "timeout": PATIENCE_S}
SECRET = "the secret of these tests, of 32 bytes"


@pytest.fixture
def address(serve, tmp_path):
    """A server that keeps a directory."""
    address = f"unix:{tmp_path}/door"
    serve(None, "--attach", address)
    return address


# ---------------------------------------------------------------------------------------------------------------------
# Death


def test_members_that_died_between_choice_and_call_are_passed_over(serve, start_member, tmp_path):
    # S68: the server is stopped, so that nobody hears of their end
    address = f"unix:{tmp_path}/door"
    server = serve(None, "--attach", address)
    members = [start_member(address, "who") for _ in range(3)]
    with forebay.cluster.join(address) as membership:
        knows(membership, who=3)
        assert forebay.batched_run("who", cat(1))[0] in {one.pid for one in members}
        freeze(server.process.pid)
        for one in members[:2]:
            one.process.kill()
            one.process.wait()
        for _ in range(20):
            assert forebay.batched_run("who", cat(1))[0] == members[2].pid
        members[2].process.kill()
        members[2].process.wait()
        with pytest.raises(ServingNotFound, match="no member took the call of 'who'; tried 3 members"):
            forebay.batched_run("who", cat(1))
        os.kill(server.process.pid, signal.SIGCONT)
        knows(membership, who=0)


def test_a_member_that_dies_while_it_executes_is_passed_over(address, start_member, tmp_path):
    # S68
    path = tmp_path / "gate"
    row = np.frombuffer(str(path).encode().ljust(512, b"\0"), np.uint8)[None]
    members = {one.pid: one for one in (start_member(address, "gate", "plus") for _ in range(2))}
    with forebay.cluster.join(address) as membership:
        knows(membership, gate=2, plus=2)
        found = []
        calling = threading.Thread(target=lambda: found.append(forebay.batched_run("gate", Batch.concatenate([row]))))
        calling.start()
        first = int(eventually(lambda: (tmp_path / "gate.begun").exists() and (tmp_path / "gate.begun").read_text()))
        members[first].process.kill()
        path.touch()
        calling.join(PATIENCE_S)
        assert found[0].tolist() == [next(pid for pid in members if pid != first)]


def test_a_stream_is_not_tried_again_after_its_first_part(address, start_member):
    # S68, S69
    members = [start_member(address, "plus") for _ in range(2)]
    with forebay.cluster.join(address) as membership:
        knows(membership, plus=2)

        received = []

        def batches():
            while not received:
                yield cat(1)
            for one in members:
                one.process.kill()
                one.process.wait()
            while True:
                yield cat(2)

        events = forebay.batched_run("plus", batches())
        received.append(next(events)[1].tolist())
        assert received == [[2]]
        with pytest.raises(Unavailable, match="the call was not over, and is not sent to another member"):
            list(events)


def test_a_member_that_leaves_ends_its_calls_first(address, start_member, tmp_path):
    path = tmp_path / "gate"
    row = np.frombuffer(str(path).encode().ljust(512, b"\0"), np.uint8)[None]
    member = start_member(address, "gate")
    with forebay.cluster.join(address) as membership:
        knows(membership, gate=1)
        found = []
        calling = threading.Thread(target=lambda: found.append(forebay.batched_run("gate", Batch.concatenate([row]))))
        calling.start()
        eventually((tmp_path / "gate.begun").exists)
        member.leave()
        knows(membership, gate=0)
        path.touch()
        calling.join(PATIENCE_S)
        assert found[0].tolist() == [member.pid]
        assert member.process.wait(PATIENCE_S) == 0


def test_calls_go_on_while_the_server_is_away(serve, start_member, tmp_path):
    # S65
    address = f"unix:{tmp_path}/door"
    server = serve(None, "--attach", address)
    member = start_member(address, "who")
    with forebay.cluster.join(address) as membership:
        knows(membership, who=1)
        server.process.kill()
        server.process.wait()
        with (
            Serving.new(lambda _options: lambda batch: batch.realize()).start(name="new"),
            ThreadPoolExecutor(1) as pool,
        ):
            serve(None, "--attach", address)
            is_known = pool.submit(knows, membership, who=1, new=1)
            while not is_known.done():  # also while the server has heard of this program and not yet of the other
                assert forebay.batched_run("who", cat(1))[0] == member.pid
            is_known.result()


def test_a_server_that_is_back_is_believed_once_members_had_time_to_come_back(
    serve, start_member, tmp_path, monkeypatch
):
    # S65: of two members one is back, and the other is stopped
    monkeypatch.setattr("forebay.cluster.membership.SETTLE_S", 10 * PATIENCE_S)
    address = f"unix:{tmp_path}/door"
    server = serve(None, "--attach", address)
    member = start_member(address, "who")
    with forebay.cluster.join(address) as membership:
        knows(membership, who=1)
        freeze(member.pid)
        server.process.kill()
        server.process.wait()
        server = serve(None, "--attach", address)
        with Serving.new(lambda _options: lambda batch: batch.realize()).start(name="new"):
            eventually(lambda: "runs 'new'" in server.log)
            assert "who" in membership.directory.members
        os.kill(member.pid, signal.SIGCONT)
        assert forebay.batched_run("who", cat(1))[0] == member.pid


def test_a_member_that_does_not_answer_is_waited_for_until_the_deadline(address, start_member):
    member = start_member(address, "who")
    with forebay.cluster.join(address) as membership:
        knows(membership, who=1)
        assert forebay.batched_run("who", cat(1))[0] == member.pid
        freeze(member.pid)
        with pytest.raises(DeadlineExceeded, match="before its answer came"):
            forebay.batched_run("who", cat(1), timeout_s=0.2)
        os.kill(member.pid, signal.SIGCONT)
        assert forebay.batched_run("who", cat(1))[0] == member.pid


def test_a_program_that_has_left_calls_nobody(address, start_member):
    start_member(address, "who")
    membership = forebay.cluster.join(address)
    knows(membership, who=1)
    membership.leave()
    membership.leave()
    with pytest.raises(ServingNotFound, match="Make sure it is started"):
        forebay.batched_run("who", cat(1))
    with pytest.raises(ConfigError, match="where='distributed' is for programs in a cluster"):
        forebay.batched_run("who", cat(1), where="distributed")
    with forebay.cluster.join(address) as again:
        knows(again, who=1)
        assert forebay.batched_run("who", cat(1)).size == 1


FORKING = """
import os, sys
import numpy as np
import forebay

with forebay.cluster.join(sys.argv[1]) as membership:
    while "who" not in membership.directory.members:
        pass
    if os.fork() == 0:
        try:
            forebay.batched_run("who", forebay.Batch.concatenate([np.array([1])]))
        except forebay.Unavailable as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
    print(forebay.batched_run("who", forebay.Batch.concatenate([np.array([1])])))
"""


def test_a_program_that_leaves_has_its_own_calls_fail(address, start_member, tmp_path):
    path = tmp_path / "gate"
    row = np.frombuffer(str(path).encode().ljust(512, b"\0"), np.uint8)[None]
    start_member(address, "gate", "plus")
    with forebay.cluster.join(address) as membership, ThreadPoolExecutor(3) as pool:
        knows(membership, gate=1, plus=1)
        events = forebay.batched_run("plus", (cat(number) for number in range(1000)))
        next(events)
        calls = [pool.submit(forebay.batched_run, "gate", Batch.concatenate([row])) for _ in range(3)]
        eventually((tmp_path / "gate.begun").exists)
        membership.leave()
        for one in calls:
            with pytest.raises(Unavailable, match="this program has left the cluster"):
                one.result(PATIENCE_S)
        with pytest.raises(Unavailable, match="this program has left the cluster"):
            list(events)
        path.touch()


def test_a_forked_process_is_in_no_cluster(address, start_member):
    member = start_member(address, "who")
    ignored = ["-W", "ignore::DeprecationWarning"]  # since 3.12, Python warns of a fork beside threads
    program = [sys.executable, *ignored, "-c", FORKING, address]
    done = subprocess.run(program, check=False, **RUN)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith("this program is in no cluster any more")
    assert done.stdout.endswith(f"[{member.pid}]\n")


PAGE = Path(__file__).parents[2] / "docs/how-to/serving.md"


def test_the_programs_of_the_page_call_each_other(address, tmp_path):
    """Two blocks of the page about servings, with another address. S65"""
    blocks = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    for name in ("double.py", "ask.py"):
        (tmp_path / name).write_text(blocks[name].replace("tcp:127.0.0.1:9100", address))
    with subprocess.Popen([sys.executable, str(tmp_path / "double.py")]) as running:
        try:
            with forebay.cluster.join(address) as membership:
                knows(membership, double=1)
            done = subprocess.run([sys.executable, str(tmp_path / "ask.py")], check=False, **RUN)
            assert (done.stdout, done.returncode) == ("[2 4 6]\n", 0)
        finally:
            running.kill()


# ---------------------------------------------------------------------------------------------------------------------
# Over a network


@pytest.fixture
def tcp(serve):
    """A server that keeps a directory, over TCP and with a secret."""
    address = f"tcp:127.0.0.1:{free_port()}"
    serve(None, "--attach", address, "--attach-secret", SECRET)
    return address


def test_members_find_each_other_over_tcp_with_a_secret(tcp, start_member, monkeypatch):
    # S65
    member = start_member(tcp, "who", env={"FOREBAY_SECRET": SECRET})
    with forebay.cluster.join(tcp, secret=SECRET) as membership:
        knows(membership, who=1)
        assert member.address.startswith("tcp:127.0.0.1:")
        assert forebay.batched_run("who", cat(1))[0] == member.pid
    with pytest.raises(ConfigError, match=r"cannot join the cluster at .*it refuses this program: its secret is not"):
        forebay.cluster.join(tcp, secret="another secret of 32 bytes, or so")
    with pytest.raises(ConfigError, match=r"cannot join .* asks for a secret; give the member the same one: join\("):
        forebay.cluster.join(tcp)
    with pytest.raises(ConfigError, match="expected a secret of at least"):
        forebay.cluster.join(tcp, secret="short")
    monkeypatch.setenv("FOREBAY_SECRET", SECRET)
    with forebay.cluster.join(tcp, listen="tcp:127.0.0.1:0") as membership:
        knows(membership, who=1)


def test_a_port_to_listen_at_that_is_taken_is_said(tcp):
    message = f"{tcp} cannot be bound: address already in use; choose another address or port"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        forebay.cluster.join(tcp, secret=SECRET, listen=tcp)


def test_a_program_on_a_node_of_a_deployment_finds_the_secret(tcp, monkeypatch):
    state = SimpleNamespace(doors={"one": "tcp:elsewhere:1", "two": tcp})
    found = [SimpleNamespace(state=None), SimpleNamespace(state=state, secret=SECRET.encode())]
    monkeypatch.setattr("forebay.cluster.membership.folders", lambda: iter(found))
    with forebay.cluster.join(tcp) as membership:
        assert membership.address.startswith("tcp:127.0.0.1:")
    with pytest.raises(ConfigError, match="its secret is not this server's"):
        forebay.cluster.join(tcp, secret="another secret of 32 bytes, or so")


def test_connections_are_encrypted_where_certificates_are_given(serve, start_member, tmp_path):
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    ca, pem = tmp_path / "ca.pem", tmp_path / "cert.pem"
    authority.cert_pem.write_to_path(ca)
    made.private_key_and_cert_chain_pem.write_to_path(pem)
    address = f"tcp:127.0.0.1:{free_port()}"
    serve(None, "--attach", address, "--attach-certfile", str(pem), "--attach-cafile", str(ca))
    serving = Serving.new(lambda _options: lambda batch: batch.realize() * 2)
    with forebay.cluster.join(address, cafile=str(ca), certfile=str(pem)) as membership, serving.start(name="double"):
        knows(membership, double=1)
        assert forebay.batched_run("double", cat(1), where="distributed").tolist() == [2]
    with pytest.raises(ConfigError, match="cafile and certfile together"):
        forebay.cluster.join(address, cafile=str(ca))
    other = trustme.CA()
    other.cert_pem.write_to_path(ca)
    with pytest.raises(ConfigError, match="shows a certificate that is not believed"):
        forebay.cluster.join(address, cafile=str(ca), certfile=str(pem))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_a_program_that_has_joined_no_cluster_is_told_of_it():
    serving = Serving.new(lambda _options: lambda batch: batch.realize())
    with pytest.raises(ConfigError, match=r"distribution_weight=2 is for programs in a cluster, .*cluster\.join"):
        serving.start(distribution_weight=2)
    with pytest.raises(ConfigError, match="distributed_postprocessing is for programs in a cluster"):
        serving.distributed_postprocessing(forebay.to_host).start()
    with serving.start(name="mine"):
        with pytest.raises(ConfigError, match="distributed_preprocessing is for programs in a cluster"):
            forebay.batched_run("mine", cat(1), forebay.to_host)
        with pytest.raises(ConfigError, match="where='distributed' is for programs in a cluster"):
            forebay.batched_run(("distributed", "mine"), cat(1))
        with pytest.raises(ConfigError, match="a pair such as"):
            forebay.batched_run(("distributed", "mine", 3), cat(1))  # pyright: ignore[reportArgumentType]


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr("forebay.cluster.membership.JOIN_S", 0.2)
    with pytest.raises(ConfigError, match="no server at unix:/nowhere/door keeps a cluster: it cannot be reached"):
        forebay.cluster.join("unix:/nowhere/door")
    with pytest.raises(ConfigError, match="expected unix:PATH or tcp:HOST:PORT"):
        forebay.cluster.join("nowhere:80")


@contextlib.contextmanager
def answering(path, answer):
    """A server that answers whatever it is told with the same frame."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def answer_all():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        yield f"unix:{path}"


def test_a_server_of_another_version_says_so(tmp_path):
    # S70
    refused = frames.encode(["refused", "it speaks version 2 of the worker protocol, this server version 3"])
    said = "version 2 of the worker protocol, this server version 3"
    with answering(f"{tmp_path}/s", refused) as address, pytest.raises(ConfigError, match=said):
        forebay.cluster.join(address)


def test_something_else_is_no_server(tmp_path):
    web = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with answering(f"{tmp_path}/s", web) as address, pytest.raises(ConfigError, match="cannot join the cluster at"):
        forebay.cluster.join(address)


def test_a_member_of_another_version_is_listed_and_not_called(address, start_member):
    # S70
    member = start_member(address, "who")
    with forebay.cluster.join(address) as membership:
        peer = Peer(address, "member")
        with peer.socket:
            peer.hear("directory")
            peer.send(["servings", "unix:/of/another/version", 2, [["who", 1000], ["theirs", 1]]])
            knows(membership, who=2, theirs=1)
            assert {forebay.batched_run("who", cat(1))[0] for _ in range(20)} == {member.pid}
            with pytest.raises(ServingNotFound, match="version 2 of the protocol of members, and this program speaks"):
                forebay.batched_run("theirs", cat(1))
        knows(membership, who=1, theirs=0)


def test_a_program_ends_although_it_has_not_left(address):
    """The thread of the cluster keeps no program from ending."""
    program = f"import forebay; forebay.cluster.join({address!r}); print('joined')"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], check=False, **RUN)
    assert (done.stdout, done.returncode) == ("joined\n", 0)
    assert time.monotonic() - began < PATIENCE_S / 2
