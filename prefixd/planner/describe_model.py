"""`python -m prefixd.planner.describe_model DIR` reads a model directory as the worker does, for `find_model`.

It is a process of its own, since it imports torch. It prints the fields of a `PlannedModel` as JSON, or one line to
stderr.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from prefixd.planner.planned_models import LayerGroup
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import WorkerError
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.group_shape import ELEMENT_BYTES


def main(directory: str) -> str:
    """The model's fields. Raises WorkerError."""
    spec = read_model_spec(WorkerSettings(model=directory))
    if spec.groups.state is not None:
        raise WorkerError("it has recurrent layers, of which a plan has no cost model; plan with a model of attention")
    if not spec.attention:
        raise WorkerError("it has no layers with attention")
    shapes = [(layer.kv_heads, layer.head_dim, layer.window, layer.chunk) for layer in spec.attention]
    kept = Counter(shape for shape, layer in zip(shapes, spec.attention, strict=True) if layer.reads is None)
    groups = [LayerGroup(layers, *shape, readers=shapes.count(shape) - layers) for shape, layers in kept.items()]
    fields = {
        "name": Path(directory).name,
        "groups": [asdict(group) for group in groups],
        "parameters": spec.parameters,
        "active_parameters": spec.parameters,
        "query_heads": max(layer.query_heads for layer in spec.attention),
        "context_tokens": spec.max_model_tokens,
        "source": f"{directory}/config.json",
        "element_bytes": ELEMENT_BYTES[spec.dtype],
    }
    return json.dumps(fields)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1]))
    except WorkerError as error:
        sys.exit(str(error))
