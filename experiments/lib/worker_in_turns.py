"""An extension of vLLM's worker, named to an engine and imported there, with which its copies take turns."""

from dataplane.live.kv import transport
from experiments.lib.copy_turns import TurnPacer

transport.Pacer = TurnPacer  # type: ignore[attr-defined]


class InTurns:
    """Adds nothing to vLLM's worker; it is there for its module to be imported."""
