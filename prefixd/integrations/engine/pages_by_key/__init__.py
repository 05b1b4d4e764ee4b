"""For engines that name a page by a hash over all tokens up to its end, and hand over no tokens: their keys as prompts
(`chains`), and their pages moved by the thread that asks (`page_store`, `shared_copies`). `pages` is what an engine's
folder implements."""
