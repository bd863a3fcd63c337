# SPDX-License-Identifier: Apache-2.0
"""Promises about the project as a whole: what `import forebay` loads, and what committed files may name."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from tests.stable_names import PAGE, stable_names
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = [*(ROOT / "docs" / "decisions").glob("*.md")]

# Run in a child: this process has loaded half of the world already.
LIST_IMPORTS = """
import sys
before = set(sys.modules)
import forebay
print("\\n".join(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""

# The names are put together here so that this file does not name them either.
HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("anaconda", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("yarnpkg", "com"),
        ("crates", "io"),
        ("golang", "org"),
        ("docker", "io"),
        ("ghcr", "io"),
    )
]
REGISTRY = re.compile(
    r"https?://[^\s'\"<>]+/simple(?![\w-])"  # a Python package index, wherever it is
    r"|(?:--(?:extra-)?index-url|--find-links|--registry)[ =]+['\"]?(?:https?:|file:|/)"
    r"|^\s*(?:extra-)?index-url\s*="
    r"|\b(?:" + "|".join(re.escape(host) for host in HOSTS) + r")\b",
    re.MULTILINE,
)


def project_files() -> list[Path]:
    """Every file that is committed, or would be by `git add .`."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    paths = [ROOT / os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def registry_names(text: str) -> list[str]:
    return [match.group(0).strip() for match in REGISTRY.finditer(text)]


def test_import_forebay_loads_only_msgspec_and_the_standard_library():
    child = subprocess.run(
        [sys.executable, "-c", LIST_IMPORTS],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    loaded = set(child.stdout.split())
    assert "forebay" in loaded
    assert loaded - sys.stdlib_module_names - {"forebay", "msgspec"} == set()


def test_no_file_names_a_package_registry():
    found: dict[str, list[str]] = {}
    for path in project_files():
        content = path.read_bytes()
        if b"\0" in content:  # binary: a compressed asset, an image
            continue
        names = registry_names(content.decode(errors="replace"))
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "http://mirror.example:8080" + "/simple/numpy/",
        "pip install --index" + "-url https://mirror.example/",
        "[global]\nindex" + "-url = mirror.example",
        "uv pip install --find" + "-links /srv/wheels",
        f"see https://{HOSTS[0]}/project/numpy",
    ],
)
def test_a_registry_name_is_noticed(text: str):
    assert registry_names(text)


@pytest.mark.parametrize(
    "text", ["https://example.com/simple-things", "a simple/plain text", "http://127.0.0.1:8000/v2"]
)
def test_an_ordinary_address_is_not(text: str):
    assert registry_names(text) == []


def test_constraints_are_names_and_versions_only():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[\w.]+(?: ; .+)?", line)] == []


def test_constraints_pin_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    wanted = {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert wanted - pinned == {"forebay", "tensorflow", "torch"}  # setup installs neither: a build of torch that lies
    # beside the index, and TensorFlow in an environment of its own


def test_no_module_imports_the_package_that_names_all_of_them():
    found = []
    for path in sorted((ROOT / "src/forebay").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [path.name for name in node.names if name.name == "forebay"]
            elif isinstance(node, ast.ImportFrom) and node.module == "forebay":
                found.append(path.name)
    assert found == []


def test_the_readme_names_every_extra_that_it_should():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text()
    unused = {"dev", "docs"}  # ours
    assert [name for name in project["optional-dependencies"] if f"`{name}`" not in text and name not in unused] == []


def test_the_readme_begins_with_what_it_is_and_two_commands():
    title, first, rest = (ROOT / "README.md").read_text().split("\n\n", 2)
    assert title == "# forebay"
    assert [line for line in first.splitlines() if len(line) > 125 or not line.endswith(".")] == []
    assert len(first.splitlines()) == 5
    places = [rest.index(one) for one in ("make demo", "make test", "# iris.py", "![", "pip install .", "## Links")]
    assert places == sorted(places)


def test_the_pages_about_the_tree_name_every_room():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = [one["layers"] for one in settings["tool"]["importlinter"]["contracts"] if one["id"] == "layers"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    table = contributing.partition("| layer | what it holds |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    written = [name.strip().removeprefix("forebay.") for layer in layers for name in layer.split("|")]
    assert [name for row in rows for name in row] == written
    rooms = {path.parent for path in (ROOT / "src" / "forebay").rglob("*.py")} - {ROOT / "src" / "forebay"}
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    assert [room for room in rooms if not re.search(rf"`[\w/{{}},]*\b{room.name}\b", architecture)] == []


def test_every_decision_has_its_day():
    undated = [
        page.name for page in DECISIONS if not re.search(r"^\*\d{4}-\d\d-\d\d\*$", page.read_text(), re.MULTILINE)
    ]
    assert (len(DECISIONS) > 20, undated) == (True, ["index.md"])


def test_every_module_that_the_pages_name_is_there():
    sources = {path.name for top in ("src/forebay", "tests") for path in (ROOT / top).rglob("*.py")}
    pages = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *DECISIONS]
    named = {name for page in pages for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", page.read_text())}
    assert named - sources == set()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source archive, as they are released."""
    return build(ROOT, tmp_path_factory.mktemp("built"), "wheel", "sdist")


def build(tree, folder, *targets):
    """Builds in a tree without git's help; returns the files by what they are."""
    for target in targets:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=PATIENCE_S, env=env)
    kinds = {"wheel": "*.whl", "sdist": "*.tar.gz"}
    return {target: next(folder.glob(kinds[target])) for target in targets}


def test_the_wheel_has_all_that_the_package_has(built):
    inside = set(zipfile.ZipFile(built["wheel"]).namelist())
    assert {"forebay/cli/init.py", "forebay/testing/memory_client.py", "forebay/py.typed"} <= inside
    ours = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT / "src")) for path in ours} - inside == set()
    assert {name.rpartition("/")[2] for name in inside if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_the_same_wheel_is_built_twice_and_from_the_source_archive(built, tmp_path):
    again = build(ROOT, tmp_path, "wheel")["wheel"]
    assert again.read_bytes() == built["wheel"].read_bytes()
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    unpacked = build(tree, tmp_path / "from-archive", "wheel")["wheel"]
    assert unpacked.read_bytes() == built["wheel"].read_bytes()


def test_the_version_stands_in_one_place():
    from forebay._version import __version__

    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in told["project"]
    assert told["tool"]["hatch"]["version"] == {"path": "src/forebay/_version.py"}
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()


def test_names_that_are_promised_do_not_change_unnoticed():
    page = "docs/reference/stability.md"
    assert PAGE.read_text() == stable_names(), f"read {page}, then write it again: python -m tests.stable_names"


def test_a_shell_completes_commands_and_flags(cli):
    script = cli("completion", "bash").stdout
    asked = "forebay serve model.py --max-que"
    steps = (
        f"{script}\nCOMP_LINE={asked!r} COMP_POINT={len(asked)} COMP_TYPE=9\n_python_argcomplete forebay 2>/dev/null\n"
    )
    done = subprocess.run(
        ["bash", "-c", steps + 'printf "%s" "${COMPREPLY[@]}"'],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.strip() == "--max-queue"


def test_every_public_name_is_there_and_listed():
    import forebay

    for name in forebay.__all__:
        said = getattr(getattr(forebay, name), "__name__", name)  # SKIP is a value, and has no name
        assert said.removeprefix("forebay.") == name
    assert set(forebay.__all__) <= set(dir(forebay))
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        forebay.Modle  # noqa: B018


@pytest.mark.parametrize("name", ["run", "serve"])
def test_who_starts_a_server_as_elsewhere_is_told_how(name):
    import forebay

    with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*`forebay.start`"):
        getattr(forebay, name)


def test_every_shortcut_has_a_test_and_is_where_the_register_says():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Shortcuts", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ") and ".py`" in line]
    places = {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row[2])}
    tests = {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row[4])}
    assert len(rows) >= 15
    assert not [name for name in places if not (ROOT / "src/forebay" / name).is_file()]
    assert not [name for name in tests if not (ROOT / "tests" / name).is_file()]
    source = ROOT / "src/forebay"
    marked = {str(path.relative_to(source)) for path in source.rglob("*.py") if "as nearly always" in path.read_text()}
    assert marked <= places
