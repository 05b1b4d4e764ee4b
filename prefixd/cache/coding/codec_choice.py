"""Which codec stores a namespace's blocks: the namespace's own, else its tenant's, else the tier's."""

from __future__ import annotations

import logging
from functools import partial

from prefixd.base.codec_names import CODEC_NAMES, CODECS_EXTRA, CodecName
from prefixd.base.errors import PreconditionError
from prefixd.base.extras import MissingExtraError, require
from prefixd.base.long_work.steps import in_thread
from prefixd.base.tenancy.tenants import COMMON, Tenants
from prefixd.cache.namespaces import NamespaceSpec
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import CodecShortageError, UnavailableCodecError

log = logging.getLogger(__name__)


def codec_of(spec: NamespaceSpec, tenants: Tenants, tier: CodecName) -> CodecName:
    """Returns the codec with which a tier stores what is written now of a namespace.

    Blocks that are common to all tenants have many owners. Without a codec of their namespace they get the one that
    alters least, of those of the tier and of all tenants.

    Args:
        spec: of the namespace.
        tenants: have their codecs.
        tier: the tier's setting, `disk.codec` or `remote.codec`.
    """
    for name in CODEC_NAMES:
        if spec.codec == name:
            return name
    if spec.tenant == COMMON:
        return min([tier, *(each.codec for each in tenants if each.codec is not None)], key=CODEC_NAMES.index)
    return tenants.known(spec.tenant).codec or tier


def check_codec_installed(spec: NamespaceSpec) -> None:
    """Raises PreconditionError if the packages of the codec that a namespace asks for are not installed."""
    if spec.codec not in CODEC_NAMES or spec.codec == "exact":
        return
    try:
        require(CODECS_EXTRA, f"the codec {spec.codec} of namespace {spec.name!r}")
    except MissingExtraError as error:
        raise PreconditionError(
            f"{error}, where the daemon runs, and restart it; or register the namespace without a codec"
        ) from error


async def import_codec(spec: NamespaceSpec) -> None:
    """Imports the codec that a namespace asks for in a thread: that takes half a second, for which the event loop would
    stand still at the namespace's first block. In a shortage that is left to its first block.

    Raises:
        PreconditionError: its packages cannot be imported.
        ExhaustedError: no thread can be started.
    """
    if spec.codec not in CODEC_NAMES or spec.codec == "exact":
        return
    try:
        await in_thread(partial(find_codec, spec.codec))
    except CodecShortageError as error:
        log.warning("namespace %r: %s", spec.name, error)
    except UnavailableCodecError as error:
        raise PreconditionError(f"namespace {spec.name!r}: {error}; or register it without a codec") from error
