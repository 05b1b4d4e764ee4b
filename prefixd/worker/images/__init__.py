"""Images in prompts: which models read them, and their way from pixels to rows of a pass.

```
Start.images --> PromptImages --hold--> Embeddings (frames) --(not filled)--> ImageEncoder: colours, vision encoder
                      |
                      +--of_pass--> PassImages of a Segment: embeddings, positions, who attends both ways
```
"""

from prefixd.worker.images.cross_images import CrossImages, CrossMemory, CrossPairs
from prefixd.worker.images.encoder import ImageEncoder
from prefixd.worker.images.encoder_size import EncoderSize
from prefixd.worker.images.kinds import (
    attention_names,
    cross_geometry,
    image_kind,
    image_shape,
    read_processor,
    reads_images,
)
from prefixd.worker.images.prompt_images import PassImages, PromptImages, check_images

__all__ = [
    "CrossImages",
    "CrossMemory",
    "CrossPairs",
    "EncoderSize",
    "ImageEncoder",
    "PassImages",
    "PromptImages",
    "attention_names",
    "check_images",
    "cross_geometry",
    "image_kind",
    "image_shape",
    "read_processor",
    "reads_images",
]
