"""The settings of a fleet, made before vLLM and Ray are imported, so that bad ones are refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from controlplane.placement.policies import Policy
from controlplane.placement.queue import QueueSettings
from controlplane.placement.strictness import NORMAL, Strictness
from controlplane.scaler.bounds import Autoscale
from controlplane.types import Slo, SloClass
from dataplane.history.files import HistoryLimits
from dataplane.http.keys import ApiKey
from dataplane.http.server import Extension
from dataplane.live.gateway.settings import GatewaySettings
from dataplane.live.kv.nixl import Asked
from dataplane.live.pool.fleet_types import ANYWHERE, FleetTypes, Site
from dataplane.live.pool.learning import KeptProfiles


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Everything `tokenfleet serve` was asked for. Types without a profile are measured as they start.

    `slo` None: DEFAULT_SLO, eased where no engine of the fleet could meet it. `kept`: profiles of before.
    `moves`: whether the controller may move requests between serving workers (else only draining ones are).
    `attainment`: the share of requests that should be within their targets. `move_bytes_per_s`: what copies
    may take of a worker, `move_share`: of a core's time. Both None: CPU_MOVES where copying takes the cores
    that compute, no bound elsewhere. `strictness`: of placement. `headroom`: the share of KV kept free on a
    worker with a high-priority request. `nodes_wait_s`: how long GPUs may be missing of a Ray cluster.
    `share`: of one model of several, the most workers of each kind at first. `site`: where workers may be.
    `emulated_start_s`: how long emulated engines take to start. `otlp`: where spans are sent.
    """

    gateway: GatewaySettings
    engine: Literal["vllm", "emulated"]
    types: FleetTypes
    max_workers: int
    control_host: str
    control_port: int
    slo: Slo | None
    attainment: float
    waiting: QueueSettings
    autoscale: Autoscale | None = None
    advisory: bool = False
    policy: Policy = Policy.SPREAD
    moves: bool = True
    data: Path | None = None
    history_limits: HistoryLimits | None = None
    history_prefixes: bool = False
    move_bytes_per_s: float | None = None
    move_share: float | None = None
    reclaim_notice: str | None = None
    kept: KeptProfiles | None = None
    strictness: Strictness = NORMAL
    headroom: float = 0.0
    nodes_wait_s: float = 0.0
    kv_transport: Asked = "auto"
    extensions: tuple[Extension, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    control_keys: tuple[ApiKey, ...] = ()
    control_keys_file: Path | None = None
    gateways: int = 1
    classes: tuple[SloClass, ...] = ()
    share: Mapping[str, int] | None = None
    site: Site = ANYWHERE
    emulated_start_s: float = 0.0
    otlp: str | None = None

    @property
    def targets_by_class(self) -> dict[str, Slo]:
        """The targets of each class."""
        return {one.name: one.slo for one in self.classes}
