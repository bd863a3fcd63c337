# SPDX-License-Identifier: Apache-2.0
"""What is done when files change: what changed is loaded beside what is in use, and what is wrong changes nothing."""

import asyncio
import json
import sys
import textwrap

import pytest
from tests.compat.ovms.conftest import config, one_node, serving, tensor, write
from tests.waiting import PATIENCE_S, reached

from forebay.errors import NotFound, Unavailable

pytestmark = pytest.mark.anyio

HANDLER = """
    from pathlib import Path
    from pyovms import Tensor
    class OvmsPythonModel:
        def initialize(self, kwargs):
            self.count = 0
        def execute(self, inputs):
            self.count += 1
            return [Tensor("output", f"{ANSWER} {self.count}".encode())]
        def finalize(self):
            Path(__file__).with_name("ended").touch()
    """


def handler(answer):
    return HANDLER.replace("{ANSWER}", answer)


async def said(face, name):
    answer = await face.infer(name, tensor("input", [1]))
    return bytes(answer.outputs[0].data).decode()


async def test_a_graph_that_failed_to_load_leaves_with_its_name(tmp_path):  # F96
    broken = {"b/graph.pbtxt": one_node(), "b/model.py": "raise ValueError('broken')"}
    write(
        tmp_path, {"config.json": config(a={}, b={}), "a/graph.pbtxt": one_node(), "a/model.py": handler("1"), **broken}
    )
    async with serving(tmp_path) as face:
        assert sorted(one["name"] for one in face.app.describe_all()) == ["a", "b"]
        write(tmp_path, {"config.json": config(a={})})
        assert await face.reload()
        assert [one["name"] for one in face.app.describe_all()] == ["a"]
        with pytest.raises(NotFound):
            await said(face, "b")
        assert await said(face, "a") == "1 1"
        assert not await face.reload()


async def test_only_what_changed_is_loaded_anew(tmp_path, monkeypatch):  # O110, O111, O113; T24: the other way round
    files = {"config.json": config(a={}, b={})}
    for name in "ab":
        files |= {f"{name}/graph.pbtxt": one_node(), f"{name}/model.py": handler("1")}
    write(tmp_path, files)
    async with serving(tmp_path) as face:
        assert await said(face, "a") == "1 1"
        assert await said(face, "b") == "1 1"
        write(tmp_path, {"b/model.py": handler("2")})
        assert await face.reload()
        assert await said(face, "a") == "1 2"  # its object is the one it was
        assert await said(face, "b") == "2 1"
        await reached((tmp_path / "b/ended").exists, "finalize")
        write(tmp_path, {"c/graph.pbtxt": one_node(), "c/model.py": handler("3"), "config.json": config(a={}, c={})})
        assert await face.reload()
        assert await said(face, "a") == "1 3"
        assert await said(face, "c") == "3 1"
        with pytest.raises(NotFound):
            await said(face, "b")
        assert not await face.reload()


@pytest.mark.parametrize("where", ["beside", "absolute", "linked"])
async def test_a_handler_counts_wherever_it_lies(tmp_path, where):  # O5, O111
    path = {"beside": "../shared/model.py", "absolute": f"{tmp_path}/shared/model.py", "linked": "link/model.py"}[where]
    text = one_node().replace('"model.py"', f'"{path}"')
    importing = "from shared_numbers import one\n" + textwrap.dedent(handler("{one}"))
    files = {"shared/model.py": importing, "shared/shared_numbers.py": "one = 1\n", "other/model.py": handler("0")}
    write(tmp_path, {"config.json": config(a={}, other={}), "a/graph.pbtxt": text, "other/graph.pbtxt": one_node()})
    write(tmp_path, files)
    (tmp_path / "a/link").symlink_to(tmp_path / "shared")
    async with serving(tmp_path) as face:
        assert (await said(face, "a"), await said(face, "other")) == ("1 1", "0 1")
        write(tmp_path, {"shared/shared_numbers.py": "one = 20\n"})
        assert await face.reload()
        assert await said(face, "a") == "20 1"
        write(tmp_path, {"shared/model.py": handler("new")})
        assert await face.reload()
        assert (await said(face, "a"), await said(face, "other")) == ("new 1", "0 2")
        assert not await face.reload()


async def test_a_configuration_that_cannot_be_read_changes_nothing_and_says_why(tmp_path):  # O110
    write(tmp_path, {"config.json": config(a={}), "a/graph.pbtxt": one_node(), "a/model.py": handler("1")})
    async with serving(tmp_path) as face:
        write(tmp_path, {"config.json": '{"model_config_list": [],\n"mediapipe_config_lst": []}'})
        await face.reload()
        assert await said(face, "a") == "1 1"
        assert "config.json:2: mediapipe_config_lst: unknown key" in face.app.problem
        write(tmp_path, {"config.json": config(a={})})
        await face.reload()
        assert face.app.problem == ""
        assert await said(face, "a") == "1 2"


@pytest.mark.parametrize("is_folder", [True, False])
async def test_a_configuration_that_is_gone_changes_nothing_and_says_why(tmp_path, is_folder):  # O110
    write(tmp_path, {"config.json": config(a={}), "a/graph.pbtxt": one_node(), "a/model.py": handler("1")})
    async with serving(tmp_path if is_folder else tmp_path / "config.json") as face:
        (tmp_path / "config.json").unlink()
        await asyncio.wait_for(face.reload(), PATIENCE_S)
        assert await said(face, "a") == "1 1"
        assert "config.json cannot be read: No such file" in face.app.problem
        write(tmp_path, {"config.json": config(a={}, b={"base_path": "a"})})
        assert await asyncio.wait_for(face.reload(), PATIENCE_S)
        assert (face.app.problem, await said(face, "a"), await said(face, "b")) == ("", "1 2", "1 1")


async def test_a_graph_that_cannot_be_loaded_anew_goes_on_as_it_was_and_says_why(tmp_path):  # O115
    write(tmp_path, {"config.json": config(a={}), "a/graph.pbtxt": one_node(), "a/model.py": handler("1")})
    async with serving(tmp_path) as face:
        for broken, told in (
            ({"a/model.py": "1 / 0"}, "ZeroDivisionError"),
            ({"a/graph.pbtxt": "node {"}, "graph.pbtxt:1"),
        ):
            write(tmp_path, broken)
            await face.reload()
            assert (await said(face, "a")).startswith("1 ")
            errors = [one.get("error", "") for one in face.app.describe("a")["versions"]]
            assert any(told in error for error in errors)
        write(tmp_path, {"a/graph.pbtxt": one_node(), "a/model.py": handler("2")})
        await face.reload()
        assert await said(face, "a") == "2 1"
        assert not any("error" in one for one in face.app.describe("a")["versions"])


async def test_files_are_looked_at_without_being_asked(tmp_path):  # O110
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler("1")})
    async with serving(tmp_path, name="g", poll_s=0.01) as face:
        face.project.on_ready()
        write(tmp_path, {"model.py": handler("now") + "\n"})
        answers = []

        async def is_new():
            answers.append(await said(face, "g"))
            return answers[-1].startswith("now")

        while not await is_new():
            assert len(answers) < 100_000
        face.project.on_stop()


async def test_what_lay_beside_a_handler_that_is_gone_is_nobody_elses(tmp_path):  # O8
    files = {"config.json": config(a={})}
    for name in "ab":
        importing = "from spelling import one\n" + textwrap.dedent(handler("{one}"))
        files |= {
            f"{name}/graph.pbtxt": one_node(),
            f"{name}/model.py": importing,
            f"{name}/spelling.py": f"one = {name!r}",
        }
    write(tmp_path, files)
    path = [*sys.path]
    async with serving(tmp_path) as face:
        assert await said(face, "a") == "a 1"
        write(tmp_path, {"config.json": config()})
        assert await face.reload()
        await reached((tmp_path / "a/ended").exists, "finalize")
        await reached(lambda: sys.path == path, "its folder to leave the path")
        write(tmp_path, {"config.json": config(b={})})
        assert await face.reload()
        assert await said(face, "b") == "b 1"


async def test_a_request_inside_is_answered_by_what_it_came_to(tmp_path):  # O113
    slow = """
        import threading
        from pyovms import Tensor
        begun, gate = threading.Event(), threading.Event()
        class OvmsPythonModel:
            def execute(self, inputs):
                begun.set()
                gate.wait(60)
                return [Tensor("output", b"old")]
        """
    write(tmp_path, {"config.json": config(a={}), "a/graph.pbtxt": one_node(), "a/model.py": slow})
    async with serving(tmp_path) as face:
        (pool,) = (endpoint.pool for endpoint in face.app.find("a").nodes.values())
        module = sys.modules[type(pool._workers[0].runner._model).__module__]
        asked = asyncio.create_task(said(face, "a"))
        await reached(module.begun.is_set, "its begin")
        write(tmp_path, {"config.json": json.dumps({"model_config_list": []})})
        await face.reload()
        with pytest.raises(NotFound):
            await said(face, "a")
        module.gate.set()
        assert await asked == "old"


async def test_what_is_being_loaded_is_unavailable_and_what_it_replaces_answers(tmp_path):  # O114
    slow = handler("new").replace(
        "self.count = 0", "self.count = 0\n            while not GO.exists(): time.sleep(0.001)"
    )
    slow = slow.replace("class", f"import time\n    GO = Path({str(tmp_path / 'go')!r})\n    class")
    write(tmp_path, {"config.json": config(a={}), "a/graph.pbtxt": one_node(), "a/model.py": handler("old")})
    async with serving(tmp_path) as face:
        files = {"config.json": config(a={}, b={}), "a/model.py": slow, "b/graph.pbtxt": one_node(), "b/model.py": slow}
        write(tmp_path, files)
        reloading = asyncio.create_task(face.reload())
        await reached(lambda: any(one["state"] == "loading" for one in face.app.describe_versions("b")), "its load")
        assert (await said(face, "a")).startswith("old")
        with pytest.raises(Unavailable, match="'b' is still being loaded"):
            await said(face, "b")
        (tmp_path / "go").touch()
        assert await reloading
        assert await said(face, "a") == "new 1"
        assert await said(face, "b") == "new 1"


@pytest.mark.parametrize("subconfig", ["{nope", '{"model_config_list": {}}'])
async def test_a_graph_with_a_broken_subconfig_fails_alone_until_that_is_mended(
    tmp_path, subconfig
):  # O104, O109, O121
    files = {f"{name}/graph.pbtxt": one_node() for name in "ab"} | {f"{name}/model.py": handler("1") for name in "ab"}
    write(tmp_path, files | {"config.json": config(a={}, b={}), "b/subconfig.json": subconfig})
    async with serving(tmp_path) as face:
        assert await said(face, "a") == "1 1"
        with pytest.raises(Unavailable, match=r"b/subconfig.json:1: "):
            await said(face, "b")
        write(tmp_path, {"b/subconfig.json": '{"model_config_list": []}'})
        assert await face.reload()
        assert (await said(face, "a"), await said(face, "b")) == ("1 2", "1 1")
        write(tmp_path, {"b/subconfig.json": subconfig})  # what is in use goes on
        await face.reload()
        assert await said(face, "b") == "1 2"
        assert "b/subconfig.json:1: " in face.app.problem


async def test_a_graph_that_never_was_served_keeps_nothing_from_being_read_anew(tmp_path):  # O104, O110
    write(tmp_path, {"a/graph.pbtxt": one_node(), "a/model.py": handler("1"), "config.json": config(a={}, b={})})
    async with serving(tmp_path) as face:
        assert await said(face, "a") == "1 1"
        write(tmp_path, {"b/subconfig.json": "{nope", "a/model.py": handler("2")})
        assert await face.reload()
        assert await said(face, "a") == "2 1"


async def test_a_graph_is_served_once_no_model_has_its_name(tmp_path):  # O104
    entry = {"config": {"name": "b", "base_path": "nothing", "target_device": "CPU"}}
    both = json.loads(config(a={}, b={}))
    files = {f"{name}/graph.pbtxt": one_node() for name in "ab"} | {f"{name}/model.py": handler("1") for name in "ab"}
    write(tmp_path, files | {"config.json": json.dumps(both | {"model_config_list": [entry]}), "nothing/1/x.xml": ""})
    async with serving(tmp_path) as face:
        assert await said(face, "a") == "1 1"
        assert "both named 'b'" in face.app.problem
        write(tmp_path, {"config.json": config(a={}, b={})})
        assert await face.reload()
        assert (await said(face, "a"), await said(face, "b")) == ("1 2", "1 1")
        write(tmp_path, {"config.json": json.dumps(both | {"model_config_list": [entry]})})  # a graph in use stays
        await face.reload()
        assert (await said(face, "b"), "both named 'b'" in face.app.problem) == ("1 2", True)
