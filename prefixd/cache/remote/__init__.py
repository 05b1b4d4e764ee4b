"""The remote tier's side of the cache: what a shared store has of a prompt, reading it, and writing to it.

`digests` names blocks there; `lookups` asks the store about prompts; `copies` reads and writes blocks; `sharing`
writes in the background what other hosts may want; `known_blocks` forgets what has not been asked for; `health` takes
a failing store out of service and back in. `remote` puts them together.
"""

from prefixd.cache.remote.remote import Remote, RemoteOptions
from prefixd.cache.remote.sharing import SharePolicy

__all__ = ["Remote", "RemoteOptions", "SharePolicy"]
