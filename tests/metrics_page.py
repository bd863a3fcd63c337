# SPDX-License-Identifier: Apache-2.0
"""A page of metrics in one piece, as a server writes it slice by slice."""

from forebay.observe.metrics.exposition import pieces
from forebay.types.element_limits import at_once


def whole_page(exposition, accept="text/plain"):
    """The page, and its media type."""
    columns = at_once(exposition.write())
    rest, media_type = exposition.others(accept)
    return b"".join([*pieces(columns, media_type), rest]), media_type
