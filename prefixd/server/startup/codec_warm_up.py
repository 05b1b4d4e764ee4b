"""Compiles codecs when the daemon starts, so that the first block does not wait for that."""

from __future__ import annotations

import logging

from prefixd.base.clocks import elapsed_s
from prefixd.base.codec_names import CODEC_NAMES, LOSSY
from prefixd.base.errors import ExhaustedError
from prefixd.base.long_work.steps import in_thread
from prefixd.settings import Settings
from prefixd_swap import SlabStore, SwapError
from prefixd_swap.codecs.registry import NAMES
from prefixd_swap.codecs.warm_up import WarmUp

log = logging.getLogger(__name__)


def codecs_in_use(settings: Settings, store: SlabStore | None) -> list[str]:
    """The codecs that the settings name for tiers and tenants, and those of blocks on disk, but for `exact`.

    With a lossy one `lossless` too, which codes what that refuses. A codec that only a client names is compiled at its
    first block.

    Raises:
        StorageError: the index cannot be read.
    """
    wanted = {*settings.codecs.values()}
    if settings.disk.bytes:
        wanted.add(settings.disk.codec)
    if settings.remote.url is not None:
        wanted.add(settings.remote.codec)
    on_disk = set[str]() if store is None else {NAMES[number] for number in store.used_codecs() if number in NAMES}
    used = wanted | on_disk
    return [name for name in CODEC_NAMES if name in used - {"exact"} or (name == "lossless" and used & LOSSY)]


async def warm_up_codecs(settings: Settings, store: SlabStore | None) -> None:
    """Compiles the codecs in use in a thread: some seconds the first time, and a tenth of one later.

    A failure is logged: then the first blocks wait. A cancellation ends the process that compiles.
    """
    begun_s = elapsed_s()
    try:
        names = codecs_in_use(settings, store)
        if not names:
            return
        work = WarmUp(names)
        try:
            await in_thread(work.run)
        finally:
            work.end()
    except (ExhaustedError, SwapError) as error:
        log.warning("codecs are compiled when their first block comes, which then waits: %s", error)
        return
    log.info("codecs are compiled (%s) after %.1f s", ", ".join(names), elapsed_s() - begun_s)
