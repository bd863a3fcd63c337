# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/python.md from signatures and docstrings: `python -m tests.python_page`.

It reads the source and imports nothing of it but the names, so that each version of Python writes the same page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/reference/python.md"
INTRO = """\
# Python

The public names of `forebay`, with their signatures and docstrings; of methods the first paragraph.
`python -m pydoc forebay.Serving` shows all of it. `import forebay` loads the standard library and msgspec; every other
name is imported on first use.
"""
SECTIONS = {
    "Models": "Model endpoint Pad Padded File Context Media Answer Last Failure is_cancelled",
    "Models that OpenAI's clients ask: `forebay.openai`": (
        "openai.ChatRequest openai.CompletionRequest openai.EmbeddingRequest openai.RerankRequest "
        "openai.SpeechRequest openai.TranscriptionRequest openai.Message "
        "openai.TextPart openai.Tool openai.FunctionTool openai.ToolChoice openai.NamedTool openai.ToolCall "
        "openai.FunctionCall openai.Logprob openai.Embedding openai.Score openai.Transcript "
        "openai.TimedText"
    ),
    "Several models as one": "node compose either SKIP",
    "Servings": ("Serving ServingModule Batch Lazy batched_run batched_run_async jit hook print_value to_host"),
    "Servings of other programs: `forebay.cluster`": "cluster cluster.join cluster.Membership",
    "Within a program": "asgi start",
    "Errors": (
        "ForebayError RequestError InvalidRequest ValidationError NotFound NotPrepared Cancelled QueueFull "
        "DeadlineExceeded Unavailable ConfigError BatchMismatch BatchResultMismatch "
        "ServingCrashed ServingNotFound ServingStopped"
    ),
    "Model files: `forebay.runtimes`": (
        "runtimes.load runtimes.ModelFile runtimes.Signature runtimes.Var runtimes.RunOptions runtimes.Device "
        "runtimes.PaddleOptions"
    ),
    "Tests: `forebay.testing`": (
        "testing.client testing.Client testing.AsyncClient testing.Answer testing.CallFailed testing.check_model "
        "testing.check_pool testing.ManualPool testing.MemoryOrigin testing.FakeClock testing.Spinning"
    ),
}
LISTS = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
WIDEST = 110


def python_page():
    """The whole page."""
    parts = [INTRO]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [entry(f"forebay.{name}") for name in names.split()]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", PAGE, "-"]
    return subprocess.run(command, input="\n".join(parts), check=True, capture_output=True, text=True).stdout


def entry(name):
    """What stands about a name."""
    home, _, short = name.rpartition(".")
    value = getattr(importlib.import_module(home), short)
    if inspect.ismodule(value):
        return f"{markdown(inspect.getdoc(value))}\n"
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"### `{name}`\n\n{markdown(told_beside(short))}\n"
    node, *hidden = definitions(value)
    shown = class_outline(node, hidden) if isinstance(node, ast.ClassDef) else signature(node)
    first, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
    return f"### `{name}`\n\n{first}\n\n```python\n{shown}\n```\n\n{markdown(rest)}\n"


def tree_of(path):
    return ast.parse(Path(path).read_text())


def definitions(value) -> list[Any]:
    """Where a class or function is defined in its file, then the private classes there that it inherits from."""
    known: dict[str, Any] = {}
    for node in tree_of(inspect.getsourcefile(value)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            known[node.name] = node  # the last one of a name: those before it are overloads
    found = [known[value.__name__]]
    for node in found:
        bases = [name for name in map(ast.unparse, getattr(node, "bases", ())) if is_hidden(name)]
        found += [known[name] for name in bases if name in known]
    return found


def is_hidden(base):
    """Whether a class that another one inherits from is written out there: it has no place on the page."""
    return base.startswith("_") or base == "AnyRequest"


def told_beside(name):
    """The text that follows the assignment of a constant."""
    for path in sorted((PAGE.parents[2] / "src/forebay").rglob("*.py")):
        body = tree_of(path).body if re.search(rf"^{name}\b", path.read_text(), re.MULTILINE) else []
        for node, beside in itertools.pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(one, ast.Name) and one.id == name for one in targets) and isinstance(beside, ast.Expr):
                return inspect.cleandoc(ast.literal_eval(beside.value))
    raise LookupError(name)


def class_outline(node, hidden):
    """A class as a stub: its fields, and its methods with the first line about each; `hidden` are parts of it."""
    shown = [name for name in map(ast.unparse, node.bases) if not is_hidden(name) and not name.endswith("Struct")]
    bases = ", ".join(shown)
    lines = [f"class {node.name}({bases}):" if bases else f"class {node.name}:"]
    for one in [one for part in (*reversed(hidden), node) for one in part.body]:
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
            lines.append(f"    {ast.unparse(one)}")
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and is_shown(one):
            lines += textwrap.indent(signature(one), "    ").splitlines()
    return "\n".join(lines if len(lines) > 1 else [f"{lines[0]} ..."])


def is_shown(method):
    decorators = {ast.unparse(one).rpartition(".")[2] for one in method.decorator_list}
    is_public = not method.name.startswith("_") or (method.name == "__init__" and method.args.args[1:])
    return is_public and "overload" not in decorators and not any(one.endswith("setter") for one in decorators)


def signature(node):
    """A function with the first sentence about it, if it is a method; decorators that change how it is called."""
    kept = [one for one in map(ast.unparse, node.decorator_list) if one in {"property", "classmethod", "staticmethod"}]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    line = f"{kind} {node.name}({', '.join(apart(node.args))}){returns}: ..."
    said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    comment = [f"# {part}" for part in textwrap.wrap(said, WIDEST)] if node.col_offset else []
    return "\n".join([*comment, *(f"@{one}" for one in kept), line])


def apart(arguments):
    """The parameters one by one."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    for at, (one, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield parameter(one, default)
        if at == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg is not None:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(parameter, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def parameter(one, default):
    equals = " = " if one.annotation else "="
    return ast.unparse(one) if default is None else f"{ast.unparse(one)}{equals}{ast.unparse(default)}"


def markdown(docstring):
    """A docstring as Markdown: its lists as lists, what is indented as code."""
    made = []
    for block in re.split(r"\n\n(?! )", docstring):
        head, _, rest = block.partition("\n")
        if LISTS.match(head):
            made.append(listed(head, textwrap.dedent(rest)))
            continue
        words, _, code = block.partition("\n\n")
        if code:
            made += [words, f"```python\n{textwrap.dedent(code)}\n```"]
        else:
            made.append(block)
    return "\n\n".join(made)


def listed(head, text):
    if head.startswith("Example"):
        return f"```python\n{text}\n```"
    if head in {"Returns:", "Yields:"}:
        return f"*{head}* {text}"
    items = re.sub(r"^(\*{0,2}[\w.]+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return f"*{head}*\n\n" + re.sub(r"^ +", "  ", items, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(python_page())
