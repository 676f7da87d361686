#!/bin/sh
# Builds the operator's image as an OCI archive, dist/tidelane-operator.tar, without Docker or a registry: Debian with its
# Python from debootstrap, the operator's packages at the locked versions from pip. Needs Debian or Ubuntu, root (for
# debootstrap) and pip. BASE is a folder with such a Debian, if there is one already.
set -eu
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Packages with compiled parts have to suit the Python of the image.
release=bookworm python=3.11
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
if [ -z "${BASE:-}" ]; then
    command -v debootstrap >/dev/null || { echo "Install debootstrap, or set BASE to a folder with Debian $release and python3."; exit 1; }
    BASE=$work/base
    # In a mount namespace: it mounts /proc there, which must be gone before anything is removed, however it ends.
    unshare --mount debootstrap --variant=minbase --include=python3,ca-certificates "$release" "$BASE" >"$work/log" || { tail "$work/log"; exit 1; }
    rm -rf "$BASE"/var/cache/apt/* "$BASE"/var/lib/apt/lists/* "$BASE"/usr/share/doc/*
fi
env=$(ls -d "${XDG_CACHE_HOME:-$HOME/.cache}"/tidelane/env-"$(sed -n 's/ .*//p' .venv/tidelane-setup)")
grep -oE '^[A-Za-z0-9._-]+==[^ ;]+' requirements.lock >"$work/constraints.txt"
"$env/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work" .
"$env/bin/python" -m pip install -q --disable-pip-version-check --no-compile --python-version "$python" --only-binary=:all: \
    --target "$work/site" -c "$work/constraints.txt" "tidelane[operator] @ file://$(ls "$work"/tidelane-*.whl)"
rm -rf "$work/site/bin"
mkdir -p dist
.venv/bin/python tools/images/oci.py dist/tidelane-operator.tar --name "tidelane/operator:$version" \
    --layer "$BASE=/" --layer "$work/site=/opt/tidelane" --env PYTHONPATH=/opt/tidelane --env HOME=/tmp --env USER=tidelane --env PYTHONUNBUFFERED=1 \
    --env PYTHONDONTWRITEBYTECODE=1 --user 65532:65532 --entrypoint python3 -m tidelane.cli.main
