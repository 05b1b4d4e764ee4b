"""What results say of the cache itself: finding, copying, storing, sharing, and what is installed."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_parts.wording import Figures, Sentence, mib, row


def _match(r: Figures) -> str:
    return (
        f"A cached prompt of {r['blocks']:,} blocks of {r['block_tokens']} tokens is found from another process in "
        f"{r['p50_us'] / 1e3:.2f} ms at p50 and {r['p99_us'] / 1e3:.2f} ms at p99, of which an empty RPC takes "
        f"{r['empty_rpc_p50_us'] / 1e3:.2f} and {r['empty_rpc_p99_us'] / 1e3:.2f} ms"
    )


def _shared_memory(r: Figures) -> str:
    return (
        f"Blocks of {mib(r['block_bytes'])} from another process: store {r['store_gbps']:.1f} GB/s and load "
        f"{r['load_gbps']:.1f} GB/s where a plain copy reaches {r['plain_copy_gbps']:.1f} GB/s; into memory that is "
        f"touched for the first time, store {r['cold_store_gbps']:.1f} GB/s"
    )


def _disk(r: Figures) -> str:
    own = r["bytes_per_block"] - r["empty_daemon_bytes"] / r["blocks"]
    return (
        f"Durable stores and loads through a daemon reach {r['store_ratio']:.2f} and {r['load_ratio']:.2f} times the "
        f"throughput of plain direct I/O (the store alone {r['slabs_store_ratio']:.2f} and "
        f"{r['slabs_load_ratio']:.2f}; with blocks of 64 KiB to 8 MiB, on the same places of its files, at least "
        f"{r['of_raw_store']:.2f} and {r['of_raw_load']:.2f}); over two throttled drives a prompt is stored at least "
        f"{r['two_drives_store_ratio']:.2f} times and loaded {r['two_drives_load_ratio']:.2f} times as fast as over "
        f"one; with a million blocks a daemon opens in {r['reopen_s']:.1f} s and takes {own:.0f} bytes of memory a "
        f"block more than an empty one, {r['peak_bytes_per_block']:.0f} with all of the process at its highest"
    )


def _disk_io(r: Figures) -> str:
    return (
        f"Ways to read and write slab files: {r['best_io']} is the fastest over blocks of 64 KiB to 8 MiB; "
        f"memory-mapped files reach {r['modes_mmap_ratio']:.2f} and buffered ones {r['modes_buffered_ratio']:.2f} of "
        "direct I/O's throughput, though stores of 64 KiB are "
        f"{row(r['modes'], block_bytes=65536, io='mmap')['store_ratio']:.2f} times as fast memory-mapped"
    )


def _trace(r: Figures) -> str:
    return (
        f"{r['requests']:,} requests of Mooncake's conversation trace, every byte compared: {r['wrong_bytes']} wrong "
        f"bytes, hit rate {r['hit_rate']:.1%} of {r['achievable_hit_rate']:.1%} that are possible, "
        f"{r['dropped_blocks']} blocks dropped"
    )


def _groups(r: Figures) -> str:
    return (
        f"{r['chats']} chats with the KV geometry of Gemma 3 27B in a CPU tier for {r['share']:.0%} of their bytes: "
        f"{r['hit_tokens']:,} hit tokens, {r['ratio']:.1f} times those of a cache that keeps every group whole, "
        f"{r['wrong_bytes']} wrong bytes"
    )


def _mixed_sizes(r: Figures) -> str:
    def worst(coded: bool) -> float:
        pages: list[float] = [run["worst_excess_pages"] for run in r["runs"] if (run["tier"] == "coded") == coded]
        return max(pages)

    return (
        f"Blocks of several sizes in one tier, {r['operations']:,} operations for each of {len(r['runs'])} mixtures "
        f"and tiers: no operation evicted more than what it needed and {worst(coded=False):.2f} pages, a full tier "
        f"stayed at least {r['utilisation']:.1%} full; a disk tier with a codec {worst(coded=True):.2f} pages and "
        f"{r['coded_utilisation']:.1%}; {r['wrong_bytes']} wrong bytes"
    )


def _stalls(r: Figures) -> str:
    waits = {call["name"]: call["bystander_p99_ms"] for call in r["calls"]}
    worst = max(waits, key=lambda name: waits[name])
    return (
        f"With {r['blocks']:,} blocks one callback holds the event loop for {r['worst_hold_ms']:.1f} ms at most "
        f"({r['worst_call']}); a bystander's match takes {min(waits.values()):.0f} ms at p99 beside the lightest call "
        f"and {waits[worst]:.0f} ms beside the heaviest ({worst})"
    )


def _urgency(r: Figures) -> str:
    return (
        f"Loads from a disk of {mib(r['bandwidth'])}/s that prefetches keep busy take {r['demand_p50_ratio']:.2f} "
        f"times as long at p50 and {r['demand_p95_ratio']:.2f} times at p95 as on an idle daemon; without urgency "
        f"{r['demand_p50_ratio_without_urgency']:.1f} and {r['demand_p95_ratio_without_urgency']:.1f} times"
    )


def _salts(r: Figures) -> str:
    return (
        f"{r['salts']:,} salts through one session: {r['refused']} refused, {r['found_in_use']:,} of "
        f"{r['asked_in_use']:,} in use found, {r['forgotten']:,} namespaces forgotten to stay within "
        f"{mib(r['namespace_limit_bytes'])}; the process grew by {mib(r['growth_bytes'])}"
    )


def _remote(r: Figures) -> str:
    trace, first, down = r["trace"], r["first_token"], r["store_down"]
    return (
        f"A cold second host finds {trace['hit_rate']:.1%} of the tokens in a shared Valkey, of "
        f"{trace['achievable_hit_rate']:.1%} that are possible, {trace['wrong_bytes']} wrong bytes; its first token "
        f"comes at worst {first['worst_ratio']:.3f} times as late as the better of loading and computing "
        f"({first['worst_point']}); {r['copies']['bytes_copied_per_byte']:.3f} copies of a byte; with the store down "
        f"calls take up to {down['worst_ratio']:.3f} times as long"
    )


def _wheels(r: Figures) -> str:
    sizes = ", ".join(f"{mib(nbytes)} for {name}" for name, nbytes in r["environments"].items())
    return f"The wheel has {mib(r['wheel_bytes'])}; a fresh environment takes {sizes}"


def _what_if(r: Figures) -> str:
    worst = ", ".join(f"{each['worst_error_points']:.1f} with {each['policy']}" for each in r["policies"])
    asking, storing = r["cost"]["lookups"], r["cost"]["stores"]
    return (
        f"`prefixd what-if` beside full replays of {r['trace']}, at {r['sizes']} sizes from a quarter to eight times: "
        f"{r['worst_error_points']:.1f} points off at most ({worst}). At full load it takes {asking['share']:.2%} of "
        f"the event loop's time beside look-ups, leaving {asking['skipped_prompts']:,} of {asking['prompts']:,} out, "
        f"and {storing['share']:.2%} beside stores, leaving {storing['skipped_prompts']:,} of "
        f"{storing['prompts']:,} out"
    )


def _against(r: Figures) -> str:
    ratios = ", ".join(
        f"`{name}` {each['ratio']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
        for name, each in r["operations"].items()
    )
    return f"Times of calls over those at commit {r['commit'][:8]}: {ratios}"


CACHE: Mapping[str, Sentence] = {
    "match.json": _match,
    "shared_memory.json": _shared_memory,
    "disk.json": _disk,
    "disk_io.json": _disk_io,
    "trace.json": _trace,
    "groups.json": _groups,
    "mixed_sizes.json": _mixed_sizes,
    "stalls.json": _stalls,
    "urgency.json": _urgency,
    "salts.json": _salts,
    "remote.json": _remote,
    "wheels.json": _wheels,
    "what_if.json": _what_if,
    "against.json": _against,
}
"""By name of the file, in the order of the page."""
