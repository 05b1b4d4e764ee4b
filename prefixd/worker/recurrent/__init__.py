"""Recurrent layers (Mamba, gated delta nets, short convolutions): their states, and running them in flattened batches.

An attention layer needs the keys and values of all tokens before; a recurrent layer needs one state of a fixed size.
The engine may keep that state anywhere, as bytes; `StateLayout` gives their number and layout. A pass runs inside
`RecurrentLayers.running`, which gets each segment's state:

    layers = RecurrentLayers(model, cell_tokens=32)
    state = torch.empty(layers.layout.nbytes, dtype=torch.uint8)  # any bytes: position 0 has no state yet
    with layers.running([StateSegment(0, 40, state, keep=[(32, snapshot)])]):
        model(...)

`StateSegment` is the only type that the engine and this package share.
"""

from prefixd.worker.recurrent.layers import RecurrentLayers
from prefixd.worker.recurrent.recurrent_modules import state_shapes
from prefixd.worker.recurrent.resume_check import check_resume
from prefixd.worker.recurrent.segments import StateSegment, pieces
from prefixd.worker.recurrent.state_layout import StateLayout, StateShape

__all__ = [
    "RecurrentLayers",
    "StateLayout",
    "StateSegment",
    "StateShape",
    "check_resume",
    "pieces",
    "state_shapes",
]
