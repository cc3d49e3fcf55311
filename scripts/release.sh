#!/usr/bin/env bash
# Makes a tarball that runs wherever it is unpacked. It has programs, completions, man pages, recipes, suites, the book,
# the licences of all parts, and a list of these (CycloneDX). The programs look for libtorch in the folder `libtorch`
# beside `bin`. --libtorch puts it there; without it `install-libtorch.sh` in the tarball fetches it.
#
# The name ends in -cuda if the build had NCCL's headers (DEEPSPEC_FULL_TORCH=1 scripts/setup.sh), and in -cpu
# otherwise. Programs in -cuda do not start without libtorch's CUDA part.
#
#   scripts/release.sh [--libtorch] [OUTPUT_DIR]      default target/dist
#
# Needs cargo-cyclonedx (cargo install --locked cargo-cyclonedx). The commit is written into the programs, and `-dirty`
# if there are uncommitted changes.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --libtorch) ;;
    -*)
        echo "release: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
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
# What C++ says of where an error arose begins at this folder, wherever that is.
export CXXFLAGS="${CXXFLAGS:-} -ffile-prefix-map=$PWD/="
cargo build --release --locked --bins
version=$(target/release/deepspec-eval --version | head -1 | cut -d ' ' -f 2)
libtorch=$(readlink -f .libtorch)
kind=cpu
! LD_LIBRARY_PATH=$libtorch/lib ldd target/release/deepspec-train | grep -q libtorch_cuda || kind=cuda
name=deepspec-$version-$(uname -m)-linux-$kind
stage=$out/$name
rm -rf "$stage"
mkdir -p "$stage"/{bin,completions,man}

programs=(deepspec-data deepspec-train deepspec-eval)
for program in "${programs[@]}"; do
    strip --strip-debug -o "$stage/bin/$program" "target/release/$program"
    for shell in bash zsh fish; do "target/release/$program" completions "$shell" >"$stage/completions/$program.$shell"; done
    "target/release/$program" man "$stage/man"
done
cp -r configs docs README.md CHANGELOG.md LICENSE "$stage"
# Our own suites: the public ones, which may have been fetched beside them, are not ours to hand on.
mkdir "$stage/eval_datasets"
git ls-files eval_datasets | xargs cp -t "$stage/eval_datasets"
mkdir -p "$stage/assets" "$stage/scripts"
cp -r assets/tiny-target assets/tiny-dspark assets/demo-prompts.jsonl "$stage/assets"
mkdir "$stage/scripts/slurm"
cp scripts/slurm/*.sbatch scripts/slurm/common.sh "$stage/scripts/slurm"
cp scripts/pipeline.sh scripts/stages.sh scripts/servers.sh "$stage/scripts"
cp scripts/install-libtorch.sh "$stage"
rm -rf "$stage"/docs/book

say "licences and parts"
python3 scripts/licences.py "$stage/THIRD-PARTY.md"
for program in "${programs[@]}"; do
    cargo cyclonedx --quiet --format json --describe binaries --manifest-path "$program/Cargo.toml"
    sed "s|file://$PWD/|file:///|g" "$program"/"${program}"_bin.cdx.json >"$stage/$program.cdx.json"
    find . -path ./target -prune -o -name '*.cdx.json' -print | grep -v "^./$stage" | xargs -r rm -f
done

torch=$(target/release/deepspec-eval --version | sed -n 's/^libtorch //p')
echo "libtorch $torch, with its C++ headers' ABI of 2011; for $kind" >"$stage/LIBTORCH"
if [ -n "$with_libtorch" ]; then
    say "libtorch of $libtorch"
    mkdir -p "$stage/libtorch/lib"
    # What the programs need of it and of the wheels beside it, found as the loader finds it.
    parts=("$stage/bin/deepspec-train")
    if [ $kind = cuda ]; then
        parts+=("$libtorch/lib/libtorch_cuda.so")
        # Some of CUDA's libraries are opened by name while it runs.
        find "$libtorch/../nvidia" -path '*/lib/*.so*' -exec cp -L -n {} "$stage/libtorch/lib/" \;
        # By which our own kernels are compiled.
        cp -L "$libtorch/lib/libcaffe2_nvrtc.so" "$stage/libtorch/lib/"
    fi
    LD_LIBRARY_PATH=$libtorch/lib ldd "${parts[@]}" | awk '$2 == "=>" { print $3 }' | sort -u | while read -r library; do
        case $(readlink -f "$library") in
            "$libtorch"/* | */site-packages/*) cp -L "$library" "$stage/libtorch/lib/" ;;
        esac
    done
    mkdir "$stage/libtorch/licences"
    for info in "$libtorch"/../torch-*.dist-info "$libtorch"/../nvidia_*.dist-info "$libtorch"/../cuda_*.dist-info; do
        [ -d "$info" ] || continue
        find "$info" -type f \( -iname '*licen[sc]e*' -o -iname 'notice*' \) -exec sh -c 'cp "$1" "$2-$(basename "$1")"' _ {} \
            "$stage/libtorch/licences/$(basename "$info" .dist-info)" \;
    done
fi
tar -C "$out" -czf "$out/$name.tar.gz" "$name"
(cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
say "$out/$name.tar.gz, $(du -h "$out/$name.tar.gz" | cut -f 1)"
