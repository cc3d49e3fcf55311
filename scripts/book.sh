#!/usr/bin/env bash
# Makes the book: target/book/index.html. Installs mdBook into target/tools where it is not there (some minutes).
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "book: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
mdbook=$(command -v mdbook || true)
if [ -z "$mdbook" ]; then
    [ -x target/tools/bin/mdbook ] || cargo install --quiet --locked --root target/tools --version 0.5.4 mdbook
    mdbook=target/tools/bin/mdbook
fi
"$mdbook" build docs
echo "book: $PWD/target/book/index.html" >&2
