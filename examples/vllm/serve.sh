#!/usr/bin/env bash
# A daemon and a vLLM server that uses it:   ./serve.sh MODEL [arguments of vllm serve ...]
#
# PREFIXD_SOCKET  where the daemon listens; one that listens there already is used (default: prefixd's own)
# CPU_BYTES       memory for KV blocks (8GiB)      DISK_BYTES  disk for KV blocks (100GiB)
# DATA_DIR        where the blocks are on disk (default: prefixd's own)
# VLLM            the command that serves a model ("vllm serve")
# HOST_POOL_BYTES vLLM's own offloading, with a host pool of so many bytes, and prefixd below it (default: the connector)
# ROLE            prefill or decode: one of two servers between which vLLM's NIXL connector hands over prompts' KV
# KV_BUFFER       where NIXL has its buffers: cuda, or cpu where vLLM runs on a CPU (cuda)
set -euo pipefail
if [ $# = 0 ]; then
    echo "usage: serve.sh MODEL [arguments of vllm serve ...]" >&2
    exit 2
fi
model=$1
shift
case ${HOST_POOL_BYTES:-0} in
    *[!0-9]*) echo "HOST_POOL_BYTES=$HOST_POOL_BYTES: write bytes as a number, such as 17179869184 for 16 GiB" >&2 && exit 2 ;;
esac
socket=${PREFIXD_SOCKET:-}
if [ -z "$socket" ]; then
    settings=$(prefixd config show --json)
    socket=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["server.socket"]["value"])' <<<"$settings")
fi

connector='{
    "kv_connector": "PrefixdConnector",
    "kv_connector_module_path": "prefixd.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"address": "unix:'"$socket"'"}
}'
if [ -n "${HOST_POOL_BYTES:-}" ]; then
    connector='{
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": '"$HOST_POOL_BYTES"',
        "blocks_per_chunk": 16,
        "secondary_tiers": [{
            "type": "PrefixdTier",
            "module_path": "prefixd.integrations.vllm.offloading",
            "address": "unix:'"$socket"'"
        }]
    }
}'
fi

# multi ROLE CHILD CHILD: both connectors; where both have a prompt's KV, the first loads it.
multi() {
    printf '{"kv_connector": "MultiConnector", "kv_role": "%s", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [%s, %s]}}' "$@"
}
nixl() {
    printf '{"kv_connector": "NixlConnector", "kv_role": "%s", "kv_buffer_device": "%s"}' "$1" "${KV_BUFFER:-cuda}"
}
case ${ROLE:-} in
    "") ;;
    prefill) connector=$(multi kv_producer "$connector" "$(nixl kv_producer)") ;;
    decode) connector=$(multi kv_consumer "$(nixl kv_consumer)" "$connector") ;;
    *) echo "ROLE=$ROLE: set prefill or decode, or leave it out" >&2 && exit 2 ;;
esac

daemon=
if ! prefixd stats --address "unix:$socket" >/dev/null 2>&1; then
    prefixd serve --socket "$socket" --cpu-bytes "${CPU_BYTES:-8GiB}" --disk-bytes "${DISK_BYTES:-100GiB}" \
        ${DATA_DIR:+--data-dir "$DATA_DIR"} &
    daemon=$!
    # vLLM need not wait for it: without a daemon it computes, and uses it as soon as it answers.
fi

# ${VLLM} is meant to be split: it may be a command with arguments.
# shellcheck disable=SC2086
${VLLM:-vllm serve} "$model" --kv-transfer-config "$connector" "$@" &
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
