# SPDX-License-Identifier: Apache-2.0
"""Whose memory it is: what callers hand in stays theirs, what they get is theirs, what the function got is its own."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from collections import OrderedDict

import numpy as np
import pytest
from tests.circles import left_in_circles
from tests.later import jax, jnp, torch
from tests.serving.conftest import PATIENCE_S, cat, wait_until

from forebay import Batch, Serving, hook
from forebay.errors import DeadlineExceeded, ServingCrashed
from forebay.serving.nx_serving.request_runner import RequestRunner
from forebay.workers.processes.child import ReceivedItem
from forebay.workers.runner import WorkerContext


def reusing(options):
    """Answer from one buffer, again and again."""
    buffer = np.zeros(64, dtype=np.int64)

    def run(batch):
        rows = batch.realize()
        return np.multiply(rows, 2, out=buffer[: len(rows)])

    return run


def writing(options):
    """Write into what it is given."""

    def run(batch):
        rows = batch.realize()
        rows *= 2
        return rows

    return run


def crashing(options):
    """Raise."""

    def run(batch):
        raise ValueError("no")

    return run


def ask(runner, *bodies):
    items = [ReceivedItem(body, {"in": "json", "out": "json"}, 1) for body in bodies]
    return [outcome if isinstance(outcome, bytes) else outcome.error for outcome in runner.run(items)]


def opened(serving, batch_size=4):
    runner = RequestRunner(serving, 1, batch_size)
    runner.open(WorkerContext(0, 1))
    return runner


def test_a_buffer_that_is_reused_does_not_change_what_was_answered():  # F32
    with Serving.new(reusing).start(batch_size=2, batch_timeout_ms=1) as process:
        first = process.batched_run(cat(1, 2))
        assert process.batched_run(cat(3)).tolist() == [6]
        assert first.tolist() == [2, 4]
        assert process.batched_run(cat(1, 2, 3, 4, 5)).tolist() == [2, 4, 6, 8, 10]


def test_a_buffer_that_is_reused_does_not_change_what_was_run_inline():  # F32
    warm = Serving.new(reusing).batch_size(2).warm()
    first = warm.run(cat(1, 2, 3))
    assert first.tolist() == [2, 4, 6]
    assert warm.run(cat(7, 8)).tolist() == [14, 16]
    assert first.tolist() == [2, 4, 6]


def test_a_buffer_that_is_reused_does_not_change_what_was_streamed():  # F32
    for events in (
        list(Serving.new(reusing).streaming().batch_size(2).run(cat(1, 2, 3, 4))),
        list(opened_stream(cat(1, 2, 3, 4))),
    ):
        assert [output.tolist() for _, output, _ in events] == [[2, 4], [6, 8]]


def opened_stream(rows):
    with Serving.new(reusing).streaming().start(batch_size=2, batch_timeout_ms=1) as process:
        yield from list(process.batched_run(rows))


def test_a_buffer_that_is_reused_does_not_change_the_values_of_hooks():  # F32
    def build(options):
        buffer = np.zeros(8, dtype=np.int64)

        def run(batch):
            rows = batch.realize()
            for factor in (2, 3, 4):
                hook("part", np.multiply(rows, factor, out=buffer[: len(rows)]))
            return rows

        return run

    serving = Serving.new(build).streaming(hooks=["part"])
    assert [out.tolist() for _, out, *_ in list(serving.run(cat(1)))] == [[2], [3], [4], [1]]
    with serving.start(batch_timeout_ms=1) as process:
        assert [out.tolist() for _, out, *_ in list(process.batched_run(cat(1)))] == [[2], [3], [4], [1]]


def test_a_buffer_that_is_reused_does_not_change_answers_over_http():  # F32
    runner = opened(Serving.new(reusing), batch_size=2)
    assert ask(runner, b"1", b"2", b"3", b"4", b"5") == [b"2", b"4", b"6", b"8", b"10"]


@pytest.mark.parametrize("rows", [1, 2], ids=["alone", "shared"])
def test_the_callers_array_is_never_written_to(rows, pool, gate):  # F33
    given = [np.array([index + 1]) for index in range(rows)]
    with Serving.new(writing).start(batch_size=rows, batch_timeout_ms=100_000) as process:
        calls = [pool.submit(process.batched_run, Batch.concatenate([array])) for array in given]
        assert [call.result(PATIENCE_S).tolist() for call in calls] == [[2 * (index + 1)] for index in range(rows)]
    assert [array.tolist() for array in given] == [[index + 1] for index in range(rows)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_array_is_not_written_to_inline_and_the_answer_is_another(library):  # F33
    given = np.array([1, 2]) if library == "numpy" else torch.tensor([1, 2])
    answer = Serving.new(writing).run(Batch.concatenate([given]))
    assert answer.tolist() == [2, 4]
    assert given.tolist() == [1, 2]
    echoed = Serving.new(lambda options: lambda batch: batch.realize()).run(Batch.concatenate([given]))
    echoed[0] = 9
    assert given.tolist() == [1, 2]


def test_what_a_function_keeps_of_its_input_is_its_own():  # F33
    kept = []
    serving = Serving.new(lambda options: lambda batch: kept.append(batch.realize()) or kept[-1] + 1)
    with serving.start(batch_timeout_ms=1) as process:
        given = np.array([1])
        process.batched_run(Batch.concatenate([given]))
        given[0] = 5
    assert kept[0].tolist() == [1]


def test_one_row_does_not_keep_the_output_of_its_batch(pool):  # F37
    outputs = []

    def run(batch):
        output = np.zeros((batch.size, 1000))
        outputs.append(weakref.ref(output))
        return output

    with Serving.new(lambda options: run).start(batch_size=4, batch_timeout_ms=100_000) as process:
        calls = [pool.submit(process.batched_run, cat(n)) for n in range(4)]
        answers = [call.result(PATIENCE_S) for call in calls]
    del calls
    wait_until(lambda: gc.collect() >= 0 and outputs[0]() is None)
    assert all(answer.base is None for answer in answers)


@pytest.mark.parametrize("rows", [1, 2], ids=["alone", "shared"])
def test_a_dict_is_the_same_type_alone_and_shared(rows, pool):  # F37
    def build(options):
        return lambda batch: OrderedDict(b=batch.realize(), a=batch.realize())

    with Serving.new(build).start(batch_size=rows, batch_timeout_ms=100_000) as process:
        calls = [pool.submit(process.batched_run, cat(n)) for n in range(rows)]
        assert {type(call.result(PATIENCE_S)) for call in calls} == {dict}
    assert type(Serving.new(build).run(cat(1))) is dict


def test_texts_and_numbers_of_several_widths_share_a_call():  # F37
    def run(batch):
        rows = batch.realize()
        return {"text": np.array(["x" * n for n in rows]), "number": rows if rows.max() < 3 else rows / 2}

    serving = Serving.new(lambda options: run).batch_size(2)
    with serving.start(batch_timeout_ms=1) as process:
        for answer in (serving.run(cat(1, 2, 3, 4)), process.batched_run(cat(1, 2, 3, 4))):
            assert answer["text"].tolist() == ["x", "xx", "xxx", "xxxx"]
            assert answer["number"].tolist() == [1, 2, 1.5, 2]


def test_tensors_come_without_the_graph_that_made_them():  # F37
    weight = torch.ones(1, requires_grad=True)

    def build(options):
        return lambda batch: batch.realize() * weight

    def fn(x):
        seen.append(torch.is_inference_mode_enabled())
        return x * weight

    seen = []
    rows = Batch.concatenate([torch.ones(2)])
    for serving in (Serving.new(build), Serving.jit(fn, compiler="torch", backend="eager")):
        answer = serving.run(rows)
        assert not answer.requires_grad
        answer += weight.detach()  # an ordinary tensor, which may be used in any way
        (answer * weight).sum().backward()
    assert seen[0] is True


STRADDLING = """
import threading
import jax, numpy as np
from forebay import Batch, Serving, hook
from forebay.errors import DeadlineExceeded, ServingCrashed

together = threading.Barrier(4)

def build(options):
    def run(batch):
        rows = jax.device_put(batch.realize(), options["device"])
        together.wait(20)
        return {"rows": rows * 2, "more": np.asarray(rows)}
    return run

serving = Serving.new(build, compiler="jax").batch_size(2)
with serving.start(partitions=True, batch_timeout_ms=1) as process:
    answer = process.batched_run(Batch.concatenate([np.arange(8)]))
    assert isinstance(answer["rows"], jax.Array), answer
    assert answer["rows"].device in jax.devices()
    assert np.asarray(answer["rows"]).tolist() == list(range(0, 16, 2)), answer
print("well")
"""


def test_rows_of_several_devices_come_together():  # F34
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", STRADDLING], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "well\n", done.stderr[-2000:]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_function_of_jax_may_donate_what_it_gets(is_ours):  # F107
    def build(options):
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        return lambda batch: step(batch.realize())

    serving = Serving.jit(lambda x: x + 1, compiler="jax", donate_argnums=0) if is_ours else Serving.new(build)
    mine = jnp.arange(4.0)
    with serving.batch_size(4).start(batch_timeout_ms=1) as process:
        for run in (serving.run, process.batched_run, process.batched_run):
            assert np.asarray(run(Batch.concatenate([mine]))).tolist() == [1, 2, 3, 4]
            assert mine.tolist() == [0, 1, 2, 3]


def test_a_batch_that_crashed_is_freed_with_its_error():
    def crash(serving):
        with pytest.raises(ServingCrashed):
            serving.batched_run(cat(1))

    with Serving.new(crashing).start(batch_size=1) as serving:
        crash(serving)
        with left_in_circles() as left:
            for _ in range(20):
                crash(serving)
    assert len(left) < 20, sorted(set(left))


def test_the_rows_of_a_task_that_is_late_are_freed_with_its_error():
    async def be_late(serving):
        with pytest.raises(DeadlineExceeded):
            await serving.batched_run_async(cat(1), timeout_s=0.0)

    async def main(serving):
        await be_late(serving)
        with left_in_circles() as left:
            for _ in range(20):
                await be_late(serving)
        return left

    with Serving.new(writing).start(batch_size=2, batch_timeout_ms=100_000) as serving:
        left = asyncio.run(main(serving))
    assert len(left) < 20, sorted(set(left))


def telling_and_crashing(options):
    """Give a value of a hook, then raise."""

    def run(batch):
        hook("part", batch.realize())
        raise ValueError("no")

    return run


def test_a_stream_with_hooks_that_crashed_is_freed_with_its_error():
    def crash(serving):
        with pytest.raises(ServingCrashed):
            list(serving.batched_run(cat(1)))

    with Serving.new(telling_and_crashing).streaming(hooks=["part"]).start(batch_size=1) as serving:
        crash(serving)
        with left_in_circles() as left:
            for _ in range(20):
                crash(serving)
    assert len(left) < 20, sorted(set(left))
