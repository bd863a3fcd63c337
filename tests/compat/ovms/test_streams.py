# SPDX-License-Identifier: Apache-2.0

"""Streams of requests to one graph: timestamps, input policies, loops, errors, and who is told what and when."""

import asyncio
import gc
import threading
import weakref

import pytest
from tests.compat.ovms.conftest import Stream, graph_text, one_node, python_node, serving, tensor, write
from tests.waiting import reached

from forebay.errors import Code, InvalidRequest, TooLarge
from forebay.surfaces.ovms import graph_calls
from forebay.surfaces.ovms.graph_calls import IS_FINAL, TIMESTAMP, WANTS_FINAL
from forebay.types.call import Failure

pytestmark = pytest.mark.anyio

ECHO = """
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("output", b"+".join(map(bytes, inputs)))]
    """
IMMEDIATE = 'input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler", }'
GENERATE = """
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            for one in bytes(inputs[0]).split(b","):
                yield [Tensor("output", one)] if one else []
    """


def brief(answers):
    """Timestamp, output and content of each answer."""
    return [(one.parameters[TIMESTAMP], one.outputs[0].name, bytes(one.outputs[0].data)) for one in answers]


def at(timestamp, **more):
    return {TIMESTAMP: timestamp, **more}


async def test_every_packet_is_an_answer_with_its_timestamp(tmp_path):  # O66, O68, O77, O85
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor("a", inputs[0]), Tensor("b", inputs[0])]
        """
    write(tmp_path, {"graph.pbtxt": one_node(outputs=("a", "b")), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for number in range(3):
            stream.send(tensor("input", b"%d" % number), id=f"s{number}", **at(43166520112 + number))
        stream.close()
        answers, end = await stream.rest()
    assert end is None
    assert brief(answers) == [(43166520112 + number, name, b"%d" % number) for number in range(3) for name in "ab"]
    assert [one.id for one in answers] == ["s0", "s0", "s1", "s1", "s2", "s2"]
    assert all(one.model == "g" and len(one.outputs) == 1 for one in answers)


async def test_timestamps_go_through_three_nodes(tmp_path):  # O68
    nodes = [
        python_node(name, [f"IN:{name}"], [f"OUT:{target}"], handler=f"{name}.py")
        for name, target in ("xa", "ab", "by")
    ]
    text = graph_text(["OVMS_PY_TENSOR:x"], ["OVMS_PY_TENSOR:y"], *nodes)
    files = {f"{name}.py": ECHO.replace('"output"', repr(target)) for name, target in ("xa", "ab", "by")}
    write(tmp_path, {"graph.pbtxt": text, **files})
    async with serving(tmp_path, name="g") as face:
        answer = await face.infer("g", tensor("x", b"!"), **at(7))
        assert answer.parameters == {TIMESTAMP: 7}
        stream = face.stream("g")
        stream.send(tensor("x", b"!"), **at(-5))
        stream.close()
        answers, _ = await stream.rest()
    assert brief(answers) == [(-5, "y", b"!")]


async def test_timestamps_that_nobody_gives_rise(tmp_path):  # O67
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for _ in range(500):
            stream.send(tensor("input", b"x"))
        stream.send(tensor("input", b"x"), **at(2**60))
        stream.send(tensor("input", b"x"))
        stream.close()
        answers, end = await stream.rest()
    stamps = [one.parameters[TIMESTAMP] for one in answers]
    assert end is None
    assert len(stamps) == 502
    assert stamps == sorted(set(stamps))
    assert stamps[-2:] == [2**60, 2**60 + 1]


async def test_whoever_has_used_up_all_timestamps_is_told_so(tmp_path):  # O67, O69, O71
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"a"), **at(2**63 - 4))
        assert brief([await stream.take()]) == [(2**63 - 4, "output", b"a")]
        with pytest.raises(InvalidRequest, match="no timestamp is left"):
            stream.send(tensor("input", b"b"))
        stream.close()
        assert await stream.rest() == ([], None)
        stream = face.stream("g")
        stream.send(tensor("input", b"a,b,c,d,e,f"), **at(2**63 - 4))
        answers, end = await stream.rest()
    assert [one.parameters[TIMESTAMP] - 2**63 for one in answers] == [-4, -3, -2]
    assert failed(end).code is Code.INVALID_ARGUMENT
    assert "no timestamp is left" in failed(end).message


@pytest.mark.parametrize("given", ["x", 1.5, True, 2**63 - 1, 2**63 - 3, -(2**63), -(2**63) + 2, 2**64])
async def test_what_is_no_timestamp_is_told_and_the_stream_goes_on(tmp_path, given):  # O71
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        with pytest.raises(InvalidRequest, match=TIMESTAMP):
            stream.send(tensor("input", b"x"), **at(given))
        with pytest.raises(InvalidRequest, match=TIMESTAMP):
            await face.infer("g", tensor("input", b"x"), **at(given))
        for good in (-(2**63) + 3, 2**63 - 4):
            stream.send(tensor("input", b"x"), **at(good))
        stream.close()
        answers, end = await stream.rest()
    assert [one.parameters[TIMESTAMP] for one in answers] == [-(2**63) + 3, 2**63 - 4]
    assert end is None


async def test_what_is_wrong_with_one_request_leaves_the_stream_open(tmp_path):  # O81
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"1"))
        with pytest.raises(InvalidRequest, match="expected 8 bytes"):
            stream.send(tensor("input", b"1", (2,), "FP32"))
        with pytest.raises(InvalidRequest, match="no input 'inptu'"):
            stream.send(tensor("inptu", b"1"))
        stream.send(tensor("input", b"2"))
        stream.close()
        answers, end = await stream.rest()
    assert [content for _, _, content in brief(answers)] == [b"1", b"2"]
    assert end is None


async def test_packets_of_one_timestamp_come_together_in_whichever_requests(tmp_path):  # O60
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b")), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("b", b"b"), **at(64))
        stream.send(tensor("a", b"a"), **at(64))
        assert brief([await stream.take()]) == [(64, "output", b"a+b")]
        stream.close()


async def test_a_packet_without_company_waits_until_none_can_come(tmp_path):  # O61, O64
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b")), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("a", b"a"), **at(1))
        stream.send(tensor("b", b"b"), **at(2))
        assert brief([await stream.take()]) == [(1, "output", b"a")]
        assert stream.answers.empty()
        stream.close()
        answers, _ = await stream.rest()
    assert brief(answers) == [(2, "output", b"b")]


async def test_requests_that_wait_for_company_do_not_count_as_inside(tmp_path):  # O61, O64
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b")), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for number in range(300):
            stream.send(tensor("a", b"a"), **at(number))
        await reached(lambda: not stream.inner.pending, "them to count no more, for who reads what they wait for")
        for number in range(300):
            stream.send(tensor("b", b"b"), **at(number))
        assert stream.inner.pending == 600  # nothing has run yet: this function has let nobody else on the loop
        stream.close()
        answers, end = await stream.rest()
    assert end is None
    assert brief(answers) == [(number, "output", b"a+b") for number in range(300)]


async def test_a_stream_knows_how_many_requests_it_holds(tmp_path):  # F78: they count until they were worked off
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b")), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        assert stream.inner.held == 0
        for number in range(3):
            stream.send(tensor("a", b"a"), **at(number))
        await reached(lambda: not stream.inner.pending, "them to wait")
        assert stream.inner.held == 3
        stream.send(tensor("b", b"b"), **at(2))
        await reached(lambda: not stream.inner.held, "all to be worked off")
        stream.close()
        assert (await stream.rest())[1] is None


async def test_only_so_many_requests_may_wait_for_company(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_calls, "MAX_WAITING", 5)
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b")), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for number in range(5):
            stream.send(tensor("a", b"a"), **at(number))
        stream.send(tensor("b", b"b"), **at(0))
        assert brief([await stream.take()]) == [(0, "output", b"a+b")]
        for number in range(5, 8):
            stream.send(tensor("a", b"a"), **at(number))
        answers, end = await stream.rest()
        assert answers == []
        assert type(failed(end)) is TooLarge
        assert "more than 5 requests of this stream wait for packets on 'b'" in failed(end).message
        await reached(lambda: not face.app.find("g").endpoint.in_flight, "its end")


async def test_labels_come_once_and_images_after_them(tmp_path):  # O62, O15
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                for input in inputs:
                    if input.name == "labels":
                        self.labels = bytes(input)
                    else:
                        return [Tensor("result", self.labels + bytes(input))]
        """
    text = one_node(inputs=("labels", "image"), outputs=("result",), more=IMMEDIATE)
    write(tmp_path, {"graph.pbtxt": text, "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("labels", b"L"))
        for number in range(3):
            stream.send(tensor("image", b"%d" % number))
        stream.close()
        answers, end = await stream.rest()
    assert [content for _, _, content in brief(answers)] == [b"L0", b"L1", b"L2"]
    assert end is None


async def test_a_barrier_takes_what_came_whatever_its_timestamp(tmp_path):
    more = 'input_stream_handler { input_stream_handler: "BarrierInputStreamHandler" }'
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b"), more=more), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("a", b"a"), **at(1))
        stream.send(tensor("b", b"b"), **at(9))
        assert brief([await stream.take()]) == [(1, "output", b"a+b")]
        stream.close()


async def test_a_client_gets_only_the_outputs_that_there_are(tmp_path):  # O65
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                content = bytes(inputs[0])
                return [Tensor("result" if content == b"good" else "error_message", content)]
        """
    write(tmp_path, {"graph.pbtxt": one_node(outputs=("result", "error_message")), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for content in (b"good", b"bad", b"good"):
            stream.send(tensor("input", content))
        stream.close()
        answers, _ = await stream.rest()
    assert [name for _, name, _ in brief(answers)] == ["result", "error_message", "result"]


async def test_timestamps_must_rise_on_each_input(tmp_path):  # O70, O74
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"1"), **at(3))
        assert brief([await stream.take()]) == [(3, "output", b"1")]
        stream.send(tensor("input", b"2"), **at(2))
        answers, end = await stream.rest()
        assert answers == []
        assert failed(end).code is Code.INVALID_ARGUMENT
        assert "2 is too late" in failed(end).message
        assert face.app.find("g").endpoint.in_flight == 0  # it ended while it was fed, and must not begin again
        stream = face.stream("g")  # O83
        stream.send(tensor("input", b"1"), **at(2))
        assert await stream.take()
        stream.close()


async def test_an_error_ends_the_stream_at_once(tmp_path):  # O82, O74
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor("output", b"%d" % (10 // int(bytes(inputs[0]))))]
        """
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for content in (b"5", b"0", b"1"):
            stream.send(tensor("input", content))
        answers, end = await stream.rest()  # the client says nothing more
        assert [content for _, _, content in brief(answers)] == [b"2"]
        assert "ZeroDivisionError" in failed(end).message
        stream.send(tensor("input", b"1"))  # too late to matter
        await face.infer("g", tensor("input", b"1"))


async def test_streams_without_a_request_leave_nothing(tmp_path):  # O84
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        threads = threading.active_count()
        for _ in range(100):
            stream = face.stream("g")
            with pytest.raises(InvalidRequest, match="no input 'nope'"):
                stream.send(tensor("nope", b"x"))
            stream.close()
            assert await stream.rest() == ([], None)
        assert threading.active_count() <= threads  # one of another test may end meanwhile
        assert face.app.find("g").endpoint.in_flight == 0


# --- generators ------------------------------------------------------------------------------------------------------


async def test_a_generator_gives_a_set_a_moment(tmp_path):  # O17, O18, O69
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                for step in range(3):
                    yield [Tensor("a", b"%d" % step), Tensor("b", b"%d" % step)]
                yield []
                yield [Tensor("a", b"end")]
        """
    write(tmp_path, {"graph.pbtxt": one_node(outputs=("a", "b"), loops=True), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"x"), **at(64))
        stream.close()
        answers, end = await stream.rest()
    assert end is None
    assert [(stamp, name) for stamp, name, _ in brief(answers)] == [
        *((64 + step, name) for step in range(3) for name in "ab"),
        (68, "a"),
    ]


async def test_a_new_request_after_the_last_item_begins_again(tmp_path):  # O72
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for start in (0, 100):
            stream.send(tensor("input", b"a,b"), **at(start))
            answers = [await stream.take(), await stream.take()]
            assert brief(answers) == [(start, "output", b"a"), (start + 1, "output", b"b")]
        stream.send(tensor("input", b"c"))  # the clock is far ahead
        assert (await stream.take()).outputs
        stream.close()


def failed(end):
    """The error that a stream ended with."""
    return end.error


def resting(face):
    """Whether no node has anything to do."""
    return not any(endpoint.in_flight for endpoint in face.app.find("g").nodes.values())


async def test_a_request_before_the_last_moment_of_a_generator_is_told_so(tmp_path):  # O69, O122
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"a,b,c"), **at(0, **{WANTS_FINAL: True}))
        assert [(await stream.take()).parameters[IS_FINAL] for _ in range(4)] == [False, False, False, True]
        stream.send(tensor("input", b"d"), **at(1))
        answers, end = await stream.rest()
    assert answers == []
    assert failed(end).code is Code.INVALID_ARGUMENT
    assert "'python_node' wrote to 'output' at timestamp 1, which is already at 2" in failed(end).message


async def test_two_results_of_one_moment_are_told(tmp_path):  # O62, O122
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b"), more=IMMEDIATE), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        with pytest.raises(InvalidRequest, match="wrote to 'output' at timestamp 0, which is already at 0"):
            await face.infer("g", tensor("a", b"a"), tensor("b", b"b"))


@pytest.mark.parametrize("split", [False, True])
async def test_a_loop_with_two_inputs_takes_them_in_one_request_or_two(tmp_path, split):  # O63
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                for one in inputs:
                    yield [Tensor("output", one)]
        """
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b"), loops=True), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        if split:
            stream.send(tensor("a", b"a"), **at(5))
            stream.send(tensor("b", b"b"), **at(5))
        else:
            stream.send(tensor("a", b"a"), tensor("b", b"b"), **at(5))
        stream.close()
        answers, end = await stream.rest()
    assert brief(answers) == [(5, "output", b"a"), (6, "output", b"b")]
    assert end is None


GATED = """
    import threading
    from pyovms import Tensor
    gate = threading.Semaphore(0)
    closed = threading.Event()
    class OvmsPythonModel:
        def initialize(self, kwargs):
            OvmsPythonModel.made = self
        def execute(self, inputs):
            try:
                step = 0
                while True:
                    yield [Tensor("output", b"%d" % step)]
                    step += 1
                    gate.acquire(timeout=60)
            except GeneratorExit:
                closed.set()
                raise
    """


def handler_of(face):
    """The module of the only handler."""
    (pool,) = (endpoint.pool for endpoint in face.app.find("g").nodes.values())
    return __import__("sys").modules[type(pool._workers[0].runner._model).__module__]


async def test_an_item_is_sent_before_the_next_is_computed(tmp_path):  # O20
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GATED})
    async with serving(tmp_path, name="g") as face:
        module = handler_of(face)
        stream = face.stream("g")
        stream.send(tensor("input", b"x"))
        for step in range(3):
            assert bytes((await stream.take()).outputs[0].data) == b"%d" % step
            module.gate.release()  # only now can the next one be made
        stream.cancel()
        module.gate.release()


async def test_a_client_that_goes_away_ends_its_generator(tmp_path):  # O19
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GATED})
    async with serving(tmp_path, name="g") as face:
        module = handler_of(face)
        stream = face.stream("g")
        stream.send(tensor("input", b"x"))
        await stream.take()
        stream.cancel()
        del stream
        module.gate.release()  # the step that runs ends, and no other begins
        await reached(module.closed.is_set, "GeneratorExit")
        assert face.app.find("g").endpoint.in_flight == 0


async def test_a_generator_that_runs_at_the_end_is_closed_before_the_model_is_finalised(tmp_path):  # O12, O19
    handler = """
        import threading
        from pyovms import Tensor
        gate = threading.Semaphore(0)
        events = []
        class OvmsPythonModel:
            def execute(self, inputs):
                try:
                    while True:
                        yield [Tensor("output", b"")]
                        gate.acquire(timeout=60)
                finally:
                    events.append("closed")
            def finalize(self):
                events.append("finalised")
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        module = handler_of(face)
        stream = face.stream("g")
        stream.send(tensor("input", b"x"))
        await stream.take()
        ending = asyncio.create_task(face.app.drain(0.0))
        _, end = await stream.rest()
        assert isinstance(end, Failure)
        assert end.error.code.name == "UNAVAILABLE"
        module.gate.release()
        await ending
        assert module.events == ["closed", "finalised"]


async def test_a_client_that_has_said_all_gets_all(tmp_path):  # O19
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b",".join(b"%d" % number for number in range(50))))
        stream.close()
        answers, end = await stream.rest()
    assert [content for _, _, content in brief(answers)] == [b"%d" % number for number in range(50)]
    assert end is None


async def test_one_buffer_for_all_items_corrupts_none(tmp_path):  # O21
    handler = """
        import numpy as np
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                buffer = np.zeros(4, np.uint8)
                for _ in range(5):
                    buffer += 1
                    yield [Tensor("output", buffer)]
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"x"))
        stream.close()
        answers, _ = await stream.rest()
    assert [content for _, _, content in brief(answers)] == [bytes([step] * 4) for step in range(1, 6)]


async def test_data_for_a_node_that_generates_past_its_timestamp_ends_the_stream(tmp_path):  # O73
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GATED})
    async with serving(tmp_path, name="g") as face:
        module = handler_of(face)
        stream = face.stream("g")
        stream.send(tensor("input", b"x"), **at(0))
        await stream.take()  # the generator is blocked in the handler now, or will be
        stream.send(tensor("input", b"y"), **at(1))
        module.gate.release()  # not its last step, as it turns out
        _, end = await stream.rest()
        assert "'python_node' is already processing data" in failed(end).message
        assert "open a new stream" in failed(end).message
        module.gate.release()


async def test_data_for_a_node_that_generates_waits_for_its_timestamp(tmp_path):  # O73, F93
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"a,b,c"), **at(0))
        stream.send(tensor("input", b"d,e"), **at(3))
        stream.close()
        answers, end = await stream.rest()
        assert end is None
        assert brief(answers) == [(number, "output", text.encode()) for number, text in enumerate("abcde")]


async def test_a_generator_that_raises_ends_the_stream_after_its_items(tmp_path):  # O82
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                yield [Tensor("output", b"1")]
                raise ValueError("worn out")
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"x"))
        answers, end = await stream.rest()
    assert [content for _, _, content in brief(answers)] == [b"1"]
    assert "ValueError: worn out" in failed(end).message


async def test_one_answer_is_not_for_generators(tmp_path):  # O78
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                if bytes(inputs[0]) == b"list":
                    return [Tensor("output", b"whole")]
                return ([Tensor("output", b"part")] for _ in range(2))
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        answer = await face.infer("g", tensor("input", b"list"))
        assert bytes(answer.outputs[0].data) == b"whole"
        with pytest.raises(InvalidRequest, match="use ModelStreamInfer"):
            await face.infer("g", tensor("input", b"parts"))


async def test_streams_that_generate_take_turns_on_one_thread(tmp_path):  # O76
    handler = """
        from pyovms import Tensor
        order = []
        class OvmsPythonModel:
            def execute(self, inputs):
                name = bytes(inputs[0])
                for step in range(20):
                    order.append(name)
                    yield [Tensor("output", name + b"%d" % step)]
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g", threads=2) as face:
        streams = {name: face.stream("g") for name in (b"a", b"b", b"c", b"d")}
        for name, stream in streams.items():
            stream.send(tensor("input", name))
            stream.close()
        for name, stream in streams.items():
            answers, end = await stream.rest()
            assert [content for _, _, content in brief(answers)] == [name + b"%d" % step for step in range(20)]
            assert end is None
        order = handler_of(face).order
    # None of them had to wait for another to end.
    assert max(order.index(name) for name in streams) < min(len(order) - order[::-1].index(name) for name in streams)


async def test_a_client_that_wants_to_know_is_told_when_its_request_is_over(tmp_path):  # O87
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        stream.send(tensor("input", b"a,b"), id="1", **at(0, **{WANTS_FINAL: True}))
        answers = [await stream.take() for _ in range(3)]
        assert [one.parameters[IS_FINAL] for one in answers] == [False, False, True]
        assert answers[2].outputs == []
        assert [one.id for one in answers] == ["1"] * 3
        stream.send(tensor("input", b"c"), id="2", **at(50))
        answer = await stream.take()
        assert IS_FINAL not in answer.parameters
        assert answer.id == "2"
        stream.close()
        assert await stream.rest() == ([], None)


async def test_answers_have_the_id_of_their_request_in_whichever_order_timestamps_come(tmp_path):  # O70, O85, O87
    nodes = [python_node(f"n{name}", [f"IN:{name}"], [f"OUT:{name}_out"]) for name in "ab"]
    sides = [[f"OVMS_PY_TENSOR_{name.upper()}:{name}{more}" for name in "ab"] for more in ("", "_out")]
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor(inputs[0].name + "_out", inputs[0])]
        """
    write(tmp_path, {"graph.pbtxt": graph_text(*sides, *nodes), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for name, asked, timestamp in (("a", "first", 10), ("b", "second", 5), ("b", "third", 7)):
            stream.send(tensor(name, b"!"), id=asked, **at(timestamp, **{WANTS_FINAL: True}))
            told = [await stream.take() for _ in range(2)]
            assert [(one.id, one.parameters) for one in told] == [
                (asked, {TIMESTAMP: timestamp, IS_FINAL: is_final}) for is_final in (False, True)
            ]
        stream.close()
        assert await stream.rest() == ([], None)


async def test_each_of_several_requests_of_one_timestamp_is_told_that_it_is_over(tmp_path):  # O87
    write(tmp_path, {"graph.pbtxt": one_node(inputs=("a", "b")), "model.py": ECHO})
    async with serving(tmp_path, name="g") as face:
        stream = face.stream("g")
        for name in "ab":
            stream.send(tensor(name, b"!"), id=name, **at(10, **{WANTS_FINAL: True}))
        told = [await stream.take() for _ in range(3)]
        assert [(one.id, one.parameters[IS_FINAL]) for one in told] == [("b", False), ("a", True), ("b", True)]
        stream.close()
        assert await stream.rest() == ([], None)


async def test_streams_that_come_and_go_leave_nothing(tmp_path):
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        threads = threading.active_count()
        for number in range(100):
            stream = face.stream("g")
            stream.send(tensor("input", b"x," * 40))
            for _ in range(number % 3):
                await stream.take()
            stream.cancel()
        await reached(lambda: not face.app.find("g").endpoint.in_flight, "all to leave")
        stream = None
        await reached(lambda: resting(face), "all nodes to rest")
        await asyncio.sleep(0)
        gc.collect()
        left = [one for one in gc.get_objects() if type(one).__name__ in {"GraphRun", "PacketStream", "GraphStream"}]
        assert len(left) < 60  # who was called off leaves its place in a queue when that is next looked at
        assert threading.active_count() <= threads  # one of another test may end meanwhile


class Holding(Stream):
    """A stream that holds what it was told to call, as the traceback of a call that was called off does."""

    def _answered(self, answer, taken):
        self.held = taken
        super()._answered(answer, taken)


@pytest.mark.parametrize("ending", ["close", "cancel"])
async def test_a_stream_that_holds_its_last_part_is_let_go_of(tmp_path, ending):
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": GENERATE})
    async with serving(tmp_path, name="g") as face:
        stream = Holding(face, "g")
        stream.send(tensor("input", b"a"))
        await stream.take()
        getattr(stream, ending)()
        await stream.rest()
        kept = weakref.ref(stream)
        del stream
        gc.collect()
        assert kept() is None


async def test_a_client_that_takes_nothing_stops_its_own_generator_only(tmp_path):
    write(
        tmp_path,
        {
            "graph.pbtxt": one_node(loops=True),
            "model.py": GENERATE.replace('Tensor("output", one)', 'Tensor("output", one * 100000)'),
        },
    )
    async with serving(tmp_path, name="g") as face:
        slow = face.stream("g")
        taken = []
        slow.inner._on_answer = lambda answer, take: taken.append(take)
        slow.send(tensor("input", b",".join([b"x"] * 1000)))
        quick = face.stream("g")
        quick.send(tensor("input", b",".join([b"y"] * 200)))
        quick.close()
        answers, _ = await quick.rest()
        assert len(answers) == 200
        assert len(taken) < 200
        slow.cancel()


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()", "MemoryError()"])
async def test_whatever_a_generator_raises_ends_its_own_stream_only(tmp_path, raised):  # O82, O83
    handler = f"""
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                for step in range(4):
                    yield [Tensor("output", b"%d" % step)]
                    if step == 1 and bytes(inputs[0]) == b"bad":
                        raise {raised}
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g", threads=2) as face:
        streams = {name: face.stream("g") for name in (b"good", b"bad", b"also good")}
        for name, stream in streams.items():
            stream.send(tensor("input", name))
        answers, end = await streams[b"bad"].rest()
        assert [content for _, _, content in brief(answers)] == [b"0", b"1"]
        assert raised.partition("(")[0] in failed(end).message
        for name in (b"good", b"also good"):
            streams[name].close()
            answers, end = await streams[name].rest()
            assert (len(answers), end) == (4, None)


async def test_a_handler_that_hangs_takes_no_other_stream_with_it(tmp_path, monkeypatch):
    handler = """
        import threading
        from pyovms import Tensor
        gate = threading.Event()
        class OvmsPythonModel:
            def execute(self, inputs):
                yield [Tensor("output", b"0")]
                if bytes(inputs[0]) == b"hang":
                    gate.wait(60)
                yield [Tensor("output", b"1")]
        """
    write(tmp_path, {"graph.pbtxt": one_node(loops=True), "model.py": handler})
    async with serving(tmp_path, name="g", threads=2, stuck_s=0.05) as face:
        gate = handler_of(face).gate
        for _ in range(5):  # more than there are threads
            stream = face.stream("g")
            stream.send(tensor("input", b"hang"))
            await stream.take()
            stream.cancel()
        stream = face.stream("g")
        stream.send(tensor("input", b"go"))
        stream.close()
        answers, end = await stream.rest()
        assert (len(answers), end) == (2, None)
        gate.set()
