"""All scenarios, by name."""

from __future__ import annotations

from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scenarios import doors, hogs, keys, namespaces, requests, routers, sharing

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        keys.CrowdedKeys(),
        keys.KeySquatting(),
        requests.HugeText(),
        requests.Beams(),
        requests.StopStrings(),
        requests.StopTokens(),
        requests.QueueFlood(),
        requests.PriorityFlood(),
        requests.SamplingExtremes(),
        requests.HeldBackText(),
        requests.OthersRequests(),
        namespaces.Poisoning(),
        namespaces.LockOut(),
        namespaces.ManySalts(),
        namespaces.LongParts(),
        namespaces.OddGeometry(),
        hogs.SilentPut(),
        hogs.LeasesForAnHour(),
        hogs.CacheFlood(),
        hogs.PrefetchFlood(),
        hogs.RetainedPool(),
        hogs.LongSessionNames(),
        hogs.ManySessions(),
        hogs.LargeCalls(),
        hogs.LargeAtOnce(),
        hogs.LargeStreams(),
        hogs.LargeAnswers(),
        hogs.HoldEverything(),
        doors.Strangers(),
        doors.UnreadAnswers(),
        doors.OpenMetrics(),
        doors.LocalAdmin(),
        doors.NoTicket(),
        doors.MemoryDoor(),
        doors.SocketDirectory(),
        doors.Connections(),
        doors.AuditLog(),
        doors.Terminal(),
        doors.HostileTraces(),
        hogs.LateWriter(),
        doors.IdleMetrics(),
        requests.Images(),
        requests.Scans(),
        routers.ClaimedModel(),
        routers.ManySubscriptions(),
        sharing.Colluders(),
        sharing.ForgottenComputations(),
    )
}
"""In the order in which they run: scenarios that can share a daemon are next to each other."""
