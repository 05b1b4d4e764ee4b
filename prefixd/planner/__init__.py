"""A daemon in virtual time: predicts how a machine serves a workload, before the machine is bought.

The index, the groups, the policies, the prefetcher, the dispatcher and the cost model are the daemon's own. Only parts
that take time or memory are simulated: the tiers have no bytes (`prefixd_swap.tiers.unbacked`), the worker computes
nothing (`worker`), and time passes when everything waits (`prefixd_swap.simulated_time`).

```
workload ──> VirtualDaemon ──> Dispatcher, Prefetcher, TieredCache   (as in the daemon)
                                   │                    │
                               SimulatedWorker      unbacked tiers
                               (ComputeCosts)       (bandwidths, latencies)
```
"""
