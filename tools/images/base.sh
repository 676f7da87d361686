#!/bin/sh
# Prints a folder with Debian and its Python, which images are built on. Made once and kept in the cache: for images that
# go anywhere, delete it first, since nothing renews its packages. Needs root and debootstrap.
set -eu
release=bookworm
base=${XDG_CACHE_HOME:-$HOME/.cache}/tidelane/images/$release
if [ ! -d "$base" ]; then
    command -v debootstrap >/dev/null || { echo "Install debootstrap." >&2; exit 1; }
    mkdir -p "$(dirname "$base")"
    work=$(mktemp -d "$base.XXXXXX")
    trap 'rm -rf --one-file-system "$work"' EXIT
    # In a mount namespace: it mounts /proc there, which must be gone before anything is removed, however it ends.
    unshare --mount debootstrap --variant=minbase --include=python3,ca-certificates "$release" "$work/debian" >"$work/log" || { tail "$work/log" >&2; exit 1; }
    rm -rf "$work"/debian/var/cache/apt/* "$work"/debian/var/lib/apt/lists/* "$work"/debian/usr/share/doc/*
    # Another may have made it meanwhile.
    mv -T "$work/debian" "$base" 2>/dev/null || [ -d "$base" ]
fi
echo "$base"
