"""Turn the configuration of a verl or RLinf GRPO run into ours.

    python tools/import_config.py run_grpo.sh --out mine.yaml
    python tools/import_config.py rlinf.yaml --from rlinf --out mine.yaml
    python tools/import_config.py - <<< 'python3 -m verl.trainer.main_ppo data.train_batch_size=256 ...'
    python tools/import_config.py --table verl           # the mapping, as docs/coming-from-verl.md has it

The YAML goes to --out, or to standard output; what could not be carried over, and what changed its unit
or definition, to standard error. Exit status 2 if the result does not pass `grpo-megatron config check`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpo_megatron.errors import UserError
from grpo_megatron.importers import SYSTEMS, Settings, import_settings, read_settings, to_yaml
from grpo_megatron.preflight.check import check


def guess(settings: Settings) -> str:
    """verl or rlinf, by whose keys are among the settings. Raises UserError if that leaves it open."""
    known = {name: sum(system.entry_for(key) is not None for key in settings.values) for name, system in SYSTEMS.items()}
    best, other = sorted(known, key=known.get, reverse=True)[:2]
    if known[best] == known[other]:
        raise UserError("cannot tell which system this is for; say --from verl or --from rlinf")
    return best


def convert(source: str, system: str | None, out: Path | None) -> int:
    """Exit status: 0, or 2 if the result breaks a rule."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read: {error}") from error
    settings = read_settings(text)
    imported = import_settings(SYSTEMS[system or guess(settings)], settings)
    result = to_yaml(imported)
    if out is None:
        print(result, end="")
    else:
        out.write_text(result, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "imported.yaml")
        path.write_text(result, encoding="utf-8")
        report = check(str(path), [])
    print(
        f"{imported.report()}\n\ncheck of the result\n{report.text()}".replace(str(path), str(out or "result")), file=sys.stderr
    )
    return 2 if report.violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="launch script, YAML file, or - for standard input")
    parser.add_argument("--from", dest="system", choices=SYSTEMS, help="guessed by the keys if not given")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write our YAML")
    parser.add_argument("--table", choices=SYSTEMS, help="print the mapping and do nothing else")
    options = parser.parse_args()
    if options.table:
        print(SYSTEMS[options.table].table())
        return 0
    if options.source is None:
        parser.error("name a source")
    return convert(options.source, options.system, options.out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
