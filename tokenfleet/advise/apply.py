"""The advice applied: the number of replicas set by the Kubernetes API, or by a command of the operator's.

It sets the number that is published for a scaler (`Advice.published`), within floor and ceiling. While
metrics are missing it sets nothing. A dry run asks Kubernetes to check the change and not to make it; of a
command it prints the line.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import Any, Protocol

from controlplane.errors import BadInput
from tokenfleet.advise.advice import Advice, ScaleTarget
from tokenfleet.advise.kubernetes.cluster import ApiRefused, KubernetesApi

PLACE = "{replicas}"
COMMAND_S = 60.0
SCALERS = "/apis/autoscaling/v2"


class NotApplied(Exception):
    """Why a number of replicas was not set."""


class Replicas(Protocol):
    """A place that has a number of replicas."""

    async def current(self) -> int | None:
        """The number now; None where only the servers show it. Raises NotApplied, ApiRefused."""

    async def set(self, replicas: int, is_dry: bool) -> None:
        """Set it. Raises NotApplied, ApiRefused."""


class Applied:
    """Sets what each advice publishes for a type, by its place. `low`, `high`: never beyond."""

    def __init__(
        self, replicas: Replicas, name: str, low: int, high: int, is_dry: bool, kind: int = 0
    ) -> None:
        self._replicas, self._name, self._low, self._high, self._is_dry = replicas, name, low, high, is_dry
        self._kind = kind

    async def __call__(self, advice: Advice) -> str:
        """Set the number where it is another, and say what was done."""
        one = advice.of_types[self._kind]
        if advice.held:
            return f"{self._name} stays: metrics are missing"
        if one.published is None:
            return f"{self._name} stays: no advice yet"
        wanted = min(max(one.published, self._low), self._high)
        try:
            now = await self._replicas.current()
            now = one.has + one.starting if now is None else now
            if now == wanted:
                return f"{self._name} has {wanted}"
            if now == 0 and self._low > 0:
                return f"{self._name} has 0 replicas and stays switched off"
            await self._replicas.set(wanted, self._is_dry)
        except (NotApplied, ApiRefused) as why:
            return f"{self._name}: not applied: {why}"
        done = "would go" if self._is_dry else "goes"
        return f"{self._name} {done} from {now} to {wanted}" + ("; --yes applies it" if self._is_dry else "")


class KubernetesScale:
    """The `scale` of a Deployment or StatefulSet."""

    def __init__(self, api: KubernetesApi, target: ScaleTarget) -> None:
        self._api, self._target = api, target

    @property
    def _path(self) -> str:
        namespace, target = self._api.cluster.namespace, self._target
        return f"/apis/apps/v1/namespaces/{namespace}/{target.kind.lower()}s/{target.name}/scale"

    async def refuse_scaled(self) -> None:
        """Raise BadInput for a target that is not there, or that a HorizontalPodAutoscaler scales."""
        namespace = self._api.cluster.namespace
        try:
            await self.current()
        except (NotApplied, ApiRefused) as why:
            raise BadInput(f"--apply: {self._target} in {namespace}: {why}") from None
        try:
            found = await self._api.get(f"{SCALERS}/namespaces/{namespace}/horizontalpodautoscalers")
        except ApiRefused:
            return  # without the right to list them, there is nothing to find
        for one in found.get("items") or ():
            of = one.get("spec", {}).get("scaleTargetRef", {})
            if (of.get("kind"), of.get("name")) == (self._target.kind, self._target.name):
                name = one.get("metadata", {}).get("name", "")
                other = f"HorizontalPodAutoscaler {name} scales {self._target}"
                raise BadInput(f"--apply: {other}; use `export keda` instead")

    async def current(self) -> int | None:
        """The replicas that the object asks for."""
        return _count(await self._api.get(self._path))

    async def set(self, replicas: int, is_dry: bool) -> None:
        dry = {"dryRun": "All"} if is_dry else {}
        made = await self._api.patch(self._path, {"spec": {"replicas": replicas}}, **dry)
        if _count(made) != replicas:
            raise NotApplied(f"the cluster made it {_count(made)} instead of {replicas}")


class CommandScale:
    """A command of the operator's, with the number in place of {replicas}. It runs without a shell."""

    def __init__(self, command: str) -> None:
        self._words = shlex.split(command)
        self._last: int | None = None

    @property
    def name(self) -> str:
        """The program."""
        return self._words[0]

    async def current(self) -> int | None:
        return self._last

    async def set(self, replicas: int, is_dry: bool) -> None:
        if is_dry:
            return
        words = [word.replace(PLACE, str(replicas)) for word in self._words]
        try:
            ran = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            raise NotApplied(f"{words[0]}: {error.strerror}") from None
        try:
            async with asyncio.timeout(COMMAND_S):
                code = await ran.wait()
        except TimeoutError:
            ran.kill()
            await ran.wait()
            raise NotApplied(f"{words[0]} runs for more than {COMMAND_S:g} s and was stopped") from None
        if code != 0:
            raise NotApplied(f"{words[0]} ended with exit status {code}")
        self._last = replicas


def command_scale(text: str) -> CommandScale:
    """The command of `--apply`. Raises BadInput for what is neither a command nor a target."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"--apply: {text!r}: {error}") from None
    if not any(PLACE in word for word in words[1:]):
        raise BadInput(
            f"--apply: expected deployment/NAME, statefulset/NAME or a command with {PLACE}, got {text!r}"
        )
    return CommandScale(text)


def _count(scale: dict[str, Any]) -> int:
    replicas = scale.get("spec", {}).get("replicas", 0)  # the API leaves a zero out
    if not isinstance(replicas, int):
        raise NotApplied("the answer is no Scale of Kubernetes")
    return replicas
