"""A process of its own beside `zse serve --cache-converted`: keeps converted copies of models, at the lowest priority.

python -m zse.cli.keep_converted FAMILY QUANTIZE MOST PATH...          (QUANTIZE: - for none; MOST: bytes of all copies, - for any)
"""

import os
import sys

from zse.cli.convert import tokenizer_image
from zse.errors import ZSEError
from zse.formats import converted
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.load import is_packed, plan_model
from zse.quant.policy import Policy
from zse.quant.scheme import LAYOUT, ROWS


def _is_made(info, matrix, family: str) -> bool:
    """Whether a load makes the weights of what the file holds. A CPU repacks GGUF's blocks, too: 0.2 s of the 0.6 that
    Gemma 3 270M takes."""
    return is_packed(info, matrix) or family == "cpu" and info.layout == "ggml" and not info.is_dense


def main(arguments: list[str]) -> int:
    family, wanted, most, *paths = arguments
    quantize = None if wanted == "-" else wanted
    os.nice(19)

    def make(source: str, out: str) -> None:
        layout = ROWS if family == "gpu" else LAYOUT
        policy = None if quantize is None else Policy.of_load(quantize, family)
        group = policy.group if policy is not None and policy.quant.startswith("int") else None
        convert(source, out, policy and policy.quant, group, layout=layout, tokenizer_image=tokenizer_image)

    for path in paths:
        try:
            with open_model(path) as source:
                plan = plan_model(source, quantize=quantize, family=family)
            if not any(_is_made(part.info, matrix, family) for matrix in plan.matrices for part in matrix.parts):
                continue
            if most != "-":
                converted.check_room(path, int(most))
            converted.write(path, quantize, family, make)
        except (ZSEError, OSError) as error:
            sys.stderr.write(f"zse: no converted copy of {path}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
