# SPDX-License-Identifier: Apache-2.0
"""The module handlers import from the original, `pyovms`: offered by an import hook, in processes forebay starts.

Nothing of this lies on the disk under that name. A test of one's own asks for it with

    from forebay.surfaces.ovms import shim
    shim.install()

before it imports a handler.
"""

from __future__ import annotations

from typing import Final

from forebay.surfaces.offered_modules import Modules, offer

_MODULES: Final[Modules] = {"pyovms": {"Tensor": "forebay.surfaces.ovms.pyovms_tensor:PyTensor"}}


def install() -> None:
    """Offer the name in this process."""
    offer(_MODULES)
