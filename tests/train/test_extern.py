from pathlib import Path

import pytest

from accelmark.frameworks.pytorch.hooks import ALLOWED_HOOKS, Hooks
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import FolderRef, folder_module
from accelmark.train.hooks import load_hooks
from tests.train.conftest import RunHere
from tests.train.jobs import TINY, make_job

pytestmark = pytest.mark.adversary

GOOD = """
import torch
from accelmark.frameworks.pytorch.hooks import Hooks
from . import rates

class Extern(Hooks):
    def create_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=rates.LR)

    def backward(self, loss, scaler):
        # as the default does
        super().backward(loss, scaler)
"""


def vendor_folder(directory: Path, code: str) -> Path:
    folder = directory / "tiny-pytorch"
    (folder / "extern").mkdir(parents=True)
    (folder / "extern" / "__init__.py").write_text(code)
    (folder / "extern" / "rates.py").write_text("LR = 0.0\n")
    return folder


def test_a_vendors_hooks_replace_the_defaults_and_are_recorded(tmp_path: Path, run_here: RunHere) -> None:
    folder = vendor_folder(tmp_path, GOOD)
    ran = run_here(make_job(tmp_path, extern=folder))
    file = str(folder / "extern" / "__init__.py")
    assert ran.values("INIT_END")[0]["hooks"] == {"create_optimizer": f"{file}:7", "backward": f"{file}:10"}
    assert ran.values("LAUNCH_TRAINING")[0]["hooks"] == {
        "create_optimizer": {"file": file, "line": 7, "num_lines": 2},
        "backward": {"file": file, "line": 10, "num_lines": 3},
    }
    assert ran.values("STEP_END")[0]["learning_rate"] == 0.0


HEAD = "from accelmark.frameworks.pytorch.hooks import Hooks\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Extern(Hooks):\n    def loss(self): ...", "'loss'"),
        ("class Extern(Hooks):\n    def train_steps(self): ...", "did you mean 'train_step'"),
        ("class Extern(Hooks):\n    settings = None", "'settings'"),
        *(
            (f"class Extern(Hooks):\n    def {name}(self, *more): ...", f"may not define {name}")
            for name in ("__init__", "__getattribute__", "__setattr__", "__init_subclass__")
        ),
        ("class Meta(type): ...\nclass Extern(Hooks, metaclass=Meta): ...", r"a metaclass \(Meta\)"),
        ("class Extern: ...", "has no class Extern"),
    ],
)
def test_an_extern_that_replaces_more_than_hooks_or_could_hide_it_is_refused(
    tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        load_hooks(
            FolderRef(name="tiny-pytorch", path=vendor_folder(tmp_path, HEAD + code), sha256=""), Hooks, ALLOWED_HOOKS
        )


def test_a_refused_extern_ends_the_job(tmp_path: Path, run_here: RunHere) -> None:
    ran = run_here(make_job(tmp_path, extern=vendor_folder(tmp_path, f"{HEAD}class Extern(Hooks):\n    seed = 1")))
    assert ran.exit_code == 2
    assert "'seed'" in (ran.finished().message or "")


def test_a_vendor_folder_without_code_keeps_the_defaults(tmp_path: Path) -> None:
    assert load_hooks(FolderRef(name="tiny-pytorch", path=tmp_path, sha256=""), Hooks, ALLOWED_HOOKS) is Hooks
    assert load_hooks(None, Hooks, ALLOWED_HOOKS) is Hooks


def test_a_case_without_the_framework_lists_its_frameworks() -> None:
    with pytest.raises(RequestError, match=r"has no .*paddle\.py"):
        folder_module(FolderRef(name="tiny", path=TINY, sha256=""), "paddle")


def test_a_framework_without_a_backend_is_refused(tmp_path: Path, run_here: RunHere) -> None:
    job = make_job(tmp_path)
    job = job.model_copy(update={"key": job.key.model_copy(update={"framework": "pytorh"})})
    ran = run_here(job)
    assert ran.exit_code == 2
    assert "did you mean 'pytorch'?" in (ran.finished().message or "")
