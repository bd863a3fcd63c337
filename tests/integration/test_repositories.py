# SPDX-License-Identifier: Apache-2.0
"""Models of folders and buckets, served: from the socket to the store."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.buckets import BUSY, FORBIDDEN, Faults, running_buckets
from tests.hostile_store import HostileStore
from tests.models import boosted
from tests.waiting import PATIENCE_S

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def times(factor):
    """The bytes of a model that multiplies."""
    helper, float_ = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "k"], ["y"])],
        "times",
        [helper.make_tensor_value_info("x", float_, ["n", 2])],
        [helper.make_tensor_value_info("y", float_, ["n", 2])],
        [onnx.numpy_helper.from_array(np.array([factor], np.float32), "k")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


@pytest.fixture(scope="module")
def buckets(tmp_path_factory):
    with running_buckets(tmp_path_factory.mktemp("store")) as found:
        yield found


def ask(server, path, sample=None):
    answer = server.client.post(f"/models/{path}", json={"x": [1, 2]} if sample is None else sample)
    return answer.json()["y"] if answer.status_code == 200 and sample is None else answer


def options(tmp_path):
    return ["--worker-kind", "thread", "--repository-poll-s", "0.2", "--repository-folder", str(tmp_path / "cache")]


def test_a_bucket_of_model_files_in_the_tree_of_other_servers(buckets, serve, tmp_path, eventually):
    bucket = "models-of-triton"
    buckets.make(bucket)
    buckets.put(f"{bucket}/all/double/config.pbtxt", b"name: 'double'")
    buckets.put(f"{bucket}/all/double/1/model.onnx", times(1))
    buckets.put(f"{bucket}/all/double/2/model.onnx", times(2))
    buckets.put(f"{bucket}/all/triple/1/net.onnx", times(3))
    buckets.put(f"{bucket}/all/broken/1/net.onnx", b"no model")
    server = serve(None, f"s3://{bucket}/all", *options(tmp_path), "--max-models", "1", env=buckets.environment())
    assert ask(server, "double") == [2, 4]
    assert ask(server, "triple") == [3, 6]
    assert server.client.get("/v2/models/double/ready").json() == {"name": "double", "ready": True}
    assert server.client.get("/v2/models/double").json()["inputs"][0]["name"] == "x"  # loaded for that
    answer = ask(server, "broken")
    assert answer.status_code == 503
    assert "version '1' of 'broken' cannot be loaded: " in answer.json()["error"]["message"]
    told = server.client.get("/models").json()
    assert {one["name"] for one in told["models"]} == {"double", "triple", "broken"}
    (place,) = told["repositories"]
    assert place["problems"] == ["double/config.pbtxt is not read: it is the configuration of another server"]
    for name in ("..%2f..%2fetc", "double%2f1", "no-such"):
        assert server.client.post(f"/models/{name}", json={}).status_code == 404
    assert ask(server, "double/versions/1").status_code == 404
    buckets.put(f"{bucket}/all/double/3/model.onnx", times(30), old=False)
    eventually(lambda: ask(server, "double") == [30, 60])
    assert server.client.get("/readyz").status_code == 200
    assert ask(server, "double/versions/3") == [30, 60]


def test_trees_are_replaced_while_they_serve_and_no_request_fails(serve, tmp_path, eventually):
    pytest.importorskip("xgboost")
    pytest.importorskip("lightgbm")
    files = [tmp_path / "all" / name for name in ("boost/1/any.ubj", "light/1/model.txt")]
    data = boosted.rows(1, seed=5)
    for file in files:
        file.parent.mkdir(parents=True)
    after = [boosted.predicted(boosted.save(tmp_path / file.name, seed=4), data)[0] for file in files]
    before = [boosted.predicted(boosted.save(file, seed=3), data)[0] for file in files]
    server = serve(tmp_path / "all", *options(tmp_path))
    sample = {"x": [None if one != one else one for one in data[0].tolist()]}  # noqa: PLR0124
    answers = []

    def are(expected):
        answers.append([ask(server, name, sample).json()["predict"] for name in ("boost", "light")])
        return answers[-1] == expected

    assert are(before)
    for file in files:
        (tmp_path / file.name).rename(file)
    eventually(lambda: are(after))
    assert all(
        set(found) <= set(pair)
        for found, pair in zip(zip(*answers, strict=True), zip(before, after, strict=True), strict=True)
    )
    assert before != after


def test_a_server_whose_only_model_is_broken_is_not_ready_until_it_is_mended(serve, tmp_path, eventually):
    file = tmp_path / "all" / "net" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no model")
    server = serve(tmp_path / "all", *options(tmp_path))
    answer = server.client.get("/readyz")
    assert answer.status_code == 503
    (problem,) = answer.json()["problems"]
    assert "version '1' of 'net' cannot be loaded: " in problem
    assert server.client.get("/v2/health/ready").status_code == 503
    eventually(lambda: f"not ready: {problem}" in server.log)
    assert "no version of it is served" in server.log
    assert "the served version stays" not in server.log
    (tmp_path / "whole").write_bytes(times(2))
    (tmp_path / "whole").rename(file)
    eventually(lambda: server.client.get("/readyz").status_code == 200)
    assert ask(server, "net") == [2, 4]


def test_as_many_models_on_the_disk_as_in_memory_are_enough(buckets, serve, tmp_path, eventually):  # F98
    bucket = "two-and-two"
    buckets.make(bucket)
    for number, name in enumerate("abcd", 1):
        buckets.put(f"{bucket}/{name}/1/model.onnx", times(number))
    more = ["--max-models", "2", "--max-disk-models", "2"]
    server = serve(None, f"s3://{bucket}", *options(tmp_path), *more, env=buckets.environment())
    for _ in range(5):
        for number, name in enumerate("abcd", 1):
            assert ask(server, name) == [number, 2 * number]
    assert ask(server, "a") == [1, 2]
    buckets.put(f"{bucket}/a/2/model.onnx", times(10), old=False)
    eventually(lambda: ask(server, "a") == [10, 20])
    assert server.metric("forebay_load_failures_total") == 0


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_class_for_all_models_of_a_bucket(buckets, serve, tmp_path, kind):
    bucket = f"greetings-{kind}"
    buckets.make(bucket)
    for name, version, text in (("formal", 1, "Good day,"), ("formal", 7, "Dear"), ("short", 1, "Hi")):
        buckets.put(f"{bucket}/{name}/{version}/text.txt", text.encode())
    env = {**buckets.environment(), "FOREBAY_TEST_BUCKET": f"s3://{bucket}"}
    more = ["--repository-folder", str(tmp_path), "--worker-kind", kind, "--versions", "all", "--lazy"]
    server = serve("stocked.py", *more, env=env)
    assert ask(server, "formal", "Ada").json() == "Dear Ada"
    assert ask(server, "formal/versions/1", "Ada").json() == "Good day, Ada"
    assert ask(server, "short/where", "Ada").json() == "short/1"
    assert ask(server, "formal/where", "Ada").json() == "formal/7"
    assert ask(server, "formal", {"no": "text"}).status_code == 422


def test_nobody_notices_that_versions_come_and_go(buckets, serve, tmp_path, eventually):  # N109
    bucket = "coming-and-going"
    buckets.make(bucket)
    buckets.put(f"{bucket}/net/1/model.onnx", times(1))
    server = serve(None, f"s3://{bucket}", *options(tmp_path), env=buckets.environment())
    each: list[list] = [[], []]
    end = threading.Event()

    def go(found):
        while not end.is_set():
            found.append(ask(server, "net"))

    clients = [threading.Thread(target=go, args=(found,)) for found in each]
    for client in clients:
        client.start()
    for version in range(2, 6):
        buckets.put(f"{bucket}/net/{version}/model.onnx", times(version), old=False)
        eventually(lambda version=version: all([version, 2.0 * version] in found for found in each))
        buckets.remove(f"{bucket}/net/{version - 1}/model.onnx")
    end.set()
    for client in clients:
        client.join()
    for found in each:
        values = [answer[0] if isinstance(answer, list) else answer.text for answer in found]
        assert values == sorted(values)
    assert server.metric("forebay_requests_total", endpoint="net", version="5", code="ok") > 0
    assert server.metric("forebay_loads_total") == 5
    eventually(lambda: server.metric("forebay_repository_versions", repository=f"s3://{bucket}") == 1)
    assert server.metric("forebay_repository_copied_bytes_total") > 0


def test_a_rollback_by_hand_stays_though_there_is_room_for_one(buckets, serve, tmp_path, eventually):
    bucket = "rolled-back"
    buckets.make(bucket)
    for version in (1, 2):
        buckets.put(f"{bucket}/net/{version}/model.onnx", times(version))
    more = ["--max-models", "1", "--manage"]
    server = serve(None, f"s3://{bucket}", *options(tmp_path), *more, env=buckets.environment())
    assert ask(server, "net") == [2, 4]
    assert server.client.post("/models/net/versions/1/swap").status_code == 200
    buckets.put(f"{bucket}/other/1/model.onnx", times(5), old=False)
    eventually(lambda: ask(server, "other") == [5, 10])
    assert ask(server, "net") == [1, 2]
    assert "unloaded by hand" in ask(server, "net/versions/2").text
    buckets.put(f"{bucket}/net/3/model.onnx", times(3), old=False)
    eventually(lambda: ask(server, "net") == [3, 6])


def test_a_store_that_fails_leaves_what_is_served(buckets, serve, tmp_path, eventually):  # N115
    bucket = "failing-store"
    buckets.make(bucket)
    for name in "ab":
        buckets.put(f"{bucket}/{name}/1/model.onnx", times(1))
    faults = Faults(buckets.port)
    server = serve(None, f"s3://{bucket}", *options(tmp_path), "--lazy", env=buckets.environment(faults.port))
    assert ask(server, "a") == [1, 2]
    faults.fault = lambda *_: (403, FORBIDDEN)
    assert ask(server, "a") == [1, 2]
    answer = ask(server, "b")
    assert answer.status_code == 503
    assert "AccessDenied: You shall not pass" in answer.json()["error"]["message"]
    place = lambda: server.client.get("/models").json()["repositories"][0]  # noqa: E731
    eventually(lambda: "AccessDenied" in place()["problem"])
    assert server.client.get("/readyz").status_code == 200
    faults.fault = lambda *_: None
    eventually(lambda: ask(server, "b") == [1, 2])
    faults.close()


def test_how_far_a_version_has_come_is_told(buckets, serve, tmp_path, eventually):
    bucket = "slow-store"
    buckets.make(bucket)
    buckets.put(f"{bucket}/net/1/model.onnx", times(1))
    faults = Faults(buckets.port)
    server = serve(None, f"s3://{bucket}", *options(tmp_path), env=buckets.environment(faults.port))
    faults.fault = lambda _method, path: ("slow", 1) if "model.onnx" in path else None
    buckets.put(f"{bucket}/net/2/model.onnx", times(2), old=False)

    def told():
        versions = server.client.get("/models/net").json()["versions"]
        return [(one["version"], one["state"], "of 0.0 MB are here" in one.get("progress", "")) for one in versions]

    eventually(lambda: told() == [("1", "ready", False), ("2", "loading", True)])
    faults.close()


def test_a_store_that_cannot_be_asked_at_the_start_delays_it(buckets, serve, cli, tmp_path):  # N59
    bucket = "late-store"
    buckets.make(bucket)
    buckets.put(f"{bucket}/a/1/model.onnx", times(1))
    faults = Faults(buckets.port)
    env = buckets.environment(faults.port)
    faults.fault = lambda *_: (503, BUSY)
    told = cli("check", f"s3://{bucket}", *options(tmp_path), env=env)
    assert (told.returncode, told.stderr.count("\n")) == (0, 1)
    assert "SlowDown: Reduce your request rate" in told.stderr
    left = [9]  # each look is tried four times

    def fault(*_):
        left[0] -= 1
        return (503, BUSY) if left[0] > 0 else None

    faults.fault = fault
    server = serve(None, f"s3://{bucket}", *options(tmp_path), env=env)  # returns once it is ready
    assert ask(server, "a") == [1, 2]
    lines = [line for line in server.lines if "retrying in 0.2 s, no model is served until then" in line]
    assert len(lines) == 2
    faults.close()


def test_a_disk_that_fills_up_leaves_what_is_served(buckets, serve, tmp_path, eventually, small_disk):
    """Disk full: a clear error, the served versions keep answering; a real disk, a real server."""
    bucket = "full-disk"
    buckets.make(bucket)
    buckets.put(f"{bucket}/net/1/model.onnx", times(1))
    buckets.put(f"{bucket}/large/1/model.onnx", times(5))
    buckets.put(f"{bucket}/large/1/weights.bin", bytes(300_000))
    server = serve(
        None, f"s3://{bucket}", *options(tmp_path), "--lazy", "--repository-folder", small_disk.folder,
        env=buckets.environment(),
    )  # fmt: skip
    assert ask(server, "net") == [1, 2]
    refused = ask(server, "large")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    told = refused.json()["error"]["message"]
    assert "version '1' of 'large' cannot be loaded: " in told
    assert "has room for" in told
    assert "make room there" in told
    assert ask(server, "net") == [1, 2]
    # A version that is to take over, and has no room in the middle of its way here.
    small_disk.fill()
    buckets.put(f"{bucket}/net/2/model.onnx", times(2), old=False)
    buckets.put(f"{bucket}/net/2/weights.bin", bytes(100_000), old=False)

    def problem():
        (one,) = [one for one in server.client.get("/models").json()["models"] if one["name"] == "net"]
        return next((each.get("error") for each in one["versions"] if each["version"] == "2"), None)

    eventually(lambda: "make room there" in (problem() or ""))
    assert ask(server, "net") == [1, 2]
    assert server.client.get("/readyz").status_code == 200
    small_disk.empty()
    eventually(lambda: ask(server, "net") == [2, 4])
    assert not list(small_disk.folder.rglob("coming-*"))


def test_a_store_that_hangs_at_the_start_keeps_no_port_closed(serve, tmp_path, eventually):  # F125
    with contextlib.closing(HostileStore()) as store:
        store.objects["bucket-1/net/1/model.onnx"] = times(2)
        may_answer = threading.Event()
        store.answer = lambda _path, _query: may_answer.wait() and None
        server = serve(None, "s3://bucket-1", *options(tmp_path), env=store.environment(), ready=False)
        eventually(lambda: server.lines and any("was not listed within" in line for line in server.lines))
        may_answer.set()
        server.wait_ready()


@pytest.mark.skipif(subprocess.run(["unshare", "-fp", "true"], check=False).returncode != 0, reason="no namespaces")
def test_the_first_process_of_a_container_ends_at_sigterm_while_a_store_hangs(tmp_path, eventually):  # F104
    with contextlib.closing(HostileStore()) as store:
        store.answer = lambda _path, _query: store.end.wait() and None
        command = ["unshare", "-fp", "--kill-child", sys.executable, "-m", "forebay", "serve", "s3://bucket-1"]
        told = {**os.environ, **store.environment()}
        with subprocess.Popen([*command, *options(tmp_path), "--http-port", "0"], env=told) as process:
            try:
                eventually(lambda: store.seen)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[0]), signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
            finally:
                process.kill()


SLOW = """
import time
from pathlib import Path

import forebay


class Slow(forebay.Model):
    repository = "all"

    def load(self, path: Path):
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.01)

    def predict(self, batch: list[str]) -> list[str]:
        return batch
"""


def test_who_waits_for_a_load_waits_no_longer_than_for_an_answer_and_may_leave(serve, tmp_path, eventually):  # F123
    (tmp_path / "all/net/1").mkdir(parents=True)
    (tmp_path / "all/net/1/a").write_text("a")
    (tmp_path / "slow.py").write_text(SLOW)
    more = ["--lazy", "--worker-kind", "thread", "--timeout-ms", "500", "--drain-s", "0.5", "--grpc-port", "0"]
    server = serve(tmp_path / "slow.py", *more)
    answer = ask(server, "net", "a")
    assert (answer.status_code, answer.elapsed.total_seconds() < 25) == (503, True)  # it took 30 s, whatever was told
    assert "'net' is still being loaded; try again later" in answer.text
    waiting = lambda: server.metric("forebay_load_waiting")  # noqa: E731
    eventually(lambda: waiting() == 0)
    patient = {"x-request-timeout-ms": "3000000"}
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/models/net", json="a", headers=patient, timeout=0.5)
    eventually(lambda: waiting() == 0)

    def ask_until_it_is_gone():
        with contextlib.suppress(httpx.HTTPError):
            server.client.post("/models/net", json="a", headers=patient)

    asking = threading.Thread(target=ask_until_it_is_gone)
    asking.start()
    eventually(lambda: waiting() == 1)
    server.process.terminate()
    assert server.process.wait() == 0
    asking.join()
    assert not [line for line in server.lines if "Traceback" in line or "Exception" in line]


def test_a_request_that_waited_for_its_model_is_read_whole(serve, tmp_path, eventually):  # F123
    (tmp_path / "all/net/1").mkdir(parents=True)
    (tmp_path / "all/net/1/a").write_text("a")
    (tmp_path / "slow.py").write_text(SLOW)
    server = serve(tmp_path / "slow.py", "--lazy", "--worker-kind", "thread")
    texts = ["a", "b" * 1_000_000]
    found: list[str] = []
    clients = [
        threading.Thread(target=lambda text=text: found.append(ask(server, "net", text).json())) for text in texts
    ]
    for client in clients:
        client.start()
    eventually(lambda: server.metric("forebay_load_waiting") == 2)
    (tmp_path / "go").touch()
    for client in clients:
        client.join()
    assert sorted(found) == texts


def test_a_server_that_is_killed_while_it_copies_is_followed_by_one_that_is_whole(buckets, serve, tmp_path, eventually):
    """Kill -9 at any moment of a download, then restart: through the front door; at random moments in the units."""
    bucket = "killed-server"
    buckets.make(bucket)
    buckets.put(f"{bucket}/kept/1/model.onnx", times(1))
    buckets.put(f"{bucket}/torn/1/model.onnx", times(3))
    buckets.put(f"{bucket}/torn/1/weights.bin", bytes(200_000))
    faults = Faults(buckets.port)
    env = buckets.environment(faults.port)
    server = serve(None, f"s3://{bucket}", *options(tmp_path), "--lazy", env=env)
    assert ask(server, "kept") == [1, 2]
    faults.fault = lambda _method, path: ("slow", 1000) if path.endswith("weights.bin") else None

    def ask_until_it_is_gone():
        with contextlib.suppress(httpx.HTTPError):
            ask(server, "torn")

    asking = threading.Thread(target=ask_until_it_is_gone)
    asking.start()
    cache = tmp_path / "cache"
    eventually(lambda: any(path.stat().st_size for path in cache.rglob("coming-*/**/weights.bin")))
    server.process.kill()
    server.process.wait()
    asking.join()
    assert list(cache.rglob("coming-*"))
    faults.fault = lambda *_: None
    copied = faults.asked("kept/1/model.onnx")
    again = serve(None, f"s3://{bucket}", *options(tmp_path), "--lazy", env=env)
    assert not list(cache.rglob("coming-*"))
    assert ask(again, "torn") == [3, 6]
    assert ask(again, "kept") == [1, 2]
    assert faults.asked("kept/1/model.onnx") == copied  # what was whole is not copied again
    faults.close()


def test_what_is_wrong_at_the_start(buckets, cli, tmp_path):
    env = {**buckets.environment(), "AWS_SECRET_ACCESS_KEY": "wrong", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    refused = cli("check", "s3://some-bucket", "--repository-folder", tmp_path, env=env)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "SignatureDoesNotMatch" in refused.stderr
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refused.stderr
    few = cli("check", "s3://some-bucket", "--max-models", "5", "--max-disk-models", "4", env=env)
    assert "--max-models is 5, and --max-disk-models is 4" in few.stderr


def test_a_folder_as_well_and_what_is_served_is_told(tmp_path, cli):
    (tmp_path / "all" / "net" / "3").mkdir(parents=True)
    (tmp_path / "all" / "net" / "3" / "model.onnx").write_bytes(times(3))
    told = cli("check", tmp_path / "all")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == f"POST /models/NAME of {tmp_path}/all: 1 version (net), loaded at the start\n"


def test_the_image_of_a_class_with_a_bucket_can_read_it(buckets, cli, tmp_path):
    buckets.make("forests-of-an-image")
    buckets.put("forests-of-an-image/oaks/1/trees.txt", b"oak")
    text = "import forebay\nclass Forest(forebay.Model):\n    repository = 's3://forests-of-an-image'\n"
    text += (
        "    def load(self, path): ...\n    def predict(self, batch: list[int]) -> list[int]:\n        return batch\n"
    )
    (tmp_path / "model.py").write_text(text)
    done = cli("generate", "model.py", cwd=tmp_path, env={**os.environ, **buckets.environment()})
    assert (done.returncode, done.stderr) == (0, "")
    name = tmp_path.name.replace("_", "-")[:50].strip("-")
    assert f"kubectl create secret generic {name}-bucket --from-env-file=bucket.env\n" in done.stdout
    dockerfile = (tmp_path / "deploy/Dockerfile").read_text()
    assert '"forebay[buckets]==' in dockerfile
    assert dockerfile.endswith('CMD ["forebay", "serve", "model.py", "--repository-folder", "/models"]\n')
