# SPDX-License-Identifier: Apache-2.0
"""Programs of PyTorch in their files."""

from __future__ import annotations

import io
import logging
import pickle
import sys
import zipfile

import numpy as np
import pytest
from tests.later import torch
from tests.models.torch_files import answer, export, layer, save, script

import forebay.runtimes
from forebay.errors import ConfigError, RunnerFailed
from forebay.runtimes.sharing import sharing_of

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SUFFIXES = (".pt2", ".pt", ".ts")
RANDOM = np.random.default_rng(3)


def load(path):
    return forebay.runtimes.load(path, threads=1, trust_pickle=True)


def ports(side):
    return {var.name: (var.datatype, var.rows, var.shape) for var in side}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_program_answers_as_pytorch_does_in_a_batch_and_alone(tmp_path, suffix):
    net = load(save(tmp_path / f"net{suffix}", layer()))
    feed = "input" if suffix == ".pt2" else "x"
    assert ports(net.signature().feeds) == {feed: ("FP32", -1, (4,))}
    assert ports(net.signature().fetches) == {"output": ("FP32", -1, (3,))}
    rows = RANDOM.normal(size=(9, 4)).astype("f")
    together = net({feed: rows})["output"]
    assert np.allclose(together, answer(rows), atol=1e-6)
    assert np.allclose([net({feed: row[None]})["output"][0] for row in rows], together, atol=1e-6)
    assert (sharing_of(net).has_rows, sharing_of(net).why_not) == (True, "")


def test_a_fixed_first_axis_is_run_one_request_at_a_time(tmp_path):
    net = load(export(tmp_path / "net.pt2", layer(), torch.ones(1, 4), free=()))
    assert ports(net.signature().feeds) == {"input": ("FP32", 1, (4,))}
    assert not sharing_of(net).has_rows
    one = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]}
    net = load(script(tmp_path / "net.pt", layer(), one))
    assert ports(net.signature().fetches) == {"output": ("FP32", 1, (3,))}
    assert not sharing_of(net).has_rows


def test_inputs_and_outputs_may_be_dicts_and_have_axes_of_any_length(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, ids, more, factor: int = 2, *, mask):
            return {"sums": (ids * mask * factor).sum(1), "same": ids + more["by"]}

    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    dims = {0: batch, 1: length}
    program = torch.export.export(
        Net(),
        (ids, {"by": ids.clone()}),
        {"mask": mask},
        dynamic_shapes={"ids": dims, "more": {"by": dims}, "mask": dims},
    )
    torch.export.save(program, tmp_path / "net.pt2")
    net = load(tmp_path / "net.pt2")
    kinds = {"ids": "INT64", "more_by": "INT64", "mask": "BOOL"}
    assert ports(net.signature().feeds) == {name: (kind, -1, (-1,)) for name, kind in kinds.items()}
    assert ports(net.signature().fetches) == {"sums": ("INT64", -1, ()), "same": ("INT64", -1, (-1,))}
    given = {"ids": np.array([[1, 2, 3]]), "more_by": np.array([[1, 1, 1]]), "mask": np.array([[True, True, False]])}
    found = net(given)
    assert {name: one.tolist() for name, one in found.items()} == {"sums": [6], "same": [[2, 3, 4]]}
    assert sharing_of(net).is_padded


def test_several_outputs_are_numbered_and_a_program_may_write_into_its_input(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x):
            return x.add_(1), x.argmax(1)

    rows = RANDOM.normal(size=(3, 4)).astype("f")
    rows.flags.writeable = False
    for suffix in SUFFIXES:
        net = load(save(tmp_path / f"net{suffix}", Net()))
        found = net({net.signature().feeds[0].name: rows})
        assert [*found] == ["output_0", "output_1"]
        assert np.allclose(found["output_0"], rows + 1)
        assert (found["output_1"] == rows.argmax(1)).all()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_numbers_that_are_scaled_by_all_samples_keep_samples_apart(tmp_path):
    import torch

    class Net(torch.nn.Module):
        def forward(self, x):
            return torch.quantize_per_tensor_dynamic(x, torch.quint8, False).dequantize()

    net = load(script(tmp_path / "net.pt", Net()))
    assert sharing_of(net).why_not == "quantize_per_tensor_dynamic"


def test_a_program_that_mixes_samples_runs_them_alone(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    for suffix in SUFFIXES:
        assert "another one for a sample" in sharing_of(load(save(tmp_path / f"net{suffix}", Net()))).why_not


class Harmful:
    """What a pickle runs as soon as it is loaded."""

    def __reduce__(self):
        return print, ("it was run",)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_program_is_not_loaded_until_it_is_trusted(tmp_path, monkeypatch, capsys, suffix):
    path = save(tmp_path / f"net{suffix}", layer())
    if suffix == ".pt2":  # PyTorch unpickles the examples in it
        with zipfile.ZipFile(path) as read, zipfile.ZipFile(tmp_path / "harm.pt2", "w") as write:
            for name in read.namelist():
                data = read.read(name)
                if "sample_inputs" in name:
                    buffer = io.BytesIO()
                    torch.save(({"a": Harmful()}, {}), buffer, pickle_module=pickle)
                    data = buffer.getvalue()
                write.writestr(name, data)
        path = tmp_path / "harm.pt2"
        monkeypatch.setattr(logging, "raiseExceptions", False)  # it cannot write its own warning of that
        load(path)
        assert "it was run" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"program of PyTorch, which can run any code .* --trust-pickle if you trust"):
        forebay.runtimes.load(path)
    assert "it was run" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[torch\]'$"):
        load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_cut_off_or_another_one_is_refused(tmp_path, suffix):
    path = save(tmp_path / f"net{suffix}", layer())
    data = path.read_bytes()
    for wrong in (b"", b"no program", data[:30], data[: len(data) // 2], data[:-30]):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=rf"net{suffix} holds no whole program: it is cut off, or has weights"):
            load(path)
    weights = pickle.dumps(layer())
    for wrong in (layer().state_dict(), layer(), weights):
        torch.save(wrong, path)
        with pytest.raises(ConfigError, match=rf"net{suffix} holds no whole program: .* or a pickled module"):
            load(path)
    save(tmp_path / f"other{'.pt' if suffix == '.pt2' else '.pt2'}", layer()).rename(path)
    with pytest.raises(ConfigError, match="holds no whole program"):
        load(path)


@pytest.mark.parametrize(
    "metadata, said",
    [
        (None, r"it has no metadata.json\); save it again: torch.jit.save"),
        ({}, "metadata.json: Object missing required field `inputs`"),
        ({"inputs": [{"name": "x", "datatype": "FP31", "shape": [-1]}]}, "one of the datatypes BOOL, .*, got 'FP31'"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 5]}]}, "net.pt cannot be loaded: .*2x5 and 4x3"),
    ],
)
def test_torchscript_has_to_describe_its_inputs(tmp_path, metadata, said):
    with pytest.raises(ConfigError, match=said):
        load(script(tmp_path / "net.pt", layer(), metadata))


def test_what_it_cannot_run_is_an_error_of_ours(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.arange(3.0))

        def forward(self, at):
            return self.table[at]

    at = {"inputs": [{"name": "at", "datatype": "INT64", "shape": [-1]}]}
    net = load(script(tmp_path / "net.pt", Net(), at))
    with pytest.raises(RunnerFailed, match=r"'net.pt' cannot be run on this: .*out of bounds"):
        net({"at": np.array([9])})
    assert net({"at": np.array([2])})["output"].tolist() == [2.0]
