"""A daemon in virtual time: what a machine would do with a workload, before it is bought.

The index, the groups, the policies, the prefetcher, the dispatcher and the cost model are the daemon's own. Only what
takes time or memory is simulated: the tiers have no bytes (`prefixd_swap.tiers.unbacked`), the worker computes nothing
(`worker`), and time passes when everything waits (`prefixd_swap.simulated_time`).

```
workload ──> VirtualDaemon ──> Dispatcher, Prefetcher, TieredCache   (as in the daemon)
                                   │                    │
                               SimulatedWorker      unbacked tiers
                               (ComputeCosts)       (bandwidths, latencies)
```
"""
