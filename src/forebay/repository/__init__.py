# SPDX-License-Identifier: Apache-2.0
"""Models that lie in a folder or a bucket: what is there, what of it is here, and who uses it.

No model is loaded in this package and no request seen: it ends with a folder on the disk that somebody has a lease of.
"""
