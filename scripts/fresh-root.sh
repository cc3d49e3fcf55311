#!/usr/bin/env bash
# Runs the README's commands where nothing else is: a fresh Debian in a folder, with g++, Python and this machine's
# Rust, runs the committed tree.
#
#   scripts/fresh-root.sh DIR [COMMAND]...      default: scripts/demo.sh scripts/test.sh
#
# Needs root and debootstrap. Settings, certificates and proxies of apt and pip are taken from this machine. An existing
# root is used again; results of the commands are in DIR/src.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    '' | -*)
        echo "fresh-root: expected a folder; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$1"
root=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- scripts/demo.sh scripts/test.sh
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "fresh-root: needs root and debootstrap (apt-get install debootstrap)" >&2
    exit 1
fi

if [ ! -f "$root/installed" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates,g++,python3,python3-venv "$(. /etc/os-release && echo "$VERSION_CODENAME")" \
        "$root" "$mirror"
    touch "$root/installed"
fi
shared=(/etc/ssl /usr/share/ca-certificates /usr/local/share/ca-certificates /etc/apt /etc/pip.conf /etc/resolv.conf /etc/hosts)
mounted=()
away() {
    local at
    for ((at = ${#mounted[@]} - 1; at >= 0; at--)); do umount "${mounted[$at]}" 2>/dev/null || umount -l "${mounted[$at]}"; done
}
trap away EXIT
attach() { # FROM TO ARGUMENT…
    if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "$(dirname "$2")" && touch "$2"; fi
    mount --bind "${@:3}" "$1" "$2"
    mounted+=("$2")
}
# Network namespaces want a root that is a mount.
attach "$root" "$root" --make-private
for path in "${shared[@]}"; do [ ! -e "$path" ] || attach "$(readlink -f "$path")" "$root$path"; done
attach "$(rustc --print sysroot)" "$root/opt/rust"
attach /dev "$root/dev"
mkdir -p "$root/proc"
mount -t proc proc "$root/proc"
mounted+=("$root/proc")
# Slurm wants its control groups.
mkdir -p "$root/sys"
mount --rbind --make-rslave /sys "$root/sys"
mounted+=("$root/sys")

[ -d "$root/src" ] || git clone --quiet . "$root/src"
git -C "$root/src" pull --quiet
# What says how to reach packages; nothing else of this environment.
mapfile -t reach < <(env | grep -E '^(PIP_|CARGO_HTTP_|CARGO_REGISTRIES_|CARGO_SOURCE_|npm_config_|SSL_CERT|CURL_CA|REQUESTS_CA|NODE_EXTRA_CA|GIT_SSL|https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY)' || true)
for path in $(printf '%s\n' "${reach[@]#*=}" | grep '^/' | sort -u || true); do
    [ ! -e "$path" ] || [ -e "$root$path" ] || attach "$path" "$root$path"
done
for command in "$@"; do
    echo "== fresh-root: $command" >&2
    started=$SECONDS
    chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/opt/rust/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin "${reach[@]}" \
        bash -c "cd /src && $command"
    echo "== fresh-root: $command took $(((SECONDS - started) / 60)) min" >&2
done
