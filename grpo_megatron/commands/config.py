"""`grpo-megatron config`: shows, explains, compares and checks configurations."""

import argparse
import sys

from grpo_megatron.config.command import Command


def add_parser(commands) -> None:
    """Add the command `config` with its options to the command line of `grpo-megatron`.

    commands: the object that ArgumentParser.add_subparsers of `grpo-megatron` returned.
    """
    parser = commands.add_parser("config", help="show, explain, compare and check configurations")
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="print every value in effect, and where it comes from")
    show.add_argument("--only-set", action="store_true", help="leave out the defaults")
    check = actions.add_parser(
        "check",
        help="list everything that is wrong, as far as this machine can tell; exit status 2 if anything is",
    )
    check.add_argument(
        "--for",
        dest="purpose",
        type=Command,
        choices=Command,
        default="train",
        help="command that the configuration is for (default: %(default)s)",
    )
    for action in (show, check):
        action.add_argument("--config", metavar="FILE", help="YAML file")
        action.add_argument(
            "overrides", nargs="*", metavar="key=value", help="values that override the file's"
        )
    explain = actions.add_parser(
        "explain", help="say what a key means and interacts with; for a section, list its keys"
    )
    explain.add_argument("key", metavar="KEY", help="dotted name of a key or section, such as rollout.n")
    diff = actions.add_parser("diff", help="print the keys whose values differ; exit status 1 if any does")
    diff.add_argument("a", metavar="A", help="YAML file")
    diff.add_argument("b", metavar="B", help="YAML file")
    diff.add_argument("--json", action="store_true", help="print JSON, for programs")
    actions.add_parser("docs", help="print the text of docs/config.md")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Execute `grpo-megatron config show | check | explain | diff | docs`, and return the exit status.

    The status is 1 if `diff` found differences, 2 if `check` found violations, and otherwise 0. Raises
    UserError if a file or key cannot be used.
    """
    if options.action == "show":
        from grpo_megatron.preflight.show import show

        print(show(options.config, options.overrides, options.only_set))
    elif options.action == "explain":
        from grpo_megatron.preflight.show import explain

        print(explain(options.key))
    elif options.action == "diff":
        from grpo_megatron.preflight.show import diff_text

        text, differs = diff_text(options.a, options.b, options.json)
        print(text)
        return 1 if differs else 0
    elif options.action == "check":
        return _check(options)
    else:
        from grpo_megatron.preflight.docs import markdown

        print(markdown())
    return 0


def _check(options: argparse.Namespace) -> int:
    from grpo_megatron.preflight.check import check

    report = check(options.config, options.overrides, options.purpose)
    print(report.text(), file=sys.stderr if report.violations else sys.stdout)
    return 2 if report.violations else 0
