# SPDX-License-Identifier: Apache-2.0
"""The page at `/ui`: what the server does, as it does it. `page` serves its files, `audience` is its event stream."""
