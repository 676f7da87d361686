#!/bin/sh
# Makes .venv: the locked packages from an environment shared by every checkout with the same lock file (3 GB, so it is
# worth keeping), plus this checkout, editable. Safe to run again; does nothing when nothing changed.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "tidelane needs Python 3.11 or newer; this is $("$python" -V). Set PYTHON=/path/to/python3.11."; exit 1; }
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    { echo "This Python has no venv module. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
key=$({ cat requirements.lock; "$python" -c 'import sys, platform; print(sys.version, platform.machine())'; } | sha256sum | cut -c1-16)
shared=${XDG_CACHE_HOME:-$HOME/.cache}/tidelane/env-$key
[ "$(cat .venv/tidelane-setup 2>/dev/null)" = "$key $(sha256sum <pyproject.toml)" ] && [ -f "$shared/complete" ] && exit 0

if [ ! -f "$shared/complete" ]; then
    echo "Installing the locked packages, about 3 GB, once per lock file."
    # Another checkout may be installing the same: build apart, then rename.
    building=$shared.$$
    trap 'rm -rf "$building"' EXIT
    mkdir -p "$(dirname "$shared")"
    "$python" -m venv "$building"
    # --no-deps: the lock file is complete, so pip has nothing to resolve.
    "$building/bin/python" -m pip install --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --progress-bar on --require-hashes -r requirements.lock
    "$building/bin/python" -m pip install --no-cache-dir -q --disable-pip-version-check "$(grep -o 'hatchling==[0-9.]*' pyproject.toml)" editables
    # Compiled now, since users of the environment may not be able (or allowed) to write into it: 5 s against 15 s to
    # import the engine.
    "$building/bin/python" -m compileall -q -j 0 "$building/lib" || true
    touch "$building/complete"
    mv -T "$building" "$shared" 2>/dev/null || rm -rf "$building"
    trap - EXIT
fi
rm -rf .venv
"$python" -m venv --without-pip .venv
site=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
"$shared/bin/python" -c 'import site; print(site.getsitepackages()[0])' >"$site/locked-packages.pth"
"$shared/bin/python" -m pip --python .venv/bin/python install -q --no-deps --no-build-isolation --disable-pip-version-check -e .
echo "$key $(sha256sum <pyproject.toml)" >.venv/tidelane-setup
echo "Ready: .venv/bin/tidelane"
