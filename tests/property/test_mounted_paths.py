# SPDX-License-Identifier: Apache-2.0
"""The path as it was sent, below the place of mount, is found in one pass; the slow way looks at every end of it."""

import time
from urllib.parse import quote, unquote

from hypothesis import example, given
from hypothesis import strategies as st

from forebay.transports.http.asgi_calls import path_as_sent, path_of, path_of_as_sent

PIECES = st.sampled_from(
    ["/", "/", "a", "b", ":", "é", "%", "//", "%2F", "%2f", "%C3", "%A9", "%C3%A9", "%zz", "%25", "\ufffd"]
)
PATHS = st.lists(PIECES, max_size=8).map(lambda pieces: "/" + "".join(pieces))


def slowly(scope):
    path, sent = path_of(scope).rstrip("/"), path_as_sent(scope).rstrip("/")
    found = [sent[start:] for start in range(len(sent)) if sent[start] == "/" and unquote(sent[start:]) == path]
    return found[0] if found else quote(path)


@given(PATHS, PATHS, st.sampled_from(["", "/ml", "/m", "/"]))
@example("/ml", "/x", "/ml")
@example("/", "/", "")
def test_it_is_what_the_slow_way_finds(mount, rest, root_path):
    mount = mount.rstrip("/")
    raw = (mount + rest).encode("latin-1", "replace")
    for path in (unquote(rest), unquote(mount + rest), rest, mount):
        scope = {"path": path or "/", "root_path": root_path, "raw_path": raw}
        assert path_of_as_sent(scope) == slowly(scope)


def test_a_path_of_slashes_alone_takes_no_longer_than_one_that_is_as_long():
    for sent in (b"/" * 300_000 + b"a", b"/" + b"a/" * 150_000 + b"a"):
        before = time.process_time()
        assert path_of_as_sent({"path": "/a", "raw_path": sent, "root_path": "/b"}) == "/a"
        assert time.process_time() - before < 30  # one look at every end of it takes minutes
