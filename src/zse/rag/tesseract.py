"""Tesseract's library by tesserocr (extra `ocr`), as an OCR command: `--ocr-command 'python -m zse.rag.tesseract {image} eng+deu'`.

It needs the languages' files (`eng.traineddata`) in TESSDATA_PREFIX, or where the package was built to look."""

import sys
from importlib import import_module


def main(arguments: list[str]) -> int:
    """Print the text of an image; arguments: its path, and languages (eng)."""
    if len(arguments) not in (1, 2):
        print("usage: python -m zse.rag.tesseract IMAGE [LANGUAGES]", file=sys.stderr)
        return 2
    try:
        tesserocr = import_module("tesserocr")
    except ModuleNotFoundError:
        print("tesserocr is not installed: pip install 'zse[ocr]'", file=sys.stderr)
        return 1
    with tesserocr.PyTessBaseAPI(lang=arguments[1] if len(arguments) == 2 else "eng") as tesseract:
        tesseract.SetImageFile(arguments[0])
        sys.stdout.buffer.write(tesseract.GetUTF8Text().encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
