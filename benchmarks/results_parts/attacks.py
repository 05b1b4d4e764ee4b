"""What results say of crashes, damage, failures, hostile clients and tenants beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_parts.wording import Figures, Sentence, mib, span


def _crash(r: Figures) -> str:
    return (
        f"A daemon killed {r['kills']} times under load: {r['wrong_bytes']} wrong bytes, {r['lost_durable']} durable "
        f"blocks and {r['lost_pins']} pins lost, {r['reopen_failures']} failed starts; a start takes "
        f"{r['start_p50_s']:.1f} s at p50 and {r['start_max_s']:.1f} s at most"
    )


def _restarts(r: Figures) -> str:
    return (
        f"{r['steps']:,} operations with {r['restarts']} restarts: of {r['compared_blocks']:,} blocks and "
        f"{r['compared_pins']:,} pins on disk {r['lost_blocks']} and {r['lost_pins']} lost, {r['resurrected']} came "
        f"back that were dropped, {r['wrong_bytes']} wrong bytes; {r['refused']:,} operations were refused by full "
        "tiers and quotas"
    )


def _power_loss(r: Figures) -> str:
    return (
        f"{r['cases']:,} simulated power cuts: {r['violations']} violations, {r['acknowledged']:,} acknowledged writes "
        "compared"
    )


def _bit_rot(r: Figures) -> str:
    return (
        f"{r['flips']} damages on disk: {r['detected']} detected, {r['served_wrong']} served; {r['index_flips']} "
        f"damages of the index cost {r['index_lost_blocks']} of {r['index_lost_blocks'] + r['index_kept_blocks']:,} "
        "blocks"
    )


def _bit_rot_encrypted(r: Figures) -> str:
    return f"Where blocks are encrypted: {_bit_rot(r)}"


def _bit_rot_remote(r: Figures) -> str:
    return (
        f"{r['flips']} damaged objects in a shared Valkey: {r['detected']} detected, {r['served_wrong']} served, "
        f"{r['recomputed_blocks']} blocks computed again; of {r['forged']:,} forged objects {r['forged_served']} served"
    )


def _client_deaths(r: Figures) -> str:
    return (
        f"{r['kills']} clients killed while others work: {r['leaked_slots']} slots and {r['leaked_leases']} leases "
        f"leaked, {r['failed_calls']} of {r['calls_of_others']:,} calls of others failed; a death is noticed within "
        f"{r['noticed_max_s']:.2f} s"
    )


def _faults(r: Figures) -> str:
    slowest = max(r["scenarios"], key=lambda scenario: scenario["slowest_call_s"])
    return (
        f"{len(r['scenarios'])} failures of disk, limits, files and worker: {r['survived']} survived, "
        f"{r['unreported']} unreported, {r['not_back']} that outlived their cause, {r['wrong_bytes']} wrong bytes; the "
        f"slowest call took {slowest['slowest_call_s']:.1f} s ({slowest['name']})"
    )


def _fuzz_rpc(r: Figures) -> str:
    return (
        f"{r['calls']:,} malformed and hostile calls: {r['crashes']} crashes, {r['unexpected_status']} statuses "
        f"outside the contracts, {r['leaks']} leaks, {r['failed_calls']} of {r['well_behaved_calls']:,} calls of "
        "others failed"
    )


def _hostile(r: Figures) -> str:
    breached = sum(scenario["breached"] for scenario in r["scenarios"])
    return (
        f"Attacks of one tenant on the others: {breached} of {len(r['scenarios'])} succeeded, {r['honest_failures']} "
        f"calls of others failed; their p99 is at most {r['worst_bystander_p99_ratio']:.1f} times as long "
        f"({r['worst_scenario']})"
    )


def _hostile_before(r: Figures) -> str:
    return f"{_hostile(r)}, on a tree before the defences"


def _tenants(r: Figures) -> str:
    by_flood = r["kept_shares"][0]
    return (
        f"Three tenants of which one floods the daemon: {r['below_guarantee']} samples below a guarantee, "
        f"{r['above_most']} above a most; another tenant keeps {r['isolation_calls']:.2f} of its calls a second "
        f"(floods: {span(by_flood['calls'])}) and {r['isolation_requests']:.2f} of its requests "
        f"({span(by_flood['requests'])})"
    )


def _timing_leak(r: Figures) -> str:
    chance = "no more than" if r["with"]["within"] else "MORE than"
    return (
        f"Guessing which of {r['with']['probes']:,} prompts another tenant has cached: {r['with']['right']} right with "
        f"`cache.share_after = 3`, {chance} chance, {r['without']['right']:,} with 1"
    )


def _soak(r: Figures) -> str:
    return (
        f"{r['minutes']:.0f} minutes of mixed load, {r['calls']:,} calls: {r['failed_calls']} failed, "
        f"{r['wrong_bytes']} wrong bytes, {r['descriptors_slope']:.0f} descriptors and {r['mappings_slope']:.0f} "
        f"mappings a minute; resident memory grew by {r['rss_slope_mib_per_min']:.2f} MiB a minute, the daemon then "
        f"held {mib(r['daemon_rss_mib'] * (1 << 20))}"
    )


ATTACKS: Mapping[str, Sentence] = {
    "crash.json": _crash,
    "restarts.json": _restarts,
    "power_loss.json": _power_loss,
    "bit_rot.json": _bit_rot,
    "bit_rot_encrypted.json": _bit_rot_encrypted,
    "bit_rot_remote.json": _bit_rot_remote,
    "client_deaths.json": _client_deaths,
    "faults.json": _faults,
    "fuzz_rpc.json": _fuzz_rpc,
    "hostile.json": _hostile,
    "hostile_before.json": _hostile_before,
    "hostile_unread_before.json": _hostile_before,
    "tenants.json": _tenants,
    "timing_leak.json": _timing_leak,
    "soak.json": _soak,
}
"""By name of the file, in the order of the page."""
