"""What results say of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_parts.wording import Figures, Sentence, row


def _first_token(r: Figures) -> str:
    point = max(r["parts"]["first_token"]["points"], key=lambda each: each["tokens"])
    return (
        f"{r['device']}, an 8B-sized model, a prompt of {point['tokens']:,} tokens: the first token after "
        f"{point['gpu_ms']:.0f} ms with its prefix on the GPU, {point['cpu_ms']:.0f} ms from CPU memory, "
        f"{point['recomputed_ms'] / 1e3:.2f} s computed, and {point['disk_ms'] / 1e3:.2f} s from this machine's disk"
    )


def _gpu(r: Figures) -> str:
    parts = r["parts"]
    attach = row(parts["attach"]["points"], layout="token", tokens=16384)

    def decoded(mode: str) -> float:
        speed: float = row(parts["decode"]["points"], mode=mode, batch=64)["tokens_per_s"]
        return speed

    return (
        f"{_first_token(r)}; a prefix of {attach['tokens']:,} tokens is mapped in {attach['map_us'] / 1e3:.0f} ms, "
        f"where a copy takes {attach['copy_us'] / 1e3:.1f} ms, and found still mapped in "
        f"{attach['reuse_us'] / 1e3:.1f} ms; copies in chunks reach {parts['swap']['h2d_engine_scattered_ratio']:.0%} "
        f"of the fastest; decoding at batch 64 makes {decoded('graphs'):,.0f} tokens/s with graphs and "
        f"{decoded('eager'):,.0f} without"
    )


def _engines(r: Figures) -> str:
    found = "; ".join(
        f"{name} {of['after restart']['requests_per_s']:.2f} requests/s and first token p50 "
        f"{of['after restart']['ttft_p50_s']:.3f} s"
        for name, of in r["caches"].items()
    )
    return f"A real vLLM on a GPU, chats after a restart of the engine: {found}"


def _host_share(r: Figures) -> str:
    copies, pages, decode = r["copies"], r["pages"], r["decode"]
    return (
        "Without a GPU, what the host adds where the driver's calls cost nothing: copies in pieces of 4 and 32 MiB are "
        f"bound at {copies['gbps_4']:.0f} and {copies['gbps_32']:.0f} GB/s; pages of all layers in one launch take "
        f"{pages['us_a_layer_load']:.0f} us a layer to load and {pages['us_a_layer_save']:.0f} us to save; a decode "
        f"step {decode['step_ms_1']:.2f} ms with one request, {decode['step_ms_64']:.2f} ms with 64 and "
        f"{decode['step_ms_128']:.2f} ms with 128"
    )


GPU: Mapping[str, Sentence] = {
    "nvidia_*.json": _gpu,
    "gpu_engines.json": _engines,
    "host_share.json": _host_share,
}
"""By name of the file."""
