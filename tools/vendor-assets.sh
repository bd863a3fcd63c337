#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Refreshes the vendored files of the API page (/docs). Run it by hand to move to another version, then commit the result;
# neither a build nor a test runs it. Needs npm, tar and gzip.
#
#   tools/vendor-assets.sh [VERSION]
set -euo pipefail

version="${1:-5.35.0}"
assets="$(cd "$(dirname "$0")/.." && pwd)/src/forebay/transports/http/assets"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

(cd "$work" && npm pack --silent "swagger-ui-dist@$version" >/dev/null && tar -xzf swagger-ui-dist-*.tgz)
mkdir -p "$assets"

# -n leaves out name and time: the same version gives the same bytes.
for name in swagger-ui-bundle.js swagger-ui.css; do
  gzip -9n <"$work/package/$name" >"$assets/$name.gz"
done
# The bundle holds other projects' code; its first line points to their licences by this name.
for name in LICENSE NOTICE swagger-ui-bundle.js.LICENSE.txt; do
  install -m 644 "$work/package/$name" "$assets/$name"
done
echo "swagger-ui-dist $version:" && ls -l "$assets"
