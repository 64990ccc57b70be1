"""The options of the long verbs in groups: `--help` shows those that people need first, `--help-all` all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

_GROUPS = {
    "Targets": "slo attainment confidence class session-time agents",
    "Traffic": "trace since prometheus selector users requests-per-day request-rate shape growth peak"
    " prompt-tokens output-tokens data window rate-scale prompt-scale output-scale drop-too-long"
    " bias-from most-agents open-loop",
    "Model and hardware": "model gpu tp workers prefill-workers prefill decode kind profile precision"
    " max-gpus cold-start reclaims-per-h",
    "Prices": "prices provider spot reserved price-scale budget-usd-per-h",
    "Plan and scaling": "plan portfolio autoscale fixed scale-in-after max-workers advisory as-is"
    " replan-every auto-apply vary",
    "Replicas": "replicas every scaler apply yes replay once",
    "Engine and placement": "engine policy strictness priority-headroom no-prefix-cache"
    " gpu-memory-utilization kv-tokens max-num-batched-tokens max-num-seqs speculate host-kv kv-gb-per-s"
    " block-tokens context-limit tokenizer kv-events kv-replay engine-version kv-latency kv-transport"
    " move-bandwidth move-share",
    "Measurements": "measurements robust as-measured measured-on licence metrics log minutes budget repeats"
    " points max-context clock cores steps overhead",
    "Prediction": "predict from kv-precision expert-parallel data-parallel pipeline-parallel",
    "Endpoint": "listen metrics-listen client-ca fallbacks endpoint control servers tls-ca pool namespace"
    " token-file host port gateways api-key api-keys control-host control-port control-key control-keys"
    " tls-cert tls-key insecure",
    "Waiting": "queue queue-wait nodes-wait shutdown-wait reclaim-notice",
    "History": "history otlp history-prefixes history-days history-mb",
    "Output": "output output-dir all per-request verbose format",
}
ARGUMENTS, OTHER = "Arguments", "Other"
_FIRST = {
    "plan": "slo attainment confidence trace since users request-rate model gpu tp max-gpus prices output-dir"
    " all format",
    "whatif": "slo vary attainment trace since request-rate model gpu tp max-gpus prices spot output-dir"
    " verbose format",
    "simulate": "slo trace request-rate rate-scale model gpu tp workers prefill-workers policy prices"
    " per-request verbose format",
    "serve": "model plan workers tp slo autoscale fixed max-workers engine port api-key control-key data"
    " history verbose",
    "fit": "measurements model gpu tp output kv-tokens max-num-seqs max-num-batched-tokens robust"
    " as-measured format",
    "profile": "model output budget points predict gpu tp precision data-parallel pipeline-parallel format",
    "compare": "trace endpoint profile slo control workers policy rate-scale window per-request format",
    "calibrate": "metrics log endpoint minutes profile gpu tp output api-key format",
    "advise": "slo servers prometheus model gpu tp profile attainment replicas cold-start listen scaler"
    " replay once format",
    "pick": "slo servers model gpu tp profile tokenizer listen metrics-listen data kv-events queue-wait",
}


def _flags(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(f"--{flag}" for flag in flags.split()) for name, flags in table.items()}


GROUPS, FIRST = _flags(_GROUPS), _flags(_FIRST)


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help has its options in GROUPS; `is_whole` shows all of them."""

    is_whole = False

    def format_options(self, ctx: Any, formatter: Any) -> None:
        verb = ctx.command_path.removeprefix("tokenfleet ")
        if verb not in FIRST:
            super().format_options(ctx, formatter)
            return
        first = tuple(one.opts[0] for one in self.params) if self.is_whole else FIRST[verb]
        group_of = {flag: name for name, flags in GROUPS.items() for flag in flags}
        shown: dict[str, list[tuple[str, str]]] = {name: [] for name in (ARGUMENTS, *GROUPS, OTHER)}
        hidden = 0
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is None or one.name == "help":
                continue
            if not one.opts[0].startswith("-"):
                shown[ARGUMENTS].append(record)
            elif one.opts[0] in first:
                shown[group_of.get(one.opts[0], OTHER)].append(record)
            else:
                hidden += 1
        for name, records in shown.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: {ctx.command_path} --help-all")
