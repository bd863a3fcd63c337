# SPDX-License-Identifier: Apache-2.0
"""Models of a repository over gRPC: loaded for whoever asks, and told of as the protocol does."""

import grpc
import numpy as np
import pytest
from tests.integration.kserve.served import KServed, M, ask, infer, output, refusal, request, stream

from forebay.server.app import App
from forebay.server.config import Overrides, RepositoryConfig
from forebay.surfaces.native.repositories import stock
from forebay.surfaces.native.target_models import serve_target
from forebay.transports.grpc.kserve import KServe

CODE = """
import numpy as np
from numpy.typing import NDArray

import forebay


class Times(forebay.Model):
    repository = "models"

    def load(self, path):
        self.factor = float((path / "factor").read_text())

    def predict(self, batch: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        return [self.factor * sample for sample in batch]
"""


@pytest.fixture
def port(tmp_path):
    for name, version, text in (("a", 1, "2"), ("a", 2, "3"), ("b", 1, "5"), ("broken", 1, "five")):
        folder = tmp_path / "models" / name / str(version)
        folder.mkdir(parents=True)
        (folder / "factor").write_text(text)
    (tmp_path / "code.py").write_text(CODE)

    class Stocked(KServed):
        def __init__(self):
            super().__init__()
            built = serve_target(str(tmp_path / "code.py"), Overrides(worker_kind="thread"))
            self.app = App([])
            config = RepositoryConfig(max_models=2, versions="all", poll_s=0.05)
            found = stock(self.app, built.repositories, config)
            assert found is not None
            self.app.source = found.find
            self.kserve = KServe(self.app, is_managed=True)

    with Stocked() as found:
        yield found


def times(channel, model, version="", sample=(1.0, 2.0)):
    made = request(model, np.array([sample]))
    made.model_version = version
    return output(infer(channel, made)).tolist()[0]


def test_a_model_is_loaded_for_who_asks(port):  # N106, N120
    channel = port.connect()
    assert times(channel, "a") == [3, 6]
    assert times(channel, "b") == [5, 10]
    assert times(channel, "a", "1") == [2, 4]
    large = np.ones(100_000)
    assert times(channel, "b", sample=large) == [5] * 100_000
    assert port.app.stock.statistics().loaded == 2
    assert refusal(lambda: times(channel, "a", "7"))[0] == "NOT_FOUND"
    assert refusal(lambda: times(channel, "c"))[0] == "NOT_FOUND"
    assert "could not convert" in refusal(lambda: times(channel, "broken"))[1]
    index = ask(channel, "RepositoryIndex")
    states = {(one.name, one.version): (one.state, one.reason) for one in index.models}
    assert [state for (name, _), state in states.items() if name == "a"].count(("READY", "")) == 1
    assert ("UNAVAILABLE", "loaded when it is asked for") in states.values()
    assert states["broken", "1"][0] == "UNAVAILABLE"
    ask(channel, "RepositoryModelLoad", model_name="a")
    assert times(channel, "a") == [3, 6]


def test_what_clients_ask_before_their_first_call(port):
    channel = port.connect()
    assert ask(channel, "ModelReady", name="a").ready  # whoever asks it has it loaded
    assert ask(channel, "ModelReady", name="a", version="1").ready
    assert not ask(channel, "ModelReady", name="a", version="7").ready
    assert refusal(lambda: ask(channel, "ModelReady", name="no-such"))[0] == "NOT_FOUND"
    assert not port.app.served
    assert ask(channel, "ModelMetadata", name="a").inputs[0].datatype == "FP64"
    assert ask(channel, "ModelConfig", name="b").config.name == "b"
    assert set(port.app.served) == {"a", "b"}
    assert refusal(lambda: ask(channel, "ModelMetadata", name="no-such"))[0] == "NOT_FOUND"
    assert "could not convert" in refusal(lambda: ask(channel, "ModelMetadata", name="broken"))[1]
    assert not ask(channel, "ModelReady", name="broken").ready


def test_each_request_of_a_stream_has_its_model(port):
    channel = port.connect()
    asked = [request(name, np.array([[1.0]])) for name in ("a", "b", "a", "no-such")]
    answers = [M.ModelStreamInferResponse.FromString(one) for one in stream(channel, iter(asked))]
    values = sorted(output(one.infer_response).item() for one in answers if not one.error_message)
    assert values == [3, 3, 5]  # whoever is ready first is answered first
    (error,) = [one.error_message for one in answers if one.error_message]
    assert error.startswith("Request for unknown model: there is no model 'no-such'")


def test_who_is_called_off_while_its_model_loads_holds_up_nobody(port):
    channel = port.connect()
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
        request("a", np.array([[1.0]])).SerializeToString()
    )
    call.cancel()
    assert isinstance(call.exception() if not call.cancelled() else grpc.FutureCancelledError(), Exception)
    assert times(channel, "a") == [3, 6]
