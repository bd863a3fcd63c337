# SPDX-License-Identifier: Apache-2.0
"""Files that put a project into a container: what it needs (`recipe`), what is installed (`steps`), what is written."""
