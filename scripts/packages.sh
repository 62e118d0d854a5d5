#!/bin/sh
# Installs Debian's packages that are named and missing, without starting a system service:
#     sh scripts/packages.sh rabbitmq-server openssh-server
set -eu
missing=""
for package in "$@"; do
    case "$package" in
        rabbitmq-server) program=rabbitmq-server; path=/usr/lib/rabbitmq/bin/rabbitmq-server ;;
        openssh-server) program=sshd; path=/usr/sbin/sshd ;;
        *) echo "error: no package $package here: rabbitmq-server, openssh-server" >&2; exit 2 ;;
    esac
    [ -x "$path" ] || command -v "$program" >/dev/null || missing="$missing $package"
done
missing="${missing# }"
[ -n "$missing" ] || exit 0
line="sudo apt-get install --no-install-recommends $missing"
fail() {
    echo "error: the tests need $missing, and $1; type: $line" >&2
    exit 1
}
command -v apt-get >/dev/null || fail "this system has no apt-get"
if [ "$(id -u)" -eq 0 ]; then
    root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    root="sudo -n"
else
    fail "installing it takes root or sudo without a password"
fi
# Debian starts a service as it is installed, unless policy-rc.d forbids it (exit code 101).
policy=/usr/sbin/policy-rc.d
if ! [ -e "$policy" ]; then
    trap '$root rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' | $root tee "$policy" >/dev/null
    $root chmod 755 "$policy"
fi
$root apt-get -o DPkg::Lock::Timeout=300 update -q || fail "apt-get update failed"
# Unquoted: one word a package.
$root env DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=300 install -q -y --no-install-recommends $missing || fail "apt-get install failed"
