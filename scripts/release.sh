#!/usr/bin/env bash
# Makes a tarball that runs wherever it is unpacked: programs, completions, man pages, recipes, suites, the book, licences of everything in it,
# and a list of its parts (CycloneDX). The programs look for libtorch in the folder `libtorch` beside `bin`: --libtorch puts that there,
# without it `install-libtorch.sh` in the tarball fetches it.
#
#   scripts/release.sh [--libtorch] [OUTPUT_DIR]      default target/dist
#
# Needs cargo-cyclonedx (cargo install --locked cargo-cyclonedx). The commit is written into the programs, what is not committed yet as `-dirty`.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
with_libtorch=
if [ "${1:-}" = --libtorch ]; then
    with_libtorch=1
    shift
fi
out=${1:-target/dist}
say() { echo "release: $*" >&2; }
if ! command -v cargo-cyclonedx >/dev/null; then
    say "cargo-cyclonedx is missing: cargo install --locked cargo-cyclonedx"
    exit 1
fi

scripts/setup.sh
commit=$(git rev-parse HEAD)
export DEEPSPEC_COMMIT=${commit:0:12}
[ -z "$(git status --porcelain --untracked-files=no)" ] || DEEPSPEC_COMMIT=${commit:0:6}-dirty
cargo build --release --locked --bins
version=$(target/release/deepspec-eval --version | head -1 | cut -d ' ' -f 2)
name=deepspec-$version-$(uname -m)-linux
stage=$out/$name
rm -rf "$stage"
mkdir -p "$stage"/{bin,completions,man}

programs=(deepspec-data deepspec-train deepspec-eval)
for program in "${programs[@]}"; do
    strip --strip-debug -o "$stage/bin/$program" "target/release/$program"
    for shell in bash zsh fish; do "target/release/$program" completions "$shell" >"$stage/completions/$program.$shell"; done
    "target/release/$program" man "$stage/man"
done
cp -r configs eval_datasets docs README.md CHANGELOG.md ARCHITECTURE.md LICENSE "$stage"
mkdir -p "$stage/assets" "$stage/scripts"
cp -r assets/tiny-target assets/tiny-dspark assets/demo-prompts.jsonl "$stage/assets"
cp -r scripts/slurm "$stage/scripts"
cp scripts/install-libtorch.sh "$stage"
rm -rf "$stage"/docs/book

say "licences and parts"
python3 scripts/licences.py "$stage/THIRD-PARTY.md"
for program in "${programs[@]}"; do
    cargo cyclonedx --quiet --format json --describe binaries --manifest-path "$program/Cargo.toml"
    mv "$program"/"${program}"_bin.cdx.json "$stage/$program.cdx.json"
    find . -path ./target -prune -o -name '*.cdx.json' -print | grep -v "^./$stage" | xargs -r rm -f
done

libtorch=$(readlink -f .libtorch)
torch=$(target/release/deepspec-eval --version | sed -n 's/^libtorch //p')
echo "libtorch $torch, with its C++ headers' ABI of 2011; libtorch_cpu.so for CPUs, libtorch_cuda.so beside it for GPUs" >"$stage/LIBTORCH"
if [ -n "$with_libtorch" ]; then
    say "libtorch of $libtorch"
    mkdir -p "$stage/libtorch/lib"
    # What the programs need of it and of the wheels beside it, found as the loader finds it.
    LD_LIBRARY_PATH=$libtorch/lib ldd "$stage/bin/deepspec-eval" | awk '$2 == "=>" { print $3 }' | sort -u | while read -r library; do
        case $(readlink -f "$library") in
            "$libtorch"/* | */site-packages/*) cp -L "$library" "$stage/libtorch/lib/" ;;
        esac
    done
fi
tar -C "$out" -czf "$out/$name.tar.gz" "$name"
(cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
say "$out/$name.tar.gz, $(du -h "$out/$name.tar.gz" | cut -f 1)"
