"""The figures in the README."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.results_parts.wording import Figures, row

GPU_FILE = "nvidia_h200.json"

Results = Mapping[str, Figures]
"""What each file holds, by its name."""


def figures(results: Results) -> list[str]:
    """Three figures, each with what speaks against prefixd."""
    return [
        f"- {_vllm(results['vllm.json'])}",
        f"- {_server(results['text_analysis.json'])}",
        f"- {_gpu(results[GPU_FILE])}",
    ]


def peers(results: Results) -> list[str]:
    """Rows of what else there is: LMCache beside vLLM, SGLang's own file backend."""
    return [*_lmcache(results["peers.json"]), "", *_sglang(results["sglang.json"])]


BLOCKS: Mapping[str, Callable[[Results], list[str]]] = {"figures": figures, "peers": peers}
"""Lines by the name of the place in the README where they belong."""


def _vllm(r: Figures) -> str:
    alone, with_prefixd, idle = row(r["runs"], name="vllm"), row(r["runs"], name="prefixd"), r["nothing_to_hit"]
    return (
        f"vLLM on a CPU, chats and a restart: median first token {with_prefixd['ttft']['p50']:.2f} s with prefixd, "
        f"{alone['ttft']['p50']:.2f} s alone. With nothing to hit: {min(idle['shares']):.0%} to "
        f"{max(idle['shares']):.0%} of vLLM's requests/s."
    )


def _server(r: Figures) -> str:
    length = r["prefix_lengths"][0]
    none, fcfs, fpf = (
        row(r["configs"], name=name, prefix_tokens=length) for name in ("no-cache", "fcfs, no prefetch", "fpf")
    )
    return (
        f"Own server, {r['prefixes']} shared prefixes: {fpf['requests_per_s']:.1f} requests/s, without a cache "
        f"{none['requests_per_s']:.1f}. The slowest 5% wait {fpf['ttft_s']['p95']:.1f} s under its FPF order, under "
        f"FCFS {fcfs['ttft_s']['p95']:.1f} s."
    )


def _gpu(r: Figures) -> str:
    point = max(r["parts"]["first_token"]["points"], key=lambda each: each["tokens"])
    return (
        f"{r['device']}, 8B-sized model, {point['tokens']:,} tokens: first token {point['cpu_ms'] / 1e3:.2f} s from "
        f"CPU memory, {point['recomputed_ms'] / 1e3:.2f} s computed. From that machine's disk: "
        f"{point['disk_ms'] / 1e3:.2f} s."
    )


def _lmcache(r: Figures) -> list[str]:
    names = {"vllm": "vLLM alone", "prefixd": "prefixd", "lmcache": f"LMCache {r['peers_versions']['lmcache']}"}
    caches = [r["caches"][name] for name in names]

    def cells(part: str, figure: str, unit: str = "") -> str:
        return " | ".join(f"{cache[part][figure]:.2f}{unit}" for cache in caches)

    return [
        f"| one request at a time | {' | '.join(names.values())} |",
        "|---|---|---|---|",
        f"| requests/s | {cells('cold', 'requests_per_s')} |",
        f"| after engine restarts | {cells('after restart', 'requests_per_s')} |",
        f"| first token p95, s | {cells('cold', 'ttft_p95_s')} |",
        f"| after engine restarts | {cells('after restart', 'ttft_p95_s')} |",
    ]


def _sglang(r: Figures) -> list[str]:
    layers = r["layouts"]["layer_first"]
    return [
        "| SGLang's cache controller, `layer_first` | prefixd | SGLang's file backend |",
        "|---|---|---|",
        f"| save, GB/s | {layers['prefixd_save_gbps']:.1f} | {layers['file_save_gbps']:.1f} |",
        f"| load, GB/s | {layers['prefixd_load_gbps']:.1f} | {layers['file_load_gbps']:.1f} |",
        f"| look up {r['pages']} pages, ms | {layers['prefixd_lookup_ms']:.1f} | {layers['file_lookup_ms']:.1f} |",
        f"| of {r['flips']} bits flipped on disk, served | {r['prefixd_served_wrong']} | {r['file_served_wrong']} |",
    ]
