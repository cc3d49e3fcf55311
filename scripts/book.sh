#!/usr/bin/env bash
# Makes the book: target/book/index.html. Installs mdBook into target/tools where it is not there (some minutes).
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
mdbook=$(command -v mdbook || true)
if [ -z "$mdbook" ]; then
    [ -x target/tools/bin/mdbook ] || cargo install --quiet --locked --root target/tools --version 0.5.4 mdbook
    mdbook=target/tools/bin/mdbook
fi
"$mdbook" build docs
echo "book: $PWD/target/book/index.html" >&2
