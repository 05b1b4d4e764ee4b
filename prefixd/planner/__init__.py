"""A daemon in virtual time: what a machine would do with a workload, before it is bought.

The index, the groups, the policies, the prefetcher, the dispatcher and the cost model are the daemon's own. Only what
takes time or memory is simulated: the tiers have no bytes (`simulation`), the worker computes nothing
(`worker`), and time passes when everything waits (`simulation.event_loop`).

```
workload ──> VirtualDaemon ──> Dispatcher, Prefetcher, TieredCache   (as in the daemon)
                                   │                    │
                               SimulatedWorker      unbacked tiers
                               (ComputeCosts)       (bandwidths, latencies)
```
"""
