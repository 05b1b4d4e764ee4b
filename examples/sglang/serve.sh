#!/usr/bin/env bash
# A daemon and an SGLang server that uses it:   ./serve.sh MODEL [arguments of sglang.launch_server ...]
#
# PREFIXD_SOCKET  where the daemon listens; one that listens there already is used (default: prefixd's own)
# CPU_BYTES       memory for KV blocks (8GiB)      DISK_BYTES  disk for KV blocks (100GiB)
# DATA_DIR        where the blocks are on disk (default: prefixd's own)
# SGLANG          the command that serves a model ("python3 -m sglang.launch_server --model-path")
set -euo pipefail
model=${1:?usage: serve.sh MODEL [arguments of sglang.launch_server ...]}
shift
socket=${PREFIXD_SOCKET:-}
if [ -z "$socket" ]; then
    settings=$(prefixd config show --json)
    socket=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["server.socket"]["value"])' <<<"$settings")
fi

daemon=
if ! prefixd stats --address "unix:$socket" >/dev/null 2>&1; then
    prefixd serve --socket "$socket" --cpu-bytes "${CPU_BYTES:-8GiB}" --disk-bytes "${DISK_BYTES:-100GiB}" \
        ${DATA_DIR:+--data-dir "$DATA_DIR"} &
    daemon=$!
    # SGLang need not wait for it: without a daemon it computes, and uses it as soon as it answers.
fi

# The flag takes the JSON itself: SGLang reads "allocator" from there alone, and not from a file that is named.
# ${SGLANG} is meant to be split: it may be a command with arguments.
# shellcheck disable=SC2086
${SGLANG:-python3 -m sglang.launch_server --model-path} "$model" \
    --enable-hierarchical-cache --hicache-mem-layout page_first --page-size 64 \
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
    "backend_name": "prefixd",
    "module_path": "prefixd.integrations.sglang",
    "class_name": "PrefixdHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": true,
    "allocator": "shm",
    "prefixd": {"address": "unix:'"$socket"'"}
}' "$@" &
server=$!

# Ctrl-C and SIGTERM end the server first, then the daemon, which writes to disk what is only in memory.
stop() { kill -TERM "$server" 2>/dev/null || true; }
trap stop INT TERM
status=0
wait "$server" || status=$?
while kill -0 "$server" 2>/dev/null; do wait "$server" || status=$?; done
if [ -n "$daemon" ]; then
    kill -TERM "$daemon" 2>/dev/null || true
    wait "$daemon" || true
fi
exit "$status"
