# SPDX-License-Identifier: Apache-2.0
"""The version, where every module can import it: the package itself names all rooms."""

__version__ = "0.1.0"
