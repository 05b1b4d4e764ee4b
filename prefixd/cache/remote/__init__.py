"""The remote tier: looks up prompts in a shared store, reads blocks from it and writes blocks to it.

`digests` names blocks; `lookups` asks the store about prompts; `copies` reads and writes blocks; `sharing` writes in
the background; `known_blocks` forgets unused blocks; `health` takes a failing store out of service and puts it back.
`remote` connects them.
"""

from prefixd.cache.remote.remote import Remote, RemoteOptions
from prefixd.cache.remote.sharing import SharePolicy

__all__ = ["Remote", "RemoteOptions", "SharePolicy"]
