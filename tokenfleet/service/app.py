"""The plan service as an application of its own: `tokenfleet api`, planning without a fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest

from dataplane.live.extension import Extension
from dataplane.live.http_rules import ERRORS, OPEN_PATHS, documented_key, keep_house_rules

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def plan_app(key: str | None, extensions: Sequence[Extension]) -> FastAPI:
    """The application; `key` None lets loopback callers in without one."""
    registry = CollectorRegistry()
    for extension in extensions:
        for collector in extension.collectors:
            registry.register(collector)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            for extension in extensions:
                await cleanup.enter_async_context(extension.running())
            yield

    app = FastAPI(
        title="Tokenfleet plans",
        version="1",
        responses=ERRORS,
        docs_url="/docs",
        redoc_url=None,
        lifespan=running,
        dependencies=documented_key(key),
    )
    keep_house_rules(
        app,
        key,
        OPEN_PATHS.union(*(extension.open_paths for extension in extensions)),
        {path: most for extension in extensions for path, most in extension.body_bytes.items()},
    )

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(registry), media_type=EXPOSITION)

    @app.get("/health")
    def health() -> dict[str, str]:
        """Whether this process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    def ready() -> dict[str, str]:
        """Whether plans can be ordered; the service answers nothing before, so this is it."""
        return {"status": "ready"}

    for extension in extensions:
        for router in extension.routers:
            app.include_router(router)
    return app
