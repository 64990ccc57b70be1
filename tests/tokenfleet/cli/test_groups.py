"""Long verbs show a dozen options in groups; --help-all shows every one."""

import re

import pytest

from tokenfleet.cli.groups import FIRST, GROUPS
from tokenfleet.cli.main import VERBS, command_of, main

MOST = 15


def flags(text):
    """The options of a help text: they stand below its first group."""
    options = text[re.search(r"^[A-Z][a-z ]+:$", text, re.MULTILINE).end() :]
    return set(re.findall(r"^  (--[a-z0-9-]+)(?![a-z0-9.-])", options, re.MULTILINE))


@pytest.mark.parametrize("verb", FIRST)
def test_help_shows_the_first_options_and_how_to_see_all(verb, capsys):
    main([verb, "--help"])
    short = capsys.readouterr().out
    shown = flags(short)
    assert shown == set(FIRST[verb])
    assert len(shown) <= MOST
    assert f"more options: tokenfleet {verb} --help-all" in short
    main([verb, "--help-all"])
    whole = capsys.readouterr().out
    assert flags(whole) == {one.opts[0] for one in command_of(VERBS[verb]).params if one.opts[0][:2] == "--"}
    assert "--help-all" not in whole


def test_an_option_is_in_one_group_and_is_one_of_a_verb():
    grouped = [flag for group in GROUPS.values() for flag in group]
    assert len(grouped) == len(set(grouped))
    known = {flag for verb in FIRST for one in command_of(VERBS[verb]).params for flag in one.opts}
    assert set(grouped) <= known


def test_help_all_of_a_short_verb_and_of_a_command_in_a_verb_is_its_help(capsys):
    for words in (["doctor"], ["trace", "synth"]):
        texts = []
        for flag in ("--help", "--help-all"):
            main([*words, flag])
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
        assert texts[0]
