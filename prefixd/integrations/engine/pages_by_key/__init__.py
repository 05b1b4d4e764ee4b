"""Stores pages of engines that name a page by a hash over all tokens up to its end and hand over no tokens.

`chains` turns keys into prompts; `page_store` and `shared_copies` move pages in the thread that asks for them; an
engine's folder implements `engine_pages`.
"""
