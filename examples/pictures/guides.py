"""The guides' small drawings: parts, and what passes between them. draw.py writes them to docs/pictures/."""

from __future__ import annotations

from dataclasses import dataclass

from draw import INK, ORANGE, box, drawing, path, text

LEFT_PX, TOP_PX = 24, 62
ACROSS_PX, DOWN_PX = 322, 116
WIDE_PX, HIGH_PX = 206, 84


@dataclass(frozen=True)
class Part:
    """A box at a column and a row, with lines on what it does."""

    column: float
    row: float
    name: str
    lines: tuple[str, ...] = ()

    @property
    def x(self) -> float:
        """Its left edge."""
        return LEFT_PX + ACROSS_PX * self.column

    @property
    def y(self) -> float:
        """Its upper edge."""
        return TOP_PX + DOWN_PX * self.row


@dataclass(frozen=True)
class Pass:
    """What passes from one part to another; a second thing that passes is drawn in orange."""

    source: str
    target: str
    says: str = ""
    second: bool = False
    shift_px: float = 0


def flow(title: str, parts: list[Part], passes: list[Pass]) -> str:
    """A drawing of parts in columns and rows, with an arrow for all that passes."""
    named = {part.name: part for part in parts}
    lines = [arrow(named[p.source], named[p.target], p) for p in passes]
    boxes = [box(p.x, p.y, WIDE_PX, HIGH_PX, p.name, *p.lines) for p in parts]
    right = max(part.x for part in parts) + WIDE_PX + LEFT_PX
    low = max(part.y for part in parts) + HIGH_PX + 24
    says = "; ".join(f"{p.source} to {p.target}{': ' + p.says if p.says else ''}" for p in passes)
    return drawing(
        round(right), round(low), title, says, [text(24, 36, title, 17, INK, weight=700), *boxes, *lines]
    )


def arrow(a: Part, b: Part, passed: Pass) -> str:
    """An arrow between the nearest edges of two parts, with its label."""
    shift = passed.shift_px
    if a.column == b.column:
        x = a.x + WIDE_PX / 2 + shift
        down = b.row > a.row
        from_x, to_x = x, x
        from_y, to_y = (a.y + HIGH_PX, b.y - 4) if down else (a.y, b.y + HIGH_PX + 4)
        label = text(x + 8, (from_y + to_y) / 2 + 4, passed.says, 12, ORANGE if passed.second else INK)
    else:
        right = b.column > a.column
        from_x, to_x = (a.x + WIDE_PX, b.x - 4) if right else (a.x, b.x + WIDE_PX + 4)
        from_y, to_y = a.y + HIGH_PX / 2 + shift, b.y + HIGH_PX / 2 + shift
        middle = (from_x + to_x) / 2, (from_y + to_y) / 2 - 6
        label = text(*middle, passed.says, 12, ORANGE if passed.second else INK, "middle")
    colour, head = (ORANGE, "back") if passed.second else (INK, "arrow")
    return path(f"M{from_x:g} {from_y:g}L{to_x:g} {to_y:g}", colour, 1.6, head=head) + label


def agents() -> str:
    """Turns of a session, which wait for each other and share their prompts."""
    turns = [
        Part(0, 0, "Turn 1", ("prompt A", "answer B")),
        Part(1, 0, "Turn 2", ("prompt A, B, C", "A and B are cached")),
        Part(2, 0, "Turn 3", ("prompt A to E", "A to D are cached")),
    ]
    return flow(
        "A session: each turn waits for the answer before it",
        turns,
        [Pass("Turn 1", "Turn 2", "answer, think_s"), Pass("Turn 2", "Turn 3", "answer, think_s")],
    )


def already_run() -> str:
    """A fleet that stays, and what reads and scales it."""
    return flow(
        "Your gateway and your vLLM servers stay",
        [
            Part(0, 0, "Your gateway", ("unchanged",)),
            Part(1, 0, "vLLM servers", ("any number, on any host,", "in pods or processes")),
            Part(1, 1, "tokenfleet advise", ("reads /metrics every 5 s", "has 8, wants 5")),
            Part(2, 1, "KEDA, or --apply", ("follows the advice within", "your floor and ceiling")),
        ],
        [
            Pass("Your gateway", "vLLM servers", "requests"),
            Pass("vLLM servers", "tokenfleet advise", "metrics", True),
            Pass("tokenfleet advise", "KEDA, or --apply", "replicas"),
        ],
    )


def ways_in() -> str:
    """Platforms, and what they give and take."""
    return flow(
        "A platform gives metrics and takes a number of replicas",
        [
            Part(0, 0, "Platform", ("llm-d, KServe, Dynamo,", "production-stack")),
            Part(1, 0, "tokenfleet advise", ("--pool, --selector,", "--prometheus")),
            Part(2, 0, "Its scaler", ("KEDA, a Deployment, or", "a command of yours")),
            Part(1, 1, "tokenfleet pick", ("InferencePools and Envoy", "alone")),
        ],
        [
            Pass("Platform", "tokenfleet advise", "vllm: metrics"),
            Pass("tokenfleet advise", "Its scaler", "replicas"),
            Pass("tokenfleet pick", "Platform", "a server for each", True),
        ],
    )


def caches() -> str:
    """Placement by cached prefix, and evicted blocks that come back from host memory."""
    return flow(
        "Prefix caches: placed by what is cached, reloaded from host memory",
        [
            Part(0, 0.5, "Gateway", ("knows the blocks of", "each worker's cache")),
            Part(1, 0, "Worker w0", ("has most of the prompt", "cached")),
            Part(1, 1, "Worker w1", ("has nothing of it", "cached")),
            Part(2, 0, "Host memory", ("--host-kv", "evicted blocks")),
        ],
        [
            Pass("Gateway", "Worker w0", "request"),
            Pass("Worker w1", "Gateway", "KV events", True, 14),
            Pass("Worker w0", "Host memory", "evict", shift_px=-16),
            Pass("Host memory", "Worker w0", "load", True, 18),
        ],
    )


def classes() -> str:
    """Two classes in one queue and on all workers."""
    return flow(
        "Two classes share every worker",
        [
            Part(0, 0, "chat", ("ttft=400ms, tpot=30ms",)),
            Part(0, 1, "batch", ("deadline=6h",)),
            Part(1, 0.5, "Queue", ("ordered by deadline", "one for all classes")),
            Part(2, 0, "Worker 1", ("batch leaves 35 % to chat", "at first, later less")),
            Part(2, 1, "Worker 2", ("batch leaves 35 % to chat", "at first, later less")),
        ],
        [
            Pass("chat", "Queue", "due in 400 ms"),
            Pass("batch", "Queue", "due in 6 h", True),
            Pass("Queue", "Worker 1"),
            Pass("Queue", "Worker 2"),
        ],
    )


def history() -> str:
    """The record of a fleet, and the commands that read it."""
    return flow(
        "A fleet's record and the commands that read it",
        [
            Part(0, 1, "serve --history", ("times, token counts,", "latencies; no texts")),
            Part(1, 0, "history/", ("a row for each request",)),
            Part(1, 1, "fleet-DATE.jsonl", ("workers by state, and", "what the rule asked for")),
            Part(1, 2, "steps.csv", ("step times",)),
            Part(2, 0, "plan --since 1h", ("the next plan",)),
            Part(2, 1, "scorecard gap", ("cost over the optimum",)),
            Part(2, 2, "fit", ("a measured profile",)),
        ],
        [
            Pass("serve --history", "history/"),
            Pass("serve --history", "fleet-DATE.jsonl"),
            Pass("serve --history", "steps.csv"),
            Pass("history/", "plan --since 1h"),
            Pass("fleet-DATE.jsonl", "scorecard gap"),
            Pass("history/", "scorecard gap"),
            Pass("steps.csv", "fit"),
        ],
    )


def measure() -> str:
    """Four ways to a profile."""
    return flow(
        "Four ways to step times, and the plan that uses them",
        [
            Part(0, 0, "A GPU to test on", ("profile, then fit",)),
            Part(0, 1, "A Tokenfleet fleet", ("its steps.csv, then fit",)),
            Part(0, 2, "vLLM in production", ("its metrics or access log,", "then calibrate")),
            Part(0, 3, "No GPU", ("profile --predict",)),
            Part(1, 1, "Profile", ("step times of a model", "on a GPU type")),
            Part(2, 1, "plan --profile", ("a fleet for your trace",)),
        ],
        [
            Pass("A GPU to test on", "Profile", "measured"),
            Pass("A Tokenfleet fleet", "Profile", "measured"),
            Pass("vLLM in production", "Profile", "corrected"),
            Pass("No GPU", "Profile", "predicted", True),
            Pass("Profile", "plan --profile"),
        ],
    )


def models() -> str:
    """A LoRA adapter is on one worker, until that has four requests more than another."""
    return flow(
        "An adapter is loaded where its requests go",
        [
            Part(0, 0.5, "Gateway", ("/v1/models lists", "model and adapters")),
            Part(1, 0, "Worker w0", ("loads the adapter when", "a request names it")),
            Part(1, 1, "Worker w1", ("loads it once w0 has", "four requests more")),
        ],
        [
            Pass("Gateway", "Worker w0", "adapter"),
            Pass("Gateway", "Worker w1", "other requests"),
        ],
    )


def prefill_and_decode() -> str:
    """Two pools, and the KV that goes from one to the other."""
    return flow(
        "A request starts on a prefill worker and ends on a decode worker",
        [
            Part(0, 0.5, "Gateway", ("one stream to the client",)),
            Part(1, 0.5, "Prefill worker", ("computes the prompt and", "the first token")),
            Part(2, 0, "Decode worker 1", ("computes all other tokens",)),
            Part(2, 1, "Decode worker 2", ("computes all other tokens",)),
        ],
        [
            Pass("Gateway", "Prefill worker", "new request"),
            Pass("Prefill worker", "Decode worker 1", "KV, by chunks", True),
            Pass("Prefill worker", "Decode worker 2"),
        ],
    )


def scaling() -> str:
    """The loop of the autoscaler."""
    return flow(
        "Arrivals, not completions, size the fleet",
        [
            Part(0, 0, "Arrivals", ("rate and lengths,", "by SLO class")),
            Part(1, 0, "Scaling rule", ("workers for this rate,", "within MIN..MAX")),
            Part(2, 0, "Workers", ("up at once; down after", "--scale-in-after")),
            Part(1, 1, "Requests in time", ("observed against the", "promised share")),
        ],
        [
            Pass("Arrivals", "Scaling rule"),
            Pass("Scaling rule", "Workers", "launch, drain"),
            Pass("Workers", "Requests in time", "", True),
            Pass("Requests in time", "Scaling rule", "corrects it, 0.5 to 2 times", True),
        ],
    )


def secure() -> str:
    """Who talks to whom, and by what each is admitted and encrypted."""
    return flow(
        "Who talks to whom, and how it is protected",
        [
            Part(0, 0, "Clients", ("--api-key, --api-keys",)),
            Part(0, 1, "Operators", ("--control-key",)),
            Part(1, 0.5, "Gateway", ("endpoint and control API", "--tls-cert, --tls-key")),
            Part(2, 0, "Worker w0", ("on one host",)),
            Part(2, 1, "Worker w1", ("on another host",)),
        ],
        [
            Pass("Clients", "Gateway", "HTTPS, port 8000"),
            Pass("Operators", "Gateway", "HTTPS, port 8001"),
            Pass("Gateway", "Worker w0", "CURVE"),
            Pass("Gateway", "Worker w1", "CURVE"),
            Pass("Worker w0", "Worker w1", "KV, TLS 1.3", True),
        ],
    )


def several_hosts() -> str:
    """A gateway, nodes, and what passes between them."""
    return flow(
        "One fleet on several hosts",
        [
            Part(0, 0.5, "tokenfleet serve", ("on a node of the cluster,", "with RAY_ADDRESS")),
            Part(1, 0, "Node A", ("workers at the node's", "address; same model path")),
            Part(1, 1, "Node B", ("given up after 10 s", "without an answer")),
        ],
        [
            Pass("tokenfleet serve", "Node A", "requests, tokens"),
            Pass("tokenfleet serve", "Node B", "requests, tokens"),
            Pass("Node A", "Node B", "KV of moves", True),
        ],
    )


def several_models() -> str:
    """One endpoint, a fleet for each model, and the limits that they share."""
    return flow(
        "One endpoint, a fleet for each model, shared limits",
        [
            Part(0, 0.5, "Endpoint", ("the field model chooses;", "another name is a 404")),
            Part(1, 0, "Fleet of chat", ("own workers, queue,", "targets, autoscaler")),
            Part(1, 1, "Fleet of code", ("own workers, queue,", "targets, autoscaler")),
            Part(2, 0.5, "Shared limits", ("guaranteed quota each;", "GPUs move by drain, start")),
        ],
        [
            Pass("Endpoint", "Fleet of chat", "model: chat"),
            Pass("Endpoint", "Fleet of code", "model: code"),
            Pass("Shared limits", "Fleet of chat", "GPUs", True),
            Pass("Shared limits", "Fleet of code", "GPUs", True),
        ],
    )


def spot() -> str:
    """A notice, the evacuation by its deadline, and the replacement."""
    return flow(
        "A spot machine goes away: its worker is empty by the deadline",
        [
            Part(0, 0, "Cloud", ("interruption notice,", "with a deadline")),
            Part(1, 0, "Worker w0", ("its machine reads the", "notice: evacuated")),
            Part(2, 0, "Worker w1", ("takes them: moved with KV", "or computed again")),
            Part(1, 1, "Worker w2", ("launched in w0's place",)),
        ],
        [
            Pass("Cloud", "Worker w0", "notice"),
            Pass("Worker w0", "Worker w1", "its requests"),
            Pass("Worker w0", "Worker w2", "another is launched", True),
        ],
    )


def scorecard() -> str:
    """Predicted and observed, and what goes back."""
    return flow(
        "A plan's prediction is compared with what was served",
        [
            Part(0, 0, "Plan", ("predicted TTFT, TPOT,", "attainment, capacity")),
            Part(1, 0, "Fleet", ("serve --plan --history", "records requests")),
            Part(2, 0, "scorecard", ("predicted and observed,", "and the replay's error")),
            Part(1, 1, "Next plan", ("plan --bias-from last", "plan --since 1h")),
        ],
        [
            Pass("Plan", "Fleet", "plan.json"),
            Pass("Fleet", "scorecard", "history"),
            Pass("scorecard", "Next plan", "bias", True),
            Pass("Fleet", "Next plan", "traffic", True),
        ],
    )


def advise_scaling() -> str:
    """The advice, and the three that may set the replicas."""
    return flow(
        "tokenfleet advise publishes a number; one of three sets it",
        [
            Part(0, 1, "tokenfleet advise", ("has 8, wants 5", "replicas")),
            Part(1, 0, "Prometheus, KEDA", ("tokenfleet_wanted_replicas", "through a ScaledObject")),
            Part(1, 1, "KEDA", ("an external scaler,", "without Prometheus")),
            Part(1, 2, "--apply", ("a Deployment, or a", "command of yours")),
            Part(2, 1, "vLLM servers", ("within your floor", "and ceiling")),
        ],
        [
            Pass("tokenfleet advise", "Prometheus, KEDA", "--listen"),
            Pass("tokenfleet advise", "KEDA", "--scaler"),
            Pass("tokenfleet advise", "--apply", ""),
            Pass("Prometheus, KEDA", "vLLM servers", "replicas"),
            Pass("KEDA", "vLLM servers", "replicas"),
            Pass("--apply", "vLLM servers", "replicas"),
        ],
    )


def export() -> str:
    """A plan's files, and what runs or reads them."""
    return flow(
        "tokenfleet export writes a plan as files for what you run",
        [
            Part(0, 1, "plan.json", ("fleet, step times,", "targets, schedule")),
            Part(1, 0, "kuberay, systemd", ("carry the plan itself",)),
            Part(1, 1, "production-stack, keda", ("carry its numbers",)),
            Part(1, 2, "prometheus, grafana", ("carry its targets",)),
            Part(2, 0, "serve --plan", ("places and scales by", "the plan's code")),
            Part(2, 1, "Your vLLM pods", ("their own router, or", "yours")),
            Part(2, 2, "Your monitoring", ("alerts, dashboard",)),
        ],
        [
            Pass("plan.json", "kuberay, systemd"),
            Pass("plan.json", "production-stack, keda"),
            Pass("plan.json", "prometheus, grafana"),
            Pass("kuberay, systemd", "serve --plan", "start"),
            Pass("production-stack, keda", "Your vLLM pods", "configure"),
            Pass("prometheus, grafana", "Your monitoring", "watch"),
        ],
    )


def http() -> str:
    """A plan as a job: its trace, its events and its answer."""
    return flow(
        "A plan over HTTP is a job that survives restarts",
        [
            Part(0, 0, "POST /v1/traces", ("uploads a trace,", "answers its id")),
            Part(1, 0, "POST /v1/plans", ("orders a plan,", "answers the job's id")),
            Part(2, 0, "GET /v1/plans/JOB", ("state, then the", "whole plan")),
            Part(1, 1, "tokenfleet api", ("plans in a process", "of its own")),
            Part(2, 1, "GET …/JOB/events", ("progress, as a stream",)),
        ],
        [
            Pass("POST /v1/traces", "POST /v1/plans", "id"),
            Pass("POST /v1/plans", "GET /v1/plans/JOB", "JOB"),
            Pass("POST /v1/plans", "tokenfleet api"),
            Pass("tokenfleet api", "GET …/JOB/events", "", True),
        ],
    )


GUIDES = {
    "advise-scaling.svg": advise_scaling,
    "agents.svg": agents,
    "already-run-vllm.svg": already_run,
    "caches.svg": caches,
    "classes.svg": classes,
    "export.svg": export,
    "history.svg": history,
    "http.svg": http,
    "measure-your-gpu.svg": measure,
    "models.svg": models,
    "prefill-and-decode.svg": prefill_and_decode,
    "scaling.svg": scaling,
    "scorecard.svg": scorecard,
    "secure.svg": secure,
    "several-hosts.svg": several_hosts,
    "several-models.svg": several_models,
    "spot.svg": spot,
    "ways-in.svg": ways_in,
}
