# SPDX-License-Identifier: Apache-2.0
"""The socket side of `forebay batching`: what workers of the original service rely on, and what they cannot break."""

import contextlib
import functools
import select
import threading
import time
import uuid
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE_S

USUAL = ("-batch", "8", "-latency", "50", "-timeout", "50000")
SINGLE = ("-batch", "1", "-timeout", "50000")


def framed(payload):
    return len(payload).to_bytes(4, "big") + payload


def packed(value):
    return framed(msgspec.msgpack.encode(value))


def in_turn(one, another):
    """Two workers, first the one that is given something next."""
    heard, _, _ = select.select([one.socket, another.socket], [], [], PATIENCE_S)
    return (one, another) if one.socket in heard else (another, one)


def test_the_exchange_is_the_recorded_one(shared):  # B40-B43
    front = shared(*USUAL)
    with front.peer() as peer:
        job = front.send(b"hi")
        sent = peer.take_raw()
        name = sent[7:43]
        assert sent == bytes.fromhex("0000002b81d924") + name + bytes.fromhex("c4026869")
        peer.send(bytes.fromhex("0000002a81d924") + name + bytes.fromhex("a26f6b"))
        assert (job.read().status, job.body) == (200, b"ok")


def test_sixteen_jobs_begin_with_a_longer_map(start):  # B43
    front = start("-batch", "16", "-latency", "1000")
    sent = [front.post(b"x") for _ in range(16)]
    with front.peer() as peer:
        frame = peer.take_raw()
        assert frame[4:7].hex() == "de0010"
        peer.answer(msgspec.msgpack.decode(frame[4:]).items())
    assert {job.read().status for job in sent} == {200}


def test_a_worker_gets_nothing_before_it_has_asked_again(shared):  # B20, B42
    front = shared(*SINGLE)
    with front.peer() as peer:
        first = front.send(b"1")
        held = peer.take()
        second = front.post(b"2")
        assert not peer.hears(0.1)
        peer.answer(held)
        assert peer.serve() == [b"2"]
        assert [first.read().status, second.read().status] == [200, 200]


def test_a_busy_worker_holds_nobody_up(shared):  # B20
    front = shared(*SINGLE)
    with front.peer() as one, front.peer() as another:
        first = front.send(b"first")
        slow, quick = in_turn(one, another)
        held = slow.take()
        for number in range(9):
            job = front.send(b"%d" % number)
            assert quick.serve() == [b"%d" % number]
            assert job.read().status == 200
        slow.answer(held)
        assert first.read().status == 200


def test_the_longest_idle_worker_gets_the_next_batch(shared):  # B21
    front = shared(*SINGLE)
    with front.idle_peer() as one, front.idle_peer() as another:
        turns = []
        for _ in range(6):
            job = front.send(b"x")
            peer, _other = in_turn(one, another)
            peer.serve()
            job.read()
            turns.append(peer)
        assert turns == [one, another] * 3


def test_a_batch_is_not_split_between_idle_workers(start):  # B21
    front = start("-batch", "8", "-latency", "1000")
    with front.idle_peer() as one, front.idle_peer() as another:
        sent = [front.send(b"x") for _ in range(8)]
        peer, other = in_turn(one, another)
        assert len(peer.take()) == 8
        assert not other.hears(0.05)
        more = [front.send(b"x") for _ in range(8)]
        assert len(other.take()) == 8
    for job in sent + more:
        job.leave()


@pytest.mark.parametrize("end", ["close", "half a frame", "garbage", "too long"])
def test_jobs_of_a_lost_worker_are_done_by_another(shared, end):  # B23, B25
    front = shared(*USUAL)
    with front.peer() as lost:
        sent = [front.send(b"%d" % number) for number in range(8)]
        assert len(lost.take()) == 8
        with front.peer() as other:
            if end == "half a frame":
                lost.send(b"\0\0\0\x20\x81\xd9")
            elif end == "garbage":
                lost.send(framed(b"\xc1\xc1\xc1\xc1\xc1"))
            elif end == "too long":
                lost.send(b"\x7f\xff\xff\xff")
            if end in {"close", "half a frame"}:
                lost.socket.close()
            else:
                assert lost.is_hung_up_on()
            assert sorted(other.serve()) == [b"%d" % number for number in range(8)]
    assert {job.read().status for job in sent} == {200}


def test_a_second_loss_is_answered_500(shared):  # B23
    front = shared(*USUAL)
    job = front.post(b"deadly")
    for _ in range(2):
        with front.peer() as peer:
            assert [body for _, body in peer.take()] == [b"deadly"]
    assert job.read().status == 500
    assert b"twice" in job.body
    assert job.seconds < 40.0  # before its time is over


def test_handed_on_jobs_come_before_those_that_wait(shared):  # B23
    front = shared(*SINGLE)
    first = front.post(b"1")
    with front.peer() as lost:
        lost.take()
        second = front.post(b"2")
    with front.peer() as peer:
        assert [peer.serve(), peer.serve()] == [[b"1"], [b"2"]]
    assert [first.read().status, second.read().status] == [200, 200]


def test_what_nobody_waits_for_is_not_handed_on(shared):  # B15, B23
    front = shared("-batch", "2", "-latency", "300")
    gone, here = front.post(b"gone"), front.post(b"here")
    with front.peer() as lost:
        assert len(lost.take()) == 2
        gone.leave()
        front.wait_for(lambda: "a job has ended" in front.log)
    with front.peer() as peer:
        assert peer.serve() == [b"here"]
    assert here.read().status == 200


def test_a_worker_that_left_while_idle_gets_nothing(shared):  # B24
    front = shared(*USUAL)
    front.idle_peer().socket.close()
    with front.peer() as peer:
        job = front.send(b"x")
        assert peer.serve() == [b"x"]
        assert (job.read().status, job.body) == (200, b"did x")


@pytest.mark.parametrize(
    "payload",
    [bytes.fromhex("93010203"), b"\x80\0", msgspec.msgpack.encode({"foo": 1}), b"hello"],
    ids=["no map", "trailing", "number", "text"],
)
def test_a_worker_that_speaks_nonsense_loses_its_connection_only(shared, payload):  # B25, B51
    front = shared(*USUAL)
    with front.peer() as bad, front.peer() as good:
        bad.send(framed(payload))
        assert bad.is_hung_up_on()
        job = front.send(b"x")
        assert good.serve() == [b"x"]
        assert job.read().status == 200


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", framed(b"\xc1" * 5)])
def test_who_does_not_begin_with_the_protocol_is_hung_up_on(shared, first):  # B25
    front = shared(*USUAL)
    with front.peer(ready=False) as bad:
        bad.send(first)
        assert bad.is_hung_up_on()


@pytest.mark.parametrize("header", ["7fffffff", "ffffffff", "80000000"])
def test_a_length_over_the_limit_ends_the_connection(shared, header):  # B49
    front = shared(*USUAL)

    def resident_kib():
        lines = Path(f"/proc/{front.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident_kib()
    with front.peer() as peer:
        peer.send(bytes.fromhex(header))
        assert peer.is_hung_up_on()
    assert resident_kib() - before < 50_000


def test_the_limit_of_a_frame_can_be_set(start):  # B49
    front = start("-max-frame-bytes", "100")
    with front.peer() as peer:
        peer.send(framed(b"\x80" + b"x" * 100))
        assert peer.is_hung_up_on()


def test_an_answer_to_somebody_else_s_job_is_ignored(shared):  # B26
    front = shared(*SINGLE)
    with front.peer() as right, front.peer() as wrong:
        first, second = front.post(b"1"), front.post(b"2")
        mine, yours = right.take(), wrong.take()
        wrong.answer(mine, make=lambda _body: b"forged")
        right.answer(mine, make=lambda _body: b"genuine")
        assert {job.read().body for job in (first, second)} & {b"genuine", b"forged"} == {b"genuine"}
        assert yours != mine
        assert sorted([first.status, second.status]) == [200, 500]
        front.wait_for(lambda: "does not hold" in front.log)


def test_jobs_without_an_answer_get_500_at_once(shared):  # B27
    front = shared(*USUAL)
    with front.peer() as peer:
        sent = [front.send(b"%d" % number) for number in range(8)]
        jobs = peer.take()
        peer.answer(jobs[:7])
        answers = [job.read() for job in sent]
    assert sorted(answer.status for answer in answers) == [200] * 7 + [500]
    assert all(answer.body for answer in answers)
    assert max(answer.seconds for answer in answers) < 40.0  # before their time is over


def test_other_keys_in_an_answer_are_ignored(shared):  # B28
    front = shared(*USUAL)
    with front.peer() as peer:
        job = front.send(b"x")
        ((name, _),) = peer.take()
        peer.send(packed({str(uuid.uuid4()): b"?", "foo": b"?", name: b"ok", "error_ids": str(uuid.uuid4())}))
        assert (job.read().status, job.body) == (200, b"ok")


@pytest.mark.parametrize("result, body", [("ok", b"ok"), (b"ok", b"ok"), ("ä", "ä".encode()), (None, b"")])
def test_a_result_is_text_bytes_or_nothing(shared, result, body):  # B44
    front = shared(*SINGLE)
    with front.peer() as peer:
        job = front.send(b"x")
        ((name, _),) = peer.take()
        peer.send(packed({name.encode(): result}))
        assert (job.read().status, job.body) == (200, body)


@pytest.mark.parametrize(
    "spell",
    [lambda name: name, lambda name: name.encode(), lambda name: [name], lambda name: name + "cut off"],
    ids=["str", "bin", "list", "trailing"],
)
def test_error_ids_are_spelled_in_four_ways(shared, spell):  # B45
    front = shared(*SINGLE)
    with front.peer() as peer:
        job = front.send(b"x")
        ((name, _),) = peer.take()
        peer.send(packed({"error_ids": spell(name), name: b"no"}))
        assert (job.read().status, job.body) == (422, b"no")


def test_a_listed_job_without_a_result_gets_422_and_nothing(shared):  # B45
    front = shared(*SINGLE)
    with front.peer() as peer:
        job = front.send(b"x")
        ((name, _),) = peer.take()
        peer.send(packed({"error_ids": name}))
        assert (job.read().status, job.body) == (422, b"")


@pytest.mark.parametrize("empty", [framed(b"\x80"), b"\0\0\0\0"], ids=["empty map", "asks again"])
def test_an_empty_answer_fails_the_jobs_and_asks_for_the_next(shared, empty):  # B47, B50
    front = shared(*SINGLE)
    with front.peer() as peer:
        job = front.send(b"1")
        peer.take()
        peer.send(empty)
        assert job.read().status == 500
        job = front.send(b"2")
        assert peer.serve() == [b"2"]
        assert job.read().status == 200


def test_a_frame_may_come_byte_by_byte(shared):  # B48
    front = shared(*SINGLE)
    with front.peer(ready=False) as peer:
        for _ in range(4):
            peer.send(b"\0")
        job = front.send(b"x")
        ((name, _),) = peer.take()
        for byte in packed({name: b"ok"}):
            peer.send(bytes([byte]))
            time.sleep(0.0005)
        assert (job.read().status, job.body) == (200, b"ok")


def test_two_frames_may_come_in_one_write(shared):  # B48
    front = shared(*SINGLE)
    with front.peer(ready=False) as peer:
        peer.send(b"\0\0\0\0" * 2)
        job = front.send(b"x")
        assert peer.serve() == [b"x"]
        assert job.read().status == 200


def test_an_answer_of_eight_mebibytes(shared):  # B48
    front = shared(*SINGLE)
    with front.peer() as peer:
        job = front.send(b"x")
        peer.answer(peer.take(), make=lambda _body: b"y" * (8 << 20))
        assert job.read().body == b"y" * (8 << 20)


def test_workers_join_over_tcp_with_the_same_bytes(start):  # B6, B40
    front = start("-protocol", "tcp", "-address", "127.0.0.1:0")
    with front.peer() as peer:
        job = front.send(b"x")
        assert peer.serve() == [b"x"]
        assert job.read().body == b"did x"


@pytest.mark.stress
def test_hundreds_of_workers_may_join(start):  # B22
    front = start("-batch", "1")
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(front.idle_peer()) for _ in range(300)]
        job = front.post(b"x")
        assert peers[0].serve() == [b"x"]  # it has been idle longest
        assert job.read().status == 200
        assert front.log.count("has joined") == 300


@pytest.mark.stress
def test_workers_come_and_go_under_load_and_nothing_is_lost(shared, at_once):  # B22-B24
    front = shared("-batch", "4", "-latency", "1")
    ended = threading.Event()
    lost = set()

    def work():
        """Joins, does a few batches and leaves with the next, unless that was lost once already."""
        while not ended.is_set():
            with front.peer() as peer:
                done = 0
                while not ended.is_set():
                    if not peer.hears(0.1):
                        continue
                    jobs = peer.take()
                    bodies = {body for _, body in jobs}
                    if done > 3 and lost.isdisjoint(bodies):
                        lost.update(bodies)
                        break
                    peer.answer(jobs)
                    done += 1

    def ask(client):
        answers = [front.send(b"%d %d" % (client, number)).read() for number in range(25)]
        return [(answer.status, answer.body) for answer in answers]

    def ask_all():
        asked = at_once(*(functools.partial(ask, client) for client in range(8)))
        ended.set()
        return asked

    asked, *_ = at_once(ask_all, work, work, work)
    for client, answers in enumerate(asked):
        assert answers == [(200, b"did %d %d" % (client, number)) for number in range(25)]
    assert lost
