# SPDX-License-Identifier: Apache-2.0
"""The original's own ten example projects, as they are: handlers and configurations are not touched.

    FOREBAY_TEST_NUCLEUS=CHECKOUT/examples make test ARGS=tests/compat/nucleus/test_upstream.py

where CHECKOUT is one of github.com/cortexlabs/nucleus. Changed are only where S3 is (AWS_ENDPOINT_URL), what is
installed, and the network: weights of GPT-2, of the translators and of BERT cannot be had without one, so
`transformers`, `bert`, `tensorflow`, `tensorflow_hub` and PIL are stand-ins with the names that the handlers use,
models are small ones with the same inputs and outputs, and `requests.get` finds what the projects look up.
"""

import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.buckets import running_buckets
from tests.compat.nucleus.conftest import Server
from tests.forked import COMMAND
from tests.models.saved_models import run_tensorflow
from tests.waiting import PATIENCE_S

EXAMPLES = Path(os.environ.get("FOREBAY_TEST_NUCLEUS", ""))
pytestmark = pytest.mark.skipif(
    "FOREBAY_TEST_NUCLEUS" not in os.environ,
    reason="FOREBAY_TEST_NUCLEUS does not name the folder examples of a checkout of cortexlabs/nucleus",
)
CLASSES = {str(number): [f"n{number}", f"class-{number}"] for number in range(1000)}
STAND_INS = {
    "requests.py": f"""
        import io, json
        import cv2, numpy

        class _Answer:
            def __init__(self, url):
                picture = cv2.imencode(".png", numpy.full((224, 224, 3), 90, numpy.uint8))[1].tobytes()
                self.content, self.raw = picture, io.BytesIO(picture)
                self.text = "\\n".join(f"label-{{number}}" for number in range(1001))

            def json(self):
                return {CLASSES!r}

        def get(url, **_):
            return _Answer(url)
        """,
    "PIL/__init__.py": "",
    "PIL/Image.py": """
        import cv2, numpy

        def open(file):
            return cv2.imdecode(numpy.frombuffer(file.read(), numpy.uint8), cv2.IMREAD_COLOR)
        """,
    "transformers.py": """
        import os
        import torch

        class GPT2Tokenizer:
            @classmethod
            def from_pretrained(cls, name):
                return cls()
            def encode(self, text, return_tensors):
                return torch.tensor([[ord(letter) for letter in text]])
            def decode(self, tokens):
                return "".join(map(chr, tokens.tolist()))

        class GPT2LMHeadModel:
            @classmethod
            def from_pretrained(cls, name):
                return cls()
            def to(self, device):
                return self
            def generate(self, tokens, max_length, do_sample):
                return torch.cat([tokens, torch.tensor([[ord("!")] * 3])], 1)

        class MarianMTModel(GPT2LMHeadModel):
            @classmethod
            def from_pretrained(cls, path, local_files_only):
                made = cls()
                made.told = open(os.path.join(path, "config.json")).read()
                return made

        class MarianTokenizer(GPT2Tokenizer):
            pass

        def pipeline(task, model, tokenizer, device):
            return lambda text: [{"generated_text": f"{model.told}: {text}"}]
        """,
    # Of the handler that imports it only: forebay would run models with a TensorFlow that it finds.
    "sitecustomize.py": """
        import importlib.util, os, sys

        class Finder:
            def find_spec(name, path=None, target=None):
                frame, is_asked = sys._getframe(), False
                while frame is not None:
                    is_asked = is_asked or "importlib.util" in frame.f_code.co_filename
                    frame = frame.f_back
                if name == "tensorflow" and not is_asked:
                    file = os.path.join(os.path.dirname(__file__), "of_handlers", "tensorflow.py")
                    return importlib.util.spec_from_file_location(name, file)

        sys.meta_path.insert(0, Finder)
        """,
    "of_handlers/tensorflow.py": """
        import contextlib

        class Graph:
            def as_default(self):
                return contextlib.nullcontext()

        class Session(contextlib.nullcontext):
            def __enter__(self):
                return self
            def run(self, asked):
                return ["vocabulary", True]
        """,
    "tensorflow_hub.py": """
        import sys

        sys.modules.pop("tensorflow")

        def Module(url):
            return lambda signature, as_dict: {"vocab_file": 0, "do_lower_case": 0}
        """,
    "bert/__init__.py": "",
    "bert/tokenization.py": """
        class FullTokenizer:
            def __init__(self, vocab_file, do_lower_case):
                pass
        """,
    "bert/run_classifier.py": """
        class InputExample:
            def __init__(self, guid, text_a, label):
                self.text_a = text_a

        class _Feature:
            def __init__(self, ids):
                self.input_ids = ids

        def convert_single_example(index, example, labels, length, tokenizer):
            return _Feature([int("amazing" in example.text_a)] + [0] * (length - 1))
        """,
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand-ins")
    for name, text in STAND_INS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The buckets of the examples, signed and, for who does not sign, as plain files."""
    with running_buckets(tmp_path_factory.mktemp("store")) as buckets:
        models = buckets.make("cortex-examples")
        translators = buckets.make("models.huggingface.co")
        run_tensorflow(str(Path(__file__).with_name("upstream") / "saved_models.py"), str(models))
        from sklearn.datasets import load_iris
        from sklearn.tree import DecisionTreeClassifier

        data: Any = load_iris()
        tree = DecisionTreeClassifier(random_state=0).fit(data.data, data.target)
        (models / "sklearn/iris-classifier").mkdir(parents=True)
        (models / "sklearn/iris-classifier/model.pkl").write_bytes(pickle.dumps(tree))
        for file in (EXAMPLES / "rest-python-model-caching-translator").glob("sample-*.json"):
            asked = json.loads(file.read_text())
            name = f"{asked['source_language']}-{asked['destination_language']}"
            folder = translators / "bert/Helsinki-NLP" / f"opus-mt-{name}"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(name)

        class Plain(SimpleHTTPRequestHandler):
            def end_headers(self):
                self.send_header("ETag", '"1"')
                super().end_headers()

            def log_message(self, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
                pass

        plain = ThreadingHTTPServer(("127.0.0.1", 0), partial(Plain, directory=buckets.folder))
        Thread(target=plain.serve_forever, daemon=True).start()
        yield buckets, models, plain.server_address[1]
        plain.shutdown()
        plain.server_close()


@pytest.fixture
def project(store, stand_ins, tmp_path):
    """Serves an example; `is_signed` says whether its store wants signatures."""
    started = []

    def start(name, *, is_signed=True):
        buckets, _, plain = store
        folder = shutil.copytree(EXAMPLES / name, tmp_path / name)
        before = {file: file.read_bytes() for file in folder.iterdir()}
        environment = {**os.environ, **buckets.environment(None if is_signed else plain), "PYTHONPATH": str(stand_ins)}
        out, err = tmp_path / "out", tmp_path / "err"
        command = [*COMMAND, "serve", str(folder), "--http-port", "0", "--state-dir", str(tmp_path / "state")]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        server = Server(folder, tmp_path / "state", process, out, err)
        started.append((server, before))
        return server.wait_ready()

    yield start
    for server, before in started:
        server.process.terminate()
        server.process.wait(PATIENCE_S)
        assert {file: file.read_bytes() for file in before} == before


def sample(server, name="sample.json"):
    return json.loads((server.folder / name).read_text())


def call(server, service, method, gives, message, **fields) -> Any:
    """Asks a gRPC project with messages of its own proto file."""
    grpc, protoc = pytest.importorskip("grpc"), pytest.importorskip("grpc_tools.protoc")
    (proto,) = server.folder.glob("*.proto")
    out = server.folder.parent / "generated"
    out.mkdir()
    assert protoc.main(["", f"-I{server.folder}", f"--python_out={out}", str(proto)]) == 0
    sys.path.insert(0, str(out))
    try:
        module = importlib.import_module(f"{proto.stem}_pb2")
    finally:
        sys.path.remove(str(out))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        kind = channel.unary_stream if gives.endswith("*") else channel.unary_unary
        ask = kind(
            f"/{service}/{method}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=getattr(module, gives.rstrip("*")).FromString,
        )
        answer = ask(getattr(module, message)(**fields), timeout=PATIENCE_S)
        return list(answer) if gives.endswith("*") else answer


def test_iris(project):
    server = project("rest-python-iris-classifier")
    answer = server.request("POST", json=sample(server)).json()
    assert answer == {"prediction": "setosa", "model": {"version": "latest"}}


def test_iris_over_grpc(project):
    server = project("grpc-python-iris-classifier", is_signed=False)
    measures = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}
    answer = call(server, "iris_classifier.Handler", "Predict", "Response", "Sample", **measures)
    assert answer.classification == "setosa"


def test_primes_over_grpc(project):
    server = project("grpc-python-prime-number-generator")
    found = call(server, "prime_generator.Generator", "Predict", "Output*", "Input", prime_numbers_to_generate=5)
    assert [one.prime_number for one in found] == [2, 3, 5, 7, 11]


def test_batches_of_iris(project, store):
    import torch

    torch.manual_seed(0)
    folder = store[1] / "pytorch/iris-classifier"
    folder.mkdir(parents=True)
    layers = {"fc1": (100, 4), "fc2": (100, 100), "fc3": (3, 100)}
    weights = {f"{name}.weight": torch.randn(*shape) for name, shape in layers.items()}
    torch.save(
        weights | {f"{name}.bias": torch.randn(rows) for name, (rows, _) in layers.items()}, folder / "weights.pth"
    )
    server = project("rest-python-server-side-batching-iris-classifier", is_signed=False)
    with ThreadPoolExecutor(8) as threads:  # eight of them are a batch; it would wait for 20 s
        answers = list(threads.map(lambda _: server.request("POST", json=sample(server)).text, range(8)))
    assert len(set(answers)) == 1
    assert answers[0] in {"setosa", "versicolor", "virginica"}


def test_text_generator(project):
    server = project("rest-python-text-generator")
    text = sample(server)
    assert server.request("POST", json=text).text == f"{text['text']}!!!"


def test_translators_in_a_cache(project):
    server = project("rest-python-model-caching-translator")
    for number in range(3):
        asked = sample(server, f"sample-{number}.json")
        told = server.request("POST", json=asked).json()["generated_text"]
        assert told == f"{asked['source_language']}-{asked['destination_language']}: {asked['text']}"
    kept = {path.name for path in server.state.glob("models/*/*/opus-*")}
    assert len(kept) == 2  # `disk_cache_size`


@pytest.mark.parametrize("name", ["rest-tfs-multi-model-classifier", "rest-tfs-multi-model-caching-classifier"])
def test_several_saved_models(project, name):
    server = project(name)
    for model, label in (("resnet50", "class-7"), ("inception", "class-6"), ("iris", "setosa")):
        asked = sample(server, "sample-iris.json" if model == "iris" else "sample-image.json")
        answer = server.request("POST", f"/?model={model}", json=asked)
        assert answer.json() == {"label": label, "model": {"model": model, "version": "latest"}}, server.out.read_text()


def test_sentiment(project):
    server = project("rest-tfs-sentiment-analyzer")
    assert server.request("POST", json=sample(server)).text == "positive"
    assert server.request("POST", json={"review": "dull"}).text == "negative"


def test_batches_of_pictures(project):
    server = project("rest-tfs-server-side-batching-inception-classifier")
    with ThreadPoolExecutor(2) as threads:  # two are a batch; it would wait for 20 s
        answers = list(threads.map(lambda _: server.request("POST", json=sample(server)).text, range(2)))
    assert answers == ["label-7"] * 2
