#!/bin/sh
# Builds dist/tidelane-engine-bare.tar, for development on one machine: Debian with its Python and this checkout, but none
# of the locked packages (3 GB with torch), which whoever runs it mounts at /opt/packages. An image for anything else:
# engine.Containerfile. Needs what base.sh needs, or BASE, a folder with Debian and python3.
set -eu
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
base=${BASE:-$(tools/images/base.sh)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
env=$(ls -d "${XDG_CACHE_HOME:-$HOME/.cache}"/tidelane/env-"$(sed -n 's/ .*//p' .venv/tidelane-setup)")
"$env/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work" .
"$env/bin/python" -m pip install -q --disable-pip-version-check --no-compile --no-deps --no-index --target "$work/site" "$work"/tidelane-*.whl
rm -rf "$work/site/bin"
# The archive takes all times away, by which Python would know that what is compiled is current.
.venv/bin/python -m compileall -q --invalidation-mode unchecked-hash "$work/site"
mkdir -p dist
.venv/bin/python tools/images/oci.py dist/tidelane-engine-bare.tar --name "tidelane/engine:$version" \
    --layer "$base=/" --layer "$work/site=/opt/tidelane" --env PYTHONPATH=/opt/tidelane:/opt/packages \
    --env HOME=/tmp --env PYTHONUNBUFFERED=1 --env PYTHONDONTWRITEBYTECODE=1 --entrypoint python3 -m tidelane.cli.main
