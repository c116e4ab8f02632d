"""The served model's files: weights in Hugging Face's layout, tokenizer, and the text of prompts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from accelmark.spec.errors import DataError, raising
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.catalog import folder_module
from accelmark.spec.settings.inference import BENCHMARK_DATA

_MODULE: Final = "serve"


@final
class ServedModel:
    """The model that a case serves; ``directory`` is None where the case has no weights (an endpoint)."""

    def __init__(self, job: JobSpec, work_dir: Path) -> None:
        """Find the given weights, or let the case write its own. Raises DataError: the tokenizer cannot be read."""
        self._job = job
        self._module: Any = folder_module(job.case, _MODULE) if (job.case.path / f"{_MODULE}.py").is_file() else None
        self.directory = job.data_dirs.get("weights")
        if self.directory is None and self._module is not None:
            self.directory = work_dir / "model"
            self.directory.mkdir(exist_ok=True)
            self._module.write_model(self.directory)
        file = None if self.directory is None else self.directory / "tokenizer.json"
        self.tokens: Callable[[str], list[int]] | None = None
        """Function from a text to its tokens, without special ones; like the others None without a tokenizer."""
        self.input_tokens: Callable[[str], list[int]] | None = None
        """Function from a prompt to the tokens that the model computes, with the special ones of its tokenizer."""
        self.text: Callable[[list[int]], str] | None = None
        """Function from tokens to their text."""
        if file is not None and file.is_file():
            from tokenizers import Tokenizer

            with raising(DataError, f"{file}: not a tokenizer", Exception):
                tokenizer = Tokenizer.from_file(str(file))
            self.tokens = lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
            self.input_tokens = lambda text: list(tokenizer.encode(text).ids)
            self.text = tokenizer.decode

    def prompt_text(self) -> str:
        """Return the text from which prompts are taken. Raises DataError: there is none."""
        dirs = {name: path for name, path in self._job.data_dirs.items() if name not in ("weights", *BENCHMARK_DATA)}
        if self._module is not None:
            return str(self._module.prompt_text(dirs))
        files = sorted(path for place in dirs.values() for path in place.rglob("*") if path.suffix in (".md", ".txt"))
        if not files:
            raise DataError(f"the case {self._job.case.name} has no text for prompts: set prompts.source and file")
        return "\n".join(file.read_text(encoding="utf-8") for file in files)

    def sha256(self, report: Callable[[], None]) -> str | None:
        """Hash the model's files with their names; call ``report`` every second, since large files take minutes."""
        if self.directory is None:
            return None
        whole, told_s = hashlib.sha256(), time.monotonic()
        for file in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            whole.update(file.relative_to(self.directory).as_posix().encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    whole.update(block)
                    if (now_s := time.monotonic()) - told_s > 1.0:
                        told_s = now_s
                        report()
        return whole.hexdigest()
