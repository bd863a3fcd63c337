# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""What tritonclient's HTTP clients do with a server of `tests/models/tensors.py`; run in an environment of theirs."""

import asyncio
import sys
import time

import numpy as np
import tritonclient.http as th
import tritonclient.http.aio as tha
from tritonclient.utils import InferenceServerException


def inputs_of(array, *, binary=True):
    given = th.InferInput("input", list(array.shape), "FP32")
    given.set_data_from_numpy(array, binary_data=binary)
    return [given]


def refused(call):
    try:
        call()
    except InferenceServerException as error:
        return error.status(), error.message()
    raise AssertionError("it was not refused")


def plain(url):
    rows = np.arange(33, dtype=np.float32).reshape(11, 3)
    with th.InferenceServerClient(url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("doubled")
        assert client.is_model_ready("doubled", "1")
        assert not client.is_model_ready("nobody")
        assert "statistics" in client.get_server_metadata()["extensions"]  # O124
        assert client.get_model_metadata("doubled")["inputs"][0]["shape"] == [-1, 3]
        assert client.get_model_config("doubled")["max_batch_size"] == 4
        # The default: tensors behind the JSON, and all outputs likewise (O135).
        found = client.infer("doubled", inputs_of(rows), request_id="seven")
        np.testing.assert_array_equal(found.as_numpy("output"), rows * 2)
        assert found.get_response()["id"] == "seven"
        for binary in (True, False):
            wanted = [th.InferRequestedOutput("output", binary_data=binary)]
            found = client.infer("doubled", inputs_of(rows, binary=binary), outputs=wanted, model_version="1")
            np.testing.assert_array_equal(found.as_numpy("output"), rows * 2)
        for coding in ("gzip", "deflate"):  # O131
            packed = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
            np.testing.assert_array_equal(
                client.infer("doubled", inputs_of(rows), **packed).as_numpy("output"), rows * 2
            )
        large = np.ones((1, 8 << 20), np.float32)  # 32 MB; 64 are the limit if nobody says (O130)
        assert client.infer("head", inputs_of(large)).as_numpy("output").tolist() == [[1, 1, 1, 1]]
        texts = np.array(["Ada", "Bé"], object)
        name, age = th.InferInput("name", [2], "BYTES"), th.InferInput("age", [2], "INT64")
        for binary in (True, False):
            name.set_data_from_numpy(texts, binary_data=binary)
            age.set_data_from_numpy(np.array([36, 41]))
            found = client.infer("people", [name, age])
            assert [text.decode() for text in found.as_numpy("text")] == ["hello Ada", "hello Bé"]
            assert found.as_numpy("older").tolist() == [37, 42]
        later = [client.async_infer("doubled", inputs_of(rows[:1])) for _ in range(8)]
        for one in later:
            np.testing.assert_array_equal(one.get_result().as_numpy("output"), rows[:1] * 2)
        client.infer("doubled", inputs_of(rows), timeout=5_000_000, priority=1, parameters={"own": True})  # O137
        status, text = refused(lambda: client.infer("doubled", inputs_of(rows[:, :2])))
        assert (status, "got [11, 2]" in text) == ("400", True), text
        assert refused(lambda: client.infer("nobody", inputs_of(rows)))[0] == "404"
        # Settings are read, and not changed (O146).
        traced = {"trace_level": ["OFF"], "trace_mode": "opentelemetry", "trace_rate": "1", "trace_count": "-1"}
        assert client.get_trace_settings() == client.get_trace_settings("doubled") == traced
        assert client.update_trace_settings(settings={}) == traced
        assert refused(lambda: client.get_trace_settings("nobody"))[0] == "404"
        logged = client.get_log_settings()
        assert (logged["log_error"], logged["log_verbose_level"], logged["log_format"]) == (True, 0, "json")
        for change in (
            lambda: client.update_trace_settings(settings={"trace_level": "TIMESTAMPS"}),
            lambda: client.update_log_settings({"log_verbose_level": 1}),
        ):
            status, text = refused(change)
            assert (status, "where the server is started" in text) == ("405", True), text
        assert client.get_log_settings() == logged
        stats = client.get_inference_statistics("doubled")["model_stats"][0]
        assert stats["inference_count"] >= 11
        times = stats["inference_stats"]  # O144
        assert times["success"]["count"] == times["compute_infer"]["count"] >= times["queue"]["count"] > 0
        assert times["compute_infer"]["ns"] > 0
        assert 0 < times["queue"]["ns"] < times["success"]["ns"]
        sizes = {one["batch_size"]: one["compute_infer"] for one in stats["batch_stats"]}
        assert sum(one["count"] for one in sizes.values()) == stats["execution_count"]
        assert sum(size * one["count"] for size, one in sizes.items()) == stats["inference_count"]
        assert 4 in sizes
        assert all(one["ns"] > 0 for one in sizes.values())
        assert abs(stats["last_inference"] / 1000 - time.time()) < 60
        assert len(client.get_inference_statistics()["model_stats"]) > 1
        names = [one["name"] for one in client.get_model_repository_index()]
        assert "doubled" in names
        client.unload_model("wrong")
        assert not client.is_model_ready("wrong")
        client.load_model("wrong")
        assert client.is_model_ready("wrong")


async def with_tasks(url):
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    async with tha.InferenceServerClient(url) as client:
        assert await client.is_server_ready()
        found = await asyncio.gather(*[client.infer("doubled", inputs_of(rows)) for _ in range(16)])
        for one in found:
            np.testing.assert_array_equal(one.as_numpy("output"), rows * 2)
        packed = await client.infer("doubled", inputs_of(rows), response_compression_algorithm="gzip")
        np.testing.assert_array_equal(packed.as_numpy("output"), rows * 2)


plain(sys.argv[1])
asyncio.run(with_tasks(sys.argv[1]))
print("served")
