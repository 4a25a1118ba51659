#!/bin/sh
# Checks the container's mounts and settings, then execs the command, so that it receives SIGTERM.
set -eu

fail() {
    echo "error: $1" >&2
    exit 1
}

for folder in /tmp /dev/shm "$HOME"; do
    [ -w "$folder" ] || fail "$folder is not writable by user $(id -u): mount a volume there, or a
       tmpfs (Ray's sessions are in /tmp, its object store in /dev/shm, models and caches in $HOME)"
done

case "${RAY_AUTH_MODE:-}" in
    token) ;;
    disabled) echo 'warning: RAY_AUTH_MODE=disabled: anyone who reaches a port of Ray can run code' >&2 ;;
    *) fail "RAY_AUTH_MODE is '${RAY_AUTH_MODE:-}': set it to token or disabled" ;;
esac

[ "$#" -gt 0 ] || fail 'no command: give one, such as: cato serve deployments/nvidia.yaml'
exec "$@"
