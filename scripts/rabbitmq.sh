#!/bin/sh
# Installs Debian's rabbitmq-server when it is missing, without starting the system service.
set -eu
line="sudo apt-get install --no-install-recommends rabbitmq-server"
if [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || command -v rabbitmq-server >/dev/null; then
    exit 0
fi
fail() {
    echo "error: the tests need rabbitmq-server, and $1; type: $line" >&2
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
$root apt-get update -q || fail "apt-get update failed"
$root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends rabbitmq-server || fail "apt-get install failed"
