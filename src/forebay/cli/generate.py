# SPDX-License-Identifier: Apache-2.0
"""`forebay generate TARGET`: what a project needs to run in containers, as files."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.cli.flags import flags_for, secrets_in, told_in
from forebay.cli.serve import add_options, options_of
from forebay.errors import ConfigError
from forebay.server.config import AttachConfig, GrpcConfig, HttpConfig, Overrides, ProcessConfig

if TYPE_CHECKING:
    from forebay.server.setting_sources import Told
    from forebay.surfaces.container.generate_options import SplitFlags, WireTls
    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.contract import Options

DESCRIPTION = """\
Write container files for a project: a Dockerfile, a Compose file, Kubernetes manifests with a HorizontalPodAutoscaler
on forebay's own metrics, and an InferenceService of KServe. TARGET is as in `forebay serve`. The project is checked
first, as by `forebay check`.

The image installs the project's requirements.txt, conda-packages.txt and dependencies.sh, or its setup.py. If there is
none of them, the command writes a requirements.txt: the imports of the project, in the versions installed here. It
names each import without a package, with file and line. The image uses the wheels in the project's folder wheels/. Name
a private index by a secret: docker build --secret id=pip.conf,src=pip.conf

Settings of `forebay serve` given here configure the server in the container; their paths are paths in the container.
Keys and the certificate of --certfile are read from this machine and become secrets.

With --split the Kubernetes manifests have three kinds of pods: fronts for clients, one owner with the queue of each
model, and workers, which are added while requests wait long. TARGET is then a Python file with forebay.Model classes,
or one of them.

With --ray they are a RayCluster of KubeRay and a RayJob that deploys on it with `forebay serve --cluster auto`.
"""

_NEVER: Final = frozenset({"host", "config", "api_keys", "secret", "certfile", "keyfile"})
"""What containers are told in another way, or have no use for."""
_POOL: Final = frozenset({"workers", "worker_kind", "devices", "threads", "python"})
"""Settings of the workers that a server starts; in a split deployment each worker is a pod."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        help="write a Dockerfile, a Compose file and Kubernetes manifests for a target",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="output folder (deploy/ in the project, or beside a folder of models)",
    )
    files.add_argument("--force", action="store_true", help="overwrite existing files")
    files.add_argument("--image", metavar="NAME:TAG", help="name of the image (the folder's name, :1)")
    files.add_argument(
        "--python-version", type=_python, metavar="VERSION", help="Python of the image (this one's, or the project's)"
    )
    files.add_argument(
        "--replicas", type=_some, default=2, metavar="N", help="number of pods; up to four times as many under load (2)"
    )
    files.add_argument("--kubernetes", action="store_true", help="write the image and the Kubernetes manifests only")
    files.add_argument("--split", action="store_true", help="run fronts, owners and workers in separate pods")
    files.add_argument("--ray", action="store_true", help="for KubeRay: pods are nodes of a Ray cluster")
    files.add_argument(
        "--wire-tls",
        choices=["secret", "cert-manager", "none"],
        default="secret",
        help="source of the certificates for TLS between pods of --split: secret (filled by a script, the default), "
        "cert-manager, or none",
    )
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def _some(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def _python(text: str) -> str:
    from forebay.surfaces.container.recipe import OLDEST_PYTHON

    oldest = ".".join(map(str, OLDEST_PYTHON))
    if re.fullmatch(r"3\.\d{1,3}(\.\d{1,3})?", text) is None or int(text.split(".")[1]) < OLDEST_PYTHON[1]:
        raise argparse.ArgumentTypeError(f"expected a Python version >= {oldest}, got {text!r}")
    return text


def run(parsed: argparse.Namespace) -> int:
    """Write the files and say so."""
    import msgspec

    from forebay.server.setting_sources import merged
    from forebay.surfaces.container.bundled_wheel import bundled_wheel
    from forebay.surfaces.container.context_files import context_files
    from forebay.surfaces.container.files import files_of, next_commands, write
    from forebay.surfaces.container.generate_options import Wanted
    from forebay.surfaces.container.project_check import checked
    from forebay.surfaces.lookup import recipe as recipe_for
    from forebay.surfaces.native.config import read_config

    options = options_of(parsed, {})
    recipe = recipe_for(options.target, options)
    recipe = msgspec.structs.replace(
        recipe,
        serve=(*recipe.serve, *flags_for(told_in(parsed), _NEVER)),
        python=parsed.python_version or recipe.python,
    )
    output = parsed.output or _output(recipe)
    present = context_files(recipe.folder or output, output.absolute())
    recipe = checked(msgspec.structs.replace(recipe, wheel=None if recipe.forebay else bundled_wheel()), present)
    in_file = {} if options.source is None else read_config(options.source).told
    sides = (told_in(parsed), in_file)
    recipe = _with_keys(recipe, options, merged(*sides))
    if parsed.ray:
        recipe = _on_ray(recipe, options, parsed)
    split = _split(told_in(parsed), parsed.wire_tls) if parsed.split else None
    image = _image(parsed.image or recipe.name)
    only = parsed.kubernetes or parsed.ray
    keys_file = _keys_file(merged(*sides)) or output / "keys.txt"
    wanted = Wanted(
        output, image, parsed.replicas, _secrets(sides), keys_file, split, parsed.ray, only, present.environments
    )
    files = files_of(recipe, wanted)
    write(files, output, force=parsed.force)
    plain = dict.fromkeys(setting.key for setting, text in secrets_in(in_file) if not text.startswith("@"))
    told = [
        f"{options.source}: {key} is plain text in this file and would be in the image; write @FILE" for key in plain
    ]
    for warning in [*options.warnings, *recipe.warnings, *told, *_literal_keys(recipe, present.names, files, plain)]:
        sys.stderr.write(f"forebay: warning: {warning}\n")
    sys.stdout.write(f"{output}: {', '.join(files)}\n\n")
    sys.stdout.writelines(f"  {command}\n" for command in next_commands(recipe, wanted))
    return 0


def _with_keys(recipe: Recipe, options: Options, told: Told) -> Recipe:
    """Return a recipe with the files of tenants' keys that its server reads."""
    import msgspec

    from forebay.surfaces.container.key_files import key_files
    from forebay.types.tenant import ApiKeys

    files = key_files(told[HttpConfig], options.source, recipe.folder or Path.cwd(), recipe.home)
    keys = options.http.api_keys
    # FOREBAY_API_KEY would replace keys that have names.
    has_keys = recipe.has_keys and not (isinstance(keys, ApiKeys) and all(keys.names))
    return msgspec.structs.replace(recipe, has_keys=has_keys, key_files=files)


def _secrets(sides: Sequence[Told]) -> list[str]:
    """Return all files of keys, also those that another side overrides: no image may have them."""
    found: list[str] = []
    for side in sides:
        found += [key[1:] for key in _keys(side) if key.startswith("@")]
        found += [one.partition("=")[2] for one in side.get(HttpConfig, {}).get("api_key_files", ())]
    return found


def _keys_file(told: Told) -> Path | None:
    """Return the file that has all keys, if there is one."""
    keys = _keys(told)
    return Path(keys[0][1:]) if len(keys) == 1 and keys[0].startswith("@") else None


def _keys(told: Told) -> list[str]:
    """Return the API keys as they are written: a container is told where they are, and of other secrets nothing."""
    return [text for setting, text in secrets_in(told) if setting.name == "api_keys"]


def _on_ray(recipe: Recipe, options: Options, parsed: argparse.Namespace) -> Recipe:
    """Return what a container needs that is a node of Ray as well.

    Raises:
        ConfigError: If the project cannot run on Ray.
    """
    from forebay.surfaces.container.ray_cluster import on_ray
    from forebay.surfaces.lookup import deployment

    if parsed.split:
        raise ConfigError("--ray, --split: Ray decides where owners and workers run, so give one of the two")
    deployed, _ = deployment(options.target, options)
    return on_ray(recipe, deployed.units, parsed.replicas)


def _split(told: Told, tls: WireTls) -> SplitFlags:
    """Return the flags of each kind of pod.

    Raises:
        ConfigError: If a flag is about the workers that a server starts.
    """
    from forebay.surfaces.container.generate_options import SplitFlags

    of_models = told.get(Overrides, {})
    for name in ("workers", "worker_kind", "python"):
        if name in of_models:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: with --split each worker is a pod of its own, of the image; see --replicas")
    fronts: Told = {one: told[one] for one in (HttpConfig, GrpcConfig, ProcessConfig) if one in told}
    own = {name: value for name, value in of_models.items() if name in {"name", "threads"}}
    return SplitFlags(
        fronts=flags_for({**fronts, AttachConfig: told.get(AttachConfig, {})}, {*_NEVER, "address"}),
        owners=flags_for(
            {**fronts, AttachConfig: told.get(AttachConfig, {}), Overrides: of_models}, {*_NEVER, *_POOL, "address"}
        ),
        workers=flags_for({Overrides: own}, ()),
        tls=tls,
    )


def _image(name: str) -> str:
    """Return the name of an image with its tag; raises a `ConfigError` if it is none."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:1"
    if re.fullmatch(r"[a-z0-9][\w.:-]*(/[a-z0-9][\w.-]*)*:\w[\w.-]*", tagged) is None:
        raise ConfigError(f"--image: expected a name such as registry.example/team/my-model:1, got {name!r}")
    return tagged


def _output(recipe: Recipe) -> Path:
    """Return where the files go if no flag says so: not among models, where the server would look at them."""
    folder = recipe.folder or Path.cwd()
    return (folder.parent if recipe.is_repository else folder) / "deploy"


def _literal_keys(
    recipe: Recipe, names: Sequence[str], files: Mapping[str, str | bytes], told: Collection[str]
) -> list[str]:
    """Return warnings of keys in plain text that the image would have, except those that are told already."""
    from forebay.surfaces.container.files import IGNORED
    from forebay.surfaces.container.literal_keys import literal_keys
    from forebay.surfaces.container.project_check import bounded

    ignored = str(files[IGNORED]).splitlines()
    found = () if recipe.folder is None else literal_keys(recipe.folder, names, ignored)
    more = "in plain text and would be in the image; read it from the environment and pass it as a secret"
    return bounded([f"{key.place}: {key.name} is {more}" for key in found if key.name not in told])
