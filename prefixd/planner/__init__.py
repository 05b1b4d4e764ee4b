"""A daemon in virtual time: predicts how a machine serves a workload, before the machine is bought.

The index, the groups, the policies, the prefetcher, the dispatcher and the cost model are the daemon's own. Only parts
that take time or memory are simulated: the tiers have no bytes (`simulation`), the worker computes nothing
(`worker`), and time passes when everything waits (`simulation.event_loop`).

```
workload ──> VirtualDaemon ──> Dispatcher, Prefetcher, TieredCache   (as in the daemon)
                                   │                    │
                               SimulatedWorker      unbacked tiers
                               (ComputeCosts)       (bandwidths, latencies)
```
"""
