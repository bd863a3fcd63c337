# SPDX-License-Identifier: Apache-2.0
"""Models of XGBoost and LightGBM in their files."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import numpy as np
import pytest
from tests.models.boosted import OBJECTIVES, SUFFIXES, arrays, frame, predicted, prices, rows, save

import forebay.runtimes
from forebay.errors import ConfigError, InvalidRequest
from forebay.runtimes.sharing import sharing_of
from forebay.server.config import Overrides
from forebay.surfaces.native.model_files import read_model_file

pytest.importorskip("xgboost")
pytest.importorskip("lightgbm")

EVERY = [(name + suffix, one) for name in SUFFIXES for suffix in SUFFIXES[name] for one in OBJECTIVES[name]]


def ports(side):
    return {var.name: (var.datatype, var.shape) for var in side}


@pytest.mark.parametrize("name, objective", EVERY)
def test_a_model_answers_as_the_library_does_in_a_batch_and_alone(tmp_path, name, objective):
    path = save(tmp_path / name, objective)
    net = forebay.runtimes.load(path)
    kind = "FP64" if path.suffix == ".txt" else "FP32"
    shape = (3,) if objective in {"multi:softprob", "multiclass"} else ()
    assert ports(net.signature().feeds) == {"x": (kind, (4,))}
    assert ports(net.signature().fetches) == {"predict": (kind, shape)}
    data = rows(seed=4)
    found = net({"x": data})["predict"]
    assert (found == predicted(path, data)).all()
    assert ([net({"x": row[None]})["predict"][0] for row in data] == found).all()
    assert (sharing_of(net).has_rows, sharing_of(net).why_not) == (True, "")


@pytest.mark.parametrize("booster", ["dart", "gblinear"])
def test_other_boosters_of_xgboost(tmp_path, booster):
    path = save(tmp_path / "net.ubj", booster=booster)
    net = forebay.runtimes.load(path, threads=1)
    data = rows(seed=4)
    assert (net({"x": data})["predict"] == predicted(path, data)).all()
    assert net.runtime.is_shared == (booster != "gblinear")  # only of trees it says that threads may


@pytest.mark.parametrize("name, kind", [("net.ubj", "FP32"), ("net.json", "FP32"), ("net.txt", "FP64")])
def test_columns_are_inputs_and_categories_are_what_they_were_in_the_dataframe(tmp_path, name, kind):
    path = save(tmp_path / name, data=frame(), labels=prices(frame()))
    net = forebay.runtimes.load(path)
    numbers = {"area": (kind, ()), "floor": (kind, ())}
    assert ports(net.signature().feeds) == numbers | {"city": ("BYTES", ()), "zone": ("FP64", ())}
    table = frame(seed=4)
    given = arrays(table)
    assert (net(given)["predict"] == predicted(path, table)).all()
    given["city"] = np.array([b"Ulm" if one == "Ulm" else one for one in given["city"]], object)
    assert (net(given)["predict"] == predicted(path, table)).all()
    assert (sharing_of(net).has_rows, sharing_of(net).why_not) == (True, "")


def test_an_unknown_category_is_missing_in_lightgbm_and_refused_by_xgboost(tmp_path):
    table = frame()
    given, missing = arrays(table), arrays(table)
    given["city"][0], missing["city"][0] = "Rom", None
    net = forebay.runtimes.load(save(tmp_path / "net.txt", data=table, labels=prices(table)))
    assert (net(given)["predict"] == net(missing)["predict"]).all()
    net = forebay.runtimes.load(save(tmp_path / "net.ubj", data=table, labels=prices(table)))
    with pytest.raises(InvalidRequest, match=r"'city': expected a category .* one of \['Bonn', .*\], got 'Rom'$"):
        net(given)


def test_categories_that_xgboost_does_not_save_whole_are_refused(tmp_path):
    table = frame()
    table["city"] = table["city"].cat.rename_categories({"Bonn": "Köln"})
    path = save(tmp_path / "net.ubj", data=table, labels=prices(table))
    if tuple(map(int, version("xgboost-cpu").split(".")[:2])) >= (3, 4):
        assert forebay.runtimes.load(path).signature().feeds[2].examples[0] == "Köln"
        return
    with pytest.raises(ConfigError, match=r"categories that are not ASCII, which XGBoost before 3\.4 saves"):
        forebay.runtimes.load(path)


def test_columns_of_categories_that_lightgbm_does_not_name_are_refused(tmp_path):
    table = frame()
    table["zone"] = table["zone"].cat.as_ordered()  # it is a number for LightGBM then
    path = save(tmp_path / "net.txt", data=table, labels=prices(table))
    with pytest.raises(ConfigError, match=r"net.txt was fitted on columns of categories \(2\), and does not say which"):
        forebay.runtimes.load(path)


@pytest.mark.parametrize("name", ["net.ubj", "net.json", "net.txt"])
def test_a_file_that_is_cut_off_is_refused(tmp_path, name):
    data = save(tmp_path / name).read_bytes()
    for end in (0, 3, 100, len(data) // 2, data.rindex(b"Tree=") if name == "net.txt" else len(data) - 2):
        (tmp_path / name).write_bytes(data[:end])
        with pytest.raises(ConfigError, match=rf"{name} is cut off|{name}', which holds no model; expected"):
            forebay.runtimes.load(tmp_path / name)


def test_a_damaged_file_that_ends_the_process_needs_processes(tmp_path):
    path = save(tmp_path / "net.json")
    found = json.loads(path.read_bytes())
    for tree in found["learner"]["gradient_booster"]["model"]["trees"]:
        tree["right_children"][0] = 100_000_000  # of which its row of missing values knows nothing
        tree["default_left"] = [1] * len(tree["default_left"])
    path.write_text(json.dumps(found))
    (warning,) = read_model_file(path, Overrides()).warnings
    assert "net.json is run on one request at a time: the process that tried it ended by signal " in warning
    with pytest.raises(ConfigError, match=r"net.json needs worker kind process, found thread: the process that tried"):
        read_model_file(path, Overrides(worker_kind="thread"))


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("net.json", b'{"models": []}', "which holds no model; expected .* XGBoost's .ubj or .json, LightGBM's .txt"),
        ("net.json", b'{"learner": {}}', "net.json cannot be loaded: "),
        ("net.json", b'{"learner": {"a": ?}}', "net.json cannot be loaded: Unknown construct"),
        ("net.ubj", b"no model", "which holds no model"),
        ("net.ubj", b"{L\0learner no model}", "net.ubj cannot be loaded: "),
        ("net.txt", b"cat\ndog\n", "which holds no model"),
        ("net.txt", b"tree\nend of trees", "net.txt is cut off or was edited"),
    ],
)
def test_what_is_no_model_is_said(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        forebay.runtimes.load(tmp_path / name)


def test_json_is_found_by_what_it_begins_with(tmp_path):
    found = json.loads(save(tmp_path / "net.json").read_bytes())
    for written in (json.dumps(found, indent=2), json.dumps({"version": found["version"], **found})):
        (tmp_path / "net.json").write_text(written)
        assert forebay.runtimes.load(tmp_path / "net.json").signature().feeds[0].shape == (4,)


def test_in_a_folder_text_is_a_model_by_its_name_alone(tmp_path):
    (tmp_path / "labels.txt").write_text("tree\n")
    (tmp_path / "config.json").write_text("{}")
    path = save(tmp_path / "model.txt")
    assert (forebay.runtimes.load(tmp_path)({"x": rows()})["predict"] == predicted(path, rows())).all()
    path = save(tmp_path / "net.ubj")
    assert (forebay.runtimes.load(tmp_path)({"x": rows()})["predict"] == predicted(path, rows())).all()


@pytest.mark.parametrize("name, extra", [("net.ubj", "xgboost"), ("net.json", "xgboost"), ("net.txt", "lightgbm")])
def test_a_library_that_is_missing_is_said_with_its_extra(tmp_path, monkeypatch, name, extra):
    path = save(tmp_path / name)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigError, match=rf"pip install 'forebay\[{extra}\]'$"):
        forebay.runtimes.load(path)
