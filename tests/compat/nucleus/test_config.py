# SPDX-License-Identifier: Apache-2.0
"""nucleus.yaml: what is read, which defaults it gets, and what is said about mistakes."""

import textwrap

import pytest

from forebay.errors import ConfigError
from forebay.server import yaml
from forebay.surfaces.nucleus.config import read_config
from forebay.surfaces.nucleus.project_settings import Dependencies, GpuVersion, ModelPath

PYTHON = "type: python\npath: handler.py\n"
TENSORFLOW = "type: tensorflow\npath: handler.py\nmodels:\n  path: s3://bucket/model/\n"


@pytest.fixture
def write(tmp_path):
    """Writes a configuration beside a handler and returns its file."""

    def write(text, name="nucleus.yaml"):
        (tmp_path / "handler.py").write_text("class Handler: pass\n")
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        return file

    return write


@pytest.fixture
def read(write):
    """The configuration of a text."""
    return lambda text, **more: read_config(write(text), **more)[0]


@pytest.fixture
def warnings(write):
    """The warnings about a text."""
    return lambda text, **more: read_config(write(text), **more)[1]


@pytest.fixture
def refuse(write):
    """The one line with which a text is refused, without its file."""

    def refuse(text, **more):
        file = write(text)
        with pytest.raises(ConfigError) as raised:
            read_config(file, **more)
        message = raised.value.message
        assert "\n" not in message
        assert message.startswith(f"{file}:")
        return message.removeprefix(f"{file}:")

    return refuse


@pytest.mark.parametrize("line", ["", "type: Python", "type: onnx", "type: [python]", "type:"])
def test_a_type_other_than_the_two_is_refused(refuse, line):  # N2
    assert "'type' must be set to 'python' or 'tensorflow'" in refuse(f"path: handler.py\n{line}\n")


def test_a_type_in_other_letters_gets_a_hint(refuse):  # N2
    assert refuse("path: handler.py\ntype: Python") == (
        "2: type: 'type' must be set to 'python' or 'tensorflow', got 'Python'; did you mean 'python'?"
    )


def test_path_is_required(refuse):  # N3
    assert "'path' field missing" in refuse("type: python")
    assert "'path' field missing" in refuse("type: python\npath:\n")


def test_path_is_relative_to_the_project_and_not_to_python_path(write, tmp_path):  # N3
    file = write(PYTHON.replace("handler.py", "src/handler.py") + "python_path: src\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "handler.py").touch()
    config, _ = read_config(file)
    assert config.handler_file == tmp_path / "src" / "handler.py"
    assert config.python_dir == tmp_path / "src"


def test_a_missing_handler_is_named_with_the_nearest_file(refuse):  # N3
    found = refuse("type: python\npath: handle.py\n")
    assert found.startswith("2: path: there is no file handle.py in ")
    assert found.endswith("did you mean 'handler.py'?")


def test_a_missing_handler_does_not_keep_files_from_being_generated(read):  # N3
    assert read("type: python\npath: later.py\n", serving=False).path == "later.py"


@pytest.mark.parametrize(
    "written, meant", [("3.9", "3.9"), ("3.10", "3.10"), ("'3.9'", "3.9"), ("3.6.9", "3.6.9"), ("3", "3")]
)
def test_py_version_is_what_is_written_quoted_or_not(read, written, meant):  # N4
    assert read(f"{PYTHON}py_version: {written}\n").py_version == meant


def test_py_version_other_than_the_running_one_is_one_warning(read, warnings):  # N4
    assert read(PYTHON).py_version == "3.6.9"
    assert warnings(PYTHON) == []
    (warning,) = warnings(PYTHON + "py_version: 2.7\n")
    assert "nucleus.yaml:3: py_version: 2.7 is asked for, this is Python 3." in warning
    assert warnings(PYTHON + "py_version: anything at all\n")


@pytest.mark.parametrize("key", ["tfs_version", "tfs_container_dns"])
def test_tensorflow_serving_is_not_for_python(refuse, key):  # N5
    assert f"'{key}' field not supported for 'python' type" in refuse(f"{PYTHON}{key}: 2.3.0\n")


def test_tensorflow_serving_has_defaults(read):  # N5
    config = read(TENSORFLOW, serving=False)
    assert (config.tfs_version, config.tfs_container_dns) == ("2.3.0", "localhost")
    assert "tfs_container_dns" not in config.given
    config = read(TENSORFLOW + "tfs_version: 2.10\ntfs_container_dns: localhost\n", serving=False)
    assert config.tfs_version == "2.10"
    assert "tfs_container_dns" in config.given


@pytest.mark.parametrize(
    "start, lines, text",
    [
        (
            PYTHON,
            "gpu_version: {cuda: 10.1, cudnn: 8}",
            "gpu must be enabled (by setting 'gpu: true') in order to specify 'gpu_version' field",
        ),
        (PYTHON, "gpu: true", "when gpu is enabled, the 'gpu_version' field must be specified too"),
        (PYTHON, "gpu: true\ngpu_version: {cudnn: 8}", "gpu_version: 'cuda' field must be specified"),
        (PYTHON, "gpu: true\ngpu_version: {cuda: 10.1}", "gpu_version: 'cudnn' field must be specified"),
        (
            TENSORFLOW,
            "gpu: true\ngpu_version: {cuda: 10.1, cudnn: 8}",
            "'gpu_version' field not supported for 'tensorflow' type",
        ),
    ],
)
def test_gpu_texts(refuse, start, lines, text):  # N6
    assert text in refuse(f"{start}{lines}\n", serving=False)


def test_gpu_of_the_text_generator_example(read, warnings, monkeypatch):  # N6
    text = PYTHON + "gpu: true\ngpu_version:\n  cuda: 10.1\n  cudnn: 8\n"
    assert read(text).gpu_version == GpuVersion(cuda="10.1", cudnn="8", development_image=False)
    assert read(TENSORFLOW + "gpu: true\n", serving=False).gpu
    monkeypatch.setattr("forebay.surfaces.nucleus.config.has_accelerator", lambda: False)
    (warning,) = warnings(text)
    assert "gpu: no accelerator" in warning
    monkeypatch.setattr("forebay.surfaces.nucleus.config.has_accelerator", lambda: True)
    assert warnings(text) == []


def test_one_dependency_file_keeps_the_defaults_of_the_others(read):  # N7
    assert read(PYTHON).dependencies == Dependencies()
    config = read(PYTHON + "dependencies: {pip: reqs.txt}\n")
    assert config.dependencies == Dependencies(pip="reqs.txt", conda="conda-packages.txt", shell="dependencies.sh")


def test_serve_port(read, refuse):  # N8
    assert read(PYTHON).serve_port == 8080
    assert read(PYTHON + "serve_port: 9123\n").serve_port == 9123
    assert refuse(PYTHON + "serve_port: 65536\n") == (
        "3: serve_port: expected a whole number from 1 to 65535, got 65536"
    )


def test_env_values_of_any_scalar_type_become_strings(read, refuse):  # N9
    config = read(PYTHON + "env: {A: true, B: 1, C: 1.50, D: , E: \"it's  $x\", F: 2020-01-02, G: ''}\n")
    assert config.env == {"A": "True", "B": "1", "C": "1.5", "E": "it's  $x", "F": "2020-01-02", "G": ""}
    assert refuse(PYTHON + "env:\n  A: [1]\n") == "4: env.A: expected a string or a number, got [1]"
    assert "put it in quotes" in refuse(PYTHON + "env: {on: 1}\n")
    assert "name of a variable" in refuse(PYTHON + "env: {'A=B': 1}\n")
    assert "zero byte" in refuse(PYTHON + 'env: {A: "\\0"}\n')


def test_config_keeps_its_types(read):  # N11
    assert read(PYTHON).config == {}
    config = read(PYTHON + "config:\n  a: [1, [2.5, null]]\n  b: {c: true, 1: '1'}\n")
    assert config.config == {"a": [1, [2.5, None]], "b": {"c": True, 1: "1"}}


def test_python_path_is_joined_to_the_project_and_normalised(read, warnings, tmp_path):  # N12
    assert read(PYTHON).python_dir == tmp_path
    (tmp_path / "lib").mkdir()
    assert read(PYTHON + "python_path: ./x/../lib/\n").python_dir == tmp_path / "lib"
    (warning,) = warnings(PYTHON + "python_path: nowhere\n")
    assert "python_path: there is no folder" in warning


def test_the_proto_file_is_there(read, refuse, tmp_path):  # N14
    text = PYTHON + "protobuf_path: servcie.proto\n"
    assert read(text, serving=False).protobuf_path == "servcie.proto"
    (tmp_path / "service.proto").touch()
    assert refuse(text).startswith("3: protobuf_path: there is no file servcie.proto in ")
    assert refuse(text).endswith("did you mean 'service.proto'?")
    assert read(PYTHON + "protobuf_path:\n").protobuf_path is None


def test_the_models_key_of_the_other_type_is_refused(refuse):  # N15
    text = refuse(PYTHON + "models: {path: s3://b/m}\n", serving=False)
    assert "'models' field not supported for 'python' type" in text
    text = refuse(TENSORFLOW + "multi_model_reloading: {path: s3://b/m}\n")
    assert "'multi_model_reloading' field not supported for 'tensorflow' type" in text


MODELS = PYTHON + "models: {path: s3://b/m}\n"


@pytest.mark.parametrize(
    "handler",
    [
        "class Handler:\n    def __init__(self, config, python_client): pass",
        "class Base:\n    def __init__(self, python_client): pass\nclass Handler(Base): pass",
        "from elsewhere import Handler",
        "class Handler:\n    @adding_arguments\n    def __init__(self): pass",
        "class Handler: pass\nHandler = changed(Handler)",
        "class Handler:",
    ],
    ids=["asks", "inherits", "imported", "decorated", "given twice", "broken"],
)
def test_models_of_a_python_project_may_stand_under_either_key(write, handler):  # N16
    file = write(MODELS)
    (file.parent / "handler.py").write_text(handler)
    models = read_config(file)[0].served_models
    assert models is not None
    assert models.path == "s3://b/m"
    with pytest.raises(ConfigError, match="'models' field not supported for 'python' type"):
        read_config(file, serving=False)


@pytest.mark.parametrize(
    "handler",
    ["class Handler: pass", "class Handler:\n    def __init__(self, config, model_client): pass"],
    ids=["no constructor", "another client"],
)
def test_a_handler_that_does_not_ask_for_models_under_that_key_is_told_where_and_how(write, handler):  # N15, N16
    file = write(MODELS)
    (file.parent / "handler.py").write_text(handler)
    with pytest.raises(ConfigError) as raised:
        read_config(file)
    assert raised.value.message.startswith(f"{file}:3: 'models' field not supported for 'python' type")
    assert "def __init__(self, config, python_client)" in raised.value.message


@pytest.mark.parametrize(
    "place, said",
    [
        ("path: 's3://'", "expected s3://BUCKET/PREFIX"),
        ("path: s3://bucket", "expected s3://BUCKET/PREFIX"),
        ("dir: ftp://host/models", "expected s3://, gs://, az://, file:// or the path of a folder"),
        ("paths: [{name: a, path: s3://b/}]", "expected s3://BUCKET/PREFIX"),
    ],
)
def test_where_models_may_be(read, refuse, place, said):  # N117
    assert said in refuse(PYTHON + f"multi_model_reloading: {{{place}}}\n")
    assert read(PYTHON + "multi_model_reloading: {dir: 's3://bucket/'}\n").served_models.dir == "s3://bucket/"


def test_tensorflow_needs_models(refuse):  # N17
    assert "'models'" in refuse("type: tensorflow\npath: handler.py\n")


@pytest.mark.parametrize(
    "places", ["path: s3://b/m, dir: s3://b", "path: s3://b/m, paths: []", "paths: [], dir: s3://b", ""]
)
@pytest.mark.parametrize("field", ["models", "multi_model_reloading"])
def test_exactly_one_place_of_models(refuse, field, places):  # N18
    kind = "tensorflow" if field == "models" else "python"
    text = refuse(f"type: {kind}\npath: handler.py\n{field}: {{{places}}}\n")
    assert text.startswith(f"3: {field}: can only specify 'path', 'paths' or 'dir'")


@pytest.mark.parametrize(
    "paths, text",
    [
        ("[]", ": if the 'path' field list is specified, then its length must be at least 1"),
        ("[{name: a, path: s3://b/a}, {path: s3://b/b}]", ".paths.1: name field required"),
        ("[{name: a}]", ".paths.0: path field required"),
        ("[{name: a, path: s3://b/a}, {name: a, path: s3://b/b}]", ".paths.1: the name 'a' is taken"),
        ("[{name: org/net, path: s3://b/a}]", ".paths.0.name: expected the name of a folder: no '/', no dot in front"),
        ("[{name: .net, path: s3://b/a}]", ".paths.0.name: expected the name of a folder: no '/', no dot in front"),
        (
            f"[{{name: {'é' * 128}, path: s3://b/a}}]",
            f".paths.0.name: expected the name of a folder: no '/', no dot in front, at most 255 bytes, got '{'é' * 9}",
        ),
    ],
)
def test_paths_texts(refuse, paths, text):  # N19
    found = refuse(f"{PYTHON}multi_model_reloading:\n  paths: {paths}\n")
    assert f"multi_model_reloading{text}" in found


def test_signature_key_for_all_and_for_one(read):  # N20
    text = """
        type: tensorflow
        path: handler.py
        models:
          signature_key: all
          paths:
            - {name: a, path: s3://b/a, signature_key: one}
            - {name: b, path: s3://b/b}
        """
    models = read(text, serving=False).models
    assert models.signature_key == "all"
    assert models.paths == (
        ModelPath(name="a", path="s3://b/a", signature_key="one"),
        ModelPath(name="b", path="s3://b/b"),
    )


@pytest.mark.parametrize(
    "sizes, text",
    [
        (
            "cache_size: 1",
            "when the cache is configured, both 'cache_size' and 'disk_cache_size' fields must be specified",
        ),
        ("disk_cache_size: 1", "both 'cache_size' and 'disk_cache_size' fields must be specified"),
        (
            "cache_size: 3, disk_cache_size: 2",
            "when the cache is configured, 'cache_size' cannot be larger than 'disk_cache_size'",
        ),
        ("cache_size: 0, disk_cache_size: 2", "cache_size: expected a whole number >= 1, got 0"),
        ("cache_size: true, disk_cache_size: 2", "cache_size: expected a whole number >= 1, got true"),
    ],
)
def test_cache_texts(refuse, sizes, text):  # N21
    assert text in refuse(f"{PYTHON}multi_model_reloading: {{dir: s3://b/m, {sizes}}}\n")


def test_equal_cache_sizes_are_fine(read):  # N21
    text = PYTHON + "multi_model_reloading: {dir: s3://b/m, cache_size: 2, disk_cache_size: 2}\n"
    assert read(text, serving=False).multi_model_reloading.cache_size == 2


def test_caching_needs_many_models_and_one_process(refuse):  # N22
    sizes = "cache_size: 1, disk_cache_size: 2"
    text = refuse(f"{PYTHON}multi_model_reloading: {{path: s3://b/m, {sizes}}}\n")
    assert "'cache_size'" in text
    assert "'path'" in text
    text = refuse(f"{PYTHON}multi_model_reloading: {{dir: s3://b/m, {sizes}}}\nprocesses: 2\n")
    assert "'cache_size'" in text
    assert "'processes'" in text


def test_posts_of_tensorflow_are_batched_below_the_handler(read):  # N136
    batching = "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 0.1}\n"
    assert read(PYTHON + batching).post_batching.max_batch_size == 2
    assert read(TENSORFLOW + batching).post_batching is None


@pytest.mark.parametrize(
    "block, text",
    [
        ("{batch_interval_seconds: 1.0}", "missing 'max_batch_size' field"),
        ("{max_batch_size: 2}", "missing 'batch_interval_seconds' field"),
        ("{max_batch_size: 2.0, batch_interval_seconds: 1.0}", "'max_batch_size' field isn't of type 'int'"),
        ("{max_batch_size: true, batch_interval_seconds: 1.0}", "'max_batch_size' field isn't of type 'int'"),
        ("{max_batch_size: 2, batch_interval_seconds: '1'}", "'batch_interval_seconds' field isn't of type 'float'"),
        ("{max_batch_size: 2, batch_interval_seconds: true}", "'batch_interval_seconds' field isn't of type 'float'"),
        ("{max_batch_size: 0, batch_interval_seconds: 1.0}", "'max_batch_size' must be at least 1"),
        ("{max_batch_size: 2, batch_interval_seconds: 0.0}", "'batch_interval_seconds' must be more than 0"),
        ("{max_batch_size: 2, batch_interval_seconds: .nan}", "'batch_interval_seconds' must be more than 0"),
        ("{max_batch_size: 2, batch_interval_seconds: .inf}", "'batch_interval_seconds' must be more than 0"),
    ],
)
def test_batching_texts(refuse, block, text):  # N23
    found = refuse(f"{PYTHON}server_side_batching: {block}\n")
    assert found.startswith("3: server_side_batching")
    assert text in found


def test_a_whole_interval_serves_and_does_not_generate(read, refuse):  # N23
    text = PYTHON + "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 1}\n"
    assert read(text).server_side_batching.batch_interval_seconds == 1.0
    assert "'batch_interval_seconds' field isn't of type 'float'" in refuse(text, serving=False)


def test_batching_of_a_grpc_project_is_one_warning(warnings):  # N24
    block = "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 1.0}\n"
    (warning,) = warnings(PYTHON + "protobuf_path: a.proto\n" + block, serving=False)
    assert "server_side_batching: ignored" in warning


def test_concurrency_defaults(read):  # N25
    config = read(PYTHON)
    assert (config.processes, config.threads_per_process, config.max_concurrency) == (1, 1, 0)


@pytest.mark.parametrize(
    "line",
    [
        "processes: 0",
        "processes: 1.5",
        "processes: true",
        "processes: 1000000000",  # F134
        "threads_per_process: 1000000000",  # F134
        "threads_per_process: 0",
        "threads_per_process: '2'",
        "max_concurrency: -1",
        "max_concurrency: []",
    ],
)
def test_concurrency_that_is_not_possible(refuse, line):  # N25
    text = refuse(PYTHON + line + "\n")
    key, value = line.split(": ")
    assert text.startswith(f"3: {key}: expected a whole number ")
    assert text.endswith(f", got {value}")


def test_log_level(read, refuse):  # N26
    assert read(PYTHON).log_level == "info"
    assert read(PYTHON + "log_level: DEBUG\n").log_level == "debug"
    assert refuse(PYTHON + "log_level: trace\n").startswith(
        "3: log_level: expected 'debug', 'info', 'warning' or 'error', got 'trace'"
    )


def test_unknown_keys_are_one_warning_each_with_the_nearest(warnings):  # N27
    text = PYTHON + "procesess: 2\ndependencies:\n  pipp: x\nzzzzzz: 1\n1: 2\n"
    found = [warning.partition("nucleus.yaml:")[2] for warning in warnings(text)]
    assert found == [
        "3: nothing reads the key 'procesess'; did you mean 'processes'?",
        "5: nothing reads the key 'dependencies.pipp'; did you mean 'pip'?",
        "6: nothing reads the key 'zzzzzz'",
        "7: nothing reads the key '1'",
    ]


@pytest.mark.parametrize(
    "line, text",
    [
        ("env: []", "env: expected a mapping of keys to values, got []"),
        ("config: 3", "config: expected a mapping of keys to values, got 3"),
        ("dependencies: x", "dependencies: expected a mapping of keys to values, got 'x'"),
        ("multi_model_reloading: {paths: {}}", "multi_model_reloading.paths: expected a list, got a mapping"),
        (
            "multi_model_reloading: {paths: [a]}",
            "multi_model_reloading.paths.0: expected a mapping of keys to values, got 'a'",
        ),
        ("python_path: [a]", "python_path: expected a string of one line, got ['a']"),
        ("gpu: maybe", "gpu: expected true or false, got 'maybe'"),
        ("gpu_version: 10.1", "gpu_version: expected a mapping of keys to values, got 10.1"),
        ("server_side_batching: true", "server_side_batching: expected a mapping of keys to values, got true"),
    ],
)
def test_wrong_kinds_of_values_name_their_key(refuse, line, text):  # N27
    assert refuse(PYTHON + line + "\n") == f"3: {text}"


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "- type\n", "python\n", "type: [\n", "type: python\ntype: python\n"]
)
def test_bad_files_are_one_line(refuse, text):  # N27
    refuse(text)


def test_a_missing_file_is_one_line_with_the_nearest_name(write):  # N27
    file = write(PYTHON, name="nucleus.yml")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory; did you mean 'nucleus.yml'\?$"):
        read_config(file.with_name("nucleus.yaml"))
    with pytest.raises(ConfigError, match="it is a folder"):
        read_config(file.parent)


def test_any_name_will_do_and_the_file_stays_as_it_is(write):  # N27
    file = write(PYTHON, name="my.yaml")
    file.chmod(0o444)
    before = file.stat()
    config, warnings = read_config(file)
    assert (config.file, config.project_dir, warnings) == (file, file.parent, [])
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def test_the_command_says_it_without_a_traceback(write, cli):  # N27
    for text in ("", "type: [\n"):
        done = cli("check", write(text))
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


IGNORED = {
    "--threads 4": "--threads: threads_per_process of its file says that",
    "--max-batch-size 8": "--max-batch-size: it has no server_side_batching",
    "--max-wait-ms 5": "--max-wait-ms: it has no server_side_batching",
    "--worker-kind thread": "--worker-kind: it always runs in processes of its own",
    "--idle go": "--idle: it has no use for that",
    "--policy auto": "--policy: it has no use for that",
    "--stuck-s 5": "--stuck-s: it has no use for that",
    "--max-timeout-ms 5000": "--max-timeout-ms: it has no use for that",
}


def test_options_that_do_nothing_for_a_project_are_warned_of(write, cli):
    done = cli("check", write(PYTHON), *" ".join(IGNORED).split())
    assert done.returncode == 0
    for said in IGNORED.values():
        assert f"a Nucleus project ignores {said}" in done.stderr + done.stdout


def test_options_that_a_project_follows_are_not_warned_of(write, cli):
    text = PYTHON + "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 1}\n"
    options = "--workers 2 --timeout-ms 5000 --max-queue 9 --max-batch-size 8 --max-wait-ms 5 --worker-kind process"
    done = cli("check", write(text), *options.split())
    assert done.returncode == 0
    assert "ignores" not in done.stderr + done.stdout


# The YAML reader itself


def test_data_and_places_of_a_document():
    text = "a: &x {b: 1, c: 3.10}\nd:\n  <<: *x\n  b: 2\nl:\n  - 1\n  - q: null\n'<<': 7\n=: 4\n"
    document = yaml.load(text, "f.yaml")
    assert document.data == {
        "a": {"b": 1, "c": 3.1},
        "d": {"b": 2, "c": 3.1},
        "l": [1, {"q": None}],
        "<<": 7,
        "=": 4,
    }
    assert document.mark(("d", "c")) == (1, 14)
    assert document.mark(("l", 1, "q")) == (7, 5)
    assert document.mark(("l", 9, "z")) == (5, 1)
    assert document.text(("a", "c")) == "3.10"
    assert document.text(("a",)) is None


def test_the_first_merged_mapping_wins_and_own_keys_win_over_it():
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {z: 3, <<: [*a, *b]}\n"
    assert yaml.load(text, "f").data["c"] == {"z": 3, "x": 1, "y": 1}


MERGE_CHAIN = "a0: &a0 {k: 1}\n" + "\n".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 1}}" for i in range(1, 200))
MERGE_BOMB = "a0: &a0 {k: 1}\n" + "\n".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)
)
ALIAS_BOMB = "a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))


@pytest.mark.parametrize(
    "text, found",
    [
        ("a: 1\nb: 2\na: 3", "f:3: a: the key is given twice, first in line 1"),
        ("[" * 100_000, "f:1: nested deeper than 64 levels"),
        ("a: &a [*a]", "f:1: an alias contains itself"),
        ("a: &a\n  <<: *a", "f:1: an alias contains itself"),
        ("<<: 1", "f:1: '<<' takes a mapping or a list of mappings"),
        ("a: 1\nb: 2021-02-31", "f:2: expected timestamp, got '2021-02-31'"),
        ("a: !!python/name:os.system", "f:1: the tag !!python/name:os.system is not supported"),
        ("a: !!set {b}", "f:1: the tag !!set is not supported; use plain mappings and lists"),
        ("a: 1\n---\nb: 2", "f:2: not valid YAML: expected a single document"),
        ("a: \x07", "f:1: not valid YAML: control characters are not allowed"),
        ("{[1]: 2}", "f:1: a list or mapping cannot be a key"),
        ("- *nope", "f:1: not valid YAML: found undefined alias"),
        (b"a: 1\nb: \xff", "f:2: byte 8 is not UTF-8"),
        ("# " + "x" * yaml.MAX_BYTES, "f:1: expected at most"),
        (ALIAS_BOMB, "aliases unfold to more than"),
        (MERGE_BOMB, "aliases unfold to more than"),
        (MERGE_CHAIN, "aliases unfold to more than"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_bad_yaml_is_one_line_with_its_place(text, found):
    with pytest.raises(ConfigError) as raised:
        yaml.load(text, "f")
    assert found in raised.value.message
    assert "\n" not in raised.value.message
