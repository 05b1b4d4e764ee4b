"""The queue: which request runs next, and whether loading its prefix pays.

Standard library only and no clock of its own: time is passed in, so that a simulator can drive it.
"""

from __future__ import annotations

from prefixd_scheduler.costs.cost import LOADED_FROM, CostModel, PrefillCost
from prefixd_scheduler.costs.load_plan import LoadPlan, Regret, Stretch, plan_load
from prefixd_scheduler.costs.look_ahead import LookAhead
from prefixd_scheduler.distance import WEIGHT_CLASSES, Distance, prompt_weight, weight_class
from prefixd_scheduler.errors import (
    DuplicateRequestError,
    IntegrityError,
    InvalidValueError,
    QueueFullError,
    SchedulerError,
    UnknownPolicyError,
    UnknownRequestError,
)
from prefixd_scheduler.header import Header
from prefixd_scheduler.policies import (
    POLICIES,
    EarliestDeadlineFirst,
    FastestPrefixFirst,
    Fcfs,
    LongestPrefixMatch,
    Policy,
    RelaxedFastestPrefixFirst,
    ShortestTimeToReady,
    create_policy,
)
from prefixd_scheduler.queue import RequestQueue
from prefixd_scheduler.request import QueuedRequest
from prefixd_scheduler.shared_limit import SharedLimit

__all__ = [
    "LOADED_FROM",
    "POLICIES",
    "WEIGHT_CLASSES",
    "CostModel",
    "Distance",
    "DuplicateRequestError",
    "EarliestDeadlineFirst",
    "FastestPrefixFirst",
    "Fcfs",
    "Header",
    "IntegrityError",
    "InvalidValueError",
    "LoadPlan",
    "LongestPrefixMatch",
    "LookAhead",
    "Policy",
    "PrefillCost",
    "QueueFullError",
    "QueuedRequest",
    "Regret",
    "RelaxedFastestPrefixFirst",
    "RequestQueue",
    "SchedulerError",
    "SharedLimit",
    "ShortestTimeToReady",
    "Stretch",
    "UnknownPolicyError",
    "UnknownRequestError",
    "create_policy",
    "plan_load",
    "prompt_weight",
    "weight_class",
]
