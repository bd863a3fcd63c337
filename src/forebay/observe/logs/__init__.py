# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: of calls, of models, of refusals."""
