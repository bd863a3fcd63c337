# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false
"""Workers may be a number or a range, from each side; what is neither is one sentence with its place."""

from __future__ import annotations

import os

import pytest
from tests.models.single import Sleepy

from forebay.cli.flags import flags_for
from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.server.config import Overrides
from forebay.server.setting_sources import told_by
from forebay.surfaces.native.config import entries_of, read_config
from forebay.testing import client
from forebay.types.worker_range import WorkerRange, read_workers

MODEL = "import forebay\nclass One(forebay.Model):\n    def predict(self, batch): return batch\n"
GRAPH = "from forebay import compose\n\n@compose.graph\ndef g(x: int):\n    return x\n"
NEEDED = "expected a whole number from 0 to 1024, a range such as 1:8, or {min: 1, max: 8} in a file"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def checked(capsys):
    """What `forebay check` says."""

    def run(*words):
        try:
            status = main(["check", *words])
        except SystemExit as end:
            status = end.code
        told = capsys.readouterr()
        return status, (told.out + told.err).removeprefix("forebay: ").removesuffix("\n")

    return run


def overrides(folder, text, **told):
    (folder / "forebay.yaml").write_text(text)
    (entry,) = entries_of(read_config(folder / "forebay.yaml"), None, told, has_others=False)
    return entry.overrides


def test_a_number_stays_a_number_and_a_range_is_one_wherever_it_is_said(folder):
    assert overrides(folder, "target: model.py\nworkers: 4").workers == 4
    assert overrides(folder, "target: model.py\nworkers: 0").workers == 0
    for said in ("1:8", "{min: 1, max: 8}", "{max: 8}", '"1:8"'):  # 1:8 alone is 68 to YAML 1.1
        found = overrides(folder, f"target: model.py\nworkers: {said}")
        assert (found.workers, found.bounds.target_queue_ms, found.bounds.scale_down_s) == (
            WorkerRange(min=1, max=8),
            50.0,
            60.0,
        )
    told, _ = told_by({"FOREBAY_WORKERS": "0:3"})
    assert told == {Overrides: {"workers": WorkerRange(min=0, max=3)}}
    assert flags_for(told, ()) == ["--workers", "0:3"]
    assert read_workers({"min": 0, "max": 3}) == read_workers("0:3")


def test_a_flag_wins_over_the_target_beside_the_range(folder):
    said = (
        "models: [{target: model.py, workers: {min: 0, max: 8, target_queue_ms: 20, scale_down_s: 5}}]\nscale_down_s: 9"
    )
    found = overrides(folder, said).bounds
    assert (found.min, found.max, found.target_queue_ms, found.scale_down_s) == (0, 8, 20.0, 5.0)
    assert overrides(folder, said, target_queue_ms=70.0).bounds.target_queue_ms == 70.0
    assert overrides(folder, said, workers=2).bounds is None


@pytest.mark.parametrize(
    "said, told",
    [
        ("{min: 3, max: 2}", "forebay.yaml:2: workers.min: expected a whole number <= max (2), got 3"),
        ("{min: -1, max: 2}", "forebay.yaml:2: workers.min: expected a whole number from 0 to 1024, got -1"),
        ("{min: 1, max: 0}", "forebay.yaml:2: workers.max: expected a whole number from 1 to 1024, got 0"),
        ("{min: 1}", "forebay.yaml:2: workers: the key 'max' is missing"),
        ("{max: many}", "forebay.yaml:2: workers.max: expected a whole number from 1 to 1024, got 'many'"),
        (
            "{max: 2, target_queue_ms: 0}",
            "forebay.yaml:2: workers.target_queue_ms: expected milliseconds > 0, such as 500 or 2s, got 0",
        ),
        ("{max: 2, maxx: 3}", "forebay.yaml:2: workers.maxx: unknown key; did you mean max?"),
        (
            "3:2",
            "forebay.yaml:2: workers: expected a range MIN:MAX with MIN <= MAX, got '3:2'; did you ",
        ),
        ("0:0", "forebay.yaml:2: workers: expected a range MIN:MAX with MAX from 1 to 1024, got '0:0'"),
        ("-1", f"forebay.yaml:2: workers: {NEEDED}, got '-1'"),
        ("1.5", f"forebay.yaml:2: workers: {NEEDED}, got '1.5'"),
        ("true", f"forebay.yaml:2: workers: {NEEDED}, got true"),
        ("[1, 2]", f"forebay.yaml:2: workers: {NEEDED}, got [1, 2]"),
        ("many", f"forebay.yaml:2: workers: {NEEDED}, got 'many'"),
    ],
)
def test_what_is_neither_is_one_sentence_with_its_place(folder, checked, said, told):
    (folder / "forebay.yaml").write_text(f"target: model.py\nworkers: {said}\n")
    status, found = checked("forebay.yaml")
    assert status == 2
    assert found.startswith(told)
    assert "\n" not in found


@pytest.mark.parametrize("flag", ["--workers=2:1", "--workers=:3", "--workers=0:0", "--workers=1:2000", "--workers=x"])
def test_a_flag_that_is_neither_is_one_sentence(checked, flag):
    status, found = checked("model.py", flag)
    assert (status, found.count("\n")) == (2, 0)
    assert found.startswith("argument --workers: expected ")


def test_only_models_in_processes_take_a_range(folder, checked):
    status, found = checked("model.py", "--workers", "1:4", "--worker-kind", "thread")
    assert status == 2
    assert "workers is a range, 1:4, and only processes can be started and ended as the load asks" in found
    (folder / "servings.py").write_text("import forebay\n\nserving = forebay.Serving(lambda batch: batch)\n")
    with pytest.raises(ConfigError, match="workers is a range, 1:2"), client(Sleepy, workers="1:2"):
        pass
