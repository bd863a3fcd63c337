# SPDX-License-Identifier: Apache-2.0
"""Every setting, outside its range, from each side: one sentence with the place, what was found and what is allowed."""

from __future__ import annotations

import os

import pytest

from forebay.cli.main import main
from forebay.server.config import (
    SECTIONS,
    AttachConfig,
    ClusterConfig,
    GrpcConfig,
    HttpConfig,
    ProcessConfig,
    RepositoryConfig,
)
from forebay.types.settings import declared

SETTINGS = {f"{struct.__name__}.{name}": (struct, one) for struct in SECTIONS for name, one in declared(struct).items()}
FLAGGED = [name for name, (_, one) in SETTINGS.items() if one.written.flag is not None]
ABOVE = {HttpConfig: "http", RepositoryConfig: "repository", AttachConfig: "attach", GrpcConfig: "grpc"}
ABOVE |= {ClusterConfig: "cluster"}


def wrong_texts(setting):
    """What a flag or a variable may say that is not possible; none for what any text is."""
    if setting.choices:
        return ["nonsense", ""] if setting.written.flag is None else ["nonsense"]
    if setting.kind is bool:
        return ["maybe"]
    if setting.also is not None:
        return ["nonsense:"]
    if setting.kind not in {int, float}:
        return []
    found = ["many", "nan", "1e400"]
    if setting.kind is int:
        found.append("1.5")
    if setting.lowest is not None:
        found.append(f"{setting.lowest - 1:.15g}")
    if setting.above is not None:
        found += [f"{setting.above:g}", "-1"]
    if setting.highest is not None:
        found.append(f"{setting.highest + 1:.15g}")
    return found


def wrong_values(setting):
    """What a file may say that is not possible."""
    found = {int: ["many", "1.5", "true", "[1]"], float: ["many", ".nan", ".inf", "true", "{a: 1}"]}
    found |= {bool: ["maybe", "1"], str: ["{a: 1}"]}
    values = found.get(setting.kind, ["{a: 1}"])
    if setting.is_list:
        values = ["{a: 1}", "[1]", "3"]
    if setting.name in {"api_keys", "tenants"}:  # they may be mappings, of which other tests say what is wrong
        values = ["[1]", "3"]
    texts = [text for text in wrong_texts(setting) if setting.is_list or not text.endswith(":")]
    return [*values, *[text for text in texts if text not in {"many", "nan", "1e400", "1.5", "maybe", ""}]]


MORE = {
    "versions": "expected latest, latest:N, all, or versions such as 1,3",
    "name": "expected letters, digits, '.', '_' and '-'",
    "devices": "expected a device",
    "api_key_files": "expected NAME=FILE, a tenant and the file with its keys, got 'nonsense:'",
    "allowed_hosts": "expected a host name such as models.example, without a port, or *, got 'nonsense:'",
    "cors_origins": "expected an origin as browsers send it, or *, got 'nonsense:'",
}
"""What is said of settings that are more than a type and a range."""


def needed(setting):
    return MORE.get(setting.name) or setting.needed()


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """The one sentence that answers a mistake."""
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        try:
            status = main(["check", *words])
        except SystemExit as end:
            status = end.code
        told = capsys.readouterr()
        assert (status, told.out, told.err.count("\n")) == (2, "", 1), (words, told)
        return told.err.removeprefix("forebay: ").removesuffix("\n")

    return run


def test_there_are_settings_and_most_can_be_wrong():
    assert len(FLAGGED) > 40
    assert sum(bool(wrong_texts(SETTINGS[name][1])) for name in FLAGGED) > 30


@pytest.mark.parametrize("name", FLAGGED)
def test_a_flag_outside_its_range_is_one_sentence(refused, name):
    _, setting = SETTINGS[name]
    for text in wrong_texts(setting) if setting.kind is not bool else ():
        told = refused("model.py", f"{setting.written.flag}={text}")
        assert told.startswith(f"argument {'/'.join([str(setting.written.flag), *setting.written.other_flags])}: ")
        assert repr(text) in told
        assert all(choice in told for choice in setting.choices) if setting.choices else needed(setting) in told


@pytest.mark.parametrize("name", FLAGGED)
def test_a_variable_outside_its_range_is_one_sentence(refused, monkeypatch, name):
    _, setting = SETTINGS[name]
    for text in wrong_texts(setting):
        monkeypatch.setenv(setting.variable, text)
        told = refused("model.py")
        assert told.startswith(f"{setting.variable}: expected ")
        assert repr(text) in told
        assert needed(setting) in told


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if SETTINGS[name][1].name not in {"config", "env", "version", "ray", "workers"}]
)
def test_a_key_outside_its_range_is_one_sentence(refused, tmp_path, name):
    struct, setting = SETTINGS[name]
    if struct in {HttpConfig, AttachConfig, GrpcConfig} and setting.written.flag is None:
        return
    above = "log" if struct is ProcessConfig and setting.name.startswith("log_") else ABOVE.get(struct, "")
    for value in wrong_values(setting):
        indented = f"{above}:\n  {setting.key}:\n    {value}" if above else f"{setting.key}:\n  {value}"
        (tmp_path / "any.yaml").write_text(f"target: model.py\n{indented}\n")
        told = refused("--config", "any.yaml")
        key = f"{above}.{setting.key}" if above else setting.key
        line = 3 if above else 2
        assert told.startswith(f"any.yaml:{line}: {key}: expected "), told
        assert setting.needed() in told or needed(setting) in told or setting.name == "address", told
