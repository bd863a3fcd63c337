# SPDX-License-Identifier: Apache-2.0
"""What docs/how-to/serving.md shows is executed and answers what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import httpx

PAGE = Path(__file__).parents[2] / "docs/how-to/serving.md"


def test_the_examples_of_the_page_do_what_it_says():
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.MULTILINE)  # else a fence ends the expected output
    examples = doctest.DocTestParser().get_doctest(text, {}, "serving.md", str(PAGE), 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(examples, out=report.append)
    assert result.attempted > 20
    assert result.failed == 0, "".join(report)


def test_the_file_on_the_page_is_served(tmp_path, serve):
    files = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))
    served = {name: source for name, source in files.items() if "cluster.join" not in source}
    ((name, source),) = served.items()
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    server = serve(f"{path}:{name}", "--worker-kind", "thread")
    assert httpx.post(f"{server.url}/models/{name}", json=[-3, 7, 300]).json() == [0, 7, 255]
