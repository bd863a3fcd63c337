# SPDX-License-Identifier: Apache-2.0
"""A serving behind a server, `forebay serve file.py:serving`: what it says that no server does is refused."""

import pytest

SERVING = "from forebay import Batch, Serving\n\ndouble = Serving.jit(lambda x: x * 2)"


@pytest.mark.parametrize(
    "more, named",
    [
        (".process_options(distribution_weight=3)", "distribution_weight"),
        (".distributed_postprocessing(list)", "distributed_postprocessing"),
    ],
)
def test_what_is_for_members_of_a_cluster_is_refused(cli, tmp_path, more, named):  # S66, S67
    file = tmp_path / "served.py"
    file.write_text(SERVING + more + "\n")
    done = cli("check", f"{file}:double")
    assert done.returncode == 2
    assert f"{file}:double has {named}, which only programs that join a cluster use" in done.stderr
    file.write_text(SERVING + "\n")
    assert cli("check", f"{file}:double").returncode == 0
