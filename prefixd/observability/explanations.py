"""What was found out about a request beyond its record: the nearest cached prefix, and who evicted what it lacked."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd.observability.eviction_journal import Removal


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a prompt differs from the nearest cached prefix.

    Attributes:
        token: index in the prompt, from 0 on.
        block: the block that it is in.
        expected: the token id of the cached prefix there.
        actual: the prompt's.
        equal: tokens of this block that are the same in both, before and behind it.
        compared: tokens of the block that were compared.
    """

    token: int
    block: int
    expected: int
    actual: int
    equal: int
    compared: int


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A namespace that has the prompt's first block, while the prompt's own has not.

    Attributes:
        name: the namespace's name.
        tenant: its tenant.
        differs: in what it differs from the prompt's namespace: some of `tenant`, `name`, `salt`, `layout`.
    """

    name: str
    tenant: str
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Missing blocks that left the cache together, in one way.

    Attributes:
        removal: the last one.
        blocks: how many of the blocks that were looked for.
    """

    removal: Removal
    blocks: int


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it.

    Attributes:
        difference: None if no cached prefix goes on where the prompt's ends.
        elsewhere: None if no other namespace has the prompt's beginning.
        evicted: the missing blocks that are in the journal of evictions, the largest group first.
        failed_load: the removal of the block at which a load failed; None if none did, or it is still there.
        looked_for: how many missing blocks were looked for in the journal.
    """

    difference: Difference | None = None
    elsewhere: Elsewhere | None = None
    evicted: list[Evicted] = field(default_factory=list)
    failed_load: Removal | None = None
    looked_for: int = 0
