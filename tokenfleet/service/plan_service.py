"""The plan service without HTTP: checks and queues orders, shows and cancels jobs.

It also lists what can be planned: models, kinds of worker, prices, policies and this fleet's history. HTTP is
in routes.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from controlplane.errors import BadInput, ControlPlaneError
from controlplane.placement.policies import policy_names
from controlplane.types import EngineMode
from dataplane.history.files import history_span
from dataplane.http.rules import Conflict, TooBusy, UnknownName
from tokenfleet.planning.inputs import chosen_profiles
from tokenfleet.planning.request import options
from tokenfleet.profiles.library import find_profiles, library
from tokenfleet.profiles.prices import Kind, read_prices
from tokenfleet.service import forms
from tokenfleet.service.data_folder import Database, made_folder
from tokenfleet.service.forks import fork
from tokenfleet.service.job_runner import JobRunner
from tokenfleet.service.jobs import PORTFOLIO, Jobs, Plans
from tokenfleet.service.score_process import scorecard_beside
from tokenfleet.service.uploads import SAMPLE, Uploads, sample_path, summary_of
from tokenfleet.traces import read_trace
from tokenfleet.traces.usage import DRAWN, SHAPES, trace_of_usage
from tokenfleet.version import VERSION

RETRY_AFTER_S = 10
KEPT_UPLOAD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds on what the service takes. `parallel` jobs run at a time, each on its share of the cores."""

    parallel: int = 1
    queued_jobs: int = 100
    job_timeout_s: float = 900.0
    upload_bytes: int = 64 << 20


class PlanService:
    """Plan jobs over one data folder."""

    def __init__(self, folder: Path, limits: ServiceLimits) -> None:
        """Open the folder. Raises BadInput where it cannot be used."""
        self.folder, self.limits = made_folder(folder), limits
        self._database = Database(folder / "tokenfleet.db")
        self.jobs, self.plans = Jobs(self._database), Plans(self._database)
        self.uploads = Uploads(folder / "uploads", self._database, KEPT_UPLOAD_BYTES)
        self._runner = JobRunner(folder, self.jobs, self.uploads, limits.parallel)
        self._scoring = Lock()
        self._fixed: dict[str, Any] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run jobs until left."""
        async with self._runner.running():
            yield

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def order(self, order: forms.PlanOrder, idempotency_key: str | None = None) -> dict[str, Any]:
        """Queue a job. Raises BadInput for what no plan can be made of, TooBusy when too many wait."""
        _check(order)
        trace = order.trace
        if order.bias_from not in (None, "last") and self.plans.text(order.bias_from or "") is None:
            raise UnknownName(f"bias_from: plan {order.bias_from}: no such plan is kept")
        upload = self._drawn(trace, order.seed) if isinstance(trace, forms.UsageTrace) else self._trace(trace)
        question = order.model_dump(mode="json", exclude={"timeout_s"})
        if isinstance(trace, forms.InlineTrace):  # kept once, not in every list of jobs
            question["trace"] = {"upload": upload["id"]}
        return self._queued(question, upload["id"], order.timeout_s, idempotency_key)

    def order_portfolio(
        self, order: forms.PortfolioOrder, idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Queue the job of a portfolio. Raises BadInput for what is none, TooBusy when too many wait."""
        for model in order.read().models:
            try:
                for request in model.asked:
                    if not request.profiles:
                        chosen_profiles(request)
            except ControlPlaneError as refusal:
                raise type(refusal)(f"portfolio: models: {model.name}: {refusal}") from None
        uploads = {}
        for name, source in order.traces.items():
            try:
                uploads[name] = self._trace(source)["id"]
            except (BadInput, UnknownName) as refusal:
                raise type(refusal)(f"traces: {name}: {refusal}") from None
        question = order.model_dump(mode="json", exclude={"timeout_s"})
        question["traces"] = {name: {"upload": upload} for name, upload in uploads.items()}
        return self._queued(question, next(iter(uploads.values())), order.timeout_s, idempotency_key)

    def _queued(
        self, question: dict[str, Any], upload: str, asked_s: float | None, idempotency_key: str | None
    ) -> dict[str, Any]:
        timeout_s = min(asked_s or self.limits.job_timeout_s, self.limits.job_timeout_s)
        job = self.jobs.add(question, upload, timeout_s, self.limits.queued_jobs, idempotency_key)
        if job is None:
            raise TooBusy(f"{self.limits.queued_jobs} plans wait already", RETRY_AFTER_S)
        if (PORTFOLIO in job["question"]) != (PORTFOLIO in question):
            raise Conflict("idempotency-key: is that of a job of another kind")
        return job

    def job(self, name: str, kind: str = "plan") -> dict[str, Any]:
        """A job of a plan, or of a portfolio, without its answer. Raises UnknownName."""
        job = self.jobs.find(name)
        if job is None or (PORTFOLIO in job["question"]) != (kind == PORTFOLIO):
            raise UnknownName(f"{kind} {name}: there is no such job")
        return job

    def cancel(self, name: str, kind: str = "plan") -> dict[str, Any]:
        """Cancel a job. Raises UnknownName, or Conflict for one that is over otherwise."""
        self.job(name, kind)
        self.jobs.cancel(name)
        job = self.job(name, kind)
        if job["state"] in forms.OVER and job["state"] != "cancelled":
            raise Conflict(f"{kind} {name}: is {job['state']} already; what is over is kept")
        return job

    def scorecard(self, plan: str) -> dict[str, Any]:
        """A kept plan's scorecard. Raises UnknownName, Conflict for a job without a plan, TooBusy."""
        if plan != "last" and self.plans.text(plan) is None:
            job = self.jobs.find(plan)
            if job is not None:
                raise Conflict(f"plan {plan}: the job is {job['state']} and has no plan")
            raise UnknownName(f"plan {plan}: no such plan is kept")
        if not self._scoring.acquire(blocking=False):
            raise TooBusy("another scorecard is being made", RETRY_AFTER_S)
        try:
            return scorecard_beside(self.folder, plan)
        finally:
            self._scoring.release()

    def catalogue(self) -> dict[str, Any]:
        """The models, workers, prices and policies of plans here (forms.Catalogue)."""
        if self._fixed is None:
            sample = sample_path()
            self._fixed = {
                "version": VERSION,
                "models": known_models(),
                "gpus": known_gpus(),
                "options": known_options(),
                "policies": policy_names(),
                "shapes": {name: shape.about for name, shape in SHAPES.items()},
                "engine_modes": [str(mode) for mode in EngineMode],
                "sample": None
                if sample is None
                else summary_of(read_trace(sample), "sample", SAMPLE, sample.stat().st_size),
                "limits": asdict(self.limits),
            }
        return {**self._fixed, "history": self._history()}

    def _history(self) -> dict[str, Any]:
        try:
            requests, first_s, last_s = history_span(self.folder / "history")
        except OSError:  # a segment was packed or let go of meanwhile
            requests, first_s, last_s = history_span(self.folder / "history")
        return {"requests": requests, "first_s": first_s, "last_s": last_s}

    def _fork(self, since: str) -> dict[str, Any]:
        """The last `since` of this fleet's history as a kept trace."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            try:
                forked = fork(self.folder, since, time.time(), Path(scratch))
            except BadInput as error:
                raise BadInput(f"trace: {str(error).removeprefix('--')}") from None
            return self.uploads.keep(forked.path, forked.name, forked.warnings)

    def _drawn(self, source: forms.UsageTrace, seed: int) -> dict[str, Any]:
        """The summary of a drawn trace. Its answers are kept as its file, and its job draws it again."""
        try:
            drawn = trace_of_usage(source.usage(), seed)
        except BadInput as refusal:
            raise BadInput(forms.in_field_names(str(refusal))) from None
        return self.uploads.keep_text(f"{seed} {source.model_dump_json()}", drawn.name, drawn)

    def _trace(self, source: forms.Source) -> dict[str, Any]:
        """The summary of an order's trace, which lies in the folder from now on."""
        if isinstance(source, forms.UploadedTrace):
            found = self.uploads.find(source.upload)
            if found["format"] == DRAWN:
                raise BadInput(f"trace: {source.upload} was drawn for {found['name']}; order that again")
            return found
        if isinstance(source, forms.InlineTrace):
            return self.uploads.keep_text(source.inline_csv, "inline trace")
        if isinstance(source, forms.HistoryTrace):
            return self._fork(source.since)
        sample = sample_path()
        if sample is None:
            raise BadInput("trace: sample: the sample trace is not installed here")
        return self.uploads.keep_text(sample.read_text(encoding="utf-8"), SAMPLE)


def _check(order: forms.PlanOrder) -> None:
    """Raise BadInput or ProfileMissing for what the planner would refuse before it reads the trace."""
    try:
        request = order.request().consistent()
        if not request.profiles:
            chosen_profiles(request)
    except ControlPlaneError as refusal:
        raise type(refusal)(forms.in_field_names(str(refusal))) from None


def known_options() -> list[dict[str, Any]]:
    """Every option of a plan (forms.KnownOption)."""
    return [
        {
            "name": option.field,
            "flag": option.flag,
            "key": option.key,
            "label": option.about.name,
            "help": option.about.help,
            "kind": option.kind,
            "is_list": option.is_list,
            "default": None if option.is_required else option.default,
            "choices": option.choices,
            "bounds": option.bounds,
            "needs": option.about.needs,
        }
        for option in options()
    ]


def known_models() -> list[dict[str, Any]]:
    """The library's models, each with the kinds of worker a plan looks at unless told otherwise."""
    models = []
    for name in sorted({profile.model for profile in library()}):
        profiles = find_profiles(name)
        kinds = [
            {
                "gpu": p.gpu,
                "tp_degree": p.tp_degree,
                "measured": str(p.source.kind),
                "date": str(p.source.date),
                "engine_mode": str(p.engine.mode),
                "kv_tokens": p.kv.capacity_tokens,
            }
            for p in profiles
        ]
        limit = min((p.context_limit_tokens for p in profiles if p.context_limit_tokens), default=None)
        models.append({"name": name, "context_limit_tokens": limit, "kinds": kinds})
    return models


def known_gpus() -> list[dict[str, Any]]:
    """Every GPU with a profile or a price, and what it costs."""
    prices = read_prices()
    names = sorted({profile.gpu for profile in library()} | set(prices.gpus))

    def price(gpu: str, kind: Kind) -> dict[str, Any] | None:
        usd = prices.usd_per_gpu_h(gpu, kind)
        if usd is None:
            return None
        dated = {"date": usd.date.isoformat(), "source": usd.source, "is_own": bool(prices.whose)}
        return {"usd_per_gpu_h": usd.usd, **dated}

    return [{"name": gpu, "on_demand": price(gpu, "on_demand"), "spot": price(gpu, "spot")} for gpu in names]
