"""What results say of codecs."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_parts.wording import Figures, Sentence, row, tier_size


def _codecs(r: Figures) -> str:
    def measured(name: str) -> str:
        speed = row(r["codecs"], codec=name, tokens=64, part_bytes=2 << 20)
        quality = row(r["quality"], codec=name, block_tokens=64)
        worker = row(r["worker_tokens"], codec=name, dtype="bfloat16")
        return (
            f"`{name}` {quality['size']:.3f} of the bytes, KL {quality['kl']:.2g}, the same most likely token "
            f"{quality['same_top1']:.1%}, {worker['restarted_answers_differ']:.0%} of the answers other ones, encode "
            f"{speed['encode_core_gbps']:.1f} and decode {speed['decode_core_gbps']:.1f} GB/s a core"
        )

    slowest = min(r["first_tokens"], key=lambda point: (point["mb_per_s"], -point["tokens"]))
    fastest = max(r["first_tokens"], key=lambda point: (point["mb_per_s"], point["tokens"]))
    precise = row(r["worker_tokens"], codec="int8", dtype="float32")
    return (
        f"Codecs on SmolLM2-135M in bfloat16: {'; '.join(map(measured, ('lossless', 'int8', 'k8v4')))}. In float32, "
        f"whose likeliest tokens seldom tie, `int8` gives {precise['restarted_answers_differ']:.0%} other answers. "
        f"Where a throttled disk decides, a prefix that is loaded with int8 gives the first token at least "
        f"{r['int8_gain']:.2f} times as soon as an exact one; where each loads or computes as it finds best, "
        f"{slowest['gain']['int8']:.2f} times at {slowest['mb_per_s']:g} MB/s and {fastest['gain']['int8']:.2f} times "
        f"at {fastest['mb_per_s']:g} MB/s, later at {r['later']} of {len(r['first_tokens'])} points"
    )


def _vllm_codecs(r: Figures) -> str:
    def compared(each: Figures) -> str:
        return (
            f"{each['differing_tokens']} of {each['tokens']} tokens differ with `{each['codec']}` "
            f"({each['differing_answers']} of {each['answers']} answers, {each['size']:.2f} of the bytes)"
        )

    return (
        f"A real vLLM with {r['model_name']}, whose prompts come from disk after a restart: "
        f"{', '.join(map(compared, r['rows']))}"
    )


def _plan_codec(r: Figures) -> str:
    codec = next(each["codec"] for each in r["points"] if each["codec"] != "exact")

    def compared(disk_bytes: int) -> str:
        exact, coded = (row(r["points"], disk_bytes=disk_bytes, codec=name) for name in ("exact", codec))
        return (
            f"with {tier_size(disk_bytes)} {coded['hit_rate']:.1%} instead of {exact['hit_rate']:.1%}, the first token "
            f"after {coded['ttft_s']['p50']:.2f} s instead of {exact['ttft_s']['p50']:.2f} s (median)"
        )

    sizes = sorted({each["disk_bytes"] for each in r["points"]})
    return (
        f"`prefixd plan --codec {codec}` for {r['points'][0]['requests']:,} requests of Mooncake's conversation trace "
        f"on {r['model']}: of the prompt tokens a disk tier with {codec} finds {'; '.join(map(compared, sizes))}"
    )


CODECS: Mapping[str, Sentence] = {
    "codecs.json": _codecs,
    "vllm_codecs.json": _vllm_codecs,
    "plan_codec.json": _plan_codec,
}
"""By name of the file, in the order of the page."""
