# SPDX-License-Identifier: Apache-2.0
"""Headers of what browsers show: what a page may load, and who may show or read it. Nothing is served here."""

from __future__ import annotations

from typing import Final

NOT_GUESSED: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""Of a page and of each of its files."""
OWN_FILES: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The policy of a page that loads and asks its own server only."""
API_PAGE: Final = {"content-security-policy": OWN_FILES, **NOT_GUESSED}
