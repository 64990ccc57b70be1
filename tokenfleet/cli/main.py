"""`tokenfleet`: the table of verbs, the exit codes, and the options of every verb (`--config`, `--no-color`).

A verb's module, and all that reads flags, is imported only when a verb is used. So `tokenfleet --help`
answers at once.

Exit codes: 0 done, 1 ran but no feasible answer, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from controlplane.errors import ControlPlaneError, Infeasible
from tokenfleet.version import version_text

DONE, INFEASIBLE, BAD_INPUT, INTERNAL, INTERRUPTED = 0, 1, 2, 70, 130


class Verb(NamedTuple):
    """A verb: its function or Typer app in `module` of this package, and its line in the help."""

    module: str
    attribute: str
    help: str


VERBS = {
    "plan": Verb(".plan", "plan_command", "find the cheapest fleet for a trace and targets"),
    "whatif": Verb(".whatif", "whatif_command", "plan a grid of changes: rate, targets, GPUs, prices"),
    "portfolio": Verb(".plan", "portfolio_command", "plan several models on one budget"),
    "simulate": Verb(".simulate", "simulate_command", "replay a trace on a fleet that you name"),
    "profile": Verb(".profile", "profile_command", "measure the step times of a real engine"),
    "compare": Verb(".compare", "compare_command", "replay a trace on a running fleet and in the simulator"),
    "export": Verb(".export", "export_command", "write a plan for KubeRay, Helm, KEDA, Prometheus, systemd"),
    "fit": Verb(".fit", "fit_command", "fit a profile to measurements"),
    "calibrate": Verb(".calibrate", "calibrate_command", "correct a profile by a vLLM in service"),
    "advise": Verb(
        ".advise.command", "advise_command", "advise how many replicas a running vLLM fleet needs"
    ),
    "pick": Verb(".pick", "pick_command", "choose a vLLM server for each request of an Envoy gateway"),
    "trace": Verb(".trace", "trace_app", "check, make up or convert a trace"),
    "data": Verb(".data", "data_app", "keep prices and profiles of your own, with their dates"),
    "serve": Verb(".serve.command", "serve_command", "run a fleet behind one OpenAI endpoint"),
    "doctor": Verb(".doctor", "doctor_command", "check a host or a cluster before a fleet starts"),
    "scorecard": Verb(".scorecard", "scorecard_command", "compare a plan's prediction with what was served"),
    "scorecard accuracy": Verb(
        ".scorecard", "accuracy_command", "measure a profile's errors on your own runs"
    ),
    "scorecard gap": Verb(
        ".scorecard", "gap_command", "cost over the hindsight optimum by day, and its causes"
    ),
    "api": Verb(".api", "api_command", "serve plan jobs over HTTP, and the console"),
    "fleet": Verb(
        ".operate.changes", "fleet_app", "operate a running fleet: status, scale, drain, update, …"
    ),
}

_EPILOG = "Every verb takes --config FILE.yaml (its flags, without the dashes) and --no-color."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    return exit_code(lambda: _run(arguments))


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns, or the code of the error that it raises, which is printed on stderr."""
    try:
        return run()
    except Infeasible as error:
        return _fail(INFEASIBLE, str(error))
    except ControlPlaneError as error:
        return _fail(BAD_INPUT, str(error))
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader of our output went away (`| head`); stdout is closed so that exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(BAD_INPUT, f"{where}{error.strerror or error}")
    except Exception as error:
        import traceback

        import typer

        if isinstance(error, typer.Abort):
            return _interrupted()
        # Typer's own refusals (an unknown flag, say) carry a message; anything else is a fault of ours.
        message = getattr(error, "format_message", None)
        if message is not None:
            _name_options_of_that_word(error)
            told = message().replace("Value error, ", "").rstrip(".")
            told = re.sub("Input should be a valid .+, unable to parse string as", "expected", told)
            return _fail(BAD_INPUT, f"{told}{_value_refused(error, told)}{_way_out(error, told)}")
        traceback.print_exc()
        return _fail(
            INTERNAL, f"internal error ({type(error).__name__}); please report it with the lines above"
        )


def _interrupted() -> int:
    return _fail(INTERRUPTED, "interrupted; nothing was written")


def _run(arguments: list[str]) -> int:
    if "--no-color" in arguments[: _end_of_flags(arguments)]:
        arguments.remove("--no-color")
        os.environ["NO_COLOR"] = "1"  # Rich and Typer both read it
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_help())
        return DONE if arguments else BAD_INPUT
    if arguments[0] in ("--version", "-V"):
        print(version_text())
        return DONE
    words = 2 if " ".join(arguments[:2]) in VERBS else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name not in VERBS:
        from tokenfleet.field_errors import nearest

        return _fail(BAD_INPUT, f"{name}: no such verb{nearest(name, VERBS)}; `tokenfleet --help` lists them")
    from dataplane.startup import loading, use_kernel_cache
    from tokenfleet.cli.flags import take_option, with_config, with_new_names

    use_kernel_cache()
    with loading():
        command = command_of(VERBS[name])
    if not rest and hasattr(command, "commands"):  # as `tokenfleet` lists its verbs
        command.main(args=["--help"], prog_name=f"tokenfleet {name}", standalone_mode=False)
        return BAD_INPUT
    end = _end_of_flags(rest)
    command.is_whole = "--help-all" in rest[:end]
    rest = [*("--help" if word in ("-h", "--help-all") else word for word in rest[:end]), *rest[end:]]
    rest = with_new_names(command, rest)
    config, rest = take_option(rest, "--config")
    if config is not None:
        rest = with_config(command, config, rest)
    code = command.main(args=rest, prog_name=f"tokenfleet {name}", standalone_mode=False)
    if code == INTERRUPTED:  # Typer has caught Ctrl-C and says nothing
        raise KeyboardInterrupt
    return code if isinstance(code, int) else DONE


def command_of(verb: Verb) -> Any:
    """A verb as the Click command that Typer makes of it."""
    import typer

    from tokenfleet.cli.groups import GroupedCommand

    app = getattr(importlib.import_module(verb.module, "tokenfleet.cli"), verb.attribute)
    if not isinstance(app, typer.Typer):
        # Rich's help cuts the names of options short in a terminal of 80 columns.
        verb_app = typer.Typer(add_completion=False, rich_markup_mode=None)
        verb_app.command(cls=GroupedCommand, epilog=_EPILOG)(app)
        app = verb_app
    command = typer.main.get_command(app)
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = _with_examples(one.help or "")
    return command


def _with_examples(text: str) -> str:
    """A help text whose examples keep their lines: Click joins those of a paragraph without this mark."""
    paragraphs = text.split("\n\n")
    return "\n\n".join("\b\n" + part if "tokenfleet " in part else part for part in paragraphs)


def _help() -> str:
    lines = [
        "Usage: tokenfleet VERB [flags]      tokenfleet VERB --help (--help-all: every option)",
        "",
        "How few GPUs meet your latency targets, and the fleet that runs on them.",
        "",
        *(f"  {name:19} {verb.help}" for name, verb in VERBS.items()),
        "",
        _EPILOG,
        "Exit codes: 0 done, 1 no feasible answer, 2 bad input, 130 interrupted.",
    ]
    return "\n".join(lines)


def _end_of_flags(arguments: Sequence[str]) -> int:
    """The place of `--`, after which all words are engine flags."""
    return arguments.index("--") if "--" in arguments else len(arguments)


def _way_out(error: Exception, told: str) -> str:
    """Where to read what is missing, or where an option goes that is the group's and followed its command."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if context is None:
        return ""
    if told.startswith(("Missing", "No such command")):
        return f"; see `{context.command_path} --help`"
    group = context.parent
    if group is None or not any(option in parameter.opts for parameter in group.command.params):
        return ""
    return f"; it goes before the command: {group.command_path} {option} … {context.info_name}"


def _name_options_of_that_word(error: Any) -> None:
    """Let a refusal of `--rate` name `--request-rate`, which has that word, and not what is spelled alike."""
    if not hasattr(error, "possibilities") or error.ctx is None:
        return
    word, options = error.option_name.lstrip("-"), [o for p in error.ctx.command.params for o in p.opts]
    error.possibilities = [o for o in options if word in o.split("-")] or error.possibilities


def _value_refused(error: Exception, told: str) -> str:
    """`, got '99999'`: the value that Typer's refusal of a flag leaves out, where pydantic refused it."""
    from pydantic import ValidationError

    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return ""
    got = repr(str(cause.errors(include_url=False)[0]["input"]))
    return "" if got in told else f", got {got}"


def _fail(code: int, message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
