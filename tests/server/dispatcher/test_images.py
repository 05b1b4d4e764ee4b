"""Prompts with images: found again by their content, and never cut or shared inside an image."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.server.prompt_images import PromptLayout
from prefixd.worker.protocol import Done, PromptImage, Start, Step, Update

from .images_bench import BLOCK, ImageBench, open_image_bench

if TYPE_CHECKING:
    from prefixd.server.request import Request
