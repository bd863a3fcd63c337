# SPDX-License-Identifier: Apache-2.0
"""Our own kind of project: `forebay.Model` classes, compositions, servings, model files and repositories of them."""
