# SPDX-License-Identifier: Apache-2.0
"""The names projects import from the original: offered by an import hook, in processes forebay starts.

    ventu            Ventu
    ventu.ventu      Ventu
    ventu.config     Config
    ventu.protocol   BatchProtocol

A script of one's own asks for them with

    from forebay.surfaces.ventu import shim
    shim.install()

before it imports them. The original is then not used, whether it is installed or not.
"""

from __future__ import annotations

from typing import Final

from forebay.surfaces.offered_modules import Modules, offer

_MODULES: Final[Modules] = {
    "ventu": {"Ventu": "forebay.surfaces.ventu"},
    "ventu.ventu": {"Ventu": "forebay.surfaces.ventu"},
    "ventu.config": {"Config": "forebay.surfaces.ventu.config"},
    "ventu.protocol": {"BatchProtocol": "forebay.surfaces.ventu.batch_protocol"},
}


def install() -> None:
    """Offer the names in this process."""
    offer(_MODULES)
