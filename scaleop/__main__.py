"""The command line: `python -m scaleop convert ...` (scaleop.convert). Runs and pages have their own (README)."""

import argparse

from scaleop.arms import ARMS
from scaleop.conversion_request import DTYPES, KEEP
from scaleop.convert import convert
from scaleop.race import refusals
from scaleop.smollm2 import NAME

EPILOG = """
Left out, text and sizes follow the donor. Of the hub: the Pile, 10,000 sequences of 128 tokens, the first 1,000 for
second moments (the paper's). A folder, or SmolLM2 from its package: the text that comes with scaleop,
4,000 of 128, 1,000 for moments.
The result wants training: it is a start, and of no use as it stands.
"""


def parser() -> argparse.ArgumentParser:
    """All that may be said on the command line."""
    main = argparse.ArgumentParser(prog="python -m scaleop", description="Make large transformers small.")
    add = main.add_subparsers(required=True, metavar="convert").add_parser(
        "convert", help="convert a checkpoint to another size", epilog=EPILOG,
        description="Convert a pretrained checkpoint to another size, block by block, for training.").add_argument
    add("donor", help=f"hub name (owner/name@revision), folder, or {NAME}")
    add("--like", required=True, help="the target's sizes: a model, a config.json, or hidden=1024,heads=16,layers=24,"
        "mlp=4096,vocab=50304 (what is left out stays the donor's; kv_heads and head_dim follow heads and hidden)")
    add("--out", required=True, help="folder to write")
    add("--arm", default="hybrid_rs", help=f"{', '.join(arm for arm in ARMS if ARMS[arm].maps)}, or a variant of "
        "scaleop.arms (default: %(default)s)")
    add("--calibration", dest="text", help="embedded, pile, or a .txt (a document a line), .jsonl or .parquet file "
        "(column text)")
    add("--sequences", type=int, help="sequences of calibration text")
    add("--length", type=int, help="tokens of a sequence")
    add("--moment-sequences", type=int, help="how many of the sequences give second moments")
    add("--moments", choices=KEEP, default="full", help="full: keep every block's whole second moments in "
        "the store, for any later shape; kept: only this shape's columns (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="of the result")
    add("--no-spectra", dest="spectra", action="store_false", help="leave out the solves' condition numbers and "
        "effective ranks, about half of their time")
    add("--device", help="of the forward pass (default: the GPU if there is one)")
    add("--spill", type=float, default=1.0, help="GB (10^9 bytes) of hidden states above which they wait on disk "
        "(default: %(default)s)")
    add("--force", action="store_true", help="replace the folder if an earlier conversion made it")
    return main


def main() -> None:
    """Convert, or say in a sentence why not."""
    arguments = vars(parser().parse_args())
    with refusals():
        facts = convert(**arguments)
    seconds, peak = facts["seconds"], facts["peak_memory_bytes"] / 1e9
    print(f"{arguments['out']}: {facts['donor']['name']} by {facts['arm']['name']}, {seconds['statistics']:.0f} s for "
          f"statistics, {seconds['conversion']:.0f} s for weights, {peak:.2f} GB at most. It wants training.")


if __name__ == "__main__":
    main()
