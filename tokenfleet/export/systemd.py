"""A systemd unit for `tokenfleet serve --plan` on one GPU machine, without Kubernetes."""

from __future__ import annotations

import shlex

from controlplane.errors import BadInput
from tokenfleet.export.deployment import PLAN, Deployment, serve_words

SHUTDOWN_S = 60


def systemd_unit(fleet: Deployment, program: str = "/opt/tokenfleet/bin/tokenfleet") -> str:
    """The unit's text; keys and certificate are in /etc/tokenfleet. Raises BadInput for several GPU types."""
    if len({group.worker_type.gpu for group in fleet.groups}) > 1:
        raise BadInput("systemd: one machine has one type of GPU, this fleet has several: plan with --gpu")
    # A machine of its own has nobody before it who would encrypt.
    own = ["--tls-cert", "/etc/tokenfleet/tls.crt", "--tls-key", "/etc/tokenfleet/tls.key"]
    own += ["--data", "/var/lib/tokenfleet", "--shutdown-wait", f"{SHUTDOWN_S}s"]
    words = [program, *serve_words(fleet, f"/etc/tokenfleet/{PLAN}", own)[1:]]
    # systemd expands % and $ in ExecStart; neither has a meaning in our flags.
    command = shlex.join(words).replace("%", "%%").replace("$", "$$")
    types = [(group.workers, group.worker_type) for group in fleet.groups]
    parts = ", ".join(f"{workers} workers of {t.gpus} x {t.gpu}" for workers, t in types)
    gpus = sum(group.gpus for group in fleet.groups)
    return f"""\
# {parts}: this machine needs {gpus} GPUs, and the plan beside this file as /etc/tokenfleet/{PLAN}.
[Unit]
Description=Tokenfleet: {fleet.weights} within {fleet.slo_text}
After=network-online.target nvidia-persistenced.service
Wants=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
User=tokenfleet
# VLLM_API_KEY=..., TOKENFLEET_CONTROL_KEY=..., and HF_TOKEN=... where the weights need one
EnvironmentFile=/etc/tokenfleet/keys.env
Environment=HF_HOME=/var/lib/tokenfleet/hub
ExecStart={command}
# Streams finish or end in an explicit error; only then are what is left of the processes killed.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={SHUTDOWN_S + 60}
Restart=on-failure
RestartSec=5
StateDirectory=tokenfleet
LimitNOFILE=1048576
LimitMEMLOCK=infinity
TasksMax=infinity
OOMPolicy=stop
NoNewPrivileges=true
ProtectSystem=strict
ProtectHome=true
PrivateTmp=true
RestrictSUIDSGID=true

[Install]
WantedBy=multi-user.target
"""
