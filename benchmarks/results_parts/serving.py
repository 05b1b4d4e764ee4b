"""What results say of requests on prefixd's own worker, and of its queue and planner."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_parts.wording import Figures, Sentence, row, span, tier_size, tokens


def _text_analysis(r: Figures) -> str:
    def rate(name: str, prefix_tokens: int) -> str:
        return f"{row(r['configs'], name=name, prefix_tokens=prefix_tokens)['requests_per_s']:#.3g}"

    short, long = r["prefix_lengths"]
    fpf = row(r["configs"], name="fpf", prefix_tokens=short)
    fcfs = row(r["configs"], name="fcfs, no prefetch", prefix_tokens=short)
    return (
        f"Requests over {r['prefixes']} prefixes of {short} tokens on three tiers: {rate('no-cache', short)} "
        f"requests/s without a cache, {rate('fcfs, no prefetch', short)} with FCFS, {rate('fpf', short)} with FPF and "
        f"prefetch, {rate('everything on gpu', short)} with all of it on the GPU tier; FPF's first token at p95 takes "
        f"{fpf['ttft_s']['p95']:.1f} s where FCFS takes {fcfs['ttft_s']['p95']:.1f} s; with prefixes of {long:,} "
        f"tokens and a disk of {r['slow_disk'] / 1e6:.0f} MB/s FPF falls from {rate('fpf', long)} to "
        f"{rate('fpf, disk 50 MB/s', long)} requests/s; {tokens(r['same_answers'])}"
    )


def _header(r: Figures) -> str:
    def sooner(policy: str) -> str:
        (goal,) = (goal for goal in r["goals"] if goal["name"].startswith(f"{policy} over"))
        waits, base = _of(r, policy), _of(r, "fcfs")
        return f"{goal['value']:.1f} times (repeats: {span(b / w for w, b in zip(waits, base, strict=True))})"

    return (
        f"All prompts begin with the same {r['header']} of {r['prefix_tokens']} tokens and half of them are new: the "
        f"median first token comes {sooner('fpf')} as soon with FPF as with FCFS, {sooner('relaxed-fpf')} with "
        f"Relaxed-FPF, {tokens(r['same_answers'])}"
    )


def _of(r: Figures, name: str) -> list[float]:
    repeats: list[float] = row(r["configs"], name=name)["ttft_p50_s_of_repeats"]
    return repeats


def _chat(r: Figures) -> str:
    def way(tiers: str) -> Figures:
        return row(r["ways"], name=f"relaxed-fpf {tiers}" if tiers else "no-cache")

    none, gpu, every = way(""), way("gpu"), way("gpu+cpu+disk")
    return (
        f"{none['requests']} requests of {r['conversations']} chats: {gpu['hit_share']:.0%} of the possible prefix "
        f"tokens found with the GPU tier alone, {way('gpu+cpu')['hit_share']:.0%} with CPU memory, "
        f"{every['hit_share']:.0%} with all tiers; first token p50 {every['ttft_s']['p50']:.2f} s instead of "
        f"{none['ttft_s']['p50']:.2f} s without a cache, p95 {every['ttft_s']['p95']:.1f} s instead of "
        f"{none['ttft_s']['p95']:.1f} s, at {every['requests_per_s'] / none['requests_per_s']:.2f} times the "
        f"requests/s; {tokens(r['same_answers'])}"
    )


def _tree_search(r: Figures) -> str:
    none, gpu = row(r["ways"], name="no-cache"), row(r["ways"], name="relaxed-fpf gpu")
    rates = [way["requests_per_s"] for way in r["ways"] if "disk" in way["tiers"]]
    every = row(r["ways"], name="relaxed-fpf gpu+cpu+disk")
    return (
        f"A search that repairs {r['programs']} programs returns to its prefixes soon, so a GPU tier is enough: alone "
        f"it finds {gpu['hit_rate']:.1%} of the prompt tokens, {gpu['requests_per_s']:.2f} requests/s instead of "
        f"{none['requests_per_s']:.2f} without a cache, first token p50 {gpu['ttft_s']['p50']:.1f} s instead of "
        f"{none['ttft_s']['p50']:.1f} s. CPU memory and disk find {every['hit_rate'] - gpu['hit_rate']:.1%} more, at "
        f"{min(rates):.2f} to {max(rates):.2f} requests/s; {tokens(r['same_answers'])}"
    )


def _load_or_recompute(r: Figures) -> str:
    return (
        "Loading or computing, as the daemon chooses, against always the one and always the other: at worst "
        f"{r['worst_regret']:.1%} later to the first token than the better of both ({r['worst_point']}), earlier than "
        f"both at {r['both_at_once_wins']} of {len(r['points'])} points; where the disk turns slow in the middle of a "
        f"load, {r['abandoned_ratio']:.2f} times as late as computing from then"
    )


def _scheduler(r: Figures) -> str:
    waits = r["longest_wait_s"]
    starves = "a request may wait for ever" if waits["fpf"] is None else f"{waits['fpf']:.0f} s"
    return (
        f"With {r['waiting']:,} requests waiting a decision of the queue takes {r['decision_us_p99']:.0f} us at p99 at "
        f"most; the longest wait is {waits['relaxed-fpf']:.0f} s under Relaxed-FPF ({r['relaxed_fpf_bound_s']:.0f} s "
        f"promised) and {waits['fpf with a bound']:.0f} s under FPF with a bound ({r['fpf_starvation_bound_s']:.0f} s "
        f"promised); under FPF without a bound: {starves}"
    )


def _plan(r: Figures) -> str:
    enough = r["enough"]

    def point(**size: int) -> Figures:
        return row(r["points"], **size)

    without, with_disk = point(cpu_bytes=enough["cpu_bytes"], disk_bytes=0), point(**_sizes(enough))
    curve = r["curve"]["hit_rates"]
    return (
        f"`prefixd plan` for an hour of Mooncake's conversation trace on {r['model']}: "
        f"{tier_size(enough['cpu_bytes'])} of CPU memory and {tier_size(enough['disk_bytes'])} of disk are enough and "
        f"find {with_disk['hit_rate']:.1%} of the prompt tokens, {without['hit_rate']:.1%} without the disk, where "
        f"{with_disk['achievable_hit_rate']:.1%} are possible; in one tier of {r['curve']['capacity_blocks'][0]:,} "
        f"blocks LRU finds {curve['lru'][0]:.1%}, weighing {curve['weighing'][0]:.1%}, the optimum "
        f"{curve['optimum'][0]:.1%}"
    )


def _sizes(enough: Figures) -> dict[str, int]:
    return {"cpu_bytes": enough["cpu_bytes"], "disk_bytes": enough["disk_bytes"]}


def _plan_check(r: Figures) -> str:
    hits = max(abs(workload["hit_rate_off"]) for workload in r["workloads"])
    rates = max(abs(workload["requests_per_s_off"]) for workload in r["workloads"])
    codec = "" if r.get("codec", "exact") == "exact" else f" whose disk has the codec {r['codec']}"
    return (
        f"What `prefixd plan` predicts of {len(r['workloads'])} workloads against a real daemon{codec}: hit rates off "
        f"by {hits:.1%} at most, requests/s by {rates:.1%} at most"
    )


def _worker(r: Figures) -> str:
    single, shared = (r["virtual_over_paged"][name] for name in ("single_generation", "prefix_sharing"))
    return (
        f"The worker on a CPU, virtual tensors against block tables: {single:.2f} times the requests/s on single "
        f"prompts, {shared:.2f} times behind a shared prefix of {r['prefix_tokens']:,} tokens, "
        f"{tokens(r['same_tokens'])}; p99 of a step beside mapping {r['step_p99_ratio']:.2f} times that of other "
        f"steps; {min(r['memory_ratio'].values()):.1%} to {max(r['memory_ratio'].values()):.1%} of the memory of a "
        "preallocated cache"
    )


def _pressure(r: Figures) -> str:
    return (
        f"{r['requests']} requests with 1/{r['share']} of the GPU memory that they want: {r['swap_ratio']:.2f} of the "
        f"requests/s by swap, {r['recompute_ratio']:.2f} by recompute, {r['auto_ratio']:.2f} by cost, "
        f"{tokens(r['same_tokens'])}"
    )


def _resize(r: Figures) -> str:
    return (
        f"The GPU tier to a quarter and back under load, {len(r['resizes'])} times: {r['failed_requests']} of "
        f"{r['requests']} requests failed, {r['unfinished_resizes']} resizes unfinished, {tokens(r['same_tokens'])}; "
        f"making it smaller takes up to {r['shrink_s']:.2f} s, larger {r['grow_s']:.2f} s"
    )


def _layerwise(r: Figures) -> str:
    return (
        f"A prefix of {r['prefix_tokens']:,} tokens in CPU memory, over a link of {r['mb_per_s']:,} MB/s: the first "
        f"token after {r['layers_ms']:,.0f} ms when layers are computed as they come, {r['whole_ms']:,.0f} ms after "
        f"whole blocks, {r['gpu_ms']:,.0f} ms with the prefix on the GPU tier: {r['ratio']:.2f} of the time, "
        f"where four slabs should give {r['expected_ratio']:.2f}"
    )


def _breathe(r: Figures) -> str:
    return (
        f"Two daemons on one device, whose tiers grow and shrink, with requests in turns, together and none: "
        f"{r['failed']} of {r['requests']} requests failed, {tokens(r['same_tokens'])}; memory within 10% of the load "
        f"after {r['follow_s']:.1f} s at most; together the one with less had {r['smaller_share']:.0%} of it"
    )


def _jenga(r: Figures) -> str:
    def of(figure: str, way: str = "virtual", scale: str = ".1f") -> str:
        return ", ".join(f"{r['models'][name][way][figure]:{scale}}" for name in ("window", "state", "vision"))

    same = all(way["same_tokens"] for model in r["models"].values() for way in model.values())
    images, draft = r["models"]["vision"], r["models"]["draft"]
    return (
        "Chats with a window model, a state model and one that reads images, against one page size and one rule for "
        f"all layers in the same memory: bytes not needed {of('waste', scale='.2%')} instead of "
        f"{of('waste', 'baseline', '.0%')}, {of('hit_ratio')} times the tokens found, {of('requests_ratio')} times the "
        f"requests/s (block tables: {of('requests_ratio', 'paged')}); {images['virtual']['images']} images embedded "
        f"{images['virtual']['encoded_images']} times instead of {images['baseline']['encoded_images']}; with a draft "
        f"{draft['draft']['passes']} passes instead of {draft['alone']['passes']:,} at "
        f"{draft['draft']['requests_ratio']:.2f} times the requests/s; {tokens(same)}"
    )


def _why(r: Figures) -> str:
    kinds = len(r["kinds"])
    return f"{r['planted']} causes of late first tokens of {kinds} kinds planted: `prefixd why` names {r['named']}"


def _papers(r: Figures) -> str:
    return f"{len(r['rows'])} figures of the papers measured on a CPU: [papers](papers.md) compares them"


SERVING: Mapping[str, Sentence] = {
    "text_analysis.json": _text_analysis,
    "text_analysis_header_*.json": _header,
    "chat.json": _chat,
    "tree_search.json": _tree_search,
    "load_or_recompute.json": _load_or_recompute,
    "layerwise.json": _layerwise,
    "scheduler.json": _scheduler,
    "plan.json": _plan,
    "plan_check.json": _plan_check,
    "plan_check_*.json": _plan_check,
    "worker.json": _worker,
    "pressure.json": _pressure,
    "resize.json": _resize,
    "breathe.json": _breathe,
    "jenga.json": _jenga,
    "why.json": _why,
    "papers.json": _papers,
}
"""By name of the file, in the order of the page."""
