# SPDX-License-Identifier: Apache-2.0
"""Projects of OpenVINO Model Server in folders of their own, and a face to call them in this process."""

import asyncio
import json
import textwrap
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.waiting import PATIENCE_S

from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse
from forebay.server.config import HttpConfig, Overrides, RepositoryConfig
from forebay.serving.tensor_face import parameters_of, tensors_of
from forebay.surfaces.contract import Options
from forebay.surfaces.lookup import build
from forebay.types.call import Failure
from forebay.types.tensor import Tensor

LOOPBACK = """
  input_stream: "LOOPBACK:loopback"
  output_stream: "LOOPBACK:loopback"
  input_stream_info: { tag_index: 'LOOPBACK:0', back_edge: true }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler",
    options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } } }
  }
"""


@pytest.fixture
def anyio_backend():
    return "asyncio"


def python_node(name, inputs, outputs, *, handler="model.py", more=""):
    """A node; streams are told as `TAG:name`."""
    lines = [f'  input_stream: "{one}"' for one in inputs] + [f'  output_stream: "{one}"' for one in outputs]
    return f"""
node {{
  name: "{name}"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
{chr(10).join(lines)}
{more}
  node_options: {{
    [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: {{
      handler_path: "{handler}"
    }}
  }}
}}
"""


def graph_text(inputs, outputs, *nodes):
    """A graph.pbtxt."""
    lines = [f'input_stream: "{one}"' for one in inputs] + [f'output_stream: "{one}"' for one in outputs]
    return "\n".join([*lines, *nodes])


def one_node(inputs=("input",), outputs=("output",), *, more="", loops=False):
    """The graph of one Python node, each stream with a tag that counts."""
    tagged_in = [f"IN{number}:{name}" for number, name in enumerate(inputs)]
    tagged_out = [f"OUT{number}:{name}" for number, name in enumerate(outputs)]
    return graph_text(
        [f"OVMS_PY_TENSOR{number}:{name}" for number, name in enumerate(inputs)],
        [f"OVMS_PY_TENSOR{number}:{name}" for number, name in enumerate(outputs)],
        python_node("python_node", tagged_in, tagged_out, more=more + (LOOPBACK if loops else "")),
    )


def write(folder, files):
    """Writes files, indented as they stand in a test."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) and "\n" not in text[:1] else textwrap.dedent(text))
    return folder


def tensor(name, value, shape=None, datatype=None):
    """A tensor of a request: of an array, or of bytes with what they are said to be."""
    if isinstance(value, bytes):
        return Tensor(name, datatype or "BYTES", (len(value),) if shape is None else tuple(shape), value)
    array = np.asarray(value)
    names = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "uint8": "UINT8", "float64": "FP64"}
    return Tensor(
        name, datatype or names[array.dtype.name], tuple(array.shape if shape is None else shape), array.tobytes()
    )


def array(found):
    """The numbers of an answer's tensor."""
    kinds = {"FP32": "f4", "INT64": "i8", "INT32": "i4", "UINT8": "u1", "FP64": "f8", "INT8": "i1", "BOOL": "?"}
    return np.frombuffer(found.data, kinds[found.datatype]).reshape(found.shape)


class Face:
    """Calls graphs as the fronts do."""

    def __init__(self, project):
        self.project = project
        self.app = project.app

    async def infer(self, model, *inputs, id="", outputs=(), is_json=False, **parameters):
        served = self.app.find(model)
        params, size = served.tensors.ask(inputs, outputs, is_json=is_json, parameters=parameters)
        outcome = await served.endpoint.call([one.data for one in inputs], params=params, size=size)
        return InferResponse(
            outputs=tensors_of(outcome[0], outcome[1:]),
            model=model,
            version=served.endpoint.config.version,
            id=id,
            parameters=parameters_of(outcome),
        )

    def stream(self, model):
        return Stream(self, model)

    async def reload(self):
        return (await self.project.reload.__self__.reload_all())[0]


class Stream:
    """A stream whose answers are read one by one; the end is a `Failure` or None."""

    def __init__(self, face, model):
        self.model = model
        self.answers = asyncio.Queue()
        self.inner = face.app.find(model).session(self._answered, lambda _, outcome: self.answers.put_nowait(outcome))

    def _answered(self, answer, taken):
        self.answers.put_nowait(answer)
        taken()

    def send(self, *inputs, id="", **parameters):
        self.inner.send(InferRequest(model=self.model, inputs=inputs, id=id, parameters=parameters))

    def close(self):
        self.inner.close()

    def cancel(self):
        self.inner.cancel()

    async def take(self):
        return await asyncio.wait_for(self.answers.get(), PATIENCE_S)

    async def rest(self):
        """Reads until the end; the answers, and how it ended."""
        found = []
        while True:
            one = await self.take()
            if one is None or isinstance(one, Failure):
                return found, one
            found.append(one)


def options(poll_s=None, repository=None, **more):
    repository = repository or (RepositoryConfig() if poll_s is None else RepositoryConfig(poll_s=poll_s))
    given: frozenset[str] = frozenset([*more, *([] if poll_s is None else ["poll_s"])])
    return Options(http=HttpConfig(port=0), overrides=Overrides(**more), repository=repository, given=given)


@asynccontextmanager
async def serving(target, **more):
    project = build(str(target), options(**more))
    await project.app.start()
    try:
        yield Face(project)
    finally:
        await project.app.drain(5.0)


def config(**graphs):
    """A config.json of graphs by name."""
    entries = [{"name": name, **about} for name, about in graphs.items()]
    return json.dumps({"model_config_list": [], "mediapipe_config_list": entries})
