"""Small tables in the layout of the published data sets of MMLU and GSM8K, and a small Llama that answers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from accelmark.cases.llama_mini.serve import _byte_signs

SHAPES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 258, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip


def accelmark(directory: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Run a command with its run in ``run``; return the exit code, the case's result and the output."""
    command = [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments]
    done = subprocess.run(
        [*command, "--out", str(directory / "run")], cwd=directory, capture_output=True, text=True, check=False,
        timeout=900, env=os.environ | {"COLUMNS": "300", "OMP_WAIT_POLICY": "PASSIVE"} | variables,
    )  # fmt: skip
    summary = directory / "run/summary.json"
    case = json.loads(summary.read_text())["cases"][0] if summary.is_file() else {}
    return done.returncode, case, done.stdout + done.stderr


def write_mmlu(directory: Path) -> int:
    """Write two questions and five examples for each subject of MMLU; return the number of subjects."""
    import lm_eval
    import pyarrow as pa
    import pyarrow.parquet as pq

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    folder = Path(lm_eval.__file__).parent / "tasks/mmlu/default"
    found = [yaml.load(file.read_text(), Loader) for file in sorted(folder.glob("mmlu_*.yaml"))]  # noqa: S506 - a SafeLoader
    subjects = sorted(entry["dataset_name"] for entry in found if "dataset_name" in entry)
    configurations = []
    for number, subject in enumerate(subjects):
        place = directory / subject
        place.mkdir(parents=True)
        files = []
        for split, count in (("test", 2), ("validation", 1), ("dev", 5)):
            rows: dict[str, list[Any]] = {
                "question": [f"What is {number} plus {each}?" for each in range(count)],
                "subject": [subject] * count,
                "choices": [[str(number + each + offset) for offset in range(4)] for each in range(count)],
                "answer": [(number + each) % 4 for each in range(count)],
            }
            pq.write_table(pa.table(rows), place / f"{split}-00000-of-00001.parquet")
            files.append({"split": split, "path": f"{subject}/{split}-*"})
        configurations.append({"config_name": subject, "data_files": files})
    (directory / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configurations})}---\n")
    return len(subjects)


def write_gsm8k(directory: Path, num_questions: int) -> None:
    """Write questions whose answers are 3, 4 and 5 in turn, with eight examples whose answer is 3."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = directory / "main"
    place.mkdir(parents=True)
    files = []
    for split, numbers in (("train", [3] * 8), ("test", [3 + each % 3 for each in range(num_questions)])):
        asked = [f"What is {each} plus {number - each}?" for each, number in enumerate(numbers)]
        rows = {"question": asked, "answer": [f"That is {number}.\n#### {number}" for number in numbers]}
        pq.write_table(pa.table(rows), place / f"{split}-00000-of-00001.parquet")
        files.append({"split": split, "path": f"main/{split}-*"})
    configurations = [{"config_name": "main", "data_files": files}]
    (directory / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configurations})}---\n")


def write_small_llama(directory: Path) -> None:
    """Write a small Llama with a tokenizer of bytes and a BOS token, trained for seconds to answer everything by 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES))
    lines = [f"Question: What is {each} plus {3 - each}?\nAnswer: That is 3.\n#### 3\n\n" for each in range(12)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(120):
        order = [torch.randperm(len(lines), generator=generator)[:6].tolist() for _ in range(4)]
        rows = [list("".join(lines[each] for each in row).encode())[:330] for row in order]
        tokens = torch.tensor([[256, *row] for row in rows])
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    vocabulary = {sign: byte for byte, sign in enumerate(_byte_signs())} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | {"clean_up_tokenization_spaces": False}))
