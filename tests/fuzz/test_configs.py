# SPDX-License-Identifier: Apache-2.0
"""Configurations that people write, spoiled at random: each is read, or refused in one sentence that names the file."""

import copy
import random

import pytest
import yaml

from forebay.errors import ConfigError
from forebay.surfaces.nucleus.config import read_config
from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp

ROUNDS = 300

NUCLEUS = {
    "type": "python",
    "py_version": "3.9",
    "path": "handler.py",
    "python_path": ".",
    "serve_port": 8080,
    "processes": 2,
    "threads_per_process": 2,
    "max_concurrency": 4,
    "log_level": "info",
    "gpu": True,
    "gpu_version": {"cuda": "11.1", "cudnn": "8", "development_image": False},
    "dependencies": {"pip": "requirements.txt", "shell": "dependencies.sh"},
    "env": {"A": "1", "B": 2},
    "config": {"a": [1, {"b": None}]},
    "server_side_batching": {"max_batch_size": 4, "batch_interval_seconds": 0.1},
}
PIPELINE = {
    "rpc_port": 18080,
    "http_port": 18081,
    "worker_num": 4,
    "build_dag_each_worker": False,
    "methods": ["prediction"],
    "dag": {
        "is_thread_op": True,
        "retry": 1,
        "timeout": 100,
        "tracer": {"interval_s": 10},
        "external_store": {"type": "file", "threshold_kb": 64},
        "enable_prometheus": True,
        "prometheus_port": 19393,
    },
    "op": {
        "a": {
            "concurrency": 2,
            "timeout": 3000,
            "retry": 1,
            "batch_size": 2,
            "auto_batching_timeout": 10,
            "client_type": "brpc",
            "server_endpoints": ["127.0.0.1:9393", "http://127.0.0.1:9394"],
            "fetch_list": ["price"],
        },
        "b": {
            "local_service_conf": {
                "model_config": "model",
                "client_type": "local_predictor",
                "device_type": 0,
                "devices": "0,1",
                "thread_num": 2,
                "precision": "fp32",
                "mem_optim": True,
            }
        },
    },
}
VALUES = (
    *(
        None,
        True,
        0,
        1,
        -1,
        10**30,
        0.5,
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        " ",
        "x",
        "1",
        "a:b",
        "\0",
        "é",
        "../..",
    ),
    *("http://[", "host:99999", "a,b", "!!", [], [[]], [None], ["x", 1], {}, {"x": None}, {"x": {"x": {"x": 1}}}),
)
KEYS = (*("", "x", "type", "path", "op", "dag", "a.b", "é"), None, True, 1, 1.5)


def places(tree, path=()):
    """Where something stands in a tree."""
    yield path
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def spoiled(tree, chance):
    """A tree with a few things in it replaced, removed, renamed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(list(places(tree))[1:] or [()])
        if not path:
            return chance.choice(VALUES)
        above = tree
        for key in path[:-1]:
            above = above[key]
        how = chance.randrange(4)
        if how == 0:
            del above[path[-1]]
        elif how == 1 and isinstance(above, dict):
            above[chance.choice(KEYS)] = above.pop(path[-1])
        elif how == 2 and isinstance(above, dict):
            above[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
        else:
            above[path[-1]] = copy.deepcopy(chance.choice(VALUES))
    return tree


def cut(data, chance):
    """Bytes with a few of them changed."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        data[at : at + chance.randrange(3)] = chance.choice(
            [b"", b":", b"\t", b"- ", b"\xff", b"&a", b"*a", b"{", b"!!", b"\n"]
        )
    return bytes(data)


def written(tree, chance):
    data = yaml.safe_dump(spoiled(tree, chance), sort_keys=False, allow_unicode=True).encode()
    return cut(data, chance) if chance.random() < 0.3 else data


def nucleus(path):
    read_config(path)
    read_config(path, serving=False)


def pipeline(path):
    config, _ = read(path)
    first = Op(name="a", input_ops=[RequestOp()])
    wire("svc", ResponseOp(input_ops=[Op(name="b", input_ops=[first])]), config)


@pytest.mark.parametrize("tree, use", [(NUCLEUS, nucleus), (PIPELINE, pipeline)], ids=["nucleus", "pipeline"])
@pytest.mark.parametrize("seed", range(2))
def test_a_spoiled_file_is_read_or_refused_in_a_sentence(tmp_path, tree, use, seed):
    chance = random.Random(seed)
    (tmp_path / "handler.py").touch()
    file = tmp_path / "config.yaml"
    refused: list[str] = []
    for _ in range(ROUNDS):
        data = written(tree, chance)
        file.write_bytes(data)
        try:
            use(file)
        except ConfigError as error:
            refused.append(error.message)
        except Exception as error:
            raise AssertionError(data) from error
    assert all("\n" not in message for message in refused)
    assert all("config.yaml" in message or "op '" in message for message in refused)
    assert len(refused) > ROUNDS / 4


SCHEMA = {"example": {"text": "hello"}, "examples": [{"text": "hi"}], "batch_size": 2}


def test_spoiled_examples_are_taken_or_refused_in_a_sentence():
    import pydantic

    from forebay.surfaces.ventu import Ventu

    class Answer(pydantic.BaseModel):
        n: int = 1

    class Lengths(Ventu):
        def batch_inference(self, batch):
            return [{"n": 1} for _ in batch]

    chance = random.Random(0)
    refused: list[str] = []
    for _ in range(ROUNDS):
        extra = spoiled(SCHEMA, chance)
        try:
            request = pydantic.create_model("Request", __config__={"json_schema_extra": extra}, text=(str, ...))
            model = Lengths(request, Answer)
            model.ventu_service.document()
            model.health_check(batch=True)
        except ConfigError as error:
            refused.append(error.message)
        except Exception as error:
            raise AssertionError(extra) from error
    assert refused
    assert all("Request" in message and "\n" not in message for message in refused)
