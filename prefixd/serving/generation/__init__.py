"""Generation: the use case behind every protocol by which prompts come.

What a caller asks for is checked here and becomes `Request`s of the dispatcher, one a sequence; what the worker samples
becomes events with text. Protocols only translate (`server/services/inference_service.py` does for gRPC).
"""

from prefixd.serving.generation.events import Accepted, Finished, GenerationEvent, SequenceFinished, Tokens
from prefixd.serving.generation.generation import Generation
from prefixd.serving.generation.params import GenerateParams, sequence_seed

__all__ = [
    "Accepted",
    "Finished",
    "GenerateParams",
    "Generation",
    "GenerationEvent",
    "SequenceFinished",
    "Tokens",
    "sequence_seed",
]
