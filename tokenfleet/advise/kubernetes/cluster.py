"""The Kubernetes API that is asked: from a kubeconfig, or from inside a pod.

`KUBECONFIG` comes first, then the pod's service account, then `~/.kube/config`. Tokens in files are read at
each request, as Kubernetes renews them. Commands that make tokens (`exec`) are not run: `kubectl proxy` and
a kubeconfig with its address stand in for them.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from controlplane.errors import BadInput
from tokenfleet.field_errors import load_yaml, read_text

POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
MOST_LINE = 16 << 20  # bytes of one event of a watch


class ApiRefused(Exception):
    """Why the API did not do what was asked. `status`: HTTP's, 0 where nothing answered."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API is, and who asks. `token` stands before `token_file`."""

    server: str
    namespace: str = "default"
    tls: ssl.SSLContext | None = None
    token: str = ""
    token_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """The header with the newest token. Raises BadInput where its file cannot be read."""
        token = self.token or ("" if self.token_file is None else read_text(self.token_file).strip())
        return {"Authorization": f"Bearer {token}"} if token else {}


def found_cluster(
    namespace: str | None = None, env: Mapping[str, str] = os.environ, folder: Path = POD_FOLDER
) -> ApiServer:
    """The cluster that the surroundings name. Raises BadInput where there is none."""
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
    given = env.get("KUBECONFIG")
    if not given and host and (folder / "token").exists():
        here = f"[{host}]" if ":" in host else host
        own = read_text(folder / "namespace").strip() if (folder / "namespace").exists() else "default"
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        return ApiServer(f"https://{here}:{port}", namespace or own, tls, token_file=folder / "token")
    path = Path(given.partition(os.pathsep)[0]) if given else Path.home() / ".kube" / "config"
    if not path.exists():
        raise BadInput(f"{path}: no kubeconfig, and this is no pod with a service account; set KUBECONFIG")
    return _of_kubeconfig(path, namespace)


class KubernetesApi:
    """A session with a cluster's API."""

    def __init__(self, cluster: ApiServer) -> None:
        self.cluster = cluster
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> KubernetesApi:
        self._session = aiohttp.ClientSession(read_bufsize=MOST_LINE)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """An object or a list. Raises ApiRefused."""
        return await self._asked("GET", path, params)

    async def patch(self, path: str, change: Mapping[str, Any], **params: str) -> dict[str, Any]:
        """Change an object by a merge patch. Raises ApiRefused."""
        kind = {"Content-Type": "application/merge-patch+json"}
        return await self._asked("PATCH", path, params, json.dumps(change), kind)

    async def watch(self, path: str, seconds: int, **params: str) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a watch until it ends, after `seconds` at the latest. Raises ApiRefused."""
        asked = params | {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        waits = aiohttp.ClientTimeout(total=seconds + TIMEOUT_S, sock_connect=TIMEOUT_S)
        async with self._reply("GET", path, asked, waits=waits) as reply:
            async for line in reply.content:
                if line.strip():
                    yield _document(line)

    async def _asked(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        async with self._reply(method, path, params, body, headers) as reply:
            return _document(await reply.read())

    def _reply(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
        waits: aiohttp.ClientTimeout | None = None,
    ) -> _ApiReply:
        assert self._session is not None
        cluster = self.cluster
        try:
            own = cluster.headers()
        except BadInput as missing:
            raise ApiRefused(str(missing)) from None
        asked = self._session.request(
            method,
            f"{cluster.server}{path}",
            params=params,
            data=body,
            headers={**own, **(headers or {})},
            ssl=cluster.tls if cluster.tls is not None else True,
            timeout=waits or aiohttp.ClientTimeout(total=TIMEOUT_S),
            allow_redirects=False,
        )
        return _ApiReply(asked, cluster.server)


class _ApiReply:
    """An answer of the API; what is no good answer becomes ApiRefused, also while it is read."""

    def __init__(self, asked: Any, server: str) -> None:
        self._asked, self._server = asked, server

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            reply: aiohttp.ClientResponse = await self._asked.__aenter__()
            if reply.status >= 300:
                body = await reply.read()
                await self._asked.__aexit__(None, None, None)
                raise ApiRefused(_refusal(reply.status, body), reply.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._lost(error) from None
        return reply

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self._asked.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
            raise self._lost(error) from None

    def _lost(self, error: BaseException) -> ApiRefused:
        if isinstance(error, TimeoutError):
            return ApiRefused(f"{self._server} does not answer in time")
        return ApiRefused(f"{self._server} does not answer: {getattr(error, 'strerror', None) or error}")


def _document(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ApiRefused("the answer is no object of Kubernetes")
    return document


def _refusal(status: int, body: bytes) -> str:
    """The API's own message, or its status."""
    try:
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        said = ""
    return f"{said} (status {status})" if isinstance(said, str) and said else f"answers with status {status}"


def _of_kubeconfig(path: Path, namespace: str | None) -> ApiServer:
    """The current context of a kubeconfig. Raises BadInput."""
    config = load_yaml(read_text(path), str(path))
    if not isinstance(config, dict):
        raise BadInput(f"{path}: not a kubeconfig")
    context = _named(config, "context", config.get("current-context"), path)
    cluster = _named(config, "cluster", context.get("cluster"), path)
    user = _named(config, "user", context["user"], path) if context.get("user") else {}
    server = str(cluster.get("server", "")).rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise BadInput(f"{path}: cluster: server: expected an http:// or https:// address, got {server!r}")
    known = {"token", "tokenFile", "client-certificate", "client-certificate-data"}
    if user and not known & user.keys():
        raise BadInput(f"{path}: user: no token and no client certificate; `kubectl proxy` helps for others")
    files = path.parent
    token_file = user.get("tokenFile")
    return ApiServer(
        server,
        namespace or str(context.get("namespace") or "default"),
        _tls(cluster, user, files) if server.startswith("https://") else None,
        str(user.get("token", "")),
        None if token_file is None else files / str(token_file),
    )


def _named(config: Mapping[str, Any], kind: str, name: object, path: Path) -> dict[str, Any]:
    listed = config.get(f"{kind}s")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and one.get("name") == name and isinstance(one.get(kind), dict):
            found: dict[str, Any] = one[kind]
            return found
    raise BadInput(f"{path}: {kind}: {name!r} is not there")


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], files: Path) -> ssl.SSLContext:
    """Trust in the cluster's certificate, and the user's own. Raises BadInput."""
    try:
        tls = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority", files))
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        own, key = _pem(user, "client-certificate", files), _pem(user, "client-key", files)
        if own is not None and key is not None:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as both:  # which ssl reads from a file alone
                both.write(f"{own}\n{key}\n")
                both.flush()
                tls.load_cert_chain(both.name)
    except (ssl.SSLError, OSError, ValueError, binascii.Error) as error:
        raise BadInput(f"kubeconfig: its certificates cannot be read: {error}") from None
    return tls


def _pem(holder: Mapping[str, Any], key: str, files: Path) -> str | None:
    """A certificate or key, from the file or from the text of a kubeconfig."""
    if (text := holder.get(f"{key}-data")) is not None:
        return base64.b64decode(str(text), validate=True).decode()
    return None if (name := holder.get(key)) is None else read_text(files / str(name))
