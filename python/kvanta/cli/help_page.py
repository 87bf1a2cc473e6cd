"""Pages of --help: the options that people use, one group of options, or all of them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from shutil import get_terminal_size
from typing import Any

from kvanta.options.option import GROUPS

ALL = "all"
_WIDTH = 110
_LESS_COMMON = "less_common"


def page_width() -> int:
    """Columns of a page: the terminal's, or 100 in a pipe."""
    return min(_WIDTH, get_terminal_size((100, 24)).columns)


class PageFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's lines, with flags before the one value that they share."""

    def __init__(self, prog: str, *, aliases: bool = True) -> None:
        super().__init__(prog, max_help_position=34, width=page_width())
        self._aliases = aliases

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        flags = action.option_strings if self._aliases else action.option_strings[:1]
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        line = ", ".join(flags) + value
        return textwrap.fill(line, self._width - 2, subsequent_indent=" " * 6, break_on_hyphens=False)


def less_common(action: argparse.Action) -> argparse.Action:
    """Marks an option that --help leaves to --help=GROUP, or to --help-all."""
    setattr(action, _LESS_COMMON, True)
    return action


class Section:
    """Options under one heading of a page."""

    def __init__(self, name: str, actions: Iterable[argparse.Action]) -> None:
        self.name = name
        """A key of GROUPS, or of the command's own."""
        self.actions = [each for each in actions if each.help != argparse.SUPPRESS and not isinstance(each, ShowHelp)]
        self.common = [action for action in self.actions if not getattr(action, _LESS_COMMON, False)]


def sections(groups: Iterable[argparse._ArgumentGroup]) -> list[Section]:
    """The groups with visible options: first a command's own, then those of GROUPS in their order."""
    order = list(GROUPS)
    found = [Section(str(group.title), group._group_actions) for group in groups]
    found.sort(key=lambda section: 1 + order.index(section.name) if section.name in order else 0)
    return [section for section in found if section.actions]


def help_page(
    prog: str, description: str, groups: Sequence[argparse._ArgumentGroup], wanted: str, about: dict[str, str]
) -> str:
    """`wanted`: empty, ALL, or the name of a group. `about`: what each group of `groups` is about."""
    listed = sections(groups)
    formatter = PageFormatter(prog, aliases=bool(wanted))
    arguments = [action for section in listed for action in section.actions if not action.option_strings]
    words = [each.dest if each.required or each.dest == "MODEL" else f"[{each.dest}]" for each in arguments]
    formatter.add_usage(" ".join(["%(prog)s", *words, "[option ...]"]), [], [])
    if wanted in ("", ALL):
        formatter.add_text(_filled(description).replace("%", "%%"))
    for section in listed:
        actions = section.actions if wanted else section.common
        if wanted not in ("", ALL, section.name) or not actions:
            continue
        topic = about.get(section.name, "") if wanted else ""
        formatter.start_section(f"{section.name} ({topic})" if topic else section.name)
        formatter.add_arguments(actions)
        formatter.end_section()
    more = {} if wanted else {each.name: len(each.actions) - len(each.common) for each in listed}
    return formatter.format_help() + _more({name: count for name, count in more.items() if count}, about)


def _more(counts: dict[str, int], about: dict[str, str]) -> str:
    if not counts:
        return ""
    rows = [f"  {name:<12} {counts[name]:>3}   {about.get(name, '')}" for name in counts]
    title = f"{sum(counts.values())} more options: --help=GROUP shows a group, --help-all everything"
    return "\n".join(["", title, *rows, ""])


def _filled(text: str) -> str:
    """Paragraphs filled to the page's width; indented lines, such as examples, stay unchanged."""
    parts: list[str] = []
    for line in text.splitlines():
        if parts and parts[-1].strip() and line.strip() and not parts[-1].startswith(" ") and not line.startswith(" "):
            parts[-1] += " " + line
        else:
            parts.append(line)
    return "\n".join(
        part if part.startswith(" ") else textwrap.fill(part, page_width(), break_on_hyphens=False) for part in parts
    )


class ShowHelp(argparse.Action):
    """Prints a page and ends the command."""

    def __init__(self, *, dest: str, **named: Any) -> None:
        super().__init__(dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, **named)
        self._wanted = dest if dest == ALL else ""

    def __call__(self, parser: Any, *_: object, **__: object) -> None:
        print(parser.help_text(self._wanted), end="")
        parser.exit()
