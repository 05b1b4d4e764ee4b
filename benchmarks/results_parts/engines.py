"""What results say of prefixd beside vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_parts.wording import Figures, Sentence, row, span, tokens


def _vllm(r: Figures) -> str:
    alone, with_prefixd, idle = row(r["runs"], name="vllm"), row(r["runs"], name="prefixd"), r["nothing_to_hit"]
    return (
        f"A real vLLM on a CPU, {alone['requests']} requests of {r['conversations']} chats, the engine restarted "
        f"before the last turn: {r['computed_saving']:.1f} times fewer prompt tokens computed than by vLLM alone, "
        f"first token p50 {with_prefixd['ttft']['p50']:.2f} s instead of {alone['ttft']['p50']:.2f} s, p95 "
        f"{with_prefixd['ttft']['p95']:.2f} s instead of {alone['ttft']['p95']:.2f} s, {tokens(r['same_tokens'])}; "
        f"where there is nothing to hit, {idle['share']:.0%} of vLLM's requests/s (rounds: {span(idle['shares'])})"
    )


def _hybrid(r: Figures) -> str:
    by_rule, opaque = r["runs"]["by rule"], r["runs"]["opaque"]
    return (
        f"vLLM with a window of {r['window_tokens']} tokens in half of its layers: saving a window's bytes by its rule "
        f"takes {by_rule['bytes_per_token']:,.0f} bytes a token instead of {opaque['bytes_per_token']:,.0f}, with "
        f"{by_rule['hit_tokens']:,} hit tokens against {opaque['hit_tokens']:,}, {tokens(r['same_tokens'])}"
    )


def _peers(r: Figures) -> str:
    caches = [r["caches"][name] for name in ("vllm", "prefixd", "lmcache")]

    def all_three(part: str, figure: str) -> str:
        return ", ".join(f"{cache[part][figure]:.2f}" for cache in caches)

    return (
        f"vLLM alone, with prefixd and with LMCache {r['peers_versions']['lmcache']}, one request at a time: "
        f"{all_three('cold', 'requests_per_s')} requests/s and first token p50 {all_three('cold', 'ttft_p50_s')} s "
        f"before restarts of the engine, {all_three('after restart', 'requests_per_s')} requests/s and p50 "
        f"{all_three('after restart', 'ttft_p50_s')} s after them, {tokens(r['same_tokens'])}; LMCache stores chunks "
        f"of {r['lmcache_chunk']} tokens and computed {_computed(caches[2]):,} prompt tokens, prefixd "
        f"{_computed(caches[1]):,}; prefixd's lead is larger than it differs between the rounds in "
        f"{sum(lead['clear'] for lead in r['leads']['lmcache'])} of {len(r['leads']['lmcache'])} figures"
    )


def _computed(cache: Figures) -> int:
    return sum(part["prompt_tokens"]["computed"] for part in cache.values())


def _sglang(r: Figures) -> str:
    pages, layers = r["layouts"]["page_first"], r["layouts"]["layer_first"]
    return (
        f"SGLang's cache controller, {r['pages']} pages: prefixd saves {pages['save_times_file']:.1f} (page_first) and "
        f"{layers['save_times_file']:.1f} times (layer_first) as fast as SGLang's file backend and loads "
        f"{min(pages['load_times_file'], layers['load_times_file']):.1f} times as fast, while a look-up takes "
        f"{pages['prefixd_lookup_ms']:.2f} ms instead of {pages['file_lookup_ms']:.2f} ms; of {r['flips']} bits "
        f"flipped on disk prefixd served {r['prefixd_served_wrong']}, the file backend {r['file_served_wrong']}"
    )


def _compatibility(r: Figures) -> str:
    rows = r["rows"]
    features = [outcome for tried in rows for outcome in tried["features"].values()]
    names_only = [tried["release"] for tried in rows if set(tried["features"]) == {"names"}]
    only = f"; of {', '.join(names_only)} only the names were looked at" if names_only else ""
    return (
        f"{sum(outcome == 'passed' for outcome in features)} of {len(features)} features passed with {len(rows)} "
        f"releases of vLLM and SGLang on a CPU{only}"
    )


def _long_prefix(r: Figures) -> str:
    return (
        f"Prompts of half to four times the CPU tier: {r['loaded_of_fitting']:.0%} of the {r['fitting_blocks']:,} "
        f"blocks that fit were loaded, {r['wrong_blocks']} wrong; in a real vLLM with a tier of 8 blocks "
        f"{r['vllm_loaded_of_fitting']:.0%} of {r['vllm_fitting_tokens']:,} tokens, {r['vllm_other_answers']} other "
        "answers"
    )


ENGINES: Mapping[str, Sentence] = {
    "vllm.json": _vllm,
    "peers.json": _peers,
    "sglang.json": _sglang,
    "vllm_hybrid.json": _hybrid,
    "long_prefix.json": _long_prefix,
    "compatibility.json": _compatibility,
}
"""By name of the file, in the order of the page."""
