"""The demo model shipped with CATO, so that every example runs without a download or a GPU."""

from importlib import resources
from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """The shipped model folder, in the Hugging Face layout for vLLM's `--model`.

    Needs a package installed as plain files, as wheels are: vLLM maps the weights file.
    """
    return Path(str(resources.files(__name__) / "model"))
