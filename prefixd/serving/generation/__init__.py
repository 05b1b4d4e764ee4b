"""Generation: runs prompts, whichever protocol they come by.

It checks a call and makes `Request`s of the dispatcher, one a sequence; it turns the sampled tokens into events with
text. Protocols only translate (`server/services/inference_service.py` for gRPC).
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
