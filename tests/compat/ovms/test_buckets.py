# SPDX-License-Identifier: Apache-2.0
"""Models whose `base_path` is in a bucket: a real S3 server, and OpenVINO that runs what lies there."""

import contextlib
import json
import threading

import numpy as np
import pytest
from tests.buckets import FORBIDDEN, Faults, running_buckets
from tests.compat.ovms.conftest import array, graph_text, options, serving, tensor, write
from tests.compat.ovms.test_openvino import inference, save, session
from tests.other_stores import STORES, point_to, running_store
from tests.waiting import PATIENCE_S, reached

from forebay.errors import ConfigError, NotFound
from forebay.server.config import RepositoryConfig
from forebay.surfaces.lookup import build

pytestmark = pytest.mark.anyio
pytest.importorskip("openvino")
pytest.importorskip("obstore")

GRAPH = graph_text(
    ["OVTENSOR:input"], ["OVTENSOR:output"], session("add"), inference(["OVTENSOR:input"], ["OVTENSOR:output"])
)


@pytest.fixture(scope="module")
def buckets(tmp_path_factory):
    with running_buckets(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def bucket(buckets, monkeypatch):
    """A bucket for a test; this process asks the server that has it."""
    for name, value in buckets.environment().items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{len(list(buckets.folder.iterdir()))}"
    buckets.make(name)
    return name


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The two files of a model that adds one to so many numbers."""

    def made(axis):
        folder = tmp_path_factory.mktemp("model")
        save(folder / "m" / "add.xml", axis=axis)
        return {name: (folder / "m" / name).read_bytes() for name in ("add.xml", "add.bin")}

    kept = {}
    return lambda axis=-1: kept.setdefault(axis, made(axis))


def put(buckets, place, model, *, old=True):
    for name, content in sorted(model.items()):
        buckets.put(f"{place}/{name}", content, old=old)


def config(bucket, graphs=(), **more):
    entry = {"name": "add", "base_path": f"s3://{bucket}/add", **more}
    return json.dumps(
        {"model_config_list": [{"config": entry}], "mediapipe_config_list": [{"name": g} for g in graphs]}
    )


def kept(tmp_path, **more):
    return RepositoryConfig(poll_s=0.05, folder=tmp_path / "kept", **more)


def taken(face):
    """How many numbers the model takes that answers."""
    return face.app.find("add").tensors.inputs[0].shape


@pytest.mark.parametrize("kind", [None, "process"])
async def test_models_of_a_bucket_come_and_go_as_those_of_a_folder(
    buckets, bucket, files, tmp_path, kind
):  # O106, O100
    put(buckets, f"{bucket}/add/1", files(2))
    put(buckets, f"{bucket}/add/2", files(3))
    buckets.put(f"{bucket}/add/readme.txt", b"not a version")
    write(tmp_path, {"config.json": config(bucket, ["g"]), "g/graph.pbtxt": GRAPH})
    more = {} if kind is None else {"worker_kind": kind}
    async with serving(tmp_path, repository=kept(tmp_path), **more) as face:
        face.project.on_ready()
        assert f"add: version 2 of a model, s3://{bucket}/add/2/add.xml" in face.project.summary
        for name in ("add", "g"):
            answer = await face.infer(name, tensor("input", np.arange(3, dtype=np.float32)))
            assert array(answer.outputs[0]).tolist() == [1, 2, 3]
        with pytest.raises(NotFound):
            face.app.versions("add").named("1")
        put(buckets, f"{bucket}/add/3", files(4))
        await reached(lambda: taken(face) == (4,), "the new version")
        await reached(lambda: [*face.app.versions("add").ready] == ["3"], "the old version has left")
        answer = await face.infer("g", tensor("input", np.zeros(4, np.float32)))  # its session has moved on as well
        assert array(answer.outputs[0]).tolist() == [1] * 4
        put(buckets, f"{bucket}/add/3", files(5))  # other files under the same version
        await reached(lambda: taken(face) == (5,), "the new files")
        for name in files():
            buckets.remove(f"{bucket}/add/3/{name}")
        await reached(lambda: taken(face) == (3,), "the version before")
        here = tmp_path / "kept"
        await reached(lambda: {one.parent.name for one in here.rglob("add.xml")} == {"2"}, "copies have left")
        face.project.on_stop()


@pytest.mark.parametrize("kind", STORES)
async def test_models_of_other_buckets_come_and_go_as_well(kind, files, tmp_path, monkeypatch):  # O106
    folder = tmp_path / "store"
    folder.mkdir()
    with running_store(kind, folder) as store:
        point_to(store, store.port, monkeypatch)
        store.make("models")

        def put_there(version, model):
            for name, content in sorted(model.items()):
                store.put("models", f"add/{version}/{name}", content)

        put_there(1, files(2))
        write(tmp_path, {"config.json": config("models", base_path=f"{kind}://models/add")})
        async with serving(tmp_path, repository=kept(tmp_path)) as face:
            face.project.on_ready()
            answer = await face.infer("add", tensor("input", np.arange(2, dtype=np.float32)))
            assert array(answer.outputs[0]).tolist() == [1, 2]
            put_there(2, files(3))
            await reached(lambda: taken(face) == (3,), "the new version")
            await reached(lambda: [*face.app.versions("add").ready] == ["2"], "the old version has left")
            face.project.on_stop()


async def test_which_versions_of_a_bucket_are_served_is_said_as_of_a_folder(buckets, bucket, files, tmp_path):  # O106
    for version in (1, 2, 10):
        put(buckets, f"{bucket}/add/{version}", files())
    told = config(bucket, model_version_policy={"specific": {"versions": [1, 10, 7]}}, shape="(6)")
    write(tmp_path, {"config.json": told})
    async with serving(tmp_path, repository=kept(tmp_path)) as face:
        assert [*face.app.versions("add").ready] == ["10", "1"]
        assert taken(face) == (6,)  # what the configuration says of the model holds for files of a bucket
        assert "version 7 is wanted, and there is 1, 2, 10" in face.app.problem


async def test_a_bucket_that_is_not_there_keeps_nobody_else_waiting(buckets, bucket, files, tmp_path):
    missing = bucket + "-2"
    save(tmp_path / "here/1/here.xml")
    entries = [{"config": {"name": "here", "base_path": "here"}}, *json.loads(config(missing))["model_config_list"]]
    write(tmp_path, {"config.json": json.dumps({"model_config_list": entries})})
    async with serving(tmp_path, repository=kept(tmp_path)) as face:
        face.project.on_ready()
        assert [*face.app.ready] == ["here"]
        assert f"s3://{missing}/add cannot be listed: NoSuchBucket" in face.app.problem
        buckets.make(missing)
        await reached(lambda: "has no folder with a number and a model in it" in face.app.problem, "an empty bucket")
        put(buckets, f"{missing}/add/1", files())
        await reached(lambda: "add" in face.app.ready, "the model")
        await reached(lambda: face.app.problem == "", "no problem")
        face.project.on_stop()


async def test_a_copy_that_fails_is_tried_again(buckets, bucket, files, tmp_path, monkeypatch):
    put(buckets, f"{bucket}/add/1", files())
    with contextlib.closing(Faults(buckets.port)) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{faults.port}")
        faults.fault = lambda method, path: (403, FORBIDDEN) if method == "GET" and path.endswith(".bin") else None
        write(tmp_path, {"config.json": config(bucket)})
        async with serving(tmp_path, repository=kept(tmp_path)) as face:
            assert "add" not in face.app.ready
            (version,) = face.app.describe_versions("add")
            assert version["state"] == "failed"
            assert "add/1/add.bin" in version["error"]
            faults.fault = lambda _method, _path: None
            face.project.on_ready()
            await reached(lambda: "add" in face.app.ready, "the model")
            face.project.on_stop()


async def test_a_copy_that_takes_longer_than_a_load_may_is_taken_once_it_is_there(
    buckets, bucket, files, tmp_path, monkeypatch
):
    put(buckets, f"{bucket}/add/1", files())
    gate = threading.Event()
    with contextlib.closing(Faults(buckets.port)) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{faults.port}")
        hold = lambda: gate.wait(PATIENCE_S) and None  # noqa: E731
        faults.fault = lambda method, path: hold if method == "GET" and path.endswith(".bin") else None
        write(tmp_path, {"config.json": config(bucket)})
        project = build(str(tmp_path), options(repository=kept(tmp_path)))
        project.app.load_timeout_s = 0.2
        await project.app.start()
        (version,) = project.app.describe_versions("add")
        assert "was not ready in time" in version["error"]
        project.app.load_timeout_s = PATIENCE_S
        gate.set()
        project.on_ready()
        await reached(lambda: "add" in project.app.ready, "the model")
        project.on_stop()
        await project.app.drain(5.0)


async def test_copies_are_held_to_the_room_there_is_for_them(buckets, bucket, files, tmp_path):
    put(buckets, f"{bucket}/add/1", files())
    write(tmp_path, {"config.json": config(bucket)})
    async with serving(tmp_path, repository=kept(tmp_path, max_disk_bytes=10)) as face:
        (version,) = face.app.describe_versions("add")
        assert "there is no room" in version["error"]


async def test_a_new_version_comes_though_the_disk_has_room_for_one(buckets, bucket, files, tmp_path):  # F98
    put(buckets, f"{bucket}/add/1", files())
    write(tmp_path, {"config.json": config(bucket)})
    async with serving(tmp_path, repository=kept(tmp_path, max_disk_models=1)) as face:
        face.project.on_ready()
        put(buckets, f"{bucket}/add/2", files(2), old=False)
        await reached(lambda: taken(face) == (2,), "the new version")
        await reached(lambda: len(list(tmp_path.glob("kept/*/0/*/revision.json"))) == 1, "room")
        face.project.on_stop()


async def test_reading_anew_looks_at_buckets_when_somebody_asks(buckets, bucket, files, tmp_path):  # O112
    put(buckets, f"{bucket}/add/1", files(2))
    write(tmp_path, {"config.json": config(bucket)})
    repository = RepositoryConfig(poll_s=0, folder=tmp_path / "kept")
    async with serving(tmp_path, repository=repository) as face:
        face.project.on_ready()
        put(buckets, f"{bucket}/add/2", files(3))
        await face.reload()
        assert taken(face) == (3,)
        write(tmp_path, {"config.json": json.dumps({"model_config_list": []})})
        await face.reload()
        assert not face.app.ready
        face.project.on_stop()


@pytest.mark.parametrize(
    "place, told",
    [
        ("http://127.0.0.1/add", "expected a folder on this machine or an address with s3://, gs:// or az://"),
        ("azfs://share/add", "expected a folder on this machine or an address with s3://, gs:// or az://"),
        ("s3://", "expected s3://BUCKET/PREFIX"),
    ],
)
def test_other_addresses_are_refused_with_what_is_possible(tmp_path, place, told):
    write(tmp_path, {"config.json": config("x").replace("s3://x/add", place)})
    with pytest.raises(ConfigError, match=r"config\.json:1: .*" + told):
        build(str(tmp_path), options())


def test_a_graph_lies_on_this_machine(tmp_path):
    told = {"model_config_list": [], "mediapipe_config_list": [{"name": "g", "base_path": "s3://bucket/g"}]}
    write(tmp_path, {"config.json": json.dumps(told)})
    with pytest.raises(ConfigError, match="a graph and its handlers lie in a folder on this machine"):
        build(str(tmp_path), options())
