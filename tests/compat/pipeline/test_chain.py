# SPDX-License-Identifier: Apache-2.0
"""Two whole servers, one of which is a model of the other."""

import time

import pytest
import yaml
from tests.compat.pipeline.conftest import post, values_of
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.surfaces.pipeline.fronts.pipeline_client import PipelineClient

INNER = """
import time
import numpy as np
from pathlib import Path
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Work(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        arrays = {name: value * 2 for name, value in given.items() if isinstance(value, np.ndarray)}
        if arrays:
            return arrays, False, None, ""
        if given["q"] == "refuse":
            return {}, False, 71, "refused inside"
        if given["q"] == "raise":
            raise ValueError("it broke inside")
        if given["q"] == "linger":
            time.sleep(1.5)
        return {"q": given["q"].upper(), "log": str(log_id)}, False, None, ""

end = ResponseOp([Work(name="work", input_ops=[RequestOp()], concurrency=4)])
end.set_pack_format(isTensor=TENSORS)
server = PipelineServer("svc")
server.set_response_op(end)
server.prepare_server(str(Path(__file__).with_name("config.yml")))
server.run_server()
"""

OUTER = """
import numpy as np
from pathlib import Path
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Asks(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        if "x" in given:
            return {"x": np.array(given["x"].split(","), dtype="float32")}, False, None, ""
        return {"q": given["q"]}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {name: repr(value) for name, value in fetch_data.items()}, None, ""

op = Asks(name="asks", input_ops=[RequestOp()])
op.set_pack_tensor_format(TENSORS)
server = PipelineServer("svc")
server.set_response_op(ResponseOp([op]))
server.prepare_server(str(Path(__file__).with_name("config.yml")))
server.run_server()
"""


@pytest.fixture(scope="module")
def start(launch, tmp_path_factory):
    """Starts a script with a configuration; gives its server and where it is asked over gRPC."""

    def start(script, **config):
        folder = tmp_path_factory.mktemp("server")
        port = free_port()
        (folder / "server.py").write_text(script)
        settings = {"rpc_port": port, "http_port": 18081, "worker_num": 8, **config}
        (folder / "config.yml").write_text(yaml.safe_dump(settings))
        server = launch(folder / "server.py", env={"XDG_STATE_HOME": str(folder / "state")})
        return server, f"127.0.0.1:{port}"

    return start


@pytest.fixture(scope="module")
def outer(start):
    """The outer server and where it is asked over gRPC, by whether tensors or texts go from one to the other."""

    def both(tensors):
        _, inner = start(INNER.replace("TENSORS", tensors), dag={"request_parse": "ndarray"})
        asks = {"client_type": "pipeline_grpc", "server_endpoints": [inner], "concurrency": 4, "timeout": 500}
        return start(OUTER.replace("TENSORS", tensors), op={"asks": asks})

    return {False: both("False"), True: both("True")}


def test_texts_go_through_two_servers(outer):  # P114, P11
    server, endpoint = outer[False]
    found = post(server, q="hällo")
    assert dict(zip(found["key"], found["value"], strict=True)) == {"q": "['HÄLLO']", "log": "['0']"}
    with PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([endpoint])
        assert values_of(client.predict({"q": "a"}, log_id=55)) == {"q": "['A']", "log": "['55']"}


def test_arrays_go_through_two_servers(outer):  # P114, P62
    assert post(outer[False][0], x="1.5,2")["value"] == ["['array([3., 4.], dtype=float32)']"]
    assert post(outer[True][0], x="1.5,2")["value"] == ["array([3., 4.], dtype=float32)"]


def test_many_requests_go_through_two_servers(outer):  # P114
    with PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([outer[False][1]])
        futures = [client.predict({"q": f"a{n}"}, asyn=True) for n in range(100)]
        assert [values_of(one.result())["q"] for one in futures] == [f"['A{n}']" for n in range(100)]


@pytest.mark.parametrize(
    "q, number, said",
    [("refuse", 9000, "answers 71: refused inside"), ("raise", 9000, "answers 10000: "), ("linger", 6000, "")],
)
def test_errors_and_time_outs_come_back_through_two_servers(outer, q, number, said):  # P114, P87, P92
    server, _ = outer[False]
    began = time.monotonic()
    found = post(server, q=q)
    assert (found["err_no"], found["key"]) == (number, [])
    assert said in found["err_msg"]
    assert q != "linger" or time.monotonic() - began < 50
    assert post(server, q="after")["value"][0] == "['AFTER']"
