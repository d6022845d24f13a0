"""Convert the configuration of a verl or RLinf GRPO run to ours.

    python tools/import_config.py run_grpo.sh --out mine.yaml
    python tools/import_config.py run_grpo.sh run.total_steps=435 reward.function=math --out mine.yaml
    python tools/import_config.py run_grpo.sh --env DEVICE=gpu --out mine.yaml
    python tools/import_config.py outputs/2026-01-31/12-00-00 --out mine.yaml     # Hydra's folder of a run
    python tools/import_config.py rlinf.yaml --from rlinf --accept --out mine.yaml
    python tools/import_config.py - <<< 'python3 -m verl.trainer.main_ppo data.train_batch_size=256 ...'
    python tools/import_config.py --table verl           # the mapping, as in docs/coming-from-verl.md
    python tools/import_config.py --survey FOLDER        # the outcome for each script and YAML file in it

The YAML is written to --out or standard output, and a report on every setting to standard error. The report
begins with everything that changes what is trained: an adapter that is not carried over, another reward,
another number of steps. If there is any such change, nothing is written, unless you set our keys to the
wanted values with key=value, or pass --accept. The exit status is 2 if nothing is written for this reason, if
the source cannot be read, or if the result does not pass `grpo-megatron config check`.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_megatron.config.load import COMMAND_LINE, must_be_legal, resolve
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.importers import (
    SYSTEMS,
    Settings,
    import_settings,
    read_hydra_folder,
    read_settings,
    to_yaml,
)
from grpo_megatron.importers.settings import ONLY_THESE
from grpo_megatron.preflight.check import Report, check, load_config

SCRIPTS = (".sh", ".yaml", ".yml", ".toml")


def guess(settings: Settings) -> str:
    """Guess the system that the settings are from. Return the key of SYSTEMS that knows more of their keys.

    Raises UserError if verl and RLinf know equally many of them.
    """
    known = {
        name: sum(system.entry_for(key) is not None for key in settings.values)
        for name, system in SYSTEMS.items()
    }
    best, other = sorted(known, key=known.get, reverse=True)[:2]
    if known[best] == known[other]:
        raise UserError(
            "cannot tell which system the configuration is for; give --from verl or --from rlinf; "
            + ONLY_THESE
        )
    return best


def values_given(overrides: list[str]) -> dict[str, Any]:
    """Parse key=value arguments with keys of grpo-megatron. Return {key: value of the key's type}.

    Raises UserError for an argument that a run would not accept as an override.
    """
    settings = resolve(None, overrides)
    must_be_legal(list(settings.refused.values()))
    return {key: value for key, value in settings.values.items() if settings.origins[key] == COMMAND_LINE}


def variables_given(settings: list[str]) -> dict[str, str]:
    """Parse the values of --env, texts of the form NAME=VALUE, into {NAME: VALUE}.

    Raises UserError for a text of any other form.
    """
    for setting in settings:
        if not re.match(r"[A-Za-z_]\w*=", setting, flags=re.ASCII):
            raise UserError(f"--env {setting} must have the form NAME=VALUE")
    return dict(setting.split("=", 1) for setting in settings)


def read(source: str, launch: int | None, environment: dict[str, str]) -> Settings:
    try:
        path = Path(source)
        if path.is_dir() or path.name == "overrides.yaml":
            return read_hydra_folder(path if path.is_dir() else path.parent)
        text = sys.stdin.read() if source == "-" else path.read_text(encoding="utf-8")
        return read_settings(text, launch, source.endswith((".yaml", ".yml")), environment)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{source} cannot be read: {error}") from error
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def checked(text: str, name: str) -> Report:
    """Return the report of `grpo-megatron config check` on the imported YAML.

    text: the YAML.
    name: name of the YAML in the report.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "imported.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            report = check(str(path), [])
        except UserError as error:
            report = Report([str(error)])
        report.violations = [line.replace(str(path), name) for line in report.violations]
    return report


def write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another file") from error


def convert(options: argparse.Namespace) -> int:
    """Import one launch script or YAML file, write our YAML, and print the report.

    options: parsed command line of this tool.

    Returns the exit status: 2 if nothing was written because the user must accept a change, or if the result
    does not pass the check, else 0. Raises UserError if the source cannot be read.
    """
    settings = read(options.source, options.launch, variables_given(options.env))
    system = SYSTEMS[options.system or guess(settings)]
    imported = import_settings(system, settings, values_given(options.overrides))
    if imported.needs_acceptance and not options.accept:
        print(
            f"{imported.report()}\n\nerror: the result was not written, because it may train something "
            "different (see above). Give our keys as key=value and the script's variables as --env "
            "NAME=VALUE, or accept all of it with --accept.",
            file=sys.stderr,
        )
        return 2
    text = to_yaml(imported)
    write(text, options.out)
    report = checked(text, str(options.out or "result"))
    print(f"{imported.report()}\n\ncheck of the result\n{report.text()}", file=sys.stderr)
    return 2 if report.violations else 0


def outcome(
    source: str, system: str | None, given: dict[str, Any], environment: dict[str, str]
) -> tuple[str, str]:
    """Return (outcome, main reason) of importing one file, for --survey, without writing anything.

    The outcome is "legal", "needs --accept" or "refused". The reason is empty for "legal".

    system: key of SYSTEMS, verl or rlinf. None: guess it.
    given: {key of grpo-megatron: value} that the user sets.
    environment: environment variables of the launch script.
    """
    try:
        settings = read(source, None, environment)
        imported = import_settings(SYSTEMS[system or guess(settings)], settings, given)
    except UserError as error:
        return "refused", str(error).removeprefix(f"{source}: ")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.yaml")
        path.write_text(to_yaml(imported), encoding="utf-8")
        try:
            load_config(str(path), [])
        except UserError as error:
            return "refused", str(error).replace("the configuration is invalid:\n  - ", "").replace(
                str(path), "result"
            )
    if imported.needs_acceptance:
        return "needs --accept", [*imported.changes_training, *imported.unread, *imported.unknown][0]
    return "legal", ""


def survey(folder: Path, system: str | None, given: dict[str, Any], environment: dict[str, str]) -> int:
    """Print the outcome of importing each script, YAML and TOML file in a folder, then the counts as JSON.

    The arguments system, given and environment are those of `outcome`, for all files.

    Returns the exit status 0. Raises UserError if there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"--survey {folder} is not a folder")
    files = sorted(path for path in folder.rglob("*") if path.suffix in SCRIPTS and path.is_file())
    totals = Counter({"files": len(files), "legal": 0, "needs --accept": 0, "refused": 0})
    for path in files:
        kind, reason = outcome(str(path), system, given, environment)
        totals[kind] += 1
        print(f"{kind:14}  {path.relative_to(folder)}  {' '.join(reason.split())[:160]}")
    print(json_text(totals))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        nargs="?",
        help="launch script, YAML file, Hydra's output folder of a run, or - for standard input",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="our keys to set in the result")
    parser.add_argument(
        "--from",
        dest="system",
        choices=SYSTEMS,
        help="stack that the source is from; default: guessed from its keys",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write our YAML to")
    parser.add_argument(
        "--accept", action="store_true", help="write the result even if it trains something else"
    )
    parser.add_argument(
        "--launch",
        type=int,
        metavar="NUMBER",
        help="index of the launch command, from 1, if the script has several",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the script; may be repeated",
    )
    parser.add_argument("--table", choices=SYSTEMS, help="only print the mapping of this system's keys")
    parser.add_argument(
        "--survey",
        type=Path,
        metavar="FOLDER",
        help="only print the outcome for each script, YAML and TOML file in FOLDER",
    )
    options = parser.parse_intermixed_args()
    if options.table:
        print(SYSTEMS[options.table].table())
        return 0
    if options.survey:
        given = values_given([options.source, *options.overrides] if options.source else [])
        return survey(options.survey, options.system, given, variables_given(options.env))
    if options.source is None:
        parser.error("give a launch script or YAML file")
    return convert(options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
