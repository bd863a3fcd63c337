# SPDX-License-Identifier: Apache-2.0
"""From lists of files to models and versions; no file is read."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.repository.listing import Catalog, Revision, StoredFile
from forebay.repository.tree_rules import TreeRules, number_of


def files(*paths: str) -> list[StoredFile]:
    return [StoredFile(path, 1, "t", 0.0) for path in paths]


def shape(catalog: Catalog):
    return {
        name: {number: [file.path for file in revision.files] for number, revision in versions.items()}
        for name, versions in catalog.models.items()
    }


ONE = TreeRules(kind="model", name="net", is_strict=True)


@pytest.mark.parametrize(
    "paths, expected",
    [
        (["1/a", "2/a"], {1: ["a"], 2: ["a"]}),
        (["a"], {1: ["a"]}),
        (["1/a", "README"], {1: ["1/a", "README"]}),
        (["-5/a"], {1: ["-5/a"]}),
        (["1"], {1: ["1"]}),
        (["1/deep/er/a"], {1: ["deep/er/a"]}),
        (["10/a", "9/a"], {9: ["a"], 10: ["a"]}),
        (["007/a"], {7: ["a"]}),
        (["١/a"], {1: ["١/a"]}),  # noqa: RUF001 - a digit that is not ASCII
        (["12345678901234567890/a"], {12345678901234567890: ["a"]}),
        ([], None),
    ],
)
def test_versions_are_folders_called_by_whole_numbers(paths, expected):  # N101, N102, N103
    assert shape(ONE.read(files(*paths))).get("net") == expected


@pytest.mark.parametrize("digits", [65, 5000])
def test_a_folder_of_more_digits_than_a_version_has_is_none(digits):  # F130: Python read no such number
    long = "1" * digits
    found = TreeRules(kind="models").read(files("iris/1/a", f"iris/{long}/a"))
    assert shape(found) == {"iris": {1: ["a"]}}
    assert found.problems == [f"iris/{long[:100]}/ is ignored: versions are called by whole numbers of up to 64 digits"]
    assert number_of(long) is None


def test_a_folder_of_models_has_no_loose_files(caplog):  # N99, N118
    found = TreeRules(kind="models", is_strict=True).read(
        files("iris/1/a", "plain/a", "loose.txt", "my-net.v2/3/a", "sp ace/1/a")
    )
    assert list(found.models) == ["iris", "plain", "my-net.v2", "sp ace"]
    assert list(found.models["my-net.v2"]) == [3]
    assert list(found.problems) == ["loose.txt is ignored: no model is a file beside folders"]


def test_repositories_of_other_servers_are_read_as_they_are():
    found = TreeRules().read(
        files(
            "densenet/config.pbtxt",
            "densenet/1/model.onnx",
            "densenet/labels.txt",
            "face/1/model.xml",
            "face/1/model.bin",
            "config.json",
        )
    )
    assert shape(found) == {"densenet": {1: ["model.onnx"]}, "face": {1: ["model.bin", "model.xml"]}}
    assert sorted(found.problems) == [
        "config.json is not read: it is the configuration of another server",
        "densenet/config.pbtxt is not read: it is the configuration of another server",
        "densenet/labels.txt is ignored: no model is a file beside folders",
    ]


@pytest.mark.parametrize(
    "paths, expected",
    [
        (["1/net.onnx", "3/net.onnx", "README"], {"net": {1: ["net.onnx"], 3: ["net.onnx"]}}),
        (["net.onnx", "net.data"], {"net": {1: ["net.data", "net.onnx"]}}),
        (["a/net.onnx", "b/2/net.onnx"], {"a": {1: ["net.onnx"]}, "b": {2: ["net.onnx"]}}),
    ],
)
def test_a_place_is_what_it_looks_like(paths, expected):
    assert shape(TreeRules(name="net").read(files(*paths))) == expected


def test_two_folders_of_one_version_are_told():
    found = TreeRules(kind="model", name="net").read(files("7/a", "007/a"))
    assert found.models["net"][7].version == "7"
    assert list(found.problems) == ["007/ is ignored: 7/ is the same version"]


@pytest.mark.parametrize("path", ["../x", "a/../../x", "./x", "a//x", "a\nb"])
def test_no_path_leads_out_of_a_version(path):
    found = TreeRules(kind="models").read(files(f"net/1/{path}", "net/2/x"))
    assert shape(found) == {"net": {2: ["x"]}}
    assert len(found.problems) == 1
    assert "net/1/ is not a version of a model: " in found.problems[0]


def test_hidden_names_and_markers_of_folders_are_nothing():  # N116
    listed = [*files(".git/config", "net/1/a"), StoredFile("net", 0, "t", 0.0), StoredFile("net/1", 0, "t", 0.0)]
    found = TreeRules().read(listed)
    assert (shape(found), list(found.problems)) == ({"net": {1: ["a"]}}, [])


def test_what_is_no_model_hides_only_itself():  # N104
    holds = lambda paths: "" if "saved_model.pb" in paths else "there is no saved_model.pb"  # noqa: E731
    found = TreeRules(holds=holds).read(files("net/1/saved_model.pb", "net/2/other", "bad/1/x"))
    assert shape(found) == {"net": {1: ["saved_model.pb"]}}
    assert list(found.problems) == [
        "net/2/ is not a version of a model: there is no saved_model.pb",
        "bad/1/ is not a version of a model: there is no saved_model.pb",
    ]


def test_a_name_that_cannot_be_one_is_told():
    found = TreeRules(may_be_called=lambda name: "no blanks" if " " in name else "").read(files("a b/1/x", "c/1/x"))
    assert list(found.models) == ["c"]
    assert list(found.problems) == ["a b/ cannot be the name of a model: no blanks"]


def test_texts_that_mean_versions():  # N103
    assert [number_of(text) for text in ("007", "7", "x", "-1", "", "٣", "9" * 65)] == [
        7,
        7,
        None,
        None,
        None,
        None,
        None,
    ]


parts = st.sampled_from(["1", "2", "010", "a", "b-1", "-5", "x.onnx"])
paths = st.lists(parts, min_size=1, max_size=4).map("/".join)


@given(st.sets(paths), st.booleans())
def test_a_folder_of_models_agrees_with_a_rule_in_one_line(paths, is_strict):
    paths = {path for path in paths if not any(other.startswith(path + "/") for other in paths)}
    found = TreeRules(kind="models", is_strict=is_strict).read(files(*paths))
    for name in {path.split("/")[0] for path in paths if "/" in path}:
        below = [path.split("/", 1)[1] for path in paths if path.startswith(name + "/")]
        numbers = {path.split("/")[0] for path in below if re.match(r"\d+/", path)}
        versioned = all(re.match(r"\d+/", path) for path in below) if is_strict else bool(numbers)
        versions = found.models[name]
        if not versioned:
            assert [file.path for file in versions[1].files] == sorted(below)
        else:
            assert sorted(versions) == sorted({int(number) for number in numbers})
            for revision in versions.values():
                assert {f"{revision.version}/{file.path}" for file in revision.files} == {
                    path for path in below if path.startswith(revision.version + "/")
                }
    assert set(found.models) == {path.split("/")[0] for path in paths if "/" in path}


@pytest.mark.parametrize(
    "whole",
    [
        ("saved_model.pb", "variables/variables.index", "assets/words.txt"),
        ("config.json", "tokenizer.json", "1_Pooling/config.json", "onnx/model.onnx"),
    ],
)
def test_a_saved_model_or_an_encoder_is_all_that_lies_in_its_folder(whole):
    found = TreeRules(kind="any", name="iris").read(files(*whole))
    assert [file.path for file in found.models["iris"][1].files] == sorted(whole)
    found = TreeRules(kind="any").read(files(*(f"iris/{path}" for path in whole), f"wine/2/{whole[0]}"))
    assert [file.path for file in found.models["iris"][1].files] == sorted(whole)
    assert list(found.models["wine"]) == [2]


def test_a_revision_is_what_its_files_are():
    one = Revision("net", "1", "net/1", (StoredFile("a", 1, "t", 5.0), StoredFile("b", 2, "u", 9.0)))
    same = Revision("net", "1", "net/1", (StoredFile("a", 1, "t", 6.0), StoredFile("b", 2, "u", 7.0)))
    other = Revision("net", "1", "net/1", (StoredFile("a", 1, "t", 5.0), StoredFile("b", 2, "v", 9.0)))
    assert one.id == same.id != other.id
    assert (one.size, one.modified_s) == (3, 9.0)


# What a place was taken for


def test_a_folder_called_by_a_number_beside_models_takes_none_down():  # F100
    models = ["net/1/a", "other/1/a"]
    assert list(TreeRules().read(files(*models, "2024/1/a")).models) == ["net", "other", "2024"]
    assert list(TreeRules().read(files("plain/a", "net/1/a", "2024/notes.txt")).models) == ["plain", "net", "2024"]
    no_model = TreeRules(holds=lambda paths: "" if "a" in paths else "no a")
    found = no_model.read(files(*models, "2024/notes.txt"))
    assert list(found.models) == ["net", "other"]
    assert list(found.problems) == ["2024/ is not a version of a model: no a"]


def test_versions_stay_versions_beside_folders_that_have_none():  # F100
    assert shape(TreeRules(name="net").read(files("1/a", "2/a", "docs/page"))) == {"net": {1: ["a"], 2: ["a"]}}
    holds = TreeRules(name="net", holds=lambda paths: "" if "a" in paths else "no a")
    assert list(holds.read(files("1/a", "docs/page", "docs/2024/notes")).models) == ["net"]


@pytest.mark.parametrize(
    "before, more",
    [
        (["plain/a"], ["2024/a"]),  # it alone would say that these are versions
        (["1/a", "2/a"], ["backup/1/a"]),
        (["a"], ["docs/a"]),
    ],
)
def test_a_place_stays_what_it_was_taken_for(before, more):  # F100
    rules = TreeRules(name="net")
    first = rules.read(files(*before))
    found = rules.read(files(*before, *more), first.kind)
    assert {name: list(versions) for name, versions in first.models.items()}.items() <= {
        name: list(versions) for name, versions in found.models.items()
    }.items()
