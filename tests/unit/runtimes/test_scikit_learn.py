# SPDX-License-Identifier: Apache-2.0
"""Models of scikit-learn in files of skops, and in pickles."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tests.models import sklearn_files
from tests.models.sklearn_files import DTYPE, TREE, joblib, rows, save

import forebay.runtimes
from forebay.errors import ConfigError
from forebay.runtimes.sharing import sharing_of

pytest.importorskip("skops")


def inputs(net):
    return {var.name: (var.datatype, var.shape) for var in net.signature().feeds}


def test_a_classifier_answers_as_the_library_does(tmp_path):
    model = sklearn_files.classifier()
    net = forebay.runtimes.load(save(model, tmp_path / "net.skops"))
    assert inputs(net) == {"x": ("FP64", (3,))}
    outputs = {var.name: (var.datatype, var.shape) for var in net.signature().fetches}
    assert outputs == {"predict": ("BYTES", ()), "predict_proba": ("FP64", (2,))}
    found = net({"x": rows()})
    assert found["predict"].tolist() == model.predict(rows()).tolist()
    assert (found["predict_proba"] == model.predict_proba(rows())).all()
    assert [net({"x": row[None]})["predict"][0] for row in rows()] == found["predict"].tolist()
    assert sharing_of(net).has_rows


def test_columns_of_a_dataframe_are_inputs_of_the_types_that_encoders_know(tmp_path):
    import pandas as pd

    model = sklearn_files.houses()
    net = forebay.runtimes.load(save(model, tmp_path / "houses.skops"), trust_types=[DTYPE])
    assert inputs(net) == {"area": ("FP64", ()), "city": ("BYTES", ()), "zone": ("FP64", ()), "about": ("BYTES", ())}
    columns = {
        "about": np.array(["a view", "dark"], object),
        "zone": np.array([5.0, 3.0]),
        "city": np.array([b"Bonn", "Köln"], object),
        "area": np.array([80.0, 100.0]),
    }
    frame = pd.DataFrame({**columns, "city": ["Bonn", "Köln"]})[["area", "city", "zone", "about"]]
    assert net(columns)["predict"].tolist() == model.predict(frame).tolist()
    sharing = sharing_of(net)
    assert (sharing.has_rows, sharing.why_not) == (True, "")  # the trial uses texts and codes that the encoder knows


def test_a_pipeline_of_texts_takes_a_text(tmp_path):
    model = sklearn_files.comments()
    net = forebay.runtimes.load(save(model, tmp_path / "net.skops"))
    assert inputs(net) == {"x": ("BYTES", ())}
    answer = net({"x": np.array(["good", "bad bad"], object)})
    assert (answer["predict_proba"] == model.predict_proba(["good", "bad bad"])).all()
    assert sharing_of(net).has_rows


def test_what_has_no_predict_transforms(tmp_path):
    from sklearn.decomposition import PCA

    model = PCA(2).fit(rows())
    net = forebay.runtimes.load(save(model, tmp_path / "net.skops"))
    assert (net({"x": rows()})["transform"] == model.transform(rows())).all()


def test_types_that_skops_does_not_trust_need_a_word(tmp_path):
    path = save(sklearn_files.forest(), tmp_path / "forest.skops")
    with pytest.raises(ConfigError, match=rf"does not trust: '{TREE}'; if .*: --trust-types {TREE}$"):
        forebay.runtimes.load(path)
    with pytest.raises(ConfigError, match=f"--trust-types other.Type,{TREE}$"):
        forebay.runtimes.load(path, trust_types=["other.Type"])
    net = forebay.runtimes.load(path, trust_types=[TREE])
    assert (net({"x": rows()})["predict"] == sklearn_files.forest().predict(rows())).all()


def test_a_refusal_names_some_of_many_types_and_quotes_them_for_a_shell(tmp_path, monkeypatch):
    path = save(sklearn_files.classifier(), tmp_path / "net.skops")
    monkeypatch.setattr("skops.io.get_untrusted_types", lambda file: ["a; reboot"])
    with pytest.raises(ConfigError, match=r"--trust-types 'a; reboot'$"):
        forebay.runtimes.load(path)
    monkeypatch.setattr("skops.io.get_untrusted_types", lambda file: [f"a.T{at:03}" for at in range(100)])
    with pytest.raises(ConfigError, match=r"'a.T019' and 80 more; .* --trust-types TYPE,\.\.\.$"):
        forebay.runtimes.load(path)


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("suffix", [".joblib", ".pkl", ".pickle"])
def test_a_pickle_is_not_loaded_unless_it_is_trusted(tmp_path, suffix):
    joblib.dump(Writes(tmp_path / "written"), tmp_path / f"bad{suffix}")
    with pytest.raises(ConfigError, match=r"is a pickle, which can run any code .* --trust-pickle if you trust"):
        forebay.runtimes.load(tmp_path / f"bad{suffix}")
    assert not (tmp_path / "written").exists()
    path = save(sklearn_files.forest(), tmp_path / f"good{suffix}")
    net = forebay.runtimes.load(path, trust_pickle=True)
    assert (net({"x": rows()})["predict"] == sklearn_files.forest().predict(rows())).all()


def test_a_pickle_beside_a_model_is_not_another_one(tmp_path):
    save(sklearn_files.classifier(), tmp_path / "net.skops")
    (tmp_path / "labels.pkl").write_bytes(b"")
    assert forebay.runtimes.load(tmp_path).name == tmp_path.name


def unfitted():
    from sklearn.linear_model import Ridge

    return Ridge()


def texts_in_an_array():
    from sklearn.preprocessing import OrdinalEncoder

    return OrdinalEncoder().fit(np.array([["a", 1], ["b", 2]], object))


@pytest.mark.parametrize(
    "made, said",
    [
        (dict, "net.skops holds a dict, which has neither predict nor transform"),
        (unfitted, r"net.skops does not say how many features it takes \(n_features_in_\)"),
        (texts_in_an_array, "net.skops takes an array with texts; fit it on a DataFrame"),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path, made, said):
    with pytest.raises(ConfigError, match=said):
        forebay.runtimes.load(save(made(), tmp_path / "net.skops"))


@pytest.mark.parametrize("data", [b"no model", b""])
def test_what_is_no_file_of_skops_is_said(tmp_path, data):
    (tmp_path / "bad.skops").write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad.skops cannot be loaded: .*not a zip file"):
        forebay.runtimes.load(tmp_path / "bad.skops")


@pytest.mark.parametrize("module", ["skops.io", "pandas"])
def test_a_library_that_is_missing_is_said_with_its_extra(tmp_path, monkeypatch, module):
    path = save(sklearn_files.houses(), tmp_path / "houses.skops")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[sklearn\]'$"):
        forebay.runtimes.load(path, trust_types=[DTYPE])
